"""Order: permutations that are, shares that are met, samples that depend on (seed, n) only."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from corpora import corpus_of
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier.data.corpus import DocumentStream
from ranvier.data.mixture import PERIOD_SAMPLES, CorpusMixture, permute_index, stream_quotas
from ranvier.errors import PlanError


@given(st.integers(1, 700), st.integers(0, 2**63 - 1))
def test_a_permutation_hits_everything_once(count: int, key: int) -> None:
    assert sorted(permute_index(i, count, key) for i in range(count)) == list(range(count))


@given(st.integers(2**40, 2**50), st.integers(0, 2**63 - 1), st.data())
def test_large_permutations_stay_inside_and_apart(
    count: int, key: int, data: st.DataObject
) -> None:
    places = data.draw(st.lists(st.integers(0, count - 1), unique=True, max_size=50))
    found = [permute_index(i, count, key) for i in places]
    assert len(set(found)) == len(found) and all(0 <= i < count for i in found)


def test_a_permutation_looks_random() -> None:
    count = 5000
    found = np.array([permute_index(i, count, 7) for i in range(count)])
    assert abs(np.corrcoef(found, np.arange(count))[0, 1]) < 0.05
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 0.05
    fixed = (found == np.arange(count)).sum()
    neighbours = (np.abs(np.diff(found)) == 1).sum()
    assert fixed < 8 and neighbours < 14
    other = np.array([permute_index(i, count, 8) for i in range(count)])
    assert (found == other).sum() < 8


def test_small_permutations_are_all_drawn() -> None:
    for count in (2, 3, 4):
        seen = Counter(
            tuple(permute_index(i, count, k * 2**40 + k) for i in range(count)) for k in range(2000)
        )
        assert len(seen) == math.factorial(count)
        assert min(seen.values()) > 2000 / math.factorial(count) / 2


WEIGHTS = [
    [1.0],
    [1, 1],
    [0.7, 0.3],
    [1, 0, 1],
    [1e-9, 1.0],
    [1, 2, 3, 4, 5, 6, 7],
    [0.9, *[0.01] * 10],
    [1e300, 1e300],
    [1e308, 1e308],
    [1.7e308, 5e-324],
    [5e-324, 5e-324, 5e-324],
    [1e-320, 1.0],
    [*[1e-6] * 300, 5],
]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20).filter(lambda w: sum(w) > 0))
def test_quotas_fill_a_period(weights: list[float]) -> None:
    found = stream_quotas(weights)
    assert sum(found) == PERIOD_SAMPLES
    assert all((n == 0) == (w == 0) for n, w in zip(found, weights, strict=True))
    for n, w in zip(found, weights, strict=True):
        assert abs(n - PERIOD_SAMPLES * (w / sum(weights))) <= len(weights)


def test_a_power_of_two_changes_no_quota() -> None:
    weights = [0.1, 0.2, 0.3, 1 / 3, 7.7]
    for scale in (2.0**-900, 2.0**900):
        assert stream_quotas([weight * scale for weight in weights]) == stream_quotas(weights)


@pytest.fixture
def streams(tmp_path: Path) -> list[DocumentStream]:
    sizes = [1, 7, 30]
    made = [corpus_of(tmp_path / str(n), [[n, i] for i in range(n)]).open_stream(2) for n in sizes]
    return [stream for stream in made if stream is not None]


@pytest.mark.sample(5)
@pytest.mark.parametrize("weights", WEIGHTS, ids=range(len(WEIGHTS)))
def test_shares_are_met_at_every_prefix(
    streams: list[DocumentStream], weights: list[float]
) -> None:
    mixture = CorpusMixture([streams[0]] * len(weights), weights, seed=3)
    counts = np.zeros(len(weights), np.int64)
    shares = np.array(mixture.quotas) / PERIOD_SAMPLES
    total = math.fsum(w / max(weights) for w in weights)
    for number in range(2 * PERIOD_SAMPLES):
        stream, rank = mixture.pick_stream(number)
        assert rank == counts[stream], "the closed form counts like counting"
        counts[stream] += 1
        off = np.abs(counts - shares * (number + 1))
        assert (off <= 1 + shares * len(weights)).all(), (number, off)
        if number + 1 == PERIOD_SAMPLES:
            wanted = np.array([w / max(weights) / total for w in weights])
            bumped = sum(0 < w < 1 / PERIOD_SAMPLES for w in wanted) / PERIOD_SAMPLES
            assert (np.abs(counts / PERIOD_SAMPLES - wanted) <= max(0.001, bumped)).all()


@settings(max_examples=25)
@given(st.integers(0, 2**40), st.integers(0, 2**31), st.permutations(range(12)))
def test_picks_depend_on_seed_and_number_only(first: int, seed: int, order: list[int]) -> None:
    streams = [None, None, None]
    numbers = [first + 3000 * i for i in range(12)]
    weights = [0.2, 0.5, 0.3]
    straight = CorpusMixture(streams, weights, seed)  # type: ignore[arg-type]
    expected = [straight.pick_stream(n) for n in numbers]
    shuffled = CorpusMixture(streams, [2, 5, 3], seed)  # type: ignore[arg-type]
    found = {i: shuffled.pick_stream(numbers[i]) for i in order}
    assert [found[i] for i in range(12)] == expected


def test_seeds_and_periods_have_orders_of_their_own(streams: list[DocumentStream]) -> None:
    mixtures = [CorpusMixture(streams, [1, 1, 1], seed) for seed in (0, 1, 0)]
    starts = (0, 0, PERIOD_SAMPLES)
    picks = [
        [mixture.pick_stream(start + n)[0] for n in range(100)]
        for mixture, start in zip(mixtures, starts, strict=True)
    ]
    assert picks[0] != picks[1] != picks[2] != picks[0]


def test_an_epoch_reads_every_window_once_in_an_order_of_its_own(
    streams: list[DocumentStream],
) -> None:
    mixture = CorpusMixture(streams[2:], [4], seed=3)
    assert mixture.num_windows == 30 and (mixture.seq, mixture.document_mask) == (2, True)

    def read(seed: int, epoch: int) -> list[int]:
        numbers = range(30 * epoch, 30 * epoch + 30)
        return [
            int(CorpusMixture(streams[2:], [1], seed).read_sample(n).tokens[1]) for n in numbers
        ]

    first, second, other = read(3, 0), read(3, 1), read(4, 0)
    assert sorted(first) == sorted(second) == sorted(other) == list(range(30))
    assert first != second != other != first and first == read(3, 0)


def test_each_stream_of_a_mixture_has_epochs_of_its_own(streams: list[DocumentStream]) -> None:
    mixture = CorpusMixture(streams, [1, 1, 2], seed=5)
    read: dict[int, list[int]] = {1: [], 7: [], 30: []}
    for number in range(400):
        window = mixture.read_sample(number)
        read[int(window.tokens[0])].append(int(window.tokens[1]))
    for windows, seen in read.items():
        for start in range(0, len(seen) - windows, windows):
            assert sorted(seen[start : start + windows]) == list(range(windows))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1], r"1 mixture weights for 3 corpora\. Each corpus needs one\."),
        ([1, -1, 1], r"mixture_weights has the weight -1\. Weights must be finite and at least 0"),
        ([1, math.nan, math.inf], r"has the weight nan.*\nmixture_weights has the weight inf"),
        ([0, 0, 0], r"All 3 mixture weights are 0\. At least one must be positive"),
        ([1, 10**400, 1], r"has the weight 10000.*Weights must be finite"),
    ],
)
def test_senseless_weights_are_refused(
    streams: list[DocumentStream], weights: list[float], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        CorpusMixture(streams, weights, 0)
