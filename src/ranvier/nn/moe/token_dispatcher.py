"""Journeys: rows on their way to other ranks, while this one computes something else.

    journey = depart(x, axis, send, receive)    the all-to-all starts
    ...                                         work that needs none of it
    y = journey.arrive()                        it is waited for

Backward is the mirror image, as autograd goes through later work first: the gradient's all-to-all
starts where forward waited, runs beside the backward pass of the work between, and is waited for
where forward started. The two ends are tied in autograd by a thread, a tensor without elements; the
rows themselves never lie between them.
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
from ranvier.grid import Axis
from ranvier.nn.layer import apply_autograd
from ranvier.nn.moe.dispatch_payload import decode_rows, encode_rows


@dataclass(eq=False)
class _AllToAllState:
    """Who gets how many rows, and those that are under way."""

    axis: Axis
    input_splits: Sequence[int]
    output_splits: Sequence[int]
    allow_overlap: bool
    """Whether other work may come between start and wait."""
    dispatch: Dispatch
    dtype: torch.dtype
    where: str = field(init=False)
    pending: PendingTensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.where = self.axis.trace.where

    def start_exchange(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> None:
        """Let rows go. Communicates: all-to-all over axis."""
        trace = self.axis.trace
        with trace.named_scope(self.where), trace.outside_block():
            self.pending = collectives.all_to_all(x, self.axis, send, receive)
            if not self.allow_overlap:
                self.pending.wait()

    def wait_for_rows(self) -> Tensor:
        """What has come; it is forgotten here."""
        assert self.pending is not None, f"no rows are under way at {self.where}"
        under = self.pending
        self.pending = None
        return under.wait()


@dataclass(frozen=True, eq=False)
class PendingAllToAll:
    """Rows under way."""

    state: _AllToAllState
    autograd_link: Tensor

    def wait_for_rows(self) -> Tensor:
        """The rows that came, `[sum(receive), d]`.

        Communicates: waits for what departed; backward: all-to-all over axis, started.
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
    dispatch: Dispatch = "same",
) -> PendingAllToAll:
    """Send rows `[sum(send), d]` on their way. hidden: what follows may run beside it.

    Communicates: all-to-all over axis, started; backward: waits for that of the gradient.
    """
    route = _AllToAllState(axis, send, receive, hidden, dispatch, x.dtype)
    return PendingAllToAll(route, apply_autograd(_StartAllToAll, x, route))


class _StartAllToAll(torch.autograd.Function):
    """The start of a journey, and the end of that of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, route: _AllToAllState) -> Tensor:
        ctx.route = route
        results = route.axis.trace.saved_results
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
    """The end of a journey, and the start of that of its gradient, which travels as it is."""

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
        return dy.new_empty(0), None
