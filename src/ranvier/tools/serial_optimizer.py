"""Optimizers of one process in plain PyTorch, with which `ranvier verify` compares a grid.

AdamW and SGD are torch's. Muon and Jorge are written by their formulas alone, on whole parameters,
without the functions of `ranvier.optim`, so that an error there cannot hide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ranvier.config.run import RunConfig
from ranvier.optim.rules import Jorge, Muon, Rule, Sgd
from ranvier.parallel.parallel_model import WeightSummary
from ranvier.sharding import Dim, matrix_dims, unpack_dims


def build_serial_optimizer(
    groups: Sequence[dict[str, Any]],
    rule: Rule | None,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
) -> torch.optim.Optimizer:
    """Returns the optimizer of a rule; None means AdamW.

    groups: a parameter group for each parameter, with its weight decay. Groups of hidden matrices
    also have the `dims` of the parameter; Muon and Jorge leave all others to AdamW.
    """
    if isinstance(rule, Sgd):
        return torch.optim.SGD(groups, lr=lr, momentum=rule.momentum)
    if rule is None:
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps)
    return SerialMatrixRule(groups, rule, lr=lr, betas=betas, eps=eps)


class SerialMatrixRule(torch.optim.AdamW):
    """Muon or Jorge for hidden matrices, AdamW for all other parameters."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        rule: Muon | Jorge,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        """groups: as in `build_serial_optimizer`."""
        super().__init__([{"dims": None, **group} for group in groups], lr, betas, eps)
        self.rule, self.num_updates = rule, 0
        self.matrix_states: dict[nn.Parameter, dict[str, Any]] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates all parameters that have gradients."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if group["dims"] is None]
        super().step(closure)
        self.param_groups = groups
        for group in groups:
            (param,) = group["params"]
            if group["dims"] is None or param.grad is None:
                continue
            held = self.matrix_states.setdefault(param, {})
            grad = _to_matrices(param.grad, group["dims"])
            lr, decay = group["lr"], group["weight_decay"]
            if isinstance(self.rule, Muon):
                step = _muon_step(self.rule, grad, held)
            else:
                step = self._jorge_step(self.rule, grad, held)
                decay = decay / (1 - self.rule.momentum)
            param.mul_(1 - lr * decay)
            _to_matrices(param, group["dims"]).sub_(lr * step)
        self.num_updates += 1

    def _jorge_step(self, rule: Jorge, grad: Tensor, held: dict[str, Any]) -> Tensor:
        """Returns the step of Jorge for gradients `[n, rows, cols]`."""
        size = rule.max_preconditioner_dim
        sides = held.setdefault("sides", {})
        scaled = torch.empty_like(grad)
        for b, one in enumerate(grad):
            for i in range(0, one.shape[0], size):
                for j in range(0, one.shape[1], size):
                    tile = one[i : i + size, j : j + size]
                    if (b, i, j) not in sides:
                        sides[b, i, j] = [_first_side(n, rule, tile) for n in tile.shape]
                    if self.num_updates % rule.precondition_interval == 0:
                        left, right = sides[b, i, j]
                        sides[b, i, j] = [
                            _next_side(left, tile @ tile.T, symmetric=rule.symmetric),
                            _next_side(right, tile.T @ tile, symmetric=rule.symmetric),
                        ]
                    left, right = sides[b, i, j]
                    scaled[b, i : i + size, j : j + size] = left @ tile @ right
        zero = torch.zeros_like(grad)
        mean: Tensor = rule.momentum * held.get("mean", zero) + (1 - rule.momentum) * scaled
        momentum: Tensor = rule.momentum * held.get("momentum", zero) + grad
        held["mean"], held["momentum"] = mean, momentum
        if not rule.grafting:
            return mean
        norms, targets = (x.square().sum((-2, -1), keepdim=True).sqrt() for x in (mean, momentum))
        return mean * targets / (norms + 1e-12)


def _to_matrices(x: Tensor, dims: Sequence[Dim]) -> Tensor:
    """Returns the matrices of a parameter as a view `[n, rows, cols]`, or `[1, rows, cols]`."""
    shape, _ = unpack_dims(x.shape, dims)
    pair = matrix_dims(dims)
    assert pair is not None, dims
    moved = x.view(shape).movedim(pair, (-2, -1))
    return moved[None] if moved.dim() == 2 else moved


def _muon_step(rule: Muon, grad: Tensor, held: dict[str, Any]) -> Tensor:
    """Returns the step of Muon for gradients `[n, rows, cols]`."""
    before: Tensor = held.get("mean", torch.zeros_like(grad))
    mean = held["mean"] = rule.momentum * before + (1 - rule.momentum) * grad
    update = rule.momentum * mean + (1 - rule.momentum) * grad if rule.nesterov else mean
    rows, cols = grad.shape[-2:]
    if rule.adjust_lr == "original":
        ratio = math.sqrt(max(1, rows / cols))
    else:
        ratio = 0.2 * math.sqrt(max(rows, cols))
    return ratio * torch.stack([_orthogonalize(one, rule) for one in update])


def _orthogonalize(x: Tensor, rule: Muon) -> Tensor:
    """Returns the result of the Newton-Schulz iteration of a matrix."""
    a, b, c = rule.coefficients
    y = x.T if x.shape[0] > x.shape[1] else x
    y = y / y.square().sum().sqrt().clamp(min=1e-7)
    for _ in range(rule.steps):
        gram = y @ y.T
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y.T if x.shape[0] > x.shape[1] else y


def _first_side(size: int, rule: Jorge, like: Tensor) -> Tensor:
    """Returns a preconditioner before its first update."""
    return torch.eye(size, dtype=like.dtype, device=like.device).mul(rule.eps**-0.25)


def _next_side(side: Tensor, statistics: Tensor, *, symmetric: bool) -> Tensor:
    """Returns a preconditioner after an update: the series to its second order."""
    squared = side @ side
    x = squared @ statistics @ squared if symmetric else squared @ squared @ statistics
    norm = x.square().sum().sqrt()
    if norm == 0:
        return side
    y = x / norm
    eye = torch.eye(len(side), dtype=side.dtype, device=side.device)
    new = ((norm + 1) / norm) ** 0.25 * side @ (eye - y / 4 + 5 / 32 * y @ y)
    return (new + new.T) / 2 if symmetric else new


def serial_param_groups(
    run: RunConfig, named: Mapping[str, nn.Parameter], weights: Mapping[str, WeightSummary]
) -> list[dict[str, Any]]:
    """Returns a parameter group for each parameter, with its weight decay.

    `factor` is the factor of the learning rate of the run for this group.
    """
    groups = []
    rest = run.adamw_peak_lr / run.peak_lr
    for name, param in named.items():
        known = weights[name]
        whole = run.optim.needs_whole_matrices and known.is_hidden_matrix
        scale = float(getattr(run.optim, f"{known.param_group}_lr_scale"))
        groups.append(
            {
                "params": [param],
                "weight_decay": run.weight_decay if known.param_group == "matrix" else 0.0,
                "factor": scale if whole else scale * rest,
                "dims": known.dims if whole else None,
            }
        )
    return groups
