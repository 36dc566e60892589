"""Moves: everything that a rank communicates in a step, in closed form, without torch.

The same formulas as those of a parallel model (`layers`, `products`, `lots`, `pipeline.messages`),
asked once for each kind of block and counted for all. What depends on a few numbers only is kept,
so that layouts which share them share the work. `Parallel.events` and a dry run say the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from ranvier.buckets import spec
from ranvier.buckets.spec import VECTORS, Lot, Piece, Types
from ranvier.config.plan import AXES, Dispatch, Inner, Plan
from ranvier.cost.layers import Flow, Ground, Layer
from ranvier.pipeline import traffic
from ranvier.pipeline.balance import balanced, ranges
from ranvier.pipeline.policy import Policy, Shape
from ranvier.pipeline.traffic import Seat
from ranvier.planner.model_spec import EXIT, Leaf, Model, Part
from ranvier.sharding import Table
from ranvier.trace import Event

Phase = Literal["forward", "again", "backward", "gather", "scatter", "update", "pipe", "step"]
"""Activations forward, in a second forward pass, and backward; weights gathered over depth, and
their gradients reduced over it; gradients, norm and weights of the update; messages between stages;
numbers of the step."""
VOTES = 3
"""Numbers that a training step has voted on, besides the norm."""
TOKENS = 8
"""Bytes of the number of tokens of a step."""
NOTES, LOADS = 4, 8
"""Numbers of each mixture in a step besides the load of each expert, and bytes of one."""
KEPT = 1 << 16
"""Results that are kept of each kind."""


class Move(NamedTuple):
    """Equal communications of a rank in a step."""

    part: str
    """Name of the part of the model; empty: of no part."""
    phase: Phase
    op: str
    axis: tuple[str, ...]
    bytes: int
    """Of the whole (gathered or reduced) tensor, of each of them."""
    count: int  # type: ignore[assignment]
    where: str = ""


@dataclass(frozen=True)
class Moves:
    """All communication of a rank in a step."""

    rows: tuple[Move, ...]

    def bytes(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """Bytes by operation and axis."""
        total: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for row in self.rows:
            total[row.op, row.axis] += row.bytes * row.count
        return dict(total)

    def of(self, *phases: Phase) -> list[Move]:
        """Those of some phases."""
        return [row for row in self.rows if row.phase in phases]


class Spot(NamedTuple):
    """What the shards of a rank depend on: hashable, to keep results by."""

    degrees: tuple[int, ...]
    """Of all axes, outermost first."""
    inner: Inner
    spread: bool
    dispatch: Dispatch = "same"

    @classmethod
    def of(cls, plan: Plan) -> Spot:
        """That of a plan."""
        degrees = tuple(getattr(plan, axis) for axis in AXES)
        return cls(degrees, plan.inner, plan.spread, plan.dispatch)

    def with_(self, **degrees: int) -> Spot:
        """With other degrees, where these do not matter."""
        return self._replace(
            degrees=tuple(degrees.get(axis, n) for axis, n in zip(AXES, self.degrees, strict=True))
        )

    def ground(self, model: Model) -> Ground:
        """What layers ask."""
        degrees = dict(zip(AXES, self.degrees, strict=True))
        return Ground(degrees, Table(self.inner, self.spread), model.units, self.dispatch)

    @property
    def shards(self) -> Spot:
        """What the shards of weights depend on."""
        return _lessened(self, "data")

    @property
    def inside(self) -> Spot:
        """What activations depend on: no replicas, and stages only where they split words."""
        return _lessened(self, "data", "depth")


@lru_cache(KEPT)
def _lessened(spot: Spot, *axes: str) -> Spot:
    """A spot with one rank on these axes, and on pipe unless stages split words."""
    other = () if spot.spread else ("pipe",)
    return spot.with_(**dict.fromkeys((*axes, *other), 1))


# ---- parts on a rank --------------------------------------------------------------------


@lru_cache(KEPT)
def layers_of(model: Model, part: Part, spot: Spot) -> tuple[Layer, ...]:
    """The layers of a part; spot: its `inside` is enough."""
    ground = spot.ground(model)
    return tuple(leaf.layer("", ground) for leaf in part.leaves)


@lru_cache(KEPT)
def _passes(
    model: Model, part: Part, spot: Spot, flow: Flow
) -> tuple[tuple[Event, ...], tuple[Event, ...]]:
    """What a part communicates forward and backward in a micro-batch."""
    layers = layers_of(model, part, spot)
    forward = tuple(event for layer in layers for event in layer.forward_events(flow))
    return forward, tuple(event for layer in layers for event in layer.backward_events(flow))


@lru_cache(KEPT)
def work(model: Model, part: Part, spot: Spot, flow: Flow) -> int:
    """Multiplications and additions of the forward pass of one such part."""
    return sum(layer.flops(flow) for layer in layers_of(model, part, spot))


@lru_cache(KEPT)
def pieces_of(model: Model, part: Part, spot: Spot) -> tuple[Piece, ...]:
    """The weights of one such part; those of blocks are of the block `part.name`."""
    ground, block = spot.ground(model), part.name if part.is_block else ""
    return tuple(piece for leaf in part.leaves for piece in leaf.pieces("", block, ground))


@dataclass(frozen=True, eq=False)
class Stage:
    """The parts of a rank: of each kind how many, and in which order."""

    seat: Seat
    order: tuple[Part, ...]
    """Its parts, one after the other; equal blocks are there several times."""
    here: tuple[tuple[Part, int], ...]
    """Each kind of part and how many of it."""


@lru_cache(KEPT)
def stage_of(
    model: Model, stage: int, count: int, chunks: int, firsts: tuple[int, ...], spread: bool
) -> Stage:
    """The parts of a stage. firsts: first part of each virtual stage."""
    every, seat = model.order, Seat(stage, count, chunks, spread)
    order = [part for one in ranges(firsts, len(every))[stage::count] for part in every[one]]
    if spread and count > 1:  # embedding and head are everywhere
        if every[0] not in order:
            order.insert(0, _words(every[0]))
        if every[-1] not in order:
            order.append(_words(every[-1]))
    return Stage(seat, tuple(order), tuple(Counter(order).items()))


def stages(model: Model, plan: Plan, seq: int) -> list[Stage]:
    """All stages of a plan."""
    firsts = cut(model, plan, seq)
    shape = plan.pipe, plan.chunks, firsts, plan.spread
    return [stage_of(model, i, *shape) for i in range(plan.pipe)]


def kinds_of_stages(model: Model, plan: Plan, seq: int) -> tuple[Stage, ...]:
    """Of the stages of a plan one of each kind, the first with its parts."""
    firsts = cut(model, plan, seq)
    return _kinds_of_stages(model, plan.pipe, plan.chunks, firsts, plan.spread)


@lru_cache(KEPT)
def _kinds_of_stages(
    model: Model, count: int, chunks: int, firsts: tuple[int, ...], spread: bool
) -> tuple[Stage, ...]:
    found = dict[frozenset[tuple[Part, int]], Stage]()
    for i in range(count):
        stage = stage_of(model, i, count, chunks, firsts, spread)
        found.setdefault(frozenset(stage.here), stage)
    return tuple(found.values())


@lru_cache(KEPT)
def _words(part: Part) -> Part:
    """What of an entry or exit a stage has that shares the vocabulary only."""
    leaves = [leaf for leaf in part.leaves if leaf.dims[:1] == ("vocab",)]
    return replace(part, leaves=tuple(leaves))


def cut(model: Model, plan: Plan, seq: int) -> tuple[int, ...]:
    """First part of each virtual stage: as the plan says, or balanced by the work of the parts."""
    if plan.pipe == 1:
        return (0,)
    if plan.stages:
        return (0, *plan.stages)
    inside = Spot.of(plan).inside
    return _balanced(model, inside, plan.pipe * plan.chunks, seq)


@lru_cache(KEPT)
def _balanced(model: Model, inside: Spot, virtual: int, seq: int) -> tuple[int, ...]:
    return balanced(_costs(model, inside, seq), virtual)


@lru_cache(KEPT)
def _costs(model: Model, inside: Spot, seq: int) -> tuple[float, ...]:
    """Work of each part on a few samples, as `pipeline.stage` has it."""
    degrees = dict(zip(AXES, inside.degrees, strict=True))
    flow = Flow(degrees["row"] * degrees["col"], seq, itemsize=2, statistics=4)
    costs = [1.0 + work(model, part, inside, flow) for part in model.order]
    if inside.spread:  # the head is no matter of the last stage alone
        costs[-1] = 1.0
    return tuple(costs)


# ---- weights ----------------------------------------------------------------------------


@lru_cache(KEPT)
def lots_of(model: Model, stage: Stage, spot: Spot) -> tuple[tuple[str, Lot, int], ...]:
    """Name of the part, lot, and how many equal ones there are, of all weights of a stage."""
    degrees, found, vectors = dict(zip(AXES, spot.degrees, strict=True)), [], list[Piece]()
    for part, count in stage.here:
        pieces = pieces_of(model, part, spot.shards)
        if not part.is_block:
            pieces = tuple(_shared(pieces, model, stage, part.name == EXIT))
        vectors += [replace(one, times=count) for one in pieces if one.block == VECTORS]
        matrices = [one for one in pieces if one.block != VECTORS]
        found += [(part.name, lot, count) for lot in spec.sort(matrices, degrees)]
    return *found, *((VECTORS, lot, 1) for lot in spec.sort(vectors, degrees))


def _shared(pieces: Iterable[Piece], model: Model, stage: Stage, leaving: bool) -> Iterable[Piece]:
    """The weights of an entry or exit: a tied one is there once, or on two stages."""
    owner = next((leaf.tied for leaf in model.parts[-1].leaves if leaf.tied), "")
    both = stage.seat.count == 1 or stage.seat.spread
    for piece in pieces:
        if piece.name != f"{owner}.weight" or not owner:
            yield piece
        elif not both:
            yield replace(piece, whom=(0, stage.seat.count - 1))
        elif not leaving:
            yield replace(piece, tied=True)


@lru_cache(KEPT)
def gathers(model: Model, stage: Stage, keep: bool) -> dict[tuple[str, str], int]:
    """How often the weights of a part (and of a layer outside of blocks) are gathered."""
    alone = stage.seat.count == 1
    once = ("embedding",) if alone else ("embedding", "head")
    forward, backward = list[str](), list[str]()
    names: dict[str, tuple[str, str]] = {}
    for number, part in enumerate(stage.order):
        for leaf in part.leaves:
            block = str(number) if part.is_block else leaf.tied or leaf.name
            if _has_matrix(leaf):
                own = part.name if part.is_block else block
                names.setdefault(block, (part.name, own))  # a tied weight is the first one's
                forward.append(block)
                backward += [block] if leaf.kind not in once else []
    found: Counter[tuple[str, str]] = Counter()
    for block in spec.used(forward, backward[::-1], alone=alone, keep=keep):
        found[names[block]] += 1
    return dict(found)


def _has_matrix(leaf: Leaf) -> bool:
    """Whether a layer has a weight that depth splits."""
    return leaf.kind in ("linear", "siblings", "apart", "head", "embedding", "mixture")


# ---- all of a step ----------------------------------------------------------------------


def moves(
    model: Model,
    plan: Plan,
    flow: Flow,
    *,
    stage: int = 0,
    kept: bool = False,
    orders: int | None = None,
) -> Moves:
    """All communication of a step on a rank of a stage, of a settled plan.

    flow: of a micro-batch. kept: blocks that compute again keep what they communicated. orders: how
    often a stage's leader says what is next; None: as the policy of the plan does, which may have
    to be simulated first.
    """
    spot, micros = Spot.of(plan), plan.micro_batches
    here = stage_of(model, stage, plan.pipe, plan.chunks, cut(model, plan, flow.seq), plan.spread)
    rows = _activations(model, here, spot, flow, micros, plan.recompute != "none" and not kept)
    rows += _weights(model, here, spot, flow, micros, plan.gathered == "keep")
    ground, types = spot.ground(model), types_of(flow)
    size = traffic.message_bytes(ground, flow)
    rows += _rows("", "pipe", traffic.messages(here.seat, size), micros)
    region = ground.table.region("vocab")
    tokens = ground.line(*region["batch"], *region["seq"])
    numbers = [Event("all_reduce", tokens.names, n, "step") for n in (TOKENS, types.wide)]
    rows += _rows("", "step", numbers if tokens.size > 1 else [], 1)
    rows += _rows("", "update", _loads(model, ground), 1)
    inside = ground.line(*traffic.INSIDE).names
    if orders is None:
        orders = _orders(model, plan, flow.seq, here.seat) if plan.pipe > 1 and inside else 0
    last = traffic.step(here.seat, inside, types.wide, orders=orders)
    return Moves((*rows, *_rows("", "step", last, 1)))


def _loads(model: Model, ground: Ground) -> list[Event]:
    """What all routers did in a step, summed over all ranks with other tokens or layers."""
    found = [(part.count, leaf) for part in model.parts for leaf in part.find("mixture")]
    axes = ground.line(*(axis for axis in AXES if axis != "col"))
    if not found or axes.size == 1:
        return []
    numbers = sum(count * (leaf.shape[0] + NOTES) for count, leaf in found)
    return [Event("all_reduce", axes.names, numbers * LOADS, "experts")]


def types_of(flow: Flow) -> Types:
    """Bytes of weights, and of gradients being reduced."""
    return Types(flow.itemsize, max(flow.itemsize, 4))


def _rows(part: str, phase: Phase, events: Sequence[Event], times: int) -> list[Move]:
    """Events that come `times` times, equal ones together."""
    counts = Counter((event.op, event.axis, event.bytes, event.where) for event in events)
    return [
        Move(part, phase, op, axis, size, count * times, where)
        for (op, axis, size, where), count in counts.items()
    ]


def _activations(
    model: Model, stage: Stage, spot: Spot, flow: Flow, micros: int, again: bool
) -> list[Move]:
    """What passes communicate."""
    rows, inside = list[Move](), spot.inside
    for part, count in stage.here:
        for row in pass_rows(model, part, inside, flow):
            if again or row.phase != "again":
                rows.append(row._replace(count=row.count * count * micros))
    return rows


@lru_cache(KEPT)
def pass_rows(model: Model, part: Part, spot: Spot, flow: Flow) -> tuple[Move, ...]:
    forward, backward = _passes(model, part, spot, flow)
    again = forward if part.is_block else ()
    return (
        *_rows(part.name, "forward", forward, 1),
        *_rows(part.name, "again", again, 1),
        *_rows(part.name, "backward", backward, 1),
    )


def _weights(
    model: Model, stage: Stage, spot: Spot, flow: Flow, micros: int, keep: bool
) -> list[Move]:
    """What weights and gradients communicate."""
    rows, types = list[Move](), types_of(flow)
    degrees = dict(zip(AXES, spot.degrees, strict=True))
    times_of = gathers(model, stage, keep)
    for part, phase, event, count in lot_events(model, stage, spot, types):
        if phase == "gather":
            times = times_of.get((part, event.where), 0) * (1 if keep else micros)
        else:
            times = count * (micros if phase == "scatter" else 1)
        if times:
            rows.append(Move(part, phase, event.op, event.axis, event.bytes, times, event.where))
    return rows + _rows("", "update", spec.norm(degrees, types, votes=VOTES), 1)


@lru_cache(KEPT)
def lot_events(
    model: Model, stage: Stage, spot: Spot, types: Types
) -> tuple[tuple[str, Phase, Event, int], ...]:
    """Part, phase, event and number of lots of what each lot communicates once."""
    ground, found = spot.ground(model), list[tuple[str, Phase, Event, int]]()
    depth, data = ground.line("depth"), ground.line("data")
    for part, lot, count in lots_of(model, stage, spot):
        bulk = lot.bulk
        if bulk.split:
            found.append((part, "gather", spec.gather(bulk, depth, types), count))
            if bulk.trainable and not bulk.late:
                found.append((part, "scatter", spec.scatter(bulk, depth, types), count))
        for event in spec.update(bulk, depth, data, types):
            found.append((part, "update", event, count))
    return tuple(found)


def _orders(model: Model, plan: Plan, seq: int, seat: Seat) -> int:
    """How often a stage's leader says what is next under the policy of a plan."""
    policy = policy_of(model, plan, seq)
    return traffic.orders(
        seat,
        plan.micro_batches,
        dynamic=policy.dynamic,
        split=policy.split,
        rendezvous=False,  # as a dry run has it; over NCCL there are more, on the host
    )


def policy_of(model: Model, plan: Plan, seq: int) -> Policy:
    """The policy with which the stages of a plan take turns; simulated once."""
    splits = plan.compile != "on" and not plan.spread
    shape = Shape(plan.pipe, plan.micro_batches, plan.chunks)
    firsts, inside = cut(model, plan, seq), Spot.of(plan).inside
    costs = _costs(model, inside, seq)
    sums = tuple(sum(costs[one]) for one in ranges(firsts, len(costs)))
    return _policy(plan.policy, shape, sums, plan.jitter, plan.credits, splits)


@lru_cache(KEPT)
def _policy(
    name: str, shape: Shape, costs: tuple[float, ...], jitter: float, limit: int, splits: bool
) -> Policy:
    from ranvier.pipeline.policy_search import (  # the simulator: only for pipelines
        expected,
        policy_for,
    )

    return policy_for(name, shape, expected(costs, jitter), limit=limit, splits=splits)
