"""Inference: text from a trained model."""
