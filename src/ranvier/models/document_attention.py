"""Attention of whole samples, and inside the documents that samples are cut into.

The cuts are data: the bounds lie on the device, a compiled graph does not know their number, and
the work is that of the documents. A token may see only the last `window` ones, itself included, and
scores may be bent into (-cap, cap) as cap · tanh(score / cap); 0 is neither. Plain PyTorch, imports
torch only.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

KERNEL_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Documents:
    """How samples are cut into documents: attention stays inside each, and costs what they do."""

    lengths: tuple[tuple[int, ...], ...]
    """Tokens of each document of each sample; the host knows them, so that no device is asked."""
    cu_seqlens: Tensor
    """Where documents begin when all samples are laid one after the other, and the end `[n + 1]`;
    documents of no tokens may follow."""
    max_seqlen_tensor: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    """Tokens of the longest at most, on the host: a graph does not depend on it."""

    @classmethod
    def from_ids(cls, ids: Tensor, device: torch.device | str | None = None) -> Documents:
        """From numbers `[b, s]`: equal neighbours are one document."""
        rows = (torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in ids)
        return cls.from_lengths(tuple(map(tuple, rows)), ids.device if device is None else device)

    @classmethod
    def from_lengths(
        cls, lengths: tuple[tuple[int, ...], ...], device: torch.device | str
    ) -> Documents:
        """From the lengths in each sample."""
        ends = accumulate((n for sample in lengths for n in sample), initial=0)
        bounds = torch.tensor(list(ends), dtype=torch.int32)
        if torch.device(device).type == "cuda":
            bounds = bounds.pin_memory()
        longest = max(n for sample in lengths for n in sample)
        bounds = bounds.to(device, non_blocking=True)
        return cls(lengths, bounds, torch.tensor(1 << (longest - 1).bit_length()))

    @classmethod
    def one_per_sample(cls, samples: int, seq: int, device: torch.device) -> Documents:
        """Each sample one document."""
        bounds = torch.arange(0, samples * seq + 1, seq, dtype=torch.int32, device=device)
        return cls((), bounds, torch.tensor(seq))

    def select_samples(self, rows: slice) -> Documents:
        """Those of some samples."""
        first, last, _ = rows.indices(len(self.lengths))
        tokens = sum(self.lengths[0])
        bounds = self.narrow(first * tokens, (last - first) * tokens).cu_seqlens
        return Documents(self.lengths[rows], bounds, self.max_seqlen_tensor)

    def narrow(self, start: int, tokens: int) -> Documents:
        """Those of some tokens, for the device: no lengths, as a graph must not depend on them.

        The others become documents of no tokens: no size depends on the cuts.
        """
        return Documents((), (self.cu_seqlens - start).clamp(0, tokens), self.max_seqlen_tensor)

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest, rounded up to a power of two: few values, few kernels."""
        return int(self.max_seqlen_tensor)


def normalize_documents(documents: Documents | Tensor | None) -> Documents | None:
    """The documents as cuts, or None if each sample is one."""
    if isinstance(documents, Tensor):
        documents = Documents.from_ids(documents)
    if documents is None or not documents.lengths:
        return documents
    if all(len(cuts) == 1 for cuts in documents.lengths):
        return None
    return documents


def document_lengths(documents: Documents | None, device: torch.device) -> Tensor | None:
    """Tokens of the document of each token `[b, s]`; None where each sample is one."""
    if documents is None or not documents.lengths:
        return None
    rows = [[n for n in sample for _ in range(n)] for sample in documents.lengths]
    return torch.tensor(rows, device=device)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, window: int = 0, cap: float = 0.0) -> Tensor:
    """Causal attention; q, y: `[b, s, h, k]`, k, v: `[b, s, g, k]`."""
    shared = q.shape[2] != k.shape[2]
    seq = q.shape[1]
    window = 0 if window >= seq else window
    if cap > 0.0:
        return _softcap_attention(q, k, v, window, cap)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (b, h, s, k)
    if window:
        mask = ~_masked_keys(seq, window, q.device)
    else:
        mask = None
    y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=not window, enable_gqa=shared)
    return y.transpose(1, 2)


def _masked_keys(seq: int, window: int, device: torch.device) -> Tensor:
    """Which keys a query does not see: later ones, and those before its window `[s, s]`."""
    ones = torch.ones(seq, seq, dtype=torch.bool, device=device)
    if window:
        return ones.triu(1) | ones.tril(-window)
    return ones.triu(1)


def _attention_probs(q: Tensor, k: Tensor, window: int, cap: float) -> tuple[Tensor, Tensor]:
    """Probabilities, and scores before what is not seen was left out `[.., s, s]`, in fp32."""
    scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).to(_accumulation_dtype(q.dtype))
    if cap > 0.0:
        scores = torch.tanh(scores / cap) * cap
    unseen = _masked_keys(q.shape[-2], window, q.device)
    return scores.masked_fill(unseen, float("-inf")).softmax(-1), scores


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype in KERNEL_DTYPES:
        return torch.float32
    return dtype


def _softcap_attention(q: Tensor, k: Tensor, v: Tensor, window: int, cap: float) -> Tensor:
    """As `causal`, with all scores at once: no library bends them."""
    groups = q.shape[2] // k.shape[2]
    q = q.transpose(1, 2).unflatten(1, (-1, groups))  # (b, g, h/g, s, k)
    k, v = (x.transpose(1, 2).unsqueeze(2) for x in (k, v))  # (b, g, 1, s, k)
    y = _attention_probs(q, k, window, cap)[0].to(v.dtype) @ v
    return y.flatten(1, 2).transpose(1, 2)


