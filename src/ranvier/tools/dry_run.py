"""Dry run: executes the code of one rank of any world size, without data, devices or other ranks.

Model, step and optimizer are the same as in a run. Tensors are on the meta device, where they have
shapes but no values, and the process group is torch's fake one, whose collectives return
immediately. So the memory and communication of a rank are counted, not predicted: shards, calls of
the process group (below `comm`, by axis), and the bytes of all tensors in memory at once, as on a
device that runs layers one by one, with an attention kernel that stores no scores.

Not handled: compiled blocks, documents inside of samples, and offloading to the host.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ranvier import launch
from ranvier.buckets.scheduler import BucketScheduler
from ranvier.comm.p2p import Form, Key
from ranvier.config.plan import AXES
from ranvier.config.resolved_run import ResolvedRun, decision_lines, decisions_to_json
from ranvier.config.run import RunConfig
from ranvier.cost.context_attention import SegmentRows
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.nn.attention import AttentionCore
from ranvier.nn.attention_backends import flash_attention
from ranvier.nn.context_attention import accumulation_dtype
from ranvier.nn.layer import apply_autograd
from ranvier.nn.moe.layer import MoELayer
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.pipeline.memory_replay import late_gradient_schedule
from ranvier.pipeline.traffic import BACKWARD, FORWARD
from ranvier.planner.memory import breakdown
from ranvier.planner.memory.breakdown import MemoryBreakdown
from ranvier.planner.memory.token_chunks import attention_workspace_bytes
from ranvier.system.terminal import print
from ranvier.train.build_model import DTYPES, build_model
from ranvier.train.memory.breakdown import tensors_by_category
from ranvier.train.memory.resolve import build_optimizer
from ranvier.train.memory.usage import HostMemoryCounter, blank_batch, live_gradients
from ranvier.train.resolve import ResolveContext, resolve_run
from ranvier.train.step import StepLimits, train_step

META = torch.device("meta")
DRY_RUN_RULE = "A dry run counts the device memory of one rank that runs layers one by one."


@dataclass(frozen=True)
class CollectiveCalls:
    """Calls of a process group in a step, grouped by operation and axis."""

    op: str
    axis: tuple[str, ...]
    calls: int
    bytes: int
    """Bytes of the whole (gathered or reduced) tensors."""


@dataclass(frozen=True)
class DryRunResult:
    """Memory and communication of a rank in a step."""

    rank: int
    world: int
    index: dict[str, int]
    """Its coordinates on the grid."""
    shards: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    """Shape of the shard, with padding, and of the whole tensor, for each weight."""
    collectives: tuple[CollectiveCalls, ...]
    memory: MemoryBreakdown
    """Peak memory."""
    expert_load: float | None
    """Assumed rows of its experts, relative to the mean over the ranks of the expert axis; None if
    the model has no data-dependent layers."""
    seconds: float
    """Duration of the dry run."""
    run: ResolvedRun
    """The settings, and the reasons for the values of settings that were left open."""

    def comm_bytes(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """Returns the bytes by operation and axis."""
        return {(row.op, row.axis): row.bytes for row in self.collectives}

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as JSON types."""
        return {
            "rank": self.rank,
            "world": self.world,
            "index": self.index,
            "shards": {n: {"part": a, "whole": b} for n, (a, b) in self.shards.items()},
            "collectives": [vars(row) | {"axis": list(row.axis)} for row in self.collectives],
            "memory": self.memory.to_dict(),
            "expert_imbalance": self.expert_load,
            "seconds": self.seconds,
            "decisions": decisions_to_json(self.run),
        }


