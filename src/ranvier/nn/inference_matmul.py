"""Matmuls of inference: few rows, read at the speed of memory, or equal bits in every batch.

With few tokens a linear layer reads its weight once and computes little, so that its time is that
of reading. `ThinMatmul` chooses the kernel that was the fastest on an H200:

    rows     outputs                        kernel
    1        any                            a sum per output, by many small programs
    2-16     at least four per input        tiles of tensor cores, with the weight as left side
    2-32     others                         the same, with the inputs divided into parts
    33-64    at most 2,560                  in parts
    33-128   a vocabulary, or not aligned   in parts
    33-112   others above 2,560             cuBLASLt
    more     not aligned                    tiles of tensor cores
    more     aligned                        cuBLAS

Outputs are aligned if their number is a multiple of 8: for a vocabulary of 100,003, 24 rows take
710 µs with cuBLAS, and 150 in parts. Before Hopper, tiles are not divided into parts.

`BatchInvariantMatmul` uses one kernel for every number of rows. It adds along the input features in
one order, without splitting them, so that a row of the result does not depend on other rows.

The kernels are launched before the kernel in front of them has ended (programmatic dependent
launch), and that for one row loads weights until it has.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ranvier.launch import has_triton
from ranvier.nn.matmul import PlainMatmul

MAX_THIN_ROWS = 32
"""Maximum number of rows that are multiplied in parts whatever the number of outputs."""
MAX_SMALL_ROWS = 64
"""Maximum number of rows that are multiplied in parts with few outputs."""
MAX_SMALL_OUTPUTS = 2560
"""Maximum number of these outputs."""
MAX_TILE_ROWS = 128
"""Maximum number of rows of `multiply_in_parts`."""
MIN_VOCAB_OUTPUTS = 2**16
"""Minimum number of outputs of a vocabulary. With 128,256 outputs and 64 or 112 rows, it takes 0.82
to 0.91 of the time of cuBLAS to multiply in parts."""
MAX_WIDE_ROWS = 16
"""Maximum number of rows for which a weight with many outputs is not divided into parts."""
WIDE_RATIO = 4
"""Outputs per input of such a weight."""
MAX_LT_ROWS = 112
"""Maximum number of rows that use cuBLASLt. It takes 0.82 to 1.02 of the time of cuBLAS for 40 to
112 rows and shapes of Llama models with 3,072 or more outputs, but up to 1.09 for more rows, and
1.17 for 2,048 outputs."""
ALIGNED_OUTPUTS = 8
"""cuBLAS is several times slower for few rows if rows of the result are not multiples of this."""
KERNEL_DTYPES = (torch.bfloat16, torch.float16)


@cache
def has_dependent_launch(device: int | None) -> bool:
    """Whether a GPU starts kernels before their predecessor has ended (Hopper or newer)."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def _kernels() -> Any:
    from ranvier.nn import inference_kernels

    return inference_kernels


def _can_use_kernels(x: Tensor, w: Tensor) -> bool:
    """Whether the kernels support these operands: rows are contiguous, and aligned to 16 bytes."""
    is_plain = w.stride(1) == 1 and x.is_contiguous() and x.dtype == w.dtype
    return is_plain and x.dtype in KERNEL_DTYPES and w.stride(0) % 8 == 0 and x.shape[1] % 8 == 0


def _can_load_tiles(x: Tensor, w: Tensor) -> bool:
    """Whether a device loads tiles of these operands itself (TMA, Hopper or newer)."""
    is_aligned = (x.data_ptr() | w.data_ptr()) % 16 == 0
    return is_aligned and has_dependent_launch(x.device.index)


