"""Chunks: what the blocks of a stage keep of a micro-batch, and need while they run backward.

Blocks are kept together by kind. Of each kind the first and the last are looked at: what is kept is
most while the last runs backward, what gradients have been made while the first does. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ranvier.layers import Flow
from ranvier.plan import Plan
from ranvier.planner.kept import Kept, kept, later, stream_bytes
from ranvier.planner.leaves import Model, Part
from ranvier.planner.moves import Spot, layers_of
from ranvier.planner.weights import Weights
from ranvier.products import Scores


class How(NamedTuple):
    """What else decides what is there: see `space`."""

    keeps: bool
    compiled: bool
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


def chunk_of(
    model: Model,
    plan: Plan,
    flow: Flow,
    parts: Sequence[Part],
    own: Weights,
    how: How,
    *,
    first: bool,
) -> Chunk:
    """What some parts keep of a micro-batch."""
    inside, kind = Spot.of(plan).inside, plan.recompute
    stream, wide = stream_bytes(model, inside, flow), own.wide // flow.itemsize
    blocks = [part for part in parts if part.is_block]
    counts, sizes = Counter(blocks), dict(own.each)
    found = {part: kept(model, part, inside, flow, how.compiled) for part in counts}
    angles = flow.seq * 2 * model.head_dim * flow.itemsize if blocks else 0
    leaves = any(scores_of(model, part, inside) for part in parts if not part.is_block)
    spread = plan.spread and plan.pipe > 1
    comes, made = not first or spread, 0 if spread else own.head * own.wide
    shared = (blocks and (kind != "none" or how.compiled)) or (wide == 1 and (blocks or leaves))
    waits = {part: later(model, part, inside, flow) for part in counts}
    full = [sizes[part.name].full for part in blocks]
    pairs = zip(full, [*full, 0][1:], strict=True)
    return Chunk(
        angles + sum(n * found[part].of(kind, keeps=how.keeps) for part, n in counts.items()),
        len(blocks),
        sum(n * sizes[part.name].elements for part, n in counts.items()),
        tuple(_places(blocks, found, waits, own, angles, plan, how)),
        full[0] if full else 0,
        max((one + behind + behind // plan.depth for one, behind in pairs), default=0),
        first,
        leaves,
        x=0 if shared or not comes else stream,
        scored=stream * (1 + 2 * wide) + made if leaves else 0,
        waits=sum(n * waits[part] for part, n in counts.items()),
    )


def _places(
    blocks: Sequence[Part],
    found: Mapping[Part, Kept],
    waits: Mapping[Part, int],
    own: Weights,
    angles: int,
    plan: Plan,
    how: How,
) -> Iterator[Place]:
    """The first and the last block of each kind, while they run backward."""
    kind, sizes, final = plan.recompute, dict(own.each), len(blocks) - 1
    firsts = {part: at for at, part in reversed([*enumerate(blocks)])}
    lasts = {part: at for at, part in enumerate(blocks)}
    for at in sorted({*firsts.values(), *lasts.values()}, reverse=True):
        part, before, behind = blocks[at], Counter(blocks[: at + 1]), Counter(blocks[at + 1 :])
        share, done = sizes[part.name], Counter(blocks[at + 1 + own.split :])
        name = "last" if at == final else "first" if at == 0 else "present"
        yield Place(
            f"in the {name} block, backward",
            at == 0,
            found[part].needs(kind, keeps=how.keeps, last=at == final),
            found[part].put_off,
            found[part].entry,
            found[part].again(kind, keeps=how.keeps),
            angles + sum(n * found[one].of(kind, keeps=how.keeps) for one, n in before.items()),
            sum(n * waits[one] for one, n in behind.items()),
            share.gathered,
            sizes[blocks[at - 1].name].gathered if at else own.gathered,
            share.full,
            None if at == final else sizes[blocks[at + 1].name].full,
            sum(n * sizes[one.name].elements for one, n in done.items()),
        )


def scores_of(model: Model, part: Part, inside: Spot) -> list[Scores]:
    """The heads of a part."""
    return [one for one in layers_of(model, part, inside) if isinstance(one, Scores)]
