"""Functional collectives, which replace `comm.collectives` inside `torch.compile`.

They are pure functions of tensors and group names, traced into the graph with forward and backward.
The communication of one call is recorded when the graph is traced, without times and only for
static shapes, as the bytes of dynamic shapes are unknown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ranvier.grid import Axis

_ops = torch.ops._c10d_functional


def all_gather(x: Tensor, axis: Axis, dim: int, counts: Sequence[int] | None = None) -> Tensor:
    """`collectives.all_gather` for graphs. Communicates: all-gather over axis."""
    parts = x.movedim(dim, 0).contiguous()
    if counts is not None:
        # c10d has no all-gather of unequal parts: send the own part to all ranks.
        _record_event("all_gather", axis, x, sum(counts) * math.prod(parts.shape[1:]))
        copies = parts.repeat(axis.size, *[1] * (parts.dim() - 1))
        send = [parts.shape[0]] * axis.size
        return _exchange_parts(copies, axis, send, list(counts)).movedim(0, dim)
    _record_event("all_gather", axis, x, x.numel() * axis.size)
    # c10d gathers and scatters along dim 0, in the order of sorted ranks.
    out = _wait_tensor(_ops.all_gather_into_tensor(parts, axis.size, axis.group_name))
    return reorder_parts(out, axis, to_group=False).movedim(0, dim)


def reduce_scatter(x: Tensor, axis: Axis, dim: int, counts: Sequence[int] | None = None) -> Tensor:
    """`collectives.reduce_scatter` for graphs. Communicates: reduce-scatter over axis."""
    _record_event("reduce_scatter", axis, x)
    parts = x.movedim(dim, 0).contiguous()
    if counts is not None:
        # c10d has no reduce-scatter of unequal parts: exchange them, and sum.
        receive = [counts[axis.index]] * axis.size
        received = _exchange_parts(parts, axis, list(counts), receive)
        each = received.view(axis.size, counts[axis.index], *parts.shape[1:])
        wide = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype
        return each.sum(0, dtype=wide).to(x.dtype).movedim(0, dim)
    parts = reorder_parts(parts, axis, to_group=True)
    out = _wait_tensor(_ops.reduce_scatter_tensor(parts, "sum", axis.size, axis.group_name))
    return out.movedim(0, dim)


def all_reduce(x: Tensor, axis: Axis, op: str) -> Tensor:
    """`collectives.all_reduce` for graphs. Communicates: all-reduce over axis."""
    _record_event("all_reduce", axis, x)
    return _wait_tensor(_ops.all_reduce(x.contiguous(), op, axis.group_name))


def all_to_all(x: Tensor, axis: Axis, send: list[int] | None, receive: list[int] | None) -> Tensor:
    """`collectives.all_to_all` for graphs. Communicates: all-to-all over axis."""
    _record_event("all_to_all", axis, x)
    # Unlike the eager call, the functional call needs explicit counts.
    equal = [x.shape[0] // axis.size] * axis.size
    return _exchange_parts(x.contiguous(), axis, send or equal, receive or equal)


def _exchange_parts(x: Tensor, axis: Axis, send: list[int], receive: list[int]) -> Tensor:
    """Exchanges rows in the order of the axis. Communicates: all-to-all over axis."""
    parts = reorder_parts(x, axis, to_group=True, counts=send)
    sent, received = to_group_order(send, axis), to_group_order(receive, axis)
    out = _wait_tensor(_ops.all_to_all_single(parts, received, sent, axis.group_name))
    return reorder_parts(out, axis, to_group=False, counts=receive)


def broadcast(x: Tensor, axis: Axis, index: int) -> Tensor:
    """`collectives.broadcast` for graphs. Communicates: broadcast over axis."""
    _record_event("broadcast", axis, x)
    # The source is a position in the group, not on the axis.
    return _wait_tensor(_ops.broadcast(x.contiguous(), axis.order[index], axis.group_name))


def _record_event(op: str, axis: Axis, x: Tensor, elements: int | None = None) -> None:
    """Records a communication of this many elements like those of `x`, by default as many."""
    num_bytes = (x.numel() if elements is None else elements) * x.element_size()
    # The bytes of a dynamic shape are unknown while the graph is traced.
    if torch.fx.experimental.symbolic_shapes.has_static_value(num_bytes):
        axis.trace.record_graph_event(op, axis.names, num_bytes)


def _wait_tensor(x: Tensor) -> Tensor:
    result: Tensor = _ops.wait_tensor(x)
    return result


def to_group_order(counts: list[int], axis: Axis) -> list[int]:
    """Permutes counts from the order of the axis to the order of its group (sorted ranks)."""
    return [counts[axis.order.index(place)] for place in range(axis.size)]


def reorder_parts(
    parts: Tensor, axis: Axis, *, to_group: bool, counts: list[int] | None = None
) -> Tensor:
    """Permutes parts along dim 0 from the order of the axis to the order of its group, or back.

    counts: rows of each part, in the order of the axis; None if all are equal.
    """
    order = list(axis.order)
    # In the usual case ranks increase along the axis, and no copy is needed.
    if order == sorted(order):
        return parts
    counts = counts or [parts.shape[0] // axis.size] * axis.size
    if to_group:
        order = to_group_order(list(range(axis.size)), axis)
    else:
        counts = to_group_order(counts, axis)
    split = parts.split(counts)
    return torch.cat([split[place] for place in order])
