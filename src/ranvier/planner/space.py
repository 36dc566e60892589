"""Space: the bytes of a rank by category at the moment of a step when most is there; no torch.

A step needs, above weights and states, most

    in the head       while the loss is computed, all activations being kept
    in a block        while it runs backward (`kept.Kept.moments`)
    leaving           while the embedding's gradient is made
    in the update     gradients, and weights being gathered over data

Gradients come in the type of the weights; they are wide once they are added to others or reduced.
Over depth a block's gradients wait gathered, in 32 bits, for their reduction, that of the block
before beside them; of weights the present block's and the next one's are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from ranvier.layers import Flow
from ranvier.pipeline import orders
from ranvier.pipeline.policy import Message, Order, Policy
from ranvier.plan import AXES, Plan
from ranvier.planner.kept import Kept, Loss, kept, later, loss, stream_bytes
from ranvier.planner.leaves import Model
from ranvier.planner.moves import KEPT, Spot, Stage, cut, layers_of, lots_of, policy_of, stage_of
from ranvier.planner.table import Table
from ranvier.products import Scores

Moments = Literal["master", "bf16", "int8"]
BLOCK = 256
"""Numbers of a moment in 8 bits that share a scale."""


@dataclass(frozen=True)
class Weights:
    """Weights of a rank, and what belongs to them."""

    bytes: int
    master: int
    moments: int
    block: int
    """Trained elements of the matrices of the largest block on this rank."""
    blocks: int
    """The same of all blocks."""
    outside: int
    """Trained elements outside of blocks."""
    head: int
    """Elements of the head's gathered gradient; 0: it is elsewhere, or frozen."""
    table: int
    """Elements of the embedding's gathered gradient; likewise."""
    gathered: int
    """Bytes of a block's weights gathered over depth; 0: they lie whole."""
    whole: int
    """Bytes of all weights gathered over depth."""
    full: int
    """Bytes of its gradients, gathered, in 32 bits."""
    wide: int
    """Bytes of a wide number."""
    own: int
    """Bytes of a number."""
    data: int
    """Ranks among which states are divided."""
    late: int = 0
    """Bytes of the gradients of tied weights, gathered: they are reduced at the end of a step."""
    twice: int = 0
    """Bytes of the wide gradients of weights that another stage has as well."""

    @property
    def split(self) -> bool:
        """Whether depth splits weights, of blocks or, on a stage without any, of others."""
        return self.whole > 0


class Peak(NamedTuple):
    """What is there at a moment, besides weights and states."""

    where: str
    gradients: int
    activations: int
    gathered: int = 0
    logits: int = 0
    communication: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self[1:])


class _How(NamedTuple):
    """What else decides what is there: see `space`."""

    keeps: bool
    compiled: bool
    simulated: bool


def space(
    model: Model,
    plan: Plan,
    flow: Flow,
    *,
    stage: int | None = None,
    states: str = "device",
    moments: Moments = "master",
    keeps: bool = False,
    compiled: bool = False,
    simulated: bool = True,
) -> Table:
    """Bytes by category of a rank of a stage, of a settled plan; stage: None is the worst one.

    keeps: blocks that compute again keep what they communicated. simulated: the policy of a
    pipeline says what is under way; else 1F1B does, in closed form.
    """
    how = _How(keeps, compiled, simulated)
    if stage is None:
        ends = {0, plan.pipe - 1, min(1, plan.pipe - 1)}
        tables = [
            space(model, plan, flow, stage=i, states=states, moments=moments, **how._asdict())
            for i in sorted(ends)
        ]
        return max(tables, key=lambda one: one.total)
    spot = Spot.of(plan)
    here = stage_of(model, stage, plan.pipe, plan.chunks, cut(model, plan, flow.seq), plan.spread)
    own = weights_of(model, here, spot, flow.itemsize, moments)
    peak = max(_peaks(model, plan, flow, here, own, how), key=lambda one: one.total)
    device = {
        "weights": own.bytes,
        "gradients": peak.gradients,
        "master": own.master,
        "moments": own.moments,
        "activations": peak.activations,
        "gathered weights": peak.gathered,
        "logits": peak.logits,
        "communication": peak.communication,
    }
    host: dict[str, int] = {}
    if states == "host":
        host = {name: device.pop(name) for name in ("master", "moments")}
    return Table({n: size for n, size in device.items() if size}, host, peak.where)


