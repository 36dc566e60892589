"""Communication time of a rank per step, before any overlap with compute.

The volumes come from `comm_volume`: every collective that Ranvier issues, its bytes and its count.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from ranvier.buckets.spec import ElementSizes
from ranvier.config.plan import AXES, Plan
from ranvier.cost.layers import ActivationShape
from ranvier.cost.optimizer import ADAMW, OptimizerSpec
from ranvier.planner import comm_volume
from ranvier.planner.cluster import Cluster
from ranvier.planner.comm_volume import ShardingKey, StageBlocks
from ranvier.planner.model_spec import BlockSpec, ModelSpec
from ranvier.planner.time import compute, links
from ranvier.planner.time.compute import ComputeContext
from ranvier.planner.time.links import RankGroup

ACTIVATION_AXES = ("row", "col", "expert", "pipe")


@dataclass
class PartComm:
    """Seconds of one part of the model per micro-batch."""

    exposed_seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(ACTIVATION_AXES, 0.0)
    )
    """Communication of activations that cannot overlap with compute, by axis."""
    overlappable_seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(ACTIVATION_AXES, 0.0)
    )
    """Communication of activations that can overlap with the matmul of a weight gradient, by
    axis.
    """
    pending_seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(ACTIVATION_AXES, 0.0)
    )
    """Reductions of outputs, and gathers of their gradients, that can overlap with the next module
    (ladder residual), by axis."""
    depth_seconds: float = 0.0
    """All-gathers of weights and reduce-scatters of gradients over depth."""


@dataclass(frozen=True)
class StageComm:
    """Seconds per step that a rank of a stage communicates for its weights."""

    stage: StageBlocks
    grad_reduction: float
    """Reductions of gradients over replicas."""
    weight_gather: float
    """All-gathers of updated weights."""
    other_seconds: float
    """Gradient norm, flags, token counts."""
    matrix_exchange: float = 0.0
    """Exchange of whole matrices with their owners."""


@dataclass
class CommTime(PartComm):
    """Seconds of one block per micro-batch, and of a whole step."""

    grad_reduction: float = 0.0
    """Reductions of gradients over replicas, per step."""
    weight_gather: float = 0.0
    """All-gathers of updated weights, per step."""
    by_part: dict[str, PartComm] = field(default_factory=dict)
    """Communication by name of the part, if known; otherwise all blocks are equal."""
    by_stage: tuple[StageComm, ...] = ()
    """Communication of each kind of stage, if known."""

    def for_part(self, part: BlockSpec) -> PartComm:
        """Returns the communication of one part."""
        if part.name in self.by_part:
            return self.by_part[part.name]
        # Other frameworks have one number for all blocks and none for embedding and head.
        if part.is_block:
            return self
        return PartComm()


class RankGroups:
    """Groups of ranks by their axes, cached."""

    def __init__(self, plan: Plan, order: tuple[str, ...], per_node: int) -> None:
        self.degrees = plan.degrees
        self.order = order
        self.per_node = per_node
        self.groups_by_axes: dict[tuple[str, ...], RankGroup] = {}

    def __getitem__(self, axes: tuple[str, ...]) -> RankGroup:
        if axes not in self.groups_by_axes:
            self.groups_by_axes[axes] = links.locate_group(
                axes, self.degrees, self.order, self.per_node
            )
        return self.groups_by_axes[axes]


def ranvier_comm_time(
    model: ModelSpec,
    plan: Plan,
    setup: ComputeContext,
    cluster: Cluster,
    places: RankGroups,
    optimizer: OptimizerSpec = ADAMW,
) -> CommTime:
    """Returns the communication of Ranvier, by part of the model and for the weights of a stage."""
    size = compute.DTYPE_BYTES[setup.dtype]
    flow = ActivationShape(
        setup.samples, setup.seq, itemsize=size, statistics_itemsize=max(size, 4)
    )
    spot = ShardingKey.from_plan(plan)
    again = plan.recompute != "none"
    keep = plan.reshard_after == "step"
    near = tuple(
        places[axes]
        for axes in (*ACTIVATION_GROUPS, *(VOCAB_GROUPS if plan.vocab_over_pipe else ()))
    )
    stages = comm_volume.distinct_stages(model, plan, setup.seq)
    types = comm_volume.element_sizes(flow)
    depth, comms = _stage_comms(model, stages, spot, types, keep, cluster, places.order, optimizer)
    # Weights that stay gathered are gathered once per step: divide that by the micro-batches.
    if keep:
        each = 1.0 / plan.num_micro_batches
    else:
        each = 1.0
    found = CommTime(by_stage=comms)
    for name, seconds in _part_comms(model, spot.activation_key, flow, again, cluster, near):
        gathers, scatters = depth[name]
        plain, under, pending = seconds
        found.by_part[name] = PartComm(plain, under, pending, gathers * each + scatters)
    return found


@lru_cache(maxsize=100_000)
def _part_comms(
    model: ModelSpec,
    inside: ShardingKey,
    flow: ActivationShape,
    again: bool,
    cluster: Cluster,
    near: tuple[RankGroup, ...],
) -> tuple[tuple[str, tuple[dict[str, float], ...]], ...]:
    """Returns name and seconds over each axis (as in `PartComm`) of all parts per micro-batch."""
    found = []
    for part in model.parts:
        sums = _pass_seconds(model, part, inside, flow, again, cluster, near)
        seconds = tuple(
            dict(zip(ACTIVATION_AXES, one, strict=True)) for one in zip(*sums, strict=True)
        )
        found.append((part.name, seconds))
    return tuple(found)


@lru_cache(maxsize=100_000)
def _stage_comms(
    model: ModelSpec,
    stages: tuple[StageBlocks, ...],
    spot: ShardingKey,
    types: ElementSizes,
    keep: bool,
    cluster: Cluster,
    order: tuple[str, ...],
    optimizer: OptimizerSpec,
) -> tuple[dict[str, tuple[float, float]], tuple[StageComm, ...]]:
    """Returns gathers and reductions over depth of each part, and the rest of each stage."""
    depth = dict.fromkeys((part.name for part in model.parts), (0.0, 0.0))
    found = []
    for stage in stages:
        own = _weight_comm(model, stage, spot, types, keep, cluster, order)
        depth |= own.depth_seconds
        found.append(
            StageComm(
                stage,
                own.grad_reduction,
                own.weight_gather,
                own.other_seconds,
                _matrix_exchange_seconds(model, stage, spot, cluster, order, optimizer),
            )
        )
    return depth, tuple(found)


def _matrix_exchange_seconds(
    model: ModelSpec,
    stage: StageBlocks,
    spot: ShardingKey,
    cluster: Cluster,
    order: tuple[str, ...],
    optimizer: OptimizerSpec,
) -> float:
    """Returns the seconds of the exchange of whole matrices with their owners."""
    if optimizer.matrix_rule is None:
        return 0.0
    degrees = dict(zip(AXES, spot.degrees, strict=True))
    events = comm_volume.matrix_events(model, stage, spot, optimizer.matrix_rule)
    return sum(
        links.collective_seconds(
            cluster,
            event.op,
            event.bytes,
            links.locate_group(event.axis, degrees, order, cluster.per_node),
        )
        for event in events
    )


ACTIVATION_GROUPS = (("row",), ("col",), ("row", "col"), ("expert",), ("expert", "row"))
"""Groups that communicate activations."""
VOCAB_GROUPS = (("pipe",), ("pipe", "row"), ("pipe", "col"), ("pipe", "row", "col"))
"""The same if stages share the vocabulary."""


@lru_cache(maxsize=100_000)
def _pass_seconds(
    model: ModelSpec,
    part: BlockSpec,
    inside: ShardingKey,
    flow: ActivationShape,
    again: bool,
    cluster: Cluster,
    near: tuple[RankGroup, ...],
) -> tuple[tuple[float, float, float], ...]:
    """Returns the seconds of a part over each axis per micro-batch: exposed, and able to overlap
    with the matmul of a weight gradient, or with the next module.
    """
    groups = dict(zip((*ACTIVATION_GROUPS, *VOCAB_GROUPS), near, strict=False))
    found = {axis: [0.0, 0.0, 0.0] for axis in ACTIVATION_AXES}
    pending = comm_volume.pending_layers(model, part, inside)
    # Experts wait for the results of their reduce-scatters.
    lone = {leaf.name for leaf in part.layers_of_kind("mixture")}
    for row in comm_volume.pass_volumes(model, part, inside, flow):
        if row.phase == "recompute" and not again:
            continue
        # Attention over context overlaps with itself (`time.context_attention`).
        if row.axis == ("context",):
            continue
        spent = row.count * links.collective_seconds(cluster, row.op, row.bytes, groups[row.axis])
        # The reduce-scatter of dx runs while dw is computed, which does not depend on it.
        under = row.phase == "backward" and row.op == "reduce_scatter" and row.where not in lone
        # The output of a pending layer is reduced over row, and its gradient gathered.
        behind = row.where in pending and row.axis == ("row",)
        found[row.axis[0]][2 if behind else under] += spent
    return tuple((plain, under, behind) for plain, under, behind in found.values())


class _WeightComm(NamedTuple):
    """Seconds of communication of the weights of a stage."""

    depth_seconds: dict[str, tuple[float, float]]
    """Gathers and reductions over depth of one part per micro-batch, by its name."""
    grad_reduction: float
    """Reductions over replicas, per step."""
    weight_gather: float
    """All-gathers over replicas, per step."""
    other_seconds: float


@lru_cache(maxsize=100_000)
def _weight_comm(
    model: ModelSpec,
    stage: StageBlocks,
    spot: ShardingKey,
    types: ElementSizes,
    keep: bool,
    cluster: Cluster,
    order: tuple[str, ...],
) -> _WeightComm:
    """Returns the seconds of communication of the weights of a stage."""
    degrees = dict(zip(AXES, spot.degrees, strict=True))
    times = comm_volume.count_gathers(model, stage, keep)
    count_of = {p.name: n for p, n in stage.block_counts}
    depth = {name: [0.0, 0.0] for name in count_of}
    data = 0.0
    after = 0.0
    other = 0.0
    # Axes that split tokens but not the matrices of all layers.
    replicas = {"data", "expert", "context"}
    # Depth collectives recur per micro-batch; all others belong to the optimizer step.
    for part, phase, event, count in comm_volume.bucket_events(model, stage, spot, types):
        near = links.locate_group(event.axis, degrees, order, cluster.per_node)
        one = links.collective_seconds(cluster, event.op, event.bytes, near)
        if phase in ("gather", "scatter"):
            if phase == "gather":
                often = times.get((part, event.where), 0)
            else:
                often = count
            # Per part, because equal blocks are multiplied by their count later.
            depth[part][phase == "scatter"] += often * one / count_of[part]
        elif not replicas & {*event.axis}:
            other += count * one
        elif event.op == "all_gather":
            after += count * one
        else:
            data += count * one
    # The norm, the flags and the token count are a few bytes over all ranks: only latency.
    whole = links.locate_group(AXES, degrees, order, cluster.per_node)
    other += SMALL_REDUCTIONS * links.collective_seconds(cluster, "all_reduce", 8, whole)
    sums = {name: (gathers, scatters) for name, (gathers, scatters) in depth.items()}
    return _WeightComm(sums, data, after, other)


SMALL_REDUCTIONS = 3
"""Number of all-reduces of scalars per step: norm, flags, tokens."""


@lru_cache(maxsize=50_000)
def _mean_stage_parameters(model: ModelSpec, pipe: int, split: int, expert: int) -> float:
    # A rank has 1/expert of the experts.
    lost = 1 - 1 / expert
    blocks = sum(
        part.count * (part.num_parameters - lost * part.num_expert_parameters)
        for part in model.parts
        if part.is_block
    )
    ends = model.parts[0].num_parameters + (
        0 if model.has_tied_embeddings else model.parts[-1].num_parameters
    )
    # Untied embedding and head are on two stages, so an average stage has half of them.
    if pipe == 1 or model.has_tied_embeddings:
        count = 1
    else:
        count = 2
    return (blocks / pipe + ends / count) / split


def rank_parameters(model: ModelSpec, plan: Plan) -> float:
    """Returns the parameters of a rank before sharding over depth: blocks, embedding or head."""
    return _mean_stage_parameters(model, plan.pipe, plan.row * plan.col, plan.expert)


@lru_cache(maxsize=50_000)
def rank_parameters_of_stage(model: ModelSpec, stage: StageBlocks, split: int) -> float:
    """Returns the parameters of a stage, divided by the number of ranks that split them all."""
    names = {part.name for part, _ in stage.block_counts}
    found = 0.0
    seat = stage.stage_spec
    for part, count in stage.block_counts:
        shares = seat.num_stages if seat.vocab_over_pipe and not part.is_block else 1
        found += count * part.num_parameters / shares
    entry = model.parts[0]
    leaving = model.parts[-1]
    # The last stage has a copy of tied embeddings.
    if model.has_tied_embeddings and leaving.name in names and entry.name not in names:
        found += entry.num_parameters
    return found / split
