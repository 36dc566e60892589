"""The shipped constants on published runs, and the whole score with --full."""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import published  # noqa: E402
import published_rows  # noqa: E402
from published_rows import Row  # noqa: E402

from ranvier.planner.cluster import Reach  # noqa: E402


def timed() -> list[Row]:
    return [row for row in published_rows.rows() if row.scored and row.seconds and not row.oom]


def shipped(row: Row) -> Reach:
    assert row.device is not None
    return row.device.reach


def test_shipped_constants_predict_published_runs() -> None:
    errors = defaultdict(list)
    for row in timed():
        if shipped(row) != Reach():
            errors[row.source, row.narrow].append(published.guess(row, shipped(row)).error)
    for narrow, limit in ((False, 10), (True, 15)):
        means = [published.mape(some) for (_, kind), some in errors.items() if kind is narrow]
        assert len(means) >= 3
        assert statistics.fmean(means) < limit


def test_the_sweep_is_ranked_as_it_was_measured() -> None:
    sweep = [published.guess(row, shipped(row)) for row in timed() if published.is_sweep(row)]
    each = [one.row.number("global_batch") for one in sweep]
    measured = [one.row.seconds / n for one, n in zip(sweep, each, strict=True)]
    guessed = [one.prediction.total / n for one, n in zip(sweep, each, strict=True)]
    assert len(sweep) == 10
    assert published.tau(measured, guessed) > 0.7
    assert measured[guessed.index(min(guessed))] < 1.05 * min(measured)


def test_runs_out_of_memory_are_called_so() -> None:
    guesses = [published.guess(row, None) for row in published_rows.rows() if row.scored]
    assert all(not one.fits for one in guesses if one.row.oom)
    ran = [one.fits for one in guesses if one.row.seconds]
    assert sum(ran) > 0.95 * len(ran)


def test_tau_ignores_pairs_within_the_noise() -> None:
    assert published.tau([1.0, 1.05, 2.0], [1.0, 0.9, 3.0]) == 1.0
    assert published.tau([1.0, 1.5, 2.0], [3.0, 2.0, 1.0]) == -1.0


@pytest.mark.full
def test_each_source_without_its_own_runs(capsys: pytest.CaptureFixture[str]) -> None:
    guesses, null = published.left_out(timed()), published.null_errors(timed())
    published.times(guesses, null)
    printed = capsys.readouterr().out
    assert "FAIL" not in printed
    assert printed.count("pass") == 3
