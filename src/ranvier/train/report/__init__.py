"""The report of a run as an HTML page: curves, experts, pipeline.

Imports html and what is below train.
"""
