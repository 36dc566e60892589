"""Step time of ranks that share the cores of a host (CPU clusters).

Nothing overlaps on such machines, because communication also needs a core. The times of a rank are
summed, each term at the rate that was measured with this many concurrent ranks:

    compute         matmuls + attention + bytes between them + operations launched by Python
    communication   Σ calls · (latency + bytes / bandwidth + slice), of all in `comm_volume`
    step            max(busy, (busy + bubble) / crowd)

crowd: ranks per core. If it is above 1, other ranks compute while a stage waits, and communication
waits for ranks that are not scheduled: a time slice of the scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import log2, prod

from ranvier.config.plan import Plan
from ranvier.cost.layers import ActivationShape
from ranvier.cost.optimizer import ADAMW, OptimizerSpec
from ranvier.planner.cluster import Cluster, Device
from ranvier.planner.comm_volume import (
    CommVolume,
    ShardingKey,
    StageBlocks,
    build_stage_blocks,
    find_stage_starts,
    step_comm_volume,
)
from ranvier.planner.document_lengths import DocumentLengths
from ranvier.planner.frameworks import FrameworkProfile
from ranvier.planner.matrix_load import matrix_seconds, stage_matrix_load
from ranvier.planner.model_spec import BlockSpec, ModelSpec
from ranvier.planner.time import compute, links
from ranvier.planner.time.compute import DTYPE_BYTES, ComputeContext
from ranvier.planner.time.context_attention import attention_factor, context_attention_time
from ranvier.planner.time.links import RankGroup
from ranvier.sharding import dim_name, num_packed_dims

ELEMENTS_PER_DIM: Mapping[str, float] = {
    "embed": 86.0,
    "heads": 39.0,
    "kv_heads": 27.0,
    "mlp": 14.0,
}
"""Elements that a block reads or writes between matmuls per token, forward and backward, for each
element of a dim; counted below torch's dispatcher."""
ELEMENTS_PER_LOGIT = 24.0
ELEMENTS_OUTSIDE_BLOCKS = 38.0
"""The same per logit, and per element of the residual stream outside of blocks."""
RECOMPUTE_SHARES = (0.58, 0.3)
"""Share of the operations and elements that recomputation of a block repeats."""
OPS_PER_BLOCK = 210
OPS_PER_DOCUMENT = 64
OPS_OVER_CONTEXT = 320
OPS_OUTSIDE_BLOCKS = 168
OPS_PER_UPDATE = 37
"""Operations launched by Python: per block; per packed sample in a block, for its documents; per
block for attention over context; outside of blocks; per matrix in the optimizer step."""
CHUNKED_ATTENTION = 1.75
"""Time of attention over context, which is computed in chunks of queries, relative to SDPA: three
shapes of 2,048 and 4,096 tokens over 4 and 8 ranks, on one core."""
SCHEDULER_SLICE = 0.75e-3
"""Minimum time slice of the Linux scheduler in seconds, times 1 + log2 of the cores, up to 8."""
PYTHON_OVERHEAD = 1.3
"""Time of one operation including the code of Ranvier around it, relative to a bare forward and
backward pair."""


def shared_step_seconds(
    model: ModelSpec,
    plan: Plan,
    setup: ComputeContext,
    cluster: Cluster,
    runtime: FrameworkProfile,
    *,
    packed: bool,
    documents: DocumentLengths | None = None,
    optimizer: OptimizerSpec = ADAMW,
) -> dict[str, float]:
    """Returns the seconds per step by part."""
    stages = shared_stage_seconds(
        model,
        plan,
        setup,
        cluster,
        runtime,
        packed=packed,
        documents=documents,
        optimizer=optimizer,
    )
    return _combine_stages(stages, plan, cluster)


