"""Triton kernels of Muon, for CUDA only: symmetric products, and the two elementwise updates.

A symmetric product needs the tiles on and above the diagonal only; those below are written as
their transposes by the same program. Tiles are squares of `side`, each computed by programs of
`rows` rows, since a wider program reads fewer operands per FLOP. Accumulation is in fp32, and
results are rounded once, as in cuBLAS.

`muon` has the reference versions; tests compare both.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ranvier.optim.adamw import UpdateScalars

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

BLOCK_ELEMENTS = 1024
"""Elements per program of the elementwise kernels."""
MAX_LAUNCH_ELEMENTS = 1 << 30
"""Maximum number of elements of one elementwise launch, which counts them in 32 bits."""


# ---- symmetric products ---------------------------------------------------------------------


@dataclass(frozen=True)
class TileConfig:
    """How a symmetric product is cut into programs."""

    side: int
    """Side of a square tile, and columns of a program."""
    rows: int
    """Rows of a program; divides `side`."""
    depth: int
    """Elements along the summed dim per iteration of the loop."""
    num_warps: int
    num_stages: int
    """Number of iterations whose operands are in shared memory."""

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the operands in bytes, for elements of 2 bytes."""
        return 2 * self.num_stages * self.depth * (self.rows + self.side)


WIDE_TILES = TileConfig(side=256, rows=128, depth=64, num_warps=8, num_stages=3)
NARROW_TILES = TileConfig(side=128, rows=128, depth=64, num_warps=8, num_stages=3)
MIN_WIDE_SIDE = 1024
"""Sides from which `WIDE_TILES` are used. With smaller ones, too much is on the diagonal."""


def choose_tiles(size: int, device: torch.device) -> TileConfig:
    """Returns the tiles of a product of a side, which fit into the shared memory of a device."""
    properties: Any = torch.cuda.get_device_properties(device)
    if (
        size >= MIN_WIDE_SIDE
        and WIDE_TILES.shared_bytes <= properties.shared_memory_per_block_optin
    ):
        return WIDE_TILES
    return NARROW_TILES


