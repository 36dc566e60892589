"""Verify: compares a small model of the same architecture on one process and on the configured
grid.

On one process it is plain PyTorch. Every rank also runs the plain model and compares its own shards
with it, in float64: losses, every gradient, gradient norms, weights after a few steps, and the
recorded communication with the predictions of its layers. Then it trains, saves, reloads and
continues as a run does (`verify_run`), with the run's pruning and its offloading to the host.
Shrinking (`shrink`) keeps everything that parallel correctness depends on.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ranvier.comm import collectives
from ranvier.comm.algorithm_table import AlgorithmTable
from ranvier.comm.consensus import max_over_ranks
from ranvier.config.plan import Plan
from ranvier.config.resolved_run import ResolvedRun
from ranvier.config.run import RunConfig
from ranvier.config.sections import ModelConfig
from ranvier.cost.layers import ActivationShape
from ranvier.cost.matrix_optimizers import MatrixRuleCost
from ranvier.data.batch import Batch, SampleBatch, batch_type
from ranvier.errors import STOPPED_EXIT_CODE, PlanError, UnsafeInputError, WriteError
from ranvier.grid import Grid
from ranvier.launch import ProcessInfo
from ranvier.nn.context_documents import ContextDocuments
from ranvier.optim.optimizer import Optimizer
from ranvier.optim.rules import Jorge, Muon
from ranvier.parallel.parallel_model import ParallelModel, WeightSummary, get_parallel_model
from ranvier.parallel.parallelize import parallelize
from ranvier.sharding import Shard, TokenOrder
from ranvier.system.terminal import print
from ranvier.tools.serial_optimizer import build_serial_optimizer, serial_param_groups
from ranvier.tools.shrink import ShrunkSizes
from ranvier.tools.verify_run import (
    NOISE_RATIO,
    SAVED_STEPS,
    begin_serial_step,
    train_and_judge,
)
from ranvier.trace import Event, communication_events, diff_events
from ranvier.train import resolve
from ranvier.train.collective_algorithms import find_nodes
from ranvier.train.memory.resolve import build_rule, lr_factors
from ranvier.train.step import begin_model_step, forward_backward

ONE_PASS_LIMIT = 1e-12
AFTER_STEPS_LIMIT = 1e-9
"""Maximum difference, relative to the largest magnitude of a tensor."""
ON_OTHER_STAGE = -1.0
"""Difference reported for a tensor of another stage; an error if no rank has the tensor."""
COMPARED_STEPS = 3
MAX_RANKS = 64
EXPECTED_EXIT_CODES = (
    0,
    1,
    STOPPED_EXIT_CODE,
    *(kind.exit_code for kind in (PlanError, WriteError, UnsafeInputError)),
)
"""Exit codes of a verification that has completed, or that failed because of a user error."""


def required_ranks(plan: Plan) -> int:
    """Returns the number of ranks that the plan needs; an inferred degree counts as 1."""
    return math.prod(max(size, 1) for size in plan.degrees.values())


def shrink_run(run: ResolvedRun) -> ResolvedRun:
    """Returns the run with a model as small as its grid allows."""
    plan = run.plan.without_measuring
    sizes = ShrunkSizes.from_run(run)
    small: ModelConfig = run.model_kind.shrink.load()(run, sizes)
    micro = 2 * sizes.table.batch_multiple(plan.degrees)
    # Two micro-batches per stage are enough for a pipeline to reach its steady state.
    micro_batches = min(plan.num_micro_batches, 2 * plan.pipe)
    batch = plan.num_replicas * micro * micro_batches
    return replace(
        run,
        model=small,
        plan=replace(
            # A stage assignment and profile of the full model do not fit the shrunk one.
            plan,
            global_batch=batch,
            micro_batch=micro,
            stage_starts=(),
            stage_profile="",
            max_in_flight=0,
            stage_time_jitter=0.0,
        ),
        data=replace(
            run.data,
            seq_len=sizes.seq,
            # Otherwise too few tokens would be before a target for any to be dropped.
            goldfish_context_width=min(run.data.goldfish_context_width, max(sizes.seq // 4, 1)),
        ),
        # The serial model iterates in float64.
        optim=replace(run.optim, muon_dtype="master"),
        lora=replace(run.lora, dropout=0.0, layers=(), init_from=""),
    )


@dataclass
class SerialSteps:
    """Results of a few steps of plain PyTorch in one process."""

    losses: list[float]
    aux_losses: list[float]
    """Auxiliary losses of MoE layers, which `losses` do not include."""
    grad_norms: list[float]
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]

    @classmethod
    def run_serially(
        cls,
        model: nn.Module,
        batch: SampleBatch,
        run: RunConfig,
        weights: Mapping[str, WeightSummary],
    ) -> SerialSteps:
        """Takes a few steps with the optimizer of the run in plain PyTorch."""
        optim = run.optim
        named = list(model.named_parameters())
        optimizer = build_serial_optimizer(
            serial_param_groups(run, dict(named), weights),
            build_rule(run),
            lr=run.peak_lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
        )
        for group in optimizer.param_groups:
            group["lr"] = run.peak_lr * group["factor"]
        found = cls([], [], [], {}, {})
        count = batch.count_targets()
        for step in range(COMPARED_STEPS):
            optimizer.zero_grad()
            begin_serial_step(model, batch, seed=0, step=step)
            loss = model(**batch.model_inputs()) / count
            loss.backward()
            extra = getattr(model, "aux_loss", None)
            found.aux_losses.append(0.0 if extra is None else extra.item() / count.item())
            # The grid reports the two losses separately; the serial model returns their sum.
            found.losses.append(loss.item() - found.aux_losses[-1])
            if step == 0:
                found.grads = {n: p.grad.clone() for n, p in named if p.grad is not None}
            if optim.max_grad_norm > 0.0:
                limit = optim.max_grad_norm
            else:
                limit = math.inf
            found.grad_norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
            optimizer.step()
            # Load balancing by bias is not a gradient step: the bias is updated after the
            # optimizer, as in training.
            for mixture in getattr(model, "moe_layers", ()):
                mixture.update_expert_bias()
        found.weights = {name: p.detach().clone() for name, p in named}
        return found


@dataclass
class Comparison:
    """One row of the table: a quantity, its largest relative difference and its limit."""

    quantity: str
    difference: float
    limit: float

    @property
    def is_within_limit(self) -> bool:
        """Whether it agrees (NaN does not)."""
        return self.difference <= self.limit


def verify_grid(run: ResolvedRun, me: ProcessInfo) -> int:
    """Compares as one rank; rank 0 prints the table. Returns 0 if all agree, otherwise 1."""
    # Ranks usually share the cores of one machine, and the model is tiny.
    torch.set_num_threads(1)
    run, device = shrink_run(run), comparison_device(run, me)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    grid = Grid.from_plan(
        run.plan,
        rank=me.rank,
        connected=me.world_size > 1,
        ranks_per_node=max(me.local_world_size, 1),
        node_of_rank=find_nodes(me),
        algorithms=AlgorithmTable.parse(run.comm.algorithm),
        timeout_seconds=run.train.comm_timeout_seconds,
    )
    torch.manual_seed(run.train.seed)
    serial = run.model_kind.build_model(run.model, run.lora).double()
    findings, lines, events = compare_with_serial(run, grid, serial, device)
    # A rank with unpredicted communication must fail the verification on all ranks.
    unlike = torch.tensor([float(len(lines))], dtype=torch.float64, device=device)
    others = int(collectives.all_reduce(unlike, grid.axis(*grid.degrees), "max").wait().item())
    worst = _worst_of_ranks(findings, grid, device)
    if me.rank == 0:
        _print_report(run, worst, lines, events, others)
    wrong = [f.quantity for f in (*worst, *findings) if not f.is_within_limit] + lines
    if wrong and me.rank > 0:
        print(f"rank {me.rank}: {wrong[0]}", file=sys.stderr)
    trained = _verify_short_run(run, me, grid, device)
    if me.rank == 0:
        good = not wrong and not others and not trained
        print(
            "verified: the grid equals one process"
            if good
            else "FAILED: the grid differs from one process"
        )
    return int(bool(wrong) or others > 0 or trained)


def _verify_short_run(run: ResolvedRun, me: ProcessInfo, grid: Grid, device: torch.device) -> bool:
    """Trains, saves, reloads and continues; returns whether something is wrong, equal on all
    ranks.
    """
    # Flushed, because it is the last line a user sees if a rank crashes below.
    if me.rank == 0:
        print(
            f"a run of {SAVED_STEPS} steps, saved, reloaded, and continued for one "
            f"step:{_describe_features(run)}",
            flush=True,
        )
    report = train_and_judge(run, me, grid, device)
    findings = [
        Comparison(what, off, ONE_PASS_LIMIT if once else AFTER_STEPS_LIMIT)
        for what, (off, once) in report.differences.items()
    ]
    if me.rank == 0:
        _print_comparisons(findings)
        for line in report.complaints:
            print(f"  {line}: WRONG")
    bad = any(not finding.is_within_limit for finding in findings) or bool(report.complaints)
    return max_over_ranks(int(bad), grid, device) > 0


def _describe_features(run: RunConfig) -> str:
    """Returns pruning, offloading and changed samples of the run as text; empty without any."""
    memory = run.memory
    pruned = run.prune
    if pruned.is_enabled:
        words = [f"pruned to {pruned.n_m_pattern or f'{pruned.sparsity:.0%} zeros'}"]
    else:
        words = []
    words += (
        [f"optimizer states in {memory.optimizer_states} memory"]
        if memory.optimizer_states != "device"
        else []
    )
    words += ["weights in host memory"] if memory.parameters == "host" else []
    words += (
        [f"{memory.activation_offload_fraction:.0%} of activations on the host"]
        if memory.activation_offload_fraction
        else []
    )
    words += [f"goldfish loss with k={run.data.goldfish_k}"] if run.data.goldfish_k else []
    words += ["canaries"] if run.data.canaries else []
    if words:
        return f" {', '.join(words)}"
    return ""


def comparison_device(run: RunConfig, me: ProcessInfo) -> torch.device:
    """Returns the device of the comparison: the CPU, unless the backend is NCCL."""
    if run.train.backend != "nccl":
        return torch.device("cpu")
    return resolve.resolve_device(run, me)


def compare_with_serial(
    run: RunConfig, grid: Grid, serial: nn.Module, device: torch.device | str = "cpu"
) -> tuple[list[Comparison], list[str], list[Event]]:
    """Returns comparisons of this rank, lines about unpredicted communication, and the events."""
    batch = batch_type(run.model).random(run).to(device)
    serial = serial.to(device)
    # The same seed as in `verify_grid` gives both models the same initial weights.
    torch.manual_seed(run.train.seed)
    # Tokens sent to experts are not rounded, because the serial model rounds none.
    plan = replace(run.plan, moe_dispatch_dtype="model")
    # A compiled block saves tensors that eager backward would gather again, so its events differ:
    # compile only where blocks do not communicate.
    if not plan.has_whole_blocks:
        plan = replace(plan, compile="off")
    model = parallelize(
        run.model_kind.build_model(run.model, run.lora).double(),
        grid,
        plan,
        device=device,
        seq_len=run.data.seq_len,
    )
    parallel = get_parallel_model(model)
    parallel.step_context.save_policy.collectives = run.memory.recompute_collectives
    reference = SerialSteps.run_serially(serial, batch, run, parallel.weight_summaries)
    micros = batch.split_micro_batches(grid, run.plan.micro_batch, run.plan.token_order)
    optim = run.optim
    rule = build_rule(run)
    optimizer = Optimizer(
        parallel.bucket_scheduler,
        lr=run.peak_lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        decay=run.weight_decay,
        clip=optim.max_grad_norm,
        factors=lr_factors(run),
        rule=rule,
        adamw_factor=run.adamw_peak_lr / run.peak_lr,
    )
    # Only the first step is traced, up to and including its update.
    begin_model_step(model, 0)
    with grid.trace.record_events() as events:
        losses = [forward_backward(model, micros).item()]
        norms = []
        grads = _local_gradients(parallel)
        norms.append(optimizer.step().item())
        extras = [_mean_aux_loss(parallel, batch)]
    for step in range(1, COMPARED_STEPS):
        begin_model_step(model, step)
        losses.append(forward_backward(model, micros).item())
        norms.append(optimizer.step().item())
        extras.append(_mean_aux_loss(parallel, batch))
    findings = _compare_numbers("loss", losses, reference.losses)
    findings += _compare_numbers("norm", norms, reference.grad_norms)
    if any(reference.aux_losses):
        findings += _compare_numbers("auxiliary loss", extras, reference.aux_losses)
    findings += _compare_tensors(parallel, reference, grads)
    flow = ActivationShape(
        run.plan.micro_batch, run.data.seq_len, itemsize=8, statistics_itemsize=8
    )
    orders = [
        micro.documents.orders
        for micro in micros
        if isinstance(micro, Batch) and isinstance(micro.documents, ContextDocuments)
    ]
    cost = rule.cost(torch.float64) if isinstance(rule, Muon | Jorge) else None
    # The prediction is for the iterations of the traced step.
    begin_model_step(model, 0)
    predicted = predict_events(parallel, flow, run.plan.num_micro_batches, orders, cost)
    return findings, diff_events(predicted, events, parallel.data_dependent_layers), events


def _mean_aux_loss(parallel: ParallelModel, batch: SampleBatch) -> float:
    """Returns the auxiliary loss that MoE layers added to the mean loss of the last step."""
    if parallel.load_balancer is None or parallel.load_balancer.last_stats is None:
        return 0.0
    return float(parallel.load_balancer.aux_loss_sum) / int(batch.count_targets())


def _compare_numbers(name: str, have: list[float], want: list[float]) -> list[Comparison]:
    """Returns the relative difference of a number of each step; later steps may differ more."""
    pairs = enumerate(zip(have, want, strict=True))
    return [
        Comparison(
            f"{name} of step {i}", abs(a - b) / abs(b), AFTER_STEPS_LIMIT if i else ONE_PASS_LIMIT
        )
        for i, (a, b) in pairs
    ]


def predict_events(
    parallel: ParallelModel,
    flow: ActivationShape,
    micro_batches: int,
    token_orders: Sequence[tuple[TokenOrder, ...]] = (),
    matrix_rule: MatrixRuleCost | None = None,
) -> list[Event]:
    """Returns the communication of one step: passes, update, and the two reduced numbers.

    token_orders: order of the tokens over context of the samples of each micro-batch. matrix_rule:
    the rule of hidden matrices, if it needs them whole.
    """
    axis = parallel.token_axis
    itemsize = parallel.bucket_scheduler.reduce_dtype.itemsize
    events = parallel.events(flow, micro_batches=micro_batches, token_orders=token_orders)
    events += parallel.update_events(matrix_rule=matrix_rule)
    if axis.size > 1:
        events.append(Event("all_reduce", axis.names, 8, "step.tokens"))
        events.append(Event("all_reduce", axis.names, itemsize, "step.loss"))
    return events + parallel.pipeline.step_events(micro_batches, itemsize)


def _local_gradients(parallel: ParallelModel) -> dict[str, tuple[Tensor, Shard]]:
    """Returns this rank's shard of every gradient; the scheduler keeps the originals."""
    return {
        weight.name: (part.clone(), bucket.state_shard(weight))
        for bucket, pieces in parallel.bucket_scheduler.finish_gradients()
        for weight, part in bucket.split_by_weight(pieces)
    }