def resolve_dry_run(run: RunConfig, *, world: int, rank: int, load: float = 1.0) -> ResolvedRun:
    """Resolves the run for one rank of `world`, or raises all problems of its settings."""
    if world < 1 or not 0 <= rank < world:
        raise PlanError(
            f"rank={rank} is not valid with world={world}. Ranks are numbered from 0 to world - 1, "
            f"and world is at least 1. Use --rank {max(min(rank, world - 1), 0)}"
            + (" or a larger --world." if world > 0 else " --world 1.")
        )
    run = resolve_without_device(run, world=world)
    if 1.0 <= load <= run.plan.expert:
        problems = []
    else:
        problems = [_load_problem(run, load)]
    problems += [
        f"memory.{name}={getattr(run.memory, name)!r} uses host memory. {DRY_RUN_RULE} "
        f"Omit memory.{name}."
        for name, usual in (
            ("optimizer_states", "device"),
            ("parameters", "device"),
            ("activation_offload_fraction", 0.0),
        )
        if getattr(run.memory, name) != usual
    ]
    if run.prune.is_enabled:
        problems.append(
            "Pruning masks depend on the values of weights, which a dry run does not have. "
            f"{DRY_RUN_RULE} Omit the prune settings."
        )
    if run.train.float8 != "off":
        problems.append(
            f"train.float8={run.train.float8!r} needs a device. {DRY_RUN_RULE} Use "
            "train.float8=off."
        )
    if problems:
        raise PlanError(problems)
    measured = replace(run, plan=run.plan.without_measuring)
    run = run.adopt("dry run", measured, {"": "memory is not measured in a dry run"})
    packed = {"data.document_mask": False}
    return run.decide("dry run", packed, "packed samples would need real documents")


def resolve_without_device(run: RunConfig, *, world: int) -> ResolvedRun:
    """Resolves the settings of a run for `world` ranks on any device."""
    return resolve_run(run, ResolveContext(world_size=world, device=META))


def _load_problem(run: RunConfig, load: float) -> str:
    """Returns an error message if the assumed load of experts is out of range."""
    most = run.plan.expert
    return (
        f"expert_imbalance={load:g} is out of range for plan.expert={most}. It must be between 1 "
        f"(balanced) and the number of ranks of the expert axis. Use --expert-imbalance "
        f"{min(max(load, 1.0), most):g}."
    )


def dry_run(
    run: RunConfig, *, world: int, rank: int, load: float = 1.0, watched: bool = True
) -> DryRunResult:
    """Executes two steps of one rank and counts the second, for which all orders are known.

    load: rows of its experts, relative to the mean over the ranks of expert. watched: whether to
    count the bytes of tensors as well, which takes longer than the steps themselves.
    """
    begun = time.perf_counter()
    run = resolve_dry_run(run, world=world, rank=rank, load=load)
    with launch.fake_process_group(world, rank):
        grid = Grid.from_plan(run.plan, rank=rank, connected=True)
        model = build_model(run, grid, META, local_ranks=1)
        parallel = get_parallel_model(model)
        _prepare_model(run, model, load)
        optimizer = build_optimizer(run, model, META, local_ranks=1)
        batches = [
            blank_batch(run, run.plan.micro_batch, grid, META)
            for _ in range(run.plan.num_micro_batches)
        ]
        watch = StepLimits.for_device(META)
        # The first step records the order of weight gathers and creates the optimizer states.
        train_step(model, optimizer, batches, run.peak_lr, watch)
        tensors = tensors_by_category(optimizer)
        seen = _PeakMemoryCounter(
            [tensors, [batch.model_inputs() for batch in batches]], parallel.bucket_scheduler
        )
        with launch.count_comm_calls() as calls, seen if watched else nullcontext():
            train_step(model, optimizer, batches, run.peak_lr, watch)
        rows = _count_collectives(calls, grid)
    # Only tensors that appear during the step are counted above; weights and states existed before.
    held = {name: sum(x.nbytes for x in some) for name, some in tensors.items()}
    held["gradients"] = seen.gradient_bytes
    device = {**held, "activations": max(seen.max_bytes - seen.gradient_bytes, 0)}
    return DryRunResult(
        rank=rank,
        world=world,
        index=dict(grid.index),
        shards={n: (w.sharding.local_shape, w.sharding.shape) for n, w in parallel.weights.items()},
        collectives=rows,
        expert_load=load if parallel.data_dependent_layers else None,
        memory=MemoryBreakdown(
            {name: size for name, size in device.items() if size},
            where=seen.peak_place if watched else "",
        ),
        seconds=time.perf_counter() - begun,
        run=run,
    )


