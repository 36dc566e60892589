"""Hosted: updates made by the CPU, where states rest, so that only gradients and weights travel.

2 bytes a parameter leave the device and 2 return, instead of 12 and 12; which is faster depends on
the link and on the cores. A host must know the norm, so a thread waits for it and works behind the
run.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ranvier.comm.streams import Mark, here
from ranvier.optim.adamw import Scalars


@dataclass(frozen=True)
class Known:
    """The numbers of an update on their way to the host."""

    now: Scalars
    """On the host; to be read after the mark."""
    mark: Mark

    @classmethod
    def of(cls, now: Scalars) -> Known:
        """Start to copy them."""
        device = now.step.device
        moved = {f.name: getattr(now, f.name) for f in fields(now)}
        moved = {k: _copied(x) if isinstance(x, Tensor) else x for k, x in moved.items()}
        return cls(Scalars(**moved), here(device))

    def wait(self) -> Scalars:
        """The numbers, once they are there."""
        if self.mark is not None:
            self.mark.synchronize()
        return self.now


def _copied(x: Tensor) -> Tensor:
    """A copy on the host, which may still be on its way."""
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x, non_blocking=True)
