"""Time of attention over the context axis: balance of the work, and communication of keys.

The layout of attention is that of a run (`cost.context_attention`), for samples of one document or
of typical documents (`DocumentLengths`). The slowest rank counts:

    kv_gather   keys that it fetches; of two head groups one is fetched while the other is computed
    ring        blocks of all ranks, each while the one before is computed
    ulysses     two all-to-alls, which wait for each other and for attention
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean

from ranvier.cost.context_attention import (
    EventScope,
    KeyShape,
    KVGatherLayout,
    Layout,
    RingLayout,
)
from ranvier.cost.layers import ActivationShape, AttentionCost
from ranvier.planner.cluster import Cluster
from ranvier.planner.comm_volume import CACHE_SIZE, ShardingKey, build_layers
from ranvier.planner.document_lengths import DocumentLengths
from ranvier.planner.model_spec import BlockSpec, ModelSpec
from ranvier.planner.time import links
from ranvier.planner.time.links import RankGroup


@dataclass(frozen=True)
class ContextTime:
    """Attention of a block over context, per micro-batch."""

    balance: float = 1.0
    """Attention work of the slowest rank over the mean."""
    forward: float = 0.0
    """Seconds of communication in forward."""
    backward: float = 0.0
    """Seconds of communication in backward."""
    hidden_share: float = 0.0
    """Share of the communication that may overlap with attention."""
    hiding_share: float = 0.0
    """Share of attention that it may overlap with."""


NO_CONTEXT = ContextTime()


@lru_cache(CACHE_SIZE)
def context_attention_time(
    model: ModelSpec,
    part: BlockSpec,
    spot: ShardingKey,
    flow: ActivationShape,
    documents: DocumentLengths | None,
    cluster: Cluster,
    ranks: RankGroup,
) -> ContextTime:
    """Returns the time of a block's attention over context. spot: its `activation_key`."""
    if ranks.size == 1:
        return NO_CONTEXT
    layers = [x for x in build_layers(model, part, spot) if isinstance(x, AttentionCost)]
    found = [
        _layout_time(*layer.context_layout(one), samples, cluster, ranks)
        for layer in layers
        for one, samples in _document_flows(flow, documents, spot, ranks.size)
    ]
    if not found:
        return NO_CONTEXT
    # Windows of one layer are alternatives, of which the mean is typical; layers add up.
    count = len(found) / len(layers)
    return ContextTime(
        fmean(one.balance for one in found),
        sum(one.forward for one in found) / count * part.calls.total,
        sum(one.backward for one in found) / count * part.calls.with_grad,
        fmean(one.hidden_share for one in found),
        fmean(one.hiding_share for one in found),
    )


@lru_cache(CACHE_SIZE)
def attention_factor(part: BlockSpec, documents: DocumentLengths | None) -> float:
    """Returns the attention of a block within documents relative to one document per sample."""
    cores = part.layers_of_kind("attention")
    if documents is None or not cores:
        return 1.0
    return fmean(documents.score_share(leaf.window) for leaf in cores)


def _document_flows(
    flow: ActivationShape, documents: DocumentLengths | None, spot: ShardingKey, ranks: int
) -> Iterable[tuple[ActivationShape, int]]:
    """Yields activations of one sample with typical documents, and the samples of a micro-batch."""
    if documents is None:
        yield flow, 1
        return
    for order in documents.token_orders(ranks, spot.context_order):
        yield replace(flow, samples=1, token_orders=(order,)), flow.samples


def _layout_time(
    layout: Layout, shape: KeyShape, equal: int, samples: int, cluster: Cluster, ranks: RankGroup
) -> ContextTime:
    """Returns the time of attention with a layout, which stands for `equal` · `samples` samples."""
    count = equal * samples

    def collective_seconds(op: str, size: float) -> float:
        return links.collective_seconds(cluster, op, size * count, ranks)

    if isinstance(layout, KVGatherLayout):
        keys, gradients = (
            2 * shape.kv_heads * shape.head_dim * size
            for size in (shape.itemsize, shape.gradient_itemsize)
        )
        if layout.collective == "all_gather":
            rows = float(layout.num_ranks * layout.num_rows)
            back = "reduce_scatter"
        else:
            # The rank that fetches most receives all of it from others.
            rows = max(layout.fetched_counts) * ranks.size / (ranks.size - 1)
            back = "all_to_all"
        op = layout.collective
        groups = len(layout.head_groups(shape.kv_heads))
        forward = collective_seconds(op, rows * keys) if op != "none" else 0.0
        backward = forward + (collective_seconds(back, rows * gradients) if op != "none" else 0.0)
        rest = 1 - 1 / groups
        return ContextTime(_imbalance(layout), forward, backward, rest, rest)
    if isinstance(layout, RingLayout):
        blocks = 2 * ranks.size * layout.num_rows * shape.kv_heads * shape.head_dim
        forward = collective_seconds("all_gather", blocks * shape.itemsize)
        backward = forward + collective_seconds("all_gather", blocks * shape.gradient_itemsize)
        # The block of the rank itself is computed while the first ones travel.
        return ContextTime(_imbalance(layout), forward, backward, 1.0, 1 - 1 / ranks.size)
    events = layout.forward_events(shape, EventScope(("context",), ""))
    exchanged = sum(collective_seconds(event.op, event.bytes) for event in events)
    return ContextTime(1.0, exchanged, exchanged)


def _imbalance(layout: KVGatherLayout | RingLayout) -> float:
    """Returns the attention work of the slowest rank over the mean."""
    window = layout.window if isinstance(layout, KVGatherLayout) else 0
    several = zip(*(order.attention_work(window) for order in layout.orders), strict=True)
    work = [sum(some) for some in several]
    return float(max(work) / fmean(work))
