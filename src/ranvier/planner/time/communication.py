"""Talk: seconds that a rank communicates in a step, before anything hides them.

They come from `moves`: every collective that the runtime issues, with its bytes and how often.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from ranvier.buckets.spec import Types
from ranvier.config.plan import AXES, Plan
from ranvier.cost.layers import Flow
from ranvier.planner import comm_volume
from ranvier.planner.cluster import Cluster
from ranvier.planner.comm_volume import Spot, Stage
from ranvier.planner.model_spec import Model, Part
from ranvier.planner.time import compute, links
from ranvier.planner.time.compute import Setup
from ranvier.planner.time.links import Group

INSIDE = ("row", "col", "expert", "pipe")


@dataclass
class PartComm:
    """Seconds of one part of the model in one micro-batch."""

    plain: dict[str, float] = field(default_factory=lambda: dict.fromkeys(INSIDE, 0.0))
    """Over row, col and expert, that nothing can hide."""
    under: dict[str, float] = field(default_factory=lambda: dict.fromkeys(INSIDE, 0.0))
    """The same that may run beside the product of a weight's gradient."""
    depth: float = 0.0
    """Gathers of weights and reductions of gradients over depth."""


@dataclass(frozen=True)
class StageComm:
    """Seconds that a rank of a stage communicates in a step for its weights."""

    stage: Stage
    data: float
    """Reductions of gradients over data."""
    after: float
    """Gathers of updated weights."""
    shared: float
    """Reductions over expert of the gradients of weights that its ranks share."""
    other: float
    """Norm, votes, counts of tokens."""


@dataclass
class Spoken(PartComm):
    """Seconds of one block in one micro-batch, and of a whole step."""

    data: float = 0.0
    """Reductions of gradients over data, in a step."""
    after: float = 0.0
    """Gathers of updated weights, in a step."""
    parts: dict[str, PartComm] = field(default_factory=dict)
    """By name of a part, where they are known; else all blocks are alike."""
    stages: tuple[StageComm, ...] = ()
    """Of each kind of stage, where they are known."""

    def of(self, part: Part) -> PartComm:
        """What one part communicates."""
        if part.name in self.parts:
            return self.parts[part.name]
        return self if part.is_block else PartComm()


class Places:
    """Groups of ranks by their axes, found once."""

    def __init__(self, plan: Plan, order: tuple[str, ...], per_node: int) -> None:
        self.degrees, self.order, self.per_node = plan.degrees, order, per_node
        self.known: dict[tuple[str, ...], Group] = {}

    def __getitem__(self, axes: tuple[str, ...]) -> Group:
        if axes not in self.known:
            self.known[axes] = links.group(axes, self.degrees, self.order, self.per_node)
        return self.known[axes]


def ours(model: Model, plan: Plan, setup: Setup, cluster: Cluster, places: Places) -> Spoken:
    """What our runtime communicates: by part of the model, and for the weights of each stage."""
    size = compute.BYTES[setup.dtype]
    flow = Flow(setup.samples, setup.seq, itemsize=size, statistics=max(size, 4))
    spot, again, keep = Spot.of(plan), plan.recompute != "none", plan.gathered == "keep"
    near = tuple(places[axes] for axes in (*GROUPS, *(WORDS if plan.spread else ())))
    stages = comm_volume.kinds_of_stages(model, plan, setup.seq)
    types = comm_volume.types_of(flow)
    depth, comms = _stage_comms(model, stages, spot, types, keep, cluster, places.order)
    each = 1.0 / plan.micro_batches if keep else 1.0
    found = Spoken(stages=comms)
    for name, plain, under in _part_comms(model, spot.inside, flow, again, cluster, near):
        gathers, scatters = depth[name]
        found.parts[name] = PartComm(plain, under, gathers * each + scatters)
    return found


@lru_cache(maxsize=100_000)
def _part_comms(
    model: Model, inside: Spot, flow: Flow, again: bool, cluster: Cluster, near: tuple[Group, ...]
) -> tuple[tuple[str, dict[str, float], dict[str, float]], ...]:
    """Name, and seconds over each axis as of `PartComm`, of all parts in a micro-batch."""
    found = []
    for part in model.parts:
        sums = _passes(model, part, inside, flow, again, cluster, near)
        plain, under = (dict(zip(INSIDE, one, strict=True)) for one in zip(*sums, strict=True))
        found.append((part.name, plain, under))
    return tuple(found)


@lru_cache(maxsize=100_000)
def _stage_comms(
    model: Model,
    stages: tuple[Stage, ...],
    spot: Spot,
    types: Types,
    keep: bool,
    cluster: Cluster,
    order: tuple[str, ...],
) -> tuple[dict[str, tuple[float, float]], tuple[StageComm, ...]]:
    """Gathers and reductions over depth of each part, and the rest of each stage."""
    depth, found = dict.fromkeys((part.name for part in model.parts), (0.0, 0.0)), []
    for stage in stages:
        own = _weights(model, stage, spot, types, keep, cluster, order)
        depth |= own.depth
        found.append(StageComm(stage, own.data, own.after, own.shared, own.other))
    return depth, tuple(found)


