"""Samples of cases: every value occurs, and the choice is the same in every run."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sampling import WORD, covering_sample, draw_samples, sort_by_grid, take_part

NAMES = [f"test_{letter}" for letter in "abcde"]
GRIDS = ["one", "row2", "row2-col2", "data2-row2-col2", "depth4"]
MODELS = ["llama", "gpt2", "hf_llama"]
CASES = ["-".join(values) for values in itertools.product(GRIDS, MODELS, ["samples", "features"])]


def words_of(cases: list[str]) -> set[str]:
    return {word for case in cases for word in WORD.findall(case)}


@pytest.mark.parametrize("name", NAMES)
def test_every_word_is_covered_if_the_count_allows_it(name: str) -> None:
    """Three cases suffice: one for each model, on three grids that have the axes of all."""
    assert words_of(covering_sample(name, CASES, 3)) == words_of(CASES)


def test_a_value_inside_of_a_case_is_covered() -> None:
    """The ids of pairwise cases are one parameter, whose position says nothing."""
    cases = ["row2-llama-none", "row2-llama-full", "row2-gpt2-none", "data2-row2-col2-llama-none"]
    assert {*covering_sample("test_a", cases, 3)} == {*cases[1:]}


def test_a_word_is_a_value_of_any_notation() -> None:
    assert WORD.findall("{'pipe': 2, 'row': 4}-zero_bubble-(True,)-moe 2 of 8]") == [
        *("pipe", "2", "row", "4", "zero_bubble", "True", "moe", "2", "of", "8")
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_further_case_has_new_pairs_of_words(name: str) -> None:
    cases = ["a-x-1", "b-y-2", "a-x", "a-y"]
    assert {*covering_sample(name, cases, 3)} == {"a-x-1", "b-y-2", "a-y"}


def test_the_choice_depends_on_the_cases_and_the_name_only() -> None:
    chosen = covering_sample("test_a", CASES, 4)
    assert covering_sample("test_a", CASES, 4) == chosen
    assert covering_sample("test_a", CASES[::-1], 4) == chosen


def test_tests_with_the_same_parameters_keep_different_cases() -> None:
    chosen = {frozenset(covering_sample(name, CASES, 4)) for name in NAMES}
    assert len(chosen) == len(NAMES)


@pytest.mark.parametrize("count", [30, 31, 1000])
def test_fewer_cases_than_the_count_are_all_kept(count: int) -> None:
    assert sorted(covering_sample("test_a", CASES, count)) == sorted(CASES)


@pytest.mark.parametrize("count", range(0, 30, 5))
def test_no_case_is_chosen_twice(count: int) -> None:
    chosen = covering_sample("test_a", CASES, count)
    assert len({*chosen}) == len(chosen) == count
    assert {*chosen} <= {*CASES}


@dataclass(frozen=True)
class Item:
    """What `draw_samples` asks of a collected test."""

    nodeid: str
    count: int | None

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        assert name == "sample"
        return None if self.count is None else pytest.mark.sample(self.count).mark


def test_only_marked_tests_are_sampled_and_the_order_stays() -> None:
    marked = [Item(f"test_marked[{case}]", 4) for case in CASES]
    others = [Item(f"test_other[{case}]", None) for case in CASES]
    items = cast(list[pytest.Item], [*others[:7], *marked, *others[7:]])
    kept = draw_samples(items)
    assert len(kept) == len(others) + 4
    assert kept == [item for item in items if item in kept]
    assert {*others} < {*kept}


def with_params(**params: Any) -> pytest.Item:
    """A collected test with these parameters."""
    return cast(pytest.Item, SimpleNamespace(callspec=SimpleNamespace(params=params)))


def test_tests_of_equal_grids_follow_each_other() -> None:
    plain = cast(pytest.Item, SimpleNamespace())
    row4, row2 = with_params(degrees={"row": 4}), with_params(degrees={"row": 2})
    ranks, same = with_params(ranks=2), with_params(degrees={"data": 1, "row": 2}, dtype="bf16")
    col2, other = with_params(degrees={"col": 2}), with_params(dtype="bf16")
    items = [row4, ranks, col2, plain, same, row2, other]
    assert sort_by_grid(items) == [plain, other, col2, ranks, same, row2, row4]


@pytest.mark.parametrize("is_contiguous", [False, True])
@pytest.mark.parametrize("num_parts", [1, 3, 10, 13])
def test_each_test_is_in_one_part(num_parts: int, is_contiguous: bool) -> None:
    items = [with_params(number=i) for i in range(10)]
    parts = [take_part(items, f"{i + 1}/{num_parts}", is_contiguous) for i in range(num_parts)]
    taken = [item for part in parts for item in part]
    assert len(taken) == 10 and all(item in taken for item in items)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert not is_contiguous or taken == items


@pytest.mark.parametrize("part", ["", "2", "0/4", "5/4", "1/0", "-1/4", "a/b"])
def test_a_part_that_does_not_exist_is_refused(part: str) -> None:
    with pytest.raises(ValueError, match="Use i/n with 1 <= i <= n"):
        take_part([], part)
