"""Scaling laws: collect losses of runs, fit laws, prescribe shapes and tokens, design runs.

Needs numpy but not torch.
"""
