"""Training: the step, the loop, and what a run shows."""
