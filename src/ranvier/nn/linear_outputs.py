"""Outputs of several linear layers packed into one buffer, so that one reduce-scatter serves all.

Outputs are packed along their features, (b, s, Σn). Where the scatter itself is over features, each
rank must get its part of every output: (b, s, col, Σn/col), scattered along dim 2. kv heads that
several ranks share are repeated there, once for each rank that needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ranvier.grid import Axis

if TYPE_CHECKING:
    from ranvier.nn.linear import Linear


def buffer_dim(dim: int) -> int:
    """The dim of the packed buffer that is scattered."""
    if dim == -1:
        return 2
    return dim


def pack_outputs(ys: Sequence[Tensor], layers: Sequence[Linear], axis: Axis, dim: int) -> Tensor:
    """Pack outputs `[b, s, n_i]` into one buffer before the reduce-scatter."""
    if dim != -1:
        if len(ys) == 1:
            return ys[0]
        return torch.cat(list(ys), -1)
    blocks = []
    for y, layer in zip(ys, layers, strict=True):
        # Parts of a packed weight (such as gate and up in one matrix) are each split over the axis.
        for one in y.unflatten(-1, (layer.num_packed, -1)).unbind(-2):
            block = one.unflatten(-1, (layer.num_scatter_parts, -1))
            # Fewer parts than ranks: neighbouring ranks share a kv head and get a copy each.
            copies = axis.size // layer.num_scatter_parts
            blocks.append(block if copies == 1 else block.repeat_interleave(copies, 2))
    return _concat_features(blocks)  # (b, s, col, m)


def unpack_output_grads(dy: Tensor, layers: Sequence[Linear], axis: Axis, dim: int) -> list[Tensor]:
    """Gradients `[b, s, n_i]` from the gathered buffer; copies of a shared head are summed."""
    sizes = output_widths(layers)
    if dim != -1:
        return list(dy.split([sum(of_layer) for of_layer in sizes], -1))
    blocks = iter(dy.split([size for of_layer in sizes for size in of_layer], -1))  # (b, s, col, m)
    out = []
    for layer in layers:
        each = [
            next(blocks).unflatten(2, (layer.num_scatter_parts, -1))
            for _ in range(layer.num_packed)
        ]
        # Dual of the copies in `pack_outputs`.
        parts = [x.squeeze(3) if x.shape[3] == 1 else x.sum(3) for x in each]
        out.append(_concat_features([x.flatten(2) for x in parts]))
    return out


def _concat_features(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate along features; a single part is not copied."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts), -1)


def unpack_outputs(y: Tensor, layers: Sequence[Linear], dim: int) -> list[Tensor]:
    """Outputs of the layers on this rank from the scattered buffer."""
    if dim == -1:
        y = y.squeeze(2)
    return list(y.split([sum(of_layer) for of_layer in output_widths(layers)], -1))


def pack_output_grads(grads: Sequence[Tensor], layers: Sequence[Linear], dim: int) -> Tensor:
    """Pack the gradients of this rank's outputs as `unpack_outputs` found them."""
    if len(grads) == 1:
        dy = grads[0]
    else:
        dy = torch.cat(list(grads), -1)
    if dim == -1:
        return dy.unsqueeze(2)
    return dy


def output_widths(layers: Sequence[Linear]) -> list[list[int]]:
    """Features of each output on this rank, one number per packed part."""
    return [[layer.output_sharding.local_shape[0]] * layer.num_packed for layer in layers]
