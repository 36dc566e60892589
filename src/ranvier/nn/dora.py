"""Magnitude: the lengths that DoRA trains, over those of the adapted weight W + s · B A.

A row of the weight lies cut over one axis (col where the layer enters, row where it leaves), and a
rank is whole: each rank sums the squares of its columns from its own shards of W, A and B, and one
number for each row is summed over that axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ranvier.comm.autograd import total
from ranvier.cost.layers import Lengths
from ranvier.nn.layer import Leaf, Site
from ranvier.nn.linear import Linear
from ranvier.sharding import WEIGHTS, Dim


class Magnitude(Leaf):
    """m / ‖W + s · B A‖.

    y: as the output features of the layer, `[n/row]`, `[n/(row·col)]` or `[d/col]`.
    Communicates: all-reduce of a number for each row of the weight over the axis of its in dim.
    """

    weight: torch.nn.Parameter

    def __init__(self, site: Site, serial: torch.nn.Module, dims: Sequence[Dim]) -> None:
        super().__init__(site)
        out, into = dims
        assert isinstance(out, str) and isinstance(into, str), dims
        assert isinstance(serial.weight, torch.nn.Parameter), type(serial.weight)
        self.place("weight", serial.weight, (out,), rule=site.table.region(out), mean=1.0)
        self.axis = site.axis(*WEIGHTS[into])
        self.scale = serial.scale
        self.squares: Callable[..., Tensor] = serial.squares  # type: ignore[assignment]
        self.dims = (out, into)

    def forward(self, layer: Linear, a: Linear, b: Linear) -> Tensor:
        """The factor of each output feature."""
        return self.weight / self.norm(layer, a, b)

    @torch.no_grad()
    def norm(self, layer: Linear, a: Linear, b: Linear) -> Tensor:
        """‖W + s · B A‖ of each output feature of mine."""
        with self.here():
            here = self.squares(*(_whole(one) for one in (layer, a, b)), self.scale)
            norm = total(here, self.axis).sqrt().to(self.weight.dtype)
        return norm if b.part is None else norm.narrow(*b.part)

    @property
    def layer(self) -> Lengths:
        """A number for each row of the weight."""
        (rows,) = self.handles["weight"].sharding.shape
        return Lengths(self.site.name, self.site.ground, rows, *self.dims)


def _whole(layer: Linear) -> Tensor:
    """The weight as it lies but for depth, `[out, in]`."""
    compiling = torch.compiler.is_compiling()  # a graph for all blocks reads no handle
    weight = layer.gathered() if compiling else layer.handles["weight"].whole()
    return weight.flatten(0, -2)
