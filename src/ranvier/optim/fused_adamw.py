"""Fused AdamW: the update as one kernel that reads and writes every byte once.

With bf16 gradients and working weights AdamW moves 28 bytes per parameter, 20 with bf16 moments and
16 with 8-bit moments, and takes about as long as a copy of the same size. Scalars that change in
each step are read on the device, so the host never waits. On a CPU torch's own fused kernel is used
if moments and weights have the same dtype. In other cases (no Triton, other dtypes) the reference
`adamw_update` runs instead, with the same random bits.

Not supported: non-contiguous tensors.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ranvier import launch
from ranvier.optim import adamw as reference
from ranvier.optim.adamw import UpdateScalars as UpdateScalars
from ranvier.optim.low_precision_states import BLOCK_SIZE, MIN_BLOCK_SCALE, Moments, RoundingKey

HAS_TRITON = launch.has_triton()
triton: Any = importlib.import_module("triton") if HAS_TRITON else None
tl: Any = importlib.import_module("triton.language") if HAS_TRITON else None
BLOCK_ELEMENTS = 1024
WARP_ELEMENTS = 128
"""Elements per program (a quantization block for 8-bit moments) and per warp. Four elements per
thread are 16 bytes in fp32; with more, fp32 and bf16 would need different thread layouts and
exchange elements through shared memory."""
MAX_LAUNCH_ELEMENTS = 1 << 30
"""Maximum number of elements of one kernel launch, which counts them in 32 bits."""
NORM_PROGRAMS = 528
"""Number of programs of the sum of squares: a few for each SM of a device."""
VECTOR_MULTIPLE = 16
"""Sizes must be a multiple of this for 16-byte accesses."""
HALF_DTYPES = (torch.bfloat16, torch.float16)
CPU_VECTOR_ELEMENTS = 64
"""A multiple of the number of elements of a vector register of any CPU."""
NORM_ROW = 1024
"""Elements per partial norm on a CPU."""


def _jit_kernel(*still: str) -> Callable[[Any], Any]:
    """Applies `triton.jit` if Triton is installed. still: arguments without specialization."""
    return lambda function: (
        triton.jit(function, do_not_specialize=list(still)) if HAS_TRITON else function
    )


def can_use_kernel(
    weight: Tensor,
    grad: Tensor,
    moments: Moments,
    out: Tensor | None = None,
    key: RoundingKey | None = None,
) -> bool:
    """Whether the Triton kernel accepts these tensors."""
    mean = moments.mean
    square = moments.square
    tensors = [weight, grad, mean, square, *([] if out is None else [out])]
    return (
        HAS_TRITON
        and all(x.is_cuda and x.is_contiguous() for x in tensors)
        and weight.dtype == torch.float32
        and grad.dtype in (torch.float32, *HALF_DTYPES)
        and mean.dtype == square.dtype
        and mean.dtype in (torch.float32, torch.bfloat16, torch.uint8)
        and (out is None or out.dtype in HALF_DTYPES)
        and (
            key is None
            or (
                len(key.merged_dims) <= 3
                and all(n < MAX_LAUNCH_ELEMENTS for n, _, _ in key.merged_dims[1:])
            )
        )
    )


def fused_adamw(
    weight: Tensor,
    grad: Tensor,
    moments: Moments,
    *,
    now: UpdateScalars,
    share: float = 1.0,
    eps: float = 1e-8,
    decay: float = 0.0,
    out: Tensor | None = None,
    key: RoundingKey | None = None,
) -> None:
    """`adamw.adamw_update` on tensors `[n]`, in one kernel if possible.

    Elements after the last multiple of 16, or after the last whole block, need a separate launch.
    """
    # Meta tensors represent a device with the kernel, which allocates nothing.
    if weight.is_meta:
        return
    rest: Any = {"share": share, "eps": eps, "decay": decay}
    if can_use_cpu_kernel(weight, moments):
        # On a CPU the flag can be read without a synchronization.
        if now.should_update:
            grad = grad.to(weight.dtype)
            if now.grad_factor is not None:
                grad = grad * now.grad_factor.to(weight.dtype)
            cpu_adamw([CpuUpdate(weight, grad, moments)], now=now, **rest)
            if out is not None:
                out.copy_(weight)
        return
    if not can_use_kernel(weight, grad, moments, out, key):
        reference.adamw_update(weight, grad, moments, now=now, key=key, out=out, **rest)
        return
    assert all(x.shape == weight.shape for x in (grad, moments.mean, moments.square)), weight.shape
    assert key is not None or moments.mean.dtype == torch.float32, "narrow moments need a key"
    end = weight.numel()
    coded = moments.scales is not None
    # Triton uses wide loads for sizes divisible by 16; the tail is separate, so that the other
    # elements use them.
    even = end - end % (BLOCK_SIZE if coded else VECTOR_MULTIPLE)
    if coded:
        size = BLOCK_SIZE
    else:
        size = BLOCK_ELEMENTS
    fresh1 = 1.0 - now.betas[0]
    fresh2 = 1.0 - now.betas[1]
    for start, stop in pairwise(sorted({0, *range(0, even, MAX_LAUNCH_ELEMENTS), even, end})):
        part = moments.slice_range(start, stop)
        here = slice(start, stop)
        with torch.cuda.device_of(weight):
            _adamw_kernel[(triton.cdiv(stop - start, size),)](
                *(weight[here], grad[here], part.mean, part.square),
                # An unused pointer argument still needs a tensor: pass the weight.
                weight if part.scales is None else part.scales,
                weight if out is None else out[here],
                *(now.kernel_scalars, now.step_int32, stop - start),
                0 if part.scales is None else part.scales.stride(0),
                *_element_positions(key, start),
                *(share, decay, fresh1, 1.0 - fresh1, fresh2, 1.0 - fresh2, eps),
                DIMS=0
                if key is None or moments.mean.dtype == torch.float32
                else len(key.merged_dims),
                OUT=out is not None,
                SIZE=size,
                TINY=MIN_BLOCK_SCALE,
                num_warps=size // WARP_ELEMENTS,
            )


def can_use_cpu_kernel(weight: Tensor, moments: Moments) -> bool:
    """Whether torch's fused CPU kernel accepts these tensors."""
    tensors = [weight, moments.mean, moments.square]
    return (
        moments.scales is None
        and weight.dtype in (torch.float32, torch.float64)
        and all(x.device.type == "cpu" and x.is_contiguous() for x in tensors)
        and all(x.dtype == weight.dtype for x in tensors)
    )


