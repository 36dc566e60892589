"""Buckets: parameters that are gathered, reduced, offloaded and updated together, and when.

The all-gather of weights (FSDP's unshard) is prefetched in `scheduler`. Imports memory, comm and
what is below.
"""
