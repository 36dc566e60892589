"""Pipeline: stages along the pipe axis, their schedules, the executor and a simulator.

Imports nn, buckets, comm and what is below.
"""
