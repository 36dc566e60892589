"""Grouped GEMM: rows are sorted by group, and each group is multiplied by its own matrix.

    y  = x_e W_eᵀ    [t, f] = [t, d] · [e, f, d]
    dx = dy_e W_e    [t, d] = [t, f] · [e, f, d]
    dw = dy_eᵀ x_e   [e, f, d]

`ends [e]` (int32, on the device) contains the end of the rows of each group; groups may be empty.
In bf16, if rows are multiples of 16 bytes, torch has one kernel for all groups, which reads the
ends on the device. No group needs padding, as the jagged dim is never the fastest-varying dim of an
operand here. In all other cases a loop runs, for which the host waits for the ends. Rows after the
last end belong to no group: their results are undefined and must not be read.

A compiler treats each GEMM as one operation: it does not break a graph, and selective checkpointing
saves its result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ranvier import launch

TRITON = launch.has_triton()
ALIGNMENT_BYTES = 16
"""Rows and addresses must be multiples of this many bytes."""


def grouped_linear(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Returns y = x_e W_eᵀ; x: `[t, d]`, w: `[e, f, d]`, ends: `[e]`, y: `[t, f]`."""
    y: Tensor = grouped_mm(x, w, ends, False)
    return y


@torch.library.custom_op("ranvier::grouped", mutates_args=())
def grouped_mm(x: Tensor, w: Tensor, ends: Tensor, turned: bool) -> Tensor:
    """Returns x_e W_eᵀ `[t, f]`; with `turned`, x_e W_e `[t, d]` for x `[t, f]`."""
    x = x.contiguous()
    w = w.contiguous()
    # A view, as the kernel accepts either memory order of the matrices.
    other = w if turned else w.transpose(1, 2)
    if can_use_grouped_mm(x, w):
        return torch._grouped_mm(x, other, offs=ends)
    # Zeros, as the loop does not write rows after the last end.
    out = x.new_zeros(x.shape[0], other.shape[2])
    for e, (start, end) in enumerate(_group_ranges(ends)):
        torch.mm(x[start:end], other[e], out=out[start:end])
    return out


@torch.library.custom_op("ranvier::grouped_weight", mutates_args=())
def grouped_mm_weight_grad(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Returns dy_eᵀ x_e `[e, f, d]` for dy `[t, f]` and x `[t, d]`; 0 for an empty group."""
    dy = dy.contiguous()
    x = x.contiguous()
    if can_use_grouped_mm(dy, x):
        return _zero_empty_groups(torch._grouped_mm(dy.t(), x, offs=ends), ends)
    out = x.new_zeros(len(ends), dy.shape[1], x.shape[1])
    for e, (start, end) in enumerate(_group_ranges(ends)):
        torch.mm(dy[start:end].t(), x[start:end], out=out[e])
    return out


@grouped_mm.register_fake
def _(x: Tensor, w: Tensor, ends: Tensor, turned: bool) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[2 if turned else 1])


@grouped_mm_weight_grad.register_fake
def _(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], dy.shape[1], x.shape[1])


def _grouped_mm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, ends, ctx.turned = inputs
    ctx.save_for_backward(x, w, ends)


def _grouped_mm_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w, ends = ctx.saved_tensors
    needs_x, needs_w = ctx.needs_input_grad[:2]
    if needs_x:
        dx = grouped_mm(dy, w, ends, not ctx.turned)
    else:
        dx = None
    # dW is always `[e, f, d]`: with `turned` the roles of input and output are swapped.
    pair = (x, dy) if ctx.turned else (dy, x)
    return dx, grouped_mm_weight_grad(*pair, ends) if needs_w else None, None, None


def _weight_grad_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _weight_grad_backward(ctx: Any, dw: Tensor) -> tuple[Tensor | None, ...]:
    dy, x, ends = ctx.saved_tensors
    return grouped_mm(x, dw, ends, False), grouped_mm(dy, dw, ends, True), None


grouped_mm.register_autograd(_grouped_mm_backward, setup_context=_grouped_mm_setup)
grouped_mm_weight_grad.register_autograd(_weight_grad_backward, setup_context=_weight_grad_setup)


def can_use_grouped_mm(*operands: Tensor) -> bool:
    """Whether torch's kernel supports these tensors: bf16, contiguous, rows aligned to 16 bytes."""
    return all(
        x.dtype == torch.bfloat16
        and x.is_contiguous()
        and x.shape[-1] * x.element_size() % ALIGNMENT_BYTES == 0
        and x.data_ptr() % ALIGNMENT_BYTES == 0
        # The kernel does not accept empty operands.
        and x.numel() > 0
        for x in operands
    )


def _group_ranges(ends: Tensor) -> list[tuple[int, int]]:
    """Returns start and end of each group's rows; the host waits for them."""
    stops: list[int] = ends.tolist()
    return list(zip([0, *stops[:-1]], stops, strict=True))


def _zero_empty_groups(dw: Tensor, ends: Tensor) -> Tensor:
    """Sets dw to zero for empty groups, whose result is undefined in torch."""
    if dw.is_cuda and TRITON:
        from ranvier.nn.moe import triton_kernels

        triton_kernels.zero_empty_groups(dw, ends)
        return dw
    # `masked_fill_` instead of indexing: no size depends on data, so the host does not wait.
    empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
    return dw.masked_fill_(empty[:, None, None], 0.0)
