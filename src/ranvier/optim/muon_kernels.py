"""Triton kernels of Muon, for CUDA only: symmetric products, and the two elementwise updates.

A symmetric product needs the tiles on and above the diagonal only; those below are written as
their transposes by the same program. Accumulation is in fp32, and results are rounded once, as in
cuBLAS.

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
descriptors: Any = importlib.import_module("triton.tools.tensor_descriptor")

BLOCK_ELEMENTS = 1024
"""Elements per program of the elementwise kernels."""
MAX_LAUNCH_ELEMENTS = 1 << 30
"""Maximum number of elements of one elementwise launch, which counts them in 32 bits."""


# ---- symmetric products ---------------------------------------------------------------------


@dataclass(frozen=True)
class TileConfig:
    """How a symmetric product is cut into square tiles, one per program."""

    side: int = 128
    depth: int = 64
    """Elements along the summed dim per iteration of the loop."""
    num_warps: int = 4
    max_stages: int = 4
    """Maximum number of iterations whose operands are in shared memory."""

    def num_stages(self, device: torch.device) -> int:
        """Returns the number of stages that fit into the shared memory of a device."""
        properties: Any = torch.cuda.get_device_properties(device)
        # Two operands of 2 bytes per element. The result also passes through shared memory.
        stage_bytes = 2 * 2 * self.side * self.depth
        result_bytes = 2 * self.side * self.side
        free_bytes: int = properties.shared_memory_per_block_optin - result_bytes
        return max(1, min(self.max_stages, free_bytes // stage_bytes))


TILES = TileConfig()


def can_multiply(x: Tensor) -> bool:
    """Whether the kernels support matrices `[n, m, k]` on CUDA: a size and type that can be copied.

    Operands are copied by the tensor memory accelerator of Hopper and later devices, which needs
    rows of a multiple of 16 bytes.
    """
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[-2] % 8 == 0
        and x.shape[-1] % 8 == 0
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
    )


@triton.jit  # type: ignore[untyped-decorator]
def _symmetric_kernel(  # type: ignore[no-untyped-def]
    operand, x, y, size, depth, linear, quadratic,
    POLYNOMIAL: tl.constexpr, TRANSPOSED: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Computes a tile of x xᵀ on or above the diagonal, and writes its transpose below.

    operand: descriptor of x `[n, m, k]`, or of `[n, k, m]` if TRANSPOSED; outside it reads zeros.
    """
    tile = tl.program_id(0)
    matrix = tl.program_id(1)
    # Tiles are counted column by column: column j has tiles 0 to j and begins at j(j + 1) / 2.
    j = ((tl.sqrt(8.0 * tile.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    # The root is rounded: j may be one too large or too small.
    j = tl.where(j * (j + 1) // 2 > tile, j - 1, j)
    j = tl.where((j + 1) * (j + 2) // 2 <= tile, j + 1, j)
    i = tile - j * (j + 1) // 2
    total = tl.zeros([SIDE, SIDE], tl.float32)
    for start in range(0, depth, DEPTH):
        if TRANSPOSED:
            a = operand.load([matrix, start, i * SIDE]).reshape(DEPTH, SIDE).T
            b = operand.load([matrix, start, j * SIDE]).reshape(DEPTH, SIDE)
        else:
            a = operand.load([matrix, i * SIDE, start]).reshape(SIDE, DEPTH)
            b = operand.load([matrix, j * SIDE, start]).reshape(SIDE, DEPTH).T
        total = tl.dot(a, b, total)
    rows = i * SIDE + tl.arange(0, SIDE)
    columns = j * SIDE + tl.arange(0, SIDE)
    inside = (rows < size)[:, None] & (columns < size)[None, :]
    first = matrix.to(tl.int64) * size * size
    above = first + rows.to(tl.int64)[:, None] * size + columns[None, :]
    if POLYNOMIAL:
        values = tl.load(x + above, mask=inside, other=0.0).to(tl.float32)
        total = total * quadratic + values * linear
    result = total.to(y.dtype.element_ty)
    tl.store(y + above, result, mask=inside)
    # A tile on the diagonal is its own transpose.
    if i != j:
        below = first + columns.to(tl.int64)[:, None] * size + rows[None, :]
        inside = (columns < size)[:, None] & (rows < size)[None, :]
        tl.store(y + below, tl.trans(result), mask=inside)


def _launch_symmetric(
    x: Tensor, linear: float, quadratic: float, *, is_polynomial: bool, tiles: TileConfig
) -> Tensor:
    count, size, depth = x.shape
    y = torch.empty(count, size, size, dtype=x.dtype, device=x.device)
    is_transposed = x.stride(-1) != 1
    rows = x.mT if is_transposed else x
    block = (tiles.depth, tiles.side) if is_transposed else (tiles.side, tiles.depth)
    operand = descriptors.TensorDescriptor.from_tensor(rows, [1, *block])
    side = triton.cdiv(size, tiles.side)
    with torch.cuda.device_of(x):
        _symmetric_kernel[(side * (side + 1) // 2, count)](
            operand, x, y, size, depth, linear, quadratic,
            POLYNOMIAL=is_polynomial, TRANSPOSED=is_transposed,
            SIDE=tiles.side, DEPTH=tiles.depth,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages(x.device),
        )  # fmt: skip
    return y


def symmetric_product(x: Tensor, *, tiles: TileConfig = TILES) -> Tensor:
    """Returns x xᵀ, `[n, m, m]`; x: `[n, m, k]`, contiguous or transposed, as `can_multiply`."""
    return _launch_symmetric(x, 0.0, 1.0, is_polynomial=False, tiles=tiles)


def symmetric_polynomial(
    a: Tensor, linear: float, quadratic: float, *, tiles: TileConfig = TILES
) -> Tensor:
    """Returns linear · a + quadratic · a² of contiguous symmetric matrices `[n, m, m]`."""
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
