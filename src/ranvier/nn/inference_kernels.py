"""Triton kernels of `inference_matmul`, for CUDA only."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ranvier.nn.inference_matmul import (
    MAX_THIN_ROWS,
    MAX_TILE_ROWS,
    has_dependent_launch,
    uses_thin_tile,
)

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")
TensorDescriptor: Any = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor

ROW_BLOCK_N = 2
"""Outputs of one program of `multiply_row`. With a block of 1,024 inputs it was at most 5 % slower
than the best choice for each of ten shapes of Llama models on an H200."""
ROW_BLOCK_K = 1024
MAX_INPUT_PARTS = 16
"""Maximum number of parts of the inputs, whose results are written and read again."""
ADD_BLOCK = 512
"""Outputs whose parts one program adds."""
RESERVED_BYTES = 1024
"""Bytes of shared memory that a device reserves for each program."""


@cache
def device_limits(device: int | None) -> tuple[int, int]:
    """Returns the number of multiprocessors, and the bytes of shared memory of a program."""
    if device is None:  # Triton's interpreter, on a CPU.
        return 2, 2**18
    properties = triton.runtime.driver.active.utils.get_device_properties(device)
    return properties["multiprocessor_count"], properties["max_shared_mem"]


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


@triton.jit  # type: ignore[untyped-decorator]
def _part_kernel(  # type: ignore[no-untyped-def]
    x_rows,
    w_rows,
    y,
    num_rows,
    num_outputs,
    num_inputs,
    part_inputs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Computes a tile of outputs from a part of the inputs; y: `[parts, rows, outputs]`."""
    first_output = tl.program_id(0) * BLOCK_N
    part = tl.program_id(1)
    part_begin = part * part_inputs
    part_end = tl.minimum(part_begin + part_inputs, num_inputs)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for start in tl.range(part_begin, part_end, BLOCK_K, num_stages=STAGES):
        # What is outside of x and w is loaded as zeros.
        weights = w_rows.load([first_output, start])
        values = x_rows.load([0, start])
        total = tl.dot(weights, values.T, total)
    outputs = first_output + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    y_rows = (part * num_rows + rows).to(tl.int64)
    tl.store(
        y + y_rows[None, :] * num_outputs + outputs[:, None],
        total.to(y.dtype.element_ty),
        mask=(outputs < num_outputs)[:, None] & (rows < num_rows)[None, :],
    )


@triton.jit  # type: ignore[untyped-decorator]
def _add_parts_kernel(  # type: ignore[no-untyped-def]
    partial_y,
    y,
    num_elements,
    NUM_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Adds partial results in the order of their parts."""
    elements = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_element = elements < num_elements
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.load(partial_y + elements, mask=is_element, other=0.0)
    for part in tl.static_range(1, NUM_PARTS):
        total += tl.load(partial_y + part * num_elements + elements, mask=is_element, other=0.0)
    tl.store(y + elements, total.to(y.dtype.element_ty), mask=is_element)


class PartTile(NamedTuple):
    """How a program of `multiply_in_parts` divides its work."""

    block_n: int
    """Outputs of a program."""
    block_k: int
    """Inputs of a step."""
    num_stages: int
    num_warps: int

    @classmethod
    def choose(cls, num_rows: int, num_outputs: int) -> PartTile:
        """Returns the tile of a shape.

        On an H200 the first took at most 1.02 of the time of cuBLAS for each of 22 shapes of Llama
        and Qwen models with 2 to 32 rows.
        """
        return cls(64, 128, 4, 4) if uses_thin_tile(num_rows, num_outputs) else cls(128, 64, 3, 8)


def multiply_in_parts(x: Tensor, w: Tensor) -> Tensor:
    """Returns x Wᵀ for at most 128 rows, `[t, i]`; w: `[o, i]`; both 16 bits, with aligned rows.

    Few rows have few tiles of outputs. The inputs are divided into parts for about one program per
    multiprocessor, whose results are added in order.
    """
    num_rows, num_inputs = x.shape
    num_outputs = w.shape[0]
    assert num_rows <= MAX_TILE_ROWS, num_rows
    y = x.new_empty(num_rows, num_outputs)
    if y.numel() == 0:
        return y
    tile = PartTile.choose(num_rows, num_outputs)
    num_tiles = triton.cdiv(num_outputs, tile.block_n)
    num_steps = triton.cdiv(num_inputs, tile.block_k)
    num_multiprocessors, shared_memory = device_limits(x.device.index)
    wanted_parts = round(num_multiprocessors / num_tiles)
    if num_rows > MAX_THIN_ROWS:
        # With 64 rows a multiprocessor has one program at a time; more would be a second wave.
        wanted_parts = num_multiprocessors // num_tiles
    wanted_parts = min(max(wanted_parts, 1), MAX_INPUT_PARTS, num_steps)
    part_steps = triton.cdiv(num_steps, wanted_parts)
    num_parts = triton.cdiv(num_steps, part_steps)
    partial_y = y
    if num_parts > 1:
        partial_y = x.new_empty(num_parts, num_rows, num_outputs, dtype=torch.float32)
    block_m = max(16, triton.next_power_of_2(num_rows))
    stage_bytes = (block_m + tile.block_n) * tile.block_k * x.element_size()
    num_stages = min(tile.num_stages, (shared_memory - RESERVED_BYTES) // stage_bytes)
    is_dependent = has_dependent_launch(x.device.index)
    _part_kernel[(num_tiles, num_parts)](
        TensorDescriptor(x, [*x.shape], [*x.stride()], [block_m, tile.block_k]),
        TensorDescriptor(w, [*w.shape], [*w.stride()], [tile.block_n, tile.block_k]),
        partial_y,
        num_rows,
        num_outputs,
        num_inputs,
        part_steps * tile.block_k,
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        STAGES=num_stages,
        IS_DEPENDENT=is_dependent,
        num_warps=tile.num_warps,
        launch_pdl=is_dependent,
    )
    if num_parts > 1:
        num_elements = y.numel()
        _add_parts_kernel[(triton.cdiv(num_elements, ADD_BLOCK),)](
            partial_y,
            y,
            num_elements,
            NUM_PARTS=num_parts,
            BLOCK=ADD_BLOCK,
            IS_DEPENDENT=is_dependent,
            num_warps=4,
            launch_pdl=is_dependent,
        )
    return y
