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
from ranvier.sharding import TOKEN_AXES, Sharding, round_up
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
    matrix_dims: tuple[int, int] | None = None
    """Dims of its hidden matrices (`sharding.matrix_dims`), which some update rules need whole."""
    repeats: int = 1
    """Number of blocks whose identical weights it represents."""

    @property
    def num_elements(self) -> int:
        """Number of elements on this rank, including padding."""
        return math.prod(self.sharding.local_shape) * self.repeats

    @property
    def is_gathered(self) -> bool:
        """Whether it is split between its uses and gathered before them."""
        return self.sharding.is_gathered


@dataclass(frozen=True)
class BucketRange:
    """A range of a bucket whose shards are the same on a few ranks of row and col."""

    start: int
    stop: int
    shared: Mapping[str, int]
    """Number of consecutive ranks of these axes with the same shards (shared kv heads, norms)."""


@dataclass(frozen=True, eq=False)
class BucketSpec:
    """A bucket: its weights in the order of the flat buffer."""

    block: str
    params: tuple[ParamSpec, ...]
    ranges: tuple[BucketRange, ...]
    replica_axis: AxisGroup
    """The ranks with the same shards, which split its gradients and optimizer states."""
    size: int
    """Number of elements on this rank, rounded up to a multiple of the replica axis."""
    reduce_at_step_end: bool
    """Whether gradients are complete only at the end of a step (tied weights, vectors)."""

    @property
    def has_matrices(self) -> bool:
        """Whether it has trainable hidden matrices."""
        return self.params[0].trainable and self.params[0].matrix_dims is not None

    @cached_property
    def traffic(self) -> BucketTraffic:
        """The communication volumes of the bucket."""
        first = self.params[0]
        spans = [(tuple(one.shared), one.stop - one.start) for one in self.ranges if one.shared]
        tied = bool(first.other_stages)
        return BucketTraffic(
            self.block,
            self.size,
            self.size,
            first.is_gathered,
            first.trainable,
            self.reduce_at_step_end,
            self.replica_axis,
            tuple(spans),
            tied,
        )


def build_bucket_specs(pieces: Iterable[ParamSpec], degrees: Mapping[str, int]) -> list[BucketSpec]:
    """Groups weights into buckets by block, gathered, parameter group, trainable and tied.

    Hidden matrices have buckets without other weights, as an optimizer may update them by another
    rule.

    All weights of a bucket have the same replica axis, over which one collective reduces them.
    """
    groups: dict[tuple[object, ...], list[ParamSpec]] = {}
    for piece in pieces:
        tied = piece.is_tied or bool(piece.other_stages)
        key = (
            piece.block,
            piece.is_gathered,
            piece.param_group,
            piece.matrix_dims is None,
            piece.trainable,
            tied,
            piece.other_stages,
            replica_axis(piece.sharding, degrees),
        )
        groups.setdefault(key, []).append(piece)
    found = []
    for members in groups.values():
        block = members[0].block
        # Weights that equally many ranks share become adjacent, so that one range covers them. The
        # sort is stable, so all ranks have the same layout.
        members.sort(key=lambda piece: sorted(shared_ranks(piece.sharding, degrees).items()))
        ranges = _shared_ranges(members, degrees)
        # The replica axis splits the flat buffer into equal ranges.
        replicas = replica_axis(members[0].sharding, degrees)
        size = round_up(ranges[-1].stop, replicas.size)
        late = members[0].is_tied or bool(members[0].other_stages) or block == VECTORS
        found.append(BucketSpec(block, tuple(members), tuple(ranges), replicas, size, late))
    return found


def replica_axis(sharding: Sharding, degrees: Mapping[str, int]) -> AxisGroup:
    """Returns the fused axis of the ranks with the same shard: the token axes that do not split it.

    Stages of a pipeline have different weights, except tied ones, which have a sum of their own.
    """
    same = sharding.replica_counts(degrees)
    axes = {axis: n for axis, n in same.items() if axis in TOKEN_AXES}
    return AxisGroup(tuple(axes), math.prod(axes.values()))


def shared_ranks(sharding: Sharding, degrees: Mapping[str, int]) -> dict[str, int]:
    """Returns how many consecutive ranks of row and col have the same shard.

    They share kv heads, or weights that the axis does not split, such as norms. These are few, and
    inside a node, so their gradients are summed first instead of one more fused axis.
    """
    same = sharding.replica_counts(degrees)
    return {axis: n for axis, n in same.items() if axis not in ("pipe", *TOKEN_AXES)}


def _shared_ranges(members: Sequence[ParamSpec], degrees: Mapping[str, int]) -> list[BucketRange]:
    """Returns the ranges of consecutive weights that equally many ranks share."""
    found = []
    start = 0
    for same, group in itertools.groupby(members, key=lambda p: shared_ranks(p.sharding, degrees)):
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
    is_gathered: bool
    trainable: bool
    reduce_at_step_end: bool
    replica_axis: AxisGroup
    """The ranks with the same shards, which split its gradients and optimizer states."""
    shared_sums: tuple[tuple[tuple[str, ...], int], ...] = ()
    """Axes over which elements that a few ranks share are summed first, and their number."""
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
    bulk: BucketTraffic, depth: AxisGroup, types: ElementSizes
) -> list[Event]:
    """Returns the communication of a bucket in the optimizer step: gradients, then weights."""
    if not bulk.trainable:
        return []
    events = list[Event]()
    grad = bulk.reduced_elements * types.grad_bytes
    # Other buckets are reduce-scattered over depth during backward.
    if bulk.reduce_at_step_end and bulk.is_gathered:
        events.append(grad_scatter_event(bulk, depth, types))
    for names, elements in bulk.shared_sums:
        events.append(Event("all_reduce", names, elements * types.grad_bytes, bulk.block))
    if bulk.tied_across_stages:
        events.append(Event("all_reduce", ("pipe",), grad, bulk.block))
    if bulk.replica_axis.size > 1:
        names = bulk.replica_axis.names
        weights = bulk.reduced_elements * types.param_bytes
        events.append(Event("reduce_scatter", names, grad, bulk.block))
        events.append(Event("all_gather", names, weights, bulk.block))
    return events


def grad_norm_events(
    degrees: Mapping[str, int], types: ElementSizes, *, votes: int = 0
) -> list[Event]:
    """Returns the all-reduce of the squared gradient norm and the votes, over all ranks."""
    world = tuple(axis for axis in AXES if degrees[axis] > 1)
    if world:
        return [Event("all_reduce", world, (1 + votes) * types.grad_bytes, "norm")]
    return []
