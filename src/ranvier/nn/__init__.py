"""Parallel layers: each knows its part of the work on the grid, and bears its serial twin's name.

Imports buckets, memory, comm, cost and what is below; never a model.
"""
