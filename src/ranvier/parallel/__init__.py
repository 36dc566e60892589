"""Parallelize: a plain PyTorch model becomes a parallel one from outside.

Imports pipeline, nn and what is below.
"""
