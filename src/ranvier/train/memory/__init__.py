"""Memory of a run: chosen in closed form and verified by trial steps, before the first step.

Imports the planner's offload search, the training step, and what is below.
"""
