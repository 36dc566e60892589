"""Norms: statistics over a dim that may be split are summed over the axes that split it.

The residual stream is split over col, so its norm sums one number per token (two for LayerNorm). A
norm per head needs no sum. A norm over all heads sums over row (or row·col) and counts shared kv
heads once. Statistics are computed at least in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ranvier.comm import collectives
from ranvier.comm.autograd import copy_to_axis, reduce_from_axis
from ranvier.cost.layers import NormCost
from ranvier.errors import ShardingError
from ranvier.grid import Axis
from ranvier.nn.example import LayerExample
from ranvier.nn.layer import LayerContext, ParallelLayer, apply_autograd
from ranvier.sharding import Dim


class Norm(ParallelLayer):
    """Base class of norms: finds the axes that split the dim, and sums statistics over them.

    Args:
        site: Name and context of the layer.
        serial: The serial norm to replace. It must have a weight.
        dims: Name of the one dim of the weight, e.g. ("embed",).
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    num_sums = 1
    """Numbers per token that are summed over the axes."""
    weight_offset = 0.0
    """Constant that is added to the weight."""

    def __init__(self, site: LayerContext, serial: torch.nn.Module, dims: Sequence[Dim]) -> None:
        super().__init__(site)
        if len(dims) != 1 or not isinstance(dims[0], str):
            raise ShardingError(
                f"{site.name} has the dims {tuple(dims)}. A norm has exactly one dim. Use one "
                "name, e.g. ('embed',)."
            )
        self.dim = dims[0]
        weight = serial.weight
        bias = getattr(serial, "bias", None)
        if not isinstance(weight, torch.nn.Parameter):
            raise ShardingError(
                f"{site.name} has no weight. A parallel norm must have one. Build it with "
                "elementwise_affine=True."
            )
        self.size = weight.numel()
        region = site.table.activation_rule(self.dim)
        cuts = self.cost_model.feature_sharding.splits[0]
        self.axis = site.axis(*(cut.axis for cut in cuts))
        # Several ranks hold a shared kv head, so a sum over the axis counts it `replicas` times.
        self.num_replicas = 1
        for cut in cuts:
            self.num_replicas *= cut.replicas
        self.weight_offset = float(getattr(serial, "weight_offset", 0.0))
        # Offset plus weight is 1 initially, for any offset.
        self.shard_parameter("weight", weight, dims, rule=region, mean=1.0 - self.weight_offset)
        self.shard_parameter(
            "bias", bias if isinstance(bias, torch.nn.Parameter) else None, dims, rule=region
        )

    def global_mean(self, x: Tensor) -> Tensor:
        """Returns the mean over the whole dim.

        Communicates: all-reduce over the axes of the dim, forward and backward.
        """
        here = x.sum(-1, keepdim=True)
        # Each rank uses the mean for its own features, so forward and backward both sum.
        return copy_to_axis(reduce_from_axis(here, self.axis), self.axis) / (
            self.size * self.num_replicas
        )

    def _can_fuse(self, x: Tensor) -> bool:
        """Whether to use the kernel of torch: eagerly, on a GPU that has all features.

        It normalizes one row per block, so that a row does not depend on the others.
        """
        is_eager = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        return is_eager and x.is_cuda and self.axis.size == 1

    @property
    def cost_model(self) -> NormCost:
        """Cost of one all-reduce per sum."""
        return NormCost(
            self.site.name, self.site.layout_context, self.size, self.dim, self.num_sums
        )


