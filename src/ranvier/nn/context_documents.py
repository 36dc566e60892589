"""Documents of samples whose tokens are split over the ranks of context.

The batch is sharded once on the host: each rank gets its tokens of every sample in the order of
`sharding.TokenOrder`, with their positions and targets. What a layer cannot know from its local
tokens is described here: which tokens the other ranks have, and the number of each local token in
its sample.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ranvier.comm.autograd import local_slice
from ranvier.config.plan import ContextAttention
from ranvier.cost.context_attention import Layout, build_layout
from ranvier.grid import Axis
from ranvier.sharding import TokenOrder

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class ContextDocuments:
    """The documents of each sample, and which of their tokens each rank of context has."""

    orders: tuple[TokenOrder, ...]
    """Order of the tokens of each sample over context."""
    index: int
    """Index of this rank on context."""
    token_numbers: Tensor
    """Number of each token of this rank in its sample, int64 `[b, s/context]`."""
    rope_lengths: Tensor
    """Length of each token's document, which LongRoPE depends on, int64 `[b, s/context]`."""
    places: Tensor
    """Place of each token of a sample among the tokens of all ranks, one after the other, int64
    `[b, s]`."""
    layouts: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    """What follows from the orders alone. Copies on other devices share it, so that it may be built
    before, in the thread that loads the batch."""
    _cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def from_orders(cls, orders: Sequence[TokenOrder], index: int) -> ContextDocuments:
        """Creates the documents of samples with these orders, for one rank of context."""
        numbers = np.stack([order.token_numbers[index] for order in orders])
        lengths = np.stack(
            [
                np.repeat(order.lengths, order.lengths)[row]
                for order, row in zip(orders, numbers, strict=True)
            ]
        )
        places = np.stack([order.token_numbers.ravel().argsort() for order in orders])
        token_numbers, rope_lengths, token_places = map(
            torch.from_numpy, (numbers, lengths, places)
        )
        return cls(tuple(orders), index, token_numbers, rope_lengths, token_places)

    def select_samples(self, rows: slice) -> ContextDocuments:
        """Returns the documents of a range of samples."""
        return replace(self.map_tensors(lambda x: x[rows]), orders=self.orders[rows], layouts={})

    def repeat_samples(self, count: int) -> ContextDocuments:
        """Returns the documents of `count` consecutive copies of each sample."""
        orders = tuple(order for order in self.orders for _ in range(count))
        key = ("copies", count)
        layouts = self.layouts.setdefault(key, {})
        return self.get_or_build(
            key,
            lambda: replace(
                self.map_tensors(lambda x: x.repeat_interleave(count, 0)),
                orders=orders,
                layouts=layouts,
            ),
        )

    def narrow(self, start: int, tokens: int) -> ContextDocuments:
        """Returns the documents of a range of tokens of this rank, which must be whole samples."""
        each = self.token_numbers.shape[1]
        assert start % each == tokens % each == 0, (start, tokens, each)
        rows = slice(start // each, (start + tokens) // each)
        key = ("samples", rows.start, rows.stop)
        layouts = self.layouts.setdefault(key, {})
        return self.get_or_build(key, lambda: replace(self.select_samples(rows), layouts=layouts))

    def get_or_build(self, key: Hashable, build: Callable[[], T]) -> T:
        """Returns what is derived from the documents; it is built once for all layers."""
        if key not in self._cache:
            self._cache[key] = build()
        found: T = self._cache[key]
        return found

    def find_layout(self, method: ContextAttention, window: int) -> Layout:
        """Returns the layout of attention on this rank; it is built once for all layers."""
        key = (method, window)
        if key not in self.layouts:
            self.layouts[key] = build_layout(method, self.orders, self.index, window)
        found: Layout = self.layouts[key]
        return found

    def sequence_numbers(self, row: Axis) -> Tensor:
        """Returns the numbers of the tokens that this rank has outside of attention and MLP.

        `[b, s/(context·row)]`.
        """
        return local_slice(self.token_numbers, row, 1)

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> ContextDocuments:
        """Returns the documents with a function applied to their tensors, such as a copy."""
        return replace(
            self,
            token_numbers=change(self.token_numbers),
            rope_lengths=change(self.rope_lengths),
            places=change(self.places),
        )
