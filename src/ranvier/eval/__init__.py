"""Evaluation: tasks, perplexity, programs that are run."""
