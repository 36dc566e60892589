"""Predicts step time and peak memory of a workload in a layout on a cluster, for a framework.

    micro-batch   Σ blocks (compute + exposed communication of row, col, depth, context) + edges
    pipeline      m · slowest stage + (p-1)/v · mean stage
    step          pipeline + exposed part of the reduction over replicas + optimizer step

Communication that overlaps with compute slows it down by `OVERLAP_SLOWDOWN` of its time. A step on
many nodes waits for the slowest: `Cluster.straggle` per doubling. Terms are cached by their inputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Literal

from ranvier.config.plan import AXES, Plan
from ranvier.cost.layers import ActivationShape
from ranvier.cost.optimizer import ADAMW, OptimizerSpec
from ranvier.planner import comm_volume, communicators
from ranvier.planner.cluster import Cluster, Efficiency
from ranvier.planner.comm_volume import ShardingKey, StageBlocks
from ranvier.planner.document_lengths import DocumentLengths
from ranvier.planner.frameworks import RANVIER, Foreign, FrameworkProfile
from ranvier.planner.matrix_load import matrix_seconds, stage_matrix_load
from ranvier.planner.memory import total as space
from ranvier.planner.memory.breakdown import MemoryBreakdown
from ranvier.planner.model_spec import BlockSpec, ModelSpec
from ranvier.planner.time import communication, compute, links, offload, shared_cores
from ranvier.planner.time.communication import CommTime, RankGroups
from ranvier.planner.time.compute import BlockTimes, ComputeContext, Fp8Scaling
from ranvier.planner.time.context_attention import (
    NO_CONTEXT,
    ContextTime,
    attention_factor,
    context_attention_time,
)
from ranvier.planner.time.links import RankGroup

OVERLAP_SLOWDOWN = 0.15
"""Share of the time of overlapped communication that compute loses (Galvatron: 1.1 to 1.3)."""
BACKWARD_OVERLAP_SHARE = 0.7
"""Share of the last backward pass that overlaps with the reduction over replicas."""
ERROR_INTERVAL = (0.93, 1.22)
"""Measured over predicted time of 80% of published runs, each predicted with its whole framework
left out of the fit (benchmarks/published.py --leave framework)."""
UNKNOWN_CHIP = (0.9, 1.28)
"""The same with the chip left out of the fit (--leave chip)."""
STEP_PARTS = (
    "compute",
    "attention",
    "recompute",
    "row",
    "col",
    "expert",
    "context",
    "depth",
    "data",
    "pipe",
    "bubble",
    "update",
    "host",
    "other",
)


@dataclass(frozen=True)
class Workload:
    """A training job: model, sequence length, global batch and precision."""

    model: ModelSpec
    seq: int
    batch: int
    dtype: str = "bf16"
    optimizer: OptimizerSpec = ADAMW
    packs_documents: bool = False
    documents: DocumentLengths | None = None
    """Typical documents of samples, if they are known; otherwise a sample is one document."""


@dataclass(frozen=True)
class Candidate:
    """A parallel layout: a plan, and how it is placed on the machine."""

    plan: Plan
    axis_order: tuple[str, ...] = AXES
    """Order of the axes on the machine, outermost first."""
    states: Literal["device", "host"] = "device"
    fp8: Fp8Scaling = ""


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds by part and bytes by category, and derived quantities."""

    seconds_by_part: Mapping[str, float]
    memory: MemoryBreakdown
    tokens: int
    """Per step."""
    flops: float
    """Model FLOPs per step, without recomputation."""
    devices: int
    peak: float
    """Peak FLOPs per second of a device."""
    limit: float
    """Bytes of a device that are available to a run."""
    error_factors: tuple[float, float] = ERROR_INTERVAL
    """Bounds of measured over predicted time that contain 80% of such steps."""
    time_spread: float = 1.0
    """Longest over shortest time, if the prediction covers several layouts."""

    @property
    def step_seconds(self) -> float:
        """Seconds per step."""
        return sum(self.seconds_by_part.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second."""
        return self.tokens / self.step_seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: model FLOPs per second over the peak of all devices."""
        return self.flops / (self.step_seconds * self.devices * self.peak)

    @property
    def fits_memory(self) -> bool:
        """Whether the predicted memory fits on the device."""
        return self.memory.total_bytes <= self.limit

    @property
    def interval(self) -> tuple[float, float]:
        """80% interval of the step time, in seconds."""
        # Model error and spread between layouts are independent: add their logarithms in
        # quadrature.
        half = math.log(self.time_spread) / 2
        low, high = (
            math.copysign(math.hypot(math.log(x), half), x - 1) for x in self.error_factors
        )
        return self.step_seconds * math.exp(low), self.step_seconds * math.exp(high)


def merge_predictions(several: Sequence[Prediction]) -> Prediction:
    """Returns one prediction for several layouts of which one runs.

    Its time is the geometric middle of their times, its memory the largest.
    """
    order = sorted(several, key=lambda one: one.step_seconds)
    shortest = order[0].step_seconds
    longest = order[-1].step_seconds
    total = math.sqrt(shortest * longest)
    # The parts come from the layout nearest to the middle, scaled to sum up to it.
    near = min(order, key=lambda one: abs(math.log(one.step_seconds / total)))
    parts = {
        name: spent * total / near.step_seconds for name, spent in near.seconds_by_part.items()
    }
    most = max(order, key=lambda one: one.memory.total_bytes)
    return replace(
        near,
        seconds_by_part=parts,
        memory=most.memory,
        limit=most.limit,
        time_spread=longest / shortest,
    )


def predict_step(
    job: Workload,
    layout: Candidate,
    cluster: Cluster,
    runtime: FrameworkProfile = RANVIER,
    *,
    played: bool = True,
) -> Prediction:
    """Returns the prediction for one layout. played: see `predict_memory`."""
    plan = layout.plan
    device = cluster.device
    setup = _compute_context(job, layout, cluster, runtime)
    parts = step_seconds_by_part(job, layout, cluster, runtime)
    # MFU is relative to the peak of the dtype of matmuls.
    if layout.fp8 and "fp8" in device.peak:
        name = "fp8"
    else:
        name = job.dtype
    table = predict_memory(job, layout, cluster, runtime, compiled=setup.is_compiled, played=played)
    # Part of the allocator's reserve is released before a run is out of memory.
    spare = runtime.released_reserve * table.device.get("fragmentation", 0)
    return Prediction(
        parts,
        table,
        tokens=job.batch * job.seq,
        flops=model_flops(job.model, job.seq, job.documents) * job.batch * job.seq,
        devices=plan.world_size,
        peak=device.peak.get(name) or device.best_matmul_rate(name),
        limit=device.memory * (1 - runtime.memory_margin) - runtime.context_bytes + spare,
        error_factors=_error_factors(cluster),
    )


def _error_factors(cluster: Cluster) -> tuple[float, float]:
    """Returns the bounds of measured over predicted time for steps on such a cluster."""
    device = cluster.device
    # Default efficiencies and no measured matmuls: the chip was neither fitted nor measured.
    if device.reach == Efficiency() and not device.products:
        return UNKNOWN_CHIP
    return ERROR_INTERVAL


# The search compares variants of a layout and then asks for the best of them again.
@lru_cache(maxsize=4)
def step_seconds_by_part(
    job: Workload, layout: Candidate, cluster: Cluster, runtime: FrameworkProfile = RANVIER
) -> Mapping[str, float]:
    """Returns the seconds per step by part."""
    setup = _compute_context(job, layout, cluster, runtime)
    if not cluster.cores:
        return _StepEstimate.from_candidate(job, layout, cluster, runtime, setup).seconds_by_part()
    shared = shared_cores.shared_step_seconds(
        job.model,
        layout.plan,
        setup,
        cluster,
        runtime,
        packed=job.packs_documents,
        documents=job.documents,
        optimizer=job.optimizer,
    )
    return dict.fromkeys(STEP_PARTS, 0.0) | shared


def stage_seconds(job: Workload, layout: Candidate, cluster: Cluster) -> list[float]:
    """Returns the seconds per micro-batch on each stage of a layout of Ranvier."""
    plan = layout.plan
    setup = _compute_context(job, layout, cluster, RANVIER)
    if cluster.cores:
        busy = shared_cores.shared_stage_seconds(
            job.model,
            plan,
            setup,
            cluster,
            RANVIER,
            packed=job.packs_documents,
            documents=job.documents,
            optimizer=job.optimizer,
        )
        return [
            sum(spent for name, spent in parts.items() if name != "update") / plan.num_micro_batches
            for parts in busy
        ]
    step = _StepEstimate.from_candidate(job, layout, cluster, RANVIER, setup)
    spent = {
        name: _total_seconds(times, waits) for name, (_, times, waits) in step.time_parts().items()
    }
    every = comm_volume.build_all_stages(job.model, plan, job.seq)
    return [step.stage_total(stage, spent) for stage in every]


def block_compute_seconds(job: Workload, layout: Candidate, cluster: Cluster) -> float:
    """Returns the seconds per step that blocks spend on compute, without communication and
    bubble.
    """
    plan = layout.plan
    setup = _compute_context(job, layout, cluster, RANVIER)
    blocks = [part for part in job.model.parts if part.is_block]
    times = (compute.block_times(part, cluster.device, setup, RANVIER) for part in blocks)
    each = (one.forward + one.backward for one in times)
    whole = sum(part.count * spent for part, spent in zip(blocks, each, strict=True))
    return plan.num_micro_batches / plan.pipe * whole


def default_schedule(chunks: int) -> Literal["1f1b", "interleaved"]:
    """Returns the pipeline schedule whose time and memory have closed forms."""
    if chunks == 1:
        return "1f1b"
    return "interleaved"


def predict_memory(
    job: Workload,
    layout: Candidate,
    cluster: Cluster,
    runtime: FrameworkProfile,
    *,
    compiled: bool,
    played: bool = True,
) -> MemoryBreakdown:
    """Returns the bytes of a rank by category, with the formulas of its framework.

    played: simulate how many micro-batches the message-driven schedule keeps in flight, which takes
    about a second; otherwise assume the default schedule.
    """
    # Other frameworks have their own formulas, because `memory` describes only Ranvier.
    if isinstance(runtime, Foreign):
        return runtime.memory(job, layout)
    plan = layout.plan
    size = compute.DTYPE_BYTES[job.dtype]
    # Only schedules without a closed form are simulated.
    other = plan.schedule != default_schedule(plan.virtual_stages) and (
        played or plan.schedule != "message_driven"
    )
    found = space.peak_memory(
        job.model,
        layout.plan,
        ActivationShape(
            layout.plan.micro_batch, job.seq, itemsize=size, statistics_itemsize=max(size, 4)
        ),
        states=layout.states,
        optimizer=job.optimizer,
        compiled=compiled,
        fp8=layout.fp8,
        simulated=plan.pipe > 1 and other,
    )
    # Only temporary tensors fragment the caching allocator; resident ones do not.
    resting = ("weights", "master", "moments")
    moving = sum(size for name, size in found.device.items() if name not in resting)
    more = {"fragmentation": round(runtime.allocator_reserve * moving)}
    # CPU ranks communicate over Gloo, which allocates no communicator buffers on the device.
    if not cluster.cores:
        more["communicators"] = communicators.worst_stage_bytes(job.model, plan, job.optimizer)
    return replace(found, device={**found.device, **more})


def _compute_context(
    job: Workload, layout: Candidate, cluster: Cluster, runtime: FrameworkProfile
) -> ComputeContext:
    plan = layout.plan
    # As a run does: compile=auto compiles only on GPUs and only blocks whose layers are not split.
    alone = plan.context == plan.depth == plan.row == plan.col == 1
    compiled = plan.compile == "on" or (plan.compile == "auto" and alone and not cluster.cores)
    # Expert-parallel blocks with recomputation run eagerly.
    compiled &= plan.expert == 1 or plan.recompute == "none"
    return ComputeContext(
        samples=plan.micro_batch,
        seq=job.seq,
        row=plan.row,
        col=plan.col,
        context=plan.context,
        col_splits_features=plan.col_splits == "features",
        dtype=job.dtype,
        fp8=layout.fp8,
        ranks=min(plan.world_size, cluster.per_node) if cluster.cores else 1,
        is_compiled=compiled,
        is_serial=runtime.launch_blocking or bool(cluster.cores),
    )


@lru_cache(maxsize=1000)
def model_flops(model: ModelSpec, seq: int, documents: DocumentLengths | None = None) -> float:
    """Returns the model FLOPs per token, forward and backward: 6 per weight, plus causal attention
    within documents.
    """
    setup = ComputeContext(samples=1, seq=seq)
    total = 0.0
    for part in model.parts:
        # Of three matmuls one is in forward and two are in backward.
        often = part.count * (part.calls.total + 2 * part.calls.with_grad) / 3
        total += often * sum(6.0 * out * into for out, into in compute.matmul_shapes(part, setup))
        for leaf in part.layers_of_kind("attention"):
            heads = compute.local_heads(part, leaf, setup)
            # Mean number of visible keys per query under a causal mask with an optional window.
            seen = min(leaf.window or seq, seq)
            share = documents.score_share(leaf.window) if documents else 1.0
            total += often * 12.0 * heads * leaf.head_dim * seen * (1 - seen / seq / 2) * share
    return total


def _recompute_seconds(
    times: BlockTimes, recompute: str, runtime: FrameworkProfile, *, keeps_attention: bool
) -> float:
    """Returns the seconds per micro-batch that a block spends on recomputation.

    keeps_attention: the result of attention is saved.
    """
    if recompute == "full":
        saved = times.attention if keeps_attention else 0.0
        found = times.forward - times.recompute_savings - saved
    elif recompute != "selective":
        return 0.0
    # Every other matmul is recomputed (see `FrameworkProfile.selective_recompute`).
    elif runtime.selective_recompute == "half":
        found = times.matmuls / 2 + times.elementwise
    elif runtime.selective_recompute == "small":
        found = times.elementwise
    else:
        found = times.attention
    return found * times.grad_share


@lru_cache(maxsize=50_000)
def _slowest_stage_blocks(
    pipe: int, chunks: int, blocks: int, cut: str, entry: float, head: float
) -> float:
    """Returns the work of the slowest stage. It, `entry` and `head` are in units of a block."""
    if cut == "balanced":
        # The last stage takes fewer blocks to compensate for the head: try all such splits.
        least = max(blocks // pipe - math.ceil(head) - 1, 0)
        return min(
            max(last + head, math.ceil((blocks - last) / (pipe - 1)) + entry)
            for last in range(least, blocks // pipe + 1)
        )
    # An even cut: embedding and head are added to equal stages.
    if blocks % (pipe * chunks) == 0:
        return blocks // pipe + max(entry, head)
    # Otherwise embedding and head replace a block each.
    each = math.ceil((blocks + 2) / pipe)
    return max(each, each - 1 + max(entry, head))


TimesByPart = Mapping[str, tuple[BlockSpec, BlockTimes, dict[str, float]]]
"""Times of every part per micro-batch, and its exposed communication, by name of the part."""


@dataclass(frozen=True)
class UpdatePasses:
    """What an elementwise update reads and writes per parameter, relative to AdamW."""

    saved_state_bytes: float = 0.0
    """Bytes of states that AdamW has in addition."""
    message_bytes: float = 0.0
    """Bytes of the values of hidden matrices that are written for their owners and read again."""
    num_transfers: float = 1.0
    """How often offloaded states are moved to the device and back."""

    @classmethod
    def from_optimizer(cls, optimizer: OptimizerSpec, hidden: float) -> UpdatePasses:
        """Returns them for a stage. hidden: share of hidden matrices in its parameters."""
        one, other = (optimizer.num_moments(is_hidden_matrix=kind) for kind in (True, False))
        moments = hidden * one + (1 - hidden) * other
        rule = optimizer.matrix_rule
        saved = 4 * (2 - moments)
        if rule is None:
            return cls(saved)
        # Each exchange writes a message and reads another one.
        return cls(saved, hidden * 4 * rule.itemsize, 1 + hidden * (rule.num_passes - 1))


@dataclass(frozen=True)
class _StepEstimate:
    """Intermediate results of the time prediction of a step."""

    workload: Workload
    candidate: Candidate
    cluster: Cluster
    framework: FrameworkProfile
    compute_context: ComputeContext
    rank_groups: RankGroups
    comm_time: CommTime

    @classmethod
    def from_candidate(
        cls,
        job: Workload,
        layout: Candidate,
        cluster: Cluster,
        runtime: FrameworkProfile,
        setup: ComputeContext,
    ) -> _StepEstimate:
        """Returns the estimate for a layout, with its communication times."""
        plan = layout.plan
        places = RankGroups(plan, layout.axis_order, cluster.per_node)
        if isinstance(runtime, Foreign):
            spoken = runtime.spoken(job.model, plan, setup, cluster, places)
        else:
            spoken = communication.ranvier_comm_time(
                job.model, plan, setup, cluster, places, job.optimizer
            )
        return cls(job, layout, cluster, runtime, setup, places, spoken)

    @property
    def overlapped_comm(self) -> tuple[str, ...]:
        """Communication that overlaps with compute.

        Compiled graphs of Ranvier overlap only communication after them; layers with experts on
        several ranks are outside of graphs.
        """
        graph = self.compute_context.is_compiled and not self.framework.overlaps_in_graphs
        words = ("dw", "moe_dispatch") if graph else self.candidate.plan.overlap
        return tuple(word for word in self.candidate.plan.overlap if word in words)

    def exposed_seconds(self, spent: float, behind: float) -> float:
        """Returns the exposed seconds of communication that overlaps with `behind` seconds of
        compute.
        """
        gone = min(spent, behind)
        return spent - gone + OVERLAP_SLOWDOWN * gone

    def time_blocks(self) -> list[tuple[BlockSpec, BlockTimes, dict[str, float]]]:
        """Returns the times of each kind of block per micro-batch, and its exposed seconds by
        part.
        """
        plan = self.candidate.plan
        runtime = self.framework
        overlaps = self.overlapped_comm
        found = []
        for part in self.workload.model.parts:
            if not part.is_block:
                continue
            times = self.time_block(part)
            spoken = self.comm_time.for_part(part)
            again = _recompute_seconds(
                times,
                plan.recompute,
                runtime,
                # Ranvier saves the result of attention over context.
                keeps_attention=plan.context > 1 and not isinstance(runtime, Foreign),
            )
            waits = {"recompute": again}
            # Collectives of dx overlap with the dW matmul, which does not depend on them.
            under = sum(spoken.overlappable_seconds.values())
            left = 1.0
            if under and "dx" in overlaps and runtime.overlaps_dx:
                left = self.exposed_seconds(under, times.dw) / under
            # Outputs of ladder layers are reduced, and their gradients gathered, behind the next
            # module.
            pending = sum(spoken.pending_seconds.values())
            exposed = 1.0
            if pending and "residual" in overlaps:
                able = times.forward + times.backward
                exposed = self.exposed_seconds(pending, able) / pending
            for axis in communication.ACTIVATION_AXES:
                spent = spoken.exposed_seconds[axis] + left * spoken.overlappable_seconds[axis]
                spent += exposed * spoken.pending_seconds[axis]
                waits[axis] = spent * (1 - runtime.row_overlap)
            # The all-to-all of tokens overlaps with the shared expert.
            if "moe_dispatch" in overlaps:
                beside = compute.shared_expert_seconds(
                    part, self.cluster.device, self.compute_context
                )
                waits["expert"] = self.exposed_seconds(waits["expert"], beside)
            # The weights of the next block are gathered, and gradients reduced, during a whole
            # block.
            behind = times.forward + times.backward + again
            if "weight_gather" in overlaps:
                able = behind
            else:
                able = 0.0
            waits["depth"] = self.exposed_seconds(spoken.depth_seconds, able)
            waits["context"] = self.exposed_context_seconds(part, times)
            found.append((part, times, waits))
        return found

    def context_time(self, part: BlockSpec) -> ContextTime:
        """Returns the communication and the balance of a block's attention over context."""
        plan = self.candidate.plan
        if plan.context == 1 or isinstance(self.framework, Foreign):
            return NO_CONTEXT
        size = compute.DTYPE_BYTES[self.workload.dtype]
        return context_attention_time(
            self.workload.model,
            part,
            ShardingKey.from_plan(plan).activation_key,
            ActivationShape(plan.micro_batch, self.workload.seq, size, max(size, 4)),
            self.workload.documents,
            self.cluster,
            self.rank_groups["context",],
        )

    def exposed_context_seconds(self, part: BlockSpec, times: BlockTimes) -> float:
        """Returns the exposed seconds of a block over context per micro-batch."""
        plan = self.candidate.plan
        if plan.context == 1:
            return 0.0
        if isinstance(self.framework, Foreign):
            spent = self.framework.context_seconds(
                part, plan, self.compute_context, self.cluster, self.rank_groups["context",]
            )
            behind = times.attention + times.attention_backward
            return self.exposed_seconds(spent, behind if self.framework.overlaps_context else 0.0)
        found = self.context_time(part)
        overlaps = "context_keys" in self.overlapped_comm
        hidden = found.hidden_share if overlaps else 0.0
        exposed = 0.0
        for spent, core in (
            (found.forward, times.attention),
            (found.backward, times.attention_backward),
        ):
            exposed += (1 - hidden) * spent
            exposed += self.exposed_seconds(hidden * spent, found.hiding_share * core)
        return exposed

    def time_block(self, part: BlockSpec) -> BlockTimes:
        """Returns the times of a block, with gradient accumulation if there are several
        micro-batches.
        """
        device = self.cluster.device
        runtime = self.framework
        times = compute.block_times(part, device, self.compute_context, runtime)
        factor = attention_factor(part, self.workload.documents) * self.context_time(part).balance
        if factor != 1.0:
            times = replace(
                times,
                attention=times.attention * factor,
                attention_backward=times.attention_backward * factor,
            )
        if self.candidate.plan.num_micro_batches == 1:
            return times
        weights = sum(out * into for out, into in compute.matmul_shapes(part, self.compute_context))
        # The accumulated gradient is read and written; unless fused, the 16-bit one is read as
        # well.
        size = weights * (2 * runtime.grad_bytes + (0 if runtime.fused_grad_accumulation else 2))
        more = compute.memory_seconds(
            device, size, self.compute_context.ranks, runtime.bandwidth_factor
        )
        return replace(times, elementwise_backward=times.elementwise_backward + more)

    def edge_times(self) -> tuple[BlockTimes, BlockTimes]:
        """Returns the compute times of embedding and head per micro-batch, forward and backward."""
        model = self.workload.model
        device = self.cluster.device
        entry = compute.embedding_seconds(model.parts[0], device, self.compute_context)
        head = compute.head_seconds(model.parts[-1], device, self.compute_context, self.framework)
        return _edge_block_times(*entry), _edge_block_times(*head)

    def edge_waits(self) -> tuple[dict[str, float], dict[str, float]]:
        """Returns the communication of embedding and head per micro-batch, by part. None
        overlaps.
        """
        plan = self.candidate.plan
        parts = self.workload.model.parts
        found = []
        for part in (parts[0], parts[-1]):
            own = self.comm_time.for_part(part)
            waits = {
                axis: own.exposed_seconds[axis] + own.overlappable_seconds[axis]
                for axis in communication.ACTIVATION_AXES
            }
            waits["depth"] = own.depth_seconds
            # Stages that share the vocabulary compute a part of it each, but all communicate.
            often = plan.pipe if plan.vocab_over_pipe else 1
            found.append({name: spent * often for name, spent in waits.items()})
        return found[0], found[1]

    def time_parts(self) -> dict[str, tuple[BlockSpec, BlockTimes, dict[str, float]]]:
        """Returns the times and exposed seconds of every part per micro-batch, by name of the
        part.
        """
        parts = self.workload.model.parts
        ends = zip((parts[0], parts[-1]), self.edge_times(), self.edge_waits(), strict=True)
        return {
            part.name: (part, times, waits) for part, times, waits in (*self.time_blocks(), *ends)
        }

    def seconds_by_part(self) -> dict[str, float]:
        """Returns the seconds per step by part."""
        plan = self.candidate.plan
        laps = self.time_parts()
        micro = plan.num_micro_batches
        slowest, mean = self.slowest_and_mean_stage(laps)
        found = dict.fromkeys(STEP_PARTS, 0.0)
        # The parts below are means over stages; the imbalance is counted as bubble.
        share = micro / plan.pipe
        for part, times, waits in laps.values():
            core = times.attention + times.attention_backward
            n = share * part.count
            found["attention"] += n * core
            found["compute"] += n * (times.forward + times.backward - core)
            for name, spent in waits.items():
                found[name] += n * spent
        pipe = self.exposed_message_seconds()
        found["pipe"] += micro * pipe
        # A forward pass is about a third of a micro-batch.
        for name, spent in self.seconds_after_backward(laps, slowest / 3).items():
            found[name] += spent
        # Fill and drain, which chunks shorten, plus waiting for the slowest stage.
        bubble = (plan.pipe - 1) / plan.virtual_stages * (mean + pipe / plan.virtual_stages)
        found["bubble"] = bubble + micro * (slowest - mean)
        nodes = plan.world_size / self.cluster.per_node
        lost = self.cluster.straggle * math.log2(max(nodes, 1.0))
        # Last, because a straggler delays everything else.
        found["other"] += lost * sum(found.values())
        return found

    def seconds_after_backward(self, laps: TimesByPart, forward: float) -> dict[str, float]:
        """Returns the seconds after the last backward pass, by part, on the stage with most of
        them.

        forward: seconds of a forward pass, which overlaps with an update of offloaded states.
        """
        plan = self.candidate.plan
        model = self.workload.model
        spoken = self.comm_time
        # Communication by stage is not known for other frameworks: use means over stages.
        if not spoken.by_stage:
            back = sum(part.count * t.backward for part, t, _ in laps.values() if part.is_block)
            data = self.exposed_reduction_seconds(
                spoken.grad_reduction + spoken.weight_gather,
                BACKWARD_OVERLAP_SHARE * back / plan.pipe,
            )
            return {
                "data": data,
                **self.update_seconds(communication.rank_parameters(model, plan), forward),
            }
        found = []
        backward = {name: times.backward for name, (_, times, _) in laps.items()}
        for one in spoken.by_stage:
            # The ranks of expert split the experts, and the states of all other weights.
            split = plan.row * plan.col * plan.expert
            numbers = communication.rank_parameters_of_stage(model, one.stage, split)
            spent = self.update_seconds(numbers, forward, self.update_passes(one.stage))
            spent["update"] = spent.get("update", 0.0) + one.matrix_exchange
            spent["update"] += self.matrix_update_seconds(one.stage)
            back = self.stage_total(one.stage, backward)
            spent["data"] = self.exposed_reduction_seconds(
                one.grad_reduction + one.weight_gather, BACKWARD_OVERLAP_SHARE * back
            )
            spent["other"] = one.other_seconds
            found.append(spent)
        return max(found, key=lambda spent: sum(spent.values()))

    def stage_total(self, stage: StageBlocks, spent: Mapping[str, float]) -> float:
        """Returns the seconds of a stage per micro-batch. spent: seconds of each part, by name."""
        if not self.candidate.plan.vocab_over_pipe:
            return sum([count * spent[part.name] for part, count in stage.block_counts])
        # Each stage computes an equal share of the vocabulary.
        share = 1 / stage.stage_spec.num_stages
        return sum(n * spent[p.name] * (1 if p.is_block else share) for p, n in stage.block_counts)

    def slowest_and_mean_stage(self, laps: TimesByPart) -> tuple[float, float]:
        """Returns the seconds per micro-batch on the slowest stage and on average."""
        plan = self.candidate.plan
        model = self.workload.model
        spent = {name: _total_seconds(times, waits) for name, (_, times, waits) in laps.items()}
        mean = sum(part.count * spent[part.name] for part in model.parts) / plan.pipe
        if plan.pipe == 1:
            return mean, mean
        if self.comm_time.by_stage:
            slowest = max(self.stage_total(one.stage, spent) for one in self.comm_time.by_stage)
            return max(slowest, mean), mean
        entry = spent[model.parts[0].name]
        head = spent[model.parts[-1].name]
        lap = (mean * plan.pipe - entry - head) / model.num_layers
        # All stages share embedding and head equally, so the mean stands for every stage.
        if plan.vocab_over_pipe:
            return mean, mean
        blocks = model.num_layers
        cut = self.framework.stage_partition
        most = _slowest_stage_blocks(
            plan.pipe, plan.virtual_stages, blocks, cut, entry / lap, head / lap
        )
        return max(most * lap, mean), mean

    def exposed_message_seconds(self) -> float:
        """Returns the exposed seconds of the messages between stages per micro-batch."""
        plan = self.candidate.plan
        runtime = self.framework
        if plan.pipe == 1:
            return 0.0
        # The residual stream `[b, s, d/col]`; row ranks may send a part each.
        width = self.workload.model.units["embed"] / plan.col
        size = self.compute_context.tokens * width * compute.DTYPE_BYTES[self.workload.dtype]
        if runtime.scatters_messages or runtime.sequence_parallel:
            size /= plan.row
        # A ladder layer also reads an addend.
        size *= max(part.num_inputs for part in self.workload.model.parts)
        # A stage's neighbor is in another node unless all stages fit into one.
        pair = RankGroup(2, 2 if self.rank_groups["pipe",].num_nodes == 1 else 1)
        one = links.collective_seconds(self.cluster, "send", size, pair)
        # One activation forward and one gradient backward for each chunk.
        return 2 * plan.virtual_stages * one * (1 - runtime.pipe_overlap)

    def exposed_reduction_seconds(self, spent: float, behind: float) -> float:
        """Returns the exposed seconds of a reduction over replicas. behind: overlapping
        compute seconds.
        """
        if not self.framework.overlaps_grad_reduction or "dw" not in self.overlapped_comm:
            return spent
        return self.exposed_seconds(spent, behind)

    def matrix_update_seconds(self, stage: StageBlocks) -> float:
        """Returns the seconds of the products of whole matrices on the busiest rank of a stage."""
        rule = self.workload.optimizer.matrix_rule
        if rule is None:
            return 0.0
        plan = self.candidate.plan
        ranks = plan.world_size // plan.pipe
        load = stage_matrix_load(self.workload.model, stage, ranks, rule)
        return matrix_seconds(self.cluster.device, load, rule)

    def update_passes(self, stage: StageBlocks) -> UpdatePasses:
        """Returns what an update reads and writes, relative to AdamW."""
        optimizer = self.workload.optimizer
        model = self.workload.model
        whole = communication.rank_parameters_of_stage(model, stage, 1)
        hidden = comm_volume.count_matrix_elements(model, stage) / max(whole, 1.0)
        return UpdatePasses.from_optimizer(optimizer, hidden)

    def update_seconds(
        self, numbers: float, forward: float, passes: UpdatePasses | None = None
    ) -> dict[str, float]:
        """Returns the seconds of the optimizer step: 2 · states + gradient + weight bytes at memory
        bandwidth.

        numbers: parameters of a rank, before sharding over depth, data and context. passes: what
        the optimizer does instead of AdamW.
        """
        passes = passes or UpdatePasses()
        plan = self.candidate.plan
        runtime = self.framework
        cluster = self.cluster
        # depth shards the weights themselves; data and context shard only the states (ZeRO).
        shards = plan.depth * (plan.data * plan.context if runtime.shards_states else 1)
        own = numbers / shards
        ranks = self.compute_context.ranks
        # Offloaded states: only the part that does not overlap with the next forward pass is
        # exposed.
        if self.candidate.states == "host":
            moved = own * (runtime.state_bytes - passes.saved_state_bytes) * passes.num_transfers
            away = offload.StepTraffic(0, 0, round(moved), round(own), 0, 0, 0)
            whole = offload.offloaded_update_seconds(away, _host_rates(cluster), cpu=False)
            # The update of a block overlaps with the next forward pass of the blocks before it:
            # at least one block's share is exposed.
            blocks = max(self.workload.model.num_layers // plan.pipe, 1)
            return {"host": max(whole / blocks, whole - forward + forward / blocks)}
        usual = 2 * runtime.state_bytes + runtime.grad_bytes + 2
        each = usual - 2 * passes.saved_state_bytes + passes.message_bytes
        size = own * each
        # A measured rate of AdamW takes precedence over the bandwidth model.
        rate = cluster.device.measured_rate("update", ranks=ranks)
        spent = compute.memory_seconds(cluster.device, size, ranks, runtime.bandwidth_factor)
        return {"update": own / rate * each / usual if rate else spent}


def _total_seconds(times: BlockTimes, waits: Mapping[str, float]) -> float:
    """Returns the seconds of a part per micro-batch."""
    return times.forward + times.backward + sum(waits.values())


def _edge_block_times(forward: float, backward: float) -> BlockTimes:
    """Returns the times of the embedding or head, which have no attention or elementwise part."""
    return BlockTimes(forward, 0.0, 0.0, backward, 0.0, 0.0, 0.0, 0.0)


def _host_rates(cluster: Cluster) -> Any:
    host = cluster.host
    return SimpleNamespace(to_device=host.to_device, to_host=host.to_host, adam=host.adam)