def _compare_tensors(
    parallel: ParallelModel, reference: SerialSteps, grads: Mapping[str, Any]
) -> list[Comparison]:
    """Compares gradients and weights of this rank with its shards of the serial ones."""
    floor = max(grad.abs().max().item() for grad in reference.grads.values())
    findings = list[Comparison]()
    state = parallel.sharded_state()
    for name in (name for name, known in parallel.weight_summaries.items() if known.trainable):
        want = reference.grads[name]
        size = want.abs().max().item()
        # A gradient that is zero in exact arithmetic has no magnitude to compare with.
        zero = size < NOISE_RATIO * floor
        scale = floor if zero else size
        findings.append(
            _compare_local_part(f"gradient of {name}", grads.get(name), want, scale, ONE_PASS_LIMIT)
        )
        # Adam normalizes by the magnitude and turns rounding noise into full steps, so such weights
        # differ.
        if not zero:
            after = f"weight {name} after {COMPARED_STEPS} steps"
            want = reference.weights[name]
            size = want.abs().max().item()
            findings.append(
                _compare_local_part(after, state.get(name), want, size, AFTER_STEPS_LIMIT)
            )
    return findings


def _compare_local_part(
    what: str, mine: tuple[Tensor, Shard] | None, whole: Tensor, scale: float, limit: float
) -> Comparison:
    """Returns the difference of this rank's shard; a tensor of another stage is marked as such."""
    if mine is None:
        return Comparison(what, ON_OTHER_STAGE, limit)
    part, place = mine
    error = (part - place.slice_from(whole)).abs()
    return Comparison(what, (error.max().item() if error.numel() else 0.0) / scale, limit)


