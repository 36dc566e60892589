"""A mixture of experts on one device: from tokens to tokens in one operation.

    rows = permute(x)                             [a, d]
    gate, up = rows G_eᵀ, rows U_eᵀ               [a, f]
    h = w · f(gate) · up                          [a, f]
    y[t] = Σ_j (h D_eᵀ)[places[t, j]]             [t, d]

The weights w of the router are multiplied into the activation: their gradient is then the product
of h's gradient with h, and what leaves the experts need not be kept (SonicMoE). Of one layer
only gate and up stay until backward, 2·a·f elements; rows (a·d) are permuted again and h (a·f)
follows from gate and up in the kernel that makes their gradients. Gate and up are two products of
two parameters: to put the matrices together would move more bytes than reading the rows twice.

The twin in PyTorch defines all; Triton's kernels are for swiglu on CUDA. Nothing waits for the
device in bf16. Not handled: features or experts split over ranks, which communicate in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ranvier.buckets.bucket import Weight
from ranvier.nn.layer import Moment, applied
from ranvier.nn.moe.grouped_gemm import product, product_weight
from ranvier.nn.moe.permutation import Order, collect, live, runs_here, spread, wide

_aten = torch.ops.aten


class Curve(NamedTuple):
    """An activation and its derivative times a gradient."""

    value: Callable[[Tensor], Tensor]
    back: Callable[[Tensor, Tensor], Tensor]
    """Of gradient and argument."""


_SILU = Curve(F.silu, lambda d, x: _aten.silu_backward(d, x))
_GELU = Curve(F.gelu, lambda d, x: _aten.gelu_backward(d, x))
_TANH = Curve(
    lambda x: F.gelu(x, approximate="tanh"),
    lambda d, x: _aten.gelu_backward(d, x, approximate="tanh"),
)
_RELU = Curve(F.relu, lambda d, x: _aten.threshold_backward(d, x, 0))
CURVES: dict[str, Curve] = {
    "swiglu": _SILU,
    "geglu": _TANH,
    "geglu_exact": _GELU,
    "reglu": _RELU,
    "gelu": _TANH,
    "gelu_exact": _GELU,
    "relu": _RELU,
}
"""By the names of `DecoderConfig.activation`."""


def mixture(
    x: Tensor,
    weights: Tensor,
    order: Order,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    activation: str,
) -> Tensor:
    """y[t] = Σ_j w[t, j] · D_e (f(G_e x[t]) · U_e x[t]) of the experts e of token t, in autograd.

    x, y: `[t, d]`; weights: `[t, k]`, fp32; gate, up: `[e, f, d]`; down: `[e, d, f]`. Without a
    gate f(U_e x).
    """
    choices, places, ends, whole = order
    # Of the results the last two are what backward needs.
    out: tuple[Tensor, Tensor, Tensor] = _mixture(
        x, weights, choices, places, ends, gate, up, down, activation, whole
    )
    return out[0]


@torch.library.custom_op("ranvier::mixture", mutates_args=())
def _mixture(
    x: Tensor,
    weights: Tensor,
    choices: Tensor,
    places: Tensor,
    ends: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    activation: str,
    whole: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y `[t, d]`, and both arguments of the activation `[a, f]` (ungated: the first is empty)."""
    rows = spread(x, choices, places, ends, None, whole)
    g = x.new_empty(0) if gate is None else product(rows, gate, ends, False)
    u = product(rows, up, ends, False)
    del rows
    h = activate(g, u, weights, choices, ends, activation, whole)
    return collect(product(h, down, ends, False), choices, places, ends, None, whole), g, u


