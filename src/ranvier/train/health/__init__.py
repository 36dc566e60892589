"""Health of a run: loss spikes, non-finite numbers, replicas that differ, determinism.

Imports what is below train.
"""
