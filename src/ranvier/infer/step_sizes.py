"""Sizes of steps that have a CUDA graph; a smaller step is padded to the next size.

The compiler needs no list of sizes: its graphs of a block are dynamic in the numbers of tokens and
sequences (`PagedSequences.dynamic_dims`), from `nn.compile.MIN_DYNAMIC_SIZE` tokens on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

DECODE_ROWS = (1, 2, 4, 8)
"""Smallest numbers of sequences of decode steps; then multiples of 8 up to 64, and of 16 above."""
MIXED_TOKENS = (64, 128, 256, 384, 512, 768, 1024)
"""Numbers of tokens of mixed steps; larger steps take longer on the device than on the host."""
MIXED_ROWS = (64, 256, 1024)
"""Numbers of sequences of mixed steps."""


class GraphSize(NamedTuple):
    """A class of steps."""

    num_tokens: int
    num_rows: int
    """Number of sequences, and of sampled tokens."""
    is_decode: bool


@dataclass(frozen=True)
class StepSizes:
    """The classes of steps of an engine."""

    max_batch: int
    """Maximum number of sequences of a step."""
    max_tokens: int
    """Maximum number of tokens of a step."""

    def decode_size(self, num_rows: int) -> GraphSize:
        """Returns the class of steps in which every sequence has one token, and samples one."""
        multiple = 8 if num_rows <= 64 else 16
        rounded = -(-num_rows // multiple) * multiple
        size = _round_up(num_rows, DECODE_ROWS) or rounded
        return GraphSize(size, size, True)

    def mixed_size(self, num_tokens: int, num_rows: int) -> GraphSize | None:
        """Returns the class of other steps; None if they have too many tokens for a graph."""
        size = _round_up(num_tokens, MIXED_TOKENS)
        if size is None:
            return None
        return GraphSize(size, _round_up(num_rows, MIXED_ROWS) or num_rows, False)

    def all_sizes(self) -> list[GraphSize]:
        """Returns the classes of all steps, the largest first, so that others reuse its memory."""
        mixed: set[GraphSize] = set()
        for num_tokens in {min(size, self.max_tokens) for size in MIXED_TOKENS}:
            # Every sequence has a token.
            for num_rows in range(1, min(num_tokens, self.max_batch) + 1):
                size = self.mixed_size(num_tokens, num_rows)
                assert size is not None, num_tokens
                mixed.add(size)
        decode = {self.decode_size(num_rows) for num_rows in range(1, self.max_batch + 1)}
        return [*sorted(mixed, reverse=True), *sorted(decode, reverse=True)]


def _round_up(number: int, sizes: tuple[int, ...]) -> int | None:
    """Returns the smallest of some increasing sizes that is not less than a number."""
    return next((size for size in sizes if size >= number), None)
