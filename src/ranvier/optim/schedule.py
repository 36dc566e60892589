"""Schedules: the learning rate as a function of the step."""

from __future__ import annotations

import math


def cosine(step: int, *, steps: int, warmup: int, lr: float, floor: float = 0.1) -> float:
    """Linear to `lr` in `warmup` steps, then a cosine down to `floor` of it; steps count from 0."""
    if step < warmup:
        return lr * (step + 1) / warmup
    done = (step - warmup) / max(steps - warmup, 1)
    return lr * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0))))
