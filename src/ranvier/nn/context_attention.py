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

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ranvier.comm import collectives
from ranvier.cost.context_attention import (
    KVGatherLayout,
    Layout,
    RingLayout,
    RingMove,
    SegmentRows,
    UlyssesLayout,
    check_ulysses_heads,
)
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


Prefix = tuple[Tensor, Tensor]
"""Keys and values of the prefix of each sample, `[b·n, g, k]`."""
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


class RowAttention(ABC):
    """Attention of rows outside of autograd, for one operation of a compiled graph."""

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, exchange: Exchange, cap: float
    ) -> tuple[Tensor, Tensor]:
        """Returns the output `[T, h, k]`, and log-sum-exps `[h, T]`."""

    @abstractmethod
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

    def forward_rows(
        self, q: Tensor, k: Tensor, v: Tensor, exchange: Exchange, cap: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns the output of rows `[T, h, k]`, and what else `backward_rows` needs."""
        o, lse = self.forward(q, k, v, exchange, cap)
        return o, (lse,)

    def backward_rows(
        self,
        dy: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        y: Tensor,
        saved: tuple[Tensor, ...],
        exchange: Exchange,
        cap: float,
    ) -> tuple[Tensor, ...]:
        """Returns the gradients of q, k and v. y: the output."""
        (lse,) = saved
        return self.backward(dy, q, k, v, y, lse, exchange, cap)


# ---- kv_gather --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class KVGather(RowAttention):
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
        prefix: Prefix | None = None,
    ) -> Tensor:
        """Computes attention. prefix: keys and values that all tokens of a sample see."""
        core = self if prefix is None else PrefixedAttention(self, self.make_kernel, q.shape[0])
        return _apply_core(q, k, v, core, exchange, cap, run_once, prefix)

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
        returning: _ReturningGradients | None = None
        for i, (heads, kv_heads) in enumerate(groups):
            keys = self._arrange_keys(arriving, k[:, kv_heads], v[:, kv_heads])
            if i + 1 < len(groups):
                arriving = self._start_keys(k, v, groups[i + 1], exchange)
            some = (dy[:, heads], q[:, heads], *keys, o[:, heads], lse[heads])
            part, *grads = self.kernel.backward(*some, cap)
            dq[:, heads] = part.to(dq.dtype)
            if returning is not None:
                self._finish_gradients(returning, dk, dv)
                # Gradients of all keys are large: free them before the next ones are copied.
                returning = None
            returning = self._start_gradients(kv_heads, grads, exchange)
            del grads
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
        x = _stack_rows([k[:, kv_heads], v[:, kv_heads]], at.sent_rows)
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

    def _start_gradients(
        self, kv_heads: slice, grads: list[Tensor], exchange: Exchange
    ) -> _ReturningGradients:
        """Starts to return the gradients of keys and values to the ranks that have them."""
        at = self._indices_on(grads[0].device)
        if self.layout.collective == "all_gather":
            num_rows = self.layout.num_ranks * self.layout.num_rows
            rows = grads[0].new_zeros((num_rows, 2, *grads[0].shape[1:]))
            for i, grad in enumerate(grads):
                rows[:, i].index_copy_(0, at.gathered_rows, grad)
            started = _Started(exchange.reduce_scatter(rows), self.overlap)
            return _ReturningGradients(kv_heads, [], started)
        own = grads
        if self.layout.collective != "none" or not at.is_ordered:
            own = [grad.index_select(0, at.own_keys) for grad in grads]
        if self.layout.collective == "none":
            return _ReturningGradients(kv_heads, own, None)
        rows = _stack_rows(grads, at.received_keys)
        pending = exchange.all_to_all(rows, at.receive_counts, at.send_counts)
        return _ReturningGradients(kv_heads, own, _Started(pending, self.overlap))

    def _finish_gradients(self, returning: _ReturningGradients, dk: Tensor, dv: Tensor) -> None:
        """Adds the gradients of all ranks, in the order of ranks, and stores them in dk and dv."""
        own, started = returning.own, returning.started
        at = self._indices_on(dk.device)
        if started is None:
            total = own
        elif self.layout.collective == "all_gather":
            total = list(started.wait().unbind(1))
        else:
            both = own[0].new_zeros((own[0].shape[0], 2, *own[0].shape[1:]))
            parts = started.wait().split(at.send_counts)
            rows = at.sent_rows.split(at.send_counts)
            for rank, (part, to) in enumerate(zip(parts, rows, strict=True)):
                if rank == self.layout.rank:
                    for i, grad in enumerate(own):
                        both[:, i] += grad
                elif part.shape[0]:
                    # A rank sends one gradient per row, so the order of sums is fixed.
                    both.index_add_(0, to, part)
            total = list(both.unbind(1))
        dk[:, returning.kv_heads] = total[0].to(dk.dtype)
        dv[:, returning.kv_heads] = total[1].to(dv.dtype)


class _ReturningGradients(NamedTuple):
    """Gradients of the keys and values of a group of heads, and their communication."""

    kv_heads: slice
    own: list[Tensor]
    """Those of this rank's rows, `[s/context, g, k]`, unless they are communicated with all
    others."""
    started: _Started | None


def _stack_rows(tensors: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Returns rows `[n, 2, g, k]` of two tensors `[T, g, k]`."""
    return torch.stack([x.index_select(0, rows) for x in tensors], 1)


@dataclass(frozen=True, eq=False)
class _KeyIndices:
    """Rows of a `KVGatherLayout` on a device."""

    own_keys: Tensor
    received_keys: Tensor
    sent_rows: Tensor
    gathered_rows: Tensor
    send_counts: list[int]
    receive_counts: list[int]
    is_ordered: bool
    """Whether the keys of this rank are in the order of its rows."""

    @classmethod
    def from_layout(cls, layout: KVGatherLayout, device: torch.device) -> _KeyIndices:
        own, received, sent = layout.own_keys, layout.received_keys, layout.sent_rows
        gathered = np.empty(0, dtype=np.int64)
        if layout.collective == "all_gather":
            gathered = layout.gathered_rows
        return cls(
            own_keys=_copy_to_device(own, device),
            received_keys=_copy_to_device(np.concatenate(received), device),
            sent_rows=_copy_to_device(np.concatenate(sent), device),
            gathered_rows=_copy_to_device(gathered, device),
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


# ---- ring -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Ring(RowAttention):
    """Attention of a rank to blocks of keys that travel around both ways.

    q, y: `[b, s/context, h, k]`; k, v: `[b, s/context, g, k]`.
    Communicates: ceil((C-1)/2) hops over context, each an all-to-all with the neighbours; backward:
    the same again, and as many of the gradients of blocks.
    """

    layout: RingLayout
    make_kernel: SegmentKernelFactory
    overlap: bool = True
    """Whether the next blocks travel while one is computed."""
    _rows: dict[torch.device, tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False
    )

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        exchange: Exchange,
        cap: float = 0.0,
        run_once: RunOnce = run_always,
        prefix: Prefix | None = None,
    ) -> Tensor:
        """Computes attention. prefix: keys and values that all tokens of a sample see."""
        core = self if prefix is None else PrefixedAttention(self, self.make_kernel, q.shape[0])
        return _apply_core(q, k, v, core, exchange, cap, run_once, prefix)

    @cached_property
    def kernels(self) -> dict[int, SegmentKernel]:
        """Attention to the block of each rank of which queries of this rank see something."""
        layout = self.layout
        kernels = {}
        for source in range(layout.num_ranks):
            segments = layout.block_segments(source)
            if segments:
                kernels[source] = self.make_kernel(
                    segments, layout.num_rows, layout.num_rows, causal=source == layout.rank
                )
        return kernels

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, exchange: Exchange, cap: float
    ) -> tuple[Tensor, Tensor]:
        """Returns the output `[T, h, k]`, and log-sum-exps `[h, T]`."""
        layout = self.layout
        own = self._make_block(k, v)
        arriving = self._start_hop(1, {1: own, -1: own}, exchange)
        o, lse = self.kernels[layout.rank].forward(q, own[:, 0], own[:, 1], cap)
        # Partial results stay in fp32 until the end.
        o = o.to(lse.dtype)
        for hop in range(1, layout.num_hops + 1):
            blocks = arriving.wait()
            arriving = self._start_hop(hop + 1, blocks, exchange)
            for way, block in blocks.items():
                kernel = self.kernels.get(layout.source_of(way, hop))
                # Blocks that contribute nothing travel on all the same.
                if kernel is not None:
                    part = kernel.forward(q, block[:, 0], block[:, 1], cap)
                    o, lse = merge_attention(o, lse, *part)
        return o.to(q.dtype), lse

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
        layout = self.layout
        own = self._make_block(k, v)
        arriving = self._start_hop(1, {1: own, -1: own}, exchange)

        def run_kernel(source: int, block: Tensor) -> tuple[Tensor, Tensor] | None:
            kernel = self.kernels.get(source)
            if kernel is None:
                return None
            # Output and log-sum-exp of all blocks, not of this one.
            part, *grads = kernel.backward(dy, q, block[:, 0], block[:, 1], o, lse, cap)
            return part, torch.stack(grads, 1)

        home = run_kernel(layout.rank, own)
        assert home is not None, "a token sees itself"
        dq, total = home
        travelling: dict[int, Tensor] = {}
        returned: dict[int, Tensor] = {}
        gradients = _Moves([], exchange, layout, self.overlap)
        for hop in range(1, layout.num_hops + 1):
            blocks = arriving.wait()
            arriving = self._start_hop(hop + 1, blocks, exchange)
            shares = {}
            for way, block in blocks.items():
                found = run_kernel(layout.source_of(way, hop), block)
                if found is not None:
                    dq = dq + found[0]
                    shares[way] = found[1]
                else:
                    shares[way] = torch.zeros_like(total)
            travelling = gradients.wait()
            self._take_returned(hop - 1, travelling, returned)
            # The gradient of a block starts at the first rank that it visits.
            sums = {way: travelling[way] + x if hop > 1 else x for way, x in shares.items()}
            moves = [(move, sums[move.way]) for move in layout.gradient_moves(hop)]
            gradients = _Moves(moves, exchange, layout, self.overlap)
        self._take_returned(layout.num_hops, gradients.wait(), returned)
        # In a fixed order: home, blocks to the next ranks, blocks to the previous ones.
        for way in sorted(returned, reverse=True):
            total = total + returned[way]
        total = total.index_select(0, self._rows_on(k.device)[1])
        return dq.to(q.dtype), total[:, 0].to(k.dtype), total[:, 1].to(v.dtype)

    def _take_returned(
        self, hop: int, travelling: dict[int, Tensor], returned: dict[int, Tensor]
    ) -> None:
        """Moves the gradients that came home after their last hop."""
        for way in (1, -1):
            if hop > 0 and hop == self.layout.last_hop(way):
                returned[way] = travelling.pop(way)

    def _rows_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the row of each key of the block, and the key of each row."""
        if device not in self._rows:
            rows = self.layout.block_rows
            both = (_copy_to_device(some, device) for some in (rows, rows.argsort()))
            self._rows[device] = tuple(both)  # type: ignore[assignment]
        return self._rows[device]

    def _make_block(self, k: Tensor, v: Tensor) -> Tensor:
        """Returns the keys and values of this rank `[T, 2, g, k]`, ordered by document."""
        rows = self._rows_on(k.device)[0]
        return torch.stack([k.index_select(0, rows), v.index_select(0, rows)], 1)

    def _start_hop(self, hop: int, blocks: dict[int, Tensor], exchange: Exchange) -> _Moves:
        moves = [(move, blocks[move.way]) for move in self.layout.key_moves(hop)]
        return _Moves(moves, exchange, self.layout, self.overlap)


class _Moves:
    """Blocks of both ways that are sent in one all-to-all.

    Point-to-point messages of neighbours would block each other where both send first.
    """

    def __init__(
        self,
        moves: Sequence[tuple[RingMove, Tensor]],
        exchange: Exchange,
        layout: RingLayout,
        overlap: bool,
    ) -> None:
        size, rank = layout.num_ranks, layout.rank
        # Two blocks from one rank to another are in the order of moves, which is that of all ranks.
        receivers = sorted(((rank + move.offset) % size, i) for i, (move, _) in enumerate(moves))
        senders = sorted(((rank - move.offset) % size, i) for i, (move, _) in enumerate(moves))
        self.ways = [moves[i][0].way for _, i in senders]
        self.started: _Started | None = None
        if moves:
            send_counts = [0] * size
            receive_counts = [0] * size
            for (receiver, _), (sender, _) in zip(receivers, senders, strict=True):
                send_counts[receiver] += layout.num_rows
                receive_counts[sender] += layout.num_rows
            x = torch.cat([moves[i][1] for _, i in receivers])
            pending = exchange.all_to_all(x, send_counts, receive_counts)
            self.started = _Started(pending, overlap)

    def wait(self) -> dict[int, Tensor]:
        """Returns the block that came of each way, in the order of ways."""
        if self.started is None:
            return {}
        parts = zip(self.ways, self.started.wait().chunk(len(self.ways)), strict=True)
        return dict(sorted(parts, key=lambda one: -one[0]))


def merge_attention(
    o: Tensor, lse: Tensor, o_other: Tensor, lse_other: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns attention to two disjoint sets of keys from attention to each of them.

    l = log(exp(l1) + exp(l2)), o = o1 exp(l1 - l) + o2 exp(l2 - l); o: `[T, h, k]`, l: `[h, T]`.
    """
    total = torch.logaddexp(lse, lse_other)
    # For queries that see nothing, -inf minus -inf would be NaN.
    shift = total.masked_fill(total == float("-inf"), 0.0)
    first, second = ((x - shift).exp().T.unsqueeze(-1) for x in (lse, lse_other))
    return o * first + o_other.to(o.dtype) * second, total


