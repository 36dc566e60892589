"""Optimizers: update rules as pure functions, and the sharded state they work on."""
