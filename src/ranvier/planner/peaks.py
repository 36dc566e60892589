"""Peaks: the moments of a step at which most is there besides weights and states; no torch.

A stage takes turns (`pipeline.turns`): each is a pass over a chunk of its blocks, while others of
its micro-batches wait with what they have kept. In a turn most is there

    in the loss       while logits are computed, all activations being kept
    behind the loss   while the gradient of the head is taken over
    in a block        while the last, or the first, runs backward (`kept.Kept.moments`)
    at the end        while the embedding's gradient is made
    later             while gradients of weights are made that were put off

and once, at the end of a step, in the update. One stage alone is gradient accumulation.

Gradients come in the type of the weights; they are wide once they are added to others or reduced.
Over depth a block's gradients wait gathered, in 32 bits, for their reduction; of the bucket before
both these and its reduced part are there until that is waited for. Of weights the present block's
and the next one's are gathered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import mul
from typing import NamedTuple

from ranvier.layers import Flow
from ranvier.pipeline.balance import ranges
from ranvier.pipeline.policy import Message, Order, Shape
from ranvier.pipeline.turns import ALL, SEVERAL, Kinds, Turn, turns, usual
from ranvier.plan import Plan, Recompute
from ranvier.planner.kept import WIDE, Kept, Loss, kept, later, loss, stream_bytes
from ranvier.planner.leaves import Model, Part
from ranvier.planner.moves import KEPT, Spot, Stage, layers_of, policy_of
from ranvier.planner.weights import Weights
from ranvier.products import Scores


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


class How(NamedTuple):
    """What else decides what is there: see `space`."""

    keeps: bool
    compiled: bool
    fp8: bool
    simulated: bool


@dataclass(frozen=True)
class Chunk:
    """What a chunk of a stage keeps of a micro-batch."""

    whole: int
    """By all its blocks, and angles."""
    blocks: tuple[tuple[str, int], ...]
    """Names of its kinds of blocks, and how many of each."""
    count: int
    """Blocks."""
    rest: int
    """What is kept once all but the largest have had their turn."""
    top: Kept | None
    """The block that needs most."""
    enters: bool
    leaves: bool
    x: int
    """Its input, if nothing else keeps it."""
    scored: int
    """By the last norm and the head, whose gradients are made in forward."""
    waits: int
    """After backward, if gradients of weights are made later."""

    @cached_property
    def held(self) -> int:
        """From forward to backward."""
        return self.whole + self.x + self.scored


@dataclass(frozen=True)
class Load:
    """What is there in all turns of a stage, but for the turn."""

    own: Weights
    groups: tuple[int, ...]
    """The group of each chunk."""
    chunks: tuple[Chunk, ...]
    """One of each group."""
    elements: tuple[int, ...]
    """Of the gradients of the blocks of each."""
    plan: Plan
    stream: int
    rows: int
    """Rows of the tokens of all micro-batches, where the vocabulary is spread."""
    spread: bool
    """Whether all stages share the vocabulary: each computes its losses as soon as it can."""
    split: bool
    """Whether gradients of weights are turns of their own."""
    head: Loss | None
    """The head, if it is here."""

    @cached_property
    def levels(self) -> tuple[tuple[int, int, int], ...]:
        """Bytes of the gradients of a chunk of each group after 1, SEVERAL and ALL passes."""
        return tuple(
            (self.made(n, 1), self.made(n, SEVERAL), self.made(n, ALL)) for n in self.elements
        )

    @property
    def several(self) -> bool:
        """Whether a step has several passes."""
        return self.plan.micro_batches > 1

    @cached_property
    def needs(self) -> tuple[tuple[int, int], ...]:
        """Bytes that the largest block of each group needs most besides, while it runs backward:
        of activations, and of gradients."""
        each = 0 if self.own.split or self.split else self.own.own
        moments = (one.top.moments if one.top else () for one in self.chunks)
        sizes = ([(needed, each * count) for needed, count in some] for some in moments)
        return tuple(max(some, key=sum, default=(0, 0)) for some in sizes)

    def others(self, turn: Turn) -> int:
        """Bytes of micro-batches that wait while another has its turn."""
        found = self.rows
        for one, held, late in zip(self.chunks, turn.held, turn.late, strict=True):
            found += held * one.held + late * one.waits
        return found

    def made(self, elements: int, made: int) -> int:
        """Bytes of the gradients of so many elements of blocks after so many passes."""
        own = self.own
        narrow, wide = elements * own.own, elements * own.wide
        if made == 0:
            return 0
        if made == ALL and own.data > 1 and not (self.split and len(self.groups) > 1):
            return wide + wide // own.data  # what is reduced stays until that is waited for
        several = made == SEVERAL or (made == ALL and self.several)
        return wide if own.split or several else narrow

    def grown(self, turn: Turn, elements: int) -> int:
        """By how much those of the chunk whose turn it is grow in it."""
        after = self.made(elements, ALL if turn.last else min(turn.before + 1, SEVERAL))
        return after - self.made(elements, turn.before)

    def outside(self, turn: Turn) -> int:
        """Bytes of gradients outside of blocks that earlier passes have left."""
        own, found = self.own, 0
        for one, made in zip(self.chunks, turn.back, strict=True):
            if made and one.leaves and not self.spread:
                found += own.head_part * own.wide
            if made and one.enters:
                wide = own.split or made > 1
                found += own.table_part * (own.wide if wide else own.own)
        rest = own.outside - own.head_part - own.table_part
        if self.spread and (turn.kind != "F" or any(turn.back)):
            found += own.head_part * own.wide
        return found + rest * own.wide * any(turn.back)

    def gradients(self, turn: Turn) -> int:
        """Bytes of gradients that earlier passes have left."""
        found = self.outside(turn)
        for sizes, counts in zip(self.levels, turn.made, strict=True):
            found += sum(map(mul, sizes, counts))
        return found

    def under_way(self, full: int) -> int:
        """Bytes of a reduction over depth of so many: what goes in and what comes out."""
        return full + full // self.plan.depth

    def behind(self, turn: Turn) -> int:
        """Bytes of the last reduction of the turn before."""
        own = self.own
        if self.spread and own.split and turn.kind == "B" and not own.late:
            return self.under_way(own.head * own.wide)
        if not own.split or turn.behind is None:
            return 0
        kind, at = turn.behind
        before, whole = self.chunks[at], kind == "W" or not self.split
        if before.enters and own.table and kind == "B":
            return 0 if own.late else self.under_way(own.table * own.wide)
        if before.count and whole:
            return self.under_way(own.full)
        return 0 if own.late or not before.leaves else self.under_way(own.head * own.wide)

    def first(self, turn: Turn) -> int:
        """Bytes of the embedding, gathered for a forward pass that follows."""
        return self.own.table * self.own.own if self.own.split and turn.follows else 0

    def late(self, turn: Turn) -> int:
        """Bytes of gathered gradients that wait for the end of the step."""
        made = turn.begun or (self.spread and turn.kind != "F")
        return self.own.late if made else 0


class Now(NamedTuple):
    """A turn of a stage, and how much is there beside it."""

    turn: Turn
    others: int
    """Bytes of micro-batches that wait."""
    gradients: int
    """Bytes that earlier passes have left."""
    chunk: Chunk
    elements: int
    """Of the gradients of its blocks."""


def peaks(
    model: Model,
    plan: Plan,
    flow: Flow,
    spot: Spot,
    firsts: tuple[int, ...],
    stage: Stage,
    own: Weights,
    how: How,
) -> list[Peak]:
    """The moments at which most may be there. firsts: as of `moves.cut`."""
    load = _load(model, plan, flow, spot.inside, firsts, stage, own, how)
    found = [*_at_the_end(load)]
    for now in _fullest(load, _turns(model, flow.seq, stage, load, how.simulated)):
        kind = now.turn.kind
        scores = now.turn.group == load.groups[-1] if load.spread else now.chunk.leaves
        if kind == "F" and load.head is not None and scores:
            found.append(_in_the_loss(load, now, load.head, flow))
        elif kind == "B":
            found += _backward(load, now)
        elif kind == "W":
            found.append(_later(load, now))
    if plan.gathered == "keep":  # what is kept gathered is there until the update
        found = [
            one._replace(gathered=max(one.gathered, own.whole)) if one.where != UPDATE else one
            for one in found
        ]
    return found


def _fullest(load: Load, kinds: Kinds) -> Iterator[Now]:
    """Of turns that differ in what waits and is added up beside them only, the one with most."""
    for alike in kinds:
        first = alike[0]
        if first.kind == "F" and load.head is None:
            continue
        much = [(load.others(turn), load.gradients(turn)) for turn in alike]
        at = max(range(len(alike)), key=lambda i: sum(much[i])) if len(alike) > 1 else 0
        yield Now(alike[at], *much[at], load.chunks[first.group], load.elements[first.group])


UPDATE = "in the update"


def _turns(model: Model, seq: int, stage: Stage, load: Load, simulated: bool) -> Kinds:
    """The turns of a stage."""
    plan, index, groups = load.plan, stage.seat.index, load.groups
    moves = load.own.split
    if plan.pipe == 1 or not simulated:
        return usual(plan.pipe, plan.micro_batches, plan.chunks, index, groups, moves)
    policy = policy_of(model, plan, seq)
    assert isinstance(policy, Message | Order), policy
    shape = Shape(plan.pipe, plan.micro_batches, plan.chunks, policy.split)
    return turns(policy, shape, index, groups, moves)


def _load(
    model: Model,
    plan: Plan,
    flow: Flow,
    inside: Spot,
    firsts: tuple[int, ...],
    stage: Stage,
    own: Weights,
    how: How,
) -> Load:
    spread, head = plan.spread and plan.pipe > 1, own.head * own.wide
    groups, chunks = _chunks(model, stage, firsts, inside, flow, plan.recompute, how, head)
    sizes = dict(own.each)
    scores = _scores(model, stage.order, inside)
    return Load(
        own,
        groups,
        chunks,
        tuple(sum(n * sizes.get(name, 0) for name, n in one.blocks) for one in chunks),
        plan,
        stream := stream_bytes(model, inside, flow),
        rows=plan.micro_batches * stream if spread else 0,
        spread=spread,
        split=plan.pipe > 1 and how.simulated and policy_of(model, plan, flow.seq).split,
        head=None if scores is None else loss(scores, flow, head),
    )


@lru_cache(KEPT)
def _scores(model: Model, parts: tuple[Part, ...], inside: Spot) -> Scores | None:
    """The head, if it is among these parts."""
    outside = [part for part in parts if not part.is_block]
    layers = (one for part in outside for one in layers_of(model, part, inside))
    return next((one for one in layers if isinstance(one, Scores)), None)


@lru_cache(KEPT)
def _chunks(
    model: Model,
    stage: Stage,
    firsts: tuple[int, ...],
    inside: Spot,
    flow: Flow,
    kind: Recompute,
    how: How,
    head: int,
) -> tuple[tuple[int, ...], tuple[Chunk, ...]]:
    """The group of each chunk of a stage, and one chunk of each group.

    Chunks of the same parts are alike, but for the last where each stage computes losses there.
    """
    count, order = stage.seat.count, model.order
    mine = ranges(firsts, len(order))[stage.seat.index :: count] if count > 1 else [slice(None)]
    spread, keys = stage.seat.spread and count > 1, list[tuple[object, ...]]()
    found = dict[tuple[object, ...], Chunk]()
    for i, one in enumerate(mine):
        parts, first = order[one], not one.start
        keys.append((first, parts, spread and i == len(mine) - 1))
        if keys[-1] not in found:
            found[keys[-1]] = _chunk(model, parts, first, inside, flow, kind, how, head, spread)
    places = {key: i for i, key in enumerate(found)}
    return tuple(places[key] for key in keys), tuple(found.values())


@lru_cache(KEPT)
def _chunk(
    model: Model,
    parts: tuple[Part, ...],
    first: bool,
    inside: Spot,
    flow: Flow,
    kind: Recompute,
    how: How,
    head: int,
    spread: bool,
) -> Chunk:
    """What some parts keep of a micro-batch. head: bytes of the head's gradient."""
    stream = stream_bytes(model, inside, flow)
    wide = max(flow.itemsize, WIDE) // flow.itemsize
    blocks = Counter(part for part in parts if part.is_block)
    found = {part: kept(model, part, inside, flow, how.compiled, how.fp8) for part in blocks}
    angles = flow.seq * 2 * model.head_dim * flow.itemsize if blocks else 0
    leaves = _scores(model, parts, inside) is not None
    comes, made = not first or spread, 0 if spread else head
    shared = blocks and (kind != "none" or how.compiled or wide == 1)
    whole = angles + sum(n * found[part].of(kind, keeps=how.keeps) for part, n in blocks.items())
    top = max(found.values(), key=lambda one: one.none, default=None)
    every = sum(n * found[part].of(kind) for part, n in blocks.items())
    return Chunk(
        whole,
        tuple((part.name, n) for part, n in blocks.items()),
        blocks.total(),
        whole - every + (top.of(kind) if top else 0),
        top,
        first,
        leaves,
        x=0 if shared or not comes else stream,
        scored=stream * (1 + 2 * wide) + made if leaves else 0,
        waits=sum(n * later(model, part, inside, flow) for part, n in blocks.items()),
    )


