"""Parallel layers: each holds its shard of the work on the grid, and has its serial twin's name.

Imports buckets, memory, comm, cost and what is below; never a model.
"""
