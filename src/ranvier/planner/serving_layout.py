"""Seconds of a serving step of a model on a grid, by the planner's rates of a cluster.

    row, col      weights and, up to the number of KV heads, keys and values are split
    pipe          layers are split; a step passes all stages, so it takes as long as on one stage
    expert        experts are split
    depth         weights are split, and gathered by every step
    context       pages of a sequence are split, and the tokens of large steps; attention merges
                  the results of all ranks
    data          replicas with their own requests, which cost nothing

Homes, each with its own requests and blocks, are the indices of col where it splits samples, of
expert and of depth. What a step communicates is the forward pass of training, with its bytes scaled
to the number of tokens, or, where it is faster, the layout in which tokens are not split over row:
no all-gathers over row, and all-reduces instead of reduce-scatters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ranvier.config.plan import AXES, Plan
from ranvier.cost.layers import ActivationShape
from ranvier.models.recurrence import ONE_CALL
from ranvier.planner import comm_volume
from ranvier.planner.cluster import Cluster
from ranvier.planner.comm_volume import ShardingKey
from ranvier.planner.frameworks import FLASH_EFFICIENCY
from ranvier.planner.model_spec import EXIT, ModelSpec
from ranvier.planner.time import links
from ranvier.planner.time.communication import RankGroups
from ranvier.planner.time.compute import DTYPE_BYTES
from ranvier.planner.time.links import RankGroup
from ranvier.planner.time.serving_step import AttentionWork, RooflineCost, count_own_tokens

BANDWIDTH_SHARE = 0.9
"""Share of the nominal memory bandwidth that a copy reaches, on devices without a measurement."""
PAGED_ATTENTION = "flash2"
"""Attention over prompts in blocks is as fast as this kernel of training."""
USABLE_MEMORY = 0.9
"""Share of the device memory for weights, activations and the KV cache."""


class CollectiveRate(NamedTuple):
    """A collective of a step whose bytes grow with the tokens."""

    op: str
    ranks: RankGroup
    bytes_per_token: float
    """Bytes of the full tensor, per token of a home."""
    count: int  # type: ignore[assignment]


@dataclass(frozen=True)
class GridCommunication:
    """Collectives of a step on a grid; a `StepCommunication`."""

    cluster: Cluster
    split_tokens: tuple[CollectiveRate, ...]
    """Collectives of the blocks if tokens are split over row."""
    whole_tokens: tuple[CollectiveRate, ...]
    """The same if they are not."""
    sampled: tuple[CollectiveRate, ...]
    """Collectives of the head."""
    constant_seconds: float = 0.0
    """Gathers of weights."""
    row: int = 1
    context: int = 1
    split_queries: tuple[CollectiveRate, ...] = ()
    """Collectives of attention if context splits tokens."""
    whole_queries: tuple[CollectiveRate, ...] = ()
    """The same if it does not."""

    def seconds(self, tokens: int, sampled: int) -> float:
        """Returns the seconds with the faster of both layouts of tokens."""
        own = count_own_tokens(tokens, self.context)
        queries = self.split_queries if own < tokens else self.whole_queries
        # Tokens that are split over row are padded to a multiple of it.
        padded = -(-own // self.row) * self.row
        layouts = (
            self._total_seconds(self.split_tokens, padded),
            self._total_seconds(self.whole_tokens, own),
        )
        return (
            min(layouts)
            + self._total_seconds(queries, tokens)
            + self._total_seconds(self.sampled, sampled)
            + self.constant_seconds
        )

    def _total_seconds(self, rates: Sequence[CollectiveRate], tokens: int) -> float:
        """Returns the seconds of collectives for a number of tokens per home."""
        return sum(
            rate.count
            * links.collective_seconds(
                self.cluster, rate.op, rate.bytes_per_token * tokens, rate.ranks
            )
            for rate in rates
        )


@dataclass(frozen=True)
class ServingLayout:
    """What a rank of a grid holds and computes."""

    cost: RooflineCost
    num_homes: int
    num_replicas: int
    num_stages: int
    weight_bytes: float
    """Bytes of the weights of a rank."""
    kv_bytes_per_token: float
    """Bytes of keys and values per token of a sequence on a rank; the mean of its pages, if
    context splits them."""
    kv_cache_bytes: float
    """Bytes of device memory that are left for the KV cache."""

    def num_blocks(self, block_size: int, kv_cache_gib: float = 0.0) -> int:
        """Returns the number of blocks of a home. kv_cache_gib: 0 means what is left.

        block_size: tokens of a block on all ranks of context together.
        """
        size = kv_cache_gib * 2**30 if kv_cache_gib else self.kv_cache_bytes
        return int(size // (block_size * self.kv_bytes_per_token))


def serving_layout(
    model: ModelSpec,
    plan: Plan,
    cluster: Cluster,
    *,
    dtype: str = "bf16",
    efficiency: float = 0.7,
    host_seconds: float = 0.4e-3,
) -> ServingLayout:
    """Returns the work of a rank and its cost, for a model on a grid of a cluster."""
    inner = plan.row * plan.col
    homes = plan.expert * plan.depth * (plan.col if plan.col_splits == "samples" else 1)
    # Tokens of all homes pass through the weights of a rank, except those of other replicas.
    tokens_per_home = homes / (plan.expert * plan.depth)
    size = DTYPE_BYTES[dtype]
    stored, *_ = _count_parameters(model)
    unrolled = _unroll_core(model)
    dense, experts, top = _count_parameters(unrolled)
    head = sum(
        math.prod(leaf.shape) for part in model.parts for leaf in part.layers_of_kind("head")
    )
    attention = _attention_work(unrolled, plan, size)
    device = cluster.device
    bandwidth = device.measured_rate("memory", usual=BANDWIDTH_SHARE * device.bandwidth)
    rate = device.best_matmul_rate(dtype)
    shares = FLASH_EFFICIENCY[PAGED_ATTENTION]
    cost = RooflineCost(
        weight_bytes=size * (dense + head) / inner,
        # All streams of a token pass through the blocks, which are nearly all of these weights.
        flops_per_token=2.0 * model.streams * tokens_per_home * (dense + experts * top) / inner,
        head_flops=2.0 * tokens_per_home * head / inner,
        attention=attention,
        expert_bytes=size * experts / (inner * plan.expert),
        expert_share=top,
        num_token_homes=homes,
        bandwidth=bandwidth,
        flops=rate * device.reach.matmul,
        attention_flops=rate * shares.get(device.generation, shares[90])[0],
        efficiency=efficiency,
        host_seconds=host_seconds,
        communication=_grid_communication(unrolled, plan, cluster, size, stored + head + experts),
        context=plan.context,
    )
    weights = size * model.num_parameters / (inner * plan.pipe)
    if experts:
        weights = size * (model.num_parameters - experts) / (inner * plan.pipe)
        weights += cost.expert_bytes / plan.pipe
    return ServingLayout(
        cost,
        num_homes=homes,
        num_replicas=plan.data,
        num_stages=plan.pipe,
        weight_bytes=weights / plan.depth,
        kv_bytes_per_token=sum(work.kv_bytes for work in attention) / plan.pipe,
        kv_cache_bytes=USABLE_MEMORY * device.memory - weights / plan.depth,
    )


def _unroll_core(model: ModelSpec) -> ModelSpec:
    """Returns a model with a recurrent core as many times as it runs by default."""
    parts = [
        # Training has one iteration more on average.
        replace(part, count=part.count * round(part.calls.total - 1), calls=ONE_CALL)
        if part.calls != ONE_CALL
        else part
        for part in model.parts
    ]
    return replace(model, parts=tuple(parts))


def _count_parameters(model: ModelSpec) -> tuple[float, float, float]:
    """Returns the parameters of matrices outside of and in experts, and a token's share of the
    latter.
    """
    dense = 0.0
    experts = 0.0
    active = 0.0
    for part in model.parts:
        for leaf in part.layers_of_kind("linear", "siblings", "apart"):
            dense += part.count * leaf.num_parameters
        for leaf in part.layers_of_kind("mixture"):
            own = part.count * leaf.num_expert_parameters
            dense += part.count * leaf.num_parameters - own
            experts += own
            active += own * leaf.top / leaf.shape[0]
    return dense, experts, active / experts if experts else 1.0


def _attention_work(model: ModelSpec, plan: Plan, size: int) -> tuple[AttentionWork, ...]:
    """Returns the attention of a rank, by window; it has one page in `context` of a sequence."""
    split = plan.row * (plan.col if plan.col_splits == "features" else 1)
    heads = -(-model.units["heads"] // split)
    # Ranks beyond the number of KV heads hold copies of them.
    kv_heads = -(-model.units.get("kv_heads", model.units["heads"]) // split)
    found: dict[int, AttentionWork] = {}
    for part in model.parts:
        for leaf in part.layers_of_kind("attention"):
            count = part.count * leaf.streams / plan.context
            kv_bytes = 2.0 * kv_heads * leaf.head_dim * size * count
            flops = 4.0 * heads * leaf.head_dim * count
            before = found.get(leaf.window, AttentionWork(0.0, 0.0))
            found[leaf.window] = AttentionWork(
                before.kv_bytes + kv_bytes, before.flops_per_pair + flops, leaf.window
            )
    return tuple(found.values())


def _grid_communication(
    model: ModelSpec, plan: Plan, cluster: Cluster, size: int, parameters: float
) -> GridCommunication | None:
    """Returns the collectives of a step; None on one rank."""
    if plan.row * plan.col * plan.pipe * plan.expert * plan.depth * plan.context == 1:
        return None
    groups = RankGroups(plan, AXES, cluster.per_node)
    # Bytes grow with the tokens, so they are counted once, for some tokens per home.
    counted = 64 * plan.row
    samples = plan.col if plan.col_splits == "samples" else 1
    flow = ActivationShape(samples, counted, itemsize=size, statistics_itemsize=max(size, 4))
    # Attention to pages communicates other tensors than training.
    key = ShardingKey.from_plan(plan).with_degrees(context=1).activation_key
    blocks = []
    sampled = []
    for part in model.parts:
        for row in comm_volume.pass_volumes(model, part, key, flow):
            if row.phase != "forward":
                continue
            rate = CollectiveRate(
                row.op, groups[row.axis], row.bytes / counted, round(part.count * row.count)
            )
            if part.name == EXIT:
                sampled.append(rate)
            else:
                blocks.append((row.axis, rate))
    if plan.pipe > 1:
        width = samples * model.streams * model.units["embed"] * size / (plan.row * plan.col)
        blocks.append((("pipe",), CollectiveRate("send", groups["pipe",], width, plan.pipe - 1)))
    whole = []
    for axis, rate in blocks:
        if axis != ("row",):
            whole.append(rate)
        elif rate.op == "reduce_scatter":
            whole.append(rate._replace(op="all_reduce"))
        elif rate.op != "all_gather":
            whole.append(rate)
    split_queries, whole_queries = _query_rates(model, plan, groups, size)
    weights = size * parameters / (plan.row * plan.col)
    gathers = links.collective_seconds(cluster, "all_gather", weights, groups["depth",])
    return GridCommunication(
        cluster,
        tuple(rate for _, rate in blocks),
        tuple(whole),
        tuple(sampled),
        constant_seconds=gathers,
        row=plan.row,
        context=plan.context,
        split_queries=split_queries,
        whole_queries=whole_queries,
    )


def _query_rates(
    model: ModelSpec, plan: Plan, groups: RankGroups, size: int
) -> tuple[tuple[CollectiveRate, ...], tuple[CollectiveRate, ...]]:
    """Returns the collectives of attention over context, if it splits tokens and if it does not."""
    if plan.context == 1:
        return (), ()
    ranks = groups["context",]
    parts = plan.row * (plan.col if plan.col_splits == "features" else 1)
    heads = -(-model.units["heads"] // parts)
    kv_heads = -(-model.units.get("kv_heads", model.units["heads"]) // parts)
    split = []
    whole = []
    for part in model.parts:
        for leaf in part.layers_of_kind("attention"):
            # Outputs and log-sum-exps are in fp32.
            results = 4.0 * heads * (leaf.head_dim + 1)
            inputs = float(size * (heads + 2 * kv_heads) * leaf.head_dim)
            split.append(CollectiveRate("all_gather", ranks, inputs, part.count))
            split.append(CollectiveRate("all_to_all", ranks, results, part.count))
            whole.append(CollectiveRate("all_gather", ranks, plan.context * results, part.count))
    return tuple(split), tuple(whole)
