"""Asynchronous all-to-all: ranks exchange rows while they compute something else.

    pending = start_all_to_all(x, axis, send, receive)    start the all-to-all
    ...                                                   independent work
    y = pending.wait_for_rows()                           wait for it

Backward has the reverse order: the all-to-all of the gradient starts where forward waited, overlaps
with the backward pass of the work in between, and is waited for where forward started. In autograd
a link connects both ends, a tensor without elements; the rows do not pass through it.

Rows are sent to their experts in one of three dtypes, with the following errors:

    model  unchanged
    bf16   rounded to 8 bits of precision               |y - x| <= 2^-8 |x|
    fp8    e4m3 and one scale per row, a power of two in fp32 that is sent after the row
                                                        |y - x| <= 2^-4 |x| + 2^-17 max |row|

An fp8 row consists of bytes: d values, then 4 bytes of the scale. Results and all gradients are
sent without rounding: each is already a sum, and a gradient belongs to the unrounded rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ranvier.comm import collectives
from ranvier.comm.collectives import PendingTensor
from ranvier.config.plan import Dispatch
from ranvier.cost.layers import SCALE_BYTES
from ranvier.grid import Axis
from ranvier.nn.float8 import E4M3, Float8Linear
from ranvier.nn.layer import apply_autograd


def encode_rows(x: Tensor, dispatch: Dispatch) -> Tensor:
    """Converts rows `[n, d]` to the format in which they are sent."""
    if dispatch == "bf16":
        return x.to(torch.bfloat16)
    if dispatch == "fp8":
        # Strides of tensors without elements may not allow a `view` to another type.
        if len(x) == 0:
            return x.new_empty(0, x.shape[1] + SCALE_BYTES, dtype=torch.uint8)
        rows = Float8Linear("rowwise").quantize(x, E4M3)
        # The scale is sent in the same message as its row: one all-to-all instead of two.
        parts = [rows.values.view(torch.uint8), rows.inverse_scale.view(torch.uint8)]
        return torch.cat(parts, 1)  # (n, d + SCALE)
    return x


def decode_rows(x: Tensor, dispatch: Dispatch, dtype: torch.dtype) -> Tensor:
    """Converts received rows to `[n, d]` in `dtype`."""
    if dispatch != "fp8":
        return x.to(dtype)
    if len(x) == 0:
        return x.new_empty(0, x.shape[1] - SCALE_BYTES, dtype=dtype)
    # A `view` to a wider type needs contiguous, aligned bytes.
    values = x[:, :-SCALE_BYTES].contiguous()
    inverse = x[:, -SCALE_BYTES:].contiguous()
    wide = torch.promote_types(dtype, torch.float32)
    return (values.view(E4M3).to(wide) * inverse.view(torch.float32).to(wide)).to(dtype)


@dataclass(eq=False)
class _AllToAllState:
    """Splits of an all-to-all, and the pending exchange."""

    axis: Axis
    input_splits: Sequence[int]
    output_splits: Sequence[int]
    allow_overlap: bool
    """Whether other work may run between start and wait."""
    dispatch: Dispatch
    dtype: torch.dtype
    where: str = field(init=False)
    pending: PendingTensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        # Backward runs outside of the layer's trace scope, so its name is stored here.
        self.where = self.axis.trace.where

    def start_exchange(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> None:
        """Starts the exchange. Communicates: all-to-all over axis."""
        trace = self.axis.trace
        # `_FinishAllToAll` saves the received rows for recomputation, so nothing is saved here.
        with trace.named_scope(self.where), trace.outside_block():
            self.pending = collectives.all_to_all(x, self.axis, send, receive)
            # With overlap disabled the exchange completes before any other work starts.
            if not self.allow_overlap:
                self.pending.wait()

    def wait_for_rows(self) -> Tensor:
        """Waits for the rows and returns them; keeps no reference to them."""
        assert self.pending is not None, f"no all-to-all is pending at {self.where}"
        # Reset first: backward reuses this object for the exchange of the gradient.
        under = self.pending
        self.pending = None
        return under.wait()


@dataclass(frozen=True, eq=False)
class PendingAllToAll:
    """An all-to-all that was started and is not yet complete."""

    state: _AllToAllState
    autograd_link: Tensor

    def wait_for_rows(self) -> Tensor:
        """Returns the received rows, `[sum(receive), d]`.

        Communicates: waits for the all-to-all; backward: starts an all-to-all over axis.
        """
        y: Tensor = apply_autograd(_FinishAllToAll, self.autograd_link, self.state)
        return y


def start_all_to_all(
    x: Tensor,
    axis: Axis,
    send: Sequence[int],
    receive: Sequence[int],
    *,
    hidden: bool = True,
    dispatch: Dispatch = "model",
) -> PendingAllToAll:
    """Starts sending rows `[sum(send), d]`. hidden: the following work may overlap with it.

    Communicates: starts an all-to-all over axis; backward: waits for the gradient's all-to-all.
    """
    route = _AllToAllState(axis, send, receive, hidden, dispatch, x.dtype)
    return PendingAllToAll(route, apply_autograd(_StartAllToAll, x, route))


class _StartAllToAll(torch.autograd.Function):
    """Start of an all-to-all; backward waits for the all-to-all of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, route: _AllToAllState) -> Tensor:
        ctx.route = route
        results = route.axis.trace.saved_results
        # A recomputed block that saved the received rows need not send them again.
        if results is None or not results.has_result(route.where):
            route.start_exchange(
                encode_rows(x, route.dispatch), route.input_splits, route.output_splits
            )
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, thread: Tensor) -> tuple[Tensor, None]:
        return ctx.route.wait_for_rows(), None


class _FinishAllToAll(torch.autograd.Function):
    """End of an all-to-all; backward starts the all-to-all of the gradient, without rounding."""

    @staticmethod
    def forward(ctx: Any, thread: Tensor, route: _AllToAllState) -> Tensor:
        ctx.route = route
        results = route.axis.trace.saved_results
        if results is None:
            rows = route.wait_for_rows()
        else:
            rows = results.run_once(route.wait_for_rows)
        return decode_rows(rows, route.dispatch, route.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        route = ctx.route
        route.start_exchange(dy, route.output_splits, route.input_splits)
        # The gradient of the link only makes autograd call `_StartAllToAll.backward`, which waits.
        return dy.new_empty(0), None
