"""Scores of the streams of a token: sums over all features, which each rank of col uses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ranvier.comm.autograd import copy_to_axis, reduce_from_axis
from ranvier.cost.layers import StreamScoresCost
from ranvier.nn.example import LayerExample
from ranvier.nn.layer import LayerContext, ParallelLayer
from ranvier.sharding import Dim


class StreamScores(ParallelLayer):
    """Scores of the streams of each token, y = x Wᵀ + b, at least in fp32.

    x: `[b, s/row, d/col]`; y: `[b, s/row, P]`, equal on all ranks of col. Each of them weights its
    features of the streams by the scores, so their gradients are sums over col as well.
    Communicates: all-reduce of P numbers per token over col, forward and backward.

    Args:
        site: Name and context of the layer.
        serial: The serial `models.parscale.StreamScores` to replace.
        dims: Names of the dims of the weight, ("stream", "embed").
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter

    def __init__(self, site: LayerContext, serial: torch.nn.Linear, dims: Sequence[Dim]) -> None:
        super().__init__(site)
        stream, embed = dims
        assert isinstance(embed, str), dims
        weight, bias = serial.weight, serial.bias
        assert isinstance(weight, torch.nn.Parameter) and isinstance(bias, torch.nn.Parameter)
        self.shape = (serial.out_features, serial.in_features)
        rule = site.table.activation_rule(embed)
        self.axis = site.axis(*site.table.feature_axes(embed))
        self.shard_parameter("weight", weight, dims, rule=rule, std=0.02)
        self.shard_parameter("bias", bias, (stream,), rule=rule)

    @staticmethod
    def example_layers() -> list[LayerExample]:
        """Examples for the generic tests."""
        return []

    def forward(self, x: Tensor) -> Tensor:
        """Computes the scores, `[b, s/row, P]`."""
        wide = torch.promote_types(x.dtype, torch.float32)
        # Waits for an update of the weight in the background.
        weight = self.handles["weight"].unsharded_param()
        with self.trace_scope():
            here = F.linear(x.to(wide), weight.to(wide))
            scores = copy_to_axis(reduce_from_axis(here, self.axis), self.axis)
        # Added after the sum, so that the gradient of the bias is a part of its sum over col.
        return scores + self.bias.to(wide)

    @property
    def cost_model(self) -> StreamScoresCost:
        """Cost of the sum over col."""
        return StreamScoresCost(self.site.name, self.site.layout_context, self.shape)
