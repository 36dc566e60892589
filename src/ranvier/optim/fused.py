"""Fused updates: a rule as one kernel that reads and writes every byte once.

With bf16 gradients and working weights AdamW moves 28 bytes a parameter, or 20 with bf16 moments,
and its time is that of a copy of as many. What changes from step to step is read on the device, so
the host never waits. Where there is no kernel (no CUDA, no Triton, other types) the plain rule runs
instead: its twin, with the same random bits.

Not handled: moments narrower than bf16, tensors with gaps.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ranvier import launch
from ranvier.optim import rules

FOUND = launch.triton()
triton: Any = importlib.import_module("triton") if FOUND else None
tl: Any = importlib.import_module("triton.language") if FOUND else None
BLOCK, WARPS = 1024, 8
"""Elements and warps of a program: four elements a thread, which are 16 bytes in fp32. With more,
fp32 and bf16 would want different threads for an element and change places in shared memory."""
PROGRAMS = 528
"""Of the sum of squares: a few for each processor of a device."""
EVEN = 16
"""What a size must be a multiple of for accesses of 16 bytes."""
NARROW = (torch.bfloat16, torch.float16)


def _kernel(*still: str) -> Callable[[Any], Any]:
    """Compile a function for the device. still: arguments whose values make no other kernel."""
    return lambda function: (
        triton.jit(function, do_not_specialize=list(still)) if FOUND else function
    )


@dataclass(frozen=True)
class Scalars:
    """The numbers of one update that are the same for all tensors, on the device."""

    step: Tensor
    """Number of the update, from 1 (float64)."""
    good: Tensor
    """Whether to update at all (bool)."""
    factor: Tensor | None
    """What gradients are multiplied by."""
    betas: tuple[float, float]
    lr: Tensor
    """The learning rate (float64)."""
    count: Tensor
    """`step` as the kernel reads it (int32)."""
    numbers: Tensor
    """good, factor, 1 / (1 - β₁ᵗ), 1 / √(1 - β₂ᵗ), lr as the kernel reads them (fp32)."""

    @classmethod
    def of(
        cls,
        step: Tensor,
        good: Tensor,
        factor: Tensor | None,
        betas: tuple[float, float],
        lr: float | Tensor,
    ) -> Scalars:
        """Compute them once for all tensors; bias corrections in float64."""
        step = step.double()
        rate = lr if isinstance(lr, Tensor) else torch.full_like(step, lr)
        numbers = [
            good,
            torch.ones_like(step) if factor is None else factor,
            1.0 / (1.0 - betas[0] ** step),
            (1.0 - betas[1] ** step).rsqrt(),
            rate,
        ]
        packed = torch.stack([number.double() for number in numbers]).float()
        return cls(step, good, factor, betas, rate, step.to(torch.int32), packed)


def available(
    weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor, out: Tensor | None = None
) -> bool:
    """Whether the kernel takes these tensors."""
    tensors = [weight, grad, mean, square, *([] if out is None else [out])]
    return (
        FOUND
        and all(x.is_cuda and x.is_contiguous() for x in tensors)
        and weight.dtype == torch.float32
        and grad.dtype in (torch.float32, *NARROW)
        and mean.dtype == square.dtype
        and mean.dtype in (torch.float32, torch.bfloat16)
        and (out is None or out.dtype in NARROW)
    )


def adamw(
    weight: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    now: Scalars,
    share: float = 1.0,
    eps: float = 1e-8,
    decay: float = 0.0,
    out: Tensor | None = None,
    seed: int = 0,
    first: int = 0,
) -> None:
    """`rules.adamw` on tensors `[n]`, in one kernel where there is one.

    share: factor of the learning rate.
    """
    if available(weight, grad, mean, square, out):
        started(
            weight,
            grad,
            mean,
            square,
            now=now,
            share=share,
            eps=eps,
            decay=decay,
            out=out,
            seed=seed,
            first=first,
        )
        return
    rules.adamw(
        weight,
        grad,
        mean,
        square,
        step=now.step,
        good=now.good,
        lr=now.lr * share,
        beta1=now.betas[0],
        beta2=now.betas[1],
        eps=eps,
        decay=decay,
        factor=now.factor,
        out=out,
        seed=seed,
        first=first,
    )


def started(
    weight: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    now: Scalars,
    share: float = 1.0,
    eps: float,
    decay: float,
    out: Tensor | None,
    seed: int,
    first: int,
) -> None:
    """Start the kernel; elements behind a multiple of 16 get a small one of their own."""
    assert all(x.shape == weight.shape for x in (grad, mean, square)), (weight.shape, grad.shape)
    fresh1, fresh2 = 1.0 - now.betas[0], 1.0 - now.betas[1]
    end = weight.numel()
    for start, stop in ((0, end - end % EVEN), (end - end % EVEN, end)):
        if start == stop:
            continue
        tensors = [
            x[start:stop] for x in (weight, grad, mean, square, weight if out is None else out)
        ]
        with torch.cuda.device_of(weight):
            _adamw[(triton.cdiv(stop - start, BLOCK),)](
                *tensors,
                now.numbers,
                now.count,
                stop - start,
                first + start,
                rules.folded(seed),
                share,
                decay,
                fresh1,
                1.0 - fresh1,
                fresh2,
                1.0 - fresh2,
                eps,
                OUT=out is not None,
                BLOCK=BLOCK,
                num_warps=WARPS,
            )


def square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of all elements, in fp32 (float64 if one of them is), as a 0-dim tensor.

    On CUDA every element is read once and no tensor of squares is made.
    """
    wide = torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32
    if not tensors[0].is_cuda:  # the norms of the CPU add up fp32 numbers one by one
        return torch.stack([x.to(wide).square().sum() for x in tensors]).sum()
    some = [x for x in tensors if x.numel() > 0]
    if not some or not all(summable(x) for x in some):
        parts = [x.to(wide).square().sum() for x in some]
        return torch.stack(parts).sum() if parts else tensors[0].new_zeros((), dtype=wide)
    return squares(some).sum()