def _worst_of_ranks(
    findings: list[Comparison], grid: Grid, device: torch.device
) -> list[Comparison]:
    """Returns each comparison with its largest difference on any rank.

    Communicates: all-reduce over all axes.
    """
    here = torch.tensor([f.difference for f in findings], dtype=torch.float64, device=device)
    # A maximum over ranks may drop NaN; inf is never within a limit.
    here = here.nan_to_num(nan=math.inf)
    most = collectives.all_reduce(here, grid.axis(*grid.degrees), "max").wait()
    found = [max(m, h) for m, h in zip(most.tolist(), here.tolist(), strict=True)]
    return [
        # If every rank reports another stage, no rank has the tensor: that must fail.
        replace(f, difference=math.inf if worst == ON_OTHER_STAGE else worst)
        for f, worst in zip(findings, found, strict=True)
    ]


def _print_report(
    run: RunConfig, findings: list[Comparison], lines: list[str], events: list[Event], others: int
) -> None:
    plan = run.plan
    shape = (
        " · ".join(f"{axis} {size}" for axis, size in plan.degrees.items() if size > 1)
        or "one rank"
    )
    print(f"grid: {shape}; inside of layers, col splits {plan.col_splits}")
    unit = run.model_kind.unit
    print(
        f"shrunk model: {run.model.describe_shape()}, {run.data.seq_len} {unit}, "
        f"document_mask {run.data.document_mask}"
    )
    print(f"{'largest relative difference to one process':<58}{'value':>11}{'limit':>10}")
    _print_comparisons(findings)
    total = sum(event.bytes for event in communication_events(events))
    number = len(communication_events(events))
    print(f"communication of a step on rank 0: {total} bytes in {number} events, ", end="")
    print("all as predicted" if not lines else f"{len(lines)} NOT as predicted:")
    for line in lines:
        print(f"  {line}")
    if others and not lines:
        print("on another rank there was communication NOT as predicted")


def _print_comparisons(findings: list[Comparison]) -> None:
    for finding in findings:
        if finding.is_within_limit:
            mark = ""
        else:
            mark = "  DIFFERS"
        print(f"{finding.quantity:<58}{finding.difference:>11.2e}{finding.limit:>10.0e}{mark}")
