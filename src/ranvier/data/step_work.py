"""Work of each rank in a step, from the lengths of documents alone.

Ranks that meet wait for the one with the most work. Those of context, col, depth and expert meet
in every micro-batch, those of data once per step. Everything is counted on the host, without
communication: the lengths of the documents of all samples of a step are known to every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ranvier.config.plan import Plan
from ranvier.config.run import RunConfig
from ranvier.cost.context_attention import KeyShape, choose_method
from ranvier.data.batch import PackedSamples
from ranvier.data.context_layouts import attention_key_shape
from ranvier.data.loader import assign_samples
from ranvier.data.window_assignment import WindowCost
from ranvier.sharding import (
    REPLICA_AXES,
    ShardingTable,
    TokenOrder,
    count_parts,
    order_tokens,
)

Counts = NDArray[np.float64]


@dataclass(frozen=True)
class StepWork:
    """Work of the ranks of a step; ranks that differ in pipe and row only have the same."""

    attention: Counts
    """Scores that each rank computes in attention, `[replicas, col, context]`."""
    tokens: Counts
    """Tokens of each rank without padding, `[replicas, context]`."""
    keys_fetched: float | None
    """Keys that ranks get from others over context, as a fraction of all keys of the others; None
    without context, or if heads are split instead (ulysses)."""
    efficiency: float
    """Mean FLOPs of a rank divided by the FLOPs that all wait for."""


@dataclass(frozen=True)
class WorkCounter:
    """Counts the work of the steps of a run."""

    samples: PackedSamples
    plan: Plan
    seq_len: int
    cost: WindowCost
    key_shape: KeyShape
    """Size of the heads of a rank in attention."""
    is_balanced: bool
    """Whether samples are assigned to ranks by cost."""

    @classmethod
    def from_run(cls, run: RunConfig, samples: PackedSamples, itemsize: int) -> WorkCounter:
        """Returns the counter of a run of a decoder. itemsize: bytes of an activation."""
        cost = WindowCost.from_config(run.decoder)
        shape = attention_key_shape(run, itemsize)
        is_balanced = run.data.balance == "cost"
        return cls(samples, run.plan, run.data.seq_len, cost, shape, is_balanced)

    @property
    def num_ranks(self) -> int:
        """Number of ranks with different work."""
        table = ShardingTable(self.plan.col_splits)
        axes = (*table.token_axes("heads", "batch"), *table.token_axes("heads", "seq"))
        return count_parts(axes, self.plan.degrees)

    @property
    def _num_sample_parts(self) -> int:
        """Parts into which the ranks of a replica split the samples of a micro-batch."""
        table = ShardingTable(self.plan.col_splits)
        return count_parts(table.axes_inside_replica("heads", "batch"), self.plan.degrees)

    def count_step(self, first: int) -> StepWork:
        """Returns the work of the step that starts with sample `first`."""
        plan = self.plan
        degrees = plan.degrees
        numbers = range(first, first + plan.global_batch)
        lengths = [self.samples.document_lengths(number) for number in numbers]
        replicas = count_parts(REPLICA_AXES, degrees)
        cost = self.cost if self.is_balanced else None
        assigned = assign_samples(lengths, replicas, plan.micro_batch, cost)
        order = plan.token_order if plan.context > 1 else "contiguous"
        orders = [order_tokens(some, plan.context, order) for some in lengths]
        parts = self._num_sample_parts
        cells = assigned.reshape(replicas, assigned.shape[1], parts, -1)
        scores = np.empty((*cells.shape[:3], degrees["context"]))
        fetched = list[float]()
        for cell in np.ndindex(cells.shape[:3]):
            scores[cell], shares = self._count_cell([orders[i] for i in cells[cell]])
            fetched += shares
        padding = [self.samples.padding_length(number) for number in numbers]
        real = np.array([_count_tokens(*one) for one in zip(orders, padding, strict=True)])
        return StepWork(
            attention=scores.sum(1),
            tokens=real[assigned.reshape(replicas, -1)].sum(1),
            keys_fetched=float(np.mean(fetched)) if fetched else None,
            efficiency=self._efficiency(scores),
        )

    def _count_cell(self, orders: Sequence[TokenOrder]) -> tuple[Counts, list[float]]:
        """Returns the scores `[context]` of samples that ranks compute at once, and the fraction
        of keys that is fetched in each layer."""
        scores = np.zeros(orders[0].num_ranks)
        fetched = list[float]()
        others = (orders[0].num_ranks - 1) * self.seq_len * len(orders)
        for window, num_layers in Counter(self.cost.layer_windows).items():
            # As attention does, which compares with the length of samples.
            window = window if window < self.seq_len else 0
            work = np.sum([order.attention_work(window) for order in orders], axis=0, dtype=float)
            if others:
                method = choose_method(self.plan.context_attention, orders, self.key_shape, window)
                if method == "ulysses":
                    work[:] = work.mean()
                else:
                    some = sum(sum(order.num_fetched(window)) for order in orders)
                    share = 1.0 if method == "ring" else some / others
                    fetched += [share] * num_layers
            scores += num_layers * work
        return scores, fetched

    def _efficiency(self, scores: Counts) -> float:
        """Returns the mean FLOPs of a rank divided by those that all wait for.

        scores: `[replicas, micro-batches, col, context]`.
        """
        degrees = self.plan.degrees
        tokens = self.plan.micro_batch * self.seq_len / scores.shape[3]
        # Per rank of a replica: the other layers split features over col, attention samples.
        attention = 4 * self.cost.attention_features * scores * scores.shape[2]
        flops = 2 * self.cost.num_parameters * tokens + attention
        waited = flops.max((2, 3)).reshape(*(degrees[axis] for axis in REPLICA_AXES), -1)
        # Data is the first axis; the others meet in every micro-batch.
        longest = waited.max((1, 2)).sum(1).max()
        return float(flops.mean((0, 2, 3)).sum() / longest)


def _count_tokens(order: TokenOrder, padding: int) -> list[int]:
    """Returns the tokens of a sample on each rank of context without padding."""
    # Padding is the last document, or the end of the only one.
    last = len(order.lengths) - 1
    end = order.lengths[-1] - padding
    return [
        sum(
            max(min(one.stop, end) - one.start, 0) if one.document == last else one.num_tokens
            for one in segments
        )
        for segments in order.segments
    ]
