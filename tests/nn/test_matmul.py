"""The products of a linear layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ranvier.nn.matmul import PlainMatmul, differentiable_linear

T, O, I = 6, 10, 4  # noqa: E741
FORMS = {"y": "ti,oi->to", "dx": "to,oi->ti", "dw": "to,ti->oi"}


def operands(product: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = {"y": ((T, I), (O, I)), "dx": ((T, O), (O, I)), "dw": ((T, O), (T, I))}[product]
    first, second = (torch.randn(n, dtype=torch.float64, generator=generator) for n in sizes)
    return first, second


def apply(products: PlainMatmul, product: str, a: Tensor, b: Tensor) -> Tensor:
    method = {"y": products.forward, "dx": products.grad_x, "dw": products.grad_w}[product]
    return method(a, b)


@pytest.mark.compiled
@pytest.mark.parametrize("product", FORMS)
def test_products_are_those_of_a_linear_layer(product: str) -> None:
    a, b = operands(product)
    y = apply(PlainMatmul(), product, a, b)
    torch.testing.assert_close(y, torch.einsum(FORMS[product], a, b), rtol=0, atol=1e-12)
    assert y.is_contiguous()
    torch.compiler.reset()
    traced = torch.compile(apply, backend="aot_eager", fullgraph=True)(PlainMatmul(), product, a, b)
    torch.testing.assert_close(traced, y, rtol=0, atol=1e-12)
    assert traced.stride() == y.stride()


def test_autograd_computes_the_same_three() -> None:
    x, w = (one.requires_grad_() for one in operands("y"))
    dy, _ = operands("dx")
    y = differentiable_linear(x.unflatten(0, (2, 3)), w, PlainMatmul())
    y.backward(dy.view_as(y))
    assert x.grad is not None and w.grad is not None
    for have, want in (
        (y.flatten(0, 1), PlainMatmul().forward(x, w)),
        (x.grad, PlainMatmul().grad_x(dy, w)),
        (w.grad, PlainMatmul().grad_w(dy, x)),
    ):
        torch.testing.assert_close(have, want, rtol=0, atol=1e-12)


def test_products_of_one_kind_are_equal() -> None:
    """Siblings that multiply alike are packed, and the head asks whether it multiplies plainly."""

    class Other(PlainMatmul):
        """Not plain."""

    assert PlainMatmul() == PlainMatmul() != Other()
