"""Hosted: updates made by the CPU, where states rest, so that only gradients and weights travel.

2 bytes a parameter leave the device and 2 return, instead of 12 and 12; which is faster depends on
the link and on the cores. A host must know the norm, so a thread waits for it and works behind the
run.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ranvier.comm.streams import StreamEvent, record_current_event
from ranvier.optim.adamw import UpdateScalars


@dataclass(frozen=True)
class HostScalars:
    """The numbers of an update on their way to the host."""

    scalars: UpdateScalars
    """On the host; to be read after the mark."""
    copy_event: StreamEvent

    @classmethod
    def copy_from(cls, now: UpdateScalars) -> HostScalars:
        """Start to copy them."""
        device = now.step.device
        moved = {f.name: getattr(now, f.name) for f in fields(now)}
        moved = {k: _copy_to_host(x) if isinstance(x, Tensor) else x for k, x in moved.items()}
        return cls(UpdateScalars(**moved), record_current_event(device))

    def wait(self) -> UpdateScalars:
        """The numbers, once they are there."""
        if self.copy_event is not None:
            self.copy_event.synchronize()
        return self.scalars


def _copy_to_host(x: Tensor) -> Tensor:
    """A copy on the host, which may still be on its way."""
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x, non_blocking=True)
