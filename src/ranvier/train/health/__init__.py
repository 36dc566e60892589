"""Health of a run: loss spikes, non-finite values, replicas that differ, determinism.

Imports what is below train.
"""
