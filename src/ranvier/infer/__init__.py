"""Inference: text and log-probabilities from a trained model.

Imports parallel, pipeline, data and what is below.
"""
