"""Jorge: Shampoo whose preconditioners are updated by products alone, as pure functions.

Shampoo scales a gradient G `[r, c]` as L^(-1/4) G R^(-1/4) with the statistics
L ← β₂L + (1 - β₂)G Gᵀ and R ← β₂R + (1 - β₂)GᵀG. Jorge stores sides L̂ ≈ L^(-1/4) and R̂ and moves
them on with a series of second order instead of an eigendecomposition. A matrix is cut into tiles
of a fixed maximum size (`cost.matrix_optimizers.tile_bounds`), each with its own two sides. Tiles
of one shape form a batch; tiles at the edges are smaller, and not padded.

Reference: Singh et al., 2023, Jorge: Approximate preconditioning for GPU-efficient second-order
optimization (arXiv:2310.12298).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from ranvier.cost.matrix_optimizers import JORGE_BATCH_ELEMENTS

Precision = Literal["ieee", "tf32"]
EPS = 1e-6
"""ε of the first sides ε^(-1/4) I."""
MAX_BATCH_ELEMENTS = JORGE_BATCH_ELEMENTS
"""Maximum number of elements of the sides that are updated together, unless one side has more.
Temporary tensors take about five times as many."""
GRAFT_EPS = 1e-12
"""Added to the norm of the momentum by which grafting divides."""


@contextmanager
def matmul_precision(precision: Precision) -> Iterator[None]:
    """Sets the precision of fp32 products on CUDA for a block of code."""
    backend: Any = torch.backends.cuda.matmul
    before = backend.fp32_precision
    backend.fp32_precision = precision
    try:
        yield
    finally:
        backend.fp32_precision = before


def initial_side(count: int, size: int, *, eps: float = EPS, like: Tensor) -> Tensor:
    """Returns the first sides ε^(-1/4) I, `[count, size, size]`, in dtype and device of `like`."""
    eye = torch.eye(size, dtype=like.dtype, device=like.device)
    return eye.mul_(eps**-0.25).expand(count, size, size).clone()


def statistics(
    grad: Tensor, side: Literal["left", "right"], *, precision: Precision = "tf32"
) -> Tensor:
    """Returns G Gᵀ `[n, r, r]` (left) or GᵀG `[n, c, c]` (right) of tiles `[n, r, c]`."""
    with matmul_precision(precision):
        if side == "left":
            return grad @ grad.mT
        return grad.mT @ grad


def precondition_update(
    side: Tensor, statistics: Tensor, *, symmetric: bool = True, precision: Precision = "tf32"
) -> Tensor:
    """Returns the sides after one update; all tensors: `[n, B, B]`.

    X = L̂² S L̂² (symmetric) or L̂⁴ S (plain), ν = ‖X‖,
    L̂ ← ((ν + 1) / ν)^(1/4) L̂ (I - X / (4ν) + 5X² / (32ν²)), symmetrized if `symmetric`.

    β₂ = ν / (ν + 1) follows from the statistics. A side whose ν is zero or not finite does not
    change. precision: of fp32 products on CUDA.
    """
    new = torch.empty_like(side)
    if side.numel() == 0:
        return new
    size = max(1, MAX_BATCH_ELEMENTS // side[0].numel())
    batches = zip(side.split(size), statistics.split(size), new.split(size), strict=True)
    with matmul_precision(precision):
        for some, batch_statistics, out in batches:
            out.copy_(_update_sides(some, batch_statistics, symmetric))
    return new


def _update_sides(side: Tensor, statistics: Tensor, symmetric: bool) -> Tensor:
    square = side @ side
    if symmetric:
        x = square @ statistics @ square
    else:
        x = square @ square @ statistics
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    # Below the smallest normal number, 1 / ν may overflow.
    can_update = (norm >= torch.finfo(norm.dtype).tiny) & norm.isfinite()
    norm = torch.where(can_update, norm, 1.0)
    x = x.div_(norm)
    series = torch.baddbmm(x, x, x, beta=-1 / 4, alpha=5 / 32)
    series.diagonal(dim1=-2, dim2=-1).add_(1.0)
    new = (side @ series).mul_(((norm + 1) / norm) ** 0.25)
    if symmetric:
        new = (new + new.mT).div_(2)
    return torch.where(can_update, new, side)


def precondition(
    left: Tensor, grad: Tensor, right: Tensor, *, precision: Precision = "tf32"
) -> Tensor:
    """Returns L̂ G R̂, `[n, r, c]`."""
    with matmul_precision(precision):
        return left @ grad @ right


def momentum_update(
    momentum: Tensor, sgd_momentum: Tensor, grad: Tensor, preconditioned: Tensor, *, beta: float
) -> tuple[Tensor, Tensor]:
    """Returns both new momenta, `[n]`: m ← βm + (1 - β) L̂ G R̂ and m_sgd ← βm_sgd + G."""
    momentum = momentum.mul(beta).add_(preconditioned, alpha=1 - beta)
    return momentum, sgd_momentum.mul(beta).add_(grad)


def weight_update(
    weight: Tensor,
    momentum: Tensor,
    *,
    norm: Tensor,
    sgd_norm: Tensor,
    lr: float | Tensor,
    decay: float = 0.0,
) -> Tensor:
    """Returns the new weight with the step size of SGD (grafting), in the dtype of `weight`.

    w ← (1 - lr · decay) w - lr · ‖m_sgd‖ / ‖m‖ · m. norm, sgd_norm: norms of the momenta of the
    whole matrix, which the caller knows.
    """
    scale = sgd_norm / (norm + GRAFT_EPS)
    return weight.mul(1.0 - lr * decay).sub_(momentum.to(weight.dtype).mul(lr * scale))
