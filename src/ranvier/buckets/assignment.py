"""Bucket assignment: assigns weights to the buckets in which they are communicated and updated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ranvier.buckets import spec
from ranvier.buckets.bucket import Bucket, BucketSegment, ShardedParameter
from ranvier.buckets.scheduler import BucketScheduler
from ranvier.buckets.spec import ParamSpec
from ranvier.grid import Grid
from ranvier.sharding import matrix_dims


def assign_buckets(
    queue: BucketScheduler, weights: Iterable[ShardedParameter], blocks: Mapping[str, str]
) -> None:
    """Assigns weights to the buckets of `spec.build_bucket_specs`.

    blocks: name of the block of each weight.
    Communicates: creation of process groups.
    """
    known = {weight.name: weight for weight in weights}
    pieces = [_param_spec(weight, blocks[name]) for name, weight in known.items()]
    # All ranks have the same order of specs, as creating process groups is collective.
    for lot in spec.build_bucket_specs(pieces, queue.grid.degrees):
        members = [known[piece.name] for piece in lot.params]
        start = 0
        for weight in members:
            weight.offset = start
            start = start + weight.num_elements
        bucket = Bucket(
            name=lot.block,
            spec=lot,
            weights=members,
            bucket_scheduler=queue,
            segments=[
                BucketSegment(one.start, one.stop, queue.grid.axis(share=one.shared))
                for one in lot.ranges
            ],
            replica_axis=queue.grid.axis(*lot.replica_axis.names),
            size=lot.size,
            reduce_at_step_end=lot.reduce_at_step_end,
            tied_axis=members[0].tied_axis,
        )
        for weight in members:
            weight.bucket = bucket
        queue.buckets.append(bucket)


def _param_spec(weight: ShardedParameter, block: str) -> ParamSpec:
    if weight.tied_axis is not None:
        whom = weight.tied_axis.ranks
    else:
        whom = ()
    tied = len(weight.owners) > 1
    return ParamSpec(
        weight.name,
        block,
        weight.sharding,
        weight.param_group,
        weight.trainable,
        tied,
        whom,
        matrix_dims(weight.dims) if weight.param_group == "matrix" else None,
    )


def create_replica_groups(grid: Grid, weights: Iterable[ShardedParameter]) -> None:
    """Creates the groups of all ranks that have the same shard of a weight.

    Communicates: creation of process groups.
    """
    for weight in weights:
        grid.axis(*spec.replica_axis(weight.sharding, grid.degrees).names)
        grid.axis(share=spec.shared_ranks(weight.sharding, grid.degrees))