# ---- ulysses ----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Ulysses:
    """Attention to all tokens of near ranks for a part of the heads, and to others by `far`.

    q, y: `[b, s/context, h, k]`; k, v: `[b, s/context, g, k]`; inside `[b, s·near/context, h/near,
    k]`. A kv head is sent to each rank that needs it; its gradients are summed.
    Communicates: all-to-all over the near ranks of q, k and v, and of the output; backward: the
    same, the other way; and what `far` communicates.
    """

    layout: UlyssesLayout
    make_kernel: SegmentKernelFactory
    overlap: bool = True
    _rows: dict[torch.device, tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False
    )

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        exchange: Exchange,
        cap: float = 0.0,
        run_once: RunOnce = run_always,
        prefix: Prefix | None = None,
        *,
        far_exchange: Exchange | None = None,
    ) -> Tensor:
        """Computes attention. exchange: between the near ranks. prefix: as in `KVGather.attend`."""
        near = self.layout.near
        if prefix is not None:
            # Every rank has the prefix of all heads, and attends for some of them.
            prefix_k, prefix_v = (_split_heads(x, near)[self.layout.near_rank] for x in prefix)
            prefix = (prefix_k, prefix_v)
        check_ulysses_heads(q.shape[2], k.shape[2], near)
        samples = q.shape[0]
        flat = (x.flatten(0, 1) for x in (q, k, v))  # (b·t, h, k)
        inside = _apply(_SwapHeadsIn, *flat, self, exchange, run_once)
        parts = inside.split(self.heads_inside((q.shape[2], k.shape[2], k.shape[2])), 1)
        some, keys, values = (x.unflatten(0, (samples, -1)) for x in parts)
        y = self.far.attend(some, keys, values, far_exchange or exchange, cap, run_once, prefix)
        out = _apply(_SwapHeadsOut, y.flatten(0, 1), self, exchange, run_once)
        return out.view(q.shape)

    def forward_rows(
        self, q: Tensor, k: Tensor, v: Tensor, exchange: Exchange, cap: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns the output of rows `[T, h, k]`, and what else `backward_rows` needs."""
        heads = [x.shape[1] for x in (q, k, v)]
        check_ulysses_heads(heads[0], heads[1], self.layout.near)
        rows = self.swap_heads_in(q, k, v, exchange)
        some, keys, values = rows.split(self.heads_inside(heads), 1)
        y, saved = self.far.forward_rows(some, keys, values, exchange, cap)
        return self.swap_heads_out(y, exchange), (rows, y, *saved)

    def backward_rows(
        self,
        dy: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        y: Tensor,
        saved: tuple[Tensor, ...],
        exchange: Exchange,
        cap: float,
    ) -> tuple[Tensor, ...]:
        """Returns the gradients of q, k and v. y: the output."""
        heads = [x.shape[1] for x in (q, k, v)]
        rows, inside, *rest = saved
        some, keys, values = rows.split(self.heads_inside(heads), 1)
        dy = self.send_gradient(dy, exchange)
        grads = self.far.backward_rows(dy, some, keys, values, inside, tuple(rest), exchange, cap)
        return self.return_gradients(torch.cat(grads, 1), heads, exchange)

    @cached_property
    def far(self) -> KVGather | Ring:
        """Attention of the tokens of all near ranks."""
        layout = self.layout.far
        if isinstance(layout, RingLayout):
            return Ring(layout, self.make_kernel, self.overlap)
        return KVGather(layout, self.make_kernel, self.overlap)

    def rows_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the received row of each row inside, and the inverse."""
        if device not in self._rows:
            rows = self.layout.merged_rows
            both = (_copy_to_device(some, device) for some in (rows, rows.argsort()))
            self._rows[device] = tuple(both)  # type: ignore[assignment]
        return self._rows[device]

    def exchange_rows(self, x: Tensor, exchange: Exchange) -> Tensor:
        """Sends part u of x `[near, T, ...]` to near rank u; returns the parts of all of them."""
        counts = [x.shape[1]] * self.layout.near
        return exchange.all_to_all(x.flatten(0, 1), counts, counts).wait().view(x.shape)

    def send_to_heads(self, x: Tensor, exchange: Exchange) -> Tensor:
        """Returns rows inside `[near·T, n, k]` of x `[near, T, n, k]`."""
        received = self.exchange_rows(x, exchange).flatten(0, 1)
        return received.index_select(0, self.rows_on(x.device)[0])

    def send_to_tokens(self, x: Tensor, exchange: Exchange) -> Tensor:
        """Returns `[near, T, n, k]` of rows inside; the inverse of `send_to_heads`."""
        rows = x.index_select(0, self.rows_on(x.device)[1])
        return self.exchange_rows(rows.unflatten(0, (self.layout.near, -1)), exchange)

    def heads_inside(self, heads: Sequence[int]) -> list[int]:
        """Returns the numbers of heads of q, k and v inside, of those of this rank."""
        near = self.layout.near
        return [max(count, near) // near for count in heads]

    def swap_heads_in(self, q: Tensor, k: Tensor, v: Tensor, exchange: Exchange) -> Tensor:
        """Returns rows inside with query, key and value heads, of rows `[T, n, k]`."""
        parts = torch.cat([_split_heads(x, self.layout.near) for x in (q, k, v)], 2)
        return self.send_to_heads(parts, exchange)

    def return_gradients(
        self, grad: Tensor, heads: Sequence[int], exchange: Exchange
    ) -> tuple[Tensor, ...]:
        """Returns the gradients of q, k and v, of those of `swap_heads_in`."""
        parts = self.send_to_tokens(grad, exchange).split(self.heads_inside(heads), 2)
        return tuple(_join_heads(part, count) for part, count in zip(parts, heads, strict=True))

    def swap_heads_out(self, y: Tensor, exchange: Exchange) -> Tensor:
        """Returns rows of this rank with all heads, of rows inside."""
        return _join_heads(self.send_to_tokens(y, exchange), y.shape[1] * self.layout.near)

    def send_gradient(self, dy: Tensor, exchange: Exchange) -> Tensor:
        """Returns the gradient of rows inside, of that of `swap_heads_out`."""
        parts = _split_heads(dy, self.layout.near)
        return self.send_to_heads(parts.contiguous(), exchange)


def _split_heads(x: Tensor, near: int) -> Tensor:
    """Returns `[near, T, n/near, k]` of `[T, n, k]`; with fewer heads than parts, copies."""
    if x.shape[1] < near:
        x = x.repeat_interleave(near // x.shape[1], 1)
    parts: Tensor = x.unflatten(1, (near, -1))
    return parts.transpose(0, 1)


def _join_heads(x: Tensor, heads: int) -> Tensor:
    """Returns `[T, n, k]` of `[near, T, n/near, k]`; copies of a head are summed."""
    x = x.transpose(0, 1).flatten(1, 2)  # (T, near or n, k)
    if x.shape[1] == heads:
        return x
    parts: Tensor = x.unflatten(1, (heads, -1))
    return parts.to(accumulation_dtype(x.dtype)).sum(2).to(x.dtype)


class _SwapHeadsIn(torch.autograd.Function):
    """Rows inside with query, key and value heads `[near·T, h/near + 2 g/near, k]`."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        how: Ulysses,
        exchange: Exchange,
        run_once: RunOnce,
    ) -> Tensor:
        ctx.how = how
        ctx.exchange = exchange
        ctx.heads = [x.shape[1] for x in (q, k, v)]
        return run_once(lambda: (how.swap_heads_in(q, k, v, exchange),))[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.how.return_gradients(grad, ctx.heads, ctx.exchange)
        return *grads, None, None, None


class _SwapHeadsOut(torch.autograd.Function):
    """Rows of this rank with all heads `[T, h, k]` from rows inside."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, how: Ulysses, exchange: Exchange, run_once: RunOnce) -> Tensor:
        ctx.how = how
        ctx.exchange = exchange
        return run_once(lambda: (how.swap_heads_out(y, exchange),))[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.how.send_gradient(dy, ctx.exchange), None, None, None


# ---- a prefix that all tokens see -------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PrefixedAttention:
    """Attention of rows to keys of tokens and, on each rank, to the prefix of their sample.

    Both are merged by log-sum-exps; backward uses those of all keys, so that each part computes its
    gradients alone.
    """

    core: RowAttention
    make_kernel: SegmentKernelFactory
    num_samples: int

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prefix_k: Tensor,
        prefix_v: Tensor,
        exchange: Exchange,
        cap: float,
    ) -> tuple[Tensor, Tensor]:
        """Returns the output `[T, h, k]`, and log-sum-exps `[h, T]`; prefixes: `[b·n, g, k]`."""
        o, lse = self.core.forward(q, k, v, exchange, cap)
        part = self._prefix_kernel(q, prefix_k).forward(q, prefix_k, prefix_v, cap)
        o, lse = merge_attention(o.to(lse.dtype), lse, *part)
        return o.to(q.dtype), lse

    def backward(
        self,
        dy: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prefix_k: Tensor,
        prefix_v: Tensor,
        o: Tensor,
        lse: Tensor,
        exchange: Exchange,
        cap: float,
    ) -> tuple[Tensor, ...]:
        """Returns the gradients of q, k, v and of both prefixes."""
        dq, dk, dv = self.core.backward(dy, q, k, v, o, lse, exchange, cap)
        kernel = self._prefix_kernel(q, prefix_k)
        part, *grads = kernel.backward(dy, q, prefix_k, prefix_v, o, lse, cap)
        prefix_grads = (grad.to(prefix_k.dtype) for grad in grads)
        return (dq.to(part.dtype) + part).to(q.dtype), dk, dv, *prefix_grads

    def _prefix_kernel(self, q: Tensor, prefix_k: Tensor) -> SegmentKernel:
        rows = q.shape[0] // self.num_samples
        keys = prefix_k.shape[0] // self.num_samples
        samples = range(self.num_samples)
        pairs = tuple(
            SegmentRows(i * rows, (i + 1) * rows, i * keys, (i + 1) * keys) for i in samples
        )
        return self.make_kernel(pairs, q.shape[0], prefix_k.shape[0], causal=False)


# ---- autograd ---------------------------------------------------------------------------


class _CoreFunction(torch.autograd.Function):
    """Attention of rows `[T, h, k]` by a core; keeps the output and the log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        core: RowAttention | PrefixedAttention,
        exchange: Exchange,
        cap: float,
        run_once: RunOnce,
        *rows: Tensor,
    ) -> Tensor:
        attend: Callable[..., tuple[Tensor, ...]] = core.forward
        o, lse = run_once(lambda: attend(*rows, exchange, cap))
        ctx.save_for_backward(*rows, o, lse)
        ctx.core = core
        ctx.exchange = exchange
        ctx.cap = cap
        return o

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.core.backward(dy, *ctx.saved_tensors, ctx.exchange, ctx.cap)
        return None, None, None, None, *grads


def _apply_core(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    core: RowAttention | PrefixedAttention,
    exchange: Exchange,
    cap: float,
    run_once: RunOnce,
    prefix: Prefix | None,
) -> Tensor:
    """Applies a core to samples. q, y: `[b, t, h, k]`; k, v: `[b, t, g, k]`."""
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    y = _apply(_CoreFunction, core, exchange, cap, run_once, *rows, *(prefix or ()))
    return y.view(q.shape)


def _apply(function: Any, *arguments: Any) -> Tensor:
    y: Tensor = function.apply(*arguments)
    return y


def build_context_attention(
    layout: Layout, make_kernel: SegmentKernelFactory, overlap: bool = True
) -> KVGather | Ring | Ulysses:
    """Returns the attention with a layout."""
    if isinstance(layout, RingLayout):
        return Ring(layout, make_kernel, overlap)
    if isinstance(layout, UlyssesLayout):
        return Ulysses(layout, make_kernel, overlap)
    return KVGather(layout, make_kernel, overlap)
