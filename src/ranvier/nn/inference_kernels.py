"""Triton kernels of `inference_matmul`, for CUDA only."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from ranvier.nn.inference_matmul import has_dependent_launch

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

ROW_BLOCK_N = 2
"""Outputs of one program of `multiply_row`. With a block of 1,024 inputs it was at most 5 % slower
than the best choice for each of ten shapes of Llama models on an H200."""
ROW_BLOCK_K = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _row_kernel(  # type: ignore[no-untyped-def]
    x,
    w,
    y,
    num_outputs,
    num_inputs,
    w_stride,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Computes some outputs of one row: each thread adds its own inputs, then all threads."""
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inputs = tl.arange(0, BLOCK_K)
    is_output = outputs < num_outputs
    pointers = w + outputs.to(tl.int64)[:, None] * w_stride + inputs[None, :]
    inside = is_output[:, None]
    if not IS_EVEN:
        inside = inside & (inputs < num_inputs)[None, :]
    # Weights do not depend on the kernel before this one.
    weights = tl.load(pointers, mask=inside, other=0.0)
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    values = tl.load(x + inputs, mask=inputs < num_inputs, other=0.0)
    total = weights.to(tl.float32) * values.to(tl.float32)[None, :]
    for start in tl.range(BLOCK_K, num_inputs, BLOCK_K):
        if IS_EVEN:
            weights = tl.load(pointers + start, mask=is_output[:, None], other=0.0)
            values = tl.load(x + start + inputs)
        else:
            is_input = inputs < num_inputs - start
            inside = is_output[:, None] & is_input[None, :]
            weights = tl.load(pointers + start, mask=inside, other=0.0)
            values = tl.load(x + start + inputs, mask=is_input, other=0.0)
        total += weights.to(tl.float32) * values.to(tl.float32)[None, :]
    tl.store(y + outputs, tl.sum(total, 1).to(y.dtype.element_ty), mask=is_output)


def multiply_row(x: Tensor, w: Tensor) -> Tensor:
    """Returns x Wᵀ for one row, `[1, i]`; w: `[o, i]`."""
    num_outputs, num_inputs = w.shape
    y = x.new_empty(1, num_outputs)
    is_dependent = has_dependent_launch(x.device.index)
    _row_kernel[(triton.cdiv(num_outputs, ROW_BLOCK_N),)](
        x,
        w,
        y,
        num_outputs,
        num_inputs,
        w.stride(0),
        BLOCK_N=ROW_BLOCK_N,
        BLOCK_K=ROW_BLOCK_K,
        IS_EVEN=num_inputs % ROW_BLOCK_K == 0,
        IS_DEPENDENT=is_dependent,
        num_warps=4,
        launch_pdl=is_dependent,
    )
    return y


@triton.jit  # type: ignore[untyped-decorator]
def _in_order_kernel(  # type: ignore[no-untyped-def]
    x,
    w,
    y,
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    w_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    IS_EVEN: tl.constexpr,
    EXACT: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Computes a tile of outputs, adding along all inputs in their order."""
    # Programs that run together share the rows of x, and each reads its weights once.
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inputs = tl.arange(0, BLOCK_K)
    is_output = outputs < num_outputs
    is_row = rows < num_rows
    weight_pointers = w + outputs.to(tl.int64)[:, None] * w_stride + inputs[None, :]
    row_pointers = x + rows.to(tl.int64)[None, :] * x_stride + inputs[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for start in tl.range(0, num_inputs, BLOCK_K, num_stages=STAGES):
        if IS_EVEN:
            weights = tl.load(weight_pointers + start)
            values = tl.load(row_pointers + start, mask=is_row[None, :], other=0.0)
        else:
            is_input = inputs < num_inputs - start
            inside = is_output[:, None] & is_input[None, :]
            weights = tl.load(weight_pointers + start, mask=inside, other=0.0)
            inside = is_input[:, None] & is_row[None, :]
            values = tl.load(row_pointers + start, mask=inside, other=0.0)
        if EXACT:
            total = tl.dot(weights, values, total, input_precision="ieee")
        else:
            total = tl.dot(weights, values, total)
    tl.store(
        y + rows.to(tl.int64)[None, :] * num_outputs + outputs[:, None],
        total.to(y.dtype.element_ty),
        mask=is_output[:, None] & is_row[None, :],
    )


def multiply_in_order(x: Tensor, w: Tensor) -> Tensor:
    """Returns x Wᵀ for any number of rows, `[t, i]`; w: `[o, i]`.

    A row of the result has the same bits for every number of rows: tiles have different sizes, but
    each output is one chain of additions of tensor cores.
    """
    num_rows, num_inputs = x.shape
    num_outputs = w.shape[0]
    y = x.new_empty(num_rows, num_outputs)
    if num_rows == 0:
        return y
    is_exact = x.dtype == torch.float32
    if num_rows <= 64 or is_exact:
        block_m, block_n, block_k, stages, warps = 64, 128, 64, 4, 4
        if num_rows <= 16:
            block_m, block_n, block_k, stages = 16, 64, 128, 5
        elif num_rows <= 32:
            block_m, block_n, block_k = 32, 64, 128
        if is_exact:
            block_m, block_n, block_k, stages = min(block_m, 32), 64, 32, 3
    else:
        block_m, block_n, block_k, warps = 128, 128, 64, 8
        # With three stages two programs fit on a multiprocessor, which read weights faster.
        stages = 3 if num_rows <= block_m else 4
    is_dependent = has_dependent_launch(x.device.index)
    grid = (triton.cdiv(num_outputs, block_n), triton.cdiv(num_rows, block_m))
    _in_order_kernel[grid](
        x,
        w,
        y,
        num_rows,
        num_outputs,
        num_inputs,
        x.stride(0),
        w.stride(0),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        STAGES=stages,
        IS_EVEN=num_inputs % block_k == 0 and num_outputs % block_n == 0,
        EXACT=is_exact,
        IS_DEPENDENT=is_dependent,
        num_warps=warps,
        launch_pdl=is_dependent,
    )
    return y
