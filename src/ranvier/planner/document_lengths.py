"""Typical documents of packed samples: their attention work, and their order over context.

A corpus is described by a histogram of the lengths of its documents. Samples are filled with
documents one after the other, and cut at the end of a sample, as packing does. Some samples, drawn
from the histogram, stand for all of them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

from ranvier.config.plan import ContextOrder
from ranvier.errors import PlanError
from ranvier.sharding import TokenOrder, TokenSegment, order_tokens

NUM_SAMPLES = 64
"""Number of samples that stand for a corpus."""
MAX_DIGITS = 15
"""Number of digits of the largest length, or number of documents, in a file."""
NUM_ORDERED = 6
"""Number of them whose order over context is computed."""
SEED = 0


@dataclass(frozen=True, eq=False)
class DocumentLengths:
    """Lengths of the documents of typical samples, all with the same number of tokens."""

    samples: tuple[tuple[int, ...], ...]

    @classmethod
    def from_histogram(cls, histogram: Mapping[int, int], seq: int) -> DocumentLengths:
        """Draws samples of `seq` tokens, the same each time. histogram: number of documents of each
        length."""
        draw = random.Random(SEED)
        lengths = sorted(histogram)
        sums = [*accumulate(histogram[length] for length in lengths)]
        found = []
        left_over = 0
        for _ in range(NUM_SAMPLES):
            rest = seq
            sample = []
            while rest:
                # The next sample starts with the rest of a document that was cut.
                length = left_over or draw.choices(lengths, cum_weights=sums)[0]
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
        """Returns the order over context of the tokens of some samples."""
        return _order_samples(self, num_ranks, order)

    def score_share(self, window: int = 0) -> float:
        """Returns the attention scores of a sample relative to a sample of one document."""
        return _score_share(self, window)


# Results are cached outside of the class, because a request is hashed with all its fields.
@lru_cache(maxsize=100)
def _order_samples(
    documents: DocumentLengths, num_ranks: int, order: ContextOrder
) -> tuple[TokenOrder, ...]:
    some = documents.samples[:NUM_ORDERED]
    return tuple(order_tokens(lengths, num_ranks, order) for lengths in some)


@lru_cache(maxsize=100)
def _score_share(documents: DocumentLengths, window: int) -> float:
    whole = TokenSegment(0, 0, documents.seq).num_scores(window)
    lengths = Counter(n for sample in documents.samples for n in sample)
    scores = sum(count * TokenSegment(0, 0, n).num_scores(window) for n, count in lengths.items())
    return scores / (len(documents.samples) * whole)


def _is_count(word: str) -> bool:
    return word.isdecimal() and len(word) <= MAX_DIGITS and int(word) > 0


def read_histogram(path: str) -> Counter[int]:
    """Reads the lengths of documents from a text file: a length per line, and optionally how many
    documents have it, separated by a space or a comma."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(
            f"--lengths {path} cannot be read: {error}. It must be a text file with the length of "
            "a document per line. Use another file, or --lengths corpus."
        ) from None
    found: Counter[int] = Counter()
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words:
            continue
        if len(words) > 2 or not all(map(_is_count, words)):
            raise PlanError(
                f"Line {number} of {path} is {line.strip()[:40]!r}. The length of a document, and "
                "the number of documents that may follow it, are whole numbers of at least 1, with "
                f"at most {MAX_DIGITS} digits. Correct the line or remove it."
            )
        found[int(words[0])] += int(words[1]) if len(words) > 1 else 1
    if not found:
        raise PlanError(
            f"--lengths {path} has no document lengths. It must have the length of a document per "
            "line. Use another file, or --lengths corpus."
        )
    return found
