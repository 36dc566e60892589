"""Evaluation: lm-eval tasks, perplexity, and code generation.

Imports train, infer and what is below.
"""