class RMSNorm(Norm):
    """Root mean square normalization, y = (offset + w) · x / sqrt(mean(x²) + eps).

    x, y: `[b, s/row, d/col]`.
    Communicates: all-reduce of one number per token over col, forward and backward.
    """

    def __init__(self, site: LayerContext, serial: torch.nn.Module, dims: Sequence[Dim]) -> None:
        super().__init__(site, serial, dims)
        # torch's RMSNorm has `eps`, the norms of Hugging Face models have `variance_epsilon`.
        eps = getattr(serial, "eps", getattr(serial, "variance_epsilon", None))
        if eps is None:
            self.eps = None
        else:
            self.eps = float(eps)

    @staticmethod
    def example_layers() -> list[LayerExample]:
        """Examples for the generic tests."""
        outer = ("batch", "seq", "embed")
        inner = ("batch", "seq", "heads")
        shared = ("batch", "seq", "kv_heads")
        head = ("batch", "seq", "heads", "head_dim")
        return [
            LayerExample(lambda twin: twin(16, eps=1e-5), ("embed",), [outer], [outer]),
            LayerExample(lambda twin: twin(32), ("heads",), [inner], [inner]),
            LayerExample(lambda twin: twin(8, eps=1e-5), ("kv_heads",), [shared], [shared]),
            LayerExample(lambda twin: twin(4, eps=1e-5), ("head_dim",), [head], [head]),
        ]

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes x, `[b, s/row, d/col]`."""
        weight = _at_least_float32(self.weight)
        if self.weight_offset != 0.0:
            weight = self.weight_offset + weight
        with self.trace_scope():
            wide = _at_least_float32(x)
            # torch's default: the machine epsilon of the computation's dtype.
            if self.eps is None:
                eps = torch.finfo(wide.dtype).eps
            else:
                eps = self.eps
            # The fused function is faster only in eager mode on a CPU, and needs a single dtype.
            eager = x.device.type == "cpu" and not torch.compiler.is_compiling()
            if eager and x.dtype == weight.dtype:
                found: Tensor = apply_autograd(_RMSNormFunction, x, weight, eps, self)
                return found
            if self._can_fuse(x):
                return F.rms_norm(wide, wide.shape[-1:], weight, eps).to(x.dtype)
            y = wide * torch.rsqrt(self.global_mean(wide * wide) + eps)
        return (y * weight).to(x.dtype)


class _RMSNormFunction(torch.autograd.Function):
    """y = w · x · r with r = 1 / sqrt(mean(x²) + eps), in few passes over memory.

    dx = r · w · dy - x · r³ · mean(x · w · dy); dw = Σ r · x · dy over tokens. On a CPU the
    derivative by autograd takes twice as long; on a GPU blocks are compiled into one kernel.
    Communicates: all-reduce of one number per token over the axes of the dim, forward and backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, norm: Norm) -> Tensor:
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square()
        mean = collectives.all_reduce(square, norm.axis).wait() / (norm.size * norm.num_replicas)
        root = torch.rsqrt(mean + eps)  # (..., 1)
        ctx.save_for_backward(x, weight, root)
        ctx.norm = norm
        return (x * root).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, root = ctx.saved_tensors
        norm = ctx.norm
        # Both gradients use x · dy: times w it gives the mean, times r it gives dw.
        product = (x * dy).flatten(0, -2)  # (tokens, d/col)
        with norm.trace_scope():
            here = (product @ weight).view(root.shape)
            mean = sum_gradients(here, norm.axis) / (norm.size * norm.num_replicas)
        dx = (dy * weight).mul_(root).addcmul_(x, mean.mul_(root).mul_(root).mul_(root), value=-1.0)
        if ctx.needs_input_grad[1]:
            dw = root.flatten() @ product
        else:
            dw = None
        return dx, dw, None, None


def sum_gradients(x: Tensor, axis: Axis) -> Tensor:
    """Returns the sum of the gradients of all ranks. Communicates: all-reduce over axis."""
    return collectives.all_reduce(x, axis).wait()


class LayerNorm(Norm):
    """Layer normalization, y = w · (x - mean(x)) / sqrt(mean((x - mean(x))²) + eps) + b.

    x, y: `[b, s/row, d/col]`.
    Communicates: two all-reduces of one number per token over col, forward and backward.
    """

    num_sums = 2

    def __init__(self, site: LayerContext, serial: torch.nn.LayerNorm, dims: Sequence[Dim]) -> None:
        super().__init__(site, serial, dims)
        self.eps = serial.eps

    @staticmethod
    def example_layers() -> list[LayerExample]:
        """Examples for the generic tests."""
        outer = ("batch", "seq", "embed")
        return [LayerExample(lambda twin: twin(16), ("embed",), [outer], [outer])]

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes x, `[b, s/row, d/col]`."""
        with self.trace_scope():
            wide = _at_least_float32(x)
            if self._can_fuse(x):
                bias = None if self.bias is None else _at_least_float32(self.bias)
                weight = _at_least_float32(self.weight)
                return F.layer_norm(wide, wide.shape[-1:], weight, bias, self.eps).to(x.dtype)
            # Two reductions instead of one with Σx and Σx², which loses precision for a large mean.
            centred = wide - self.global_mean(wide)
            y = (
                centred
                * torch.rsqrt(self.global_mean(centred * centred) + self.eps)
                * _at_least_float32(self.weight)
            )
        return (y if self.bias is None else y + _at_least_float32(self.bias)).to(x.dtype)


def _at_least_float32(x: Tensor) -> Tensor:
    """Converts half-precision tensors to fp32."""
    if x.dtype in (torch.bfloat16, torch.float16):
        return x.float()
    return x
