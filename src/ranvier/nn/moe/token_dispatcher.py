"""Asynchronous all-to-all: rows are exchanged between ranks while this one computes something else.

    pending = start_all_to_all(x, axis, send, receive)    the all-to-all starts
    ...                                                   independent work
    y = pending.wait_for_rows()                           it is waited for

Backward is the mirror image, as autograd runs through later work first: the gradient's all-to-all
starts where forward waited, overlaps with the backward pass of the work in between, and is waited
for where forward started. The two ends are connected in autograd by a link, a tensor without
elements; the rows themselves never pass through it.

Payload of the dispatch: the type in which rows are sent to their experts, and its error.

    same   unchanged
    bf16   rounded to 8 bits of precision               |y - x| <= 2^-8 |x|
    fp8    e4m3 and one scale per row, a power of two in fp32 that is sent after the row
                                                        |y - x| <= 2^-4 |x| + 2^-17 max |row|

Rows of fp8 are bytes: d values, then 4 of the scale. What comes back, and all gradients, are sent
unrounded: each is a sum already, and a gradient is that of rows that had not been rounded.
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
    """Rows `[n, d]` as they are sent."""
    if dispatch == "bf16":
        return x.to(torch.bfloat16)
    if dispatch == "fp8":
        rows = Float8Linear("rowwise").quantize(x, E4M3)
        # The scale is sent in the same message as its row: one all-to-all instead of two.
        parts = [rows.values.view(torch.uint8), rows.inverse_scale.view(torch.uint8)]
        return torch.cat(parts, 1)  # (n, d + SCALE)
    return x


def decode_rows(x: Tensor, dispatch: Dispatch, dtype: torch.dtype) -> Tensor:
    """Received rows, `[n, d]`, in `dtype`."""
    if dispatch != "fp8":
        return x.to(dtype)
    # Contiguous: a `view` to a wider type needs aligned, gapless bytes.
    values = x[:, :-SCALE_BYTES].contiguous()
    inverse = x[:, -SCALE_BYTES:].contiguous()
    wide = torch.promote_types(dtype, torch.float32)
    return (values.view(E4M3).to(wide) * inverse.view(torch.float32).to(wide)).to(dtype)


@dataclass(eq=False)
class _AllToAllState:
    """Splits of an all-to-all, and the exchange in flight."""

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
        # Backward runs outside of the layer's trace scope, so its name is remembered here.
        self.where = self.axis.trace.where

    def start_exchange(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> None:
        """Start the exchange. Communicates: all-to-all over axis."""
        trace = self.axis.trace
        # Not saved here for recomputation: `_FinishAllToAll` saves the received rows.
        with trace.named_scope(self.where), trace.outside_block():
            self.pending = collectives.all_to_all(x, self.axis, send, receive)
            # With overlap disabled the exchange completes before any other work starts.
            if not self.allow_overlap:
                self.pending.wait()

    def wait_for_rows(self) -> Tensor:
        """Wait for the rows; the reference to them is dropped."""
        assert self.pending is not None, f"no rows are under way at {self.where}"
        # Reset first: backward reuses this object for the exchange of the gradient.
        under = self.pending
        self.pending = None
        return under.wait()


@dataclass(frozen=True, eq=False)
class PendingAllToAll:
    """An all-to-all in flight."""

    state: _AllToAllState
    autograd_link: Tensor

    def wait_for_rows(self) -> Tensor:
        """The received rows, `[sum(receive), d]`.

        Communicates: waits for the started all-to-all; backward: all-to-all over axis, started.
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
    """Start sending rows `[sum(send), d]`. hidden: following work may overlap with it.

    Communicates: all-to-all over axis, started; backward: waits for that of the gradient.
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
    """End of an all-to-all; backward starts that of the gradient, which is sent unrounded."""

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
