"""Profiler: the time of a step, kernel by kernel.

Imports train and what is below.
"""
