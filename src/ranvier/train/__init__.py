"""Training: the step, the loop, and what only they need.

Imports planner, infer, parallel, optim, data, checkpoint and what is below.
"""
