"""Peak memory of a rank: model states, activations, chunks of logits.

Imports the descriptions of clusters and models in planner, and cost.
"""
