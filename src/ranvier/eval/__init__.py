"""Evaluation: lm-eval tasks, perplexity, and programs that a model writes.

Imports train, infer and what is below.
"""
