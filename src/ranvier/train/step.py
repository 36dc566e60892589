"""One optimizer step: forward and backward of this rank's micro-batches, then the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ranvier.comm import collectives
from ranvier.data.batch import SampleBatch
from ranvier.errors import PlanError
from ranvier.models.recurrent_decoder import RecurrentDecoder
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallel_model import ParallelModel, get_parallel_model
from ranvier.parallel.parallelize import check_input_parts
from ranvier.pipeline.step import MicroBatch


def begin_model_step(model: nn.Module, step: int) -> None:
    """Lets a model draw what it draws once per step: a recurrent one the number of its iterations.

    step: number of the step in its run. Without this call a model keeps what it drew last.
    """
    if isinstance(model, RecurrentDecoder):
        model.begin_step(get_parallel_model(model).step_context.seed, step)


def forward_backward(
    model: nn.Module, batches: Sequence[SampleBatch], *, scale: Tensor | None = None
) -> Tensor:
    """Run all micro-batches; returns the mean loss over the targets of the whole step.

    Gradients are left in the bucket scheduler. scale: the loss scale, so that small gradients do
    not underflow in fp16.
    Communicates: all-reduce of the number of targets and of the loss, and all that the model does.
    """
    parallel = get_parallel_model(model)
    queue = parallel.bucket_scheduler
    axis = parallel.token_axis
    trace = parallel.grid.trace
    if parallel.grid.degrees["pipe"] > 1 and (model._forward_hooks or model._forward_pre_hooks):
        raise PlanError(
            f"{type(model).__name__} has forward hooks, but pipeline stages never call the whole "
            "model, so the hooks would not run. Register them on its layers, or use pipe=1."
        )
    # With a pipeline the model itself is never called, which is where inputs are checked otherwise.
    if trace.check_collectives and parallel.grid.degrees["pipe"] > 1:
        for batch in batches:
            inputs = batch.local_inputs(parallel.grid, parallel.table)
            check_input_parts(parallel, inputs, {})
    queue.begin_step(f"train {len(batches)}")
    counts = [batch.count_targets(_batch_axis(parallel)) for batch in batches]
    with trace.named_scope("step.tokens"):
        count = collectives.all_reduce(sum_in_order(counts), axis).wait()
    parallel.step_context.num_targets = count
    # The loss is a mean over the targets of all ranks and micro-batches, so every target has the
    # same weight, regardless of how many a micro-batch masks. A step without any has loss 0.
    share = 1.0 / count.clamp(min=1).to(queue.reduce_dtype)
    losses = list[Tensor]()
    parallel.pipeline.executor.forward_backward(
        _micro_inputs(batches, parallel),
        parallel.pipeline.policy_for_step(len(batches)),
        scored=lambda loss: losses.append(loss * share),
        factor=share if scale is None else share * scale,
        plain=_returns_the_loss_of_its_head(model),
    )
    with trace.named_scope("step.loss"):
        loss = collectives.all_reduce(
            # Only the last stage has losses; the others take part in the collective with a zero.
            sum_in_order(losses or [torch.zeros_like(share)]),
            axis,
        ).wait()
    return _broadcast_loss(loss, parallel)


def _micro_inputs(batches: Sequence[SampleBatch], parallel: ParallelModel) -> list[MicroBatch]:
    return [
        MicroBatch(batch.local_inputs(parallel.grid, parallel.table), batch.samples)
        for batch in batches
    ]


def _broadcast_loss(loss: Tensor, parallel: ParallelModel) -> Tensor:
    """The loss of the last stage on all stages. Communicates: broadcast of a scalar over pipe."""
    with parallel.grid.trace.named_scope("pipeline.loss"):
        axis = parallel.grid.axis("pipe")
        return collectives.broadcast(loss, axis, index=axis.size - 1).wait()


@torch.no_grad()
def evaluate(model: nn.Module, batches: Sequence[SampleBatch]) -> Tensor:
    """Mean loss over the targets, without gradients. Communicates: as forward_backward."""
    parallel = get_parallel_model(model)
    axis = parallel.token_axis
    parallel.bucket_scheduler.begin_step("evaluate")
    was = model.training
    _ = model.eval()
    try:
        losses = parallel.pipeline.executor.run_forward(_micro_inputs(batches, parallel))
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
    count = sum_in_order([batch.count_targets(_batch_axis(parallel)) for batch in batches])
    # Loss and count are reduced in one message.
    both = collectives.all_reduce(torch.stack([loss, count.to(loss.dtype)]), axis).wait()
    parallel.bucket_scheduler.begin_step("")
    return _broadcast_loss(both[0] / both[1], parallel)


def _model_device(parallel: ParallelModel) -> torch.device:
    return parallel.pipeline.executor.device


@dataclass(frozen=True)
class StepLimits:
    """Limits that decide whether an update is made; on the device, so the host need not wait."""

    nonfinite_steps: Tensor
    """Number of steps so far with a non-finite loss or gradient."""
    loss_limit: Tensor
    """A loss above this limit is a spike (float64)."""
    max_nonfinite: int = 0
    """Number of non-finite steps to skip. After one more, updates stop, so that the failing step
    can be rerun for the diagnosis."""
    skips_spikes: bool = False
    """Whether the update of a spike is skipped, too."""

    @classmethod
    def for_device(
        cls, device: torch.device | str, *, budget: int = 0, strict: bool = False
    ) -> StepLimits:
        """The limits at the start of a run: no bad steps, and nothing is a spike."""
        bad = torch.zeros((), dtype=torch.int64, device=device)
        limit = torch.full((), torch.inf, dtype=torch.float64, device=device)
        return cls(bad, limit, budget, strict)


@dataclass(frozen=True)
class StepResult:
    """Results of a step on the device, the same on all ranks; the host reads them later."""

    loss: Tensor
    grad_norm: Tensor
    is_nonfinite: Tensor
    """Whether the loss or the gradient was not finite."""
    is_spike: Tensor
    """Whether the loss was above the limit."""
    num_targets: Tensor
    """Number of targets of the step."""


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Sequence[SampleBatch],
    lr: float | Tensor,
    watch: StepLimits,
    twice: Callable[[Callable[[], Tensor]], Tensor] | None = None,
) -> StepResult:
    """Run one step; all ranks skip the update if a loss or gradient is not finite on any rank.

    An overflow that a smaller loss scale can fix is skipped as well, but does not count as bad.
    twice: wraps forward and backward (see `health.replica_check`).
    """
    scale = optimizer.grad_scaler
    if scale is None:
        fixable = None
    else:
        # Read before `optimizer.step`, which updates the loss scale.
        fixable = ~scale.is_at_minimum()

    def work() -> Tensor:
        return forward_backward(model, batches, scale=None if scale is None else scale.scale)

    if twice is None:
        loss = work()
    else:
        loss = twice(work)
    # Votes travel with the gradient norm. The first two are vetoes: a non-finite loss, and a run
    # that has used up its budget of bad steps. The third, a spike, is a veto only if spikes are
    # skipped.
    votes = torch.stack(
        [~loss.isfinite(), watch.nonfinite_steps > watch.max_nonfinite, loss > watch.loss_limit]
    )
    norm = optimizer.step(lr, votes=votes, vetoes=3 if watch.skips_spikes else 2)
    if fixable is None:
        finite = optimizer.is_norm_finite
    else:
        finite = optimizer.is_norm_finite | fixable
    bad = optimizer.vote_results[0] | ~finite
    # In place and on the device: the next step compares with it before the host has read it.
    watch.nonfinite_steps.add_(bad)
    targets = get_parallel_model(model).step_context.num_targets
    assert targets is not None
    return StepResult(loss, norm, bad, optimizer.vote_results[2], targets)


def _returns_the_loss_of_its_head(model: nn.Module) -> bool:
    """Whether the class that defines `forward` declares it, and no forward hook can change it."""
    owner = next(one for one in type(model).__mro__ if "forward" in vars(one))
    return vars(owner).get("returns_head_loss", False) and not model._forward_hooks


def _batch_axis(parallel: ParallelModel) -> Any:
    """The axis over which the loss splits the samples of a micro-batch."""
    return parallel.grid.axis(*parallel.table.axes_inside_replica("vocab", "batch"))


def sum_in_order(terms: Sequence[Tensor]) -> Tensor:
    """Sum from left to right, so that the result does not depend on an algorithm's order."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
