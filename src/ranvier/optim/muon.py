"""Muon: momentum whose matrices are orthogonalized, as pure functions independent of the grid.

m ← βm + (1 - β)g, u = βm + (1 - β)g with the new m (Nesterov), o = orthogonalize(u),
w ← (1 - lr · decay) w - lr · ratio · o. The functions round as `torch.optim.Muon` does, so that on
a CPU, with an iteration in bf16, weights have the same bits.

Elementwise functions take flat tensors of any range of a weight. `orthogonalize` needs whole
matrices: the orthogonal factor of a shard is not a shard of the orthogonal factor. On CUDA a batch
of matrices of one shape takes one launch per product, and the two symmetric products of a step are
computed only on and above the diagonal (`muon_kernels`).

References: Jordan et al., 2024, Muon: An optimizer for hidden layers in neural networks; Liu et
al., 2025, Muon is scalable for LLM training (arXiv:2502.16982).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from ranvier.cost.matrix_optimizers import MUON_BATCH_ELEMENTS
from ranvier.launch import has_triton
from ranvier.optim.adamw import UpdateScalars

LrRule = Literal["original", "match_rms_adamw"]
Coefficients = tuple[float, float, float]
COEFFICIENTS: Coefficients = (3.4445, -4.7750, 2.0315)
STEPS = 5
"""Defaults of the iteration, as in `torch.optim.Muon`."""
MAX_BATCH_ELEMENTS = MUON_BATCH_ELEMENTS
"""Maximum number of elements of the matrices that are iterated together. Temporary tensors take at
most about four times as many elements (the matrices before and after a product, and two of the
smaller side), unless a single matrix has more."""
MIN_SYMMETRIC_SIDE = 2048
"""Sides from which symmetric products are computed by half. On an H200 they took 0.7 to 0.8 times
as long as full products for a side of 2048, 1.1 times for 1024, and 1.5 times for 512."""


def momentum_update(
    momentum: Tensor, grad: Tensor, *, beta: float, nesterov: bool = True
) -> tuple[Tensor, Tensor]:
    """Returns the new momentum and the update to orthogonalize, `[n]`.

    m ← m + (1 - β)(g - m), u = g + β(m - g) (Nesterov) or m; the same up to a factor as the usual
    unnormalized form, and orthogonalization removes factors.
    """
    momentum = momentum.lerp(grad, 1 - beta)
    update = grad.lerp(momentum, beta) if nesterov else momentum
    return momentum, update


def lr_ratio(rows: int, cols: int, rule: LrRule) -> float:
    """Returns the factor of the learning rate of a matrix.

    original: √max(1, rows / cols). match_rms_adamw: 0.2 √max(rows, cols), with which an update has
    the root mean square of a typical update of AdamW, whose learning rate and decay carry over.
    """
    if rule == "original":
        return math.sqrt(max(1, rows / cols))
    return 0.2 * math.sqrt(max(rows, cols))


def weight_update(
    weight: Tensor, direction: Tensor, *, lr: float | Tensor, ratio: float, decay: float = 0.0
) -> Tensor:
    """Returns the new weight: w ← (1 - lr · decay) w - lr · ratio · o, in the dtype of `weight`.

    direction: o, in the dtype of the iteration. lr: a number, or a float64 tensor on the device.
    Decay uses the learning rate without `ratio`.
    """
    if isinstance(lr, Tensor) and lr.device.type == "cpu":
        lr = float(lr)
    shrunk = weight.mul(1 - lr * decay)
    if isinstance(lr, Tensor):
        return shrunk.sub_(direction.to(weight.dtype).mul(lr * ratio))
    return shrunk.add_(direction, alpha=-(lr * ratio))


# ---- in place, masked on the device ---------------------------------------------------------


def apply_momentum(
    momentum: Tensor,
    grad: Tensor,
    update: Tensor,
    *,
    now: UpdateScalars,
    beta: float,
    nesterov: bool = True,
) -> None:
    """`momentum_update` in place on tensors `[n]`, in one kernel if possible.

    g ← factor · g. What is to be orthogonalized is written to `update`, in its dtype. Without
    `now.should_update` the momentum remains bit-identical, and `update` is undefined.
    """
    if momentum.is_meta:
        return
    if _can_use_kernels([momentum, grad, update]) and momentum.dtype == torch.float32:
        _kernels().update_momentum(momentum, grad, update, now=now, beta=beta, nesterov=nesterov)
        return
    grad = grad.to(momentum.dtype)
    if now.grad_factor is not None:
        grad = grad * now.grad_factor.to(momentum.dtype)
    new, found = momentum_update(momentum, grad, beta=beta, nesterov=nesterov)
    update.copy_(found)
    # A select instead of a branch, which would synchronize with the host.
    momentum.copy_(torch.where(now.should_update, new, momentum))


def apply_update(
    weight: Tensor,
    direction: Tensor,
    *,
    now: UpdateScalars,
    share: float = 1.0,
    ratio: float = 1.0,
    decay: float = 0.0,
    out: Tensor | None = None,
) -> None:
    """`weight_update` in place on tensors `[n]`, in one kernel if possible.

    Without `now.should_update` all tensors remain bit-identical. share: factor of the learning
    rate, also of decay; ratio: `lr_ratio`. out: the new weight is also written here.
    """
    if weight.is_meta:
        return
    tensors = [weight, direction, *([] if out is None else [out])]
    if _can_use_kernels(tensors) and weight.dtype == torch.float32:
        _kernels().update_weight(
            weight, direction, now=now, share=share, ratio=ratio, decay=decay, out=out
        )
        return
    new = weight_update(weight, direction, lr=now.lr * share, ratio=ratio, decay=decay)
    weight.copy_(torch.where(now.should_update, new, weight))
    if out is not None:
        out.copy_(torch.where(now.should_update, weight.to(out.dtype), out))


# ---- whole matrices -------------------------------------------------------------------------


def orthogonalize(
    matrices: Tensor,
    *,
    steps: int = STEPS,
    coefficients: Coefficients = COEFFICIENTS,
    eps: float = 1e-7,
) -> Tensor:
    """Returns nearly orthogonal matrices with the same singular vectors; x, y: `[n, rows, cols]`.

    X = x / max(‖x‖, eps), transposed if rows > cols; `steps` times A = X Xᵀ,
    X ← aX + (bA + cA²)X. Computed in the dtype of `matrices`. Singular values come out between
    about 0.7 and 1.2. A matrix of zeros remains zero.
    """
    assert steps > 0, steps
    result = torch.empty_like(matrices)
    if matrices.numel() == 0:
        return result
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    y = result.mT if is_tall else result
    if matrices.device.type == "cpu":
        # One by one: results do not depend on the other matrices of the batch.
        for one, into in zip(x, y, strict=True):
            into.copy_(_orthogonalize_matrix(one, steps, coefficients, eps))
        return result
    size = max(1, MAX_BATCH_ELEMENTS // matrices[0].numel())
    for some, into in zip(x.split(size), y.split(size), strict=True):
        _orthogonalize_batch(some, into, steps, coefficients, eps)
    return result


def _orthogonalize_matrix(x: Tensor, steps: int, coefficients: Coefficients, eps: float) -> Tensor:
    """Iterates one matrix `[m, n]`, m ≤ n, with the operations of `torch.optim.Muon`.

    In bf16 the order of roundings is a part of the result. A transposed x stays transposed for the
    same reason: products may round differently for another order in memory.
    """
    a, b, c = coefficients
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x


def _orthogonalize_batch(
    matrices: Tensor, out: Tensor, steps: int, coefficients: Coefficients, eps: float
) -> None:
    """Iterates a batch on CUDA; matrices, out: `[n, m, k]`, m ≤ k, maybe transposed in memory."""
    a, b, c = coefficients
    # The norm is in fp32 at least; the division rounds once.
    wide = torch.promote_types(matrices.dtype, torch.float32)
    norm = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True, dtype=wide)
    x = torch.div(matrices, norm.clamp_(min=eps), out=torch.empty_like(matrices))
    uses_kernels = x.shape[-2] >= MIN_SYMMETRIC_SIDE and _can_multiply_symmetric(x)
    for step in range(steps):
        # The last product is written where it belongs, which saves a copy.
        into = out if step == steps - 1 else None
        if uses_kernels:
            gram = _kernels().symmetric_product(x)
            polynomial = _kernels().symmetric_polynomial(gram, b, c)
        else:
            gram = torch.bmm(x, x.mT)
            polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        # A polynomial with aI inside would save torch a copy of X, but on the diagonal bf16 rounds
        # it more coarsely: errors of ill-conditioned matrices are 1.3 times as large.
        x = torch.baddbmm(x, polynomial, x, beta=a, out=into)


def _can_use_kernels(tensors: Sequence[Tensor]) -> bool:
    """Whether the elementwise kernels support these tensors."""
    return _has_kernels() and all(x.is_cuda and x.is_contiguous() for x in tensors)


def _can_multiply_symmetric(x: Tensor) -> bool:
    """Whether the kernels of symmetric products support a batch of matrices."""
    return x.is_cuda and _has_kernels() and bool(_kernels().can_multiply(x))


@cache
def _has_kernels() -> bool:
    return has_triton() and not torch.version.hip


@cache
def _kernels() -> Any:
    from ranvier.optim import muon_kernels

    return muon_kernels
