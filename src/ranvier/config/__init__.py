"""Config: the settings of a run, what of them fits together, and how they are read and written.

Imports errors and the configs of models; no torch, so that a plan starts at once.
"""