def _prepare_model(run: RunConfig, model: nn.Module, load: float) -> None:
    """Sets what a fake world cannot determine: message shapes, job order, the attention kernel."""
    parallel = get_parallel_model(model)
    plan = run.plan
    # Blocks in chunks of tokens have their peak in the backward kernel of attention; the peak of
    # others is in the MLP.
    in_chunks = plan.chunk_of_samples(plan.micro_batch * run.model.streams, run.data.seq_len) > 0
    attend = _flash_attention_with_workspace if in_chunks else flash_attention
    for leaf in parallel.layers.values():
        if isinstance(leaf, AttentionCore):
            # The flash kernel stores no scores, as on a device. A kernel with a sliding window
            # stores the same, so the window is dropped.
            leaf.serial.attend = attend  # type: ignore[assignment]
            leaf.serial.segment_attention = _MetaSegmentAttention  # type: ignore[assignment]
            # Over context, a window decides which keys are communicated.
            if plan.context == 1:
                leaf.serial.window = 0  # type: ignore[assignment]
        if isinstance(leaf, MoELayer):
            leaf.assumed_load = load
    shape = parallel.table.local_shape(
        "embed", plan.micro_batch, run.data.seq_len, run.model.embed, plan.degrees
    )
    pipeline = parallel.pipeline

    def message_form(key: Key) -> Form:
        # Stages send all streams of a sample; a split vocabulary has one.
        copies = run.model.streams if key[0] in (FORWARD, BACKWARD) else 1
        local = (copies * shape[0], *shape[1:])
        # Before a ladder layer a message has two tensors.
        count = pipeline.stage_spec.tensors_received(*key)
        return (count, *local) if count > 1 else local, DTYPES[run.train.dtype]

    runtime = parallel.pipeline.executor
    micros = plan.num_micro_batches
    # No other stage sends messages, so their arrival cannot determine the order of jobs. It is
    # fixed to the order with late gradients, when a stage holds the most activations.
    if plan.pipe > 1:
        policy = pipeline.policy_for_step(micros)
        jobs = replace(pipeline.step_shape(micros), split_backward=policy.split_backward)
        pipeline.policies[micros] = late_gradient_schedule(policy, jobs, runtime.stage.index)
    runtime.message_form = message_form
    # No other rank decides the order of jobs.
    runtime.is_leader = True


@dataclass(frozen=True, eq=False)
class _MetaSegmentAttention:
    """Tensors of the kernel of `SegmentAttention` on a GPU, without values and scores."""

    pairs: tuple[SegmentRows, ...]
    num_queries: int
    num_keys: int
    causal: bool = True
    window: int = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cap: float) -> tuple[Tensor, Tensor]:
        """Returns the output and log-sum-exps."""
        q, k, v = (x.contiguous() for x in (q, k, v))
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=accumulation_dtype(q.dtype))
        return torch.empty_like(q), lse

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cap: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns dq, dk, dv."""
        dy, q, k, v, o = (x.contiguous() for x in (dy, q, k, v, o))
        wide = accumulation_dtype(q.dtype)
        dq, dk, dv = (x.new_empty(x.shape, dtype=wide) for x in (q, k, v))
        # The kernel returns gradients in the dtype of its inputs, which are added to these.
        parts = [torch.empty_like(x) for x in (q, k, v)]
        del parts
        return dq, dk, dv


def _flash_attention_with_workspace(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`flash_attention`, whose backward allocates what the kernels of GPUs do."""
    y: Tensor = apply_autograd(_AttentionWithWorkspace, *(x.transpose(1, 2) for x in (q, k, v)))
    return y.transpose(1, 2)


