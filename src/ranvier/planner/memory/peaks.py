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

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import mul
from typing import Literal, NamedTuple

from ranvier.config.plan import Plan
from ranvier.cost.layers import Flow
from ranvier.pipeline.memory_replay import ALL, SEVERAL, Kinds, Turn, turns, usual
from ranvier.pipeline.policy import Message, Order, Shape
from ranvier.planner.comm_volume import Spot, Stage, policy_of
from ranvier.planner.memory.activations import Loss, loss, stream_bytes
from ranvier.planner.memory.chunks import Chunk, How, Place, chunks_of, scores_of
from ranvier.planner.memory.model_states import Weights
from ranvier.planner.model_spec import Model

Moving = Literal["head", "table", "places", "block", ""]
"""What is being reduced over depth."""


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


@dataclass(frozen=True)
class Load:
    """What is there in all turns of a stage, but for the turn."""

    own: Weights
    groups: tuple[int, ...]
    """The group of each chunk."""
    chunks: tuple[Chunk, ...]
    """One of each group."""
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
        sizes = (one.elements for one in self.chunks)
        return tuple((self.made(n, 1), self.made(n, SEVERAL), self.made(n, ALL)) for n in sizes)

    @property
    def depth(self) -> int:
        """Ranks among which gradients of split weights are divided."""
        return self.plan.depth

    @cached_property
    def several(self) -> bool:
        """Whether a step has several passes."""
        return self.plan.micro_batches > 1

    @cached_property
    def needs(self) -> dict[Place, tuple[int, int, int]]:
        """Bytes at a block's worst moment: beside what is kept, of gradients, of gathered ones."""
        own, found = self.own, dict[Place, tuple[int, int, int]]()
        each = 0 if own.split or self.split else own.own
        for place in (place for one in self.chunks for place in one.places):
            full = place.full if own.split and not self.split else 0  # from the first one on
            moments = (*place.needs, place.later) if self.split else place.needs
            sizes = [(size, each * n, full * (n > 0)) for size, n in moments]
            found[place] = max(sizes, key=sum)
        return found

    @cached_property
    def edges(self) -> tuple[tuple[int, Chunk], ...]:
        """Groups with the embedding or the head."""
        return tuple((i, one) for i, one in enumerate(self.chunks) if one.enters or one.leaves)

    @cached_property
    def early(self) -> bool:
        """Whether reductions over data begin in the last pass."""
        return self.own.data > 1 and not (self.split and len(self.groups) > 1)

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
        if made == ALL and self.early:
            return wide + wide // own.data  # what is reduced stays until that is waited for
        several = made == SEVERAL or (made == ALL and self.several)
        return wide if own.split or several else narrow

    def grown(self, turn: Turn, elements: int) -> int:
        """By how much those of the chunk whose turn it is grow in it."""
        after = self.made(elements, ALL if turn.last else min(turn.before + 1, SEVERAL))
        return after - self.made(elements, turn.before)

    def outside(self, turn: Turn) -> int:
        """Bytes of gradients outside of blocks that earlier passes have left."""
        if not (self.edges or self.spread):
            return 0
        own, found = self.own, 0
        moving, several = self.moving(turn), 2 if self.several else ALL + 1
        both = self.spread and own.tied
        for group, one in self.edges:
            made = turn.back[group]
            reduced = own.wide // own.data if made == ALL and self.early else 0
            if made and one.leaves and not self.spread and (moving != "head" or made >= several):
                found += own.head_part * (own.wide + reduced)
            if made and one.enters and not both and (moving != "table" or made >= several):
                wide = own.split or made > 1 or (own.tied and one.leaves)
                found += own.table_part * (own.wide + reduced if wide else own.own)
        rest = own.outside - own.head_part - own.table_part
        if self.spread and turn.scored > (moving == "head" and turn.kind == "F"):
            found += self.words * own.wide
        return found + rest * own.wide * self.outer(turn)

    @property
    def words(self) -> int:
        """Elements of the head's gradient on this rank; tied ones are those of the embedding."""
        return self.own.table_part if self.own.tied else self.own.head_part

    def gradients(self, turn: Turn) -> int:
        """Bytes of gradients that earlier passes have left."""
        found = self.outside(turn)
        for sizes, counts in zip(self.levels, turn.made, strict=True):
            found += sum(map(mul, sizes, counts))
        if turn.behind is not None and turn.behind[2] and self.moving(turn) == "block":
            found -= self.chunks[turn.behind[1]].full // self.depth  # is being reduced
        return found

    def under_way(self, full: int) -> int:
        """Bytes of a reduction over depth of so many: what goes in and what comes out."""
        return full + full // self.depth

    def moving(self, turn: Turn) -> Moving:
        """Whose gradients, made last before a turn, are being reduced over depth."""
        own = self.own
        if self.spread and own.split and not own.late:
            first = turn.kind == "F" and turn.behind is None
            if turn.kind == "B" or (first and turn.scored):
                return "head"
        if not own.split or turn.behind is None:
            return ""
        kind, at, _ = turn.behind
        before, whole = self.chunks[at], kind == "W" or not self.split
        if before.enters and own.table and kind == "B":
            return "places" if own.late else "table"
        if before.count and whole:
            return "block"
        return "" if own.late or not before.leaves else "head"

    def behind(self, turn: Turn) -> int:
        """Bytes of the last reduction of the turn before."""
        own = self.own
        block = self.chunks[turn.behind[1]].full if turn.behind else 0
        elements = {"head": own.head, "table": own.table, "places": own.places}
        moving = self.moving(turn)
        return self.under_way(block if moving == "block" else elements.get(moving, 0) * own.wide)

    def first(self, turn: Turn) -> int:
        """Bytes of the embedding, gathered for a forward pass that follows."""
        return self.own.table * self.own.own if self.own.split and turn.follows else 0

    def ends(self, turn: Turn) -> bool:
        """Whether no block follows a turn: those of the chunk before are last."""
        return turn.last and not (turn.ahead is not None and self.chunks[turn.ahead].places)

    def late(self, turn: Turn) -> int:
        """Bytes of gathered gradients that wait for the end of the step."""
        made = turn.begun or (self.spread and turn.scored > 0)
        return self.own.late if made else 0

    def outer(self, turn: Turn) -> bool:
        """Whether gradients outside of blocks have been made."""
        return any(turn.back[group] for group, _ in self.edges)


