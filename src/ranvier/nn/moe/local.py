"""A mixture of experts on one device, in one operation.

    rows = permute(x)                             [a, d]
    gate, up = rows G_eᵀ, rows U_eᵀ               [a, f]
    h = w · f(gate) · up                          [a, f]
    y[t] = Σ_j (h D_eᵀ)[places[t, j]]             [t, d]

The routing weights w are multiplied into the activation. Their gradient is then the inner product
of the gradient of h with h, and the outputs of the experts need not be saved (SonicMoE). Only gate
and up are saved for backward, 2·a·f elements; rows (a·d) are permuted again, and h (a·f) is
recomputed from gate and up in the kernel that computes their gradients. Gate and up are two GEMMs
with two parameters: concatenating the matrices would move more bytes than reading the rows twice.

The PyTorch version is the reference; Triton kernels implement swiglu on CUDA. In bf16 the host
never waits for the device. Not supported: features or experts that are split over ranks, as they
communicate between these operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ranvier.buckets.bucket import ShardedParameter
from ranvier.nn.layer import StepContext, apply_autograd
from ranvier.nn.moe.grouped_gemm import grouped_mm, grouped_mm_weight_grad
from ranvier.nn.moe.permutation import (
    TokenPermutation,
    accumulation_dtype,
    can_use_kernel,
    live_row_mask,
    permute_rows,
    unpermute_rows,
)

_aten = torch.ops.aten


class ActivationFunction(NamedTuple):
    """An activation function and its vector-Jacobian product."""

    function: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    """Called with (gradient, argument)."""


_SILU = ActivationFunction(F.silu, lambda d, x: _aten.silu_backward(d, x))
_GELU = ActivationFunction(F.gelu, lambda d, x: _aten.gelu_backward(d, x))
_GELU_TANH = ActivationFunction(
    lambda x: F.gelu(x, approximate="tanh"),
    lambda d, x: _aten.gelu_backward(d, x, approximate="tanh"),
)
_RELU = ActivationFunction(F.relu, lambda d, x: _aten.threshold_backward(d, x, 0))
ACTIVATION_FUNCTIONS: dict[str, ActivationFunction] = {
    "swiglu": _SILU,
    "geglu": _GELU_TANH,
    "geglu_exact": _GELU,
    "reglu": _RELU,
    "gelu": _GELU_TANH,
    "gelu_exact": _GELU,
    "relu": _RELU,
}
"""Activation functions, by the names of `DecoderConfig.activation`."""


def local_moe(
    x: Tensor,
    weights: Tensor,
    order: TokenPermutation,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    activation: str,
) -> Tensor:
    """y[t] = Σ_j w[t, j] · D_e (f(G_e x[t]) · U_e x[t]) over the experts e of token t.

    x, y: `[t, d]`; weights: `[t, k]`, fp32; gate, up: `[e, f, d]`; down: `[e, d, f]`. Without a
    gate the hidden layer is f(U_e x). Differentiable.
    """
    choices, places, ends, whole = order
    # The last two results are only needed for backward.
    out: tuple[Tensor, Tensor, Tensor] = _local_moe_op(
        x, weights, choices, places, ends, gate, up, down, activation, whole
    )
    return out[0]


@torch.library.custom_op("ranvier::mixture", mutates_args=())
def _local_moe_op(
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
    """Returns y `[t, d]` and the gate and up projections `[a, f]`; gate is empty if unused."""
    rows = permute_rows(x, choices, places, ends, None, whole)
    if gate is None:
        g = x.new_empty(0)
    else:
        g = grouped_mm(rows, gate, ends, False)
    u = grouped_mm(rows, up, ends, False)
    # Freed before `h` is allocated; backward permutes them again.
    del rows
    # The weights are applied here, so that the sum over experts below is unweighted.
    h = weighted_activation(g, u, weights, choices, ends, activation, whole)
    return (
        unpermute_rows(grouped_mm(h, down, ends, False), choices, places, ends, None, whole),
        g,
        u,
    )


@_local_moe_op.register_fake
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
def _local_moe_backward_op(
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
    """Returns gradients of x, weights, gate, up, down; the last three are empty if not trained."""
    none = dy.new_empty(0)
    drows = permute_rows(dy, choices, places, ends, None, whole)
    dh = grouped_mm(drows, down, ends, True)
    h, dg, du, dweights = weighted_activation_backward(
        dh, g, u, weights, choices, ends, activation, whole
    )
    del dh
    if trained:
        # `h` already contains the routing weights, so `drows` is the unweighted dy.
        ddown = grouped_mm_weight_grad(drows, h, ends)
    else:
        # A custom op must not return the same tensor more than once.
        ddown = none.clone()
    del drows, h
    if gate is None:
        into = [(du, up)]
    else:
        into = [(dg, gate), (du, up)]
    dx = _sum_token_rows(
        [grouped_mm(d, w, ends, True) for d, w in into], choices, places, ends, whole
    )
    if not trained:
        return dx, dweights, none.clone(), none, ddown
    # Cheaper to recompute than to save, as it only moves data.
    rows = permute_rows(x, choices, places, ends, None, whole)
    if gate is None:
        dgate = none
    else:
        dgate = grouped_mm_weight_grad(dg, rows, ends)
    return dx, dweights, dgate, grouped_mm_weight_grad(du, rows, ends), ddown


@_local_moe_backward_op.register_fake
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


def _local_moe_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.activation, ctx.whole = inputs
    # The extra outputs never get gradients; by default torch would allocate zeros for them.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[1:])


def _local_moe_backward(
    ctx: Any, dy: Tensor | None, *others: Tensor | None
) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 10
    # Inputs 5 to 7 are gate, up and down.
    trained = any(ctx.needs_input_grad[5:8])
    dx, dweights, *grads = _local_moe_backward_op(
        dy, *ctx.saved_tensors, ctx.activation, ctx.whole, trained
    )
    learned = [
        grad if needs else None
        for grad, needs in zip(grads, ctx.needs_input_grad[5:8], strict=True)
    ]
    return dx, dweights, None, None, None, *learned, None, None


_local_moe_op.register_autograd(_local_moe_backward, setup_context=_local_moe_setup)


# ---- on the grid ------------------------------------------------------------------------


def sharded_local_moe(
    x: Tensor,
    weights: Tensor,
    order: TokenPermutation,
    handles: Sequence[ShardedParameter | None],
    params: Sequence[Tensor | None],
    activation: str,
    moment: StepContext,
) -> Tensor:
    """`local_moe` with gathered weights (gate, up, down); adds their gradients to the buckets.

    Communicates: all-gather of weights over depth; backward: reduce-scatter, by bucket, later.
    """
    y: Tensor = apply_autograd(
        _ShardedLocalMoE, x, weights, order, handles, activation, moment, *params
    )
    return y


class _ShardedLocalMoE(torch.autograd.Function):
    """Autograd function of `sharded_local_moe`.

    Weight gradients are computed in backward, as they share intermediate results with dx. They are
    accumulated together with the gradients of the other weights of the block, which a pipeline may
    defer: otherwise the bucket would be reduced twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        order: TokenPermutation,
        handles: Sequence[ShardedParameter | None],
        activation: str,
        moment: StepContext,
        *params: Tensor | None,
    ) -> Tensor:
        *tensors, whole = order
        y: Tensor
        y, g, u = _local_moe_op(
            x, weights, *tensors, *_unsharded_weights(handles), activation, whole
        )
        ctx.save_for_backward(x, weights, *tensors, g, u)
        ctx.handles = handles
        ctx.activation = activation
        ctx.whole = whole
        ctx.moment = moment
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *before, g, u = ctx.saved_tensors
        trained = any(weight is not None and weight.trainable for weight in ctx.handles)
        dx, dweights, *grads = _local_moe_backward_op(
            dy, *before, *_unsharded_weights(ctx.handles), g, u, ctx.activation, ctx.whole, trained
        )
        for weight, grad in zip(ctx.handles, grads, strict=True):
            # Queued although already computed; see the docstring of the class.
            if weight is not None and weight.trainable:
                ctx.moment.run_or_defer(partial(weight.accumulate_grad, grad))
        return dx, dweights, *[None] * 7


