"""Update rules: functions of flat tensors that know nothing of grids.

A new optimizer is one of these. Moments may be narrower than the weight: then they are rounded up
or down at random, so that what is too small for a bf16 number still counts on average. The random
bits are a function of (seed, number of the update, element): resumed runs and other ranges over
data round alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
"""Mask of 32 bits."""


def adamw(
    weight: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    step: Tensor,
    good: Tensor,
    lr: float | Tensor,
    beta1: float = 0.9,
    beta2: float = 0.95,
    eps: float = 1e-8,
    decay: float = 0.0,
    factor: Tensor | None = None,
    out: Tensor | None = None,
    seed: int = 0,
    first: int = 0,
) -> None:
    """AdamW in place on tensors `[n]`: decoupled decay, bias-corrected moments.

    g ← factor · g, m ← β₁m + (1 - β₁)g, v ← β₂v + (1 - β₂)g²,
    w ← (1 - lr · decay)w - lr / (1 - β₁ᵗ) · m / (√(v / (1 - β₂ᵗ)) + eps), in the type of `weight`.

    step: t, the number of this update from 1. good: whether to update at all, as a bool on the
    device; if not, no bit changes. out: takes the new weight in its own type. seed, first: stream
    and first index of the random bits with which bf16 moments are rounded.
    """
    grad = grad.to(weight.dtype)  # scalars stay in float64 on the device
    if factor is not None:
        grad = grad * factor
    new_mean = mean.to(weight.dtype).mul(1.0 - (1.0 - beta1)).add_(grad, alpha=1.0 - beta1)
    new_square = square.to(weight.dtype).mul(1.0 - (1.0 - beta2))
    new_square.addcmul_(grad, grad, value=1.0 - beta2)
    root = new_square.sqrt().div_((1.0 - beta2**step).sqrt()).add_(eps)
    change = torch.div(new_mean, root, out=root).mul_(lr / (1.0 - beta1**step))
    new_weight = weight.mul(1.0 - lr * decay).sub_(change)
    if mean.dtype != weight.dtype:
        bits = random_bits(step, weight.numel(), seed=seed, first=first)
        new_mean, new_square = narrow(new_mean, bits >> 16), narrow(new_square, bits & 0xFFFF)
    for old, new in ((weight, new_weight), (mean, new_mean), (square, new_square)):
        old.copy_(torch.where(good, new, old))
    if out is not None:
        out.copy_(torch.where(good, weight.to(out.dtype), out))


def random_bits(step: Tensor, count: int, *, seed: int, first: int) -> Tensor:
    """32 random bits of the elements from `first` on, as integers in [0, 2³²): `[count]`."""
    index = torch.arange(first, first + count, device=step.device)
    key = mix(mix(step.to(torch.int64) & WORD) ^ folded(seed))
    word = mix((index & WORD) ^ key)
    return mix((word + (index >> 32) * 0x9E3779B1 + key) & WORD)


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers (held in 64 bits) that looks random."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & WORD
    return x ^ (x >> 16)


def folded(seed: int) -> int:
    """31 bits of a seed, which a kernel takes as a signed number."""
    return (seed ^ (seed >> 32)) & 0x7FFFFFFF


def narrow(x: Tensor, bits: Tensor) -> Tensor:
    """`x` rounded to bf16 at random, without bias: up with the probability of what is cut off.

    bits: uniform integers in [0, 2¹⁶), added to the half of a float that bf16 does not have.
    """
    x = x.float()
    rounded = ((x.view(torch.int32) + bits.to(torch.int32)) & -0x10000).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)