def _in_the_loss(load: Load, now: Now, head: Loss, flow: Flow) -> Peak:
    """While logits are computed.

    Beside the head's weights those that come next are gathered: of a block, or once more its own.
    """
    own, one, turn = load.own, now.chunk, now.turn
    mine = own.head * own.own
    once = turn.last or load.plan.gathered == "keep"
    near = mine + (own.gathered or mine * (not once)) if own.split else 0
    acts = now.others + head.rows + head.moment
    if load.spread:
        acts += one.held + load.stream
    else:
        acts += one.whole + one.x + load.stream * (2 + 2 * own.wide // flow.itemsize)
    moving = load.behind(turn) + load.late(turn)
    return Peak("in the loss", now.gradients, acts, near, head.logits, moving)


def _backward(load: Load, now: Now) -> Iterator[Peak]:
    """While a chunk runs backward."""
    one = now.chunk
    if one.leaves and load.own.head and not load.spread:
        yield _behind_the_loss(load, now)
    if one.top is not None:
        yield from _in_blocks(load, now, one.top)
    if one.enters:
        yield _leaving(load, now)


def _behind_the_loss(load: Load, now: Now) -> Peak:
    """While the gradient of the head is taken over: it is added to that of earlier passes."""
    own, one, turn = load.own, now.chunk, now.turn
    made, grads = own.head * own.wide, now.gradients
    acts = now.others + one.held + load.stream
    if not own.split:
        grads += made if turn.passed else 0
        return Peak("behind the loss", grads, acts)
    mine = own.head * own.own if load.plan.pipe == 1 else 0
    full = max(made, own.late) + made * own.padded + load.behind(turn)
    return Peak("behind the loss", grads, acts, own.gathered + mine, 0, full)


def _in_blocks(load: Load, now: Now, top: Kept) -> Iterator[Peak]:
    """While the last block of a chunk runs backward, and while the first does."""
    own, one, turn, kind = load.own, now.chunk, now.turn, load.plan.recompute
    leaves = one.leaves and not load.spread
    new = leaves and not turn.passed
    head = own.head * own.wide if leaves else 0
    needed, more = load.needs[turn.group]
    base = now.others + top.again(kind) + needed + 2 * load.stream + one.x
    grads, near = now.gradients + more, 2 * own.gathered
    if own.split:
        before = load.under_way(head) if head and not own.late else load.behind(turn)
        moving = (0 if load.split else own.full) + before + max(load.late(turn), own.late * new)
    else:
        grads, moving = grads + head * new, 0
    yield Peak("in the last block, backward", grads, base + one.whole, near, 0, moving)
    rest = one.rest
    if load.split:  # what later gradients need has come in place of what was kept
        rest = max(rest, 0) + one.waits * (one.count - 1) // one.count
        yield Peak("in the first block, backward", grads, base + rest, near, 0, moving)
        ends = now.others + one.waits + top.entry + 2 * load.stream + one.x
        yield Peak("behind the first block", grads, ends, near, 0, moving)
        return
    grads += load.grown(turn, max(now.elements - own.block, 0))
    if own.split:
        before = load.under_way(own.full) if one.count > 1 else before
        moving = own.full + before + max(load.late(turn), own.late * leaves)
        grads += own.head_part * own.wide * new
    if one.enters:
        near = own.gathered + max(own.gathered, load.first(turn))
    yield Peak("in the first block, backward", grads, base + max(rest, 0), near, 0, moving)


def _leaving(load: Load, now: Now) -> Peak:
    """While the embedding's gradient is made."""
    own, one, turn, grads = load.own, now.chunk, now.turn, now.gradients
    if not load.split:
        grads += load.grown(turn, now.elements)
    back = turn.passed
    tied = one.leaves and own.tied  # the head's is there already
    if own.split:
        table = own.table * (own.own * (2 if own.padded else 1) + own.wide)
        table -= own.late * (own.table > 0)
    else:  # as it came; the sum; what was there before, which the second pass widens
        more = own.wide if back or tied else 0
        widened = back > 0 and not tied and own.own < own.wide
        more += (own.wide if back == 1 else own.own) * widened
        table = own.table * (own.own + more)
    acts = now.others + 2 * load.stream + (one.waits if load.split else 0)
    before = load.behind(turn) if load.split else load.under_way(own.full)
    moving = before + own.late if own.split else 0
    near = own.gathered + load.first(turn)
    return Peak("at the end of backward", grads + max(table, 0), acts, near, 0, moving)


def _later(load: Load, now: Now) -> Peak:
    """While gradients of weights are made that were put off: all they need stays until the end."""
    own, one, turn = load.own, now.chunk, now.turn
    grads = now.gradients + load.grown(turn, now.elements)
    moving = own.full + load.under_way(own.full) + load.late(turn) if own.split else 0
    return Peak("in gradients put off", grads, now.others + one.waits, 0, 0, moving)


def _at_the_end(load: Load) -> Iterator[Peak]:
    """In the update."""
    own, every = load.own, sum(load.elements[group] for group in load.groups)
    trained = every + own.outside
    wide = own.data > 1 or own.split or load.several
    ends = trained * own.wide // own.data if wide else trained * own.own
    yield Peak(UPDATE, ends, 0, 0, 0, trained * own.own if own.data > 1 else 0)
    if own.twice:  # a copy, widened before, and what comes of its sum with the other stage's
        left = load.made(every, ALL) + own.outside * own.wide
        copies = 3 if not load.several and own.own < own.wide else 2
        yield Peak(UPDATE, left, 0, 0, 0, max(copies * own.twice, load.under_way(own.late)))
