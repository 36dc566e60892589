"""Peak memory of a rank: model states, activations, model chunks, logits.

Imports the descriptions of clusters and models in planner, and cost.
"""
