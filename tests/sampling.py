"""Which tests run, and in which order.

A sample of the cases of a test: few cases in which every value of the parameters occurs. Parts of
all tests, which can run side by side. Over NCCL tests of one grid follow each other.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence

import pytest

from grids import GridKey, grid_key

WORD = re.compile(r"[^\s\-,:{}()\[\]'\"]+")


def covering_sample(name: str, cases: Sequence[str], count: int) -> list[str]:
    """Chooses `count` cases, each with the most words that no case before it has.

    Of cases with equally many new words, it chooses the one with the most new pairs of words.

    name: of the test, which seeds the order in which equally good cases are tried.
    cases: Ids of parameter sets, such as `row2-col2-llama-features`. Their words are the values of
        the parameters.
    """
    pending = sorted(cases)
    # Seeded by the name, so that tests with the same parameters keep different cases.
    random.Random(name).shuffle(pending)
    words = {case: sorted({*WORD.findall(case)}) for case in pending}
    pairs = {case: {*itertools.combinations(words[case], 2)} for case in pending}
    chosen: list[str] = []
    seen_words: set[str] = set()
    seen_pairs: set[tuple[str, str]] = set()

    def count_new(case: str) -> tuple[int, int]:
        return len({*words[case]} - seen_words), len(pairs[case] - seen_pairs)

    while pending and len(chosen) < count:
        best = max(pending, key=count_new)
        pending.remove(best)
        chosen.append(best)
        seen_words.update(words[best])
        seen_pairs.update(pairs[best])
    return chosen


def draw_samples(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Returns the items, with n cases of each test that has the marker `sample(n)`."""
    cases: dict[str, dict[str, pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample"):
            name, _, case = item.nodeid.partition("[")
            cases.setdefault(name, {})[case] = item
    left_out: set[pytest.Item] = set()
    for name, own in cases.items():
        marker = next(iter(own.values())).get_closest_marker("sample")
        assert marker is not None
        chosen = covering_sample(name, [*own], *marker.args)
        left_out.update(own[case] for case in own if case not in chosen)
    return [item for item in items if item not in left_out]


def sort_by_grid(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Sorts tests by the ranks and axes of their grid, otherwise in the order that they had.

    Over NCCL the communicators of a grid are made once, which takes longer than most tests of it.
    The parameter `degrees` of a test is its grid, and `ranks` a number of ranks on the axis row.
    """

    def key_of(item: pytest.Item) -> GridKey:
        callspec = getattr(item, "callspec", None)
        params = callspec.params if callspec is not None else {}
        if "degrees" in params:
            return grid_key(params["degrees"])
        if "ranks" in params:
            return grid_key({"row": params["ranks"]})
        return 0, ()

    return sorted(items, key=key_of)


def take_part(
    items: Sequence[pytest.Item], part: str, is_contiguous: bool = False
) -> list[pytest.Item]:
    """Returns the i-th of n parts with equally many tests; part: `i/n`.

    If parts are not contiguous, each has some tests of every file.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", part)
    index, num_parts = map(int, match.groups()) if match else (0, 0)
    if not 1 <= index <= num_parts:
        raise ValueError(f"--part={part} is not one of n parts. Use i/n with 1 <= i <= n.")
    if is_contiguous:
        begin, end = (len(items) * i // num_parts for i in (index - 1, index))
        return [*items[begin:end]]
    return [*items[index - 1 :: num_parts]]