@lru_cache(KEPT)
def weights_of(model: Model, stage: Stage, spot: Spot, own: int, moments: Moments) -> Weights:
    """The weights of a stage."""
    degrees = dict(zip(AXES, spot.degrees, strict=True))
    data, depth, wide = degrees["data"], degrees["depth"], max(own, 4)
    blocks = {part.name for part, _ in stage.here if part.is_block}
    total = master = both = outside = gathered = whole = full = block = every = late = twice = 0
    for part, lot, count in lots_of(model, stage, spot):
        bulk = lot.bulk
        total += count * bulk.size * own
        inside = part in blocks
        whole += count * bulk.size * own * depth if bulk.split else 0
        if bulk.split and inside:
            gathered = max(gathered, bulk.size * own * depth)
        if not bulk.trainable:
            continue
        held, vector = bulk.count // data, lot.pieces[0].group == "vector"
        master += count * held * (wide if own < 4 else 0)
        both += count * _moment_bytes(held, moments, wide, vector=vector)
        waits = bulk.late and bulk.split
        late += bulk.count * wide * depth if waits else 0
        twice += bulk.count * wide if bulk.tied else 0
        outside += 0 if inside or waits else bulk.count
        if inside:
            block, every = max(block, bulk.count), every + count * bulk.count
            full = max(full, bulk.count * wide * depth if bulk.split else 0)
    head, table = (_outside(model, stage, spot, kind) for kind in ("head", "embedding"))
    return Weights(
        total,
        master,
        both,
        block,
        every,
        outside,
        head,
        table,
        gathered,
        whole,
        full,
        wide,
        own,
        data,
        late,
        twice,
    )


