"""Loss scale: fp16 gradients are kept away from zero by a factor that follows their overflows."""

from __future__ import annotations

import torch
from torch import Tensor

START, LEAST, MOST = 2.0**16, 1.0, 2.0**24
PATIENCE = 500
"""Good steps after which the scale doubles."""


class Scale:
    """A factor of the loss that lives on the device: halved by an overflow, doubled with patience.

    No host waits for it.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.value = torch.full((), START, device=device)
        self.good = torch.zeros((), device=device)
        """Good steps since the last change."""

    def exhausted(self) -> Tensor:
        """Whether an overflow now could not be mended by a smaller scale."""
        return self.value <= LEAST

    @torch.no_grad()
    def update(self, finite: Tensor) -> None:
        """Learn from a step whether its scaled gradients were finite."""
        count = torch.where(finite, self.good + 1.0, 0.0)
        grown = torch.where(count >= PATIENCE, self.value * 2.0, self.value)
        self.value.copy_(torch.where(finite, grown, self.value / 2.0).clamp(LEAST, MOST))
        self.good.copy_(torch.where(count >= PATIENCE, 0.0, count))
