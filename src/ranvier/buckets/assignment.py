"""Fill: weights are sorted into the buckets in which they are communicated and updated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ranvier.buckets import spec
from ranvier.buckets.bucket import Bucket, Segment, Weight
from ranvier.buckets.scheduler import Deferred
from ranvier.buckets.spec import Piece


def fill(queue: Deferred, weights: Iterable[Weight], blocks: Mapping[str, str]) -> None:
    """Sort weights into buckets: by block, split over depth, group, trained, tied.

    blocks: name of the block of each weight. Communicates: the making of groups.
    """
    known = {weight.name: weight for weight in weights}
    pieces = [_piece(weight, blocks[name]) for name, weight in known.items()]
    for lot in spec.sort(pieces, queue.grid.degrees):
        members, start = [known[piece.name] for piece in lot.pieces], 0
        for weight in members:
            weight.offset, start = start, start + weight.elements
        bucket = Bucket(
            name=lot.block,
            weights=members,
            queue=queue,
            segments=[
                Segment(one.start, one.stop, queue.grid.axis(share=one.same)) for one in lot.ranges
            ],
            size=lot.size,
            late=lot.late,
            tied=members[0].tied,
        )
        for weight in members:
            weight.bucket = bucket
        queue.buckets.append(bucket)


def _piece(weight: Weight, block: str) -> Piece:
    whom = weight.tied.ranks if weight.tied is not None else ()
    tied = len(weight.owners) > 1
    return Piece(weight.name, block, weight.sharding, weight.group, weight.trainable, tied, whom)


def copies(weight: Weight, queue: Deferred) -> dict[str, int]:
    """Ranks of each axis but data and pipe that hold the same part."""
    return spec.copies(weight.sharding, queue.grid.degrees)
