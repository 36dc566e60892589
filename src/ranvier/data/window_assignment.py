"""Assigns the windows of a step to ranks and micro-batches by cost.

The loss of a step is a mean over all its windows, so any rank may compute any of them. Ranks that
meet in every micro-batch, as in gathers over depth or in a pipeline, wait for the most expensive
window of the micro-batch, so windows of similar cost are computed together. Ranks that meet once
per step wait for the rank with the largest sum, so sums are made similar as well. The windows of a
step stay the same, and with them resumes and the order of the data.

Everything is a function of the costs, which all ranks know from the lengths of documents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ranvier.models.config import DecoderConfig

Costs = NDArray[np.float64]


def window_cost(
    lengths: Sequence[int],
    *,
    num_parameters: int,
    attention_features: int,
    layer_windows: Sequence[int],
) -> float:
    """Returns the forward FLOPs of a window with documents of these lengths.

    2 · parameters · tokens + 4 · features · Σ over layers and documents of the keys seen, which is
    n (n + 1) / 2 for a document of n tokens.

    num_parameters: of matrices that multiply each token.
    attention_features: query heads times head dim of a layer.
    layer_windows: tokens that a query sees in each layer with attention; 0: the whole document.
    """
    scores = count_scores(lengths, layer_windows)
    return 2.0 * num_parameters * sum(lengths) + 4 * attention_features * scores


def count_scores(lengths: Sequence[int], layer_windows: Sequence[int]) -> float:
    """Returns the pairs of a query and a key that it sees, per head, over layers and documents."""
    n = np.asarray(lengths, np.float64)
    scores = 0.0
    for window, num_layers in Counter(layer_windows).items():
        # Tokens before `inside` see all tokens up to themselves, the others `window` of them.
        inside = np.minimum(n, window) if window else n
        scores += num_layers * float((inside * (inside + 1) / 2 + window * (n - inside)).sum())
    return scores


@dataclass(frozen=True)
class WindowCost:
    """Cost of a window of packed documents in a model."""

    num_parameters: int
    """Parameters of matrices that multiply each token."""
    attention_features: int
    """Query heads times head dim of a layer."""
    layer_windows: tuple[int, ...]
    """Tokens that a query sees in each layer; 0: the whole document."""

    @classmethod
    def from_config(cls, config: DecoderConfig) -> WindowCost:
        """Returns the cost of windows in a decoder."""
        attention = 2 * (config.heads + config.kv_heads) * config.head_dim * config.embed
        total = config.vocab * config.embed
        for layer in range(config.layers):
            width = config.mlp
            if config.has_experts(layer):
                width = config.experts_per_token * config.expert_mlp + config.shared_expert_mlp
            total += attention + 3 * width * config.embed
        windows = tuple(config.window_of_layer(layer) for layer in range(config.layers))
        return cls(total, config.heads * config.head_dim, windows)

    def num_scores(self, lengths: Sequence[int]) -> float:
        """Returns the pairs of a query and a key that it sees, per head, over all layers."""
        return count_scores(lengths, self.layer_windows)

    def of_documents(self, lengths: Sequence[int]) -> float:
        """Returns the forward FLOPs of a window with documents of these lengths."""
        return window_cost(
            lengths,
            num_parameters=self.num_parameters,
            attention_features=self.attention_features,
            layer_windows=self.layer_windows,
        )


def assign_windows(
    costs: Sequence[float], num_ranks: int, num_micro_batches: int, micro_batch: int = 1
) -> NDArray[np.int64]:
    """Returns the windows that each rank computes in each micro-batch, `[ranks, micro-batches,
    windows of a micro-batch]`.

    The most expensive windows are in the first micro-batch. That windows of a micro-batch follow
    each other in cost minimizes the sum of the largest ones.

    costs: of the windows of the step, `ranks · micro-batches · micro_batch` of them.
    """
    cost = np.asarray(costs, np.float64)
    shape = (num_micro_batches, micro_batch, num_ranks)
    assert len(cost) == np.prod(shape), (len(cost), shape)
    groups = np.argsort(-cost, kind="stable").reshape(shape)
    assigned = np.empty((num_ranks, num_micro_batches, micro_batch), np.int64)
    for i, group in enumerate(groups):
        assigned[:, i] = _assign_micro_batch(cost, group)
    _permute_micro_batches(cost, assigned)
    return assigned


def _assign_micro_batch(cost: Costs, windows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns which windows `[micro_batch, ranks]`, in descending order of cost, each rank computes
    in a micro-batch: the next expensive ones where the sum is smallest."""
    sums = np.zeros(windows.shape[1])
    assigned = np.empty_like(windows.T)
    for i, some in enumerate(windows):
        assigned[np.argsort(sums, kind="stable"), i] = some
        sums = cost[assigned[:, : i + 1]].sum(1)
    return assigned


def _permute_micro_batches(cost: Costs, assigned: NDArray[np.int64]) -> None:
    """Permutes ranks inside micro-batches so that sums over the step are similar."""
    sums = np.zeros(len(assigned))
    for i in range(assigned.shape[1]):
        cells = cost[assigned[:, i]].sum(1)
        order = np.empty(len(sums), np.int64)
        order[np.argsort(sums, kind="stable")] = np.argsort(-cells, kind="stable")
        assigned[:, i] = assigned[order, i]
        sums += cells[order]
    for _ in range(4 * len(sums)):
        most, least = int(np.argmax(sums)), int(np.argmin(sums))
        moved = (cost[assigned[most]] - cost[assigned[least]]).sum(1)
        # Swapping micro-batch i moves moved[i]; half the difference makes both alike.
        best = int(np.argmin(np.abs(moved - (sums[most] - sums[least]) / 2)))
        if not 0 < moved[best] < sums[most] - sums[least]:
            return
        assigned[[most, least], best] = assigned[[least, most], best]
        sums[most] -= moved[best]
        sums[least] += moved[best]


class AssignmentEfficiency(NamedTuple):
    """Mean work of a rank divided by the work that all wait for."""

    step: float
    """If ranks meet once per step."""
    micro_batch: float
    """If ranks meet in every micro-batch."""


def assignment_efficiency(
    costs: Sequence[float], assigned: NDArray[np.int64]
) -> AssignmentEfficiency:
    """Returns the efficiency of assigned windows `[ranks, micro-batches, windows]`."""
    cells = np.asarray(costs, np.float64)[assigned].sum(2)
    mean = float(cells.sum(1).mean())
    return AssignmentEfficiency(mean / float(cells.sum(1).max()), mean / float(cells.max(0).sum()))