def _unsharded_weights(handles: Sequence[ShardedParameter | None]) -> list[Tensor | None]:
    return [None if weight is None else weight.unsharded_data() for weight in handles]


# ---- the activation ---------------------------------------------------------------------


def weighted_activation(
    g: Tensor,
    u: Tensor,
    weights: Tensor,
    choices: Tensor,
    ends: Tensor,
    activation: str,
    whole: bool,
) -> Tensor:
    """Returns h = w · f(g) · u, or w · f(u) without a gate; h: `[a, f]`, weights: `[t, k]`."""
    if activation == "swiglu" and can_use_kernel(u):
        from ranvier.nn.moe import triton_kernels

        return triton_kernels.weighted_swiglu(g, u, weights.contiguous(), choices)
    w = weights.flatten()[choices].unsqueeze(1)
    curve = ACTIVATION_FUNCTIONS[activation]
    kind = accumulation_dtype(u.dtype)
    if g.numel() == 0:
        h = curve.function(u.to(kind))
    else:
        h = curve.function(g.to(kind)) * u.to(kind)
    h = (w * h).to(u.dtype)
    if whole:
        return h
    # `where` instead of a product: rows of dropped choices are undefined and may be NaN.
    return torch.where(live_row_mask(ends, len(u)), h, 0.0)


