"""SGD with momentum as pure functions of flat tensors, independent of the grid.

The rule of `torch.optim.SGD` without dampening: weight decay is a part of the gradient and enters
the momentum, so that weights shrink by about lr · decay / (1 - β) per step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ranvier.optim.adamw import UpdateScalars


def momentum_update(momentum: Tensor, grad: Tensor, *, beta: float) -> Tensor:
    """Returns the new momentum, `[n]`: m ← βm + g."""
    return momentum.mul(beta).add_(grad)


def weight_update(weight: Tensor, momentum: Tensor, *, lr: float | Tensor) -> Tensor:
    """Returns the new weight: w ← w - lr · m, in the dtype of `weight`.

    lr: a number, or a float64 tensor on the device of the weight, which is not read by the host of
    a GPU.
    """
    if isinstance(lr, Tensor) and lr.device.type == "cpu":
        lr = float(lr)
    if isinstance(lr, Tensor):
        return weight.sub(momentum.to(weight.dtype).mul(lr))
    return weight.add(momentum, alpha=-lr)


def sgd_update(
    weight: Tensor,
    momentum: Tensor,
    grad: Tensor,
    *,
    now: UpdateScalars,
    beta: float,
    share: float = 1.0,
    decay: float = 0.0,
) -> None:
    """Applies SGD in place to tensors `[n]`: m ← βm + g + decay · w, w ← w - lr · m.

    Without `now.should_update` all tensors remain bit-identical. share: factor of the learning
    rate.
    """
    grad = grad.to(weight.dtype)
    if now.grad_factor is not None:
        grad = grad * now.grad_factor.to(weight.dtype)
    if decay:
        grad = grad.add(weight, alpha=decay)
    new_momentum = momentum_update(momentum, grad, beta=beta)
    new = weight_update(weight, new_momentum, lr=now.lr * share)
    # A select instead of a branch, which would synchronize with the host.
    weight.copy_(torch.where(now.should_update, new, weight))
    momentum.copy_(torch.where(now.should_update, new_momentum, momentum))
