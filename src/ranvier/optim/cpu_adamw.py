"""CPU AdamW: the CPU updates offloaded states in place; only gradients and weights are copied.

2 bytes per parameter are copied from the device and 2 back, instead of 12 and 12. Which is faster
depends on the link and on the CPU. The host needs the norm, so a background thread waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ranvier.comm.streams import StreamEvent, record_current_event
from ranvier.optim.adamw import UpdateScalars


@dataclass(frozen=True)
class HostScalars:
    """The scalars of an update, which are being copied to the host."""

    scalars: UpdateScalars
    """Scalars on the host; valid after `copy_event` has completed."""
    copy_event: StreamEvent

    @classmethod
    def copy_from(cls, now: UpdateScalars) -> HostScalars:
        """Starts the copy."""
        device = now.step.device
        moved = {f.name: getattr(now, f.name) for f in fields(now)}
        moved = {k: _copy_to_host(x) if isinstance(x, Tensor) else x for k, x in moved.items()}
        return cls(UpdateScalars(**moved), record_current_event(device))

    def wait(self) -> UpdateScalars:
        """Waits for the copy and returns the scalars."""
        if self.copy_event is not None:
            self.copy_event.synchronize()
        return self.scalars


def _copy_to_host(x: Tensor) -> Tensor:
    """Starts a copy to the host and returns it."""
    # Pinned memory, as a copy to pageable memory would block the host.
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x, non_blocking=True)