def shared_stage_seconds(
    model: ModelSpec,
    plan: Plan,
    setup: ComputeContext,
    cluster: Cluster,
    runtime: FrameworkProfile,
    *,
    packed: bool,
    documents: DocumentLengths | None = None,
    optimizer: OptimizerSpec = ADAMW,
) -> list[dict[str, float]]:
    """Returns the seconds per step on each stage by part, without waiting."""
    flow = ActivationShape(
        plan.micro_batch, setup.seq, DTYPE_BYTES[setup.dtype], statistics_itemsize=4
    )
    firsts = find_stage_starts(model, plan, setup.seq)
    found = []
    for index in range(plan.pipe):
        here = build_stage_blocks(
            model, index, plan.pipe, plan.virtual_stages, firsts, plan.vocab_over_pipe
        )
        parts = _stage_compute_seconds(here, plan, setup, cluster, runtime, packed)
        parts["attention"] *= _attention_factor(model, plan, flow, cluster, documents)
        # Every collective counts, because nothing overlaps on shared cores.
        for row in step_comm_volume(
            model, plan, flow, stage=index, orders=0, optimizer=optimizer
        ).rows:
            name, seconds = _communication_seconds(row, plan, cluster)
            parts[name] = parts.get(name, 0.0) + seconds
        parts["update"] = parts.get("update", 0.0) + _update_seconds(here, plan, setup, cluster)
        if optimizer.matrix_rule is not None:
            ranks = plan.world_size // plan.pipe
            load = stage_matrix_load(model, here, ranks, optimizer.matrix_rule)
            parts["update"] += matrix_seconds(cluster.device, load, optimizer.matrix_rule)
        found.append(parts)
    return found


def _attention_factor(
    model: ModelSpec,
    plan: Plan,
    flow: ActivationShape,
    cluster: Cluster,
    documents: DocumentLengths | None,
) -> float:
    """Returns the attention of the slowest rank relative to an equal share of whole samples."""
    block = next(part for part in model.parts if part.is_block)
    found = context_attention_time(
        model,
        block,
        ShardingKey.from_plan(plan).activation_key,
        flow,
        documents,
        cluster,
        RankGroup(plan.context, plan.context),
    )
    # Ranks that wait leave their cores to others.
    crowd = max(plan.world_size / cluster.cores, 1.0)
    return attention_factor(block, documents) * max(found.balance / crowd, 1.0)


def _combine_stages(
    stages: list[dict[str, float]], plan: Plan, cluster: Cluster
) -> dict[str, float]:
    """Returns the average stage, and the bubble in which stages wait for each other."""
    names = {name for parts in stages for name in parts}
    mean = {name: sum(parts.get(name, 0.0) for parts in stages) / len(stages) for name in names}
    busy = sum(mean.values())
    slowest = max(sum(parts.values()) for parts in stages)
    # Fill and drain of the pipeline, plus the imbalance of the stages. With several ranks per core,
    # other ranks use the core in this time, so only the part above the busy time remains.
    fill = (plan.pipe - 1) / plan.virtual_stages / plan.num_micro_batches
    bubble = (busy - mean.get("update", 0.0)) * fill + slowest - busy
    crowd = max(plan.world_size / cluster.cores, 1.0)
    return {**mean, "bubble": max((busy + bubble) / crowd - busy, 0.0)}


def _stage_compute_seconds(
    stage: StageBlocks,
    plan: Plan,
    setup: ComputeContext,
    cluster: Cluster,
    runtime: FrameworkProfile,
    packed: bool,
) -> dict[str, float]:
    """Returns the compute seconds of a rank of a stage per step."""
    found = {"compute": 0.0, "attention": 0.0, "recompute": 0.0}
    for part, count in stage.block_counts:
        own = _part_seconds(part, cluster, setup, runtime, packed)
        times = count * plan.num_micro_batches
        found["compute"] += times * own[0]
        found["attention"] += times * own[1]
        if part.is_block and plan.recompute in ("selective", "full"):
            found["recompute"] += times * own[2 if plan.recompute == "selective" else 3]
    return found


