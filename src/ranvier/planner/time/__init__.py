"""Step time: compute, communication and offload of a layout.

Imports the descriptions of clusters and models in planner, and cost.
"""
