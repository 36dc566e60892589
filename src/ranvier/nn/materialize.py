"""Materialization: every parameter of a rank becomes a view of its bucket and gets its values."""

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
    """Allocate the buckets and fill every parameter with its shard of the values; blank: zeros.

    On the meta device there are no values.

    host_bytes: host memory for offloaded weights; None: they stay on the device.
    """
    where: torch.device | str = device or "cpu"
    queue.device = torch.device(where)
    # Must exist before the first bucket is filled: each is offloaded right after it, so that the
    # device never holds all weights.
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
                # A weak reference: a hook that held the weight would form a cycle and leak both.
                hook = partial(_move_grad_to_bucket, weakref.ref(weight))
                param.register_post_accumulate_grad_hook(hook)
        if queue.host_offload is not None and can_offload(bucket):
            queue.host_offload.register_bucket(bucket)
    for leaf in leaves.values():
        if isinstance(leaf, FusedLinear):
            # Only now do the buckets have storage to take views of.
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
    """Move a gradient that autograd made (of a vector, or in the reference) to the bucket."""
    weight = reference()
    # `grad` is None where a layer has accumulated it into the bucket itself.
    if param.grad is not None and weight is not None:
        weight.bucket.bucket_scheduler.accumulate_shard_grad(
            weight.bucket, weight.offset, param.grad
        )
        param.grad = None
