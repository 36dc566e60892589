"""Weights of a rank, their states and gradients: bytes and elements, in closed form; no torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from ranvier.buckets.spec import Bulk
from ranvier.config.plan import AXES
from ranvier.planner.comm_volume import KEPT, Spot, Stage, lots_of
from ranvier.planner.model_spec import ENTRY, EXIT, Model

Moments = Literal["master", "bf16", "int8"]
BLOCK = 256
"""Numbers of a moment in 8 bits that share a scale."""


@dataclass(frozen=True)
class Share:
    """The matrices of a block on a rank."""

    elements: int = 0
    """Of their gradients."""
    gathered: int = 0
    """Bytes of the weights gathered over depth; 0: they lie whole."""
    full: int = 0
    """Bytes of their gradients, gathered, in 32 bits; likewise."""

    def plus(self, bulk: Bulk, own: int, wide: int, depth: int) -> Share:
        """With some more of them."""
        split, count = bulk.split * depth, bulk.count * bulk.trainable
        return Share(
            self.elements + count,
            self.gathered + split * bulk.size * own,
            self.full + split * count * wide,
        )


@dataclass(frozen=True)
class Weights:
    """Weights of a rank, and what belongs to them."""

    bytes: int
    master: int
    moments: int
    each: tuple[tuple[str, Share], ...]
    """What is there of each kind of block."""
    outside: int
    """Trained elements outside of blocks."""
    head: int
    """Elements of the head's gathered gradient; 0: it is elsewhere, or frozen."""
    table: int
    """Elements of the embedding's gathered gradient; likewise."""
    places: int
    """Elements of the gathered gradient of learned positions; likewise."""
    gathered: int
    """Bytes of the largest block's weights gathered over depth; 0: they lie whole."""
    whole: int
    """Bytes of all weights gathered over depth."""
    wide: int
    """Bytes of a wide number."""
    own: int
    """Bytes of a number."""
    data: int
    """Ranks among which states are divided."""
    head_part: int
    """Elements of the head's gradient on this rank, and of the embedding's; late ones left out."""
    table_part: int
    tied: bool
    padded: bool
    """Whether gradients of both are copied to be padded before depth divides them."""
    late: int = 0
    """Bytes of the gradients of tied weights, gathered: they are reduced at the end of a step."""
    twice: int = 0
    """Bytes of the wide gradients of weights that another stage has as well."""

    @cached_property
    def split(self) -> bool:
        """Whether depth splits weights, of blocks or, on a stage without any, of others."""
        return self.whole > 0


@lru_cache(KEPT)
def weights_of(model: Model, stage: Stage, spot: Spot, own: int, moments: Moments) -> Weights:
    """The weights of a stage."""
    degrees = dict(zip(AXES, spot.degrees, strict=True))
    data, depth, wide = degrees["data"], degrees["depth"], max(own, 4)
    words = degrees["row"] * (degrees["pipe"] if spot.spread else 1)
    parts, kinds = Counter[str](), dict[str, Share]()
    blocks = {part.name for part, _ in stage.here if part.is_block}
    total = master = both = outside = whole = late = twice = 0
    for part, lot, count in lots_of(model, stage, spot):
        bulk = lot.bulk
        total += count * bulk.size * own
        inside = part in blocks
        whole += count * bulk.size * own * depth if bulk.split else 0
        if inside:
            kinds[part] = kinds.get(part, Share()).plus(bulk, own, wide, depth)
        if not bulk.trainable:
            continue
        held, vector = bulk.count // data, lot.pieces[0].group == "vector"
        master += count * held * (wide if own < 4 else 0)
        both += count * _moment_bytes(held, moments, wide, vector=vector)
        waits = bulk.late and bulk.split
        late += bulk.count * wide * depth if waits else 0
        twice += bulk.count * wide if bulk.tied else 0
        outside += 0 if inside or waits else bulk.count
        if lot.pieces[0].group != "vector" and not inside and not waits:
            parts[part] += bulk.count
    head, table = (_outside(model, stage, spot, kind) for kind in ("head", "embedding"))
    places = _outside(model, stage, spot, "embedding", words=False)
    return Weights(
        total,
        master,
        both,
        tuple(kinds.items()),
        outside,
        head,
        table,
        places,
        max((one.gathered for one in kinds.values()), default=0),
        whole,
        wide,
        own,
        data,
        parts[EXIT],
        parts[ENTRY],
        model.tied,
        -(-model.units["vocab"] // words) % depth > 0,
        late,
        twice,
    )


def _moment_bytes(count: int, moments: Moments, wide: int, *, vector: bool) -> int:
    """Bytes of both moments of so many numbers."""
    if vector or moments == "master":
        return 2 * count * wide
    return 2 * count * 2 if moments == "bf16" else 2 * count + 8 * -(-count // BLOCK)


def _outside(model: Model, stage: Stage, spot: Spot, kind: str, *, words: bool = True) -> int:
    """Elements of the gathered matrix of a trained layer outside of blocks; words: it has some."""
    ground, found = spot.ground(model), 0
    for part, _ in stage.here:
        for leaf in part.leaves if not part.is_block else ():
            if leaf.kind == kind and leaf.trainable and (leaf.dims[0] == "vocab") == words:
                piece = next(iter(leaf.pieces("", "", ground)))
                rows, width = piece.sharding.gathered
                found += rows * width
    return found
