"""Goldfish loss: a fixed part of the targets is never learned, against memorization.

    L = -1/|K| Σ_{t in K} log p(x_t | x_<t)

K are the targets that are kept: all but about one of k. The input keeps all tokens. A document that
is read again must drop the same targets each time, because a model could otherwise learn in one
epoch what it did not in another, so the mask is a property of the data: it is applied to a whole
sample when it is made, before ranks or micro-batches split it, and depends on nothing else. Windows
of tokens that decide never reach into another document, and a document that continues from an
earlier sample starts again there.

    hash        H(x_{t-h} .. x_{t-1}) < P / k, an order-sensitive polynomial modulo P = 2^61 - 1,
                mixed and seeded
    hash-table  table[x_{t-h+1} · ... · x_t mod 1,000,003] < 1/k, as in the published code, for
                parity with its checkpoints. A token 0 makes the product 0, powers of two overflow
                to 0, and the order of tokens does not matter.
    static      every k-th target of a document
    random      a function of (seed, sample, place)

Paper: Hans et al., "Be like a Goldfish, Don't Memorize!", 2024.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ranvier.counter_rng import random_key, scramble_bits, uniform_bits
from ranvier.data.batch import Ints, Window
from ranvier.nn.cross_entropy import IGNORE_INDEX

GoldfishStrategy = Literal["hash", "hash-table", "static", "random"]
Mask = NDArray[np.bool_]

HASH_PRIME = (1 << 61) - 1
HASH_FACTOR = 0x9E3779B97F4A7C15
MIX_ROUNDS = ((29, 0xBF58476D1CE4E5B9), (32, 0x94D049BB133111EB))
"""Shift and factor of each round that mixes a hash."""
TABLE_SIZE = 1_000_003
TABLE_SEED = 2971215073
"""Size and seed of the published table."""


@dataclass(frozen=True)
class GoldfishMask:
    """Decides which targets of a sample are dropped."""

    k: int
    """About one of k targets is dropped; at least 2."""
    context_width: int = 13
    """Tokens of a window that decides (h), for hash and hash-table."""
    strategy: GoldfishStrategy = "hash"
    seed: int = 0

    @property
    def summary(self) -> str:
        """The rule as text; it is part of the fingerprint of the data."""
        if self.strategy in ("hash", "hash-table"):
            return f"goldfish {self.strategy}, k={self.k}, context width {self.context_width}"
        return f"goldfish {self.strategy}, k={self.k}"

    def apply(self, window: Window, number: int) -> Window:
        """The sample without the targets that are dropped. number: of the sample in the run."""
        dropped = self.find_dropped(window, number)
        return replace(window, targets=np.where(dropped, IGNORE_INDEX, window.targets))

    def find_dropped(self, window: Window, number: int) -> Mask:
        """Which targets are dropped, `[seq]`."""
        if self.strategy == "random":
            return self._drop_randomly(len(window.tokens), number)
        if self.strategy == "static":
            every_kth: Mask = _places_in_documents(window.documents) % self.k == self.k - 1
            return every_kth
        dropped = np.zeros(len(window.tokens), bool)
        width = self.context_width
        if width > len(dropped):
            return dropped
        if self.strategy == "hash":
            drops = hash_windows(window.tokens, width, self.seed) <= HASH_PRIME // self.k
        else:
            # The token that follows each one, even where it is not a target. After the last token
            # of the sample, only the target knows it.
            following = np.append(window.tokens[1:], window.targets[-1])
            drops = self._dropped_keys[product_windows(following, width) % TABLE_SIZE]
        # From the first of the tokens before the target to the target itself.
        documents = window.documents
        is_inside = documents[: len(drops)] == np.append(documents[width:], documents[-1])
        dropped[width - 1 :] = drops & is_inside
        return dropped

    @cached_property
    def _dropped_keys(self) -> Mask:
        """Which keys of the published table are dropped."""
        generator = torch.Generator().manual_seed(TABLE_SEED)
        dropped: Mask = (torch.rand(TABLE_SIZE, generator=generator) < 1 / self.k).numpy()
        return dropped

    def _drop_randomly(self, seq: int, number: int) -> Mask:
        """A mask that differs between samples, also between two that read the same document."""
        stream = random_key(self.seed, "goldfish", number)
        bits = uniform_bits(scramble_bits(scramble_bits(torch.arange(seq)) ^ stream))
        dropped: Mask = (bits < 2**32 // self.k).numpy()
        return dropped


def hash_windows(tokens: Ints, width: int, seed: int) -> NDArray[np.uint64]:
    """Hash of each `width` consecutive tokens, below 2^61 - 1, `[n - width + 1]`.

    key <- key · A + x + 1 (mod P), from seed + 1 on; then twice key <- (key xor key >> s) · B
    """
    count = len(tokens) - width + 1
    values = tokens.astype(np.uint64) + np.uint64(1)
    keys = np.full(count, (seed + 1) % HASH_PRIME, np.uint64)
    for place in range(width):
        keys = _reduce(_multiply(keys, HASH_FACTOR) + values[place : place + count])
    for shift, factor in MIX_ROUNDS:
        keys = _multiply(keys ^ (keys >> np.uint64(shift)), factor)
    return keys


def product_windows(tokens: Ints, width: int) -> Ints:
    """Product of each `width` consecutive tokens, wrapping at 64 bits, `[n - width + 1]`."""
    count = len(tokens) - width + 1
    products = np.ones(count, np.int64)
    for place in range(width):
        products *= tokens[place : place + count]
    return products


def _multiply(x: NDArray[np.uint64], factor: int) -> NDArray[np.uint64]:
    """x · factor modulo 2^61 - 1, without products of more than 64 bits; x is at most 2^61 - 1.

    Both are split at 31 bits. Modulo P, 2^62 is 2, and 2^61 is 1.
    """
    factor %= HASH_PRIME
    high, low = np.uint64(factor >> 31), np.uint64(factor & (1 << 31) - 1)
    x_high = x >> np.uint64(31)
    x_low = x & np.uint64((1 << 31) - 1)
    middle = x_high * low + x_low * high
    middle = (middle >> np.uint64(30)) + ((middle & np.uint64((1 << 30) - 1)) << np.uint64(31))
    return _reduce(np.uint64(2) * x_high * high + middle + x_low * low)


def _reduce(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """x modulo 2^61 - 1."""
    folded = (x & np.uint64(HASH_PRIME)) + (x >> np.uint64(61))
    return np.where(folded >= np.uint64(HASH_PRIME), folded - np.uint64(HASH_PRIME), folded)


def _places_in_documents(documents: Ints) -> Ints:
    """Number of tokens of its document before each token of a sample."""
    index = np.arange(len(documents))
    starts = np.where(np.diff(documents, prepend=documents[0] - 1) != 0, index, 0)
    return index - np.maximum.accumulate(starts)