def _moment_bytes(count: int, moments: Moments, wide: int, *, vector: bool) -> int:
    """Bytes of both moments of so many numbers."""
    if vector or moments == "master":
        return 2 * count * wide
    return 2 * count * 2 if moments == "bf16" else 2 * count + 8 * -(-count // BLOCK)


def _outside(model: Model, stage: Stage, spot: Spot, kind: str) -> int:
    """Elements of the gathered matrix of a trained layer outside of blocks."""
    ground, found = spot.ground(model), 0
    for part, _ in stage.here:
        for leaf in part.leaves if not part.is_block else ():
            if leaf.kind == kind and leaf.trainable and leaf.dims[0] == "vocab":
                piece = next(iter(leaf.pieces("", "", ground)))
                rows, width = piece.sharding.gathered
                found += rows * width
    return found


def held_micros(policy: Policy | None, plan: Plan, stage: int) -> int:
    """Activations of chunks that a stage keeps at once at most."""
    if plan.pipe == 1 or policy is None:
        return 1
    most = plan.micro_batches * plan.chunks
    if isinstance(policy, Order):
        return min(orders.peaks(policy)[stage], most)
    assert isinstance(policy, Message), policy
    return min(policy.credits[stage], most)


def usual_micros(plan: Plan, stage: int) -> int:
    """The same under 1F1B, interleaved where there are chunks."""
    after = plan.pipe - 1 - stage
    under = after + 1 if plan.chunks == 1 else 2 * after + (plan.chunks - 1) * plan.pipe + 1
    return min(under, plan.micro_batches * plan.chunks)


@dataclass(frozen=True)
class _Load:
    """What is there in a step besides weights and states, but for the moment."""

    enter: int
    """Before the first block: angles, other micro-batches that are under way."""
    whole: int
    """What all blocks keep."""
    stream: int
    before: int
    """Gradients of all blocks that earlier passes have left."""
    after: int
    """The same after the last pass."""
    mine: tuple[int, int]
    """Both of the largest block."""
    outside: int
    """Gradients outside of blocks that earlier passes have left."""
    several: bool
    """Whether a step has several passes."""
    waits: int = 0
    """What gradients of weights that are made later need, at the end of a pass."""


def _peaks(
    model: Model, plan: Plan, flow: Flow, stage: Stage, own: Weights, how: _How
) -> Iterator[Peak]:
    """The moments at which most may be there."""
    inside, kind = Spot.of(plan).inside, plan.recompute
    blocks = [
        (kept(model, part, inside, flow, how.compiled), n)
        for part, n in stage.here
        if part.is_block
    ]
    more = how.keeps and kind != "none"
    sizes = [(one.of(kind) + (one.held if more else 0), n) for one, n in blocks]
    load = _load(model, plan, flow, stage, own, sizes, how.simulated)
    scores = [
        layer
        for part, _ in stage.here
        for layer in layers_of(model, part, inside)
        if isinstance(layer, Scores)
    ]
    peaks: list[Peak] = []
    if scores:
        head = loss(scores[0], flow, own.head * own.wide)
        peaks += _in_the_loss(load, own, flow, head, plan.pipe == 1)
    top = max((one for one, _ in blocks), key=lambda one: one.none, default=None)
    if top is not None:
        peaks += _in_blocks(load, own, top, plan, bool(scores))
    peaks += _at_the_end(load, own, model.tied)
    for peak in peaks:  # what is kept gathered is there until the update
        keep = plan.gathered == "keep" and peak.where != "in the update"
        yield peak._replace(gathered=max(peak.gathered, own.whole)) if keep else peak


def _load(
    model: Model,
    plan: Plan,
    flow: Flow,
    stage: Stage,
    own: Weights,
    blocks: Sequence[tuple[int, int]],
    simulated: bool,
) -> _Load:
    stream = stream_bytes(model, Spot.of(plan).inside, flow)
    whole = sum(size * n for size, n in blocks)
    others, waits = _under_way(model, plan, flow, stage, whole, simulated)
    enter = flow.seq * 2 * model.head_dim * flow.itemsize + others
    passes = plan.micro_batches
    before, after = _gradients(own.blocks, own, passes)
    mine = _gradients(own.block, own, passes)
    outside = own.outside * own.wide if passes > 1 else 0
    return _Load(enter, whole, stream, before, after, mine, outside, passes > 1, waits)


def _under_way(
    model: Model, plan: Plan, flow: Flow, stage: Stage, whole: int, simulated: bool
) -> tuple[int, int]:
    """Bytes of other micro-batches that a stage holds, and what of this one waits at its end.

    whole: what all blocks keep of one. Gradients of weights that are made later wait with all they
    need.
    """
    inside, index = Spot.of(plan).inside, stage.seat.index
    stream = stream_bytes(model, inside, flow)
    each = whole // plan.chunks + stream
    if plan.pipe == 1 or not simulated:
        return (usual_micros(plan, index) - 1) * each, 0
    policy = policy_of(model, plan, flow.seq)
    others = held_micros(policy, plan, index) - 1
    if not policy.split:
        return others * each, 0
    waits = sum(n * later(model, part, inside, flow) for part, n in stage.here if part.is_block)
    waits //= plan.chunks
    return others * max(each, waits + stream), waits


def _in_the_loss(load: _Load, own: Weights, flow: Flow, head: Loss, alone: bool) -> Iterator[Peak]:
    """While logits are computed; then their gradient is taken over.

    Beside the head's weights those that come next are gathered: of a block, or once more its own.
    A stage among others forgets them between forward and backward.
    """
    grads = load.before + load.outside
    held = load.enter + load.whole + load.stream * (1 + 2 * own.wide // flow.itemsize) + load.stream
    made, mine = own.head * own.wide, own.head * own.own
    late = own.late if load.several else 0
    moving = late
    if own.split and load.several and not late:
        moving = max(own.table * own.wide, own.full)
    near = mine + (own.gathered or mine * load.several) if own.split else 0
    acts = held + head.rows + head.moment
    yield Peak("in the loss", grads, acts, near, head.logits, moving)
    if own.split:
        near = near if alone else own.gathered
        yield Peak("behind the loss", grads + made, held + load.stream, near, 0, max(made, late))


def _in_blocks(load: _Load, own: Weights, top: Kept, plan: Plan, scored: bool) -> Iterator[Peak]:
    """While the last block runs backward, and while the first does."""
    again = top.again(plan.recompute)
    left = load.before + load.outside
    head = own.head * own.wide if scored else 0
    each = 0 if own.split else own.own
    needed, elements = max(top.moments, key=lambda one: one[0] + each * one[1], default=(0, 0))
    acts = load.enter + load.whole + again + needed + 2 * load.stream
    if own.split:  # that of the head is being reduced
        near, moving = 2 * own.gathered, own.full + max(head, own.late)
        yield Peak("in the last block, backward", left, acts, near, 0, moving)
    else:
        grads = left + head + elements * own.own
        yield Peak("in the last block, backward", grads, acts)
    acts = load.enter + load.waits + top.of(plan.recompute) + again + 2 * load.stream
    grads = load.after - load.mine[1] + own.outside * own.wide
    near, moving = 2 * own.gathered, 2 * own.full + own.late
    mine = load.mine[0] + elements * each
    yield Peak("in the first block, backward", grads + mine, acts + needed, near, 0, moving)


def _at_the_end(load: _Load, own: Weights, tied: bool) -> Iterator[Peak]:
    """While the embedding's gradient is made, and in the update."""
    left = load.after + own.outside * own.wide
    table = own.table * (own.own + own.wide * (tied or own.split)) - own.late * (own.table > 0)
    acts = load.enter + load.waits + 2 * load.stream
    moving = own.full + own.late
    yield Peak("at the end of backward", left + max(table, 0), acts, own.gathered, 0, moving)
    trained = own.blocks + own.outside
    wide = own.data > 1 or own.split or load.several
    ends = trained * own.wide // own.data if wide else trained * own.own
    yield Peak("in the update", ends, 0, 0, 0, trained * own.own if own.data > 1 else 0)
    if own.twice:  # a copy, and what comes of its sum with the other stage's
        left = load.after + own.outside * own.wide
        yield Peak("in the update", left, 0, 0, 0, max(2 * own.twice, own.late) + own.twice)


def _gradients(elements: int, own: Weights, passes: int) -> tuple[int, int]:
    """Bytes of the gradients of so many elements before and after the last pass of a step."""
    narrow, wide, split = elements * own.own, elements * own.wide, own.split
    before = 0 if passes == 1 else wide if split or passes > 2 else narrow
    after = wide if split or passes > 1 else narrow
    if own.data > 1:  # what is reduced stays until the reduction is waited for
        after = wide + wide // own.data
    return before, after
