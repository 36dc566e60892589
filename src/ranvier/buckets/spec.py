"""Lots: weights that are gathered, reduced and updated together, and what that communicates.

The matrices of a block form a lot, all vectors of a model one; embedding and head have theirs. The
buckets of `comm` hold the tensors of lots; the planner knows lots without tensors. No torch here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ranvier.config.plan import AXES
from ranvier.cost.layers import Line
from ranvier.sharding import Sharding
from ranvier.trace import Event

VECTORS = "vectors"
"""Block of all parameters that are no matrices."""

Group = Literal["matrix", "embedding", "vector"]
"""Kinds of parameters that an optimizer may treat differently, told by their named dims."""


@dataclass(frozen=True, eq=False)
class Piece:
    """A weight as it is sorted."""

    name: str
    block: str
    sharding: Sharding
    group: Group
    trainable: bool = True
    tied: bool = False
    """Whether several layers have it."""
    whom: tuple[int, ...] = ()
    """Those of other stages that hold it as well."""
    times: int = 1
    """Equal weights of as many blocks, one after the other."""

    @property
    def elements(self) -> int:
        """Elements of my shards, padding included."""
        return math.prod(self.sharding.local) * self.times

    @property
    def split(self) -> bool:
        """Whether the depth axis splits it."""
        return "depth" in self.sharding.axes


@dataclass(frozen=True)
class Range:
    """A range of a lot, and how many ranks of each axis (other than data) hold the same of it."""

    start: int
    stop: int
    same: Mapping[str, int]


@dataclass(frozen=True, eq=False)
class Lot:
    """Weights in the order in which they lie."""

    block: str
    pieces: tuple[Piece, ...]
    ranges: tuple[Range, ...]
    size: int
    """Elements on this rank, rounded up to a multiple of the data axis."""
    late: bool
    """Complete only at the end of a step: tied weights, vectors."""

    @cached_property
    def bulk(self) -> Bulk:
        """What of it is communicated."""
        first = self.pieces[0]
        spans = [(tuple(one.same), one.stop - one.start) for one in self.ranges if one.same]
        tied = bool(first.whom)
        return Bulk(
            self.block,
            self.size,
            self.size,
            first.split,
            first.trainable,
            self.late,
            tuple(spans),
            tied,
        )


def sort(pieces: Iterable[Piece], degrees: Mapping[str, int]) -> list[Lot]:
    """The lots of weights: by block, split over depth, group, trained, tied."""
    groups: dict[tuple[object, ...], list[Piece]] = {}
    for piece in pieces:
        tied = piece.tied or bool(piece.whom)
        key = (piece.block, piece.split, piece.group, piece.trainable, tied, piece.whom)
        groups.setdefault(key, []).append(piece)
    multiple, found = degrees["data"], []
    for members in groups.values():
        block = members[0].block
        members.sort(key=lambda piece: sorted(copies(piece.sharding, degrees).items()))
        ranges = _ranges(members, degrees)
        size = -(-ranges[-1].stop // multiple) * multiple
        late = members[0].tied or bool(members[0].whom) or block == VECTORS
        found.append(Lot(block, tuple(members), tuple(ranges), size, late))
    return found


def copies(sharding: Sharding, degrees: Mapping[str, int]) -> dict[str, int]:
    """Ranks of each axis but data and pipe that hold the same part."""
    same = sharding.over(degrees)
    return {axis: count for axis, count in same.items() if axis not in ("data", "pipe")}


def _ranges(members: Sequence[Piece], degrees: Mapping[str, int]) -> list[Range]:
    """Lay weights one after the other; neighbours with the same copies form a range."""
    found, start = [], 0
    for same, group in itertools.groupby(members, key=lambda p: copies(p.sharding, degrees)):
        stop = start + sum(piece.elements for piece in group)
        found.append(Range(start, stop, same))
        start = stop
    return found


# ---- communication ----------------------------------------------------------------------


@dataclass(frozen=True)
class Bulk:
    """What of a lot is communicated."""

    block: str
    size: int
    """Elements on a rank that are gathered over depth."""
    count: int
    """Elements that are reduced and updated: of a pruned lot fewer."""
    split: bool
    trainable: bool
    late: bool
    copied: tuple[tuple[tuple[str, ...], int], ...] = ()
    """Axes over which elements are summed besides depth and data, and how many of them."""
    tied: bool = False
    """Whether other stages hold it as well."""


@dataclass(frozen=True)
class Types:
    """Bytes of numbers."""

    own: int
    """Of a weight."""
    wide: int
    """Of a gradient that is reduced."""


def used(forward: Sequence[str], backward: Sequence[str], *, alone: bool, keep: bool) -> list[str]:
    """Blocks whose weights are gathered over depth in a micro-batch, in order.

    One gather serves uses of the same block that follow each other, or all uses if gathered weights
    are kept. Forward and backward of a stage that is not alone are jobs of their own.
    """
    uses = [*forward, *([] if alone else [""]), *backward]
    if keep:
        uses = list(dict.fromkeys(forward))
    return [block for i, block in enumerate(uses) if block and (i == 0 or block != uses[i - 1])]


def gather(bulk: Bulk, depth: Line, types: Types) -> Event:
    """Weights gathered over depth."""
    return Event("all_gather", depth.names, bulk.size * types.own * depth.size, bulk.block)


def scatter(bulk: Bulk, depth: Line, types: Types) -> Event:
    """Gradients reduced over depth."""
    return Event("reduce_scatter", depth.names, bulk.count * types.wide * depth.size, bulk.block)


def update(bulk: Bulk, depth: Line, data: Line, types: Types) -> list[Event]:
    """What the optimizer step communicates of a lot: gradients, then updated weights."""
    if not bulk.trainable:
        return []
    events, grad = list[Event](), bulk.count * types.wide
    if bulk.late and bulk.split:
        events.append(scatter(bulk, depth, types))
    for names, elements in bulk.copied:
        events.append(Event("all_reduce", names, elements * types.wide, bulk.block))
    if bulk.tied:
        events.append(Event("all_reduce", ("pipe",), grad, bulk.block))
    if data.size > 1:
        events.append(Event("reduce_scatter", data.names, grad, bulk.block))
        events.append(Event("all_gather", data.names, bulk.count * types.own, bulk.block))
    return events


def norm(degrees: Mapping[str, int], types: Types, *, votes: int = 0) -> list[Event]:
    """The square of the gradient's norm, and one number a vote, summed over all ranks."""
    world = tuple(axis for axis in AXES if degrees[axis] > 1)
    return [Event("all_reduce", world, (1 + votes) * types.wide, "norm")] if world else []
