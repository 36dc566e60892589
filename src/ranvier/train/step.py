"""One optimizer step: the micro-batches of this rank forward and backward, then the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ranvier.comm import collectives
from ranvier.comm.autograd import local_slice
from ranvier.data.batch import Batch
from ranvier.errors import PlanError
from ranvier.models import Decoder
from ranvier.nn.cross_entropy import IGNORE_INDEX
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallelize import ParallelModel, check_input_parts, get_parallel_model
from ranvier.pipeline.executor import MicroBatch


def forward_backward(
    model: nn.Module, batches: Sequence[Batch], *, scale: Tensor | None = None
) -> Tensor:
    """Mean loss over the valid tokens of the whole step; gradients are left in the queue.

    scale: what gradients are multiplied by, so that small ones survive in fp16.
    Communicates: all-reduce of the number of tokens and of the loss, and all that the model does.
    """
    parallel = get_parallel_model(model)
    queue = parallel.bucket_scheduler
    axis = parallel.token_axis
    trace = parallel.grid.trace
    if parallel.grid.degrees["pipe"] > 1 and (model._forward_hooks or model._forward_pre_hooks):
        raise PlanError(
            f"{type(model).__name__} has forward hooks, but stages never call the whole model. "
            "They would be left out. Hook into its layers, or use pipe=1."
        )
    if (
        trace.check_collectives and parallel.grid.degrees["pipe"] > 1
    ):  # the model itself is never called
        for batch in batches:
            check_input_parts(parallel, batch.model_inputs(), {})
    queue.begin_step(f"train {len(batches)}")
    samples = [local_slice(batch.targets, _batch_axis(parallel), 0) for batch in batches]
    with trace.named_scope("step.tokens"):
        count = collectives.all_reduce(
            sum_in_order([(x != IGNORE_INDEX).sum() for x in samples]), axis
        ).wait()
    share = 1.0 / count.clamp(min=1).to(queue.reduce_dtype)
    losses = list[Tensor]()
    parallel.pipeline.executor.forward_backward(
        _micro_inputs(batches),
        parallel.pipeline.policy_for_step(len(batches)),
        scored=lambda loss: losses.append(loss * share),
        factor=share if scale is None else share * scale,
        plain=_returns_the_loss_of_its_head(model),
    )
    with trace.named_scope("step.loss"):
        loss = collectives.all_reduce(
            sum_in_order(losses or [torch.zeros_like(share)]), axis
        ).wait()
    return _broadcast_loss(loss, parallel)


def _micro_inputs(batches: Sequence[Batch]) -> list[MicroBatch]:
    return [MicroBatch(batch.model_inputs(), batch.samples) for batch in batches]


def _broadcast_loss(loss: Tensor, parallel: ParallelModel) -> Tensor:
    """What the last stage knows, on all. Communicates: broadcast of one number over pipe."""
    with parallel.grid.trace.named_scope("pipeline.loss"):
        axis = parallel.grid.axis("pipe")
        return collectives.broadcast(loss, axis, index=axis.size - 1).wait()


@torch.no_grad()
def evaluate(model: nn.Module, batches: Sequence[Batch]) -> Tensor:
    """Mean loss over the valid tokens, without gradients. Communicates: as forward_backward."""
    parallel = get_parallel_model(model)
    axis = parallel.token_axis
    parallel.bucket_scheduler.begin_step("evaluate")
    was = model.training
    _ = model.eval()
    try:
        losses = parallel.pipeline.executor.run_forward(_micro_inputs(batches))
    finally:
        model.train(was)
    loss = sum_in_order(
        losses
        or [
            torch.zeros(
                (), dtype=parallel.bucket_scheduler.reduce_dtype, device=_model_device(parallel)
            )
        ]
    )
    samples = [local_slice(batch.targets, _batch_axis(parallel), 0) for batch in batches]
    count = sum_in_order([(x != IGNORE_INDEX).sum() for x in samples])
    both = collectives.all_reduce(torch.stack([loss, count.to(loss.dtype)]), axis).wait()
    parallel.bucket_scheduler.begin_step("")
    return _broadcast_loss(both[0] / both[1], parallel)


def _model_device(parallel: ParallelModel) -> torch.device:
    return parallel.pipeline.executor.device


@dataclass(frozen=True)
class StepLimits:
    """What steps are judged by; it lives on the device, so that no host waits for a verdict."""

    nonfinite_steps: Tensor
    """Steps so far whose loss or gradient was no number."""
    loss_limit: Tensor
    """A loss above it is a spike (float64)."""
    max_nonfinite: int = 0
    """Bad steps that are left out; after one more no update is made, so that it can be repeated."""
    skips_spikes: bool = False
    """The update of a spike is left out, too."""

    @classmethod
    def for_device(
        cls, device: torch.device | str, *, budget: int = 0, strict: bool = False
    ) -> StepLimits:
        """At the start of a run: nothing was bad, nothing is a spike."""
        bad = torch.zeros((), dtype=torch.int64, device=device)
        limit = torch.full((), torch.inf, dtype=torch.float64, device=device)
        return cls(bad, limit, budget, strict)


@dataclass(frozen=True)
class StepResult:
    """What a step left on the device, the same on all ranks; the host reads it later."""

    loss: Tensor
    grad_norm: Tensor
    is_nonfinite: Tensor
    """Whether its loss or gradient was no number."""
    is_spike: Tensor
    """Whether its loss was above the limit."""


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Sequence[Batch],
    lr: float | Tensor,
    watch: StepLimits,
    twice: Callable[[Callable[[], Tensor]], Tensor] | None = None,
) -> StepResult:
    """One update; it is left out on all ranks if a loss or a gradient is no number on any.

    An overflow that a smaller loss scale can mend is left out as well, but is not bad.
    twice: does the passes in its own way (see `replay`).
    """
    scale = optimizer.grad_scaler
    if scale is None:
        mendable = None
    else:
        mendable = ~scale.is_at_minimum()

    def work() -> Tensor:
        return forward_backward(model, batches, scale=None if scale is None else scale.scale)

    if twice is None:
        loss = work()
    else:
        loss = twice(work)
    votes = torch.stack(
        [~loss.isfinite(), watch.nonfinite_steps > watch.max_nonfinite, loss > watch.loss_limit]
    )
    norm = optimizer.step(lr, votes=votes, vetoes=3 if watch.skips_spikes else 2)
    if mendable is None:
        finite = optimizer.is_norm_finite
    else:
        finite = optimizer.is_norm_finite | mendable
    bad = optimizer.vote_results[0] | ~finite
    watch.nonfinite_steps.add_(bad)
    return StepResult(loss, norm, bad, optimizer.vote_results[2])


def _returns_the_loss_of_its_head(model: nn.Module) -> bool:
    """Whether what the head returns is what is multiplied by the factor, and blocks follow blocks.

    Of another model, or one that is hooked into, nobody knows.
    """
    return type(model).forward is Decoder.forward and not model._forward_hooks


def _batch_axis(parallel: ParallelModel) -> Any:
    """Ranks among which the loss divides the samples of a micro-batch."""
    batch = parallel.table.activation_rule("vocab")["batch"]
    return parallel.grid.axis(*(axis for axis in batch if axis == "col"))


def sum_in_order(terms: Sequence[Tensor]) -> Tensor:
    """Sum in order."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
