"""Evaluation: lm-eval tasks, needles in a haystack, perplexity, and code generation.

Imports train, infer and what is below.
"""
