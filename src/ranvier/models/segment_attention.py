"""Attention of segments of queries to segments of keys of other lengths, with log-sum-exps.

A rank of the context axis has some segments of a document's queries, and keys of the same document
from other ranks. The last query of a segment is aligned with the last key of its key segment, as in
the varlen kernels of flash attention ("bottom right"). Log-sum-exps make results over parts of the
keys mergeable; backward takes the output and the log-sum-exp over all keys. Queries that see no key
have o = 0 and a log-sum-exp of -inf.

bf16 and fp16 on CUDA use cuDNN's kernel for long segments of round lengths, torch's flash attention
kernel for all others, and FlexAttention with a soft cap.
Everything else is computed in chunks of queries, so that no tensor contains all scores. Plain
PyTorch; imports only torch.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ranvier.models.document_attention import (
    KERNEL_DTYPES,
    can_use_flash_kernel,
    contiguous_heads,
    kernel_window,
)
from ranvier.models.segment_flex_attention import (
    FlexAttention,
    compiled_flex_attention,
    heads_first,
)

SegmentPair = tuple[int, int, int, int]
"""First row and end of a segment of queries, first row and end of the keys that it attends to."""
MAX_SCORES = 1 << 22
"""Number of scores that are computed at a time, unless one query has more."""
MAX_CHUNK = 256
"""Number of queries of a chunk. Later chunks see more keys, so long chunks would waste work."""
PADDING = 16
"""Short key segments are padded to multiples of this number, to be computed together."""

DENSE_MULTIPLE = 1024
"""cuDNN compiles a kernel for each shape, so it gets only lengths that are multiples of this number
and will occur again."""
MIN_DENSE_QUERIES = 2048
"""Shorter segments are faster together, in one call of the varlen kernel."""

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
    _kernel_calls: dict[tuple[torch.device, bool], _KernelCalls] = field(
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
        calls = self._make_kernel_calls(q)
        o, lse = None, None
        for call in calls.varlen:
            some, keys, values = map(
                contiguous_heads, (call.queries.load(q), call.keys.load(k), call.keys.load(v))
            )
            part, sums, *_ = torch.ops.aten._flash_attention_forward(
                some,
                keys,
                values,
                *call.bounds,
                0.0,
                self.causal,
                False,
                **kernel_window(self.window),
            )
            # The kernel returns +inf for queries that see nothing.
            sums = sums.masked_fill(sums == float("inf"), float("-inf"))
            if call.queries.is_everything(self.num_queries):
                return part, sums
            if o is None or lse is None:
                o, lse = _empty_results(q)
            call.queries.store(o, part)
            call.queries.store(lse.T, sums.T)
        if o is None or lse is None:
            o, lse = _empty_results(q)
        for dense in calls.dense:
            o[dense.queries], lse[:, dense.queries] = dense.forward(q, k, v)
        return o, lse

    def _run_kernel_backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dy, o = dy.to(q.dtype), o.to(q.dtype)
        # With +inf the probabilities of queries that see nothing are 0.
        lse = lse.masked_fill(lse == float("-inf"), float("inf"))
        dq, dk, dv = (x.new_zeros(x.shape, dtype=torch.float32) for x in (q, k, v))
        # Without dropout the random state is not used.
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        none = torch.empty(0, device=q.device)
        calls = self._make_kernel_calls(q)
        for call in calls.varlen:
            queries, keys = call.queries, call.keys
            rows = (queries.load(dy), queries.load(q), keys.load(k), keys.load(v), queries.load(o))
            some = torch.ops.aten._flash_attention_backward(
                *map(contiguous_heads, rows),
                queries.load(lse.T).T.contiguous(),
                *call.bounds,
                0.0,
                self.causal,
                state,
                none,
                **kernel_window(self.window),
            )
            queries.store(dq, some[0])
            keys.add(dk, some[1])
            keys.add(dv, some[2])
        for dense in calls.dense:
            dense.backward(dy, q, k, v, o, lse, (dq, dk, dv))
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

    def _make_kernel_calls(self, q: Tensor) -> _KernelCalls:
        """Returns calls of kernels, which together compute all segments.

        The varlen kernel needs the keys of each segment one after the other. Segments of a call
        share no keys, so that each is in memory once more at most, and has one gradient.
        """
        use_cudnn = not self.window and can_use_cudnn_kernel(q)
        key = (q.device, use_cudnn)
        if key not in self._kernel_calls:
            dense: list[_DenseSegment] = []
            calls: list[_DisjointPairs] = []
            for pair in self.pairs:
                if use_cudnn and _is_dense(pair, self.causal):
                    dense.append(_DenseSegment.from_pair(pair, self.causal))
                elif not any(call.add(pair) for call in calls):
                    calls.append(_DisjointPairs())
                    calls[-1].add(pair)
            varlen = [_KernelCall.from_pairs(call.pairs, q.device) for call in calls]
            self._kernel_calls[key] = _KernelCalls(varlen, dense)
        return self._kernel_calls[key]


class _DisjointPairs:
    """Segments that share no keys."""

    def __init__(self) -> None:
        self.pairs: list[SegmentPair] = []
        self.bounds: list[tuple[int, int]] = []

    def add(self, pair: SegmentPair) -> bool:
        """Adds a segment, unless it shares keys with another one; returns whether it did."""
        first, end = pair[2:]
        place = bisect.bisect_left(self.bounds, (first, end))
        if place and self.bounds[place - 1][1] > first:
            return False
        if place < len(self.bounds) and self.bounds[place][0] < end:
            return False
        self.bounds.insert(place, (first, end))
        self.pairs.append(pair)
        return True


def can_use_cudnn_kernel(q: Tensor) -> bool:
    """Whether cuDNN's kernel is used for queries `[T, h, k]`, which the flash kernel supports."""
    # Older GPUs are as fast with the flash kernel, and gradients of cuDNN are sums in any order.
    return (
        q.device.type == "cuda"
        and torch.backends.cudnn.is_available()
        and torch.cuda.get_device_capability(q.device) >= (9, 0)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 128
        and not torch.are_deterministic_algorithms_enabled()
    )


