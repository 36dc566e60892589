"""Optimizers: update rules as pure functions, and the sharded states they work on.

Imports buckets, memory, comm and what is below.
"""
