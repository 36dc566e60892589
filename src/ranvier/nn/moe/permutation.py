"""Permutation of tokens: copies each token to its experts and sums the outputs of the experts.

A token with k experts has k choices; choice i = token · k + j has a place among the rows of its
expert. Rows are sorted by expert, and within an expert by token:

    rows    = permute(x)             rows[places[t, j]] = x[t]
    y       = unpermute(rows, w)     y[t] = Σ_j w[t, j] · rows[places[t, j]]

Each is the backward of the other, so no pass uses atomic additions, and every sum has a fixed order
and at least fp32 precision. On CUDA a counting sort finds the places, and each pass is one Triton
kernel; the PyTorch version in this module is the reference. The host never waits for the device. A
compiler treats each pass as one operation. Dropped choices are sorted after the last end; their
rows count as zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ranvier import launch

TRITON = launch.has_triton()


class TokenPermutation(NamedTuple):
    """Positions of the a = t·k choices of tokens among the rows of experts."""

    choices: Tensor
    """The choice at each place, `[a]`."""
    places: Tensor
    """The place of each choice, `[t, k]`."""
    ends: Tensor
    """End of the rows of each expert, `[E]`, int32."""
    is_dropless: bool
    """Whether no choice was dropped, i.e. the last end is a."""


def sort_by_expert(experts: Tensor, count: int, kept: Tensor | None = None) -> TokenPermutation:
    """Sorts choices by their experts `[t, k]` out of `count`; drops choices where kept is False."""
    if kept is None:
        flat = experts
    else:
        # Dropped choices form a group after all experts, so that no size depends on data.
        flat = torch.where(kept, experts, count)
    choices, places, ends = _sort_by_expert_op(flat.flatten(), count)
    return TokenPermutation(choices, places.view(experts.shape), ends, kept is None)


def permute(x: Tensor, order: TokenPermutation) -> Tensor:
    """Returns a row for each choice; differentiable. x: `[t, d]`, y: `[a, d]`."""
    y: Tensor = permute_rows(x, order.choices, order.places, order.ends, None, order.is_dropless)
    return y


def unpermute(y: Tensor, order: TokenPermutation, weights: Tensor | None = None) -> Tensor:
    """Returns the (weighted) sum of the rows of each token; differentiable.

    y: `[a, d]`, weights: `[t, k]`, sum: `[t, d]`.
    """
    out: Tensor = unpermute_rows(
        y, order.choices, order.places, order.ends, weights, order.is_dropless
    )
    return out


# ---- sorting ----------------------------------------------------------------------------


@torch.library.custom_op("ranvier::arranged", mutates_args=())
def _sort_by_expert_op(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns choices by place, places by choice, and ends. experts: `[a]`, `count` if dropped."""
    if experts.is_cuda and TRITON:
        from ranvier.nn.moe import triton_kernels

        return triton_kernels.sort_by_expert(experts, count)
    # Stable: rows of an expert remain in token order, as in the kernel.
    ranked, choices = torch.sort(experts, stable=True)
    places = torch.empty_like(choices)
    places[choices] = torch.arange(len(choices), device=choices.device)
    groups = torch.arange(count, device=experts.device)
    return choices, places, torch.searchsorted(ranked, groups, right=True).int()


