"""Attention over the context axis: kv_gather, ring and ulysses, with their backward passes.

`cost.context_attention` says which keys a rank needs and from whom; here they are communicated and
computed. The communication is an `Exchange`, which is an axis of the grid, or ranks that a test
plays in one process. The kernel is given, as layers know no model: any `SegmentKernel`, e.g.
`models.segment_attention.SegmentAttention`.

kv_gather and ring keep q, k, v, the output and the log-sum-exp of scores for backward, and
communicate keys once more there. Sums over ranks are in fp32 (float64 for float64) and in a fixed
order, so results do not depend on timing. Communication overlaps with compute of the previous head
group or block; without overlap the operations are the same, so results are bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ranvier.comm import collectives
from ranvier.cost.context_attention import KVGatherLayout, SegmentRows
from ranvier.grid import Axis


class Pending(Protocol):
    """Result of a communication that has started."""

    def wait(self) -> Tensor:
        """Returns the result."""


class Exchange(Protocol):
    """Communication between the ranks of context. Every rank must make the same calls."""

    def all_gather(self, x: Tensor) -> Pending:
        """Starts to concatenate the tensors of all ranks along the first dim."""

    def reduce_scatter(self, x: Tensor) -> Pending:
        """Starts to sum tensors of all ranks; each gets its part of the first dim."""

    def all_to_all(
        self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Pending:
        """Starts to send rows of x to each rank, and to receive rows from each."""


@dataclass
class AxisExchange:
    """Communication over an axis of the grid; all events belong to one layer."""

    axis: Axis
    where: str = ""
    """Layer of the events; by default the one in whose forward pass this is created."""

    def __post_init__(self) -> None:
        # Backward runs in the scope of another layer.
        self.where = self.where or self.axis.trace.where

    def all_gather(self, x: Tensor) -> Pending:
        """Communicates: all-gather over the axis."""
        return self._start(lambda: collectives.all_gather(x, self.axis))

    def reduce_scatter(self, x: Tensor) -> Pending:
        """Communicates: reduce-scatter over the axis."""
        return self._start(lambda: collectives.reduce_scatter(x, self.axis))

    def all_to_all(
        self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Pending:
        """Communicates: all-to-all over the axis."""
        return self._start(
            lambda: collectives.all_to_all(x, self.axis, send_counts, receive_counts)
        )

    def _start(self, call: Callable[[], Pending]) -> Pending:
        trace = self.axis.trace
        # Keys are not saved for recomputation, but the result of attention is.
        with trace.named_scope(self.where), trace.outside_block():
            return call()


class SegmentKernel(Protocol):
    """Attention of segments of queries to segments of keys; see `SegmentKernelFactory`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cap: float) -> tuple[Tensor, Tensor]:
        """Returns the output and log-sum-exps `[h, T_q]`; queries that see nothing: 0 and -inf."""

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cap: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns dq, dk, dv in fp32. o, lse: of all keys, not only of these."""


class SegmentKernelFactory(Protocol):
    """Makes the kernel for some segments; a class such as `SegmentAttention`."""

    def __call__(
        self,
        pairs: tuple[SegmentRows, ...],
        num_queries: int,
        num_keys: int,
        causal: bool = True,
        window: int = 0,
    ) -> SegmentKernel:
        """causal: the last query of a segment is aligned with its last key."""


RunOnce = Callable[[Callable[[], tuple[Tensor, ...]]], tuple[Tensor, ...]]
"""Runs work and returns its tensors; a recomputation returns those of the first run instead."""


def run_always(work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Runs work, also in a recomputation."""
    return work()


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of sums over ranks: fp32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


class _Started:
    """Communication that overlaps with compute; without overlap it is waited for at once."""

    def __init__(self, pending: Pending, overlap: bool) -> None:
        self.pending = pending
        if not overlap:
            pending.wait()

    def wait(self) -> Tensor:
        return self.pending.wait()