@dataclass(frozen=True)
class CpuUpdate:
    """Tensors `[n]` for torch's fused CPU kernel; the gradient includes its factor."""

    weight: Tensor
    grad: Tensor
    moments: Moments

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the kernel reads."""
        return [self.weight, self.grad, self.moments.mean, self.moments.square]


def cpu_adamw(
    updates: Sequence[CpuUpdate], *, now: UpdateScalars, share: float, eps: float, decay: float
) -> None:
    """`adamw.adamw_update` for many tensors in one call of torch's fused CPU kernel.

    It is 20 times as fast as the reference. The kernel rounds the last elements, which do not fill
    a vector register, differently from the others. They are updated in padded buffers, so that
    results do not depend on the split of states into tiles and ranges.
    """
    states: list[list[Tensor]] = []
    ends: list[tuple[Tensor, Tensor]] = []
    for update in updates:
        rest = update.weight.numel() % CPU_VECTOR_ELEMENTS
        if not rest:
            states.append(update.tensors)
            continue
        states.append([x[:-rest] for x in update.tensors])
        states.append([F.pad(x[-rest:], (0, CPU_VECTOR_ELEMENTS - rest)) for x in update.tensors])
        ends += [
            (x[-rest:], full[:rest]) for x, full in zip(update.tensors, states[-1], strict=True)
        ]
    weights, grads, means, squares = (list(tensors) for tensors in zip(*states, strict=True))
    torch._fused_adamw_(
        weights,
        grads,
        means,
        squares,
        [],
        [now.step.float()] * len(weights),
        lr=float(now.lr) * share,
        beta1=now.betas[0],
        beta2=now.betas[1],
        weight_decay=decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
    for end, updated in ends:
        end.copy_(updated)


def _element_positions(key: RoundingKey | None, start: int) -> list[int]:
    """Returns the position arguments of the kernel: seed, base, and how columns and rows wrap.

    The box has dims (planes, rows, columns). The first element is at `base` in the whole weight and
    at (row, column) in its plane. At the end of a row the index increases by another `skip`, at the
    end of a plane by another `jump`.
    """
    if key is None:
        return [0] * 8
    planes, rows, columns = ([(1, 0, 1)] * 2 + key.merged_dims)[-3:]
    pitch = columns[2]
    plane = rows[2] * columns[2]
    above, column = divmod(key.first + start, columns[0])
    before, row = divmod(above, rows[0])
    base = (before + planes[1]) * plane + (row + rows[1]) * pitch + column + columns[1]
    skip = pitch - columns[0]
    jump = plane - rows[0] * pitch
    return [key.seed, base, column, columns[0], row, rows[0], skip, jump]


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the sum of the squares of all elements in fp32 or float64, as a 0-dim tensor.

    On CUDA every element is read once, and no tensor of squares is stored.
    """
    if any(x.dtype == torch.float64 for x in tensors):
        wide = torch.float64
    else:
        wide = torch.float32
    # Meta tensors represent a device with the kernel.
    if tensors[0].is_meta:
        return torch.zeros((), dtype=wide, device=tensors[0].device)
    if not tensors[0].is_cuda:
        return torch.cat([_row_norms(x.to(wide)) for x in tensors]).square().sum()
    some = [x for x in tensors if x.numel() > 0]
    if not some or not all(can_sum_squares(x) for x in some):
        parts = [x.to(wide).square().sum() for x in some]
        if parts:
            return torch.stack(parts).sum()
        return tensors[0].new_zeros((), dtype=wide)
    return partial_square_sums(some).sum()