@lru_cache(maxsize=50_000)
def _part_seconds(
    part: BlockSpec,
    cluster: Cluster,
    setup: ComputeContext,
    runtime: FrameworkProfile,
    packed: bool,
) -> tuple[float, float, float, float]:
    """Returns the seconds of a part per micro-batch: compute, attention, selective and full
    recomputation.
    """
    device = cluster.device
    ranks = setup.ranks
    alone = setup
    setup = setup.with_streams(part)
    tokens = setup.tokens
    # Bytes of one feature of this rank's tokens.
    cell = tokens / (setup.row * setup.col) * DTYPE_BYTES[setup.dtype]
    between = device.measured_rate("between", ranks=ranks, usual=device.bandwidth)
    start = PYTHON_OVERHEAD * device.measured_rate("pair", ranks=ranks, usual=4.0 * device.launch)
    # Embedding and head: each counts half of the operations outside of blocks.
    if not part.is_block:
        width = max(
            (leaf.shape[-1] for leaf in part.layers_of_kind("embedding", "head")), default=0
        )
        numbers = ELEMENTS_OUTSIDE_BLOCKS / 2 * width + sum(
            ELEMENTS_PER_LOGIT * leaf.shape[0] for leaf in part.layers_of_kind("head")
        )
        products = sum(
            sum(_matmul_seconds(device, tokens, out, into, setup))
            for out, into in compute.matmul_shapes(part, setup)
        )
        return products + numbers * cell / between + OPS_OUTSIDE_BLOCKS / 2 * start, 0.0, 0.0, 0.0
    times = compute.block_times(part, device, alone, runtime)
    forward = times.matmuls
    back = times.dx + times.dw
    numbers = sum(ELEMENTS_PER_DIM.get(dim, 0.0) * size for dim, size in _dim_sizes(part).items())
    # Samples per rank in attention.
    inside = setup.samples / (1 if setup.col_splits_features else setup.col)
    count = OPS_PER_BLOCK + (OPS_PER_DOCUMENT * inside if packed else 0)
    if setup.context > 1:
        count = OPS_PER_BLOCK + OPS_OVER_CONTEXT
    small = numbers * cell / between
    launched = count * start
    core = times.attention + times.attention_backward
    if setup.context > 1:
        core *= CHUNKED_ATTENTION
    # Selective recomputation repeats the operations between matmuls, full recomputation also
    # matmuls.
    light = RECOMPUTE_SHARES[0] * launched + RECOMPUTE_SHARES[1] * small
    # The result of attention over context is saved, not recomputed.
    attention = times.attention if setup.context == 1 else 0.0
    return forward + back + small + launched, core, light, light + forward + attention


def _matmul_seconds(
    device: Device, tokens: int, out: int, into: int, setup: ComputeContext
) -> tuple[float, float, float]:
    """Returns the seconds of a layer's three matmuls."""
    shapes = ((tokens, out, into, "y"), (tokens, into, out, "dx"), (out, into, tokens, "dw"))
    return tuple(  # type: ignore[return-value]
        compute.matmul_seconds(device, m, n, k, setup.dtype, kind, setup.ranks)
        for m, n, k, kind in shapes
    )


def _dim_sizes(part: BlockSpec) -> dict[str, int]:
    """Returns the size of each dim of a block."""
    found: dict[str, int] = {}
    for leaf in part.layers:
        for one in leaf.inside or (leaf,):
            for dim, size in zip(one.dims, one.shape, strict=False):
                name = dim_name(dim)
                found[name] = max(found.get(name, 0), size // num_packed_dims(dim))
    return found


def _communication_seconds(row: CommVolume, plan: Plan, cluster: Cluster) -> tuple[str, float]:
    """Returns the part of the step that communication belongs to, and its seconds. Messages count
    for the sender.
    """
    name = row.axis[0] if row.axis else "other"
    size = prod(plan.degrees[axis] for axis in row.axis)
    if row.op == "receive":
        return name, 0.0
    op, size = ("send", 2) if row.op == "send" else (row.op, size)
    # Broadcasts are not measured; use an all-gather of the same size.
    if op == "broadcast":
        op = "all_gather"
    # Oversubscribed cores: a peer may have to be scheduled first.
    if plan.world_size > cluster.cores:
        wait = SCHEDULER_SLICE * (1 + log2(min(cluster.cores, 8)))
    else:
        wait = 0.0
    return name, row.count * (
        links.collective_seconds(cluster, op, row.bytes, RankGroup(size, size)) + wait
    )


def _update_seconds(
    stage: StageBlocks, plan: Plan, setup: ComputeContext, cluster: Cluster
) -> float:
    """Returns the seconds of the optimizer step for a rank's shard."""
    device = cluster.device
    whole = sum(n * part.num_parameters for part, n in stage.block_counts)
    # Replicas split the states, and expert splits experts: all ranks of a stage share the update.
    own = whole * plan.pipe / plan.world_size
    matrices = sum(count * _count_matrices(part) for part, count in stage.block_counts)
    # 28 bytes per parameter: weight, gradient and two moments read, all but the gradient written.
    rate = device.measured_rate("update", ranks=setup.ranks, usual=device.bandwidth / 28)
    start = device.measured_rate("launch", ranks=setup.ranks, usual=device.launch)
    return own / rate + OPS_PER_UPDATE * matrices * start


def _count_matrices(part: BlockSpec) -> int:
    return sum(len(leaf.inside) or 1 for leaf in part.layers if leaf.shape or leaf.inside)
