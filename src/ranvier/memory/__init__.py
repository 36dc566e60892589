"""Memory: pinned host memory, activation offload, and saved results for recomputation.

Imports comm and the packages below it.
"""
