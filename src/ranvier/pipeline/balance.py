"""Load balancing: partitions the parts of a model into ranges of similar cost. Imports no torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise

RELATIVE_TOLERANCE = 1e-9
"""Relative width at which the bisection for the smallest largest cost ends."""


@cache
def partition_by_cost(costs: tuple[float, ...], count: int) -> tuple[int, ...]:
    """Returns the first part of each of `count` ranges, minimizing the largest cost of a range.

    Of several such partitions, returns the one with the smallest sum of squares. Dynamic program;
    ranges above the limit of `_max_range_cost`, and starts that cannot reach it, are pruned.
    """
    total = [0.0, *accumulate(costs)]
    parts = len(costs)
    limit = _max_range_cost(costs, total, count)
    # best[n]: (largest cost, sum of squares, starts) of the first n parts in k ranges.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for k in range(1, count + 1):
        row: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, before in best.items():
            for stop in range(start + 1, parts - (count - k) + 1):
                cost = total[stop] - total[start]
                if cost > limit:
                    break
                # The rest cannot fit into the remaining ranges: this range is too short.
                if total[parts] - total[stop] > (count - k) * limit * (1.0 + RELATIVE_TOLERANCE):
                    continue
                squares = before[1] + cost * cost
                found = (max(before[0], cost), squares, (*before[2], start))
                if stop not in row or found < row[stop]:
                    row[stop] = found
        best = row
    assert parts in best, (parts, count)
    return best[parts][2]


def _max_range_cost(costs: Sequence[float], total: Sequence[float], count: int) -> float:
    """Returns the smallest possible largest cost of `count` ranges, rounded up, by bisection."""

    def fits(most: float) -> bool:
        start = 0
        for left in range(count, 0, -1):
            if start == len(costs):
                return True
            # Greedy: as many parts as fit, but leave one for each remaining range.
            stop = bisect_right(total, total[start] + most * (1.0 + RELATIVE_TOLERANCE)) - 1
            start = min(max(stop, start), len(costs) - (left - 1))
        return start == len(costs)

    low = max(total[-1] / count, max(costs))
    high = total[-1]
    while high - low > RELATIVE_TOLERANCE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high * (1.0 + 4 * RELATIVE_TOLERANCE)


def part_ranges(firsts: Sequence[int], parts: int) -> list[slice]:
    """Returns the range of parts of each virtual stage."""
    return [slice(a, b) for a, b in pairwise([*firsts, parts])]