def document_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, window: int = 0, cap: float = 0.0
) -> Tensor:
    """Causal attention inside documents; q, y: `[b·s, h, k]`, k, v: `[b·s, g, k]`."""
    if torch.compiler.is_compiling() or can_use_flash_kernel(q, cap):
        y: Tensor = attend_documents(
            q, k, v, documents.cu_seqlens, documents.max_seqlen_tensor, window, cap
        )[0]
        return y
    return packed_attention(q, k, v, documents.cu_seqlens, window, cap)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, window: int = 0, cap: float = 0.0
) -> Tensor:
    """The same in differentiable operations, documents of equal length together."""
    places = _indices_by_length(bounds)
    outputs = [causal_attention(q[at], k[at], v[at], window, cap).flatten(0, 1) for at in places]
    return torch.cat(outputs)[torch.cat([at.flatten() for at in places]).argsort()]


def _indices_by_length(bounds: Tensor) -> list[Tensor]:
    """Where the tokens of documents of equal length lie: `[documents, length]` of each length."""
    starts = defaultdict[int, list[int]](list)
    for start, stop in pairwise(bounds.tolist()):
        if stop > start:
            starts[stop - start].append(start)
    return [
        torch.tensor(some, device=bounds.device).unsqueeze(1)
        + torch.arange(length, device=bounds.device)
        for length, some in starts.items()
    ]


def packed_attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    window: int = 0,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `packed`: dS = P (dP - Σ dP P), dq = dS k / √n, dk = dSᵀ q / √n, dv = Pᵀ dy.

    With a cap c, S = c tanh(T / c): dT = dS (1 - (S / c)²).
    """
    dq = torch.zeros_like(q)
    dk = torch.zeros_like(k)
    dv = torch.zeros_like(v)
    groups = q.shape[1] // k.shape[1]
    scale = q.shape[2] ** -0.5
    for at in _indices_by_length(bounds):
        # (documents, kv heads, heads that share one, length, k)
        a, d = (x[at].transpose(1, 2).unflatten(1, (-1, groups)) for x in (q, dy))
        b, c = (x[at].transpose(1, 2).unsqueeze(2) for x in (k, v))
        p, scores = _attention_probs(a, b, 0 if window >= at.shape[1] else window, cap)
        dp = (d @ c.transpose(-1, -2)).to(p.dtype)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
        if cap > 0.0:
            ds = ds * (1.0 - (scores / cap) ** 2)
        p = p.to(q.dtype)
        ds = ds.to(q.dtype)
        dq[at] = (ds @ b).flatten(1, 2).transpose(1, 2)
        dk[at] = (ds.transpose(-1, -2) @ a).sum(2).transpose(1, 2)
        dv[at] = (p.transpose(-1, -2) @ d).sum(2).transpose(1, 2)
    return dq, dk, dv


def can_use_flash_kernel(q: Tensor, cap: float = 0.0) -> bool:
    """Whether the kernel for ragged sequences runs here; elsewhere its twin `packed` does."""
    if q.device.type != "cuda" or torch.version.hip or q.dtype not in KERNEL_DTYPES or cap > 0.0:
        return False
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        return False
    return torch.cuda.get_device_capability(q.device) >= (8, 0)


def _contiguous_heads(x: Tensor) -> Tensor:
    """As the kernel takes it: heads without gaps, such as those of a packed k and v."""
    if x.stride(-1) == 1 and x.stride(-2) == x.shape[-1]:
        return x
    return x.contiguous()


# ---- one operation for the compiler -----------------------------------------------------


@torch.library.custom_op("ranvier::attend_documents", mutates_args=())
def attend_documents(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, most: Tensor, window: int, cap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `inside`, and what its backward needs: logarithms of sums, state of no generator."""
    if not can_use_flash_kernel(q, cap):
        y = packed_attention(q, k, v, bounds, window, cap)
        none = q.new_empty(0)
        return y.contiguous(), none, none.clone()
    longest = int(most)
    q, k, v = map(_contiguous_heads, (q, k, v))
    y, sums, state, _, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, bounds, bounds, longest, longest, 0.0, True, False, **_window_sizes(window)
    )
    return y, sums, state


def _window_sizes(window: int) -> dict[str, int]:
    """How many keys before and behind itself a query sees, as the kernel counts them."""
    if window:
        return {"window_size_left": window - 1, "window_size_right": 0}
    return {}


@attend_documents.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, most: Tensor, window: int, cap: float
) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not can_use_flash_kernel(q, cap):
        return y, q.new_empty(0), q.new_empty(0)
    sums = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    return y, sums, q.new_empty(2, dtype=torch.uint64)


@torch.library.custom_op("ranvier::attend_documents_backward", mutates_args=())
def attend_documents_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    sums: Tensor,
    state: Tensor,
    bounds: Tensor,
    most: Tensor,
    window: int,
    cap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    if not can_use_flash_kernel(q, cap):
        # an operation cannot use autograd
        return packed_attention_backward(dy, q, k, v, bounds, window, cap)
    longest = int(most)
    none = torch.empty(0, device=q.device)
    dy, q, k, v = map(_contiguous_heads, (dy, q, k, v))
    ends = (bounds, bounds, longest, longest)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        dy, q, k, v, y, sums, *ends, 0.0, True, state, none, **_window_sizes(window)
    )
    return dq, dk, dv


@attend_documents_backward.register_fake
def _(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return dq, dk, dv


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, bounds, most, window, cap = inputs
    y, sums, state = output
    ctx.mark_non_differentiable(sums, state)
    ctx.save_for_backward(q, k, v, y, sums, state, bounds, most)
    ctx.how = (window, cap)


def _backward(ctx, dy, *_):  # type: ignore[no-untyped-def]
    grads = attend_documents_backward(dy, *ctx.saved_tensors, *ctx.how)
    return *grads, None, None, None, None


attend_documents.register_autograd(_backward, setup_context=_setup_context)
