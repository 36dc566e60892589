"""Computes a step twice before its update and compares loss and gradients bit by bit.

A flipped bit in an activation leaves the loss finite and the replicas of weights equal: only
repeating the same work detects it (silent data corruption). It costs a second forward and backward
pass, so it is done only every `guard.replay` steps.
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
    """Compares two forward and backward passes over the same micro-batches."""

    model: nn.Module
    step: int
    """Number of the step, from 0."""

    def run_twice(self, work: Callable[[], Tensor]) -> Tensor:
        """Run forward and backward twice; returns the loss, gradients are left in the scheduler.

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
        """Hashes of the loss and of the gradient of each weight, for this rank's data shard."""
        found = {"the loss": loss.detach().reshape(1)}
        for bucket, pieces in get_parallel_model(self.model).bucket_scheduler.finish_gradients():
            for weight, grad in bucket.split_by_weight(pieces):
                found[f"the gradient of {weight.name}"] = grad
        # One transfer to the host for all hashes.
        hashes = torch.stack([fingerprint_tensor(x) for x in found.values()]).tolist()
        return dict(zip(found, hashes, strict=True))
