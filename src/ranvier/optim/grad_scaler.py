"""Dynamic loss scaling: prevents underflows of fp16 gradients, and adapts to overflows."""

from __future__ import annotations

import torch
from torch import Tensor

INITIAL_SCALE = 2.0**16
MIN_SCALE = 1.0
MAX_SCALE = 2.0**24
GROWTH_INTERVAL = 500
"""Number of finite steps after which the scale doubles."""


class GradScaler:
    """The loss scale, which is halved after an overflow and doubled after enough finite steps.

    It is stored on the device, so the host never waits for it.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.scale = torch.full((), INITIAL_SCALE, device=device)
        self.growth_tracker = torch.zeros((), device=device)
        """Number of finite steps since the last change."""

    def is_at_minimum(self) -> Tensor:
        """Whether the scale cannot be reduced any further after an overflow."""
        return self.scale <= MIN_SCALE

    @torch.no_grad()
    def update(self, finite: Tensor) -> None:
        """Updates the scale. finite: whether the scaled gradients of a step were finite."""
        # torch.where instead of branches, as `finite` is on the device.
        count = torch.where(finite, self.growth_tracker + 1.0, 0.0)
        grown = torch.where(count >= GROWTH_INTERVAL, self.scale * 2.0, self.scale)
        self.scale.copy_(torch.where(finite, grown, self.scale / 2.0).clamp(MIN_SCALE, MAX_SCALE))
        self.growth_tracker.copy_(torch.where(count >= GROWTH_INTERVAL, 0.0, count))