def _thin_linear(x: Tensor, w: Tensor) -> Tensor:
    num_rows, num_inputs = x.shape
    num_outputs = w.shape[0]
    if not _can_use_kernels(x, w):
        return F.linear(x, w)
    y: Tensor
    if num_rows == 1:
        y = _kernels().multiply_row(x, w)
        return y
    is_aligned = num_outputs % ALIGNED_OUTPUTS == 0
    can_divide = _can_load_tiles(x, w)
    # Without parts, fewer outputs have too few programs to use the whole memory bandwidth.
    wide_outputs = WIDE_RATIO * num_inputs if can_divide else num_inputs
    if num_rows <= MAX_WIDE_ROWS and num_outputs >= wide_outputs:
        y = _kernels().multiply_in_order(x, w)
        return y
    is_vocab = num_outputs >= MIN_VOCAB_OUTPUTS or not is_aligned
    has_vocab_tile = is_vocab and num_rows <= MAX_TILE_ROWS
    if can_divide and (uses_thin_tile(num_rows, num_outputs) or has_vocab_tile):
        y = _kernels().multiply_in_parts(x, w)
        return y
    if not is_aligned:
        y = _kernels().multiply_in_order(x, w)
        return y
    if can_divide and num_rows <= MAX_LT_ROWS and num_outputs > MAX_SMALL_OUTPUTS:
        with _prefer_cublaslt():
            return F.linear(x, w)
    return F.linear(x, w)


def uses_thin_tile(num_rows: int, num_outputs: int) -> bool:
    """Whether the tile for few rows is the fastest, whatever the outputs are."""
    has_few_outputs = num_rows <= MAX_SMALL_ROWS and num_outputs <= MAX_SMALL_OUTPUTS
    return num_rows <= MAX_THIN_ROWS or has_few_outputs


@contextmanager
def _prefer_cublaslt() -> Iterator[None]:
    """Context in which torch calls cuBLASLt for matmuls.

    It is a setting of the process: one thread at a time may use it, as the thread of an engine.
    """
    _consume_library_warning()
    preferred = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(preferred)


class _SetCublasLt(torch.autograd.Function):
    """Sets the library. Warnings of C++ are those of Python in here, and can be ignored."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        torch.backends.cuda.preferred_blas_library("cublaslt")
        return x


@cache
def _consume_library_warning() -> None:
    """Ignores the one warning of torch that this setting is experimental.

    It would be in the log of each server, and the results are those of any other kernel.
    """
    preferred = torch.backends.cuda.preferred_blas_library()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _SetCublasLt.apply(torch.zeros(()))  # type: ignore[no-untyped-call]
    torch.backends.cuda.preferred_blas_library(preferred)


def _batch_invariant_linear(x: Tensor, w: Tensor) -> Tensor:
    # The kernel reads rows; a layer may store its weight as (in, out).
    w = w if w.stride(1) == 1 else w.contiguous()
    found: Tensor = _kernels().multiply_in_order(x.contiguous(), w)
    return found


def _empty_output(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0])


# Operators, so that a compiler does not look inside.
_LIBRARY = torch.library.Library("ranvier", "FRAGMENT")
for _name, _function in (
    ("thin_linear", _thin_linear),
    ("batch_invariant_linear", _batch_invariant_linear),
):
    _LIBRARY.define(f"{_name}(Tensor x, Tensor w) -> Tensor")
    _LIBRARY.impl(_name, _function, "CUDA")
    torch.library.register_fake(f"ranvier::{_name}", _empty_output, lib=_LIBRARY)


@dataclass(frozen=True)
class ThinMatmul(PlainMatmul):
    """Matmuls that are fast for few rows, without gradients."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """Returns y = x Wᵀ; x: `[t, i]`, w: `[o, i]`, y: `[t, o]`."""
        found: Tensor = torch.ops.ranvier.thin_linear(x, w)
        return found

    def linear(self, x: Tensor, w: Tensor) -> Tensor:
        """Returns y = x Wᵀ, without a derivative."""
        return self.forward(x, w)


@dataclass(frozen=True)
class BatchInvariantMatmul(PlainMatmul):
    """Matmuls whose rows do not depend on other rows, without gradients."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """Returns y = x Wᵀ; x: `[t, i]`, w: `[o, i]`, y: `[t, o]`."""
        found: Tensor = torch.ops.ranvier.batch_invariant_linear(x, w)
        return found

    def linear(self, x: Tensor, w: Tensor) -> Tensor:
        """Returns y = x Wᵀ, without a derivative."""
        return self.forward(x, w)


def can_multiply_thin(device: torch.device) -> bool:
    """Whether a device has the kernels of this module."""
    return device.type == "cuda" and not torch.version.hip and has_triton()
