"""Differentiable collectives: the backward of each is the dual collective.

    all_gather         all-gather     <-> reduce-scatter    reduce_scatter
    copy_to_axis       nothing        <-> all-reduce        reduce_from_axis
    scatter_to_axis    local slice    <-> all-gather        gather_from_axis
    all_to_all         all-to-all     <-> all-to-all (reversed)

The outputs of `all_gather`, `gather_from_axis` and `reduce_from_axis` and the inputs of
`copy_to_axis` and `scatter_to_axis` are replicated. `all_gather` and `gather_from_axis` differ in
the gradient: after `all_gather` the gradient of each rank is a partial sum; after
`gather_from_axis` it is complete.

counts: the sizes of the parts of all ranks along `dim`, if they differ; the dual has the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ranvier.comm import collectives
from ranvier.grid import Axis

Counts = Sequence[int] | None
"""Sizes of the parts of all ranks; None if they are equal."""


def local_slice(x: Tensor, axis: Axis, dim: int, counts: Counts = None) -> Tensor:
    """Returns this rank's slice of `x` along `dim`."""
    if counts is not None:
        assert sum(counts) == x.shape[dim], (x.shape, dim, counts)
        return x.narrow(dim, sum(counts[: axis.index]), counts[axis.index])
    size = x.shape[dim] // axis.size
    assert size * axis.size == x.shape[dim], (x.shape, dim, axis.size)
    return x.narrow(dim, axis.index * size, size)


def _run_all_gather(x: Tensor, axis: Axis, dim: int, counts: Counts) -> Tensor:
    return collectives.all_gather(x, axis, dim, counts=counts).wait()


def _run_reduce_scatter(x: Tensor, axis: Axis, dim: int, counts: Counts) -> Tensor:
    return collectives.reduce_scatter(x, axis, dim, counts=counts).wait()


def _run_all_reduce(x: Tensor, axis: Axis) -> Tensor:
    return collectives.all_reduce(x, axis).wait()


# A view, as an autograd function should not return its input.
def _view_identity(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)


# A clone, so that the slice does not keep the full tensor alive.
def _clone_local_slice(x: Tensor, axis: Axis, dim: int, counts: Counts) -> Tensor:
    return local_slice(x, axis, dim, counts).clone()


def _run_all_to_all(x: Tensor, axis: Axis, send: Counts, receive: Counts) -> Tensor:
    return collectives.all_to_all(x, axis, send, receive).wait()


def _run_reverse_all_to_all(x: Tensor, axis: Axis, send: Counts, receive: Counts) -> Tensor:
    return collectives.all_to_all(x, axis, receive, send).wait()


def _make_dual_function(name: str, forward_op: Any, backward_op: Any) -> Any:
    """Returns an autograd function that runs one operation forward and its dual backward.

    Both take a tensor, the axis, and the same further arguments.
    """

    # One tuple of arguments: for a tensor without gradients, torch.compile in torch 2.11 leaves out
    # ctx if as many values as parameters remain, which can be the case with variadic parameters.
    def forward(ctx: Any, x: Tensor, axis: Axis, arguments: tuple[Any, ...]) -> Tensor:
        ctx.axis = axis
        ctx.arguments = arguments
        # Backward is recorded in the scope of its forward; a compiled graph has no scope.
        if torch.compiler.is_compiling():
            ctx.where = ""
        else:
            ctx.where = axis.trace.where
        result: Tensor = forward_op(x, axis, *arguments)
        return result

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Neither the axis nor the arguments have a gradient.
        if torch.compiler.is_compiling():
            return backward_op(grad, ctx.axis, *ctx.arguments), None, None
        with ctx.axis.trace.named_scope(ctx.where):
            return backward_op(grad, ctx.axis, *ctx.arguments), None, None

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), members)


# Each pair of the module docstring in both directions.
_AllGather = _make_dual_function("AllGather", _run_all_gather, _run_reduce_scatter)
_ReduceScatter = _make_dual_function("ReduceScatter", _run_reduce_scatter, _run_all_gather)
_CopyToAxis = _make_dual_function("CopyToAxis", _view_identity, _run_all_reduce)
_ReduceFromAxis = _make_dual_function("ReduceFromAxis", _run_all_reduce, _view_identity)
_ScatterToAxis = _make_dual_function("ScatterToAxis", _clone_local_slice, _run_all_gather)
_GatherFromAxis = _make_dual_function("GatherFromAxis", _run_all_gather, _clone_local_slice)
_AllToAll = _make_dual_function("AllToAll", _run_all_to_all, _run_reverse_all_to_all)


# For an axis of size 1 all functions below return `x`, without a node in the graph.
def all_gather(x: Tensor, axis: Axis, dim: int, *, counts: Counts = None) -> Tensor:
    """Gathers along `dim`. Communicates: all-gather over axis; backward: reduce-scatter."""
    if axis.size == 1:
        return x
    return _apply_function(_AllGather, x, axis, dim, counts)


def reduce_scatter(x: Tensor, axis: Axis, dim: int, *, counts: Counts = None) -> Tensor:
    """Sums and scatters along `dim`.

    Communicates: reduce-scatter over axis; backward: all-gather.
    """
    if axis.size == 1:
        return x
    return _apply_function(_ReduceScatter, x, axis, dim, counts)


def copy_to_axis(x: Tensor, axis: Axis) -> Tensor:
    """Returns x, for different use on each rank. Communicates: backward: all-reduce over axis."""
    if axis.size == 1:
        return x
    return _apply_function(_CopyToAxis, x, axis)


def reduce_from_axis(x: Tensor, axis: Axis) -> Tensor:
    """Sums over ranks, which all use the same result.

    Communicates: all-reduce over axis; backward: nothing.
    """
    if axis.size == 1:
        return x
    return _apply_function(_ReduceFromAxis, x, axis)


def scatter_to_axis(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Slices a replicated value along `dim`. Communicates: backward: all-gather over axis."""
    if axis.size == 1:
        return x
    return _apply_function(_ScatterToAxis, x, axis, dim, None)


def gather_from_axis(x: Tensor, axis: Axis, dim: int, *, counts: Counts = None) -> Tensor:
    """Gathers along `dim`; all ranks use the same result.

    Communicates: all-gather over axis; backward: nothing.
    """
    if axis.size == 1:
        return x
    return _apply_function(_GatherFromAxis, x, axis, dim, counts)


def all_to_all(
    x: Tensor,
    axis: Axis,
    send_counts: Counts = None,
    receive_counts: Counts = None,
) -> Tensor:
    """Exchanges rows between ranks. Communicates: all-to-all over axis, forward and backward."""
    if axis.size == 1:
        return x
    return _apply_function(_AllToAll, x, axis, send_counts, receive_counts)


def _apply_function(function: Any, x: Tensor, axis: Axis, *arguments: Any) -> Tensor:
    result: Tensor = function.apply(x, axis, arguments)
    return result
