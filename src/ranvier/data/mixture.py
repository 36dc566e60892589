"""Mixture: which window is sample n of a run, as a function of (seed, n) only.

A period of 10,000 samples gives each stream a fixed quota, spread evenly with some jitter; so the
index of a sample in its stream is known without counting, and a run resumes anywhere at once. Each
epoch of a stream is a permutation of its windows: a Feistel network over a rectangle of about that
many cells, with cycle walking until it lands inside.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ranvier.counter_rng import random_key
from ranvier.data.batch import Batch, Ints, Window, read_windows
from ranvier.data.corpus import DocumentStream
from ranvier.data.goldfish import GoldfishMask
from ranvier.data.packing import ConversationStream
from ranvier.errors import PlanError
from ranvier.nn.cross_entropy import IGNORE_INDEX

if TYPE_CHECKING:
    from ranvier.data.canaries import CanaryPlacement

PERIOD_SAMPLES = 10_000
"""Number of samples in which every stream has exactly its share."""
FEISTEL_ROUNDS = 4
_BITS_64 = 2**64 - 1


def _mix_bits(x: Any) -> Any:
    """Pseudo-random 64 bits (the finalizer of splitmix64) of an int or an array of uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _BITS_64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _BITS_64
    return x ^ (x >> 31)


def permute_index(index: int, count: int, key: int) -> int:
    """Image of an index under a pseudo-random permutation of `range(count)`."""
    assert 0 <= index < count, (index, count)
    # The smallest near-square rectangle with at least `count` cells, so that few walks are needed.
    rows = math.isqrt(count - 1) + 1
    cols = -(-count // rows)
    while True:
        row, col = divmod(index, cols)
        for number in range(FEISTEL_ROUNDS):
            # Each half round adds to one coordinate a function of the other only, which makes it
            # invertible.
            row = (row + _mix_bits(key + (2 * number << 40) + col & _BITS_64)) % rows
            col = (col + _mix_bits(key + (2 * number + 1 << 40) + row & _BITS_64)) % cols
        index = row * cols + col
        # Cycle walking: apply the permutation of the rectangle until it lands in range.
        if index < count:
            return index


def stream_quotas(weights: Sequence[float]) -> list[int]:
    """Samples per period per stream, by largest remainders; at least 1 if the weight is not 0."""
    # Scaling by a power of two is exact and keeps sums from overflowing.
    power = math.frexp(max(weights))[1]
    scaled = [math.ldexp(weight, -power) for weight in weights]
    total = math.fsum(scaled)
    exact = [PERIOD_SAMPLES * (weight / total) for weight in scaled]
    parts = [max(math.floor(x), 1) if w > 0 else 0 for x, w in zip(exact, weights, strict=True)]
    # Positive if flooring left samples over, negative if the minimum of 1 took too many.
    while (missing := PERIOD_SAMPLES - sum(parts)) != 0:
        step = 1 if missing > 0 else -1
        able = [i for i, n in enumerate(parts) if weights[i] > 0 and n + step >= 1]
        chosen = max(able, key=lambda i: step * (exact[i] - parts[i]))
        parts[chosen] += step
    return parts


def check_weights(weights: Sequence[float], count: int) -> None:
    """Refuse invalid weights for a mixture of `count` corpora."""
    problems = []
    if len(weights) != count:
        problems.append(
            f"{len(weights)} mixture weights for {count} corpora. Each corpus needs one. Set one "
            "weight per corpus, or none."
        )
    for weight in weights:
        # A comparison, since math.isfinite fails on an int beyond the range of floats.
        if not 0 <= weight <= sys.float_info.max:
            problems.append(
                f"mixture_weights has the weight {weight!s:.40}. Weights must be finite and at "
                "least 0. Use weights such as 0.7 and 0.3."
            )
    if not problems and not any(weights):
        problems.append(
            f"All {count} mixture weights are 0. At least one must be positive. Use a weight above "
            "0, or no weights, which mixes the corpora in proportion to their tokens."
        )
    if sum(weight > 0 for weight in weights) > PERIOD_SAMPLES:
        problems.append(
            f"{count} corpora are too many. A run mixes at most {PERIOD_SAMPLES}. Merge some of "
            "them."
        )
    if problems:
        raise PlanError(problems)


def insert_document(window: Window, tokens: Ints, *, document_mask: bool) -> Window:
    """The sample with a document in place of its first tokens.

    What is left of the document that it cuts is a document of its own.
    """
    seq = len(window.tokens)
    count = len(tokens)
    targets = window.targets.copy()
    # The end token predicts nothing.
    targets[:count] = np.append(tokens[1:], IGNORE_INDEX)
    documents = np.zeros(seq, np.int64)
    positions = np.arange(seq)
    if count < seq:
        rest = window.documents[count:]
        documents[count:] = rest - rest[0] + 1
        if document_mask:
            cut = np.where(rest == rest[0], window.positions[count], 0)
            positions[count:] = window.positions[count:] - cut
    return replace(
        window,
        tokens=np.append(tokens, window.tokens[count:]),
        targets=targets,
        positions=positions,
        documents=documents,
    )


def insert_length(lengths: Sequence[int], count: int) -> tuple[int, ...]:
    """Lengths of the documents of a sample after its first `count` tokens are replaced by one."""
    ends = np.cumsum(lengths)
    left = np.diff(np.maximum(ends - count, 0), prepend=0)
    return (count, *left[left > 0].tolist())


class CorpusMixture:
    """Streams mixed by weight: sample n is a window of one of them.

    canaries: documents that replace the beginning of some samples. goldfish: drops targets.
    """

    def __init__(
        self,
        streams: Sequence[DocumentStream | ConversationStream],
        weights: Sequence[float],
        seed: int,
        *,
        canaries: CanaryPlacement | None = None,
        goldfish: GoldfishMask | None = None,
    ) -> None:
        check_weights(weights, len(streams))
        self.streams = list(streams)
        self.seed = seed
        self.canaries = canaries
        self.goldfish = goldfish
        self.quotas = stream_quotas(weights)
        self._period: tuple[int, NDArray[np.int64], NDArray[np.int64]] | None = None

    @property
    def seq(self) -> int:
        """Tokens per sample."""
        return self.streams[0].seq

    @property
    def document_mask(self) -> bool:
        """Whether attention and positions stay within a document."""
        return self.streams[0].document_mask

    @property
    def num_windows(self) -> int:
        """Number of different windows that may occur."""
        mixed = zip(self.streams, self.quotas, strict=True)
        return sum(stream.num_windows for stream, quota in mixed if quota)

    def pick_stream(self, number: int) -> tuple[int, int]:
        """The stream of sample `number`, and the number of its samples before this one."""
        if len(self.streams) == 1:
            return 0, number
        period, place = divmod(number, PERIOD_SAMPLES)
        # A single assignment, so that threads may share a mixture.
        known = self._period
        if known is None or known[0] != period:
            known = self._period = (period, *self._draw_period(period))
        stream = int(known[1][place])
        return stream, period * self.quotas[stream] + int(known[2][place])

    def _draw_period(self, period: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Stream of each sample of a period, and its index within the quota of that stream."""
        numbers = np.repeat(np.arange(len(self.quotas)), self.quotas)
        ranks = np.concatenate([np.arange(quota) for quota in self.quotas])
        times = []
        for stream, quota in enumerate(self.quotas):
            drawn = random_key(self.seed, "mixture", period, stream)
            jitter = _mix_bits(np.arange(quota, dtype=np.uint64) + np.uint64(drawn)) >> np.uint64(
                32
            )
            # Sample j gets a time in the j-th of `quota` equal parts of the period; integers only,
            # so that all machines agree on the order.
            grid = (np.arange(quota) << 32) + jitter.astype(np.int64)
            times.append((grid << 16) // max(quota, 1))
        order = np.lexsort((numbers, np.concatenate(times)))
        return numbers[order], ranks[order]

    def read_batch(self, numbers: Sequence[int], end: int | None = None) -> Batch:
        """The windows with these numbers; windows from `end` on have no targets."""
        return read_windows(self, numbers, end)

    def read_sample(self, number: int) -> Window:
        """Sample `number` of a run."""
        stream, place = self._find_window(number)
        window = stream.read_window(place)
        canary = self._find_canary(number)
        if canary is not None:
            window = insert_document(window, canary, document_mask=self.document_mask)
        # On the whole sample, before ranks split it: all grids learn the same targets.
        if self.goldfish is not None:
            window = self.goldfish.apply(window, number)
        return window

    def document_lengths(self, number: int) -> tuple[int, ...]:
        """Number of tokens of each document of sample `number`, without reading its tokens."""
        stream, place = self._find_window(number)
        lengths = stream.window_lengths(place)
        canary = self._find_canary(number)
        if canary is not None and self.document_mask:
            return insert_length(lengths, len(canary))
        return lengths

    def padding_length(self, number: int) -> int:
        """Number of tokens of padding of sample `number`."""
        stream, place = self._find_window(number)
        canary = self._find_canary(number)
        taken = 0 if canary is None else len(canary)
        return min(stream.window_padding(place), self.seq - taken)

    def _find_canary(self, number: int) -> Ints | None:
        """The tokens of the canary in sample `number`; None if it has none."""
        if self.canaries is None:
            return None
        return self.canaries.find_tokens(number)

    def _find_window(self, number: int) -> tuple[DocumentStream | ConversationStream, int]:
        """The stream of sample `number`, and the window of the stream."""
        which, count = self.pick_stream(number)
        stream = self.streams[which]
        # Each epoch has its own permutation.
        epoch, place = divmod(count, stream.num_windows)
        drawn = random_key(self.seed, "order", which, epoch)
        return stream, permute_index(place, stream.num_windows, drawn)
