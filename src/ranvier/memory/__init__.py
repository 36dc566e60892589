"""Memory: what a model needs, and which activations are worth keeping."""