def _is_dense(pair: SegmentPair, causal: bool) -> bool:
    """Whether a segment is long, and its lengths are round."""
    queries, keys = pair[1] - pair[0], pair[3] - pair[2]
    return (
        queries >= MIN_DENSE_QUERIES
        and queries % DENSE_MULTIPLE == 0
        and keys % DENSE_MULTIPLE == 0
        and (keys >= queries or not causal)
    )


def _empty_results(q: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the output and log-sum-exps of queries that see nothing."""
    lse = q.new_full((q.shape[1], q.shape[0]), float("-inf"), dtype=torch.float32)
    return torch.zeros_like(q, memory_format=torch.contiguous_format), lse


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
    length: int
    """Number of queries of a chunk."""
    width: int
    """Number of keys of a chunk, with padding."""
    num_keys: Tensor | None
    """Number of keys of each chunk without padding, `[n, 1, 1]`; None if all queries see all."""
    causal: bool
    window: int

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
        num_keys = None
        if how.causal or any(d - c < width for _, _, c, d in pairs):
            num_keys = torch.tensor([d - c for _, _, c, d in pairs], device=device)[:, None, None]
        return cls(queries, keys, length, width, num_keys, how.causal, how.window)

    def _find_unseen(self, num_keys: Tensor) -> Tensor:
        """Returns whether a query does not see a key, `[n, 1, 1, length, width]`.

        Masks of all chunks together would have half as many elements as there are scores, so that
        of a chunk is built when it is needed.
        """
        number = torch.arange(self.width, device=num_keys.device)
        unseen = (number >= num_keys).expand(-1, self.length, -1)
        if self.causal:
            # Number of the key that each query is aligned with.
            place = torch.arange(self.length, device=num_keys.device)[:, None]
            own = num_keys - self.length + place
            unseen = unseen | (number > own)
            if self.window:
                unseen = unseen | (number <= own - self.window)
        return unseen[:, None, None]

    def masked_scores(self, q: Tensor, k: Tensor, cap: float) -> Tensor:
        """Returns scores `[n, g, h/g · length, width]`, -inf for keys that are not seen."""
        scores = (q @ k.transpose(-1, -2)).mul_(q.shape[-1] ** -0.5)
        if cap > 0.0:
            scores.div_(cap).tanh_().mul_(cap)
        if self.num_keys is not None:
            unseen = self._find_unseen(self.num_keys)
            scores.unflatten(2, (-1, self.length)).masked_fill_(unseen, float("-inf"))
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


@dataclass(frozen=True, eq=False)
class _KernelRows:
    """Different rows of a tensor, which a kernel gets one after the other."""

    rows: slice | Tensor
    """Consecutive rows, which are not copied, or their numbers."""

    @classmethod
    def from_segments(
        cls, segments: Sequence[tuple[int, int]], device: torch.device
    ) -> _KernelRows:
        if all(one[1] == other[0] for one, other in itertools.pairwise(segments)):
            return cls(slice(segments[0][0], segments[-1][1]))
        numbers = torch.cat([torch.arange(*segment) for segment in segments])
        return cls(_copy_to_device(numbers, device))

    def is_everything(self, num_rows: int) -> bool:
        return self.rows == slice(0, num_rows) if isinstance(self.rows, slice) else False

    def load(self, x: Tensor) -> Tensor:
        if isinstance(self.rows, slice):
            return x[self.rows]
        return x.index_select(0, self.rows)

    def store(self, x: Tensor, value: Tensor) -> None:
        if isinstance(self.rows, slice):
            x[self.rows] = value
        else:
            x.index_copy_(0, self.rows, value.to(x.dtype))

    def add(self, x: Tensor, value: Tensor) -> None:
        if isinstance(self.rows, slice):
            x[self.rows] += value
        else:
            x.index_add_(0, self.rows, value.to(x.dtype))


def _copy_to_device(x: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":
        # Pinned memory makes the copy asynchronous.
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class _KernelCalls:
    """Calls that compute all segments."""

    varlen: list[_KernelCall]
    dense: list[_DenseSegment]


@dataclass(frozen=True)
class _DenseSegment:
    """A segment of queries by cuDNN's kernel.

    Its causal mask is aligned with the first key, not with the last one. So the keys are parts: a
    square with a causal mask, and keys before it, all of which are seen.
    """

    queries: slice
    parts: tuple[tuple[slice, bool], ...]
    """Keys, and whether they have a causal mask."""

    @classmethod
    def from_pair(cls, pair: SegmentPair, causal: bool) -> _DenseSegment:
        start, stop, first, end = pair
        square = end - (stop - start) if causal else end
        parts = [(slice(square, end), True)] if causal else []
        if first < square:
            parts.append((slice(first, square), False))
        return cls(slice(start, stop), tuple(parts))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the output `[n, h, k]`, in fp32 if it has parts, and log-sum-exps `[h, n]`."""
        some = heads_first(q[self.queries])
        o, lse = None, None
        for keys, causal in self.parts:
            part, sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
                some, heads_first(k[keys]), heads_first(v[keys]), None, True, 0.0, causal
            )
            part, sums = part[0].transpose(0, 1), sums[0, :, :, 0]
            if o is None or lse is None:
                o, lse = part, sums
                continue
            total = torch.logaddexp(lse, sums)
            first, second = ((x - total).exp().T.unsqueeze(-1) for x in (lse, sums))
            o = (o * first).add_(part * second)
            lse = total
        assert o is not None and lse is not None
        return o, lse

    def backward(
        self,
        dy: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        grads: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Adds to the gradients of q, k and v."""
        rows = self.queries
        grad, some, out = (heads_first(x[rows]) for x in (dy, q, o))
        sums = lse[None, :, rows, None].contiguous()
        # Without dropout the random state is not used.
        state = torch.zeros((), dtype=torch.int64, device=q.device)
        lengths = rows.stop - rows.start
        for keys, causal in self.parts:
            found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                grad,
                some,
                heads_first(k[keys]),
                heads_first(v[keys]),
                out,
                sums,
                state,
                state,
                None,
                None,
                None,
                lengths,
                keys.stop - keys.start,
                0.0,
                causal,
            )
            for total, part, where in zip(grads, found, (rows, keys, keys), strict=True):
                total[where] += part[0].transpose(0, 1)


@dataclass(frozen=True, eq=False)
class _KernelCall:
    """One call of the varlen kernel."""

    queries: _KernelRows
    keys: _KernelRows
    bounds: tuple[Tensor, Tensor, int, int]
    """cu_seqlens of queries and keys, and the longest of each."""

    @classmethod
    def from_pairs(cls, pairs: list[SegmentPair], device: torch.device) -> _KernelCall:
        segments = [[(a, b) for a, b, _, _ in pairs], [(c, d) for _, _, c, d in pairs]]
        lengths = [[stop - start for start, stop in some] for some in segments]
        bounds = torch.tensor(
            [[*itertools.accumulate(some, initial=0)] for some in lengths], dtype=torch.int32
        )
        on_device = _copy_to_device(bounds, device)
        queries, keys = (_KernelRows.from_segments(some, device) for some in segments)
        longest, longest_keys = map(max, lengths)
        return cls(queries, keys, (on_device[0], on_device[1], longest, longest_keys))
