"""Dynamic loss scaling: keeps fp16 gradients from underflowing, and adapts to overflows."""

from __future__ import annotations

import torch
from torch import Tensor

INITIAL_SCALE = 2.0**16
MIN_SCALE = 1.0
MAX_SCALE = 2.0**24
GROWTH_INTERVAL = 500
"""Finite steps after which the scale doubles."""


class GradScaler:
    """Loss scale on the device: halved after an overflow, doubled after good steps.

    The host never waits for it.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.scale = torch.full((), INITIAL_SCALE, device=device)
        self.growth_tracker = torch.zeros((), device=device)
        """Finite steps since the last change."""

    def is_at_minimum(self) -> Tensor:
        """Whether the scale cannot be lowered any further after an overflow."""
        return self.scale <= MIN_SCALE

    @torch.no_grad()
    def update(self, finite: Tensor) -> None:
        """Adapt the scale to whether the scaled gradients of a step were finite."""
        # torch.where instead of branches: `finite` is on the device.
        count = torch.where(finite, self.growth_tracker + 1.0, 0.0)
        grown = torch.where(count >= GROWTH_INTERVAL, self.scale * 2.0, self.scale)
        self.scale.copy_(torch.where(finite, grown, self.scale / 2.0).clamp(MIN_SCALE, MAX_SCALE))
        self.growth_tracker.copy_(torch.where(count >= GROWTH_INTERVAL, 0.0, count))
