"""Memory of a run: what fits is measured and decided before the first step.

Imports the planner's offload search, the training step, and what is below.
"""
