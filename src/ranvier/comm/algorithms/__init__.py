"""Algorithms of collectives as pure descriptions: each is a file here and a line of `registry`.

Imports errors only, and no torch.
"""
