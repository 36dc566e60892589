"""Loss scale: fp16 gradients are kept away from zero by a factor that follows their overflows."""

from __future__ import annotations

import torch
from torch import Tensor

INITIAL_SCALE = 2.0**16
MIN_SCALE = 1.0
MAX_SCALE = 2.0**24
GROWTH_INTERVAL = 500
"""Good steps after which the scale doubles."""


class GradScaler:
    """A factor of the loss that lives on the device: halved by an overflow, doubled with patience.

    No host waits for it.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.scale = torch.full((), INITIAL_SCALE, device=device)
        self.growth_tracker = torch.zeros((), device=device)
        """Good steps since the last change."""

    def is_at_minimum(self) -> Tensor:
        """Whether an overflow now could not be mended by a smaller scale."""
        return self.scale <= MIN_SCALE

    @torch.no_grad()
    def update(self, finite: Tensor) -> None:
        """Learn from a step whether its scaled gradients were finite."""
        count = torch.where(finite, self.growth_tracker + 1.0, 0.0)
        grown = torch.where(count >= GROWTH_INTERVAL, self.scale * 2.0, self.scale)
        self.scale.copy_(torch.where(finite, grown, self.scale / 2.0).clamp(MIN_SCALE, MAX_SCALE))
        self.growth_tracker.copy_(torch.where(count >= GROWTH_INTERVAL, 0.0, count))
