"""Update rules: functions of flat tensors that know nothing of grids.

A new optimizer is one of these.
"""

from __future__ import annotations

import torch
from torch import Tensor


def adamw(
    weight: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    step: Tensor,
    good: Tensor,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.95,
    eps: float = 1e-8,
    decay: float = 0.0,
) -> None:
    """AdamW in place: decoupled decay, bias-corrected moments; `step` counts from 1.

    good: whether to update at all, as a bool on the device; if not, no bit changes.
    """
    made = good.to(step.dtype)  # scalars stay in float64 on the device
    grad = torch.where(good, grad, 0.0)  # what is not a number stays so when multiplied by 0
    weight.mul_(1.0 - lr * decay * made)
    mean.mul_(1.0 - (1.0 - beta1) * made).add_(grad, alpha=1.0 - beta1)
    square.mul_(1.0 - (1.0 - beta2) * made).addcmul_(grad, grad, value=1.0 - beta2)
    root = square.sqrt().div_((1.0 - beta2**step).sqrt()).add_(eps)
    weight.sub_(torch.div(mean, root, out=root).mul_(made * lr / (1.0 - beta1**step)))
