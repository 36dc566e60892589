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
from ranvier.comm.collectives import Pending
from ranvier.config.plan import Dispatch
from ranvier.grid import Axis
from ranvier.nn.layer import applied
from ranvier.nn.moe.dispatch_payload import packed, unpacked


@dataclass(eq=False)
class _Route:
    """Who gets how many rows, and those that are under way."""

    axis: Axis
    send: Sequence[int]
    receive: Sequence[int]
    hidden: bool
    """Whether other work may come between start and wait."""
    dispatch: Dispatch
    dtype: torch.dtype
    where: str = field(init=False)
    under: Pending | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.where = self.axis.trace.where

    def start(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> None:
        """Let rows go. Communicates: all-to-all over axis."""
        trace = self.axis.trace
        with trace.at(self.where), trace.beside():
            self.under = collectives.all_to_all(x, self.axis, send, receive)
            if not self.hidden:
                self.under.wait()

    def end(self) -> Tensor:
        """What has come; it is forgotten here."""
        assert self.under is not None, f"no rows are under way at {self.where}"
        under, self.under = self.under, None
        return under.wait()


@dataclass(frozen=True, eq=False)
class Journey:
    """Rows under way."""

    route: _Route
    thread: Tensor

    def arrive(self) -> Tensor:
        """The rows that came, `[sum(receive), d]`.

        Communicates: waits for what departed; backward: all-to-all over axis, started.
        """
        y: Tensor = applied(_Arrive, self.thread, self.route)
        return y


def depart(
    x: Tensor,
    axis: Axis,
    send: Sequence[int],
    receive: Sequence[int],
    *,
    hidden: bool = True,
    dispatch: Dispatch = "same",
) -> Journey:
    """Send rows `[sum(send), d]` on their way. hidden: what follows may run beside it.

    Communicates: all-to-all over axis, started; backward: waits for that of the gradient.
    """
    route = _Route(axis, send, receive, hidden, dispatch, x.dtype)
    return Journey(route, applied(_Depart, x, route))


class _Depart(torch.autograd.Function):
    """The start of a journey, and the end of that of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, route: _Route) -> Tensor:
        ctx.route, results = route, route.axis.trace.results
        if results is None or not results.known(route.where):
            route.start(packed(x, route.dispatch), route.send, route.receive)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, thread: Tensor) -> tuple[Tensor, None]:
        return ctx.route.end(), None


class _Arrive(torch.autograd.Function):
    """The end of a journey, and the start of that of its gradient, which travels as it is."""

    @staticmethod
    def forward(ctx: Any, thread: Tensor, route: _Route) -> Tensor:
        ctx.route, results = route, route.axis.trace.results
        rows = route.end() if results is None else results.once(route.end)
        return unpacked(rows, route.dispatch, route.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        route = ctx.route
        route.start(dy, route.receive, route.send)
        return dy.new_empty(0), None
