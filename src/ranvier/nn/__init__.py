"""Parallel layers. Each has the name of the serial layer that it replaces, and holds one shard.

Imports buckets, memory, comm, cost and the packages below them; never a model.
"""
