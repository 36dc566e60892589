"""Cost: closed forms for the communication, FLOPs and memory of layers, without torch.

Used by nn, which must issue exactly these events, and by the planner, which sums them. Imports
config, sharding and grid.
"""
