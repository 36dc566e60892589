"""Matmul: the three products of a linear layer, and the interface through which it multiplies.

    y  = x Wᵀ    [t, o] = [t, i] · [o, i]ᵀ
    dx = dy W    [t, i] = [t, o] · [o, i]
    dw = dyᵀ x   [o, i] = [t, o]ᵀ · [t, i]

A layer takes anything that implements `MatmulBackend`: `PlainMatmul`, or `float8.Float8Linear`. All
results are contiguous. Not handled: operands that are not contiguous, biases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor


class MatmulBackend(Protocol):
    """The three matmuls of a layer; x: `[t, i]`, w: `[o, i]`, dy: `[t, o]`."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """x Wᵀ."""

    def grad_x(self, dy: Tensor, w: Tensor) -> Tensor:
        """dY W."""

    def grad_w(self, dy: Tensor, x: Tensor) -> Tensor:
        """dYᵀ X."""

    def linear(self, x: Tensor, w: Tensor) -> Tensor:
        """x Wᵀ in autograd."""


def forward(x: Tensor, w: Tensor, products: MatmulBackend) -> Tensor:
    """x Wᵀ with any number of leading dims, outside autograd."""
    y = products.forward(x.flatten(0, -2), w)
    return y.view(*x.shape[:-1], y.shape[-1])


def grad_x(dy: Tensor, w: Tensor, products: MatmulBackend) -> Tensor:
    """dY W with any number of leading dims, outside autograd."""
    dx = products.grad_x(dy.flatten(0, -2), w)
    return dx.view(*dy.shape[:-1], dx.shape[-1])


def differentiable_linear(x: Tensor, w: Tensor, products: MatmulBackend) -> Tensor:
    """x Wᵀ in autograd."""
    y = products.linear(x.flatten(0, -2), w)
    return y.view(*x.shape[:-1], y.shape[-1])


@dataclass(frozen=True)
class PlainMatmul:
    """torch's own matmuls; two instances compare equal."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """y = x Wᵀ; x: `[t, i]`, w: `[o, i]`, y: `[t, o]`."""
        return F.linear(x, w)

    def grad_x(self, dy: Tensor, w: Tensor) -> Tensor:
        """dx = dy W; dy: `[t, o]`, w: `[o, i]`, dx: `[t, i]`."""
        return dy @ w

    def grad_w(self, dy: Tensor, x: Tensor) -> Tensor:
        """dw = dyᵀ x; dy: `[t, o]`, x: `[t, i]`, dw: `[o, i]`."""
        return dy.T @ x

    def linear(self, x: Tensor, w: Tensor) -> Tensor:
        """y = x Wᵀ in autograd."""
        return F.linear(x, w)
