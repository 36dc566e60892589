"""Typical documents of packed samples: their attention work, and their order over context.

A corpus is described by the lengths of its documents. Samples are filled with documents one after
the other, and cut at the end of a sample, as `data.packing` does. A few samples spread over the
corpus stand for all of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ranvier.config.plan import ContextOrder
from ranvier.sharding import TokenOrder, TokenSegment, order_tokens

NUM_SAMPLES = 6
"""Number of samples that stand for a corpus."""
SEED = 0


@dataclass(frozen=True, eq=False)
class DocumentLengths:
    """Lengths of the documents of a few typical samples, all with the same number of tokens."""

    samples: tuple[tuple[int, ...], ...]

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], seq: int) -> DocumentLengths:
        """Draws samples of `seq` tokens from documents of these lengths, the same each time."""
        draw = random.Random(SEED)
        found = []
        left_over = 0
        for _ in range(NUM_SAMPLES):
            rest = seq
            sample = []
            while rest:
                # The next sample starts with the rest of a document that was cut.
                length = left_over or draw.choice(lengths)
                sample.append(min(length, rest))
                left_over = length - sample[-1]
                rest -= sample[-1]
            found.append(tuple(sample))
        return cls(tuple(found))

    @property
    def seq(self) -> int:
        """Tokens per sample."""
        return sum(self.samples[0])

    def token_orders(self, num_ranks: int, order: ContextOrder) -> tuple[TokenOrder, ...]:
        """Returns the order over context of the tokens of each sample."""
        return _order_samples(self, num_ranks, order)

    def score_share(self, window: int = 0) -> float:
        """Returns the attention scores of a sample relative to a sample of one document."""
        whole = TokenSegment(0, 0, self.seq).num_scores(window)
        scores = sum(TokenSegment(0, 0, n).num_scores(window) for s in self.samples for n in s)
        return scores / (len(self.samples) * whole)


@lru_cache(maxsize=100)
def _order_samples(
    documents: DocumentLengths, num_ranks: int, order: ContextOrder
) -> tuple[TokenOrder, ...]:
    return tuple(order_tokens(lengths, num_ranks, order) for lengths in documents.samples)
