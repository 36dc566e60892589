"""Matmuls of inference: few rows, read at the speed of memory, or equal bits in every batch.

With few tokens a linear layer reads its weight once and computes little, so that its time is that
of reading. A row of one token is a sum per output, computed by many small programs; up to 32 rows
are one tile of tensor cores, which has the weight as its left side, and the inputs are divided into
parts if there are few outputs. This kernel also multiplies with a few more rows if there are few
outputs, or those of a vocabulary: for 100,003 outputs, whose rows are not aligned, 24 rows take
710 µs with cuBLAS on an H200, and 150 with the kernel. The rest uses cuBLASLt for up to 112 rows,
since it chooses faster kernels there, and cuBLAS for more.

`BatchInvariantMatmul` uses one kernel for every number of rows. It adds along the input features in
one order, without splitting them, so that a row of the result does not depend on other rows.

The kernels are launched before the kernel in front of them has ended (programmatic dependent
launch), and load weights until it has.
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
"""Maximum number of rows of the kernels for few rows."""
MAX_WIDE_ROWS = 16
"""Maximum number of rows for which a weight with many outputs is multiplied in order."""
WIDE_RATIO = 4
"""Outputs per input from which on the inputs are not divided."""
MAX_TILE_ROWS = 128
"""Maximum number of rows of the kernel that divides the inputs into parts."""
MIN_VOCAB_OUTPUTS = 2**16
"""Outputs from which on this kernel is faster than cuBLAS for all of its numbers of rows."""
MAX_SMALL_ROWS = 64
"""Maximum number of rows of this kernel for few outputs."""
MAX_SMALL_OUTPUTS = 2560
"""Maximum number of these outputs. With more, cuBLASLt has enough tiles."""
MAX_LT_ROWS = 112
"""Maximum number of rows that use cuBLASLt. On an H200 it took 0.85 to 1.01 of the time of cuBLAS
for 40 to 112 rows and shapes of Llama models with 3,072 or more outputs, but up to 1.08 for more
rows, and 1.15 for 2,048 outputs."""
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
    has_aligned_rows = w.stride(0) % 8 == 0 and x.shape[1] % 8 == 0
    is_aligned = has_aligned_rows and (x.data_ptr() | w.data_ptr()) % 16 == 0
    return is_plain and x.dtype in KERNEL_DTYPES and is_aligned


def _thin_linear(x: Tensor, w: Tensor) -> Tensor:
    num_rows, num_inputs = x.shape
    num_outputs = w.shape[0]
    if not _can_use_kernels(x, w):
        return F.linear(x, w)
    y: Tensor
    if num_rows == 1:
        y = _kernels().multiply_row(x, w)
        return y
    is_wide = num_rows <= MAX_WIDE_ROWS and num_outputs >= WIDE_RATIO * num_inputs
    is_unaligned = num_outputs % ALIGNED_OUTPUTS != 0
    is_small = num_rows <= MAX_SMALL_ROWS and num_outputs <= MAX_SMALL_OUTPUTS
    is_vocab = num_rows <= MAX_TILE_ROWS and (is_unaligned or num_outputs >= MIN_VOCAB_OUTPUTS)
    if not is_wide and (num_rows <= MAX_THIN_ROWS or is_small or is_vocab):
        y = _kernels().multiply_in_parts(x, w)
        return y
    if is_wide or is_unaligned:
        y = _kernels().multiply_in_order(x, w)
        return y
    if num_rows <= MAX_LT_ROWS and num_outputs > MAX_SMALL_OUTPUTS:
        with _prefer_cublaslt():
            return F.linear(x, w)
    return F.linear(x, w)


@contextmanager
def _prefer_cublaslt() -> Iterator[None]:
    """Context in which torch calls cuBLASLt for matmuls, which is a setting of the process."""
    _consume_library_warning()
    preferred = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(preferred)


class _SetCublasLt(torch.autograd.Function):
    """Sets the library where warnings of C++ are those of Python; elsewhere they are printed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        torch.backends.cuda.preferred_blas_library("cublaslt")
        return x


@cache
def _consume_library_warning() -> None:
    """Ignores torch's only warning that this setting is experimental, which it is for speed alone.

    Otherwise each server would print it.
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
