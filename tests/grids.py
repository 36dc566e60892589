"""All grids of 1, 2, 4 and 8 ranks, and seeded samples that cover what a whole product would."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ranvier.config.plan import AXES

GridKey = tuple[int, tuple[tuple[str, int], ...]]
RUNNING = ("data", "depth", "row", "col")


def grids(worlds: Sequence[int] = (1, 2, 4, 8)) -> list[dict[str, int]]:
    """Every way to put so many ranks on data, depth, row and col."""
    found = []
    for world in worlds:
        for degrees in itertools.product([n for n in (1, 2, 4, 8) if n <= world], repeat=4):
            if math.prod(degrees) == world:
                found.append(dict(zip(RUNNING, degrees, strict=True)))
    return found


def label(degrees: Mapping[str, int]) -> str:
    """A short name of a grid."""
    return "-".join(f"{axis}{size}" for axis, size in degrees.items() if size > 1) or "one"


def grid_key(degrees: Mapping[str, int]) -> GridKey:
    """The number of ranks and the axes with several: equal for grids that have equal groups."""
    axes = tuple((axis, degrees[axis]) for axis in AXES if degrees.get(axis, 1) > 1)
    return math.prod(degrees.values()), axes


def product(
    options: Mapping[str, Sequence[Any]], valid: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """All combinations that are valid."""
    rows = [
        dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())
    ]
    return [row for row in rows if valid(row)]


def pairwise(
    options: Mapping[str, Sequence[Any]], valid: Callable[[dict[str, Any]], bool], seed: int = 0
) -> list[dict[str, Any]]:
    """Few valid combinations in which every possible pair of two options' values occurs."""
    rows = product(options, valid)
    pairs = {row_id: set(_pairs(row)) for row_id, row in enumerate(rows)}
    missing = set().union(*pairs.values())
    drawn, chosen = random.Random(seed), []
    while missing:
        most = max(len(missing & some) for some in pairs.values())
        best = drawn.choice([i for i, some in pairs.items() if len(missing & some) == most])
        missing -= pairs.pop(best)
        chosen.append(rows[best])
    return chosen


def _pairs(row: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    return [(a, row[a], b, row[b]) for a, b in itertools.combinations(row, 2)]
