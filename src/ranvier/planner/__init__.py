"""Planner: predicts step time and memory of a layout and searches for the best one.

Imports cost, config and what is below; torch only to build a model spec or to measure a device.
"""
