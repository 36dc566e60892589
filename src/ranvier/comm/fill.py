"""Fill: weights are sorted into the buckets in which they are communicated and updated."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from ranvier.comm.bucket import VECTORS, Bucket, Group, Segment, Weight
from ranvier.comm.deferred import Deferred


def fill(queue: Deferred, weights: Iterable[Weight], blocks: Mapping[str, str]) -> None:
    """Sort weights into buckets: by block, split over depth, group, trained, tied.

    blocks: name of the block of each weight. Communicates: the making of groups.
    """
    groups: dict[tuple[str, bool, Group, bool, bool, tuple[int, ...]], list[Weight]] = {}
    for weight in weights:
        tied = len(weight.owners) > 1 or weight.tied is not None
        whom = weight.tied.ranks if weight.tied is not None else ()
        key = (blocks[weight.name], weight.split, weight.group, weight.trainable, tied, whom)
        groups.setdefault(key, []).append(weight)
    multiple = queue.data_axis.size
    for (block, _, _, _, tied, _), members in groups.items():
        members.sort(key=lambda weight: sorted(copies(weight, queue).items()))
        segments = _segments(members, queue)
        bucket = Bucket(
            name=block,
            weights=members,
            queue=queue,
            segments=segments,
            size=-(-segments[-1].stop // multiple) * multiple,
            late=tied or block == VECTORS,
            tied=members[0].tied,
        )
        for weight in members:
            weight.bucket = bucket
        queue.buckets.append(bucket)


def copies(weight: Weight, queue: Deferred) -> dict[str, int]:
    """Ranks of each axis but data and pipe that hold the same part."""
    same = weight.sharding.over(queue.grid.degrees)
    return {axis: count for axis, count in same.items() if axis not in ("data", "pipe")}


def _segments(members: list[Weight], queue: Deferred) -> list[Segment]:
    """Lay weights one after the other; neighbours with the same copies form a segment."""
    segments, start = [], 0
    for same, group in itertools.groupby(members, key=lambda weight: copies(weight, queue)):
        stop = start
        for weight in group:
            weight.offset, stop = stop, stop + weight.elements
        segments.append(Segment(start, stop, queue.grid.axis(share=same)))
        start = stop
    return segments
