"""Matrix exchange: moves elements between the optimizer shards of all ranks and whole matrices.

The tensors of a layer-wise distributed optimizer: `buckets.matrix_owners` describes which rank owns
which matrix, and this module gathers the matrices of this rank and returns its results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ranvier.buckets.bucket import Bucket, ShardedParameter
from ranvier.buckets.matrix_owners import MATRICES, OWNER_AXES, MatrixOwners, Piece
from ranvier.comm import collectives
from ranvier.grid import Grid
from ranvier.sharding import Box


@dataclass(eq=False)
class MatrixStack:
    """Matrices of one shape that this rank owns."""

    numbers: tuple[int, ...]
    """Their numbers in `MatrixOwners.matrices`."""
    values: Tensor
    """`[n, rows, cols]`."""


@dataclass(frozen=True)
class _Route:
    """A piece with its place in a message."""

    piece: Piece
    offset: int
    """First element in the message."""


class MatrixExchange:
    """Moves elements to the owners of matrices, and results back."""

    def __init__(self, owners: MatrixOwners, buckets: Sequence[Bucket], grid: Grid) -> None:
        """Plans all messages of this rank.

        Communicates: creation of a process group.

        Args:
            owners: The owners of the matrices of `buckets`.
            buckets: The buckets with matrices, in the order in which owners were assigned.
            grid: The grid.
        """
        self.owners, self.grid = owners, grid
        self.axis = grid.axis(*OWNER_AXES)
        self.weights: list[tuple[Bucket, ShardedParameter]] = [
            (bucket, weight) for bucket in buckets for weight in bucket.weights
        ]
        """The weights with matrices and their buckets, in the order of `owners.weights`."""
        me = self.axis.index
        mine = owners.pieces_of_rank(me)
        self._own_pieces = [piece for piece in mine if owners.owners[piece.matrix] == me]
        away = [piece for piece in mine if owners.owners[piece.matrix] != me]
        by_owner: list[list[Piece]] = [[] for _ in range(self.axis.size)]
        for piece in away:
            by_owner[owners.owners[piece.matrix]].append(piece)
        by_rank = owners.pieces_of_owner(me)
        by_rank[me] = []
        # Ranks that hold the same part receive all the same result, but only the first sends.
        sent = [[piece for piece in part if owners.is_sent_by(piece, me)] for part in by_owner]
        taken = [
            [piece for piece in part if owners.is_sent_by(piece, rank)]
            for rank, part in enumerate(by_rank)
        ]
        self._to_owners = _plan_message(sent), _plan_message(taken)
        self._to_shards = _plan_message(by_rank), _plan_message(by_owner)
        shapes: dict[tuple[int, int], list[int]] = {}
        for number in owners.owned_by(me):
            matrix = owners.matrices[number]
            shapes.setdefault((matrix.rows, matrix.cols), []).append(number)
        self.stack_shapes = {shape: tuple(numbers) for shape, numbers in shapes.items()}
        """Numbers of the matrices of this rank by shape."""

    def gather_matrices(self, flats: Mapping[Bucket, Tensor]) -> list[MatrixStack]:
        """Returns the matrices of this rank, gathered from the optimizer shards of all ranks.

        flats: values of the optimizer shard `[optimizer_shard_size]` of each bucket.
        Communicates: all-to-all over the ranks of the stage.
        """
        example = next(iter(flats.values()))
        stacks = [
            MatrixStack(numbers, example.new_empty(len(numbers), *shape))
            for shape, numbers in self.stack_shapes.items()
        ]
        places = _matrix_places(stacks)
        sent, taken = self._to_owners
        message = example.new_empty(sent.size)
        _copy_all(
            [_part(message, r) for r in sent.routes],
            [self.shard_view(flats, r.piece) for r in sent.routes],
        )
        with self.grid.trace.named_scope(MATRICES):
            arriving = collectives.all_to_all(message, self.axis, sent.counts, taken.counts)
        # The own part is copied while the others travel.
        _copy_all(
            [_view(places[piece.matrix], piece.in_matrix) for piece in self._own_pieces],
            [self.shard_view(flats, piece) for piece in self._own_pieces],
        )
        if self.axis.size > 1:
            received = arriving.wait()
            _copy_all(
                [_view(places[r.piece.matrix], r.piece.in_matrix) for r in taken.routes],
                [_part(received, r) for r in taken.routes],
            )
        return stacks

    def scatter_matrices(
        self, stacks: Sequence[MatrixStack], flats: Mapping[Bucket, Tensor]
    ) -> None:
        """Writes the matrices of all ranks to the optimizer shards `flats` of this rank.

        Communicates: all-to-all over the ranks of the stage.
        """
        example = next(iter(flats.values()))
        places = _matrix_places(stacks)
        sent, taken = self._to_shards
        message = example.new_empty(sent.size)
        _copy_all(
            [_part(message, r) for r in sent.routes],
            [_view(places[r.piece.matrix], r.piece.in_matrix) for r in sent.routes],
        )
        with self.grid.trace.named_scope(MATRICES):
            arriving = collectives.all_to_all(message, self.axis, sent.counts, taken.counts)
        _copy_all(
            [self.shard_view(flats, piece) for piece in self._own_pieces],
            [_view(places[piece.matrix], piece.in_matrix) for piece in self._own_pieces],
        )
        if self.axis.size > 1:
            received = arriving.wait()
            _copy_all(
                [self.shard_view(flats, r.piece) for r in taken.routes],
                [_part(received, r) for r in taken.routes],
            )

    def shard_view(self, flats: Mapping[Bucket, Tensor], piece: Piece) -> Tensor:
        """Returns a piece as a view of the optimizer shard of its bucket."""
        bucket, weight = self.weights[piece.weight]
        return _view(flats[bucket][slice(*bucket.dense_state_range(weight))], piece.in_shard)


@dataclass(frozen=True)
class _MessagePlan:
    """The pieces of a message to or from all ranks of an axis."""

    routes: tuple[_Route, ...]
    counts: tuple[int, ...]
    """Elements of each rank."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(self.counts)


def _plan_message(parts: Sequence[Sequence[Piece]]) -> _MessagePlan:
    """Places pieces in a message, one rank after the other."""
    routes = []
    offset = 0
    for part in parts:
        for piece in part:
            routes.append(_Route(piece, offset))
            offset += piece.num_elements
    return _MessagePlan(
        tuple(routes), tuple(sum(piece.num_elements for piece in part) for part in parts)
    )


def _matrix_places(stacks: Sequence[MatrixStack]) -> dict[int, Tensor]:
    """Returns the flat values of each matrix by its number."""
    return {
        number: values.view(-1)
        for stack in stacks
        for number, values in zip(stack.numbers, stack.values, strict=True)
    }


def _view(flat: Tensor, box: Box) -> Tensor:
    """Returns a box of a flat tensor."""
    return flat.as_strided(box.size, box.strides, flat.storage_offset() + box.offset)


def _part(message: Tensor, route: _Route) -> Tensor:
    """Returns a piece of a message, in the shape of its box."""
    size = route.piece.in_shard.size
    return message[route.offset : route.offset + route.piece.num_elements].view(size)


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies many small tensors."""
    if targets:
        torch._foreach_copy_(targets, sources)
