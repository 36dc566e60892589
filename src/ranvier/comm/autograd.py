"""Differentiable pairs: communications whose backward is the dual communication.

    gather       all-gather          <-> reduce-scatter    sum_scatter
    share        nothing             <-> all-reduce        total
    split        take my part        <-> all-gather        join
    swap         all-to-all          <-> all-to-all (the other way)

Values: `gather`, `join`, `total` give every rank the same value, `share` and `split` start from
one. The pairs differ in the gradient: after `gather` every rank's gradient is a partial sum, after
`join` it is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ranvier.comm import collectives
from ranvier.grid import Axis

Counts = tuple[Sequence[int] | None, Sequence[int] | None]
"""Rows sent to and received from each rank; None: equal numbers."""


def take(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """My part of `x` along `dim`."""
    size = x.shape[dim] // axis.size
    assert size * axis.size == x.shape[dim], (x.shape, dim, axis.size)
    return x.narrow(dim, axis.index * size, size)


def _gathered(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return collectives.all_gather(x, axis, dim).wait()


def _scattered(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return collectives.reduce_scatter(x, axis, dim).wait()


def _reduced(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return collectives.all_reduce(x, axis).wait()


def _same(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return x.view_as(x)


def _taken(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return take(x, axis, dim).clone()


def _sent(x: Tensor, axis: Axis, counts: Counts) -> Tensor:
    return collectives.all_to_all(x, axis, *counts).wait()


def _returned(x: Tensor, axis: Axis, counts: Counts) -> Tensor:
    return collectives.all_to_all(x, axis, *counts[::-1]).wait()


def _pair(name: str, forward_op: Any, backward_op: Any) -> Any:
    """An autograd function that runs one operation forward and its dual backward.

    how: the dim of the operation, or the counts of an all-to-all.
    """

    def forward(ctx: Any, x: Tensor, axis: Axis, how: int | Counts) -> Tensor:
        ctx.axis, ctx.how = axis, how
        # Backward is recorded where forward was; a compiled graph has no such place.
        ctx.where = "" if torch.compiler.is_compiling() else axis.trace.where
        result: Tensor = forward_op(x, axis, how)
        return result

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if torch.compiler.is_compiling():
            return backward_op(grad, ctx.axis, ctx.how), None, None
        with ctx.axis.trace.at(ctx.where):
            return backward_op(grad, ctx.axis, ctx.how), None, None

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), members)


_Gather = _pair("Gather", _gathered, _scattered)
_SumScatter = _pair("SumScatter", _scattered, _gathered)
_Share = _pair("Share", _same, _reduced)
_Total = _pair("Total", _reduced, _same)
_Split = _pair("Split", _taken, _gathered)
_Join = _pair("Join", _gathered, _taken)
_Swap = _pair("Swap", _sent, _returned)


def gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """All parts along `dim`. Communicates: all-gather over axis; backward: reduce-scatter."""
    return x if axis.size == 1 else _applied(_Gather, x, axis, dim)


def sum_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """My part of the sum. Communicates: reduce-scatter over axis; backward: all-gather."""
    return x if axis.size == 1 else _applied(_SumScatter, x, axis, dim)


def share(x: Tensor, axis: Axis) -> Tensor:
    """The same value, used differently by each rank. Communicates: backward: all-reduce."""
    return x if axis.size == 1 else _applied(_Share, x, axis, 0)


def total(x: Tensor, axis: Axis) -> Tensor:
    """The sum, used alike by all ranks. Communicates: all-reduce over axis; backward: nothing."""
    return x if axis.size == 1 else _applied(_Total, x, axis, 0)


def split(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """My part of a value all ranks have. Communicates: backward: all-gather over axis."""
    return x if axis.size == 1 else _applied(_Split, x, axis, dim)


def join(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """All parts, used alike by all ranks. Communicates: all-gather over axis; backward: nothing."""
    return x if axis.size == 1 else _applied(_Join, x, axis, dim)


def swap(
    x: Tensor,
    axis: Axis,
    send_counts: Sequence[int] | None = None,
    receive_counts: Sequence[int] | None = None,
) -> Tensor:
    """Rows exchanged between ranks. Communicates: all-to-all over axis, forward and backward."""
    return x if axis.size == 1 else _applied(_Swap, x, axis, (send_counts, receive_counts))


def _applied(function: Any, x: Tensor, axis: Axis, how: int | Counts) -> Tensor:
    result: Tensor = function.apply(x, axis, how)
    return result
