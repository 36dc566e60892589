"""Bucket specs: weights that are gathered, reduced and updated together, and their traffic.

The matrices of a block form a bucket, and so do all vectors of a model; embedding and head have
separate buckets. `Bucket` has the tensors of a spec; the planner uses specs without tensors. This
module does not import torch.
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
"""Block of all parameters that are not matrices."""

ParamGroup = Literal["matrix", "embedding", "vector"]
"""Groups of parameters with separate optimizer settings, determined by their named dims."""


@dataclass(frozen=True, eq=False)
class ParamSpec:
    """The properties of a weight that determine its bucket."""

    name: str
    block: str
    sharding: Sharding
    param_group: ParamGroup
    trainable: bool = True
    is_tied: bool = False
    """Whether several layers share it."""
    other_stages: tuple[int, ...] = ()
    """Other stages that also have it."""
    repeats: int = 1
    """Number of blocks whose identical weights it represents."""

    @property
    def num_elements(self) -> int:
        """Number of elements on this rank, including padding."""
        return math.prod(self.sharding.local_shape) * self.repeats

    @property
    def is_depth_sharded(self) -> bool:
        """Whether the depth axis splits it."""
        return "depth" in self.sharding.split_axes


@dataclass(frozen=True)
class BucketRange:
    """A range of a bucket, and the number of ranks per axis (except data) with the same shards."""

    start: int
    stop: int
    replicas: Mapping[str, int]


@dataclass(frozen=True, eq=False)
class BucketSpec:
    """A bucket: its weights in the order of the flat buffer."""

    block: str
    params: tuple[ParamSpec, ...]
    ranges: tuple[BucketRange, ...]
    size: int
    """Number of elements on this rank, rounded up to a multiple of the data axis."""
    reduce_at_step_end: bool
    """Whether gradients are complete only at the end of a step (tied weights, vectors)."""

    @cached_property
    def traffic(self) -> BucketTraffic:
        """The communication volumes of the bucket."""
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
    """Groups weights into buckets by block, depth sharding, parameter group, trainable and tied."""
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
        # Weights with the same replicas become adjacent, so that one range covers them. The sort is
        # stable, so all ranks have the same layout.
        members.sort(key=lambda piece: sorted(replicas_per_axis(piece.sharding, degrees).items()))
        ranges = _replica_ranges(members, degrees)
        # The flat buffer is split into equal ranges over data.
        size = -(-ranges[-1].stop // multiple) * multiple
        late = members[0].is_tied or bool(members[0].other_stages) or block == VECTORS
        found.append(BucketSpec(block, tuple(members), tuple(ranges), size, late))
    return found


def replicas_per_axis(sharding: Sharding, degrees: Mapping[str, int]) -> dict[str, int]:
    """Returns the number of ranks with the same shard per axis, except data and pipe."""
    same = sharding.replica_counts(degrees)
    return {axis: count for axis, count in same.items() if axis not in ("data", "pipe")}


def _replica_ranges(members: Sequence[ParamSpec], degrees: Mapping[str, int]) -> list[BucketRange]:
    """Returns the ranges of consecutive weights with the same replicas."""
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
    """The communication volumes of a bucket."""

    block: str
    size: int
    """Number of elements per rank that are gathered over depth."""
    reduced_elements: int
    """Number of elements that are reduced and updated; fewer if the bucket is pruned."""
    is_depth_sharded: bool
    trainable: bool
    reduce_at_step_end: bool
    replica_sums: tuple[tuple[tuple[str, ...], int], ...] = ()
    """Axes other than depth and data over which elements are summed, and the number of elements."""
    tied_across_stages: bool = False
    """Whether other stages also have it."""


@dataclass(frozen=True)
class ElementSizes:
    """Bytes per element."""

    param_bytes: int
    """Bytes per element of a weight."""
    grad_bytes: int
    """Bytes per element of a gradient when it is reduced."""


def blocks_to_gather(
    forward: Sequence[str], backward: Sequence[str], *, alone: bool, keep: bool
) -> list[str]:
    """Returns the blocks whose weights are gathered over depth in a micro-batch, in order.

    Consecutive uses of a block need one gather, and all uses do if gathered weights are kept.
    alone: whether the pipeline has one stage; otherwise forward and backward are separate jobs.
    """
    # With one stage, backward follows forward and reuses the last block; between separate jobs the
    # weights are dropped.
    uses = [*forward, *([] if alone else [""]), *backward]
    if keep:
        uses = list(dict.fromkeys(forward))
    return [block for i, block in enumerate(uses) if block and (i == 0 or block != uses[i - 1])]


def weight_gather_event(bulk: BucketTraffic, depth: AxisGroup, types: ElementSizes) -> Event:
    """Returns the all-gather of weights over depth."""
    # The bytes of a gather are the bytes of its output, so they include the factor `depth.size`.
    return Event("all_gather", depth.names, bulk.size * types.param_bytes * depth.size, bulk.block)


def grad_scatter_event(bulk: BucketTraffic, depth: AxisGroup, types: ElementSizes) -> Event:
    """Returns the reduce-scatter of gradients over depth."""
    return Event(
        "reduce_scatter",
        depth.names,
        bulk.reduced_elements * types.grad_bytes * depth.size,
        bulk.block,
    )


def optimizer_step_events(
    bulk: BucketTraffic, depth: AxisGroup, data: AxisGroup, types: ElementSizes
) -> list[Event]:
    """Returns the communication of a bucket in the optimizer step: gradients, then weights."""
    if not bulk.trainable:
        return []
    events = list[Event]()
    grad = bulk.reduced_elements * types.grad_bytes
    # Other buckets are reduce-scattered over depth during backward.
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
    """Returns the all-reduce of the squared gradient norm and the votes, over all ranks."""
    world = tuple(axis for axis in AXES if degrees[axis] > 1)
    if world:
        return [Event("all_reduce", world, (1 + votes) * types.grad_bytes, "norm")]
    return []
