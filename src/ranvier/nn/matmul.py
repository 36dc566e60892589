"""Matmul: the three products of a linear layer, each in several layouts that give the same values.

    y  = x Wᵀ    [t, o] = [t, i] · [o, i]ᵀ
    dx = dy W    [t, i] = [t, o] · [o, i]
    dw = dyᵀ x   [o, i] = [t, o]ᵀ · [t, i]

The library of the device has a kernel of its own for each combination of transposed operands, and
some of them can be far slower than others (AxoNN has met this on AMD's devices). A product can be
turned into another combination: by computing its transpose, or by copying an operand into the other
layout first. The copy costs time; whether it pays is measured (`Fastest`).
All results are contiguous, whatever the way. Not handled: operands that are not contiguous, biases.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ranvier.nn.fastest import Fastest, Way, noise

Product = Callable[[Tensor, Tensor], Tensor]


@torch.library.custom_op("ranvier::turned", mutates_args=())
def _turned(x: Tensor) -> Tensor:
    return x.t().contiguous()


@_turned.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[1], x.shape[0])


def turned(x: Tensor) -> Tensor:
    """The transpose as a matrix of its own, `[n, m]` from `[m, n]`.

    A compiler that saw into it could find a layout that it likes better.
    """
    return _turned(x) if torch.compiler.is_compiling() else x.t().contiguous()


def _y(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def _y_transposed(x: Tensor, w: Tensor) -> Tensor:
    return turned(w @ x.t())


def _y_copied(x: Tensor, w: Tensor) -> Tensor:
    return x @ turned(w)


def _dx(dy: Tensor, w: Tensor) -> Tensor:
    return dy @ w


def _dx_transposed(dy: Tensor, w: Tensor) -> Tensor:
    return turned(w.t() @ dy.t())


def _dx_copied(dy: Tensor, w: Tensor) -> Tensor:
    return F.linear(dy, turned(w))


def _dw(dy: Tensor, x: Tensor) -> Tensor:
    return dy.T @ x


def _dw_transposed(dy: Tensor, x: Tensor) -> Tensor:
    return turned(x.t() @ dy)


def _dw_copied(dy: Tensor, x: Tensor) -> Tensor:
    return turned(dy) @ x


def _dw_copied_x(dy: Tensor, x: Tensor) -> Tensor:
    return F.linear(dy.t(), turned(x))


WAYS: dict[str, dict[str, Product]] = {
    "y": {"plain": _y, "transposed": _y_transposed, "copied": _y_copied},
    "dx": {"plain": _dx, "transposed": _dx_transposed, "copied": _dx_copied},
    "dw": {
        "plain": _dw,
        "transposed": _dw_transposed,
        "copied": _dw_copied,
        "copied_x": _dw_copied_x,
    },
}
"""Of each product: the way without detours, the transposed product turned back, and the product
with an operand (w, w, dy or x) in the other layout."""


class Products(Protocol):
    """The three products of a layer on matrices; x: `[t, i]`, w: `[o, i]`, dy: `[t, o]`."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """x Wᵀ."""

    def grad_x(self, dy: Tensor, w: Tensor) -> Tensor:
        """dY W."""

    def grad_w(self, dy: Tensor, x: Tensor) -> Tensor:
        """dYᵀ X."""

    def linear(self, x: Tensor, w: Tensor) -> Tensor:
        """x Wᵀ in autograd."""


def forward(x: Tensor, w: Tensor, products: Products) -> Tensor:
    """x Wᵀ of any number of dims, outside autograd."""
    y = products.forward(x.flatten(0, -2), w)
    return y.view(*x.shape[:-1], y.shape[-1])


def grad_x(dy: Tensor, w: Tensor, products: Products) -> Tensor:
    """dY W, likewise."""
    dx = products.grad_x(dy.flatten(0, -2), w)
    return dx.view(*dy.shape[:-1], dx.shape[-1])


def multiply(x: Tensor, w: Tensor, products: Products) -> Tensor:
    """x Wᵀ in autograd."""
    y = products.linear(x.flatten(0, -2), w)
    return y.view(*x.shape[:-1], y.shape[-1])


@dataclass(frozen=True)
class Layouts:
    """How the products of a linear layer are computed; the names are those of `WAYS`."""

    y: str = "plain"
    dx: str = "plain"
    dw: str = "plain"

    def __str__(self) -> str:
        return ", ".join(f"{key} {way}" for key, way in asdict(self).items() if way != "plain")

    @classmethod
    def tuned(
        cls,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device | str,
        fastest: Fastest,
    ) -> Layouts:
        """The fastest ways for a shape (t, o, i)."""
        return cls(**{product: pick(product, shape, dtype, device, fastest) for product in WAYS})

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """y = x Wᵀ; x: `[t, i]`, w: `[o, i]`, y: `[t, o]`."""
        return WAYS["y"][self.y](x, w)

    def grad_x(self, dy: Tensor, w: Tensor) -> Tensor:
        """dx = dy W; dy: `[t, o]`, w: `[o, i]`, dx: `[t, i]`."""
        return WAYS["dx"][self.dx](dy, w)

    def grad_w(self, dy: Tensor, x: Tensor) -> Tensor:
        """dw = dyᵀ x; dy: `[t, o]`, x: `[t, i]`, dw: `[o, i]`."""
        return WAYS["dw"][self.dw](dy, x)

    def linear(self, x: Tensor, w: Tensor) -> Tensor:
        """y = x Wᵀ in autograd."""
        if self.y == self.dx == self.dw == "plain":
            return F.linear(x, w)
        y: Tensor = _Linear.apply(x, w, self)  # type: ignore[no-untyped-call]
        return y


class _Linear(torch.autograd.Function):
    """A product whose gradients are computed in other layouts as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, layouts: Layouts) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.layouts = layouts
        return layouts.forward(x, w)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        return ctx.layouts.grad_x(dy, w), ctx.layouts.grad_w(dy, x), None


def label(product: str, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[str, str]:
    """Kind and key under which a choice is kept."""
    kind = str(dtype).removeprefix("torch.")
    return f"matmul {product}", f"t{shape[0]} o{shape[1]} i{shape[2]} {kind}"


def pick(
    product: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device | str,
    fastest: Fastest,
) -> str:
    """The fastest way for one product of a shape (t, o, i); random matrices if it is measured."""
    t, o, i = shape
    sizes = {"y": [(t, i), (o, i)], "dx": [(t, o), (o, i)], "dw": [(t, o), (t, i)]}[product]
    # Made with the first call only: a known shape costs neither time nor memory.
    operands = functools.cache(lambda: noise(sizes, dtype, device))

    def way(function: Product) -> Way:
        return lambda: function(*operands())

    kind, key = label(product, shape, dtype)
    with torch.no_grad():
        ways = {name: way(function) for name, function in WAYS[product].items()}
        return fastest.choose(kind, key, ways, "plain")