class Now(NamedTuple):
    """A turn of a stage, and how much is there beside it."""

    turn: Turn
    others: int
    """Bytes of micro-batches that wait."""
    gradients: int
    """Bytes that earlier passes have left."""
    chunk: Chunk


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
    if load.spread and not any(one.enters for one in load.chunks):
        found += _returned(load)
    for now in _fullest(load, _turns(model, flow.seq, stage, load, how.simulated)):
        kind = now.turn.kind
        scores = now.turn.group == load.groups[-1] if load.spread else now.chunk.leaves
        if kind == "F" and load.head is not None and scores:
            found.append(_in_the_loss(load, now, load.head, flow))
            found += [_scored(load, now)] if load.spread and own.head else []
        elif kind == "B":
            found += _backward(load, now)
        elif kind == "W":
            found += _later(load, now)
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
        yield Now(alike[at], *much[at], load.chunks[first.group])


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
    stream, spread = stream_bytes(model, inside, flow), plan.spread and plan.pipe > 1
    groups, chunks = chunks_of(model, stage, firsts, inside, flow, plan, own, how)
    scores = scores_of(model, stage.order, inside)
    return Load(
        own,
        groups,
        chunks,
        plan,
        stream,
        rows=plan.micro_batches * stream if spread else 0,
        spread=spread,
        split=plan.pipe > 1 and how.simulated and policy_of(model, plan, flow.seq).split,
        head=None if scores is None else loss(scores, flow, own.head * own.wide),
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
    yield from (_in_block(load, now, place) for place in one.places)
    if load.split and one.places:
        yield _behind_blocks(load, now)
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


def _scored(load: Load, now: Now) -> Peak:
    """While the gradient of a spread head is taken over: at once, behind its loss."""
    own, one, turn = load.own, now.chunk, now.turn
    made, grads = own.head * own.wide, now.gradients
    acts = now.others + one.held + load.stream + made
    if not own.split:
        return Peak("behind the loss", grads + made * (turn.scored > 0), acts)
    full = max(made, own.late) + made * own.padded + load.behind(turn)
    near = own.head * own.own + own.gathered
    return Peak("behind the loss", grads, acts, near, 0, full)


def _in_block(load: Load, now: Now, place: Place) -> Peak:
    """While a block of a chunk runs backward."""
    own, one, turn = load.own, now.chunk, now.turn
    leaves = one.leaves and not load.spread
    new = leaves and not turn.passed
    head = own.head * own.wide if leaves else 0
    needed, made, full = load.needs[place]
    acts = now.others + place.rest + place.again + needed + 2 * load.stream + one.x
    grads, near = now.gradients + made, place.gathered
    if load.split:  # what later gradients need has come in place of what was kept
        acts += place.waits
    else:
        grads += load.grown(turn, place.done)
    if not own.split:
        return Peak(place.where, grads + head * new, acts)
    moving = max(load.late(turn), own.late * new)
    if load.split or place.behind is None:
        moving += load.under_way(head) if head and not own.late else load.behind(turn)
    else:
        moving += load.under_way(place.behind)
        grads += own.head_part * own.wide * new
    moving += full
    if place.first and one.enters:
        near += max(place.following, load.first(turn))
    elif not (place.first and load.ends(turn)):
        near += place.following
    return Peak(place.where, grads, acts, near, 0, moving)


def _behind_blocks(load: Load, now: Now) -> Peak:
    """While a chunk ends whose gradients of weights are made later."""
    one, first = now.chunk, now.chunk.places[-1]
    acts = now.others + one.waits + first.entry + 2 * load.stream + one.x
    there = _in_block(load, now, first)
    return there._replace(where="behind the first block", activations=acts)


def _table(load: Load, back: int, tied: bool) -> int:
    """Bytes of the embedding's gradient while it is added to that of so many earlier passes.

    tied: the head's is there already.
    """
    own = load.own
    if own.split:
        table = own.table * (own.own * (2 if own.padded else 1) + own.wide)
        return max(table - own.late * (own.table > 0), 0)
    # as it came; the sum; what was there before, which the second pass widens
    more = own.wide if back or tied else 0
    widened = back > 0 and not tied and own.own < own.wide
    more += (own.wide if back == 1 else own.own) * widened
    return own.table * (own.own + more)


def _leaving(load: Load, now: Now) -> Peak:
    """While the embedding's gradient is made."""
    own, one, turn, grads = load.own, now.chunk, now.turn, now.gradients
    if not load.split:
        grads += load.grown(turn, one.elements)
    grads += _table(load, turn.passed, own.tied and (one.leaves or load.spread))
    rows = load.plan.row * load.stream * (load.plan.row > 1)  # dy of all tokens
    acts = now.others + 2 * load.stream + rows + (one.waits if load.split else 0)
    before = load.behind(turn) if load.split else load.under_way(one.full)
    moving = before + own.late + own.places * own.wide if own.split else 0
    near = own.gathered + load.first(turn)
    return Peak("at the end of backward", grads, acts, near, 0, moving)


def _returned(load: Load) -> Iterator[Peak]:
    """While gradients of a spread embedding are made, on all stages but the first: at the end."""
    own, count = load.own, load.plan.micro_batches
    grads = sum(load.levels[group][-1] for group in load.groups) + load.words * own.wide
    for back in range(min(count, SEVERAL + 1)):
        table = _table(load, back, own.tied)
        if not own.tied and back > own.split:
            wide = own.split or back > 1
            table += own.table_part * (own.wide if wide else own.own)
        acts = (count - back + 3) * load.stream
        behind = own.table * own.wide if back else load.chunks[load.groups[0]].full
        moving = own.late + (0 if own.tied else load.under_way(behind) * own.split)
        yield Peak("at the end of backward", grads + table, acts, 0, 0, moving)


def _later(load: Load, now: Now) -> Iterator[Peak]:
    """While gradients of weights are made that were put off: all they need stays until the end."""
    own, one, turn = load.own, now.chunk, now.turn
    grads = now.gradients + load.grown(turn, one.elements)
    acts, late = now.others + one.waits, load.late(turn)
    begun = one.places[0].full + load.behind(turn) + late if own.split and one.places else 0
    yield Peak("in gradients put off", now.gradients, acts, 0, 0, begun)
    ended = one.moving + late if own.split else 0
    yield Peak("in gradients put off", grads, acts, 0, 0, ended)


def _at_the_end(load: Load) -> Iterator[Peak]:
    """In the update."""
    own, every = load.own, sum(load.chunks[group].elements for group in load.groups)
    trained = every + own.outside
    wide = own.data > 1 or own.split or load.several
    ends = trained * own.wide // own.data if wide else trained * own.own
    # all are reduced before the first is waited for
    yield Peak(UPDATE, ends, 0, 0, 0, trained * own.wide if own.data > 1 else 0)
    if own.twice:  # in its place a copy, and what comes of its sum with the other stage's
        left = load.made(every, ALL) + own.outside * own.wide - (0 if own.late else own.twice)
        yield Peak(UPDATE, left, 0, 0, 0, max(2 * own.twice, load.under_way(own.late)))
