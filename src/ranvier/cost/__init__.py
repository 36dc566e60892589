"""Cost: closed forms for the communication and memory of layers, without torch.

Asked by nn, which must issue exactly these events, and by the planner, which adds them up. Imports
config, sharding and grid.
"""
