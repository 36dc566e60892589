"""pass@k and its kin: what enumeration of all choices gives, for any k."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier.errors import DataError, PlanError
from ranvier.eval.code.metrics import (
    CodeSample,
    best_at_k,
    compute_metrics,
    pass_at_k,
    read_samples,
)

VALUES = st.lists(st.floats(0.0, 1e6), min_size=1, max_size=8)


@given(VALUES, st.data())
def test_the_best_of_k_is_the_mean_over_all_choices(
    values: list[float], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(values)))
    wanted = fmean(max(some) for some in itertools.combinations(values, k))
    assert best_at_k(values, k) == pytest.approx(wanted, rel=1e-12)
    assert best_at_k(values, 1) == math.fsum(values) / len(values)
    assert best_at_k(values, len(values)) == max(values)


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_all_choices(count: int, data: st.DataObject) -> None:
    good, k = data.draw(st.integers(0, count)), data.draw(st.integers(1, count))
    flags = [True] * good + [False] * (count - good)
    wanted = fmean(any(some) for some in itertools.combinations(flags, k))
    assert pass_at_k(count, good, k) == pytest.approx(wanted, rel=1e-12, abs=1e-15)
    assert best_at_k([float(x) for x in flags], k) == pytest.approx(wanted, rel=1e-12, abs=1e-15)


def test_many_samples_overflow_nothing() -> None:
    count = 100_000
    assert pass_at_k(count, 1, 50_000) == pytest.approx(0.5, rel=1e-9)
    assert pass_at_k(count, 1, 10) == pytest.approx(1e-4, rel=1e-12)
    assert best_at_k([1.0] + [0.0] * (count - 1), 10) == pytest.approx(1e-4, rel=1e-12)
    assert best_at_k([2.0] * count, 777) == pytest.approx(2.0, rel=1e-9)


def published(speedups: list[float], k: int) -> float:
    """The published reference: times in rising order, and C(n, r) = 1 where n < r."""

    def choose(n: int, r: int) -> int:
        return 1 if n < r else math.comb(n, r)

    count = len(speedups)
    fastest = sorted(speedups, reverse=True)
    return sum(
        choose(j - 1, k - 1) / choose(count, k) * fastest[j - 1] for j in range(1, count + 1)
    )


def test_the_published_form_is_right_for_one_sample_only() -> None:
    speedups = [8.0, 4.0, 2.0, 1.0]
    assert published(speedups, 1) == best_at_k(speedups, 1) == 3.75
    assert published(speedups, 4) == sum(speedups) and best_at_k(speedups, 4) == 8.0
    for k in (2, 3):
        wanted = fmean(max(some) for some in itertools.combinations(speedups, k))
        assert abs(published(speedups, k) - wanted) > 0.1
        assert best_at_k(speedups, k) == pytest.approx(wanted, rel=1e-12)


def sample(
    task: str, seconds: float, *, n: int = 1, passed: bool = True, built: bool = True
) -> CodeSample:
    return CodeSample(
        task=task, built=built, passed=passed, seconds=seconds, baseline=4.0, processes=n
    )


def test_a_table_is_the_mean_over_tasks() -> None:
    samples = [sample("a", 2.0), sample("a", 1.0, passed=False), sample("a", 4.0)]
    samples += [sample("b", 9.0, built=False, passed=False)] * 2 + [sample("b", 1.0)]
    found = compute_metrics(samples, (1, 2, 3))
    assert found["build"] == pytest.approx({"1": (1 + 1 / 3) / 2, "2": (1 + 2 / 3) / 2, "3": 1.0})
    assert found["pass"] == pytest.approx({"1": 0.5, "2": (1 + 2 / 3) / 2, "3": 1.0})
    # a: speedups 2, 0 (failed), 1; b: 0, 0, 4
    assert found["speedup_1"] == pytest.approx(
        {"1": (1 + 4 / 3) / 2, "2": (5 / 3 + 8 / 3) / 2, "3": 3}
    )
    assert found["efficiency_1"] == found["speedup_1"]


def test_several_numbers_of_processes_have_a_best_one() -> None:
    samples = [sample("a", 4.0), sample("a", 2.0), sample("a", 1.0, n=4), sample("a", 8.0, n=4)]
    found = compute_metrics(samples, (1, 2))
    assert found["speedup_4"] == pytest.approx({"1": (4 + 0.5) / 2, "2": 4.0})
    assert found["efficiency_4"] == pytest.approx({"1": (4 + 0.5) / 8, "2": 1.0})
    assert found["speedup_max"] == pytest.approx({"1": (4 + 2) / 2, "2": 4.0})


def test_what_cannot_be_counted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="k=3, but task 'a' has 2"):
        compute_metrics([sample("a", 1.0)] * 2, (3,))
    path = tmp_path / "samples.jsonl"
    good = {"task": "a", "built": True, "passed": True, "seconds": 1.0, "baseline": 2.0}
    for change, said in (
        ({"seconds": 0.0}, "seconds=0"),
        ({"seconds": -1.0, "baseline": None}, "seconds=-1"),
        ({"seconds": math.nan, "baseline": None}, "seconds=nan"),
        ({"built": False}, "passed=true with built=false"),
        ({"built": "yes"}, "built='yes'"),
        ({"baseline": -1.0}, "baseline=-1"),
        ({"processes": "x"}, "must be numbers"),
        ({"processes": 0}, "processes=0"),
    ):
        path.write_text(json.dumps(good) + "\n" + json.dumps({**good, **change}) + "\n")
        with pytest.raises(
            DataError, match=rf"samples.jsonl:2: .* is not a valid sample: .*{said}"
        ):
            read_samples(path)
    path.write_text(
        json.dumps({**good, "sample": 1}) * 1 + "\n" + json.dumps({**good, "sample": 1})
    )
    with pytest.raises(DataError, match="twice"):
        compute_metrics(read_samples(path), (1,))
    line = json.dumps({**good, "task": "a\u2028\u0085b", "passed": False}, ensure_ascii=False)
    path.write_text(f"{line}\r\n{json.dumps({**good, 'seconds': 0, 'baseline': None})}\n")
    assert [one.task for one in read_samples(path)] == ["a\u2028\u0085b", "a"]
    path.write_text("\n")
    with pytest.raises(DataError, match="has no samples"):
        read_samples(path)
