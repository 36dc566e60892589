"""Budget: which activations to keep so that a step fits into memory and takes the least time.

Pure functions of numbers. All blocks of a model are alike; each has one of three kinds, of which a
cheaper one keeps more. Backward goes from the last block to the first: activations vanish while
gradients appear, and a block that keeps little needs its room for a moment only. So

    need = fixed + max(head + Σ kept,
                       max over i of  outside + Σ_{j<i} kept_j + peak_i + Σ_{j>i} gradient_j)

where a gradient that is added up over micro-batches is there all the time. Kinds are laid in the
order full, selective, none: what a late block keeps lives shortest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ranvier.plan import divisors

Kind: TypeAlias = Literal["none", "selective", "full"]

COST: Mapping[Kind, float] = {"none": 0.0, "selective": 0.05, "full": 1 / 3}
"""Time of a block that is spent again, as a share of its forward and backward passes."""
USEFUL_TOKENS = 16384
"""Tokens of a micro-batch from which on more of them make no product of matrices faster."""
EMPTY_TOKENS = 512
"""What a micro-batch costs besides its tokens, in tokens: gradients are added up in a wide type,
kernels start and do not fill the device at their ends."""


@dataclass(frozen=True)
class Block:
    """Bytes of a block of one kind."""

    kept: int
    """From the end of its forward pass to its backward pass."""
    peak: int
    """Most at once while it runs forward or backward, `kept` and its gradient included."""


@dataclass(frozen=True)
class Need:
    """What a step needs, in bytes, but for the kinds of its blocks."""

    blocks: Mapping[Kind, Block]
    count: int
    """Blocks."""
    gradient: int
    """Of a block, from its backward pass on."""
    fixed: int
    """There all the time: weights, master weights, moments."""
    head: int
    """Most at once of what surrounds the blocks: embedding, logits and their gradients."""
    outside: int
    """Gradients of the weights there, from the end of the loss on."""
    accumulated: bool = False
    """Several micro-batches: from the second on all gradients are there all the time."""

    def of(self, kinds: Sequence[Kind]) -> int:
        """Most bytes at once in a step, with these kinds from the first block to the last."""
        assert len(kinds) == self.count, (len(kinds), self.count)
        kept = most = 0
        for i, kind in enumerate(kinds):
            block = self.blocks[kind]
            after = self.count if self.accumulated else self.count - 1 - i
            most = max(most, kept + block.peak + after * self.gradient)
            kept += block.kept
        before = self.count * self.gradient + self.outside if self.accumulated else 0
        return self.fixed + max(most + self.outside, before + kept + self.head)


def assigned(need: Need, available: int) -> tuple[Kind, ...] | None:
    """The kinds that fit into `available` bytes and cost least; None if nothing fits."""
    fits = (kinds for kinds in sorted(_ways(need), key=share) if need.of(kinds) <= available)
    return next(fits, None)


def least(need: Need) -> int:
    """Bytes without which no assignment fits."""
    return min(need.of(kinds) for kinds in _ways(need))


def _ways(need: Need) -> Iterator[tuple[Kind, ...]]:
    """All assignments in the order full, selective, none.

    A kind that keeps no less than a cheaper one is of no use.
    """
    kept = {kind: block.kept for kind, block in need.blocks.items()}
    middle = kept["full"] < kept["selective"] < kept["none"]
    for full in range(need.count + 1):
        for selective in range(need.count - full + 1 if middle else 1):
            counts: dict[Kind, int] = {"full": full, "selective": selective}
            counts["none"] = need.count - full - selective
            yield tuple(kind for kind, number in counts.items() for _ in range(number))


def share(kinds: Sequence[Kind]) -> float:
    """Time spent again, as a share of a step that computes nothing again."""
    counts = {kind: kinds.count(kind) for kind in COST}
    return sum(COST[kind] * count for kind, count in counts.items()) / max(len(kinds), 1)


def time(tokens: int, again: float = 0.0) -> float:
    """Time of a token of a step in micro-batches of so many, relative to the best there is.

    (1 + share computed again) · (1 + EMPTY_TOKENS / tokens): so a small micro-batch that keeps all
    can be better than a large one that computes much again, and the other way round.
    """
    return (1.0 + again) * (1.0 + EMPTY_TOKENS / tokens)


def useful(samples: int, seq: int, multiple: int = 1) -> list[int]:
    """Micro-batches worth trying, largest first: divisors of a rank's `samples` of `seq` tokens.

    The largest is the smallest that has USEFUL_TOKENS, else all samples. multiple: what each must
    be a multiple of.
    """
    fits = [size for size in divisors(samples) if size % multiple == 0]
    enough = [size for size in fits if size * seq >= USEFUL_TOKENS]
    most = min(enough, default=samples)
    return [size for size in reversed(fits) if size <= most]
