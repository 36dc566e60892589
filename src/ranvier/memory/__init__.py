"""Memory: pinned host memory, activation offload, and what recomputation saves.

Imports comm and what is below.
"""
