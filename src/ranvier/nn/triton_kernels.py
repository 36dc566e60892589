"""Triton kernels, for CUDA only. They are imported where they are used.

Each has a reference version in PyTorch (`nn/cross_entropy.py`, `nn/float8.py`); tests compare both.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

# ---- cross-entropy ----------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy_kernel(  # type: ignore[no-untyped-def]
    logits, stride, targets, peaks, sums, hits, log_sums, factor, first, valid, width,
    STATISTICS: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes statistics and/or gradient of one token per program."""
    token = tl.program_id(0)
    row = logits + token.to(tl.int64) * stride
    target = tl.load(targets + token)
    column = target - first
    here = (column >= 0) & (column < valid)
    lanes = tl.arange(0, BLOCK)
    if STATISTICS:
        # Read before the gradient overwrites the row.
        hit = tl.load(row + column, mask=here, other=0.0).to(tl.float32)
        most = float("-inf")
        total = tl.zeros([BLOCK], tl.float32)
        # Online softmax: maximum and sum in one pass, rescaling when the maximum grows.
        for start in range(0, valid, BLOCK):
            at = start + lanes
            x = tl.load(row + at, mask=at < valid, other=float("-inf")).to(tl.float32)
            higher = tl.maximum(most, tl.max(x, 0))
            total = total * tl.exp(most - higher) + tl.exp(x - higher)
            most = higher
        sum_ = tl.sum(total, 0)
        tl.store(peaks + token, most)
        tl.store(sums + token, sum_)
        tl.store(hits + token, hit)
        log_sum = most + tl.log(sum_)
    else:
        log_sum = tl.load(log_sums + token)
    if GRADIENT:
        # Tokens with IGNORE_INDEX get no gradient.
        weight = tl.where(target == -100, 0.0, tl.load(factor))
        for start in range(0, width, BLOCK):
            at = start + lanes
            # Padding loads -inf, so its gradient is exactly 0.
            x = tl.load(row + at, mask=at < valid, other=float("-inf")).to(tl.float32)
            p = tl.exp(x - log_sum) - tl.where((at == column) & here, 1.0, 0.0)
            tl.store(row + at, (p * weight).to(logits.dtype.element_ty), mask=at < width)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    first: int,
    valid: int,
    log_sums: Tensor | None = None,
    gradient: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns maximum, sum of exponentials and target logit per token `[t]`; logits: `[t, v]`.

    gradient: if given, logits are overwritten by gradient · (softmax - one-hot), using `log_sums`
    or the computed statistics.
    """
    count, width = logits.shape
    peaks, sums, hits = torch.empty(3, count, device=logits.device).unbind(0)
    _cross_entropy_kernel[(count,)](
        logits, logits.stride(0), targets, peaks, sums, hits,
        # Any tensor will do for an unused pointer: the constexpr flags remove its loads.
        peaks if log_sums is None else log_sums, peaks if gradient is None else gradient.float(),
        first, valid, width,
        STATISTICS=log_sums is None, GRADIENT=gradient is not None, BLOCK=4096, num_warps=8,
    )  # fmt: skip
    return peaks, sums, hits


# ---- fp8 --------------------------------------------------------------------------------


AMAX_PROGRAMS = 512
"""Number of programs that find the largest magnitude of a tensor, each in one part."""


@triton.jit  # type: ignore[untyped-decorator]
def _amax_kernel(x, parts, n, PARTS: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Finds the largest magnitude of a part, as bits; the bits of NaN are above all others."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    found = tl.zeros([TILE], dtype=tl.int32)
    for start in range(0, n, PARTS * TILE):
        value = tl.load(x + start + at, mask=start + at < n, other=0.0).to(tl.float32)
        # Without the sign bit, float order is integer order, and the maximum keeps a NaN.
        found = tl.maximum(found, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(parts + tl.program_id(0), tl.max(found, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _scale_kernel(  # type: ignore[no-untyped-def]
    parts, scale_at, inverse_at, most, least, PARTS: tl.constexpr
):
    """Computes the power of two that scales the largest magnitude just below `most`."""
    bits = tl.max(tl.load(parts + tl.arange(0, PARTS)), 0)
    largest = bits.to(tl.float32, bitcast=True)
    times = tl.div_rn(most, tl.where(largest < least, least, largest))
    # Keeping only the exponent bits rounds down to a power of two.
    exponent = times.to(tl.int32, bitcast=True) & 0x7F800000
    # A NaN (times != times) is kept; its exponent bits alone would be an infinity.
    scale = tl.where(times == times, exponent.to(tl.float32, bitcast=True), times)
    tl.store(scale_at, scale)
    tl.store(inverse_at, tl.div_rn(1.0, scale))


def tensorwise_scale(x: Tensor, most: float, least: float) -> tuple[Tensor, Tensor]:
    """Returns the scale `[]` of a contiguous x, as `float8.power_of_two_scale`, and its inverse."""
    parts = torch.empty(AMAX_PROGRAMS, dtype=torch.int32, device=x.device)
    # Separate tensors instead of views of one: the GEMM library needs aligned addresses.
    scale, inverse = (torch.empty((), dtype=torch.float32, device=x.device) for _ in range(2))
    _amax_kernel[(AMAX_PROGRAMS,)](x, parts, x.numel(), PARTS=AMAX_PROGRAMS, TILE=2048, num_warps=8)
    _scale_kernel[(1,)](parts, scale, inverse, most, least, PARTS=AMAX_PROGRAMS, num_warps=4)
    return scale, inverse


@triton.jit  # type: ignore[untyped-decorator]
def _cast_transpose_kernel(  # type: ignore[no-untyped-def]
    x, stride, scale, plain, turned, rows, columns, largest,
    PLAIN: tl.constexpr, TURNED: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Converts a tile of x times a scale to fp8, unchanged and/or transposed."""
    r = tl.program_id(0) * R + tl.arange(0, R)
    c = tl.program_id(1) * C + tl.arange(0, C)
    inside = (r[:, None] < rows) & (c[None, :] < columns)
    tile = tl.load(x + r[:, None].to(tl.int64) * stride + c[None, :], mask=inside, other=0.0)
    y = tile.to(tl.float32) * tl.load(scale)
    # Saturate, as rounding may exceed the largest number of the type.
    y = tl.minimum(tl.maximum(y, -largest), largest)
    if PLAIN:
        q = y.to(plain.dtype.element_ty)
        tl.store(plain + r[:, None].to(tl.int64) * columns + c[None, :], q, mask=inside)
    if TURNED:
        t = tl.trans(y).to(turned.dtype.element_ty)
        at = c[:, None].to(tl.int64) * rows + r[None, :]
        tl.store(turned + at, t, mask=(c[:, None] < columns) & (r[None, :] < rows))


def cast_transpose(
    x: Tensor, scale: Tensor, dtype: torch.dtype, *, plain: bool, turned: bool
) -> tuple[Tensor, Tensor]:
    """Returns x · scale in fp8 `[r, c]` and transposed `[c, r]`; empty if not requested."""
    rows, columns = x.shape
    a = torch.empty((rows, columns) if plain else (0,), dtype=dtype, device=x.device)
    b = torch.empty((columns, rows) if turned else (0,), dtype=dtype, device=x.device)
    R = 64
    C = 128
    _cast_transpose_kernel[(triton.cdiv(rows, R), triton.cdiv(columns, C))](
        x, x.stride(0), scale, a, b, rows, columns, torch.finfo(dtype).max,
        PLAIN=plain, TURNED=turned, R=R, C=C, num_warps=4,
    )  # fmt: skip
    return a, b
