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
from ranvier.cost.layers import AxisGroup
from ranvier.sharding import Sharding
from ranvier.trace import Event

VECTORS = "vectors"
"""Block of all parameters that are no matrices."""

ParamGroup = Literal["matrix", "embedding", "vector"]
"""Kinds of parameters that an optimizer may treat differently, told by their named dims."""


@dataclass(frozen=True, eq=False)
class ParamSpec:
    """A weight as it is sorted."""

    name: str
    block: str
    sharding: Sharding
    param_group: ParamGroup
    trainable: bool = True
    is_tied: bool = False
    """Whether several layers have it."""
    other_stages: tuple[int, ...] = ()
    """Those of other stages that hold it as well."""
    repeats: int = 1
    """Equal weights of as many blocks, one after the other."""

    @property
    def num_elements(self) -> int:
        """Elements of my shards, padding included."""
        return math.prod(self.sharding.local_shape) * self.repeats

    @property
    def is_depth_sharded(self) -> bool:
        """Whether the depth axis splits it."""
        return "depth" in self.sharding.split_axes


@dataclass(frozen=True)
class BucketRange:
    """A range of a lot, and how many ranks of each axis (other than data) hold the same of it."""

    start: int
    stop: int
    replicas: Mapping[str, int]


@dataclass(frozen=True, eq=False)
class BucketSpec:
    """Weights in the order in which they lie."""

    block: str
    params: tuple[ParamSpec, ...]
    ranges: tuple[BucketRange, ...]
    size: int
    """Elements on this rank, rounded up to a multiple of the data axis."""
    reduce_at_step_end: bool
    """Complete only at the end of a step: tied weights, vectors."""

    @cached_property
    def traffic(self) -> BucketTraffic:
        """What of it is communicated."""
        first = self.params[0]
        spans = [(tuple(one.replicas), one.stop - one.start) for one in self.ranges if one.replicas]
        tied = bool(first.other_stages)
        return BucketTraffic(
            self.block,
            self.size,
            self.size,
            first.is_depth_sharded,
            first.trainable,
            self.reduce_at_step_end,
            tuple(spans),
            tied,
        )


def build_bucket_specs(pieces: Iterable[ParamSpec], degrees: Mapping[str, int]) -> list[BucketSpec]:
    """The lots of weights: by block, split over depth, group, trained, tied."""
    groups: dict[tuple[object, ...], list[ParamSpec]] = {}
    for piece in pieces:
        tied = piece.is_tied or bool(piece.other_stages)
        key = (
            piece.block,
            piece.is_depth_sharded,
            piece.param_group,
            piece.trainable,
            tied,
            piece.other_stages,
        )
        groups.setdefault(key, []).append(piece)
    multiple = degrees["data"]
    found = []
    for members in groups.values():
        block = members[0].block
        members.sort(key=lambda piece: sorted(replicas_per_axis(piece.sharding, degrees).items()))
        ranges = _replica_ranges(members, degrees)
        size = -(-ranges[-1].stop // multiple) * multiple
        late = members[0].is_tied or bool(members[0].other_stages) or block == VECTORS
        found.append(BucketSpec(block, tuple(members), tuple(ranges), size, late))
    return found


def replicas_per_axis(sharding: Sharding, degrees: Mapping[str, int]) -> dict[str, int]:
    """Ranks of each axis but data and pipe that hold the same part."""
    same = sharding.replica_counts(degrees)
    return {axis: count for axis, count in same.items() if axis not in ("data", "pipe")}


def _replica_ranges(members: Sequence[ParamSpec], degrees: Mapping[str, int]) -> list[BucketRange]:
    """Lay weights one after the other; neighbours with the same copies form a range."""
    found = []
    start = 0
    for same, group in itertools.groupby(
        members, key=lambda p: replicas_per_axis(p.sharding, degrees)
    ):
        stop = start + sum(piece.num_elements for piece in group)
        found.append(BucketRange(start, stop, same))
        start = stop
    return found


# ---- communication ----------------------------------------------------------------------


@dataclass(frozen=True)
class BucketTraffic:
    """What of a lot is communicated."""

    block: str
    size: int
    """Elements on a rank that are gathered over depth."""
    reduced_elements: int
    """Elements that are reduced and updated: of a pruned lot fewer."""
    is_depth_sharded: bool
    trainable: bool
    reduce_at_step_end: bool
    replica_sums: tuple[tuple[tuple[str, ...], int], ...] = ()
    """Axes over which elements are summed besides depth and data, and how many of them."""
    tied_across_stages: bool = False
    """Whether other stages hold it as well."""


@dataclass(frozen=True)
class ElementSizes:
    """Bytes of numbers."""

    param_bytes: int
    """Of a weight."""
    grad_bytes: int
    """Of a gradient that is reduced."""


def blocks_to_gather(
    forward: Sequence[str], backward: Sequence[str], *, alone: bool, keep: bool
) -> list[str]:
    """Blocks whose weights are gathered over depth in a micro-batch, in order.

    One gather serves uses of the same block that follow each other, or all uses if gathered weights
    are kept. Forward and backward of a stage that is not alone are jobs of their own.
    """
    uses = [*forward, *([] if alone else [""]), *backward]
    if keep:
        uses = list(dict.fromkeys(forward))
    return [block for i, block in enumerate(uses) if block and (i == 0 or block != uses[i - 1])]


def weight_gather_event(bulk: BucketTraffic, depth: AxisGroup, types: ElementSizes) -> Event:
    """Weights gathered over depth."""
    return Event("all_gather", depth.names, bulk.size * types.param_bytes * depth.size, bulk.block)


def grad_scatter_event(bulk: BucketTraffic, depth: AxisGroup, types: ElementSizes) -> Event:
    """Gradients reduced over depth."""
    return Event(
        "reduce_scatter",
        depth.names,
        bulk.reduced_elements * types.grad_bytes * depth.size,
        bulk.block,
    )


def optimizer_step_events(
    bulk: BucketTraffic, depth: AxisGroup, data: AxisGroup, types: ElementSizes
) -> list[Event]:
    """What the optimizer step communicates of a lot: gradients, then updated weights."""
    if not bulk.trainable:
        return []
    events = list[Event]()
    grad = bulk.reduced_elements * types.grad_bytes
    if bulk.reduce_at_step_end and bulk.is_depth_sharded:
        events.append(grad_scatter_event(bulk, depth, types))
    for names, elements in bulk.replica_sums:
        events.append(Event("all_reduce", names, elements * types.grad_bytes, bulk.block))
    if bulk.tied_across_stages:
        events.append(Event("all_reduce", ("pipe",), grad, bulk.block))
    if data.size > 1:
        events.append(Event("reduce_scatter", data.names, grad, bulk.block))
        events.append(
            Event("all_gather", data.names, bulk.reduced_elements * types.param_bytes, bulk.block)
        )
    return events


def grad_norm_events(
    degrees: Mapping[str, int], types: ElementSizes, *, votes: int = 0
) -> list[Event]:
    """The square of the gradient's norm, and one number a vote, summed over all ranks."""
    world = tuple(axis for axis in AXES if degrees[axis] > 1)
    if world:
        return [Event("all_reduce", world, (1 + votes) * types.grad_bytes, "norm")]
    return []
