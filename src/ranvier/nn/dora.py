"""DoRA magnitudes: trained row norms divided by the row norms of the adapted weight W + s · B A.

A row of the weight is split over one axis (col if the layer enters attention or MLP, row if it
leaves), and the rank dim is not split. Each rank sums the squares of its columns from its shards of
W, A and B, and one number per row is summed over that axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ranvier.comm.autograd import reduce_from_axis
from ranvier.cost.layers import DoraNormCost
from ranvier.errors import ShardingError
from ranvier.nn.layer import LayerContext, ParallelLayer
from ranvier.nn.linear import Linear
from ranvier.sharding import WEIGHT_RULE, Dim, dim_name


class DoraMagnitude(ParallelLayer):
    """DoRA magnitudes, y = m / ‖W + s · B A‖.

    y: one factor per output feature of the layer, `[n/row]`, `[n/(row·col)]` or `[d/col]`.
    Communicates: all-reduce of one number per row of the weight over the axis of its in dim.
    """

    weight: torch.nn.Parameter

    def __init__(self, site: LayerContext, serial: torch.nn.Module, dims: Sequence[Dim]) -> None:
        super().__init__(site)
        out, into = dims[0], dim_name(dims[1])
        assert isinstance(out, str), dims
        # A rank has all rows of W, but only some rows of B.
        if out == into:
            raise ShardingError(
                f"{site.name} is the DoRA magnitude of a layer from {into!r} to itself. DoRA does "
                "not support such layers. Use LoRA without DoRA, or do not adapt the layer."
            )
        assert isinstance(serial.weight, torch.nn.Parameter), type(serial.weight)
        self.shard_parameter(
            "weight", serial.weight, (out,), rule=site.table.activation_rule(out), mean=1.0
        )
        self.axis = site.axis(*WEIGHT_RULE[into])
        self.scale = serial.scale
        self.squared_row_norms: Callable[..., Tensor] = serial.squared_row_norms  # type: ignore[assignment]
        self.dims = (out, into)

    def forward(self, layer: Linear, a: Linear, b: Linear) -> Tensor:
        """Returns the factor of each output feature."""
        return self.weight / self.weight_norm(layer, a, b)

    @torch.no_grad()
    def weight_norm(self, layer: Linear, a: Linear, b: Linear) -> Tensor:
        """Returns ‖W + s · B A‖ of each output feature on this rank."""
        with self.trace_scope():
            here = self.squared_row_norms(
                *(_gather_matrix(one) for one in (layer, a, b)), self.scale
            )
            norm = reduce_from_axis(here, self.axis).sqrt().to(self.weight.dtype)
        # The weight may have more rows than this rank has output features, if col splits them.
        if b.used_slice is None:
            return norm
        return norm.narrow(*b.used_slice)

    @property
    def cost_model(self) -> DoraNormCost:
        """Cost of the all-reduce of one number per row of the weight."""
        (rows,) = self.handles["weight"].sharding.shape
        return DoraNormCost(self.site.name, self.site.layout_context, rows, *self.dims)


def _gather_matrix(layer: Linear) -> Tensor:
    """Returns the weight gathered over depth, `[out, in]`."""
    # All identical blocks share the graph, so it must not read the handle of one of them.
    compiling = torch.compiler.is_compiling()
    if compiling:
        weight = layer.gather_weight()
    else:
        weight = layer.handles["weight"].unsharded_data()
    return layer.as_matrix(weight)
