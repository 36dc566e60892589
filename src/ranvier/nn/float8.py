"""fp8: the products of a linear layer on numbers of 8 bits, scaled as they are now.

    y  = x8 · W8ᵀ / (s_x s_w)      x, W in e4m3, fast accumulation
    dx = dy8 · W8  / (s_y s_w)     dy in e5m2, by rows in e4m3
    dw = dy8ᵀ · x8 / (s_y s_x)

A scale brings the largest magnitude of a tensor (tensorwise) or of each row of an operand (rowwise)
to the top of the type; it is a power of two, so that a number is rounded alike whatever the scale
(only the smallest differ), on any grid. Weights and master weights are not touched. The device
multiplies rows by rows, so backward needs transposed copies; of x it is kept instead of x itself,
at half the bytes. Where there is no such product (the CPU) the same numbers are multiplied widely.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ranvier import launch
from ranvier.nn.layer import applied

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EVEN = 16
"""What all sizes of a product must be multiples of."""
LEAST = 2.0**-100
"""Magnitudes below count as this one."""
TRITON = launch.triton()

Kind = Literal["tensorwise", "rowwise"]


@dataclass(frozen=True)
class Eighth:
    """A matrix in fp8 `[r, c]` and what it is to be multiplied by: `[]`, or `[r, 1]` by rows."""

    values: Tensor
    inverse: Tensor


@dataclass(frozen=True)
class Scaled:
    """The three products in fp8; x: `[t, i]`, w: `[o, i]`, dy: `[t, o]`."""

    kind: Kind = "tensorwise"

    @property
    def wide(self) -> torch.dtype:
        """The type of gradients: more range, or where each row has a scale more digits."""
        return E5M2 if self.kind == "tensorwise" else E4M3

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """x Wᵀ."""
        return times(self.plain(x, E4M3), self.plain(w, E4M3), x.dtype, fast=True)

    def grad_x(self, dy: Tensor, w: Tensor) -> Tensor:
        """dY W."""
        return times(self.plain(dy, self.wide), self.turned(w, E4M3), dy.dtype)

    def grad_w(self, dy: Tensor, x: Tensor) -> Tensor:
        """dYᵀ X."""
        return times(self.turned(dy, self.wide), self.turned(x, E4M3), x.dtype)

    def linear(self, x: Tensor, w: Tensor) -> Tensor:
        """x Wᵀ in autograd."""
        y: Tensor = applied(_Linear, x, w, self)
        return y

    def plain(self, x: Tensor, dtype: torch.dtype) -> Eighth:
        """The matrix as it lies."""
        scale, inverse = self.scales(x, dtype, 1)
        if self.kind == "rowwise":
            return Eighth(_narrow(x, scale, dtype), inverse)
        return Eighth(_cast(x, scale, dtype, True, False)[0], inverse)

    def turned(self, x: Tensor, dtype: torch.dtype) -> Eighth:
        """The transposed matrix."""
        scale, inverse = self.scales(x, dtype, 0)
        if self.kind == "rowwise":
            return Eighth(_narrow(x, scale, dtype).t().contiguous(), inverse.t())
        return Eighth(_cast(x, scale, dtype, False, True)[1], inverse)

    def both(self, x: Tensor, dtype: torch.dtype) -> tuple[Eighth, Eighth]:
        """As it lies, and transposed; in one pass where one scale serves both."""
        if self.kind == "rowwise":
            return self.plain(x, dtype), self.turned(x, dtype)
        scale, inverse = self.scales(x, dtype, 1)
        values, turned = _cast(x, scale, dtype, True, True)
        return Eighth(values, inverse), Eighth(turned, inverse)

    def scales(self, x: Tensor, dtype: torch.dtype, dim: int) -> tuple[Tensor, Tensor]:
        """The power of two that brings the largest magnitude just below the largest number, and
        its inverse.

        dim: over which rows are as long as the sum of the product; `[]`, or by rows.
        """
        most = torch.finfo(dtype).max
        if self.kind == "tensorwise" and _direct(x):
            from ranvier.nn import triton_kernels

            return triton_kernels.scales(x.contiguous(), most, LEAST)
        largest = x.abs().amax(dim, keepdim=True)
        if self.kind == "tensorwise":
            largest = largest.amax()
        scale = power(largest.float(), most)
        return scale, 1.0 / scale


def power(largest: Tensor, most: float) -> Tensor:
    """The largest power of two that keeps `largest` times it at most `most`."""
    return torch.exp2(torch.floor(torch.log2(most / largest.clamp(min=LEAST))))


def _direct(x: Tensor) -> bool:
    """Whether kernels are called as they are: a compiler fuses what it sees, and needs operations;
    else each of these is one more call of the host, which then is what takes the time."""
    return x.device.type == "cuda" and TRITON and not torch.compiler.is_compiling()


def _narrow(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x · scale in fp8; what rounding would lift above the largest number becomes it."""
    most = torch.finfo(dtype).max
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * scale).clamp(-most, most).to(dtype)


