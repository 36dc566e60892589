"""float8: the three matmuls of a linear layer on 8-bit floats with dynamic scaling.

    y  = x8 · W8ᵀ / (s_x s_w)      x, W in e4m3, fast accumulation
    dx = dy8 · W8  / (s_y s_w)     dy in e5m2, rowwise in e4m3
    dw = dy8ᵀ · x8 / (s_y s_x)

A scale maps the largest magnitude of a tensor (tensorwise) or of each row of an operand (rowwise)
to the top of the type's range. Scales are powers of two, so that rounding does not depend on the
scale (except for the smallest numbers) and is the same on any grid. Weights and master weights do
not change. The device multiplies rows by rows, so backward needs transposed copies: x is saved as
a transposed fp8 copy, with half the bytes. On a CPU, which has no such matmul, the same fp8 numbers
are multiplied in a wider type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ranvier import launch
from ranvier.nn.layer import apply_autograd

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
SIZE_MULTIPLE = 16
"""All sizes of a matmul must be multiples of this."""
MIN_AMAX = 2.0**-100
"""Lower bound of the largest magnitude, so that the scale of a zero tensor is finite."""
TRITON = launch.has_triton()

ScalingGranularity = Literal["tensorwise", "rowwise"]


@dataclass(frozen=True)
class Float8Tensor:
    """A matrix in fp8 `[r, c]` and its inverse scale, `[]` or rowwise `[r, 1]`."""

    values: Tensor
    inverse_scale: Tensor


@dataclass(frozen=True)
class Float8Linear:
    """The three matmuls in fp8; x: `[t, i]`, w: `[o, i]`, dy: `[t, o]`."""

    granularity: ScalingGranularity = "tensorwise"

    @property
    def grad_dtype(self) -> torch.dtype:
        """Dtype of gradients: more range for tensorwise scales, more precision for rowwise."""
        if self.granularity == "tensorwise":
            return E5M2
        return E4M3

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """Returns x Wᵀ."""
        return scaled_matmul(self.quantize(x, E4M3), self.quantize(w, E4M3), x.dtype, fast=True)

    def grad_x(self, dy: Tensor, w: Tensor) -> Tensor:
        """Returns dY W."""
        return scaled_matmul(
            self.quantize(dy, self.grad_dtype), self.quantize_transposed(w, E4M3), dy.dtype
        )

    def grad_w(self, dy: Tensor, x: Tensor) -> Tensor:
        """Returns dYᵀ X."""
        return scaled_matmul(
            self.quantize_transposed(dy, self.grad_dtype),
            self.quantize_transposed(x, E4M3),
            x.dtype,
        )

    def linear(self, x: Tensor, w: Tensor) -> Tensor:
        """Returns x Wᵀ; differentiable."""
        y: Tensor = apply_autograd(_Float8Matmul, x, w, self)
        return y

    def quantize(self, x: Tensor, dtype: torch.dtype) -> Float8Tensor:
        """Returns the matrix in fp8."""
        scale, inverse = self.compute_scales(x, dtype, 1)
        if self.granularity == "rowwise":
            return Float8Tensor(_cast_saturated(x, scale, dtype), inverse)
        return Float8Tensor(_cast_transpose(x, scale, dtype, True, False)[0], inverse)

    def quantize_transposed(self, x: Tensor, dtype: torch.dtype) -> Float8Tensor:
        """Returns the transposed matrix in fp8."""
        # Rows of the transposed matrix are columns of x, so the maximum is over dim 0.
        scale, inverse = self.compute_scales(x, dtype, 0)
        if self.granularity == "rowwise":
            return Float8Tensor(_cast_saturated(x, scale, dtype).t().contiguous(), inverse.t())
        return Float8Tensor(_cast_transpose(x, scale, dtype, False, True)[1], inverse)

    def quantize_both(self, x: Tensor, dtype: torch.dtype) -> tuple[Float8Tensor, Float8Tensor]:
        """Returns the matrix and its transpose in fp8; in one pass if they share a scale."""
        if self.granularity == "rowwise":
            # Rows and columns have different scales.
            return self.quantize(x, dtype), self.quantize_transposed(x, dtype)
        scale, inverse = self.compute_scales(x, dtype, 1)
        values, turned = _cast_transpose(x, scale, dtype, True, True)
        return Float8Tensor(values, inverse), Float8Tensor(turned, inverse)

    def compute_scales(self, x: Tensor, dtype: torch.dtype, dim: int) -> tuple[Tensor, Tensor]:
        """Returns the power of two that scales x to the range of the dtype, and its inverse.

        dim: the dim that the matmul sums over; elements along it share a scale. Both results have
        the shape `[]`, or one element per row.
        """
        most = torch.finfo(dtype).max
        if self.granularity == "tensorwise" and _can_call_kernels(x):
            from ranvier.nn import triton_kernels

            return triton_kernels.tensorwise_scale(x.contiguous(), most, MIN_AMAX)
        largest = x.abs().amax(dim, keepdim=True)
        if self.granularity == "tensorwise":
            largest = largest.amax()
        scale = power_of_two_scale(largest.float(), most)
        return scale, 1.0 / scale


def power_of_two_scale(largest: Tensor, most: float) -> Tensor:
    """Returns the largest power of two whose product with `largest` is at most `most`."""
    return torch.exp2(torch.floor(torch.log2(most / largest.clamp(min=MIN_AMAX))))


def _can_call_kernels(x: Tensor) -> bool:
    """Whether to call the Triton kernels directly.

    A compiler needs operations that it can fuse. In eager mode each additional operation costs host
    time, which is the bottleneck there.
    """
    return x.device.type == "cuda" and TRITON and not torch.compiler.is_compiling()


def _cast_saturated(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x · scale in fp8, clamped to the largest finite number."""
    most = torch.finfo(dtype).max
    # Scaled in fp32: a bf16 product would round twice.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * scale).clamp(-most, most).to(dtype)


