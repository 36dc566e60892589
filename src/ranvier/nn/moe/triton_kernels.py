"""Triton kernels of the MoE layer, for CUDA only. They are imported where they are used.

The PyTorch versions are the reference (`nn/moe/permutation.py`, `local.py`, `grouped_gemm.py`);
tests compare both. Every element has one writer and every sum has a fixed order, so results are
reproducible. All kernels are limited by memory bandwidth, so each byte is read and written once.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")
SORT_BLOCK = 128
"""Choices per program of the sort, which compares all pairs."""
MAX_BLOCK_COLUMNS = 1024
"""Maximum number of features per program: 8 per thread, i.e. 16 bytes in bf16."""
TILE_ROWS = 8
TILE_COLUMNS = 256
"""Tile of activations, TILE_ROWS × TILE_COLUMNS."""

# ---- sorting ----------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def _count_kernel(experts, counts, size, blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Counts the choices of each expert in a block; counts: (E + 1, blocks)."""
    block = tl.program_id(0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    expert = tl.load(experts + i, mask=inside, other=0)
    one = tl.full([BLOCK], 1, tl.int32)
    # Integer additions: the order of the atomics does not matter.
    tl.atomic_add(counts + expert * blocks + block, one, mask=inside, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def _place_kernel(  # type: ignore[no-untyped-def]
    experts, firsts, choices, places, size, blocks, BLOCK: tl.constexpr
):
    """Places each choice after earlier choices of its expert, in earlier blocks and its own."""
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    i = block * BLOCK + lane
    inside = i < size
    expert = tl.load(experts + i, mask=inside, other=-1)
    before = (expert[:, None] == expert[None, :]) & (lane[None, :] < lane[:, None])
    rank = tl.sum(before.to(tl.int32), 1)
    first = tl.load(firsts + expert * blocks + block, mask=inside, other=0)
    place = (first + rank).to(tl.int64)
    tl.store(places + i, place, mask=inside)
    tl.store(choices + place, i.to(tl.int64), mask=inside)


def sort_by_expert(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns choices by place `[a]`, places by choice `[a]` and ends `[E]`; a stable sort."""
    size = experts.numel()
    blocks = triton.cdiv(size, SORT_BLOCK)
    # One more group than experts, for dropped choices. The order is expert-major, so that one
    # cumulative sum over (expert, block) gives the first place of every block.
    counts = torch.zeros(count + 1, max(blocks, 1), dtype=torch.int32, device=experts.device)
    choices = torch.empty_like(experts)
    places = torch.empty_like(experts)
    if size:
        _count_kernel[(blocks,)](experts, counts, size, blocks, BLOCK=SORT_BLOCK, num_warps=4)
    sums = counts.flatten().cumsum(0, dtype=torch.int32).view_as(counts)
    if size:
        firsts = sums - counts
        _place_kernel[(blocks,)](
            experts, firsts, choices, places, size, blocks, BLOCK=SORT_BLOCK, num_warps=4
        )
    return choices, places, sums[:count, -1].contiguous()


# ---- permutation ------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def _permute_kernel(  # type: ignore[no-untyped-def]
    x, rows, places, last, weights, width,
    K: tl.constexpr, WEIGHTED: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies the features of a token to all of its places; reads them once."""
    # int64: token · width may exceed 2^31.
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < width
    value = tl.load(x + token * width + c, mask=inside, other=0.0)
    for j in tl.static_range(K):
        place = tl.load(places + token * K + j)
        row = value
        if WEIGHTED:
            weight = tl.load(weights + token * K + j).to(tl.float32)
            row = (value.to(tl.float32) * weight).to(rows.dtype.element_ty)
        if not WHOLE:
            row = tl.where(place < tl.load(last), row, 0.0).to(rows.dtype.element_ty)
        tl.store(rows + place * width + c, row, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _unpermute_kernel(  # type: ignore[no-untyped-def]
    y, more, out, places, last, weights, width,
    K: tl.constexpr, TWO: tl.constexpr, WEIGHTED: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums the rows of a token, in the order of its choices."""
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < width
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(K):
        place = tl.load(places + token * K + j)
        here = inside
        if not WHOLE:
            here = inside & (place < tl.load(last))
        row = tl.load(y + place * width + c, mask=here, other=0.0).to(tl.float32)
        if TWO:
            row += tl.load(more + place * width + c, mask=here, other=0.0).to(tl.float32)
        if WEIGHTED:
            row = row * tl.load(weights + token * K + j).to(tl.float32)
        total += row
    tl.store(out + token * width + c, total.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _routing_weight_grad_kernel(  # type: ignore[no-untyped-def]
    g, y, out, places, last, width,
    K: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes the inner products of a token's gradient with each of its rows."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    for j in tl.static_range(K):
        place = tl.load(places + token * K + j)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            c = start + lane
            here = c < width
            if not WHOLE:
                here = here & (place < tl.load(last))
            row = tl.load(y + place * width + c, mask=here, other=0.0).to(tl.float32)
            total += row * tl.load(g + token * width + c, mask=here, other=0.0).to(tl.float32)
        tl.store(out + token * K + j, tl.sum(total, 0))


def _launch_grid(tokens: int, width: int) -> tuple[tuple[int, int], int]:
    """Returns the grid of programs, and the number of features per program."""
    block = min(MAX_BLOCK_COLUMNS, triton.next_power_of_2(width))
    return (tokens, triton.cdiv(width, block)), block


def permute_rows(
    x: Tensor, places: Tensor, ends: Tensor, weights: Tensor | None, *, whole: bool
) -> Tensor:
    """rows[places[t, j]] = w[t, j] · x[t], `[a, d]`."""
    (tokens, k), width = places.shape, x.shape[1]
    rows = x.new_empty(tokens * k, width)
    grid, block = _launch_grid(tokens, width)
    if rows.numel():
        _permute_kernel[grid](
            # Any tensor will do for an unused pointer: the constexpr flags remove its loads.
            x, rows, places, ends[-1:], x if weights is None else weights.contiguous(), width,
            K=k, WEIGHTED=weights is not None, WHOLE=whole, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return rows


def unpermute_rows(
    ys: Sequence[Tensor], places: Tensor, ends: Tensor, weights: Tensor | None, *, whole: bool
) -> Tensor:
    """out[t] = Σ_j w[t, j] · Σ_y y[places[t, j]], `[t, d]`; one y or two."""
    (tokens, k), width = places.shape, ys[0].shape[1]
    out = ys[0].new_empty(tokens, width)
    grid, block = _launch_grid(tokens, width)
    if out.numel():
        _unpermute_kernel[grid](
            ys[0], ys[-1], out, places, ends[-1:], out if weights is None else weights.contiguous(),
            width, K=k, TWO=len(ys) == 2, WEIGHTED=weights is not None, WHOLE=whole, BLOCK=block,
            num_warps=4,
        )  # fmt: skip
    return out


def routing_weight_grad(
    g: Tensor, y: Tensor, places: Tensor, ends: Tensor, *, whole: bool
) -> Tensor:
    """Returns Σ_d g[t, d] · y[places[t, j], d], `[t, k]` in fp32."""
    (tokens, k), width = places.shape, y.shape[1]
    out = torch.empty(tokens, k, dtype=torch.float32, device=y.device)
    _, block = _launch_grid(tokens, width)
    if tokens:
        _routing_weight_grad_kernel[(tokens,)](
            g, y, out, places, ends[-1:], width, K=k, WHOLE=whole, BLOCK=block, num_warps=4
        )
    return out


# ---- the activation ---------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def _weighted_swiglu_kernel(  # type: ignore[no-untyped-def]
    gate, up, weights, choices, out, rows, width, R: tl.constexpr, C: tl.constexpr
):
    """Computes w · silu(gate) · up for a tile."""
    r = tl.program_id(0) * R + tl.arange(0, R)
    c = tl.program_id(1) * C + tl.arange(0, C)
    inside = (r[:, None] < rows) & (c[None, :] < width)
    at = r[:, None].to(tl.int64) * width + c[None, :]
    choice = tl.load(choices + r, mask=r < rows, other=0)
    w = tl.load(weights + choice, mask=r < rows, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    h = g / (1.0 + tl.exp(-g)) * u * w[:, None]
    tl.store(out + at, h.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _weighted_swiglu_backward_kernel(  # type: ignore[no-untyped-def]
    gate, up, weights, choices, dh, out, dgate, dup, dweights, last, rows, width,
    WHOLE: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Computes the output and all gradients of some rows; gradients of weights need whole rows."""
    r = tl.program_id(0) * R + tl.arange(0, R)
    inside_r = r < rows
    choice = tl.load(choices + r, mask=inside_r, other=0)
    w = tl.load(weights + choice, mask=inside_r, other=0.0).to(tl.float32)[:, None]
    live = inside_r
    if not WHOLE:
        live = inside_r & (r < tl.load(last))
    total = tl.zeros([R], tl.float32)
    for start in range(0, width, C):
        c = start + tl.arange(0, C)
        inside = inside_r[:, None] & (c[None, :] < width)
        at = r[:, None].to(tl.int64) * width + c[None, :]
        seen = live[:, None] & (c[None, :] < width)
        g = tl.load(gate + at, mask=seen, other=0.0).to(tl.float32)
        u = tl.load(up + at, mask=seen, other=0.0).to(tl.float32)
        d = tl.load(dh + at, mask=seen, other=0.0).to(tl.float32)
        s = 1.0 / (1.0 + tl.exp(-g))
        silu = g * s
        # dw = Σ dh · silu(g) · u: before dh is multiplied by w.
        total += tl.sum(d * silu * u, 1)
        tl.store(out + at, (w * silu * u).to(out.dtype.element_ty), mask=inside)
        d = d * w
        tl.store(dup + at, (d * silu).to(dup.dtype.element_ty), mask=inside)
        # silu'(g) = s + g · s · (1 - s) with s = sigmoid(g).
        dg = d * u * (s + silu * (1.0 - s))
        tl.store(dgate + at, dg.to(dgate.dtype.element_ty), mask=inside)
    tl.store(dweights + choice, total, mask=inside_r)


def weighted_swiglu(gate: Tensor, up: Tensor, weights: Tensor, choices: Tensor) -> Tensor:
    """Returns w · silu(gate) · up, `[a, f]`."""
    out, (rows, width) = torch.empty_like(up), up.shape
    if out.numel():
        _weighted_swiglu_kernel[(triton.cdiv(rows, TILE_ROWS), triton.cdiv(width, TILE_COLUMNS))](
            gate, up, weights, choices, out, rows, width, R=TILE_ROWS, C=TILE_COLUMNS, num_warps=4
        )
    return out


def weighted_swiglu_backward(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    weights: Tensor,
    choices: Tensor,
    ends: Tensor,
    *,
    whole: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the recomputed output and the gradients of gate, up `[a, f]` and weights (fp32)."""
    out, dgate, dup, (rows, width) = *(torch.empty_like(up) for _ in range(3)), up.shape
    dweights = torch.empty(weights.shape, dtype=torch.float32, device=up.device)
    if rows:
        _weighted_swiglu_backward_kernel[(triton.cdiv(rows, TILE_ROWS),)](
            gate, up, weights, choices, dh, out, dgate, dup, dweights, ends[-1:], rows, width,
            WHOLE=whole, R=TILE_ROWS, C=TILE_COLUMNS, num_warps=4,
        )  # fmt: skip
    return out, dgate, dup, dweights


# ---- empty groups -----------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def _zero_empty_groups_kernel(dw, ends, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes zeros to groups without rows; other groups do not change."""
    group = tl.program_id(0)
    end = tl.load(ends + group)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    if end == start:
        base = dw + group.to(tl.int64) * size
        zero = tl.zeros([BLOCK], dw.dtype.element_ty)
        for block in range(tl.program_id(1), tl.cdiv(size, BLOCK), tl.num_programs(1)):
            at = block * BLOCK + tl.arange(0, BLOCK)
            tl.store(base + at, zero, mask=at < size)


def zero_empty_groups(dw: Tensor, ends: Tensor) -> None:
    """Sets dw `[e, f, d]` to 0 for groups without rows."""
    _zero_empty_groups_kernel[(len(ends), 16)](dw, ends, dw[0].numel(), BLOCK=2048, num_warps=4)
