"""Materialization: makes every parameter of a rank a view of its bucket and fills in its values."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ranvier import counter_rng
from ranvier.buckets.bucket import ShardedParameter
from ranvier.buckets.offload import HostOffload, can_offload
from ranvier.buckets.scheduler import BucketScheduler
from ranvier.nn.dropout import Dropout
from ranvier.nn.fused_linear import FusedLinear
from ranvier.nn.layer import ParallelLayer
from ranvier.nn.moe.layer import MoELayer


def materialize_parameters(
    queue: BucketScheduler,
    leaves: Mapping[str, ParallelLayer],
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str | None,
    blank: bool = False,
    host_bytes: int | None = None,
) -> None:
    """Allocates the buckets and fills every parameter with its shard of the values.

    On the meta device parameters have no values. blank: fill with zeros. host_bytes: host memory
    for offloaded weights; if None, weights stay on the device.
    """
    where: torch.device | str = device or "cpu"
    queue.device = torch.device(where)
    # Must exist before the first bucket is filled: each bucket is offloaded as soon as it is
    # filled, so that the device never holds all weights.
    if host_bytes is not None:
        queue.host_offload = HostOffload(queue.buckets, dtype, queue.device, room=host_bytes)
    for bucket in queue.buckets:
        originals = [
            w.original_values.device for w in bucket.weights if w.original_values is not None
        ]
        # Without an explicit device a bucket is placed where the serial model has its values.
        where = device or (originals[0] if originals else "cpu")
        bucket.data = torch.zeros(bucket.size, dtype=dtype, device=where)
        queue.device = bucket.data.device
        for weight in bucket.weights:
            view = bucket.data[weight.offset : weight.offset + weight.num_elements].view(
                weight.sharding.local_shape
            )
            if not blank and not view.is_meta:
                view.copy_(_initial_value(weight, seed=seed, dtype=dtype, device=where))
            # Release the serial values as soon as they are copied.
            weight.original_values = None
            param = weight.expected_param = nn.Parameter(view, requires_grad=weight.trainable)
            # A tied weight has several owners; all share one parameter.
            for owner, attribute in weight.owners:
                setattr(owner, attribute, param)
            if weight.trainable:
                # A weak reference: a hook with a reference to the weight would form a cycle.
                hook = partial(_move_grad_to_bucket, weakref.ref(weight))
                param.register_post_accumulate_grad_hook(hook)
        if queue.host_offload is not None and can_offload(bucket):
            queue.host_offload.register_bucket(bucket)
    for leaf in leaves.values():
        if isinstance(leaf, FusedLinear):
            # Packed weights are views of a bucket, which has its storage only now.
            leaf.pack_weights()
        elif isinstance(leaf, Dropout):
            leaf.rng_stream = leaf.rng_stream.to(where)
        elif isinstance(leaf, MoELayer):
            leaf.move_buffers_to(where)


def _initial_value(
    weight: ShardedParameter, *, seed: int, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    if weight.original_values is not None:
        return weight.shard.slice_from(weight.original_values)
    return counter_rng.init_shard(
        weight.shard,
        seed=seed,
        name=weight.name,
        std=weight.std,
        mean=weight.mean,
        dtype=dtype,
        device=device,
    )


def _move_grad_to_bucket(reference: weakref.ref[ShardedParameter], param: Any) -> None:
    """Moves a gradient from autograd (of a vector, or in the reference) to the bucket."""
    weight = reference()
    # `grad` is None if the layer has already added it to the bucket.
    if param.grad is not None and weight is not None:
        weight.bucket.bucket_scheduler.accumulate_shard_grad(
            weight.bucket, weight.offset, param.grad
        )
        param.grad = None
