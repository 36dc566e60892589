"""AdamW as a pure function of flat tensors, independent of the grid.

A new optimizer needs another such function. `low_precision_states` describes how moments that are
narrower than the weight are rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ranvier.optim.low_precision_states import Moments, RoundingKey


@dataclass(frozen=True)
class UpdateScalars:
    """The scalars of one update, which all tensors share, on the device."""

    step: Tensor
    """Number of the update, from 1 (float64)."""
    should_update: Tensor
    """Whether to apply the update (bool)."""
    grad_factor: Tensor | None
    """Factor of gradients (clipping, unscaling); None for 1."""
    betas: tuple[float, float]
    lr: Tensor
    """Learning rate (float64)."""
    step_int32: Tensor
    """`step` for the kernel (int32)."""
    kernel_scalars: Tensor
    """Scalars for the kernel (fp32): good, factor, 1 / (1 - β₁ᵗ), 1 / √(1 - β₂ᵗ), lr."""

    @classmethod
    def for_update(
        cls,
        step: Tensor,
        good: Tensor,
        factor: Tensor | None,
        betas: tuple[float, float],
        lr: float | Tensor,
    ) -> UpdateScalars:
        """Computes the scalars once for all tensors, bias corrections in float64."""
        step = step.double()
        if isinstance(lr, Tensor):
            rate = lr
        else:
            rate = torch.full_like(step, lr)
        numbers = [
            good,
            torch.ones_like(step) if factor is None else factor,
            1.0 / (1.0 - betas[0] ** step),
            (1.0 - betas[1] ** step).rsqrt(),
            rate,
        ]
        packed = torch.stack([number.double() for number in numbers]).float()
        return cls(step, good, factor, betas, rate, step.to(torch.int32), packed)


def adamw_update(
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
    """Applies AdamW in place to tensors `[n]`, with decoupled weight decay.

    g ← factor · g, m ← β₁m + (1 - β₁)g, v ← β₂v + (1 - β₂)g²,
    w ← (1 - lr · decay)w - lr / (1 - β₁ᵗ) · m / (√(v / (1 - β₂ᵗ)) + eps), in the dtype of `weight`.

    Without `now.should_update` all tensors remain bit-identical. share: factor of the learning
    rate. out: the new weight is also written here, in the dtype of `out`. key: source of random
    bits for the stochastic rounding of narrower moments.
    """
    # Scalars are float64 tensors on the device.
    (beta1, beta2), lr = now.betas, now.lr * share
    grad = grad.to(weight.dtype)
    if now.grad_factor is not None:
        grad = grad * now.grad_factor
    mean, square = moments.dequantize(weight.dtype)
    # 1 - (1 - β) instead of β, as in the fused kernel, so that both round in the same way.
    mean = mean.mul(1.0 - (1.0 - beta1)).add_(grad, alpha=1.0 - beta1)
    square = square.mul(1.0 - (1.0 - beta2)).addcmul_(grad, grad, value=1.0 - beta2)
    root = square.sqrt().div_((1.0 - beta2**now.step).sqrt()).add_(eps)
    change = torch.div(mean, root, out=root).mul_(lr / (1.0 - beta1**now.step))
    new = [weight.mul(1.0 - lr * decay).sub_(change)]
    new += moments.round_stochastically(mean, square, now.step, key).tensors
    for old, value in zip([weight, *moments.tensors], new, strict=True):
        # A select instead of a branch, which would synchronize with the host.
        old.copy_(torch.where(now.should_update, value, old))
    if out is not None:
        out.copy_(torch.where(now.should_update, weight.to(out.dtype), out))
