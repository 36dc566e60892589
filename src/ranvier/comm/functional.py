"""Functional collectives: what the verbs become inside `torch.compile`, where the compiler orders them.

They are pure functions of tensors and group names, traced into the graph with forward and backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ranvier.grid import Axis

_ops = torch.ops._c10d_functional


def all_gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """As verbs.all_gather. Communicates: all-gather over axis."""
    parts = x.movedim(dim, 0).contiguous()
    return _done(_ops.all_gather_into_tensor(parts, axis.size, axis.group_name)).movedim(0, dim)


def reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """As verbs.reduce_scatter. Communicates: reduce-scatter over axis."""
    parts = x.movedim(dim, 0).contiguous()
    return _done(_ops.reduce_scatter_tensor(parts, "sum", axis.size, axis.group_name)).movedim(
        0, dim
    )


def all_reduce(x: Tensor, axis: Axis, op: str) -> Tensor:
    """As verbs.all_reduce. Communicates: all-reduce over axis."""
    return _done(_ops.all_reduce(x.contiguous(), op, axis.group_name))


def all_to_all(x: Tensor, axis: Axis, send: list[int] | None, receive: list[int] | None) -> Tensor:
    """As verbs.all_to_all. Communicates: all-to-all over axis."""
    equal = [x.shape[0] // axis.size] * axis.size
    return _done(
        _ops.all_to_all_single(x.contiguous(), receive or equal, send or equal, axis.group_name)
    )


def broadcast(x: Tensor, axis: Axis, source: int) -> Tensor:
    """As verbs.broadcast. Communicates: broadcast over axis."""
    return _done(_ops.broadcast(x.contiguous(), source, axis.group_name))


def _done(x: Tensor) -> Tensor:
    result: Tensor = _ops.wait_tensor(x)
    return result
