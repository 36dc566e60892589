"""Update rules: functions of flat tensors that know nothing of grids.

A new optimizer is one of these.
"""

from __future__ import annotations

from torch import Tensor


def adamw(
    weight: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    step: int,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.95,
    eps: float = 1e-8,
    decay: float = 0.0,
) -> None:
    """AdamW in place: decoupled decay, bias-corrected moments; `step` counts from 1."""
    weight.mul_(1.0 - lr * decay)
    mean.lerp_(grad, 1.0 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
    root = square.sqrt().div_((1.0 - beta2**step) ** 0.5).add_(eps)
    weight.addcdiv_(mean, root, value=-lr / (1.0 - beta1**step))
