"""Global numbers of the elements of an activation on this rank.

Random numbers that are functions of (sample, token, feature) are the same on every grid.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ranvier.comm.autograd import local_slice
from ranvier.errors import ShardingError
from ranvier.nn.layer import LayerContext


@dataclass(frozen=True)
class ElementNumbers:
    """Numbers of the samples, tokens and features of an activation `[b, s/row, d/col]`."""

    samples: Tensor
    """Index of each sample in the run, `[b]`."""
    tokens: Tensor
    """Index of each token in its sample, `[1 or b, s/row]`."""
    features: Tensor
    """Index of each feature, `[d/col]`."""

    @property
    def counters(self) -> list[Tensor]:
        """The numbers along each dim, shaped to broadcast to the activation."""
        return [self.samples.view(-1, 1, 1), self.tokens.unsqueeze(-1), self.features]


class ElementNumbering:
    """Numbers the elements of the activations of one layer.

    Args:
        site: Name and context of the layer.
        dim: Name of the feature dim.
        num_packed: Number of dims of this name that are packed into the features.
    """

    def __init__(self, site: LayerContext, dim: str, num_packed: int = 1) -> None:
        self.site = site
        self.num_packed = num_packed
        region = site.table.activation_rule(dim)
        self.batch_axis = site.axis(*site.table.axes_inside_replica(dim, "batch"))
        self.seq_axis = site.axis(*region["seq"])
        self.row_axis = site.axis(*(axis for axis in region["seq"] if axis == "row"))
        self.features_axis = site.axis(*site.table.feature_axes(dim))

    def number_elements(self, x: Tensor, *, same_sample: bool = False) -> ElementNumbers:
        """Returns the numbers of the elements of x, `[b, s/row, d/col]`.

        same_sample: if the indices of samples are not known, use 0 for all.
        """
        if same_sample and self.site.step_context.samples is None:
            samples = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        else:
            samples = self._local_samples(x)
        return ElementNumbers(samples, self._local_tokens(x), self._local_features(x))

    def number_positions(self, x: Tensor, positions: Tensor) -> ElementNumbers:
        """Returns the numbers of tokens that have positions in sample 0, as in an engine.

        x: `[b, s/row, d/col]`; positions: `[b, s]`.
        """
        samples = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        tokens = local_slice(positions, self.batch_axis, 0)
        if self.site.step_context.row_splits == "tokens":
            tokens = local_slice(tokens, self.row_axis, 1)
        return ElementNumbers(samples, tokens, self._local_features(x))

    def _local_features(self, x: Tensor) -> Tensor:
        # Global indices of the local elements: they must not depend on how x is split.
        here = x.shape[2] // self.num_packed
        starts = torch.arange(self.num_packed, device=x.device) * self.features_axis.size
        starts = (starts + self.features_axis.index) * here
        return (starts.unsqueeze(1) + torch.arange(here, device=x.device)).flatten()

    def _local_tokens(self, x: Tensor) -> Tensor:
        documents = self.site.context_documents
        if documents is not None:
            return local_slice(documents.sequence_numbers(self.row_axis), self.batch_axis, 0)
        if self.seq_axis.size > self.row_axis.size:
            raise ShardingError(
                f"{self.site.name} does not know which tokens this rank of context has. They are "
                "set for the micro-batches of training steps. Use `ranvier.train.step`."
            )
        first = self.seq_axis.index * x.shape[1]
        return torch.arange(first, first + x.shape[1], device=x.device).unsqueeze(0)

    def _local_samples(self, x: Tensor) -> Tensor:
        samples = self.site.sample_numbers
        if samples is None:
            raise ShardingError(
                f"{self.site.name} draws random numbers, but the indices of the samples are not "
                "set. Random numbers depend on them. Set model.parallel.step_context.samples "
                "before each forward pass."
            )
        return local_slice(samples.to(x.device), self.batch_axis, 0)