def times(a: Eighth, b: Eighth, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """A Bᵀ of matrices `[m, k]` and `[n, k]`. fast: sums may be rounded more often."""
    right = b.inverse if b.inverse.dim() == 0 else b.inverse.t()
    if a.values.device.type != "cuda":
        wide = torch.promote_types(dtype, torch.float32)
        y = a.values.to(wide) @ b.values.to(wide).t()
        return (y * a.inverse * right).to(dtype)
    return torch._scaled_mm(
        a.values,
        b.values.t(),
        scale_a=a.inverse,
        scale_b=right.contiguous(),
        out_dtype=dtype,
        use_fast_accum=fast,
    )


def takes(tokens: int, out: int, into: int) -> bool:
    """Whether a layer of these sizes can be multiplied in fp8."""
    return tokens % EVEN == out % EVEN == into % EVEN == 0


def supported(device: torch.device) -> bool:
    """Whether the device multiplies fp8 numbers; the CPU multiplies them widely instead."""
    if device.type != "cuda":
        return True
    return not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 9)


class _Linear(torch.autograd.Function):
    """A product in fp8 that keeps x transposed in fp8 for its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, scaled: Scaled) -> Tensor:
        mine, turned = scaled.both(x, E4M3)
        ctx.save_for_backward(turned.values, turned.inverse, w)
        ctx.scaled = scaled
        return times(mine, scaled.plain(w, E4M3), x.dtype, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        values, inverse, w = ctx.saved_tensors
        scaled: Scaled = ctx.scaled
        mine, turned = scaled.both(dy, scaled.wide)
        dx = times(mine, scaled.turned(w, E4M3), dy.dtype)
        return dx, times(turned, Eighth(values, inverse), dy.dtype), None


# ---- one operation for the compiler -----------------------------------------------------


def _cast(
    x: Tensor, scale: Tensor, dtype: torch.dtype, plain: bool, turned: bool
) -> tuple[Tensor, Tensor]:
    """As `cast`, past the dispatcher where nothing is compiled."""
    if _direct(x):
        from ranvier.nn import triton_kernels

        return triton_kernels.cast(x.contiguous(), scale, dtype, plain=plain, turned=turned)
    both: tuple[Tensor, Tensor] = cast(x, scale, dtype, plain, turned)
    return both


@torch.library.custom_op("ranvier::cast", mutates_args=())
def cast(
    x: Tensor, scale: Tensor, dtype: torch.dtype, plain: bool, turned: bool
) -> tuple[Tensor, Tensor]:
    """x `[r, c]` times scale `[]` in fp8, as it lies and transposed; empty if not asked for."""
    if x.device.type == "cuda" and TRITON:
        from ranvier.nn import triton_kernels

        return triton_kernels.cast(x.contiguous(), scale, dtype, plain=plain, turned=turned)
    y = _narrow(x, scale, dtype)
    return y if plain else y.new_empty(0), y.t().contiguous() if turned else y.new_empty(0)


@cast.register_fake
def _(
    x: Tensor, scale: Tensor, dtype: torch.dtype, plain: bool, turned: bool
) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    a = x.new_empty((rows, columns) if plain else (0,), dtype=dtype)
    return a, x.new_empty((columns, rows) if turned else (0,), dtype=dtype)
