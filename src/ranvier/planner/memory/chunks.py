"""Chunks: what the blocks of a stage keep of a micro-batch, and need while they run backward.

Blocks are kept together by kind. Of each kind the first and the last are looked at: what is kept is
most while the last runs backward, what gradients have been made while the first does. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from ranvier.config.plan import Plan, Recompute
from ranvier.cost.layers import Flow
from ranvier.cost.linear import Scores
from ranvier.pipeline.balance import ranges
from ranvier.planner.comm_volume import KEPT, Spot, Stage, layers_of
from ranvier.planner.memory.activations import WIDE, Kept, kept, later, stream_bytes
from ranvier.planner.memory.model_states import Share, Weights
from ranvier.planner.model_spec import Model, Part
from ranvier.planner.time.compute import Scales


class How(NamedTuple):
    """What else decides what is there: see `space`."""

    keeps: bool
    compiled: bool
    fp8: Scales
    simulated: bool


@dataclass(frozen=True, eq=False)
class Place:
    """A block of a chunk, while it runs backward: those behind it have done so."""

    where: str
    first: bool
    needs: tuple[tuple[int, int], ...]
    """Most it needs besides, and elements of gradients of weights by then: `kept.Kept.moments`."""
    later: tuple[int, int]
    """Another moment, if gradients of weights are made later."""
    entry: int
    """Needed at its end, if gradients of weights are made later."""
    again: int
    """How much more is there once it has run again."""
    rest: int
    """Kept by it and the blocks before it, and angles."""
    waits: int
    """What those behind it keep, if gradients of weights are made later."""
    gathered: int
    """Bytes of its weights."""
    following: int
    """Bytes of the weights that come next: of the block before it, or of any."""
    full: int
    """Bytes of its gathered gradients."""
    behind: int | None
    """Bytes of those of the block behind it; None: it is the last."""
    done: int
    """Elements of the gradients that are made, and not being reduced."""


@dataclass(frozen=True)
class Chunk:
    """What a chunk of a stage keeps of a micro-batch."""

    whole: int
    """By all its blocks, and angles."""
    count: int
    """Blocks."""
    elements: int
    """Of the gradients of all of them."""
    places: tuple[Place, ...]
    """The first and the last block of each kind."""
    full: int
    """Bytes of the gathered gradients of the first block."""
    moving: int
    """Most of a block's gathered gradients and those of the one behind it, being reduced."""
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


def chunks_of(
    model: Model,
    stage: Stage,
    firsts: tuple[int, ...],
    inside: Spot,
    flow: Flow,
    plan: Plan,
    own: Weights,
    how: How,
) -> tuple[tuple[int, ...], tuple[Chunk, ...]]:
    """The group of each chunk of a stage, and one chunk of each group.

    Chunks of the same parts are alike, but for the last where each stage computes losses there.
    """
    count, order = stage.seat.count, model.order
    mine = ranges(firsts, len(order))[stage.seat.index :: count] if count > 1 else [slice(None)]
    spread = plan.spread and count > 1
    head = 0 if spread else own.head * own.wide
    sizes = Sizes(own.each, own.gathered, own.split, plan.depth)
    places, groups, chunks = dict[tuple[object, ...], int](), list[int](), list[Chunk]()
    for i, one in enumerate(mine):
        parts, first = order[one], not one.start
        comes = not first or spread
        key = (first, parts, spread and i == len(mine) - 1)
        if key not in places:
            places[key] = len(chunks)
            kind = plan.recompute
            chunks.append(_chunk(model, parts, first, comes, inside, flow, kind, how, sizes, head))
        groups.append(places[key])
    return tuple(groups), tuple(chunks)


class Sizes(NamedTuple):
    """What chunks depend on of the weights of a stage."""

    each: tuple[tuple[str, Share], ...]
    gathered: int
    split: bool
    depth: int


@lru_cache(KEPT)
def _chunk(
    model: Model,
    parts: tuple[Part, ...],
    first: bool,
    comes: bool,
    inside: Spot,
    flow: Flow,
    kind: Recompute,
    how: How,
    own: Sizes,
    head: int,
) -> Chunk:
    """What some parts keep of a micro-batch.

    comes: its input comes from another chunk. head: bytes of the head's gradient.
    """
    stream, wide = stream_bytes(model, inside, flow), max(flow.itemsize, WIDE) // flow.itemsize
    blocks = [part for part in parts if part.is_block]
    sizes = dict(own.each)
    found = {part: kept(model, part, inside, flow, how.compiled, how.fp8) for part in {*blocks}}
    angles = flow.seq * 2 * model.head_dim * flow.itemsize if blocks else 0
    leaves = scores_of(model, parts, inside) is not None
    shared = (blocks and (kind != "none" or how.compiled)) or (wide == 1 and (blocks or leaves))
    waits = {part: later(model, part, inside, flow) for part in found}
    full = [sizes[part.name].full for part in blocks]
    pairs = zip(full, [*full, 0][1:], strict=True)
    return Chunk(
        angles + sum(found[part].of(kind, keeps=how.keeps) for part in blocks),
        len(blocks),
        sum(sizes[part.name].elements for part in blocks),
        tuple(_places(blocks, found, waits, own, angles, kind, how)),
        full[0] if full else 0,
        max((one + behind + behind // own.depth for one, behind in pairs), default=0),
        first,
        leaves,
        x=0 if shared or not comes else stream,
        scored=stream * (1 + 2 * wide) + head if leaves else 0,
        waits=sum(waits[part] for part in blocks),
    )


def _places(
    blocks: Sequence[Part],
    found: Mapping[Part, Kept],
    waits: Mapping[Part, int],
    own: Sizes,
    angles: int,
    kind: Recompute,
    how: How,
) -> Iterator[Place]:
    """The first and the last block of each kind, while they run backward."""
    sizes, final = dict(own.each), len(blocks) - 1
    firsts = {part: at for at, part in reversed([*enumerate(blocks)])}
    lasts = {part: at for at, part in enumerate(blocks)}
    for at in sorted({*firsts.values(), *lasts.values()}, reverse=True):
        part, share = blocks[at], sizes[blocks[at].name]
        name = "last" if at == final else "first" if at == 0 else "present"
        yield Place(
            f"in the {name} block, backward",
            at == 0,
            found[part].needs(kind, keeps=how.keeps, last=at == final),
            found[part].put_off,
            found[part].entry,
            found[part].again(kind, keeps=how.keeps),
            angles + sum(found[one].of(kind, keeps=how.keeps) for one in blocks[: at + 1]),
            sum(waits[one] for one in blocks[at + 1 :]),
            share.gathered,
            sizes[blocks[at - 1].name].gathered if at else own.gathered,
            share.full,
            None if at == final else sizes[blocks[at + 1].name].full,
            sum(sizes[one.name].elements for one in blocks[at + 1 + own.split :]),
        )


@lru_cache(KEPT)
def scores_of(model: Model, parts: tuple[Part, ...], inside: Spot) -> Scores | None:
    """The head, if it is among these parts."""
    outside = [part for part in parts if not part.is_block]
    layers = (one for part in outside for one in layers_of(model, part, inside))
    return next((one for one in layers if isinstance(one, Scores)), None)