def scaled_matmul(
    a: Float8Tensor, b: Float8Tensor, dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """Returns A Bᵀ of matrices `[m, k]` and `[n, k]`. fast: accumulate with less precision."""
    if b.inverse_scale.dim() == 0:
        right = b.inverse_scale
    else:
        # Rowwise scales of B belong to the columns of the result: `[n, 1]` becomes `[1, n]`.
        right = b.inverse_scale.t()
    # Emulation: multiply the same fp8 values in fp32 or wider.
    if a.values.device.type != "cuda":
        wide = torch.promote_types(dtype, torch.float32)
        y = a.values.to(wide) @ b.values.to(wide).t() * a.inverse_scale * right
        # Not converted to its own dtype: torch.compile in torch 2.11 loses the gradient of that.
        return y if wide == dtype else y.to(dtype)
    return torch._scaled_mm(
        a.values,
        b.values.t(),
        scale_a=a.inverse_scale,
        scale_b=right.contiguous(),
        out_dtype=dtype,
        use_fast_accum=fast,
    )


def supports_sizes(tokens: int, out: int, into: int) -> bool:
    """Whether a layer of these sizes can be multiplied in fp8."""
    return tokens % SIZE_MULTIPLE == out % SIZE_MULTIPLE == into % SIZE_MULTIPLE == 0


def supports_device(device: torch.device) -> bool:
    """Whether the device supports fp8 matmuls; a CPU emulates them."""
    if device.type != "cuda":
        return True
    # fp8 tensor cores need compute capability 8.9 (Ada) or higher.
    return not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 9)


class _Float8Matmul(torch.autograd.Function):
    """A matmul in fp8 that saves a transposed fp8 copy of x for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, scaled: Float8Linear) -> Tensor:
        mine, turned = scaled.quantize_both(x, E4M3)
        # dW needs only the transposed fp8 copy of x, which has half the bytes of bf16.
        ctx.save_for_backward(turned.values, turned.inverse_scale, w)
        ctx.scaled = scaled
        return scaled_matmul(mine, scaled.quantize(w, E4M3), x.dtype, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        values, inverse, w = ctx.saved_tensors
        scaled: Float8Linear = ctx.scaled
        mine, turned = scaled.quantize_both(dy, scaled.grad_dtype)
        dx = scaled_matmul(mine, scaled.quantize_transposed(w, E4M3), dy.dtype)
        return dx, scaled_matmul(turned, Float8Tensor(values, inverse), dy.dtype), None


# ---- one operation for the compiler -----------------------------------------------------


def _cast_transpose(
    x: Tensor, scale: Tensor, dtype: torch.dtype, plain: bool, turned: bool
) -> tuple[Tensor, Tensor]:
    """Same as `cast_transpose_op`, but without the dispatcher in eager mode."""
    if _can_call_kernels(x):
        from ranvier.nn import triton_kernels

        return triton_kernels.cast_transpose(
            x.contiguous(), scale, dtype, plain=plain, turned=turned
        )
    both: tuple[Tensor, Tensor] = cast_transpose_op(x, scale, dtype, plain, turned)
    return both


@torch.library.custom_op("ranvier::cast", mutates_args=())
def cast_transpose_op(
    x: Tensor, scale: Tensor, dtype: torch.dtype, plain: bool, turned: bool
) -> tuple[Tensor, Tensor]:
    """Returns x · scale in fp8 `[r, c]` and transposed `[c, r]`; empty if not requested."""
    if x.device.type == "cuda" and TRITON:
        from ranvier.nn import triton_kernels

        return triton_kernels.cast_transpose(
            x.contiguous(), scale, dtype, plain=plain, turned=turned
        )
    y = _cast_saturated(x, scale, dtype)
    return y if plain else y.new_empty(0), y.t().contiguous() if turned else y.new_empty(0)


@cast_transpose_op.register_fake
def _(
    x: Tensor, scale: Tensor, dtype: torch.dtype, plain: bool, turned: bool
) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    a = x.new_empty((rows, columns) if plain else (0,), dtype=dtype)
    return a, x.new_empty((columns, rows) if turned else (0,), dtype=dtype)
