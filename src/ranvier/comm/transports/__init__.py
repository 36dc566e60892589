"""Transports of collectives: messages of schedules, shared memory, symmetric memory.

They know process groups, ranks and tensors, but neither axes nor grids, which are built on them.
"""
