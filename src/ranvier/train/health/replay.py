"""Replay: a step computed twice before its update, loss and gradients compared bit by bit.

A flipped bit in an activation leaves a finite loss and equal copies of weights: only the same work
done again shows it. It costs a second forward and backward pass, so it is done now and then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ranvier.comm.consensus import broadcast_first_error
from ranvier.errors import NumericError
from ranvier.parallel.parallelize import get_parallel_model
from ranvier.train.health.replica_check import fingerprint_tensor


@dataclass(frozen=True)
class StepReplay:
    """Compares two passes over the same micro-batches."""

    model: nn.Module
    step: int
    """Number of the step, from 0."""

    def run_twice(self, work: Callable[[], Tensor]) -> Tensor:
        """Do a forward and backward pass twice; the loss, and gradients in the queue.

        Communicates: twice what the pass does, then perhaps a text over all axes.
        """
        before = self._signature(work())
        loss = work()
        after = self._signature(loss)
        odd = [name for name, bits in after.items() if before[name] != bits]
        if odd:
            what = f"{odd[0]} ({len(odd)} of {len(after)} differ)"
        else:
            what = ""
        parallel = get_parallel_model(self.model)
        if parallel.grid.world_size > 1:
            rank = f" on rank {parallel.grid.rank}"
        else:
            rank = ""
        found = broadcast_first_error(what and what + rank, parallel.grid, loss.device)
        if found:
            raise NumericError(
                f"Step {self.step + 1} was computed twice and differs in {found}. The same work "
                "gives the same bits as long as devices are sound. No update was made. Check that "
                "device (ranvier doctor) and go on from the newest checkpoint."
            )
        return loss

    def _signature(self, loss: Tensor) -> dict[str, int]:
        """Bits of the loss and of the gradient of each weight, my range over data."""
        found = {"the loss": loss.detach().reshape(1)}
        for bucket, pieces in get_parallel_model(self.model).bucket_scheduler.finish_gradients():
            for weight, grad in bucket.split_by_weight(pieces):
                found[f"the gradient of {weight.name}"] = grad
        hashes = torch.stack([fingerprint_tensor(x) for x in found.values()]).tolist()
        return dict(zip(found, hashes, strict=True))
