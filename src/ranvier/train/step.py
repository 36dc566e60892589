"""One optimizer step: the micro-batches of this rank forward and backward, then the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ranvier.comm import collectives
from ranvier.comm.autograd import take
from ranvier.data.batch import Batch
from ranvier.errors import PlanError
from ranvier.models import Decoder
from ranvier.nn.cross_entropy import IGNORE
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallelize import Parallel, check_parts, parallel_of
from ranvier.pipeline.executor import Micro


def forward_backward(
    model: nn.Module, batches: Sequence[Batch], *, scale: Tensor | None = None
) -> Tensor:
    """Mean loss over the valid tokens of the whole step; gradients are left in the queue.

    scale: what gradients are multiplied by, so that small ones survive in fp16.
    Communicates: all-reduce of the number of tokens and of the loss, and all that the model does.
    """
    parallel = parallel_of(model)
    queue, axis, trace = parallel.queue, parallel.token_axis, parallel.grid.trace
    if parallel.grid.degrees["pipe"] > 1 and (model._forward_hooks or model._forward_pre_hooks):
        raise PlanError(
            f"{type(model).__name__} has forward hooks, but stages never call the whole model. "
            "They would be left out. Hook into its layers, or use pipe=1."
        )
    if trace.check and parallel.grid.degrees["pipe"] > 1:  # the model itself is never called
        for batch in batches:
            check_parts(parallel, batch.inputs(), {})
    queue.begin(f"train {len(batches)}")
    samples = [take(batch.targets, _batch_axis(parallel), 0) for batch in batches]
    with trace.at("step.tokens"):
        count = collectives.all_reduce(sum_of([(x != IGNORE).sum() for x in samples]), axis).wait()
    share, losses = 1.0 / count.clamp(min=1).to(queue.dtype), list[Tensor]()
    parallel.pipeline.runtime.train(
        _micros(batches),
        parallel.pipeline.policy(len(batches)),
        scored=lambda loss: losses.append(loss * share),
        factor=share if scale is None else share * scale,
        plain=_returns_the_loss_of_its_head(model),
    )
    with trace.at("step.loss"):
        loss = collectives.all_reduce(sum_of(losses or [torch.zeros_like(share)]), axis).wait()
    return _told(loss, parallel)


def _micros(batches: Sequence[Batch]) -> list[Micro]:
    return [Micro(batch.inputs(), batch.samples) for batch in batches]


def _told(loss: Tensor, parallel: Parallel) -> Tensor:
    """What the last stage knows, on all. Communicates: broadcast of one number over pipe."""
    with parallel.grid.trace.at("pipeline.loss"):
        axis = parallel.grid.axis("pipe")
        return collectives.broadcast(loss, axis, index=axis.size - 1).wait()


@torch.no_grad()
def evaluate(model: nn.Module, batches: Sequence[Batch]) -> Tensor:
    """Mean loss over the valid tokens, without gradients. Communicates: as forward_backward."""
    parallel = parallel_of(model)
    axis = parallel.token_axis
    parallel.queue.begin("evaluate")
    was, _ = model.training, model.eval()
    try:
        losses = parallel.pipeline.runtime.forward(_micros(batches))
    finally:
        model.train(was)
    loss = sum_of(losses or [torch.zeros((), dtype=parallel.queue.dtype, device=_device(parallel))])
    samples = [take(batch.targets, _batch_axis(parallel), 0) for batch in batches]
    count = sum_of([(x != IGNORE).sum() for x in samples])
    both = collectives.all_reduce(torch.stack([loss, count.to(loss.dtype)]), axis).wait()
    parallel.queue.begin("")
    return _told(both[0] / both[1], parallel)


def _device(parallel: Parallel) -> torch.device:
    return parallel.pipeline.runtime.device


@dataclass(frozen=True)
class Watch:
    """What steps are judged by; it lives on the device, so that no host waits for a verdict."""

    bad: Tensor
    """Steps so far whose loss or gradient was no number."""
    limit: Tensor
    """A loss above it is a spike (float64)."""
    budget: int = 0
    """Bad steps that are left out; after one more no update is made, so that it can be repeated."""
    strict: bool = False
    """The update of a spike is left out, too."""

    @classmethod
    def of(cls, device: torch.device | str, *, budget: int = 0, strict: bool = False) -> Watch:
        """At the start of a run: nothing was bad, nothing is a spike."""
        bad = torch.zeros((), dtype=torch.int64, device=device)
        limit = torch.full((), torch.inf, dtype=torch.float64, device=device)
        return cls(bad, limit, budget, strict)


@dataclass(frozen=True)
class Taken:
    """What a step left on the device, the same on all ranks; the host reads it later."""

    loss: Tensor
    norm: Tensor
    bad: Tensor
    """Whether its loss or gradient was no number."""
    spike: Tensor
    """Whether its loss was above the limit."""


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Sequence[Batch],
    lr: float | Tensor,
    watch: Watch,
    twice: Callable[[Callable[[], Tensor]], Tensor] | None = None,
) -> Taken:
    """One update; it is left out on all ranks if a loss or a gradient is no number on any.

    An overflow that a smaller loss scale can mend is left out as well, but is not bad.
    twice: does the passes in its own way (see `replay`).
    """
    scale = optimizer.scale
    mendable = None if scale is None else ~scale.exhausted()

    def work() -> Tensor:
        return forward_backward(model, batches, scale=None if scale is None else scale.value)

    loss = work() if twice is None else twice(work)
    votes = torch.stack([~loss.isfinite(), watch.bad > watch.budget, loss > watch.limit])
    norm = optimizer.step(lr, votes=votes, vetoes=3 if watch.strict else 2)
    finite = optimizer.finite if mendable is None else optimizer.finite | mendable
    bad = optimizer.voted[0] | ~finite
    watch.bad.add_(bad)
    return Taken(loss, norm, bad, optimizer.voted[2])


def _returns_the_loss_of_its_head(model: nn.Module) -> bool:
    """Whether what the head returns is what is multiplied by the factor, and blocks follow blocks.

    Of another model, or one that is hooked into, nobody knows.
    """
    return type(model).forward is Decoder.forward and not model._forward_hooks


def _batch_axis(parallel: Parallel) -> Any:
    """Ranks among which the loss divides the samples of a micro-batch."""
    batch = parallel.table.region("vocab")["batch"]
    return parallel.grid.axis(*(axis for axis in batch if axis == "col"))


def sum_of(terms: Sequence[Tensor]) -> Tensor:
    """Sum in order."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
