"""Dropout with a mask that is a function of (seed, name, sample, token, feature).

The sample index counts all samples of the run, so it determines the step. The mask is bit-identical
on every grid and when a block is recomputed; no generator state is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ranvier import counter_rng
from ranvier.comm.autograd import local_slice
from ranvier.errors import ShardingError
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
        region = site.table.activation_rule(dim)
        self.batch_axis = site.axis(*site.table.axes_inside_replica(dim, "batch"))
        self.seq_axis = site.axis(*region["seq"])
        self.row_axis = site.axis(*(axis for axis in region["seq"] if axis == "row"))
        self.features_axis = site.axis(*site.table.feature_axes(dim))

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
        here = x.shape[2] // self.num_packed
        whole = self.site.units.get(self.dim, here * self.features_axis.size)
        if self.dim in ("embed", "mlp") and here * self.features_axis.size != whole:
            raise ShardingError(
                f"{self.site.name} has dims ({self.dim!r},) with {self.dim}={whole}, but its input "
                f"has {x.shape[2]} features on each of {self.features_axis.size} ranks. Its dims "
                "must name the features of its input. Change its entry in dims."
            )
        samples = self._local_sample_numbers(x)
        # Global indices of the local elements: the mask must not depend on how x is split.
        tokens = self._local_token_numbers(x)
        starts = torch.arange(self.num_packed, device=x.device) * self.features_axis.size
        starts = (starts + self.features_axis.index) * here
        features = (starts.unsqueeze(1) + torch.arange(here, device=x.device)).flatten()
        mask = counter_rng.dropout_mask(
            x.shape,
            [samples.view(-1, 1, 1), tokens.unsqueeze(-1), features],
            self.rng_stream,
            self.p,
        )
        return torch.where(mask, x / (1.0 - self.p), 0.0)

    def _local_token_numbers(self, x: Tensor) -> Tensor:
        """Returns the numbers of the tokens of x in their samples, `[1 or b, s/row]`."""
        documents = self.site.step_context.context_documents
        if documents is not None:
            return local_slice(documents.sequence_numbers(self.row_axis), self.batch_axis, 0)
        if self.seq_axis.size > self.row_axis.size:
            raise ShardingError(
                f"{self.site.name} does not know which tokens this rank of context has. They are "
                "set for the micro-batches of training steps. Use `ranvier.train.step`."
            )
        first = self.seq_axis.index * x.shape[1]
        return torch.arange(first, first + x.shape[1], device=x.device).unsqueeze(0)

    def _local_sample_numbers(self, x: Tensor) -> Tensor:
        samples = self.site.step_context.samples
        if samples is None:
            raise ShardingError(
                f"{self.site.name} uses dropout (p={self.p}), but the indices of the samples are "
                "not set. Random masks depend on them. Set model.parallel.step_context.samples "
                "before each forward pass."
            )
        samples = samples.to(x.device)
        return local_slice(samples, self.batch_axis, 0)
