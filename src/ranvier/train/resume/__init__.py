"""Resuming a run: its directory, its checkpoints, and smaller grids after a loss of ranks.

Imports checkpoint and what is below.
"""
