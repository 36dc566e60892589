"""Causal attention within documents, and to a prefix of keys and values that all tokens see.

Attention to both is computed separately, and merged by the log-sum-exps of scores. Backward uses
the output and the log-sum-exp of all keys for both parts, so that neither needs a gradient of its
own log-sum-exps. It is one operation for the compiler. Plain PyTorch; imports only torch.

Shapes: b samples, s tokens, h heads, g kv heads, n prefix tokens, k head dim.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ranvier.models.document_attention import (
    Documents,
    can_use_flash_kernel,
    contiguous_heads,
    kernel_window,
)
from ranvier.models.paged_attention import KVCache, PagedSequences, PagePartAttention
from ranvier.models.segment_attention import SegmentAttention


def prefix_rows(prefix: Tensor, first: int, samples: int) -> Tensor:
    """Returns the prefix of each sample as keys `[samples · n, g, k]`.

    prefix: of each stream, `[P, g, n, k]`; first: number of the first sample, whose stream is its
    remainder of division by P.
    """
    streams = prefix.shape[0]
    start = first % streams
    # Copies instead of an index, whose gradient would be summed in any order.
    copies = prefix.repeat(-(-(start + samples) // streams), 1, 1, 1)[start : start + samples]
    return copies.transpose(1, 2).flatten(0, 1)


def prefixed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    documents: Documents | None,
    window: int = 0,
    cap: float = 0.0,
) -> Tensor:
    """Causal attention within documents and to the prefix of each sample.

    q, y: `[b, s, h, k]`; k, v: `[b, s, g, k]`; prefix_k, prefix_v: `[b·n, g, k]`. A window does not
    hide the prefix.
    """
    if documents is None:
        documents = Documents.one_per_sample(q.shape[0], q.shape[1], q.device)
    rows, keys, values = (x.flatten(0, 1) for x in (q, k, v))
    y: Tensor = attend_with_prefix(
        rows,
        keys,
        values,
        prefix_k,
        prefix_v,
        documents.cu_seqlens,
        documents.max_seqlen_tensor,
        q.shape[0],
        window,
        cap,
    )[0]
    return y.view(q.shape)


def paged_prefix_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix: tuple[Tensor, Tensor],
    attend: PagePartAttention,
    cache: KVCache,
    sequences: PagedSequences,
    window: int = 0,
    cap: float = 0.0,
) -> Tensor:
    """Attention of the streams of the tokens of a step to the cache and to their prefix.

    q, y: `[P, T, h, k]`; k, v: `[P, T, g, k]`; prefix: keys and values, `[P·n, g, k]`. All streams
    have the same tokens, so that they share the block table: the heads of all streams are heads of
    one cache with P · g kv heads, and a stream sees its own heads only.
    """
    streams = q.shape[0]
    rows, keys, values = (x.transpose(0, 1).flatten(1, 2) for x in (q, k, v))  # (T, P·h, k)
    prefix_k, prefix_v = (
        x.unflatten(0, (streams, -1)).transpose(0, 1).flatten(1, 2) for x in prefix
    )  # (n, P·g, k)
    part = attend(rows, keys, values, cache, sequences, window, cap)
    other = _Part.of_prefix(rows, prefix_k, 1, cap).forward(rows, prefix_k, prefix_v)
    y, _ = _merge(*part, *other)
    parts: Tensor = y.to(q.dtype).unflatten(1, (streams, -1))
    return parts.transpose(0, 1)


def _merge(o: Tensor, lse: Tensor, o_other: Tensor, lse_other: Tensor) -> tuple[Tensor, Tensor]:
    """Returns attention to two disjoint sets of keys from attention to each of them.

    o: `[T, h, k]`, log-sum-exps: `[h, T]`. Every token sees at least one key of the second set.
    """
    total = torch.logaddexp(lse, lse_other)
    first, second = ((x - total).exp().T.unsqueeze(-1) for x in (lse, lse_other))
    return o * first + o_other * second, total


class _Part(NamedTuple):
    """Attention of all queries to some keys, each segment to its own."""

    queries: Tensor
    """Start of each segment of queries, then the end, int32."""
    keys: Tensor
    """Start of the keys of each segment, then the end, int32."""
    max_queries: int
    max_keys: int
    causal: bool
    window: int
    cap: float

    @classmethod
    def of_documents(cls, bounds: Tensor, longest: Tensor, window: int, cap: float) -> _Part:
        # A tensor on the host, so reading it does not synchronize with the device.
        length = int(longest)
        return cls(bounds, bounds, length, length, True, window, cap)

    @classmethod
    def of_prefix(cls, q: Tensor, prefix: Tensor, samples: int, cap: float) -> _Part:
        each, num_keys = (x.shape[0] // samples for x in (q, prefix))
        queries, keys = (
            torch.arange(0, samples * n + 1, n, dtype=torch.int32, device=q.device)
            for n in (each, num_keys)
        )
        return cls(queries, keys, each, num_keys, False, 0, cap)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the output and the log-sum-exps `[h, T]`."""
        if not can_use_flash_kernel(q, self.cap):
            return self._segments(q, k).forward(q, k, v, self.cap)
        o, lse, *_ = torch.ops.aten._flash_attention_forward(
            *map(contiguous_heads, (q, k, v)),
            self.queries,
            self.keys,
            self.max_queries,
            self.max_keys,
            0.0,
            self.causal,
            False,
            **kernel_window(self.window),
        )
        return o, lse

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of q, k and v. o, lse: of all keys, not only of these."""
        if not can_use_flash_kernel(q, self.cap):
            return self._segments(q, k).backward(dy, q, k, v, o, lse, self.cap)
        # Without dropout the random state is not used.
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *map(contiguous_heads, (dy, q, k, v, o)),
            lse,
            self.queries,
            self.keys,
            self.max_queries,
            self.max_keys,
            0.0,
            self.causal,
            state,
            torch.empty(0, device=q.device),
            **kernel_window(self.window),
        )
        return dq, dk, dv

    def _segments(self, q: Tensor, k: Tensor) -> SegmentAttention:
        segments = zip(pairwise(self.queries.tolist()), pairwise(self.keys.tolist()), strict=True)
        # Documents of other ranks are empty.
        pairs = tuple((*some, *keys) for some, keys in segments if some[0] < some[1])
        return SegmentAttention(pairs, q.shape[0], k.shape[0], self.causal, self.window)


# ---- one operation for the compiler -----------------------------------------------------


@torch.library.custom_op("ranvier::attend_with_prefix", mutates_args=())
def attend_with_prefix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    bounds: Tensor,
    longest: Tensor,
    samples: int,
    window: int,
    cap: float,
) -> tuple[Tensor, Tensor]:
    """`prefixed_attention` of rows `[b·s, h, k]`; also returns log-sum-exps `[h, b·s]`."""
    o, lse = _Part.of_documents(bounds, longest, window, cap).forward(q, k, v)
    other = _Part.of_prefix(q, prefix_k, samples, cap).forward(q, prefix_k, prefix_v)
    o, lse = _merge(o, lse, *other)
    return o.to(q.dtype), lse


@attend_with_prefix.register_fake
def _(q: Tensor, *rest: Tensor | int | float) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return y, q.new_empty(q.shape[1], q.shape[0], dtype=dtype)


@torch.library.custom_op("ranvier::attend_with_prefix_backward", mutates_args=())
def attend_with_prefix_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    o: Tensor,
    lse: Tensor,
    bounds: Tensor,
    longest: Tensor,
    samples: int,
    window: int,
    cap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k, v, prefix_k and prefix_v."""
    part = _Part.of_documents(bounds, longest, window, cap)
    dq, dk, dv = part.backward(dy, q, k, v, o, lse)
    part = _Part.of_prefix(q, prefix_k, samples, cap)
    more, prefix_dk, prefix_dv = part.backward(dy, q, prefix_k, prefix_v, o, lse)
    grads = (dq + more, dk, dv, prefix_dk, prefix_dv)
    found = (grad.to(q.dtype).contiguous() for grad in grads)
    return tuple(found)  # type: ignore[return-value]


@attend_with_prefix_backward.register_fake
def _(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    *rest: Tensor | int | float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    some = (q, k, v, prefix_k, prefix_v)
    found = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in some)
    return tuple(found)  # type: ignore[return-value]


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, prefix_k, prefix_v, bounds, longest, samples, window, cap = inputs
    y, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, prefix_k, prefix_v, y, lse, bounds, longest)
    ctx.how = (samples, window, cap)


def _backward(ctx, dy, _):  # type: ignore[no-untyped-def]
    grads = attend_with_prefix_backward(dy, *ctx.saved_tensors, *ctx.how)
    return *grads, None, None, None, None, None


attend_with_prefix.register_autograd(_backward, setup_context=_setup_context)
