"""Attention of segments of queries to segments of keys of other lengths, with log-sum-exps.

A rank of the context axis has some segments of a document's queries, and keys of the same document
from other ranks. The last query of a segment is aligned with the last key of its key segment, as in
the varlen kernels of flash attention ("bottom right"). Log-sum-exps make results over parts of the
keys mergeable; backward takes the output and the log-sum-exp over all keys. Queries that see no key
have o = 0 and a log-sum-exp of -inf.

bf16 and fp16 on CUDA use torch's flash attention kernel, and FlexAttention with a soft cap.
Everything else is computed in chunks of queries, so that no tensor contains all scores. Plain
PyTorch; imports only torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ranvier.models.document_attention import KERNEL_DTYPES, can_use_flash_kernel
from ranvier.models.segment_flex_attention import FlexAttention, compiled_flex_attention

SegmentPair = tuple[int, int, int, int]
"""First row and end of a segment of queries, first row and end of the keys that it attends to."""
MAX_SCORES = 1 << 22
"""Number of scores that are computed at a time, unless one query has more."""
MAX_CHUNK = 256
"""Number of queries of a chunk. Later chunks see more keys, so long chunks would waste work."""
PADDING = 16
"""Short key segments are padded to multiples of this number, to be computed together."""

_Rows = slice | Tensor
"""Consecutive rows, or row numbers `[n, length]`."""


@dataclass(frozen=True, eq=False)
class SegmentAttention:
    """Attention of some segments of queries to one segment of keys each.

    Segments of queries must not overlap; segments of keys may.
    """

    pairs: tuple[SegmentPair, ...]
    """Rows of the queries, and of their keys; neither may be empty."""
    num_queries: int
    """Rows of q. Those in no pair see nothing."""
    num_keys: int
    """Rows of k and v."""
    causal: bool = True
    """Whether the last query of a segment sees all its keys, the one before all but one, ...;
    otherwise all queries see all keys."""
    window: int = 0
    """Number of keys that a query sees, including the one that is aligned with it; 0: all."""
    _chunks: dict[tuple[torch.device, int], list[_Chunks]] = field(
        default_factory=dict, init=False, repr=False
    )
    _kernel_calls: dict[torch.device, list[_KernelCall]] = field(
        default_factory=dict, init=False, repr=False
    )
    _flex: dict[torch.device, FlexAttention] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        assert self.causal or not self.window, "a window needs causal attention"
        for a, b, c, d in self.pairs:
            assert 0 <= a < b <= self.num_queries and 0 <= c < d <= self.num_keys, (a, b, c, d)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cap: float = 0.0) -> tuple[Tensor, Tensor]:
        """Returns the output, and the log-sum-exps of scores.

        o = softmax(S) v, S = q kᵀ / √n; with a cap c, S = c tanh(q kᵀ / (√n c)).
        q, o: `[T_q, h, k]`; k, v: `[T_k, g, k]`; log-sum-exps: `[h, T_q]` in fp32, or float64 for
        float64. o has the dtype of q from kernels, and that of the log-sum-exps otherwise.
        """
        if can_use_flash_kernel(q):
            if cap > 0.0:
                return self.flex_attention(q.device).forward(q, k, v, cap)
            return self._run_kernel_forward(q, k, v)
        dtype = accumulation_dtype(q.dtype)
        o = q.new_zeros(q.shape, dtype=dtype)
        lse = q.new_full((q.shape[1], q.shape[0]), float("-inf"), dtype=dtype)
        for chunk in self._make_chunks(q):
            a = _load_queries(q, chunk.queries, k.shape[1])
            scores = chunk.masked_scores(a, _load_keys(k, chunk.keys), cap)
            sums = torch.logsumexp(scores, -1)  # (n, g, h/g · length)
            # A row of -inf minus 0 is a row of zeros; minus -inf it would be NaN.
            shift = sums.masked_fill(sums == float("-inf"), 0.0)
            p = scores.sub_(shift.unsqueeze(-1)).exp_()
            _store_queries(o, chunk.queries, p @ _load_keys(v, chunk.keys))
            _store_queries(lse.T.unsqueeze(-1), chunk.queries, sums.unsqueeze(-1))
        return o, lse

    def backward(
        self,
        dy: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        cap: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of q, k and v from these keys.

        o, lse: of all keys of the queries, which may be more than these.
        P = exp(S - lse), δ = Σ dy o, dS = P (dy vᵀ - δ), dv = Pᵀ dy; with a cap c,
        dT = dS (1 - (S/c)²), otherwise dT = dS; dq = dT k / √n, dk = dTᵀ q / √n.
        dq: `[T_q, h, k]`; dk, dv: `[T_k, g, k]`, in fp32, or float64 for float64.
        """
        if can_use_flash_kernel(q):
            if cap > 0.0:
                return self.flex_attention(q.device).backward(dy, q, k, v, o, lse, cap)
            return self._run_kernel_backward(dy, q, k, v, o, lse)
        dtype = accumulation_dtype(q.dtype)
        dq, dk, dv = (x.new_zeros(x.shape, dtype=dtype) for x in (q, k, v))
        kv_heads = k.shape[1]
        for chunk in self._make_chunks(q):
            a, d, out = (_load_queries(x, chunk.queries, kv_heads) for x in (q, dy, o))
            b, c = (_load_keys(x, chunk.keys) for x in (k, v))
            sums = _load_queries(lse.T.unsqueeze(-1), chunk.queries, kv_heads)
            scores = chunk.masked_scores(a, b, cap)
            # Rows that see nothing have probabilities of 0.
            p = (scores - sums.masked_fill(sums == float("-inf"), float("inf"))).exp_()
            delta = (d * out).sum(-1, keepdim=True)
            ds = (d @ c.transpose(-1, -2)).sub_(delta).mul_(p).mul_(q.shape[-1] ** -0.5)
            if cap > 0.0:
                # Masked scores are infinite, and their probabilities 0.
                ds.mul_(1.0 - (scores.masked_fill_(p == 0.0, 0.0) / cap) ** 2)
            _store_queries(dq, chunk.queries, ds @ b)
            # Rows are those of all query heads of a kv head, so products are sums over them.
            _add_keys(dk, chunk.keys, ds.transpose(-1, -2) @ a)
            _add_keys(dv, chunk.keys, p.transpose(-1, -2) @ d)
        return dq, dk, dv

    # ---- chunks of queries ----------------------------------------------------------------------

    def _make_chunks(self, q: Tensor) -> list[_Chunks]:
        """Returns chunks of queries with their keys; those of equal size are computed together."""
        key = (q.device, q.shape[1])
        if key not in self._chunks:
            groups: dict[tuple[int, int], list[SegmentPair]] = {}
            for pair in self.pairs:
                for one in _cut_into_chunks(pair, q.shape[1], self.causal, self.window):
                    start, stop, first, end = one
                    width = min(-(-(end - first) // PADDING) * PADDING, self.num_keys)
                    if end - first > MAX_CHUNK:
                        width = end - first
                    groups.setdefault((stop - start, width), []).append(one)
            self._chunks[key] = [
                _Chunks.from_pairs(some, width, self, q.device)
                for (length, width), pairs in groups.items()
                for some in _batches(pairs, MAX_SCORES // (q.shape[1] * length * width))
            ]
        return self._chunks[key]

    # ---- the kernel -----------------------------------------------------------------------------

    def _run_kernel_forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = map(_contiguous_heads, (q, k, v))
        o, lse = None, None
        for call in self._make_kernel_calls(q.device):
            part, sums, *_ = torch.ops.aten._flash_attention_forward(
                call.queries.load(q),
                call.keys.load(k),
                call.keys.load(v),
                *call.bounds,
                0.0,
                self.causal,
                False,
                **self._kernel_window,
            )
            # The kernel returns +inf for queries that see nothing.
            sums = sums.masked_fill(sums == float("inf"), float("-inf"))
            if call.queries.is_everything(self.num_queries):
                return part, sums
            if o is None or lse is None:
                o = torch.zeros_like(q)
                lse = q.new_full((q.shape[1], q.shape[0]), float("-inf"), dtype=torch.float32)
            call.queries.store(o, part)
            call.queries.store(lse.T, sums.T)
        if o is None or lse is None:
            return torch.zeros_like(q), q.new_full(
                (q.shape[1], q.shape[0]), float("-inf"), dtype=torch.float32
            )
        return o, lse

    def _run_kernel_backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dy, q, k, v, o = map(_contiguous_heads, (dy.to(q.dtype), q, k, v, o.to(q.dtype)))
        # With +inf the probabilities of queries that see nothing are 0.
        lse = lse.masked_fill(lse == float("-inf"), float("inf"))
        dq, dk, dv = (x.new_zeros(x.shape, dtype=torch.float32) for x in (q, k, v))
        # Without dropout the random state is not used.
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        none = torch.empty(0, device=q.device)
        for call in self._make_kernel_calls(q.device):
            some = torch.ops.aten._flash_attention_backward(
                call.queries.load(dy),
                call.queries.load(q),
                call.keys.load(k),
                call.keys.load(v),
                call.queries.load(o),
                call.queries.load(lse.T).T.contiguous(),
                *call.bounds,
                0.0,
                self.causal,
                state,
                none,
                **self._kernel_window,
            )
            call.queries.store(dq, some[0])
            call.keys.add(dk, some[1])
            call.keys.add(dv, some[2])
        return dq, dk, dv

    def flex_attention(
        self, device: torch.device, kernel: Callable[..., Any] | None = None
    ) -> FlexAttention:
        """Returns FlexAttention to the same keys. kernel: by default the compiled one."""
        if device not in self._flex:
            first = torch.zeros(self.num_queries, dtype=torch.int32)
            end = torch.zeros(self.num_queries, dtype=torch.int32)
            for start, stop, lowest, highest in self.pairs:
                end[start:stop] = highest
                if self.causal:
                    end[start:stop] -= torch.arange(stop - start - 1, -1, -1, dtype=torch.int32)
                first[start:stop] = lowest
                if self.window:
                    first[start:stop] = (end[start:stop] - self.window).clamp(min=lowest)
            # A query may be aligned with a place before the first key.
            end = torch.maximum(first, end)
            self._flex[device] = FlexAttention(
                first.to(device), end.to(device), self.num_keys, kernel or compiled_flex_attention()
            )
        return self._flex[device]

    @cached_property
    def _kernel_window(self) -> dict[str, int]:
        if not self.window:
            return {}
        # The kernel does not count the query itself.
        return {"window_size_left": self.window - 1, "window_size_right": 0}

    def _make_kernel_calls(self, device: torch.device) -> list[_KernelCall]:
        """Returns calls of the kernel, of which each has about as many rows of keys as there are.

        The kernel needs the keys of each segment one after the other, so that keys which several
        segments share would be in memory as often.
        """
        if device not in self._kernel_calls:
            total = sum(pair[3] - pair[2] for pair in self.pairs)
            num_calls = -(-total // max(self.num_keys, 1))
            limit = -(-total // max(num_calls, 1))
            calls: list[list[SegmentPair]] = []
            rows = 0
            for pair in self.pairs:
                length = pair[3] - pair[2]
                if not calls or rows + length > limit:
                    calls.append([])
                    rows = 0
                calls[-1].append(pair)
                rows += length
            self._kernel_calls[device] = [_KernelCall.from_pairs(some, device) for some in calls]
        return self._kernel_calls[device]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of partial results: fp32 for bf16 and fp16."""
    if dtype in KERNEL_DTYPES:
        return torch.float32
    return dtype


def _cut_into_chunks(
    pair: SegmentPair, heads: int, causal: bool, window: int
) -> Iterator[SegmentPair]:
    """Yields parts of a segment of queries with the keys that they see."""
    start, stop, first, end = pair
    while start < stop:
        length = min(MAX_CHUNK, stop - start, max(MAX_SCORES // (heads * (end - first)), 1))
        middle = start + length
        if not causal:
            yield start, middle, first, end
        else:
            # The last query of the part sees keys up to `last`, its first one from `lowest` on.
            last = end - (stop - middle)
            lowest = max(first, last - length + 1 - window) if window else first
            if last > lowest:
                yield start, middle, lowest, last
        start = middle


def _batches(pairs: list[SegmentPair], size: int) -> Iterator[list[SegmentPair]]:
    size = max(size, 1)
    for i in range(0, len(pairs), size):
        yield pairs[i : i + size]


@dataclass(frozen=True, eq=False)
class _Chunks:
    """Chunks of equally many queries, whose keys are padded to equal lengths."""

    queries: _Rows
    keys: _Rows
    unseen: Tensor | None
    """Whether a query does not see a key, `[n, 1, 1, length, width]`; None if all are seen."""

    @classmethod
    def from_pairs(
        cls, pairs: list[SegmentPair], width: int, how: SegmentAttention, device: torch.device
    ) -> _Chunks:
        start, stop, first, end = pairs[0]
        length = stop - start
        if len(pairs) == 1:
            # Views instead of copies.
            width = end - first
            queries: _Rows = slice(start, stop)
            keys: _Rows = slice(first, end)
        else:
            table = torch.tensor(pairs, device=device)
            queries = table[:, :1] + torch.arange(length, device=device)
            # Padding repeats the last key.
            keys = torch.minimum(
                table[:, 2:3] + torch.arange(width, device=device), table[:, 3:] - 1
            )
        if not how.causal and all(d - c == width for _, _, c, d in pairs):
            return cls(queries, keys, None)
        lengths = torch.tensor([d - c for _, _, c, d in pairs], device=device)[:, None, None]
        number = torch.arange(width, device=device)
        unseen = (number >= lengths).expand(-1, length, -1)
        if how.causal:
            # Number of the key that each query is aligned with.
            own = lengths - length + torch.arange(length, device=device)[:, None]
            unseen = unseen | (number > own)
            if how.window:
                unseen = unseen | (number <= own - how.window)
        return cls(queries, keys, unseen[:, None, None])

    def masked_scores(self, q: Tensor, k: Tensor, cap: float) -> Tensor:
        """Returns scores `[n, g, h/g · length, width]`, -inf for keys that are not seen."""
        scores = (q @ k.transpose(-1, -2)).mul_(q.shape[-1] ** -0.5)
        if cap > 0.0:
            scores.div_(cap).tanh_().mul_(cap)
        if self.unseen is not None:
            scores.unflatten(2, (-1, self.unseen.shape[-2])).masked_fill_(
                self.unseen, float("-inf")
            )
        return scores


def _load_queries(x: Tensor, rows: _Rows, kv_heads: int) -> Tensor:
    """Returns rows of x `[T_q, h, k]` as `[n, g, h/g · length, k]`, for partial results."""
    some = x[rows]
    if isinstance(rows, slice):
        some = some.unsqueeze(0)
    some = some.to(accumulation_dtype(x.dtype)).unflatten(2, (kv_heads, -1))
    folded: Tensor = some.permute(0, 2, 3, 1, 4).flatten(2, 3)
    return folded


def _store_queries(x: Tensor, rows: _Rows, value: Tensor) -> None:
    """Stores `[n, g, h/g · length, k]` in rows of x; the inverse of `_load_queries`."""
    length = rows.stop - rows.start if isinstance(rows, slice) else rows.shape[1]
    value = value.unflatten(2, (-1, length)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    x[rows] = value[0] if isinstance(rows, slice) else value


def _load_keys(x: Tensor, rows: _Rows) -> Tensor:
    """Returns rows of x `[T_k, g, k]` as `[n, g, width, k]`, for partial results."""
    some = x[rows]
    if isinstance(rows, slice):
        some = some.unsqueeze(0)
    return some.to(accumulation_dtype(x.dtype)).transpose(1, 2)


def _add_keys(x: Tensor, rows: _Rows, value: Tensor) -> None:
    """Adds `[n, g, width, k]` to rows of x, which may occur more than once."""
    value = value.transpose(1, 2)
    if isinstance(rows, slice):
        x[rows] += value[0]
    else:
        x.index_add_(0, rows.flatten(), value.flatten(0, 1))


@dataclass(frozen=True)
class _RowRanges:
    """Ranges of rows of a tensor that a kernel gets one after the other."""

    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def from_segments(cls, segments: Sequence[tuple[int, int]]) -> _RowRanges:
        """Joins segments that follow each other, as one range is a view and not a copy."""
        ranges: list[tuple[int, int]] = []
        for start, stop in segments:
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            else:
                ranges.append((start, stop))
        return cls(tuple(ranges))

    def is_everything(self, num_rows: int) -> bool:
        return self.ranges == ((0, num_rows),)

    def load(self, x: Tensor) -> Tensor:
        if len(self.ranges) == 1:
            return x[slice(*self.ranges[0])]
        return torch.cat([x[start:stop] for start, stop in self.ranges])

    def store(self, x: Tensor, value: Tensor) -> None:
        for (start, stop), part in self._split(value):
            x[start:stop] = part

    def add(self, x: Tensor, value: Tensor) -> None:
        """Adds to x range by range, so that the order of sums does not change."""
        for (start, stop), part in self._split(value):
            x[start:stop] += part

    def _split(self, value: Tensor) -> Iterator[tuple[tuple[int, int], Tensor]]:
        lengths = [stop - start for start, stop in self.ranges]
        return zip(self.ranges, value.split(lengths), strict=True)


@dataclass(frozen=True, eq=False)
class _KernelCall:
    """One call of the varlen kernel."""

    queries: _RowRanges
    keys: _RowRanges
    bounds: tuple[Tensor, Tensor, int, int]
    """cu_seqlens of queries and keys, and the longest of each."""

    @classmethod
    def from_pairs(cls, pairs: list[SegmentPair], device: torch.device) -> _KernelCall:
        segments = [[(a, b) for a, b, _, _ in pairs], [(c, d) for _, _, c, d in pairs]]
        lengths = [[stop - start for start, stop in some] for some in segments]
        bounds = torch.tensor(
            [[*accumulate(some, initial=0)] for some in lengths], dtype=torch.int32
        )
        if device.type == "cuda":
            # Pinned memory makes the copy asynchronous.
            bounds = bounds.pin_memory()
        on_device = bounds.to(device, non_blocking=True)
        queries, keys = map(_RowRanges.from_segments, segments)
        longest, longest_keys = map(max, lengths)
        return cls(queries, keys, (on_device[0], on_device[1], longest, longest_keys))


def _contiguous_heads(x: Tensor) -> Tensor:
    """Returns x with contiguous heads, as the kernel requires."""
    if x.stride(-1) == 1 and x.stride(-2) == x.shape[-1]:
        return x
    return x.contiguous()
