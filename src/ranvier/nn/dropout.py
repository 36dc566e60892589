"""Dropout with a mask that is a function of (seed, name, sample, token, feature).

The sample index counts all samples of the run, so it determines the step. The mask is bit-identical
on every grid and when a block is recomputed; no generator state is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ranvier import counter_rng
from ranvier.errors import ShardingError
from ranvier.nn.element_numbers import ElementNumbering
from ranvier.nn.layer import LayerContext, ParallelLayer
from ranvier.sharding import Dim, dim_name, num_packed_dims


class Dropout(ParallelLayer):
    """Dropout with the same mask on every grid, y = x · mask / (1 - p).

    x, y: `[b, s/row, d/col]`.
    Communicates: nothing.

    Args:
        site: Name and context of the layer.
        serial: The `torch.nn.Dropout` to replace.
        dims: Name of the feature dim of x, which may be packed.
    """

    def __init__(
        self, site: LayerContext, serial: torch.nn.Dropout, dims: Sequence[Dim] = ("embed",)
    ) -> None:
        super().__init__(site)
        (dim,) = dims
        self.num_packed = num_packed_dims(dim)
        self.dim = dim = dim_name(dim)
        self.p = serial.p
        self.rng_stream = torch.tensor(
            counter_rng.random_key(site.step_context.seed, "dropout", site.name)
        )
        """Key of the random bits. It is a tensor, as it cannot be a constant in a graph that all
        blocks share."""
        self.numbering = ElementNumbering(site, dim, self.num_packed)

    def forward(self, x: Tensor) -> Tensor:
        """Applies dropout to x `[b, s/row, d/col]` in training; returns x in evaluation."""
        if not self.training or self.p == 0.0:
            return x
        if x.dim() != 3:
            raise ShardingError(
                f"The input of {self.site.name} has {x.dim()} dims. Dropout supports (batch, seq, "
                "features), i.e. embeddings and the residual stream, not attention probabilities. "
                "Set its p to 0."
            )
        # If `dims` does not match the input, indices into the mask would be wrong.
        ranks = self.numbering.features_axis.size
        here = x.shape[2] // self.num_packed
        whole = self.site.units.get(self.dim, here * ranks)
        if self.dim in ("embed", "mlp") and here * ranks != whole:
            raise ShardingError(
                f"{self.site.name} has dims ({self.dim!r},) with {self.dim}={whole}, but its input "
                f"has {x.shape[2]} features on each of {ranks} ranks. Its dims must name the "
                "features of its input. Change its entry in dims."
            )
        counters = self.numbering.number_elements(x).counters
        mask = counter_rng.dropout_mask(x.shape, counters, self.rng_stream, self.p)
        return torch.where(mask, x / (1.0 - self.p), 0.0)
