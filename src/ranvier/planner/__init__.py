"""Planner: step time and memory of a layout, predicted, and the search for the best one.

Imports cost, config and what is below; torch only where a model is listed or a device measured.
"""
