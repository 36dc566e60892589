"""Memory of a run: what fits is measured and decided before the first step.

Imports the planner's search for what is offloaded, and what trains.
"""