def _row_norms(x: Tensor) -> Tensor:
    """Returns the norms of rows of NORM_ROW elements; the last one is the norm of the remainder.

    A single norm would add all squares one by one and accumulate rounding errors.
    """
    rest = x.numel() % NORM_ROW
    flat = x.reshape(-1)
    rows: Tensor = torch.linalg.vector_norm(flat[: x.numel() - rest].view(-1, NORM_ROW), dim=-1)
    if not rest:
        return rows
    return torch.cat([rows, torch.linalg.vector_norm(flat[x.numel() - rest :], keepdim=True)])


def can_sum_squares(x: Tensor) -> bool:
    """Whether the kernel supports the sum of squares of a tensor."""
    return HAS_TRITON and x.is_cuda and x.is_contiguous() and x.dtype != torch.float64


def partial_square_sums(tensors: Sequence[Tensor]) -> Tensor:
    """Returns partial sums of squares of each tensor, `[tensors, NORM_PROGRAMS]`."""
    sums = torch.empty(len(tensors), NORM_PROGRAMS, device=tensors[0].device)
    with torch.cuda.device_of(sums):
        for x, row in zip(tensors, sums, strict=True):
            _square_sum_kernel[(NORM_PROGRAMS,)](x, row, x.numel(), BLOCK=4096, num_warps=8)
    return sums


# ---- kernels --------------------------------------------------------------------------------


