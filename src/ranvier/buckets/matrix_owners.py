"""Matrix owners: which rank updates which whole matrix, and which elements travel to and from it.

Some update rules need whole matrices (Muon orthogonalizes them, Jorge preconditions tiles of them),
but a rank stores a part of each: its shard, and of that its optimizer shard (ZeRO-1). A layer-wise
distributed optimizer assigns each matrix to one rank of its stage, the owner. All ranks send their
parts to the owners by one all-to-all, owners compute, and the results return by another one:

    optimizer shards  --all-to-all-->  whole matrices  --all-to-all-->  optimizer shards

The elements of a message follow from shapes, shardings and degrees alone, so that nothing
but elements is sent. Several matrices in one weight (experts, packed dims) have separate owners. A
part that several ranks hold (shared kv heads) is sent by the first of them and returned to all.
This module does not import torch; the planner uses it for bytes and FLOPs.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ranvier.buckets.spec import BucketSpec, ParamSpec, shared_ranks
from ranvier.config.plan import AXES
from ranvier.cost.layers import AxisGroup
from ranvier.cost.matrix_optimizers import MatrixRuleCost, tile_bounds
from ranvier.sharding import Box, Shard
from ranvier.trace import Event

OWNER_AXES = tuple(axis for axis in AXES if axis != "pipe")
"""Axes of the ranks of a stage, which own its matrices."""
MATRICES = "matrices"
"""Where the events of the exchange are recorded."""


@dataclass(frozen=True)
class PlacedWeight:
    """A weight of whole matrices, and its place in the flat buffer of its bucket."""

    spec: ParamSpec
    offset: int
    """First element in the bucket."""
    replica_axis: AxisGroup
    optimizer_shard_size: int
    """Elements of the bucket that one replica updates."""

    def state_shard(self, index: Mapping[str, int], degrees: Mapping[str, int]) -> Shard:
        """Returns the part of the weight in the optimizer shard of a rank."""
        replica = 0
        for axis in self.replica_axis.names:
            replica = replica * degrees[axis] + index[axis]
        start = replica * self.optimizer_shard_size - self.offset
        shard = self.spec.sharding.shard_at(index)
        return shard.narrow_flat(max(start, 0), max(start + self.optimizer_shard_size, 0))

    def is_sent_by(self, index: Mapping[str, int], degrees: Mapping[str, int]) -> bool:
        """Whether a rank is the first of those with the same part."""
        shared = shared_ranks(self.spec.sharding, degrees)
        return all(index[axis] % count == 0 for axis, count in shared.items())


@dataclass(frozen=True)
class Matrix:
    """A matrix, or a tile of one, that one rank updates whole: a box of a weight."""

    weight: int
    """Number of its weight."""
    start: tuple[int, ...]
    """First index in each dim of the weight."""
    size: tuple[int, ...]
    rows: int
    cols: int
    whole: int
    """Number of the matrix that contains it; the same for all tiles of a matrix."""
    whole_shape: tuple[int, int]
    """Rows and columns of that matrix."""

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return self.rows * self.cols

    @cached_property
    def box(self) -> Box:
        """Its box of the weight, with offsets in the contiguous matrix `[rows, cols]`."""
        strides = tuple(math.prod(self.size[i + 1 :]) for i in range(len(self.size)))
        return Box(self.start, self.size, 0, strides)


class Piece(NamedTuple):
    """Elements that travel between an optimizer shard and a matrix."""

    matrix: int
    """Number of the matrix."""
    weight: int
    """Number of its weight."""
    in_shard: Box
    """Where they are in the rank's state shard of the weight."""
    in_matrix: Box
    """Where they are in the matrix."""

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return self.in_shard.num_elements


