"""Reruns a step with checks and names the first tensor that is not finite.

The update of the failed step was masked, so the weights are still the ones it started from. All
ranks make the same checks in the same order; the first check that fails on any rank is the cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ranvier.comm import collectives
from ranvier.comm.consensus import broadcast_text, world_axis
from ranvier.data.batch import SampleBatch
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.train.step import forward_backward

NO_FAILURE = 2**62
CHECKS_PER_STAGE = 2**32
"""Stride between the check indices of stages; larger than the number of checks of a stage."""


@dataclass
class FiniteChecks:
    """The checks of this rank, in order, and the first that failed."""

    next_index: int = 0
    first_failure: int = NO_FAILURE
    name: str = ""

    def check_tensors(self, name: str, value: Any) -> None:
        """Check all floating-point tensors in a value."""
        for tensor in float_tensors(value):
            bad = int((~tensor.isfinite()).sum())
            if bad and self.first_failure == NO_FAILURE:
                self.first_failure = self.next_index
                self.name = f"{name} ({bad} of {tensor.numel()} elements)"
            self.next_index += 1


def float_tensors(value: Any) -> Iterator[Tensor]:
    """Iterate over the floating-point tensors in a value."""
    if isinstance(value, Tensor) and value.is_floating_point():
        yield value.detach()
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from float_tensors(one)


def find_first_nonfinite(
    model: nn.Module, batches: Sequence[SampleBatch], scale: Tensor | None
) -> str:
    """Return the name of the first non-finite tensor of a step, or "" if all are finite.

    Communicates: as a step does, then one number and a name over all axes.
    """
    parallel = get_parallel_model(model)
    checks = FiniteChecks()
    stage = parallel.pipeline.executor.stage
    for name, (part, _) in parallel.sharded_state().items():
        checks.check_tensors(f"the weight {name}", part)
    # Indices order the checks of all ranks in time: weights, forward from the first stage to the
    # last, the loss, then gradients from the last stage to the first.
    checks.next_index = CHECKS_PER_STAGE * (1 + stage.index)
    with ExitStack() as hooks:
        # Forward hooks do not see inside a compiled graph, so run eagerly.
        if parallel.compiled_blocks is not None:
            hooks.callback(
                setattr, parallel.compiled_blocks, "is_enabled", parallel.compiled_blocks.is_enabled
            )
            parallel.compiled_blocks.is_enabled = False
        for name, leaf in parallel.layers.items():

            def hook(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
                checks.check_tensors(f"the output of {name}", output)

            hooks.callback(leaf.register_forward_hook(hook).remove)
        loss = forward_backward(model, batches, scale=scale)
    checks.next_index = CHECKS_PER_STAGE * (1 + stage.num_stages)
    checks.check_tensors("the loss", loss)
    checks.next_index = CHECKS_PER_STAGE * (2 + 2 * stage.num_stages - stage.index)
    grads = parallel.bucket_scheduler.finish_gradients()
    if parallel.bucket_scheduler.host_offload is not None:
        # Offloaded gradients must have arrived on the host before they are checked.
        parallel.bucket_scheduler.host_offload.synchronize()
    # Backward produces gradients in reverse order of the layers.
    for bucket, pieces in reversed(grads):
        for weight, grad in reversed(bucket.split_by_weight(pieces)):
            checks.check_tensors(f"the gradient of {weight.name}", grad)
    parallel.bucket_scheduler.begin_step("")
    return _earliest_failure(checks, model, loss.device)


def _earliest_failure(checks: FiniteChecks, model: nn.Module, device: torch.device) -> str:
    """The name of the first failed check on any rank. Communicates: two numbers and a text."""
    grid = get_parallel_model(model).grid
    mine = torch.tensor([checks.first_failure, grid.rank], device=device)
    order = collectives.all_reduce(mine[:1], world_axis(grid), "min").wait().item()
    if order == NO_FAILURE:
        return ""
    # Several ranks may have failed at the same check: take the lowest rank.
    if checks.first_failure == order:
        whose = mine[1:]
    else:
        whose = torch.full_like(mine[1:], NO_FAILURE)
    rank = int(collectives.all_reduce(whose, world_axis(grid), "min").wait().item())
    name = broadcast_text(checks.name, grid, device, rank=rank)
    if grid.world_size > 1:
        return f"{name} on rank {rank}"
    return name
