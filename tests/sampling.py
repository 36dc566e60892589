"""Samples of the cases of a test: few cases in which every value of the parameters occurs."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence

import pytest

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