@triton.jit  # type: ignore[untyped-decorator]
def _symmetric_kernel(  # type: ignore[no-untyped-def]
    x, y, size, depth, x_batch, x_row, x_column, linear, quadratic,
    POLYNOMIAL: tl.constexpr, IS_EVEN: tl.constexpr,
    SIDE: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Computes some rows of a tile of x xᵀ on or above the diagonal, and writes its transpose."""
    PARTS: tl.constexpr = SIDE // ROWS
    part = tl.program_id(0) % PARTS
    tile = tl.program_id(0) // PARTS
    matrix = tl.program_id(1).to(tl.int64)
    # Tiles are counted column by column: column j has tiles 0 to j and begins at j(j + 1) / 2.
    j = ((tl.sqrt(8.0 * tile.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    # The root is rounded: j may be one too large or too small.
    j = tl.where(j * (j + 1) // 2 > tile, j - 1, j)
    j = tl.where((j + 1) * (j + 2) // 2 <= tile, j + 1, j)
    i = tile - j * (j + 1) // 2
    rows = i * SIDE + part * ROWS + tl.arange(0, ROWS)
    columns = j * SIDE + tl.arange(0, SIDE)
    inner = tl.arange(0, DEPTH)
    x += matrix * x_batch
    y += matrix * size * size
    left = x + rows.to(tl.int64)[:, None] * x_row + inner.to(tl.int64)[None, :] * x_column
    right = x + columns.to(tl.int64)[None, :] * x_row + inner.to(tl.int64)[:, None] * x_column
    is_row = rows < size
    is_column = columns < size
    total = tl.zeros([ROWS, SIDE], tl.float32)
    for start in range(0, depth, DEPTH):
        if IS_EVEN:
            a = tl.load(left)
            b = tl.load(right)
        else:
            is_inner = inner < depth - start
            a = tl.load(left, mask=is_row[:, None] & is_inner[None, :], other=0.0)
            b = tl.load(right, mask=is_inner[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(a, b, total)
        left += DEPTH * x_column
        right += DEPTH * x_column
    inside = is_row[:, None] & is_column[None, :]
    if POLYNOMIAL:
        here = x + rows.to(tl.int64)[:, None] * x_row + columns.to(tl.int64)[None, :] * x_column
        values = tl.load(here, mask=inside, other=0.0).to(tl.float32)
        total = total * quadratic + values * linear
    result = total.to(y.dtype.element_ty)
    above = y + rows.to(tl.int64)[:, None] * size + columns[None, :]
    if IS_EVEN:
        tl.store(above, result)
    else:
        tl.store(above, result, mask=inside)
    # A tile on the diagonal is its own transpose.
    if i != j:
        below = y + columns.to(tl.int64)[:, None] * size + rows[None, :]
        turned = tl.trans(result)
        if IS_EVEN:
            tl.store(below, turned)
        else:
            tl.store(below, turned, mask=is_column[:, None] & is_row[None, :])


def _launch_symmetric(
    x: Tensor,
    linear: float,
    quadratic: float,
    *,
    is_polynomial: bool,
    tiles: TileConfig | None,
) -> Tensor:
    count, size, depth = x.shape
    y = torch.empty(count, size, size, dtype=x.dtype, device=x.device)
    tiles = tiles or choose_tiles(size, x.device)
    side = triton.cdiv(size, tiles.side)
    grid = (side * (side + 1) // 2 * (tiles.side // tiles.rows), count)
    with torch.cuda.device_of(x):
        _symmetric_kernel[grid](
            x, y, size, depth, *x.stride(), linear, quadratic,
            POLYNOMIAL=is_polynomial,
            IS_EVEN=size % tiles.side == 0 and depth % tiles.depth == 0,
            SIDE=tiles.side, ROWS=tiles.rows, DEPTH=tiles.depth,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    return y


def symmetric_product(x: Tensor, *, tiles: TileConfig | None = None) -> Tensor:
    """Returns x xᵀ, `[n, m, m]`; x: `[n, m, k]`, with any strides."""
    return _launch_symmetric(x, 0.0, 1.0, is_polynomial=False, tiles=tiles)


def symmetric_polynomial(
    a: Tensor, linear: float, quadratic: float, *, tiles: TileConfig | None = None
) -> Tensor:
    """Returns linear · a + quadratic · a² of symmetric matrices `[n, m, m]`."""
    return _launch_symmetric(a, linear, quadratic, is_polynomial=True, tiles=tiles)


# ---- elementwise updates --------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def _momentum_kernel(  # type: ignore[no-untyped-def]
    momentum, grad, update, numbers, size, beta, fresh,
    NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Updates the momentum of consecutive elements, and writes what is to be orthogonalized."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    inside = offsets < size - start
    # `numbers` is `UpdateScalars.kernel_scalars`: good, factor, ...
    g = tl.load(grad + start + offsets, mask=inside).to(tl.float32) * tl.load(numbers + 1)
    m = tl.load(momentum + start + offsets, mask=inside)
    m = m + fresh * (g - m)
    if NESTEROV:
        u = g + beta * (m - g)
    else:
        u = m
    tl.store(update + start + offsets, u.to(update.dtype.element_ty), mask=inside)
    # A skipped update writes no momentum. A mask is used instead of a branch, for which all loads
    # above would have to wait.
    left = tl.where(tl.load(numbers) != 0.0, size - start, 0)
    tl.store(momentum + start + offsets, m, mask=offsets < left)


@triton.jit  # type: ignore[untyped-decorator]
def _weight_kernel(  # type: ignore[no-untyped-def]
    weight, direction, out, numbers, size, share, ratio, decay,
    OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Updates consecutive elements of a weight."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    inside = offsets < size - start
    w = tl.load(weight + start + offsets, mask=inside)
    o = tl.load(direction + start + offsets, mask=inside).to(tl.float32)
    lr = tl.load(numbers + 4) * share
    w = w * (1.0 - lr * decay) - o * (lr * ratio)
    left = tl.where(tl.load(numbers) != 0.0, size - start, 0)
    here = offsets < left
    tl.store(weight + start + offsets, w, mask=here)
    if OUT:
        tl.store(out + start + offsets, w.to(out.dtype.element_ty), mask=here)


def _launch_ranges(size: int) -> list[slice]:
    """Returns the ranges of elements of separate launches."""
    starts = range(0, size, MAX_LAUNCH_ELEMENTS)
    return [slice(start, min(start + MAX_LAUNCH_ELEMENTS, size)) for start in starts]


def update_momentum(
    momentum: Tensor,
    grad: Tensor,
    update: Tensor,
    *,
    now: UpdateScalars,
    beta: float,
    nesterov: bool,
) -> None:
    """`muon.apply_momentum` in one kernel, for contiguous tensors `[n]`."""
    with torch.cuda.device_of(momentum):
        for here in _launch_ranges(momentum.numel()):
            size = here.stop - here.start
            _momentum_kernel[(triton.cdiv(size, BLOCK_ELEMENTS),)](
                momentum[here], grad[here], update[here], now.kernel_scalars, size,
                beta, 1.0 - beta,
                NESTEROV=nesterov, BLOCK=BLOCK_ELEMENTS, num_warps=8,
            )  # fmt: skip


def update_weight(
    weight: Tensor,
    direction: Tensor,
    *,
    now: UpdateScalars,
    share: float,
    ratio: float,
    decay: float,
    out: Tensor | None,
) -> None:
    """`muon.apply_update` in one kernel, for contiguous tensors `[n]`."""
    with torch.cuda.device_of(weight):
        for here in _launch_ranges(weight.numel()):
            size = here.stop - here.start
            _weight_kernel[(triton.cdiv(size, BLOCK_ELEMENTS),)](
                # An unused pointer argument still needs a tensor: pass the weight.
                weight[here], direction[here], weight if out is None else out[here],
                now.kernel_scalars, size, share, ratio, decay,
                OUT=out is not None, BLOCK=BLOCK_ELEMENTS, num_warps=8,
            )  # fmt: skip
