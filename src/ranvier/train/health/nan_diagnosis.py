"""Diagnose: take a step again with checks, and name the first tensor that is not a number.

The update of the bad step was masked, so the weights are those it began with. All ranks pass the
same checks in the same order; the first bad one on any rank is the cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ranvier.comm import collectives
from ranvier.comm.consensus import everyone, told
from ranvier.data.batch import Batch
from ranvier.parallel.parallelize import parallel_of
from ranvier.train.step import forward_backward

NONE = 2**62
MANY = 2**32
"""More checks than a stage makes."""


@dataclass
class Checks:
    """The checks of this rank, in order, and the first that failed."""

    number: int = 0
    first: int = NONE
    name: str = ""

    def look(self, name: str, value: Any) -> None:
        """Check the tensors of a value."""
        for tensor in tensors(value):
            bad = int((~tensor.isfinite()).sum())
            if bad and self.first == NONE:
                self.first = self.number
                self.name = f"{name} ({bad} of {tensor.numel()} elements)"
            self.number += 1


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of real numbers in a value."""
    if isinstance(value, Tensor) and value.is_floating_point():
        yield value.detach()
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from tensors(one)


def first_bad(model: nn.Module, batches: Sequence[Batch], scale: Tensor | None) -> str:
    """The first tensor of a step that is not finite, or "" if all are.

    Communicates: as a step does, then one number and a name over all axes.
    """
    parallel, checks = parallel_of(model), Checks()
    stage = parallel.pipeline.runtime.stage
    for name, (part, _) in parallel.state().items():
        checks.look(f"the weight {name}", part)
    checks.number = MANY * (1 + stage.index)  # earlier stages come before later ones
    with ExitStack() as hooks:
        if parallel.compiled is not None:  # a graph cannot be looked into
            hooks.callback(setattr, parallel.compiled, "on", parallel.compiled.on)
            parallel.compiled.on = False
        for name, leaf in parallel.leaves.items():

            def hook(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
                checks.look(f"the output of {name}", output)

            hooks.callback(leaf.register_forward_hook(hook).remove)
        loss = forward_backward(model, batches, scale=scale)
    checks.number = MANY * (1 + stage.count)
    checks.look("the loss", loss)
    checks.number = MANY * (2 + 2 * stage.count - stage.index)
    grads = parallel.queue.finish()
    if parallel.queue.homes is not None:
        parallel.queue.homes.settle()
    for bucket, pieces in reversed(grads):
        for weight, grad in reversed(bucket.by_weight(pieces)):
            checks.look(f"the gradient of {weight.name}", grad)
    parallel.queue.begin("")
    return _earliest(checks, model, loss.device)


def _earliest(checks: Checks, model: nn.Module, device: torch.device) -> str:
    """The name of the first failed check on any rank."""
    grid = parallel_of(model).grid
    mine = torch.tensor([checks.first, grid.rank], device=device)
    order = collectives.all_reduce(mine[:1], everyone(grid), "min").wait().item()
    if order == NONE:
        return ""
    whose = mine[1:] if checks.first == order else torch.full_like(mine[1:], NONE)
    rank = int(collectives.all_reduce(whose, everyone(grid), "min").wait().item())
    name = told(checks.name, grid, device, rank=rank)
    return f"{name} on rank {rank}" if grid.world > 1 else name
