"""Attention over whole samples, and within the documents that are packed into samples.

Document boundaries are stored on the device, so a compiled graph does not depend on their number.
The cost depends on the lengths of the documents. A token may attend only to the last `window`
tokens, including itself, and scores may be soft-capped to cap · tanh(score / cap); 0 disables
either. Plain PyTorch; imports only torch.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

KERNEL_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents that each sample consists of; tokens attend only within their document."""

    lengths: tuple[tuple[int, ...], ...]
    """Number of tokens of each document of each sample, on the host to avoid synchronization."""
    cu_seqlens: Tensor
    """Start of each document in the concatenated samples, then the end, `[n + 1]`; empty documents
    may follow."""
    max_seqlen_tensor: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    """Upper bound of the length of a document, on the host. It is a tensor, so that a graph does
    not depend on its value."""

    @classmethod
    def from_ids(cls, ids: Tensor, device: torch.device | str | None = None) -> Documents:
        """Creates documents from ids `[b, s]`; consecutive equal ids form a document."""
        rows = (torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in ids)
        return cls.from_lengths(tuple(map(tuple, rows)), ids.device if device is None else device)

    @classmethod
    def from_lengths(
        cls, lengths: tuple[tuple[int, ...], ...], device: torch.device | str
    ) -> Documents:
        """Creates documents from the document lengths of each sample."""
        ends = accumulate((n for sample in lengths for n in sample), initial=0)
        bounds = torch.tensor(list(ends), dtype=torch.int32)
        if torch.device(device).type == "cuda":
            # Pinned memory makes the copy below asynchronous.
            bounds = bounds.pin_memory()
        longest = max(n for sample in lengths for n in sample)
        bounds = bounds.to(device, non_blocking=True)
        # Rounded up to a power of two, so that there are few distinct values and kernel variants.
        return cls(lengths, bounds, torch.tensor(1 << (longest - 1).bit_length()))

    @classmethod
    def one_per_sample(cls, samples: int, seq: int, device: torch.device) -> Documents:
        """Creates one document per sample."""
        bounds = torch.arange(0, samples * seq + 1, seq, dtype=torch.int32, device=device)
        return cls((), bounds, torch.tensor(seq))

    def select_samples(self, rows: slice) -> Documents:
        """Returns the documents of a range of samples."""
        first, last, _ = rows.indices(len(self.lengths))
        tokens = sum(self.lengths[0])
        bounds = self.narrow(first * tokens, (last - first) * tokens).cu_seqlens
        return Documents(self.lengths[rows], bounds, self.max_seqlen_tensor)

    def narrow(self, start: int, tokens: int) -> Documents:
        """Returns the documents of a range of tokens, without lengths, for use in a graph.

        Other documents become empty, so that no size depends on the boundaries.
        """
        # Clamping makes documents outside of the range empty.
        return Documents((), (self.cu_seqlens - start).clamp(0, tokens), self.max_seqlen_tensor)

    def without_lengths(self) -> Documents:
        """Returns the same documents without their lengths, on which no graph depends."""
        return replace(self, lengths=())

    def repeat_samples(self, count: int) -> Documents:
        """Returns the documents of `count` consecutive copies of each sample."""
        assert len(self.lengths) > 0, "documents of a range of tokens have no lengths"
        lengths = tuple(sample for sample in self.lengths for _ in range(count))
        return Documents.from_lengths(lengths, self.cu_seqlens.device)

    @property
    def max_seqlen(self) -> int:
        """Length of the longest document, rounded up to a power of two."""
        return int(self.max_seqlen_tensor)


class TokenLayout(Protocol):
    """Where the tokens of a pass are, if samples are not whole: in a cache, or on other ranks."""

    @property
    def rope_lengths(self) -> Tensor:
        """Number of tokens of each token's document, `[b, s]`."""


def normalize_documents(
    documents: Documents | TokenLayout | Tensor | None,
) -> Documents | TokenLayout | None:
    """Returns ids as `Documents`, and None if each sample is one document."""
    if isinstance(documents, Tensor):
        documents = Documents.from_ids(documents)
    if not isinstance(documents, Documents) or not documents.lengths:
        return documents
    # Causal attention has faster kernels than varlen attention.
    if all(len(cuts) == 1 for cuts in documents.lengths):
        return None
    return documents


def document_lengths(
    documents: Documents | TokenLayout | None, device: torch.device
) -> Tensor | None:
    """Returns the length of each token's document `[b, s]`; None if samples are documents."""
    if documents is not None and not isinstance(documents, Documents):
        return documents.rope_lengths
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
        # In SDPA, True means that a key is visible.
        mask = ~_masked_keys(seq, window, q.device)
    else:
        mask = None
    y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=not window, enable_gqa=shared)
    return y.transpose(1, 2)


def _masked_keys(seq: int, window: int, device: torch.device) -> Tensor:
    """Returns a mask `[s, s]` of the keys after each query and before its window."""
    ones = torch.ones(seq, seq, dtype=torch.bool, device=device)
    if window:
        return ones.triu(1) | ones.tril(-window)
    return ones.triu(1)


def _attention_probs(q: Tensor, k: Tensor, window: int, cap: float) -> tuple[Tensor, Tensor]:
    """Returns probabilities, and scores before masking, `[..., s, s]` in fp32."""
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
    """`causal_attention` with a soft cap; stores all scores, as SDPA does not support a cap."""
    groups = q.shape[2] // k.shape[2]
    q = q.transpose(1, 2).unflatten(1, (-1, groups))  # (b, g, h/g, s, k)
    k, v = (x.transpose(1, 2).unsqueeze(2) for x in (k, v))  # (b, g, 1, s, k)
    y = _attention_probs(q, k, window, cap)[0].to(v.dtype) @ v
    return y.flatten(1, 2).transpose(1, 2)