# ---- kv_gather --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class KVGather:
    """Attention of a rank that gets the keys its queries see.

    q, y: `[b, s/context, h, k]`; k, v: `[b, s/context, g, k]`.
    Communicates: all-to-all over context with the keys that each rank needs (all-gather if all need
    all); backward: the same again, and all-to-all (reduce-scatter) of the gradients of keys.
    """

    layout: KVGatherLayout
    make_kernel: SegmentKernelFactory
    overlap: bool = True
    """Whether keys of the next head group are communicated while one is computed."""
    _indices: dict[torch.device, _KeyIndices] = field(default_factory=dict, init=False, repr=False)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        exchange: Exchange,
        cap: float = 0.0,
        run_once: RunOnce = run_always,
    ) -> Tensor:
        """Computes attention."""
        rows, keys, values = (x.flatten(0, 1) for x in (q, k, v))  # (b·t, h, k)
        return _apply_core(rows, keys, values, self, exchange, cap, run_once).view(q.shape)

    @cached_property
    def kernel(self) -> SegmentKernel:
        """Attention of this rank's queries to the keys that it needs."""
        layout = self.layout
        return self.make_kernel(
            layout.segments, layout.num_rows, layout.num_keys, causal=True, window=layout.window
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, exchange: Exchange, cap: float
    ) -> tuple[Tensor, Tensor]:
        """Returns the output `[T, h, k]`, and log-sum-exps `[h, T]`."""
        groups = self._head_groups(q, k)
        o = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=accumulation_dtype(q.dtype))
        arriving = self._start_keys(k, v, groups[0], exchange)
        for i, (heads, kv_heads) in enumerate(groups):
            keys = self._arrange_keys(arriving, k[:, kv_heads], v[:, kv_heads])
            if i + 1 < len(groups):
                arriving = self._start_keys(k, v, groups[i + 1], exchange)
            part, sums = self.kernel.forward(q[:, heads], *keys, cap)
            o[:, heads] = part.to(o.dtype)
            lse[heads] = sums
        return o, lse

    def backward(
        self,
        dy: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        exchange: Exchange,
        cap: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of q, k and v."""
        groups = self._head_groups(q, k)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        arriving = self._start_keys(k, v, groups[0], exchange)
        returning: tuple[slice, Tensor, _Started | None] | None = None
        for i, (heads, kv_heads) in enumerate(groups):
            keys = self._arrange_keys(arriving, k[:, kv_heads], v[:, kv_heads])
            if i + 1 < len(groups):
                arriving = self._start_keys(k, v, groups[i + 1], exchange)
            some = (dy[:, heads], q[:, heads], *keys, o[:, heads], lse[heads])
            part, *grads = self.kernel.backward(*some, cap)
            dq[:, heads] = part.to(dq.dtype)
            if returning is not None:
                self._finish_gradients(returning, dk, dv)
            grad = torch.stack(grads, 1)  # (keys, 2, g, k)
            returning = (kv_heads, grad, self._start_gradients(grad, exchange))
        assert returning is not None
        self._finish_gradients(returning, dk, dv)
        return dq, dk, dv

    def _head_groups(self, q: Tensor, k: Tensor) -> list[tuple[slice, slice]]:
        """Returns the query heads and kv heads of each group."""
        shared = q.shape[1] // k.shape[1]
        groups = self.layout.head_groups(k.shape[1])
        return [(slice(a * shared, b * shared), slice(a, b)) for a, b in groups]

    def _indices_on(self, device: torch.device) -> _KeyIndices:
        if device not in self._indices:
            self._indices[device] = _KeyIndices.from_layout(self.layout, device)
        return self._indices[device]

    def _start_keys(
        self, k: Tensor, v: Tensor, group: tuple[slice, slice], exchange: Exchange
    ) -> _Started | None:
        """Starts to communicate the keys and values of a group of heads, in one message."""
        kv_heads = group[1]
        if self.layout.collective == "none":
            return None
        if self.layout.collective == "all_gather":
            x = torch.stack([k[:, kv_heads], v[:, kv_heads]], 1)
            return _Started(exchange.all_gather(x), self.overlap)
        at = self._indices_on(k.device)
        x = torch.stack([y[:, kv_heads].index_select(0, at.sent_rows) for y in (k, v)], 1)
        pending = exchange.all_to_all(x, at.send_counts, at.receive_counts)
        return _Started(pending, self.overlap)

    def _arrange_keys(
        self, arriving: _Started | None, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns keys and values `[keys, g, k]` in the order of the layout."""
        at = self._indices_on(k.device)
        if arriving is None:
            # Every own row is a key, and there are no others.
            if at.is_ordered:
                return k, v
            rows = at.own_keys.argsort()
            return k.index_select(0, rows), v.index_select(0, rows)
        if self.layout.collective == "all_gather":
            keys = arriving.wait().index_select(0, at.gathered_rows)  # (keys, 2, g, k)
        else:
            keys = k.new_empty((self.layout.num_keys, 2, *k.shape[1:]))
            keys.index_copy_(0, at.own_keys, torch.stack([k, v], 1))
            keys.index_copy_(0, at.received_keys, arriving.wait())
        return keys[:, 0], keys[:, 1]

    def _start_gradients(self, grad: Tensor, exchange: Exchange) -> _Started | None:
        """Starts to return the gradients of keys to the ranks that have them."""
        at = self._indices_on(grad.device)
        if self.layout.collective == "none":
            return None
        if self.layout.collective == "all_gather":
            rows = grad.index_select(0, at.gathered_keys)
            return _Started(exchange.reduce_scatter(rows), self.overlap)
        rows = grad.index_select(0, at.received_keys)
        pending = exchange.all_to_all(rows, at.receive_counts, at.send_counts)
        return _Started(pending, self.overlap)

    def _finish_gradients(
        self, returning: tuple[slice, Tensor, _Started | None], dk: Tensor, dv: Tensor
    ) -> None:
        """Adds the gradients of all ranks, in the order of ranks, and stores them in dk and dv."""
        kv_heads, grad, started = returning
        at = self._indices_on(grad.device)
        if started is None:
            total = grad if at.is_ordered else grad.index_select(0, at.own_keys)
        elif self.layout.collective == "all_gather":
            total = started.wait()
        else:
            total = grad.new_zeros((self.layout.num_rows, *grad.shape[1:]))
            parts = started.wait().split(at.send_counts)
            rows = at.sent_rows.split(at.send_counts)
            for rank, (part, to) in enumerate(zip(parts, rows, strict=True)):
                if rank == self.layout.rank:
                    total += grad.index_select(0, at.own_keys)
                elif part.shape[0]:
                    # A rank sends one gradient per row, so the order of sums is fixed.
                    total.index_add_(0, to, part)
        dk[:, kv_heads] = total[:, 0].to(dk.dtype)
        dv[:, kv_heads] = total[:, 1].to(dv.dtype)


@dataclass(frozen=True, eq=False)
class _KeyIndices:
    """Rows of a `KVGatherLayout` on a device."""

    own_keys: Tensor
    received_keys: Tensor
    sent_rows: Tensor
    gathered_keys: Tensor
    """Row among the keys of each gathered row."""
    gathered_rows: Tensor
    """The inverse: the gathered row of each key."""
    send_counts: list[int]
    receive_counts: list[int]
    is_ordered: bool
    """Whether the keys of this rank are in the order of its rows."""

    @classmethod
    def from_layout(cls, layout: KVGatherLayout, device: torch.device) -> _KeyIndices:
        own, received, sent = layout.own_keys, layout.received_keys, layout.sent_rows
        if layout.collective == "all_gather":
            parts = [*received[: layout.rank], own, *received[layout.rank + 1 :]]
            gathered = np.concatenate(parts)
        else:
            gathered = np.empty(0, dtype=np.int64)
        return cls(
            own_keys=_copy_to_device(own, device),
            received_keys=_copy_to_device(np.concatenate(received), device),
            sent_rows=_copy_to_device(np.concatenate(sent), device),
            gathered_keys=_copy_to_device(gathered, device),
            gathered_rows=_copy_to_device(gathered.argsort(), device),
            send_counts=[*map(len, sent)],
            receive_counts=[*map(len, received)],
            is_ordered=bool((own == np.arange(len(own))).all()),
        )


def _copy_to_device(rows: np.ndarray, device: torch.device) -> Tensor:
    x = torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64))
    if device.type == "cuda":
        # Pinned memory makes the copy asynchronous.
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


# ---- autograd ---------------------------------------------------------------------------


class _Core(Protocol):
    """Attention over context with an explicit backward pass."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, exchange: Exchange, cap: float
    ) -> tuple[Tensor, Tensor]: ...

    def backward(
        self,
        dy: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        exchange: Exchange,
        cap: float,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class _CoreFunction(torch.autograd.Function):
    """Attention of rows `[T, h, k]` by a core; keeps the output and the log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        core: _Core,
        exchange: Exchange,
        cap: float,
        run_once: RunOnce,
    ) -> Tensor:
        o, lse = run_once(lambda: core.forward(q, k, v, exchange, cap))
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.core = core
        ctx.exchange = exchange
        ctx.cap = cap
        return o

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.core.backward(dy, *ctx.saved_tensors, ctx.exchange, ctx.cap)
        return *grads, None, None, None, None


def _apply_core(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    core: _Core,
    exchange: Exchange,
    cap: float,
    run_once: RunOnce,
) -> Tensor:
    y: Tensor = _CoreFunction.apply(q, k, v, core, exchange, cap, run_once)  # type: ignore[no-untyped-call]
    return y