def weighted_activation_backward(
    dh: Tensor,
    g: Tensor,
    u: Tensor,
    weights: Tensor,
    choices: Tensor,
    ends: Tensor,
    activation: str,
    whole: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the recomputed h and the gradients of g, u and weights."""
    if activation == "swiglu" and can_use_kernel(u):
        from ranvier.nn.moe import triton_kernels

        h, dg, du, found = triton_kernels.weighted_swiglu_backward(
            dh, g, u, weights.contiguous(), choices, ends, whole=whole
        )
        return h, dg, du, found.to(weights.dtype)
    curve = ACTIVATION_FUNCTIONS[activation]
    kind = accumulation_dtype(u.dtype)
    w = weights.flatten()[choices].unsqueeze(1).to(kind)
    args = [dh, u, g][: 2 if g.numel() == 0 else 3]
    if not whole:
        here = live_row_mask(ends, len(u))
        # Rows of dropped choices are undefined; set them to zero to keep NaN out of the gradients.
        args = [torch.where(here, arg, 0.0) for arg in args]
    dh, u, *gates = (arg.to(kind) for arg in args)
    if gates:
        f = curve.function(gates[0])
        h = f * u
        dg = curve.backward(dh * w * u, gates[0])
        du = dh * w * f
    else:
        h = curve.function(u)
        du = curve.backward(dh * w, u)
        dg = dh.new_empty(0)
    dweights = torch.empty_like(weights).flatten()
    # Before `h` is multiplied by w: d(w · h)/dw = h.
    dweights[choices] = (dh * h).sum(1).to(weights.dtype)
    h, dg, du = (value.to(args[1].dtype) for value in (w * h, dg, du))
    return h, dg, du, dweights.view_as(weights)


def _sum_token_rows(
    rows: list[Tensor], choices: Tensor, places: Tensor, ends: Tensor, whole: bool
) -> Tensor:
    """Returns the sum over all rows of each token, of one or two row tensors."""
    if can_use_kernel(rows[0]):
        from ranvier.nn.moe import triton_kernels

        return triton_kernels.unpermute_rows(rows, places, ends, None, whole=whole)
    if len(rows) == 1:
        total = rows[0]
    else:
        # dx has two terms, from gate and from up; add them before the unpermute.
        total = rows[0].to(accumulation_dtype(rows[0].dtype)) + rows[1]
    out: Tensor = unpermute_rows(total, choices, places, ends, None, whole)
    return out.to(rows[0].dtype)
