"""Matmul: the three matrix products of a linear layer, and the interface of their backends.

    y  = x Wᵀ    [t, o] = [t, i] · [o, i]ᵀ
    dx = dy W    [t, i] = [t, o] · [o, i]
    dw = dyᵀ x   [o, i] = [t, o]ᵀ · [t, i]

A layer uses any implementation of `MatmulBackend`: `PlainMatmul` or `float8.Float8Linear`. All
results are contiguous. Not supported: operands that are not contiguous, biases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_COLUMNS = 64
"""Maximum number of rows of x that `WeightFirstMatmul` multiplies as columns."""


class MatmulBackend(Protocol):
    """The three matmuls of a layer; x: `[t, i]`, w: `[o, i]`, dy: `[t, o]`."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """Returns x Wᵀ."""

    def grad_x(self, dy: Tensor, w: Tensor) -> Tensor:
        """Returns dY W."""

    def grad_w(self, dy: Tensor, x: Tensor) -> Tensor:
        """Returns dYᵀ X."""

    def linear(self, x: Tensor, w: Tensor) -> Tensor:
        """Returns x Wᵀ; differentiable."""


def forward(x: Tensor, w: Tensor, products: MatmulBackend) -> Tensor:
    """Returns x Wᵀ for any number of leading dims, outside of autograd."""
    y = products.forward(x.flatten(0, -2), w)
    return y.view(*x.shape[:-1], y.shape[-1])


def grad_x(dy: Tensor, w: Tensor, products: MatmulBackend) -> Tensor:
    """Returns dY W for any number of leading dims, outside of autograd."""
    dx = products.grad_x(dy.flatten(0, -2), w)
    return dx.view(*dy.shape[:-1], dx.shape[-1])


def differentiable_linear(x: Tensor, w: Tensor, products: MatmulBackend) -> Tensor:
    """Returns x Wᵀ; differentiable."""
    y = products.linear(x.flatten(0, -2), w)
    return y.view(*x.shape[:-1], y.shape[-1])


@dataclass(frozen=True)
class PlainMatmul:
    """The matmuls of torch; two instances compare equal."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """Returns y = x Wᵀ; x: `[t, i]`, w: `[o, i]`, y: `[t, o]`."""
        return F.linear(x, w)

    def grad_x(self, dy: Tensor, w: Tensor) -> Tensor:
        """Returns dx = dy W; dy: `[t, o]`, w: `[o, i]`, dx: `[t, i]`."""
        return dy @ w

    def grad_w(self, dy: Tensor, x: Tensor) -> Tensor:
        """Returns dw = dyᵀ x; dy: `[t, o]`, x: `[t, i]`, dw: `[o, i]`."""
        return dy.T @ x

    def linear(self, x: Tensor, w: Tensor) -> Tensor:
        """Returns y = x Wᵀ; differentiable."""
        return F.linear(x, w)


@dataclass(frozen=True)
class WeightFirstMatmul(PlainMatmul):
    """Matmuls that compute few rows as y = (W xᵀ)ᵀ, without gradients.

    OpenBLAS multiplies a large matrix with few columns faster than few rows with a large matrix.
    """

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """Returns y = x Wᵀ; x: `[t, i]`, w: `[o, i]`, y: `[t, o]`."""
        if 1 < len(x) <= MAX_COLUMNS:
            return (w @ x.T).T.contiguous()
        return F.linear(x, w)

    def linear(self, x: Tensor, w: Tensor) -> Tensor:
        """Returns y = x Wᵀ, without a derivative."""
        return self.forward(x, w)


def choose_cpu_matmul() -> PlainMatmul:
    """Returns the fastest matmuls of inference on this CPU."""
    return PlainMatmul() if torch.backends.mkl.is_available() else WeightFirstMatmul()
