"""Checkpoints: state by name and place."""
