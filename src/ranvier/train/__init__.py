"""Training: the step, the loop, and the parts that only they need.

Imports planner, infer, parallel, optim, data, checkpoint and what is below.
"""
