"""Buckets: parameters that are gathered, reduced, offloaded and updated together.

`scheduler` prefetches the all-gather of weights (FSDP's unshard) and schedules the reduction of
gradients. Imports memory, comm and the packages below them.
"""
