"""Profiler: where the time of a step goes, kernel by kernel.

Imports train and what is below.
"""
