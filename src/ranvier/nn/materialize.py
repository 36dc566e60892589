"""Values: every parameter of a rank becomes a view of its bucket and gets its part of the whole."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ranvier import counter_rng
from ranvier.buckets.bucket import Weight
from ranvier.buckets.offload import Homes, resting
from ranvier.buckets.scheduler import Deferred
from ranvier.nn.dropout import Dropout
from ranvier.nn.fused_linear import Siblings
from ranvier.nn.layer import Leaf
from ranvier.nn.moe.layer import Experts


def fill_values(
    queue: Deferred,
    leaves: Mapping[str, Leaf],
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str | None,
    blank: bool = False,
    room: int | None = None,
) -> None:
    """Give every parameter its part of the values, as views of its bucket; blank: zeros.

    On the meta device there are none.

    room: bytes of the host where weights are to rest; None: they stay on the device.
    """
    where: torch.device | str = device or "cpu"
    queue.device = torch.device(where)
    if room is not None:
        queue.homes = Homes(queue.buckets, dtype, queue.device, room=room)
    for bucket in queue.buckets:
        originals = [w.original.device for w in bucket.weights if w.original is not None]
        where = device or (originals[0] if originals else "cpu")
        bucket.data = torch.zeros(bucket.size, dtype=dtype, device=where)
        queue.device = bucket.data.device
        for weight in bucket.weights:
            view = bucket.data[weight.offset : weight.offset + weight.elements].view(
                weight.sharding.local
            )
            if not blank and not view.is_meta:
                view.copy_(_initial(weight, seed=seed, dtype=dtype, device=where))
            weight.original = None
            param = weight.made = nn.Parameter(view, requires_grad=weight.trainable)
            for owner, attribute in weight.owners:
                setattr(owner, attribute, param)
            if weight.trainable:
                # a hook that held the weight would keep both for ever
                hook = partial(_collect, weakref.ref(weight))
                param.register_post_accumulate_grad_hook(hook)
        if queue.homes is not None and resting(bucket):
            queue.homes.adopt(bucket)
    for leaf in leaves.values():
        if isinstance(leaf, Siblings):
            leaf.pack()
        elif isinstance(leaf, Dropout):
            leaf.stream = leaf.stream.to(where)
        elif isinstance(leaf, Experts):
            leaf.settle(where)


def _initial(
    weight: Weight, *, seed: int, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    if weight.original is not None:
        return weight.place.take(weight.original)
    return counter_rng.value(
        weight.place,
        seed=seed,
        name=weight.name,
        std=weight.std,
        mean=weight.mean,
        dtype=dtype,
        device=device,
    )


def _collect(reference: weakref.ref[Weight], param: Any) -> None:
    """Move a gradient that autograd made (of a vector, or in the reference) to the bucket."""
    weight = reference()
    if param.grad is not None and weight is not None:  # None where a leaf has delivered it already
        weight.bucket.queue.arrive(weight.bucket, weight.offset, param.grad)
        param.grad = None
