"""Turns a plain PyTorch model into a parallel one, without changes to the model.

Imports pipeline, nn and the packages below them.
"""