def document_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, window: int = 0, cap: float = 0.0
) -> Tensor:
    """Causal attention within documents; q, y: `[b·s, h, k]`, k, v: `[b·s, g, k]`."""
    # A graph always contains the custom op, which chooses the implementation when it runs.
    if torch.compiler.is_compiling() or can_use_flash_kernel(q, cap):
        y: Tensor = attend_documents(
            q, k, v, documents.cu_seqlens, documents.max_seqlen_tensor, window, cap
        )[0]
        return y
    return packed_attention(q, k, v, documents.cu_seqlens, window, cap)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, window: int = 0, cap: float = 0.0
) -> Tensor:
    """`document_attention` in differentiable operations; batches documents of equal length."""
    places = _indices_by_length(bounds)
    outputs = [causal_attention(q[at], k[at], v[at], window, cap).flatten(0, 1) for at in places]
    # Outputs are grouped by length; argsort of their indices restores the order of tokens.
    return torch.cat(outputs)[torch.cat([at.flatten() for at in places]).argsort()]


def _indices_by_length(bounds: Tensor) -> list[Tensor]:
    """Returns the token indices of documents, one tensor `[documents, length]` per length."""
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
    """Returns the gradients of `packed_attention` for q, k and v.

    dS = P (dP - Σ dP P), dq = dS k / √n, dk = dSᵀ q / √n, dv = Pᵀ dy.
    With a cap c, S = c tanh(T / c): dT = dS (1 - (S / c)²).
    """
    dq = torch.zeros_like(q)
    dk = torch.zeros_like(k)
    dv = torch.zeros_like(v)
    groups = q.shape[1] // k.shape[1]
    scale = q.shape[2] ** -0.5
    for at in _indices_by_length(bounds):
        # (documents, kv heads, query heads per kv head, length, k)
        a, d = (x[at].transpose(1, 2).unflatten(1, (-1, groups)) for x in (q, dy))
        b, c = (x[at].transpose(1, 2).unsqueeze(2) for x in (k, v))
        p, scores = _attention_probs(a, b, 0 if window >= at.shape[1] else window, cap)
        dp = (d @ c.transpose(-1, -2)).to(p.dtype)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
        if cap > 0.0:
            ds = ds * (1.0 - (scores / cap) ** 2)
        # Back to the dtype of the inputs for the matmuls; softmax and its gradient were in fp32.
        p = p.to(q.dtype)
        ds = ds.to(q.dtype)
        dq[at] = (ds @ b).flatten(1, 2).transpose(1, 2)
        # Summed over the query heads that share a kv head.
        dk[at] = (ds.transpose(-1, -2) @ a).sum(2).transpose(1, 2)
        dv[at] = (p.transpose(-1, -2) @ d).sum(2).transpose(1, 2)
    return dq, dk, dv


def can_use_flash_kernel(q: Tensor, cap: float = 0.0) -> bool:
    """Whether the varlen flash kernel supports q; otherwise `packed_attention` is used."""
    if q.device.type != "cuda" or torch.version.hip or q.dtype not in KERNEL_DTYPES or cap > 0.0:
        return False
    # Limits of the flash kernel: head dims that are multiples of 8, at most 256; Ampere or newer.
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        return False
    return torch.cuda.get_device_capability(q.device) >= (8, 0)


def contiguous_heads(x: Tensor) -> Tensor:
    """Returns x with contiguous heads, as the kernel requires; views of packed k and v are not."""
    if x.stride(-1) == 1 and x.stride(-2) == x.shape[-1]:
        return x
    return x.contiguous()


def kernel_window(window: int) -> dict[str, int]:
    """Returns the number of keys before and after a query, as arguments of the kernel."""
    if window:
        # The kernel does not count the query itself.
        return {"window_size_left": window - 1, "window_size_right": 0}
    return {}


# ---- one operation for the compiler -----------------------------------------------------


@torch.library.custom_op("ranvier::attend_documents", mutates_args=())
def attend_documents(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, most: Tensor, window: int, cap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`document_attention`; also returns log-sum-exps and an unused RNG state for backward."""
    if not can_use_flash_kernel(q, cap):
        y = packed_attention(q, k, v, bounds, window, cap)
        none = q.new_empty(0)
        # A custom op must not return the same tensor more than once.
        return y.contiguous(), none, none.clone()
    # A tensor on the host, so reading it does not synchronize with the device.
    longest = int(most)
    q, k, v = map(contiguous_heads, (q, k, v))
    y, sums, state, _, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, bounds, bounds, longest, longest, 0.0, True, False, **kernel_window(window)
    )
    return y, sums, state


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
    """Returns the gradients of q, k and v."""
    if not can_use_flash_kernel(q, cap):
        # A custom op cannot use autograd, so the gradients are explicit.
        return packed_attention_backward(dy, q, k, v, bounds, window, cap)
    longest = int(most)
    none = torch.empty(0, device=q.device)
    dy, q, k, v = map(contiguous_heads, (dy, q, k, v))
    ends = (bounds, bounds, longest, longest)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        dy, q, k, v, y, sums, *ends, 0.0, True, state, none, **kernel_window(window)
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