class _AttentionWithWorkspace(torch.autograd.Function):
    """Causal attention with the workspace of its backward kernel; q: `[b, h, s, k]`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Arguments: dropout_p, is_causal.
        attend = torch.ops.aten._scaled_dot_product_flash_attention
        y, sums, *ctx.ends, seed, offset, _ = attend(q, k, v, 0.0, True)
        ctx.save_for_backward(q, k, v, y, sums, seed, offset)
        found: Tensor = y
        return found

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        q, k, v, y, sums, seed, offset = ctx.saved_tensors
        size = attention_workspace_bytes(q.numel(), k.numel(), q.element_size())
        workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
        attend = torch.ops.aten._scaled_dot_product_flash_attention_backward
        dq, dk, dv = attend(dy, q, k, v, y, sums, *ctx.ends, 0.0, True, seed, offset)
        del workspace
        return dq, dk, dv


class _PeakMemoryCounter(HostMemoryCounter):
    """Counts the bytes of all tensors, and of gradients at the peak."""

    counts_communication = True

    def __init__(self, before: Any, queue: BucketScheduler) -> None:
        super().__init__(before, lambda: live_gradients(queue))
        self.queue = queue
        self.gradient_bytes = 0
        self.peak_layer = ""

    @property
    def peak_place(self) -> str:
        """The place of the peak: in a layer, or between layers (activation function, end of a
        norm).
        """
        if self.peak_layer:
            return f"in the layer {self.peak_layer}"
        return "between layers"

    def on_new_peak(self) -> None:
        """Records the current gradients and the layer that runs."""
        found = dict[int, int]()
        self.peak_layer = self.queue.grid.trace.where
        for bucket in self.queue.buckets:
            for some in (bucket.grad, bucket.final_grads):
                for x in [] if some is None else some.parts.values():
                    # By storage: several gradients may be views of one buffer.
                    found[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        self.gradient_bytes = sum(found.values())


def _count_collectives(calls: Sequence[launch.CommCall], grid: Grid) -> tuple[CollectiveCalls, ...]:
    """Sums calls by operation and axis."""
    counts = Counter[tuple[str, tuple[str, ...]]]()
    sizes = Counter[tuple[str, tuple[str, ...]]]()
    axes: dict[tuple[int, ...], tuple[str, ...]] = {}
    for call in calls:
        if call.ranks not in axes:
            axes[call.ranks] = _varying_axes(call.ranks, grid)
        counts[call.op, axes[call.ranks]] += 1
        sizes[call.op, axes[call.ranks]] += call.bytes
    return tuple(CollectiveCalls(*key, counts[key], size) for key, size in sizes.most_common())


def _varying_axes(ranks: Sequence[int], grid: Grid) -> tuple[str, ...]:
    """Returns the axes along which the coordinates of ranks differ."""
    # The flat index of a rank in AXES order is a mixed-radix number; its digits are the
    # coordinates.
    flat = grid.ranks.reshape(-1).tolist()
    place = {rank: i for i, rank in enumerate(flat)}
    steps = dict[str, int]()
    size = 1
    for axis in reversed(AXES):
        steps[axis] = size
        size *= grid.degrees[axis]
    return tuple(
        axis
        for axis in AXES
        if len({place[rank] // steps[axis] % grid.degrees[axis] for rank in ranks}) > 1
    )


# ---- text output -----------------------------------------------------------------------


def show_dry_run(
    run: RunConfig, *, world: int, rank: int, expert_imbalance: float = 1.0, output: str = ""
) -> int:
    """Prints the memory and communication of a rank; also writes it as JSON to `output` if
    given.
    """
    found = dry_run(run, world=world, rank=rank, load=expert_imbalance)
    if output:
        Path(output).write_text(json.dumps(found.to_dict(), indent=1))
    for line in dry_run_lines(found):
        print(line)
    return 0


def dry_run_lines(found: DryRunResult) -> list[str]:
    """Returns a dry run as lines of text."""
    place = " ".join(f"{axis}={i}" for axis, i in found.index.items() if i) or "all 0"
    out = [f"rank {found.rank} of {found.world} ({place}), {found.seconds:.1f} s"]
    if found.expert_load is not None:
        out.append(describe_expert_load(found.expert_load))
    out += [
        "",
        "settings left open, and their values",
        *(f"  {line}" for line in decision_lines(found.run)),
    ]
    out += ["", "shards"]
    width = max((len(name) for name in _group_shards(found)), default=0)
    for name, (part, whole, count) in _group_shards(found).items():
        times = f"  x {count}" if count > 1 else ""
        out.append(f"  {name:<{width}}  {_format_shape(part)} of {_format_shape(whole)}{times}")
    out += ["", f"{'axis':<24}{'operation':<16}{'calls':>8}{'MB':>14}"]
    for row in found.collectives:
        name = "·".join(row.axis)
        out.append(f"{name:<24}{row.op:<16}{row.calls:>8}{row.bytes / 1e6:>14.3f}")
    if found.collectives:
        nobody = []
    else:
        nobody = ["none: there is only one rank"]
    return [*out, *nobody, "", *breakdown.format_breakdown(found.memory)]


def describe_expert_load(load: float) -> str:
    """Returns the assumption about experts as text."""
    if load == 1.0:
        return "assumed: balanced experts (imbalance 1: every rank of expert gets as many rows)"
    return (
        f"assumed: expert imbalance {load:g} (this rank's experts get {load:g} times the mean "
        "number of rows)"
    )


def _group_shards(found: DryRunResult) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Returns shards by name, with equal shards of different blocks merged."""
    kinds: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {}
    for name, (part, whole) in found.shards.items():
        general = ".".join("*" if word.isdigit() else word for word in name.split("."))
        before = kinds.get(general, (part, whole, 0))
        kinds[general] = (part, whole, before[2] + 1)
    return kinds


def _format_shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