@dataclass(frozen=True, eq=False)
class MatrixOwners:
    """The owners of all matrices of a stage."""

    weights: tuple[PlacedWeight, ...]
    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]
    """Owner of each matrix: an index on the fused axis `OWNER_AXES`."""
    degrees: Mapping[str, int]
    loads: tuple[float, ...]
    """FLOPs of each rank."""
    rule: MatrixRuleCost

    @classmethod
    def assign(
        cls,
        buckets: Iterable[BucketSpec],
        degrees: Mapping[str, int],
        rule: MatrixRuleCost,
    ) -> MatrixOwners:
        """Assigns the matrices of trainable buckets to the ranks of a stage.

        The largest matrix goes to the rank with the fewest FLOPs so far, then the next one. With
        states of owners each rank gets consecutive tiles, so that those of one weight are one range
        of its states. All ranks compute the same assignment, which depends on shapes and degrees
        alone.

        Args:
            buckets: Buckets of a stage, in the order of its blocks.
            degrees: Degrees of all axes.
            rule: Which tiles are updated, and their cost.
        """
        weights = tuple(
            weight for bucket in buckets if bucket.has_matrices for weight in _place_weights(bucket)
        )
        matrices = tuple(_split_into_matrices(weights, rule.tile_size))
        costs = [rule.flops(one.rows, one.cols) for one in matrices]
        num_ranks = math.prod(degrees[axis] for axis in OWNER_AXES)
        owners = assign_owners(costs, num_ranks, rule)
        loads = [0.0] * num_ranks
        for owner, cost in zip(owners, costs, strict=True):
            loads[owner] += cost
        return cls(weights, matrices, tuple(owners), degrees, tuple(loads), rule)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of a stage."""
        return len(self.loads)

    @property
    def num_idle(self) -> int:
        """Number of ranks that own no matrix."""
        return self.num_ranks - len(set(self.owners))

    @cached_property
    def indices(self) -> tuple[dict[str, int], ...]:
        """Coordinates of the ranks of a stage, in the order of the fused axis."""
        spans = (range(self.degrees[axis]) for axis in OWNER_AXES)
        return tuple(
            dict(zip(OWNER_AXES, one, strict=True)) | {"pipe": 0}
            for one in itertools.product(*spans)
        )

    def owned_by(self, rank: int) -> list[int]:
        """Returns the numbers of the matrices of a rank."""
        return [number for number, owner in enumerate(self.owners) if owner == rank]

    @cached_property
    def _matrices_of_weight(self) -> tuple[tuple[int, ...], ...]:
        numbers: list[list[int]] = [[] for _ in self.weights]
        for number, matrix in enumerate(self.matrices):
            numbers[matrix.weight].append(number)
        return tuple(map(tuple, numbers))

    def pieces_of_rank(self, rank: int) -> list[Piece]:
        """Returns the pieces between the optimizer shards of a rank and all matrices, in order."""
        found: list[Piece] = []
        for numbers in self._matrices_of_weight:
            for number in numbers:
                found += self._pieces(number, rank)
        return found

    def pieces_of_owner(self, owner: int) -> list[list[Piece]]:
        """Returns the pieces between each rank and the matrices of an owner, in order."""
        found: list[list[Piece]] = [[] for _ in self.indices]
        for number in self.owned_by(owner):
            for rank, pieces in enumerate(found):
                pieces += self._pieces(number, rank)
        return found

    def _pieces(self, number: int, rank: int) -> Iterator[Piece]:
        """Yields the pieces between the optimizer shards of a rank and a matrix."""
        matrix = self.matrices[number]
        kind = self._placements[matrix.weight]
        key = kind, rank, matrix.start, matrix.size
        if key not in self._common_boxes:
            self._common_boxes[key] = [*_intersect(self._state_boxes(kind, rank), matrix.box)]
        for here, there in self._common_boxes[key]:
            yield Piece(number, matrix.weight, here, there)

    @cached_property
    def _placements(self) -> tuple[int, ...]:
        """For each weight the first one with the same shards, such as that of another block."""
        first: dict[tuple[object, ...], int] = {}
        return tuple(
            first.setdefault(
                (one.spec.sharding, one.offset, one.replica_axis, one.optimizer_shard_size), number
            )
            for number, one in enumerate(self.weights)
        )

    @cached_property
    def _common_boxes(self) -> dict[tuple[object, ...], list[tuple[Box, Box]]]:
        """Boxes that shards and matrices have in common: equal blocks have the same ones."""
        return {}

    @cached_property
    def _boxes_of_shards(self) -> dict[tuple[int, int], list[Box]]:
        return {}

    def _state_boxes(self, weight: int, rank: int) -> list[Box]:
        """Returns the boxes of the optimizer shard of a weight."""
        key = weight, rank
        if key not in self._boxes_of_shards:
            shard = self.weights[weight].state_shard(self.indices[rank], self.degrees)
            self._boxes_of_shards[key] = shard.to_boxes()
        return self._boxes_of_shards[key]

    def is_sent_by(self, piece: Piece, rank: int) -> bool:
        """Whether a rank sends a piece to its owner; others with the same part do not."""
        return self.weights[piece.weight].is_sent_by(self.indices[rank], self.degrees)

    def sent_elements(self, rank: int) -> tuple[int, int]:
        """Returns the elements that a rank sends to owners, and those that it sends back."""
        others = [other for other in range(self.num_ranks) if other != rank]
        to_owners = sum(
            self._num_common(number, rank, only_first=True)
            for number, owner in enumerate(self.owners)
            if owner != rank
        )
        back = sum(
            self._num_common(number, other) for number in self.owned_by(rank) for other in others
        )
        return to_owners, back

    def received_elements(self, rank: int) -> tuple[int, int]:
        """Returns the elements that a rank receives as an owner, and those that return to it."""
        others = [other for other in range(self.num_ranks) if other != rank]
        as_owner = sum(
            self._num_common(number, other, only_first=True)
            for number in self.owned_by(rank)
            for other in others
        )
        back = sum(
            self._num_common(number, rank)
            for number, owner in enumerate(self.owners)
            if owner != rank
        )
        return as_owner, back

    def _num_common(self, number: int, rank: int, *, only_first: bool = False) -> int:
        """Returns how many elements of a matrix are in the optimizer shards of a rank.

        Args:
            number: Number of the matrix.
            rank: The rank.
            only_first: Count a part that several ranks have for the first of them only.
        """
        matrix = self.matrices[number]
        kind = self._placements[matrix.weight]
        key = kind, rank, matrix.start, only_first
        if key not in self._counts:
            weight = self.weights[kind]
            if only_first and not weight.is_sent_by(self.indices[rank], self.degrees):
                self._counts[key] = 0
            else:
                self._counts[key] = sum(one.num_elements for one in self._pieces(number, rank))
        return self._counts[key]

    @cached_property
    def _counts(self) -> dict[tuple[object, ...], int]:
        return {}

    def events(self, rank: int) -> list[Event]:
        """Predicts the communication of the update of all matrices, on a rank of the stage."""
        if self.num_ranks == 1:
            return []
        return exchange_events(self.degrees, self.rule, self.sent_elements(rank), self.num_whole)

    @property
    def num_whole(self) -> int:
        """Number of matrices, each of which may have several tiles."""
        return 1 + max((matrix.whole for matrix in self.matrices), default=-1)


def _intersect(boxes: Iterable[Box], matrix: Box) -> Iterator[tuple[Box, Box]]:
    """Yields what boxes of a shard and a matrix have in common, as a box of each."""
    for box in boxes:
        here = box.intersection(matrix)
        if here is not None:
            there = matrix.intersection(here)
            assert there is not None
            yield here, there


def exchange_events(
    degrees: Mapping[str, int], rule: MatrixRuleCost, sent: tuple[int, int], num_whole: int
) -> list[Event]:
    """Returns the two all-to-alls of matrices, and the all-reduce of their norms for grafting.

    Args:
        degrees: Degrees of all axes.
        rule: The rule of the matrices.
        sent: Elements that a rank sends to owners, and those that it sends back.
        num_whole: Number of matrices.
    """
    names = tuple(axis for axis in OWNER_AXES if degrees[axis] > 1)
    if not names or not num_whole:
        return []
    norms = 2 * num_whole * rule.grafted_itemsize
    return [
        *(Event("all_to_all", names, count * rule.itemsize, MATRICES) for count in sent),
        *([Event("all_reduce", names, norms, MATRICES)] if norms else []),
    ]


def assign_owners(costs: Sequence[float], num_ranks: int, rule: MatrixRuleCost) -> list[int]:
    """Returns the owner of each matrix or tile, balanced by cost.

    Without states of owners the largest comes first. With them each rank gets a range.
    """
    if rule.has_owner_states:
        return _assign_ranges(costs, num_ranks)
    return _assign_largest_first(costs, num_ranks)


def _assign_largest_first(costs: Sequence[float], num_ranks: int) -> list[int]:
    """Assigns each item to the rank with the lowest cost so far, the most expensive one first."""
    owners = [0] * len(costs)
    heap = [(0.0, rank) for rank in range(num_ranks)]
    # The sort is stable, so items of equal cost keep their order.
    for number in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, rank = heapq.heappop(heap)
        owners[number] = rank
        heapq.heappush(heap, (load + costs[number], rank))
    return owners


def _assign_ranges(costs: Sequence[float], num_ranks: int) -> list[int]:
    """Assigns consecutive items of about equal cost to each rank: by the middle of each item."""
    total = sum(costs)
    owners = []
    done = 0.0
    for cost in costs:
        owners.append(min(int((done + cost / 2) / total * num_ranks), num_ranks - 1))
        done += cost
    return owners


def _place_weights(bucket: BucketSpec) -> Iterator[PlacedWeight]:
    """Yields the weights of a bucket in the order of its flat buffer."""
    offset = 0
    for param in bucket.params:
        yield PlacedWeight(
            param, offset, bucket.replica_axis, bucket.size // bucket.replica_axis.size
        )
        offset += param.num_elements


def _split_into_matrices(weights: Sequence[PlacedWeight], tile: int) -> Iterator[Matrix]:
    """Yields the matrices of all weights, cut into tiles of at most `tile` rows and columns."""
    whole = 0
    for number, weight in enumerate(weights):
        shape = weight.spec.sharding.shape
        dims = weight.spec.matrix_dims
        assert dims is not None, weight.spec.name
        rows, cols = (shape[dim] for dim in dims)
        # Experts and packed dims count matrices; the indices of both are batch indices here.
        batch = [range(1) if dim in dims else range(n) for dim, n in enumerate(shape)]
        for corner in itertools.product(*batch):
            for top, bottom in tile_bounds(rows, tile or rows):
                for left, right in tile_bounds(cols, tile or cols):
                    start = list(corner)
                    size = [1] * len(shape)
                    start[dims[0]], start[dims[1]] = top, left
                    size[dims[0]], size[dims[1]] = bottom - top, right - left
                    yield Matrix(
                        number,
                        tuple(start),
                        tuple(size),
                        bottom - top,
                        right - left,
                        whole,
                        (rows, cols),
                    )
            whole += 1