@_sort_by_expert_op.register_fake
def _(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    ends = experts.new_empty(count, dtype=torch.int32)
    return torch.empty_like(experts), torch.empty_like(experts), ends


# ---- the two passes ---------------------------------------------------------------------


@torch.library.custom_op("ranvier::spread", mutates_args=())
def permute_rows(
    x: Tensor, choices: Tensor, places: Tensor, ends: Tensor, weights: Tensor | None, whole: bool
) -> Tensor:
    """rows[places[t, j]] = w[t, j] · x[t]; zeros for dropped choices."""
    if can_use_kernel(x):
        from ranvier.nn.moe import triton_kernels

        return triton_kernels.permute_rows(x.contiguous(), places, ends, weights, whole=whole)
    rows = x[choices // places.shape[1]]
    if weights is not None:
        rows = (rows * weights.flatten()[choices].unsqueeze(1)).to(x.dtype)
    if whole:
        return rows
    return rows * live_row_mask(ends, len(rows))


@torch.library.custom_op("ranvier::collect", mutates_args=())
def unpermute_rows(
    y: Tensor, choices: Tensor, places: Tensor, ends: Tensor, weights: Tensor | None, whole: bool
) -> Tensor:
    """out[t] = Σ_j w[t, j] · y[places[t, j]], without dropped choices."""
    if can_use_kernel(y):
        from ranvier.nn.moe import triton_kernels

        return triton_kernels.unpermute_rows([y.contiguous()], places, ends, weights, whole=whole)
    rows = _gather_token_rows(y, places, ends, whole)
    if weights is not None:
        rows = rows * weights.to(rows.dtype).unsqueeze(2)
    return rows.sum(1).to(y.dtype)


@torch.library.custom_op("ranvier::weigh", mutates_args=())
def routing_weight_grad(g: Tensor, y: Tensor, places: Tensor, ends: Tensor, whole: bool) -> Tensor:
    """Returns the gradients of weights, Σ_d g[t, d] · y[places[t, j], d], `[t, k]`."""
    if can_use_kernel(y):
        from ranvier.nn.moe import triton_kernels

        return triton_kernels.routing_weight_grad(
            g.contiguous(), y.contiguous(), places, ends, whole=whole
        )
    rows = _gather_token_rows(y, places, ends, whole)
    return (rows * g.to(rows.dtype).unsqueeze(1)).sum(2)


@permute_rows.register_fake
def _(
    x: Tensor, choices: Tensor, places: Tensor, ends: Tensor, weights: Tensor | None, whole: bool
) -> Tensor:
    return x.new_empty(choices.shape[0], x.shape[1])


@unpermute_rows.register_fake
def _(
    y: Tensor, choices: Tensor, places: Tensor, ends: Tensor, weights: Tensor | None, whole: bool
) -> Tensor:
    return y.new_empty(places.shape[0], y.shape[1])


@routing_weight_grad.register_fake
def _(g: Tensor, y: Tensor, places: Tensor, ends: Tensor, whole: bool) -> Tensor:
    return y.new_empty(places.shape, dtype=accumulation_dtype(y.dtype))


def _permute_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    value, choices, places, ends, weights, ctx.whole = inputs
    # The rows are only needed for the gradient of the weights.
    if weights is not None and ctx.needs_input_grad[4]:
        needed = value
    else:
        needed = None
    ctx.save_for_backward(needed, choices, places, ends, weights)


def _permute_backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, choices, places, ends, weights = ctx.saved_tensors
    if x is None:
        dw = None
    else:
        dw = routing_weight_grad(x, g, places, ends, ctx.whole).to(weights.dtype)
    if ctx.needs_input_grad[0]:
        dx = unpermute_rows(g, choices, places, ends, weights, ctx.whole)
    else:
        dx = None
    return dx, None, None, None, dw, None


def _unpermute_backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    y, choices, places, ends, weights = ctx.saved_tensors
    if y is None:
        dw = None
    else:
        dw = routing_weight_grad(g, y, places, ends, ctx.whole).to(weights.dtype)
    if ctx.needs_input_grad[0]:
        dy = permute_rows(g, choices, places, ends, weights, ctx.whole)
    else:
        dy = None
    return dy, None, None, None, dw, None


permute_rows.register_autograd(_permute_backward, setup_context=_permute_setup)
unpermute_rows.register_autograd(_unpermute_backward, setup_context=_permute_setup)


def can_use_kernel(x: Tensor) -> bool:
    """Whether the Triton kernels support this tensor."""
    return x.is_cuda and TRITON and x.dtype != torch.float64


def live_row_mask(ends: Tensor, rows: int) -> Tensor:
    """Returns 1 for rows of a group and 0 for rows after the last end, `[a, 1]`."""
    return (torch.arange(rows, device=ends.device) < ends[-1]).unsqueeze(1)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which sums are accumulated."""
    return torch.promote_types(dtype, torch.float32)


def _gather_token_rows(y: Tensor, places: Tensor, ends: Tensor, whole: bool) -> Tensor:
    """Returns the rows of each token `[t, k, d]`, at least in fp32; zeros for dropped choices."""
    rows = y[places].to(accumulation_dtype(y.dtype))
    if whole:
        return rows
    # `where` instead of a product: rows of dropped choices are undefined and may be NaN.
    return torch.where((places < ends[-1]).unsqueeze(2), rows, 0.0)
