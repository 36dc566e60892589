"""Integrations: a user's own loop, Fabric, Accelerate, Transformers.

Imports train, infer, parallel and what is below.
"""