GROUPS = (("row",), ("col",), ("row", "col"), ("expert",), ("expert", "row"))
"""Groups that activations are communicated in."""
WORDS = (("pipe",), ("pipe", "row"), ("pipe", "col"), ("pipe", "row", "col"))
"""The same, where stages share the vocabulary."""


@lru_cache(maxsize=100_000)
def _passes(
    model: Model,
    part: Part,
    inside: Spot,
    flow: Flow,
    again: bool,
    cluster: Cluster,
    near: tuple[Group, ...],
) -> tuple[tuple[float, float], ...]:
    """Seconds of a part over each axis in a micro-batch: what nothing hides, and what may run
    beside the product of a weight's gradient."""
    groups = dict(zip((*GROUPS, *WORDS), near, strict=False))
    found = {axis: [0.0, 0.0] for axis in INSIDE}
    lone = {leaf.name for leaf in part.find("mixture")}  # experts wait for what they scatter
    for row in comm_volume.pass_rows(model, part, inside, flow):
        if row.phase == "again" and not again:
            continue
        spent = row.count * links.seconds(cluster, row.op, row.bytes, groups[row.axis])
        under = row.phase == "backward" and row.op == "reduce_scatter" and row.where not in lone
        found[row.axis[0]][under] += spent
    return tuple((plain, under) for plain, under in found.values())


class _Weights(NamedTuple):
    """Seconds that the weights of a stage communicate."""

    depth: dict[str, tuple[float, float]]
    """Gathers and reductions over depth of one part in a micro-batch, by its name."""
    data: float
    """Reductions over data, in a step."""
    after: float
    """Gathers over data, in a step."""
    shared: float
    """Reductions over expert, in a step."""
    other: float


@lru_cache(maxsize=100_000)
def _weights(
    model: Model,
    stage: Stage,
    spot: Spot,
    types: Types,
    keep: bool,
    cluster: Cluster,
    order: tuple[str, ...],
) -> _Weights:
    """Seconds that the weights of a stage communicate."""
    degrees = dict(zip(AXES, spot.degrees, strict=True))
    times, count_of = comm_volume.gathers(model, stage, keep), {p.name: n for p, n in stage.here}
    depth = {name: [0.0, 0.0] for name in count_of}
    data, after, shared, other = 0.0, 0.0, 0.0, 0.0
    for part, phase, event, count in comm_volume.lot_events(model, stage, spot, types):
        near = links.group(event.axis, degrees, order, cluster.per_node)
        one = links.seconds(cluster, event.op, event.bytes, near)
        if phase in ("gather", "scatter"):
            often = times.get((part, event.where), 0) if phase == "gather" else count
            depth[part][phase == "scatter"] += often * one / count_of[part]
        elif "data" not in event.axis:
            shared += count * one if "expert" in event.axis else 0.0
            other += count * one if "expert" not in event.axis else 0.0
        elif event.op == "all_gather":
            after += count * one
        else:
            data += count * one
    whole = links.group(AXES, degrees, order, cluster.per_node)
    other += SMALL * links.seconds(cluster, "all_reduce", 8, whole)
    sums = {name: (gathers, scatters) for name, (gathers, scatters) in depth.items()}
    return _Weights(sums, data, after, shared, other)


SMALL = 3
"""All-reduces of a number in a step: norm, votes, tokens."""


@lru_cache(maxsize=50_000)
def _count(model: Model, pipe: int, split: int, expert: int) -> float:
    lost = 1 - 1 / expert  # of its experts a rank has a part
    blocks = sum(
        part.count * (part.parameters - lost * part.expert_parameters)
        for part in model.parts
        if part.is_block
    )
    ends = model.parts[0].parameters + (0 if model.tied else model.parts[-1].parameters)
    count = 1 if pipe == 1 or model.tied else 2
    return (blocks / pipe + ends / count) / split


def numbers(model: Model, plan: Plan) -> float:
    """Weights of a rank, gathered over depth: a stage's blocks and its end."""
    return _count(model, plan.pipe, plan.row * plan.col, plan.expert)


@lru_cache(maxsize=50_000)
def numbers_of(model: Model, stage: Stage, split: int, expert: int) -> float:
    """Weights of a rank of a stage, gathered over depth. split: ranks of row and col."""
    lost = 1 - 1 / expert  # of its experts a rank has a part
    names, found, seat = {part.name for part, _ in stage.here}, 0.0, stage.seat
    for part, count in stage.here:
        whole = part.parameters - lost * part.expert_parameters
        found += count * whole / (seat.count if seat.spread and not part.is_block else 1)
    entry, leaving = model.parts[0], model.parts[-1]
    if model.tied and leaving.name in names and entry.name not in names:  # a copy of the words
        found += entry.parameters
    return found / split


def ring(part: Part, cluster: Cluster, setup: Setup, ranks: Group, recompute: str) -> float:
    """Keys and values going round the context axis, in a block."""
    if ranks.size == 1:
        return 0.0
    narrow = 0
    for leaf in part.find("siblings"):
        kept = [one for one in leaf.inside if one.dims[:1] == ("kv_heads",)]
        narrow += sum(compute.local("kv_heads", one.shape[0], setup) for one in kept)
    size = 2 * setup.tokens * narrow * ranks.size
    rounds = 4 if recompute == "full" else 3
    return rounds * links.seconds(cluster, "all_gather", size, ranks)
