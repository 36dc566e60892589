"""Checkpoints: state by name and global slice, so that any grid can load what another saved.

Imports buckets, sharding and what is below.
"""
