"""Optimizers: update rules as pure functions, and the sharded states that they update.

Imports buckets, memory, comm and the packages below them.
"""