def summable(x: Tensor) -> bool:
    """Whether there is a kernel for the sum of its squares."""
    return FOUND and x.is_cuda and x.is_contiguous() and x.dtype != torch.float64


def squares(tensors: Sequence[Tensor]) -> Tensor:
    """Sums of the squares of many parts of each tensor, `[tensors, PROGRAMS]`."""
    sums = torch.empty(len(tensors), PROGRAMS, device=tensors[0].device)
    with torch.cuda.device_of(sums):
        for x, row in zip(tensors, sums, strict=True):
            _squares[(PROGRAMS,)](x, row, x.numel(), BLOCK=4096, num_warps=8)
    return sums


# ---- on the device --------------------------------------------------------------------------


@_kernel()
def _squares(x, sums, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of the squares of every so many blocks."""
    total = tl.zeros([BLOCK], tl.float32)
    offsets = tl.arange(0, BLOCK)
    for block in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        start = tl.cast(block, tl.int64) * BLOCK
        here = offsets < size - start
        y = tl.load(x + start + offsets, mask=here, other=0.0).to(tl.float32)
        total += y * y
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


@_kernel()
def _mix(x):  # type: ignore[no-untyped-def]
    """`rules.mix` of 32-bit integers, which wrap around."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@_kernel()
def _narrow(x, bits):  # type: ignore[no-untyped-def]
    """`rules.narrow`."""
    pattern = x.to(tl.uint32, bitcast=True)
    rounded = ((pattern + bits) & 0xFFFF0000).to(tl.float32, bitcast=True)
    finite = (pattern & 0x7F800000) != 0x7F800000
    return tl.where(finite, rounded, x).to(tl.bfloat16)


@_kernel()
def _random(index, step, seed):  # type: ignore[no-untyped-def]
    """`rules.random_bits` of 64-bit indices."""
    key = _mix(_mix(step.to(tl.uint32)) ^ seed.to(tl.uint32))
    word = _mix(index.to(tl.uint32) ^ key)
    return _mix(word + (index >> 32).to(tl.uint32) * 0x9E3779B1 + key)


@_kernel("first", "seed")
def _adamw(  # type: ignore[no-untyped-def]
    weight, grad, mean, square, out, numbers, count, size, first, seed,
    share, decay, fresh1, kept1, fresh2, kept2, eps,
    OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The update of one block of elements."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    here = offsets < size - start
    g = tl.load(grad + start + offsets, mask=here).to(tl.float32) * tl.load(numbers + 1)
    m = tl.load(mean + start + offsets, mask=here).to(tl.float32)
    v = tl.load(square + start + offsets, mask=here).to(tl.float32)
    w = tl.load(weight + start + offsets, mask=here)
    m = tl.fma(g, fresh1, m * kept1)
    v = tl.fma(g * g, fresh2, v * kept2)
    root = tl.sqrt(v) * tl.load(numbers + 3) + eps
    lr = tl.load(numbers + 4) * share
    w = w * (1.0 - lr * decay) - m / root * (lr * tl.load(numbers + 2))
    # Nothing is written if not good; a branch would have all that is read wait for that number.
    here = offsets < tl.where(tl.load(numbers) != 0.0, size - start, 0)
    tl.store(weight + start + offsets, w, mask=here)
    if OUT:
        tl.store(out + start + offsets, w.to(out.dtype.element_ty), mask=here)
    if mean.dtype.element_ty == tl.bfloat16:
        bits = _random(first.to(tl.int64) + start + offsets, tl.load(count), seed)
        m, v = _narrow(m, bits >> 16), _narrow(v, bits & 0xFFFF)
    tl.store(mean + start + offsets, m, mask=here)
    tl.store(square + start + offsets, v, mask=here)
