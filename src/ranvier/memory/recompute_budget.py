"""Recompute budget: candidates of recompute modes of blocks, and of micro-batch sizes.

Pure functions of numbers. Each block has one of three recompute modes; a mode with less
recomputation saves more activations. Modes are assigned in the order full, selective, none:
backward runs from the last block to the first, so late blocks keep their activations for the
shortest time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal, TypeAlias

from ranvier.config.plan import divisors

RecomputeMode: TypeAlias = Literal["none", "selective", "full"]

RECOMPUTE_COST: Mapping[RecomputeMode, float] = {"none": 0.0, "selective": 0.05, "full": 1 / 3}
"""Recomputation time of a block, as a fraction of its forward and backward passes."""
USEFUL_TOKENS = 16384
"""Number of tokens per micro-batch above which matrix products no longer get more efficient."""
OVERHEAD_TOKENS = 512
"""Fixed cost of a micro-batch, in tokens: accumulation of gradients in a wide dtype, kernel
launches, and partly used devices at the end of kernels."""
MAX_TRIED_COUNTS = 32
"""Approximate number of block counts of a mode that are tried."""


def efficient_modes(saved: Mapping[RecomputeMode, int]) -> list[RecomputeMode]:
    """Returns the modes that free the most bytes for their time, the cheapest first.

    saved: bytes that a block saves with each mode.
    """
    found: list[RecomputeMode] = ["none"]
    while True:
        now = found[-1]
        # Bytes freed per recomputation time, relative to the previous mode.
        gains = {
            kind: (saved[now] - size) / (RECOMPUTE_COST[kind] - RECOMPUTE_COST[now])
            for kind, size in saved.items()
            if RECOMPUTE_COST[kind] > RECOMPUTE_COST[now] and size < saved[now]
        }
        if not gains:
            return found
        found.append(max(gains, key=gains.__getitem__))


def candidate_modes(
    saved: Mapping[RecomputeMode, int], count: int
) -> list[tuple[RecomputeMode, ...]]:
    """Returns assignments of modes to `count` blocks, with the least recomputation first.

    Only modes that are adjacent in `efficient_modes` are mixed. saved: bytes that a block saves
    with each mode.
    """
    modes = efficient_modes(saved)
    found = [(modes[0],) * count]
    steps = sorted({*range(1, count + 1, max(count // MAX_TRIED_COUNTS, 1)), count} - {0})
    for cheap, dear in pairwise(modes):
        found += [(dear,) * more + (cheap,) * (count - more) for more in steps]
    return found


def recompute_fraction(kinds: Sequence[RecomputeMode]) -> float:
    """Returns the recomputation time as a fraction of a step without recomputation."""
    counts = {kind: kinds.count(kind) for kind in RECOMPUTE_COST}
    return sum(RECOMPUTE_COST[kind] * count for kind, count in counts.items()) / max(len(kinds), 1)


def relative_token_time(tokens: int, again: float = 0.0) -> float:
    """Returns the time per token with micro-batches of `tokens` tokens, relative to the optimum.

    (1 + recompute fraction) · (1 + OVERHEAD_TOKENS / tokens). A small micro-batch without
    recomputation can thus be faster than a large one with much recomputation, and vice versa.
    """
    return (1.0 + again) * (1.0 + OVERHEAD_TOKENS / tokens)


def candidate_micro_batches(samples: int, seq: int, multiple: int = 1) -> list[int]:
    """Returns the candidates of micro-batch sizes, largest first: divisors of `samples`.

    The first candidate is the smallest size with at least USEFUL_TOKENS tokens, or all samples.
    multiple: every size is a multiple of it.
    """
    fits = [size for size in divisors(samples) if size % multiple == 0]
    enough = [size for size in fits if size * seq >= USEFUL_TOKENS]
    most = min(enough, default=samples)
    return [size for size in reversed(fits) if size <= most]
