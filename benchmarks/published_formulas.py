"""Formulas for bytes and seconds of a rank in other frameworks, according to their papers.

    weights, gradients, states    bytes per parameter, sharded as the framework does
    activations                   a block saves the inputs of matmuls and norms (arXiv 2205.05198),
                                  times the micro-batches in flight on the first stage
    logits                        of a micro-batch, on the last stage

plus gathered blocks, fixed buffers, and a share of all for memory that the allocator reserves but
does not use. The worst stage counts.

The communication follows from the layers of a block: with T tokens per rank and d features, two
gathers and two scatters of T·d over row, the same in backward plus both gathers again (sequence
parallelism), or two all-reduces forward and backward without it.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from ranvier.config.plan import Plan
from ranvier.planner.cluster import Cluster
from ranvier.planner.memory.breakdown import MemoryBreakdown
from ranvier.planner.model_spec import BlockSpec, ModelSpec
from ranvier.planner.predict import Candidate, Workload
from ranvier.planner.time import communication, compute, links
from ranvier.planner.time.communication import CommTime, RankGroups
from ranvier.planner.time.compute import ComputeContext
from ranvier.planner.time.links import RankGroup

if TYPE_CHECKING:
    from published_frameworks import Framework


@lru_cache(maxsize=50_000)
def kept(
    part: BlockSpec, setup: ComputeContext, runtime: Framework, recompute: str
) -> tuple[float, float]:
    """Returns the bytes that a block saves per micro-batch, and its bytes during backward."""
    width = next((leaf.shape[0] for leaf in part.layers_of_kind("rms", "layer")), 0) / setup.col
    outer = setup.row if runtime.sequence_parallel else 1
    narrow = 0.5 if setup.fp8 and runtime.fp8_casts == "fused" else 1.0  # what products read
    stream, inner = (2 + 2 * narrow) * width / outer, 0.0  # two norms and two products
    for leaf in part.layers_of_kind("linear", "siblings", "apart"):
        several = leaf.inside or (leaf,)
        for one in several:
            if one.dims[0] in ("heads", "kv_heads", "mlp"):
                inner += compute.local_size(str(one.dims[0]), one.shape[0], setup)
            else:  # what it reads: attention's result, or the activation's
                inner += narrow * compute.local_size(str(one.dims[1]), one.shape[1], setup)
    if not setup.col_splits_features:
        inner /= setup.col
    for leaf in part.layers_of_kind("mixture"):  # rows, their hidden layers, what down reads
        (hidden, _), (_, read), _ = compute.expert_matmul_shapes(leaf, setup)
        inner += (hidden + read) / setup.col + narrow * leaf.top * width / outer
    size = compute.DTYPE_BYTES[setup.dtype] * runtime.kept
    whole = setup.tokens * size * (stream + inner)
    scores = 0.0
    if runtime.attention == "scores":
        whole += setup.tokens * 2 * width / outer  # masks of two dropouts
        heads = sum(
            compute.local_heads(part, leaf, setup) for leaf in part.layers_of_kind("attention")
        )
        scores = 5 * heads * setup.samples * setup.seq**2 / setup.context
    whole += scores
    if recompute == "full":
        if outer > 1:  # the sequence is gathered again for two groups of products
            whole += setup.tokens * 4 * width
        return setup.tokens * compute.DTYPE_BYTES[setup.dtype] * width / outer, whole
    if recompute == "selective":
        if runtime.selective_recompute == "attention":
            return whole - scores, whole
        share = 0.45 if runtime.selective_recompute == "half" else 0.7
        return share * whole, whole
    return whole, whole


def flights(pipe: int, chunks: int, micro: int) -> float:
    """Returns the micro-batches that the first stage holds: p, or (1 + (p-1)/(p·v)) p with
    chunks.
    """
    if pipe == 1:
        return 1.0
    return min(pipe * (1 + (pipe - 1) / (pipe * chunks) if chunks > 1 else 1.0), float(micro))


def memory(job: Workload, layout: Candidate, runtime: Framework) -> MemoryBreakdown:
    """Returns the bytes of the worst stage by category."""
    plan, model = layout.plan, job.model
    setup = ComputeContext(
        samples=plan.micro_batch,
        seq=job.seq,
        row=plan.row,
        col=plan.col,
        context=plan.context,
        col_splits_features=plan.col_splits == "features",
        dtype=job.dtype,
        fp8=layout.fp8,
    )
    first, last = (_stage(job, layout, runtime, setup, where) for where in ("first", "last"))
    if model.num_layers == 0 or plan.pipe == 1:
        last = first
    return first if first.total_bytes >= last.total_bytes else last


def _stage(
    job: Workload, layout: Candidate, runtime: Framework, setup: ComputeContext, where: str
) -> MemoryBreakdown:
    """Returns the bytes of the first or the last stage."""
    plan, model = layout.plan, job.model
    split = plan.row * plan.col
    blocks = [part for part in model.parts if part.is_block]
    share = _share(model, plan.pipe, plan.virtual_stages)
    lost = 1 - 1 / plan.expert  # of its experts a rank has a part
    middle = sum(p.count * (p.num_parameters - lost * p.num_expert_parameters) for p in blocks)
    middle *= share / model.num_layers / split
    entry, exits = model.parts[0].num_parameters / split, model.parts[-1].num_parameters / split
    if model.has_tied_embeddings and where == "last" and plan.pipe > 1:
        exits = max(exits, entry)
    ends = entry + exits if plan.pipe == 1 else entry if where == "first" else exits
    numbers = middle + ends
    inside = runtime.fsdp or plan.depth > 1
    depth = plan.depth * (plan.context if inside else 1)
    shards = depth * (plan.data * (1 if inside else plan.context) if runtime.shards_states else 1)
    kinds = [kept(part, setup, runtime, plan.recompute) for part in blocks]
    flying = (
        flights(plan.pipe, plan.virtual_stages, plan.num_micro_batches) if where == "first" else 1.0
    )
    held = max(one for one, _ in kinds)
    busy = max(most for _, most in kinds)
    logits = 0.0
    if where == "last" or plan.pipe == 1:
        logits = setup.tokens * math.ceil(model.units["vocab"] / plan.row) / plan.col
        wide = runtime.split_logits if plan.row > 1 else 0
        logits *= wide or runtime.logits
        if (
            runtime.sequence_parallel and plan.row > 1
        ):  # the head's input is gathered, and its gradient
            logits += 4 * setup.tokens * model.units["embed"]
    held_gradient = runtime.held_gradient or runtime.grad_bytes
    gathered = 0.0
    if plan.depth > 1 and plan.reshard_after == "step":  # with gradients that are not reduced yet
        gathered = (2 + (held_gradient if plan.num_micro_batches > 1 else 0)) * numbers
    elif plan.depth > 1:
        gathered = runtime.copies * 2 * max(p.num_parameters for p in blocks) / split
    states = 0 if layout.states == "host" else runtime.state_bytes * numbers / shards
    grads = held_gradient * numbers / depth
    sent = runtime.messages * flying * setup.tokens * 2 * model.units["embed"]
    work = flying * share * held + max(busy - held, logits) + (sent if plan.pipe > 1 else 0.0)
    used = {
        "weights": 2 * numbers / depth,
        "gradients": grads,
        "master": states / 3,
        "moments": states * 2 / 3,
        "activations": work - (logits if logits > busy - held else 0.0),
        "gathered weights": gathered,
        "logits": logits if logits > busy - held else 0.0,
        "communication": runtime.buffers,
    }
    used["fragmentation"] = runtime.allocator_reserve * sum(used.values())
    host = (
        {}
        if layout.states == "device"
        else {"moments": round(runtime.state_bytes * numbers / shards)}
    )
    return MemoryBreakdown(
        {name: round(size) for name, size in used.items()}, host, f"on the {where} stage"
    )


def _share(model: ModelSpec, pipe: int, chunks: int) -> float:
    """Returns the number of blocks of a stage."""
    if pipe == 1 or model.num_layers % (pipe * chunks) == 0:
        return model.num_layers / pipe
    return math.ceil((model.num_layers + 2) / pipe) - (
        1 if (model.num_layers + 2) % pipe == 0 else 0
    )


# ---- communication ----------------------------------------------------------------------


def spoken(
    model: ModelSpec,
    plan: Plan,
    setup: ComputeContext,
    cluster: Cluster,
    runtime: Framework,
    places: RankGroups,
) -> CommTime:
    """Returns the seconds per step that another framework communicates."""
    found, row = CommTime(), places["row",]
    block = next(part for part in model.parts if part.is_block)
    size = 2 * setup.tokens * model.units["embed"]
    again = 2 if plan.recompute == "full" else 1
    if row.size > 1 and runtime.sequence_parallel:
        gather, scatter = (links.collective_seconds(cluster, op, size, row) for op in OPS)
        found.exposed_seconds["row"] = 2 * (again * (gather + scatter) + gather)
        found.overlappable_seconds["row"] = 2 * (scatter + gather)
    elif row.size > 1:
        whole = links.collective_seconds(cluster, "all_reduce", size, row)
        found.exposed_seconds["row"], found.overlappable_seconds["row"] = (
            2 * again * whole,
            2 * whole,
        )
    weights = sum(out * into for out, into in compute.matmul_shapes(block, setup))
    found.depth_seconds = _depth(plan, cluster, runtime, weights, places)
    found.grad_reduction, found.weight_gather = _data(model, plan, cluster, runtime, places)
    return found


OPS = ("all_gather", "reduce_scatter")


def _depth(
    plan: Plan, cluster: Cluster, runtime: Framework, weights: int, places: RankGroups
) -> float:
    """Returns the seconds of gathers and reductions over depth per block and micro-batch."""
    shards = places["context", "depth"]
    if shards.size == 1 or (plan.depth == 1 and not runtime.fsdp):
        return 0.0
    keep = plan.reshard_after == "step" or runtime.gathers == "keep"
    gathers = 1.0 / plan.num_micro_batches if keep else 2.0
    if plan.recompute == "full" and runtime.regathers and not keep:
        gathers = 3.0
    reductions = 1.0 / plan.num_micro_batches if keep else 1.0
    gather = links.collective_seconds(cluster, OPS[0], 2 * weights, shards)
    scatter = links.collective_seconds(cluster, OPS[1], runtime.grad_bytes * weights, shards)
    return gathers * gather + reductions * scatter


def _data(
    model: ModelSpec, plan: Plan, cluster: Cluster, runtime: Framework, places: RankGroups
) -> tuple[float, float]:
    """Returns the seconds of reductions over data, and of gathers of updated weights."""
    whole = plan.depth == 1 and not runtime.fsdp
    copies = places["data", "expert", "context"] if whole else places["data",]
    if copies.size == 1:
        return 0.0, 0.0
    held = communication.rank_parameters(model, plan) / plan.depth
    op = "reduce_scatter" if runtime.reduce == "scatter" else "all_reduce"
    size = held * runtime.grad_bytes
    buckets = max(size / runtime.bucket, 1.0) if runtime.bucket else 1.0
    data = buckets * links.collective_seconds(cluster, op, size / buckets, copies)
    after = 0.0
    if runtime.reduce != "all_reduce":
        after = links.collective_seconds(cluster, "all_gather", 2 * held, copies)
    if runtime.copied and runtime.reduce == "scatter":  # a kernel for each rank's part
        launch = cluster.device.launch * copies.size
        data += 2 * launch * buckets  # by the framework, and by NCCL's lists
        after += launch * runtime.copied * model.num_layers / plan.pipe
    return data, after


def context_seconds(
    part: BlockSpec,
    plan: Plan,
    setup: ComputeContext,
    cluster: Cluster,
    runtime: Framework,
    ranks: RankGroup,
) -> float:
    """Returns the seconds per block and micro-batch of keys over context, and of merging results.

    Keys and values go around once in forward; in backward they do so again, and their gradients.
    """
    if ranks.size == 1:
        return 0.0
    siblings = [one for leaf in part.layers_of_kind("siblings") for one in leaf.inside]
    names = ("heads", "heads") if runtime.repeats_kv_heads else ("kv_heads", "kv_heads")
    wide = {
        one.dims[0]: compute.local_size(str(one.dims[0]), one.shape[0], setup) for one in siblings
    }
    keys = setup.tokens * sum(wide.get(name, 0) for name in names) * ranks.size
    forwards = 2 if plan.recompute == "full" else 1
    rate = links.collective_seconds
    spent = (forwards + 1) * rate(cluster, "all_gather", 2 * keys, ranks)
    spent += rate(cluster, "all_gather", runtime.context_grad_bytes * keys, ranks)
    # Results of all blocks but the first are merged, one by one.
    elements = setup.tokens * wide.get("heads", 0) * (ranks.size - 1)
    ahead, back = runtime.merged_bytes
    size = elements * (forwards * ahead + back)
    return spent + compute.memory_seconds(cluster.device, size, 1, runtime.bandwidth_factor)
