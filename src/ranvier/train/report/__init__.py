"""The report of a run as a page: curves, experts, pipeline.

Imports html and what is below train.
"""