@_jit_kernel()
def _square_sum_kernel(x, sums, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums the squares of every `num_programs`-th block."""
    total = tl.zeros([BLOCK], tl.float32)
    offsets = tl.arange(0, BLOCK)
    for block in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        # int64: a tensor may have 2³¹ elements or more.
        start = tl.cast(block, tl.int64) * BLOCK
        here = offsets < size - start
        y = tl.load(x + start + offsets, mask=here, other=0.0).to(tl.float32)
        total += y * y
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


@_jit_kernel()
def _mix_bits(x):  # type: ignore[no-untyped-def]
    """`mix_bits` on 32-bit integers, which wrap around."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@_jit_kernel()
def _round_to_bf16(x, bits):  # type: ignore[no-untyped-def]
    """`stochastic_round_bf16`."""
    pattern = x.to(tl.uint32, bitcast=True)
    rounded = ((pattern + bits) & 0xFFFF0000).to(tl.float32, bitcast=True)
    # If all exponent bits are set, x is inf or NaN and must not change.
    finite = (pattern & 0x7F800000) != 0x7F800000
    return tl.where(finite, rounded, x).to(tl.bfloat16)


@_jit_kernel()
def _random_bits(index, step, seed):  # type: ignore[no-untyped-def]
    """`RoundingKey.random_bits` of 64-bit indices."""
    key = _mix_bits(_mix_bits(step.to(tl.uint32)) ^ seed.to(tl.uint32))
    word = _mix_bits(index.to(tl.uint32) ^ key)
    return _mix_bits(word + (index >> 32).to(tl.uint32) * 0x9E3779B1 + key)


@_jit_kernel()
def _global_index(offsets, base, column, columns, row, rows, skip, jump, DIMS: tl.constexpr):  # type: ignore[no-untyped-def]
    """`RoundingKey.global_index` for offsets below 2³¹, with 32-bit divisions."""
    index = base + offsets
    if DIMS > 1:
        ended = (offsets.to(tl.uint32) + column.to(tl.uint32)) // columns.to(tl.uint32)
        index += ended.to(tl.int64) * skip
        if DIMS > 2:
            index += ((ended + row.to(tl.uint32)) // rows.to(tl.uint32)).to(tl.int64) * jump
    return index


@_jit_kernel()
def _decode_moments(mean, square, scale1, scale2):  # type: ignore[no-untyped-def]
    """`dequantize_moment` of both moments."""
    c = mean.to(tl.int8, bitcast=True).to(tl.float32)
    # 16129 = 127².
    m = c * tl.abs(c) * (1.0 / 16129.0) * scale1
    c = square.to(tl.float32) * (1.0 / 255.0)
    c = c * c
    return m, c * c * scale2


@_jit_kernel()
def _encode_block(x, bits, MEAN: tl.constexpr, TINY: tl.constexpr):  # type: ignore[no-untyped-def]
    """`_encode_blocks` for one block; returns its codes and its scale."""
    size = tl.abs(x)
    scale = tl.max(size, 0)
    if MEAN:
        scale = tl.where(scale < TINY, 0.0, scale)
        full = tl.where(scale > 0.0, scale, 1.0)
        # div_rn is correctly rounded, as in the reference; `/` would be approximate. 16129 = 127².
        y = size * tl.div_rn(16129.0, full)
        c = tl.minimum(tl.floor(tl.sqrt(y)), 126.0)
        above = y - c * c
        gap = 2.0 * c + 1.0
    else:
        scale = tl.where(scale > 0.0, tl.maximum(scale, TINY), 0.0)
        full = tl.where(scale > 0.0, scale, 1.0)
        # 4228250625 = 255⁴.
        y = size * tl.div_rn(4228250625.0, full)
        c = tl.minimum(tl.floor(tl.sqrt(tl.sqrt(y))), 254.0)
        above = y - (c * c) * (c * c)
        gap = (2.0 * c + 1.0) * (2.0 * c * (c + 1.0) + 1.0)
    c = tl.where((bits.to(tl.float32) + 0.5) * gap < above * 65536.0, c + 1.0, c)
    if MEAN:
        c = tl.where(x < 0.0, -c, c)
    else:
        c = tl.where(x > 0.0, tl.maximum(c, 1.0), c)
    return c.to(tl.int32).to(tl.uint8), scale


@_jit_kernel("apart", "seed", "base", "column", "columns", "row", "rows", "skip", "jump")
def _adamw_kernel(  # type: ignore[no-untyped-def]
    weight, grad, mean, square, scales, out, numbers, count, size, apart, seed,
    base: tl.int64, column: tl.int64, columns: tl.int64, row: tl.int64, rows: tl.int64,
    skip: tl.int64, jump: tl.int64,
    share, decay, fresh1, kept1, fresh2, kept2, eps,
    DIMS: tl.constexpr, OUT: tl.constexpr, SIZE: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    """Updates consecutive elements; with 8-bit moments a program has exactly one block."""
    start = tl.program_id(0).to(tl.int64) * SIZE
    offsets = tl.arange(0, SIZE)
    inside = offsets < size - start
    # `numbers` is `UpdateScalars.kernel_scalars`: good, factor, both bias corrections, lr.
    g = tl.load(grad + start + offsets, mask=inside).to(tl.float32) * tl.load(numbers + 1)
    m = tl.load(mean + start + offsets, mask=inside)
    v = tl.load(square + start + offsets, mask=inside)
    w = tl.load(weight + start + offsets, mask=inside)
    if mean.dtype.element_ty == tl.uint8:
        scales += tl.program_id(0)
        m, v = _decode_moments(m, v, tl.load(scales), tl.load(scales + apart))
    m = tl.fma(g, fresh1, m.to(tl.float32) * kept1)
    v = tl.fma(g * g, fresh2, v.to(tl.float32) * kept2)
    root = tl.sqrt(v) * tl.load(numbers + 3) + eps
    lr = tl.load(numbers + 4) * share
    w = w * (1.0 - lr * decay) - m / root * (lr * tl.load(numbers + 2))
    # A skipped update writes nothing. A mask is used instead of a branch, for which all loads above
    # would have to wait.
    left = tl.where(tl.load(numbers) != 0.0, size - start, 0)
    here = offsets < left
    tl.store(weight + start + offsets, w, mask=here)
    if OUT:
        tl.store(out + start + offsets, w.to(out.dtype.element_ty), mask=here)
    if DIMS > 0:
        index = _global_index(start + offsets, base, column, columns, row, rows, skip, jump, DIMS)
        bits = _random_bits(index, tl.load(count), seed)
        if mean.dtype.element_ty == tl.bfloat16:
            m = _round_to_bf16(m, bits >> 16)
            v = _round_to_bf16(v, bits & 0xFFFF)
        else:
            # Values after the end are undefined and must not affect the maximum of the block.
            m, scale1 = _encode_block(tl.where(inside, m, 0.0), bits >> 16, True, TINY)
            v, scale2 = _encode_block(tl.where(inside, v, 0.0), bits & 0xFFFF, False, TINY)
            tl.store(scales, scale1, mask=left > 0)
            tl.store(scales + apart, scale2, mask=left > 0)
    tl.store(mean + start + offsets, m, mask=here)
    tl.store(square + start + offsets, v, mask=here)