@_mixture.register_fake
def _(
    x: Tensor,
    weights: Tensor,
    choices: Tensor,
    places: Tensor,
    ends: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    activation: str,
    whole: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    u = x.new_empty(choices.shape[0], up.shape[1])
    return torch.empty_like(x), x.new_empty(0) if gate is None else torch.empty_like(u), u


@torch.library.custom_op("ranvier::mixture_back", mutates_args=())
def _mixture_back(
    dy: Tensor,
    x: Tensor,
    weights: Tensor,
    choices: Tensor,
    places: Tensor,
    ends: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    g: Tensor,
    u: Tensor,
    activation: str,
    whole: bool,
    trained: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weights, gate, up and down; trained=False: those of matrices are empty."""
    none = dy.new_empty(0)
    drows = spread(dy, choices, places, ends, None, whole)
    dh = product(drows, down, ends, True)
    h, dg, du, dweights = activate_back(dh, g, u, weights, choices, ends, activation, whole)
    del dh
    ddown = product_weight(drows, h, ends) if trained else none.clone()
    del drows, h
    into = [(du, up)] if gate is None else [(dg, gate), (du, up)]
    dx = _summed([product(d, w, ends, True) for d, w in into], choices, places, ends, whole)
    if not trained:
        return dx, dweights, none.clone(), none, ddown
    rows = spread(x, choices, places, ends, None, whole)
    dgate = none if gate is None else product_weight(dg, rows, ends)
    return dx, dweights, dgate, product_weight(du, rows, ends), ddown


@_mixture_back.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    weights: Tensor,
    choices: Tensor,
    places: Tensor,
    ends: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    g: Tensor,
    u: Tensor,
    activation: str,
    whole: bool,
    trained: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    a, b, c = (
        x.new_empty(w.shape if w is not None and trained else (0,)) for w in (gate, up, down)
    )
    return torch.empty_like(x), torch.empty_like(weights), a, b, c


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.activation, ctx.whole = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[1:])


def _back(ctx: Any, dy: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 10
    trained = any(ctx.needs_input_grad[5:8])
    dx, dweights, *grads = _mixture_back(dy, *ctx.saved_tensors, ctx.activation, ctx.whole, trained)
    learned = [
        grad if needs else None
        for grad, needs in zip(grads, ctx.needs_input_grad[5:8], strict=True)
    ]
    return dx, dweights, None, None, None, *learned, None, None


_mixture.register_autograd(_back, setup_context=_keep)


# ---- on the grid ------------------------------------------------------------------------


def delivered(
    x: Tensor,
    weights: Tensor,
    order: Order,
    handles: Sequence[Weight | None],
    params: Sequence[Tensor | None],
    activation: str,
    moment: Moment,
) -> Tensor:
    """`mixture` of gathered weights (gate, up, down); their gradients are delivered, not returned.

    Communicates: all-gather of weights over depth; backward: reduce-scatter, by bucket, later.
    """
    y: Tensor = applied(_Delivered, x, weights, order, handles, activation, moment, *params)
    return y


class _Delivered(torch.autograd.Function):
    """Gradients of weights are made in backward, as they share what it makes for x.

    They are delivered when those of the block's other weights are (a pipeline may let these wait):
    a bucket that came in two parts would be reduced twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        order: Order,
        handles: Sequence[Weight | None],
        activation: str,
        moment: Moment,
        *params: Tensor | None,
    ) -> Tensor:
        *tensors, whole = order
        y: Tensor
        y, g, u = _mixture(x, weights, *tensors, *_wholes(handles), activation, whole)
        ctx.save_for_backward(x, weights, *tensors, g, u)
        ctx.handles, ctx.activation, ctx.whole, ctx.moment = handles, activation, whole, moment
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *before, g, u = ctx.saved_tensors
        trained = any(weight is not None and weight.trainable for weight in ctx.handles)
        dx, dweights, *grads = _mixture_back(
            dy, *before, *_wholes(ctx.handles), g, u, ctx.activation, ctx.whole, trained
        )
        for weight, grad in zip(ctx.handles, grads, strict=True):
            if weight is not None and weight.trainable:
                ctx.moment.do(partial(weight.deliver, grad))
        return dx, dweights, *[None] * 7


def _wholes(handles: Sequence[Weight | None]) -> list[Tensor | None]:
    return [None if weight is None else weight.whole() for weight in handles]


# ---- the activation ---------------------------------------------------------------------


def activate(
    g: Tensor,
    u: Tensor,
    weights: Tensor,
    choices: Tensor,
    ends: Tensor,
    activation: str,
    whole: bool,
) -> Tensor:
    """h = w · f(g) · u, or w · f(u) without a gate; g, u, h: `[a, f]`, weights: `[t, k]`."""
    if activation == "swiglu" and runs_here(u):
        from ranvier.nn.moe import triton_kernels

        return triton_kernels.swiglu(g, u, weights.contiguous(), choices)
    w, curve, kind = weights.flatten()[choices].unsqueeze(1), CURVES[activation], wide(u.dtype)
    h = curve.value(u.to(kind)) if g.numel() == 0 else curve.value(g.to(kind)) * u.to(kind)
    h = (w * h).to(u.dtype)
    return h if whole else torch.where(live(ends, len(u)), h, 0.0)


def activate_back(
    dh: Tensor,
    g: Tensor,
    u: Tensor,
    weights: Tensor,
    choices: Tensor,
    ends: Tensor,
    activation: str,
    whole: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h once more, and the gradients of g, u and weights."""
    if activation == "swiglu" and runs_here(u):
        from ranvier.nn.moe import triton_kernels

        h, dg, du, found = triton_kernels.swiglu_back(
            dh, g, u, weights.contiguous(), choices, ends, whole=whole
        )
        return h, dg, du, found.to(weights.dtype)
    curve, kind = CURVES[activation], wide(u.dtype)
    w = weights.flatten()[choices].unsqueeze(1).to(kind)
    args = [dh, u, g][: 2 if g.numel() == 0 else 3]
    if not whole:
        here = live(ends, len(u))
        args = [torch.where(here, arg, 0.0) for arg in args]
    dh, u, *gates = (arg.to(kind) for arg in args)
    if gates:
        f = curve.value(gates[0])
        h, dg, du = f * u, curve.back(dh * w * u, gates[0]), dh * w * f
    else:
        h, du, dg = curve.value(u), curve.back(dh * w, u), dh.new_empty(0)
    dweights = torch.empty_like(weights).flatten()
    dweights[choices] = (dh * h).sum(1).to(weights.dtype)
    h, dg, du = (value.to(args[1].dtype) for value in (w * h, dg, du))
    return h, dg, du, dweights.view_as(weights)


def _summed(
    rows: list[Tensor], choices: Tensor, places: Tensor, ends: Tensor, whole: bool
) -> Tensor:
    """Σ_j of all rows of each token."""
    if runs_here(rows[0]):
        from ranvier.nn.moe import triton_kernels

        return triton_kernels.collect(rows, places, ends, None, whole=whole)
    total = rows[0] if len(rows) == 1 else rows[0].to(wide(rows[0].dtype)) + rows[1]
    out: Tensor = collect(total, choices, places, ends, None, whole)
    return out.to(rows[0].dtype)
