"""Learning-rate schedules: the learning rate of each step as a fraction of its maximum."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["cosine", "wsd"]


def cosine_decay(done: float, *, floor: float) -> float:
    """Returns a cosine decay from 1 to `floor` for `done` from 0 to 1."""
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done))


def stable_then_linear(done: float, *, cooldown: float, floor: float) -> float:
    """Returns 1, then in the last fraction `cooldown` of the steps a linear decay to `floor`."""
    if cooldown > 0.0:
        left = min((1.0 - done) / cooldown, 1.0)
    else:
        left = 1.0
    return floor + (1.0 - floor) * left


def lr_factor(
    step: int, *, kind: Schedule, steps: int, warmup: int, cooldown: float, floor: float
) -> float:
    """Returns the factor of the learning rate at a step, counted from 0.

    It increases linearly to 1 in `warmup` steps, then follows the schedule in the remaining steps.
    """
    if step < warmup:
        return (step + 1) / warmup
    done = min((step - warmup) / max(steps - warmup, 1), 1.0)
    if kind == "cosine":
        return cosine_decay(done, floor=floor)
    return stable_then_linear(done, cooldown=cooldown, floor=floor)
