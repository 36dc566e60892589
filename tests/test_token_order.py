"""The order of tokens over context: permutations, equal tokens, balanced work, few keys fetched."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier.sharding import ContextOrder, TokenOrder, TokenSegment, order_tokens

ORDERS: tuple[ContextOrder, ...] = ("contiguous", "zigzag", "balanced")


@st.composite
def samples(draw: st.DrawFn) -> tuple[list[int], int]:
    """Lengths of documents and a number of ranks that divides their sum."""
    num_ranks = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 16]))
    total = num_ranks * draw(st.sampled_from([1, 2, 3, 7, 16, 97, 256]))
    length = st.one_of(st.just(1), st.integers(1, total), st.sampled_from([2, 3, 5, 31, 97]))
    lengths: list[int] = []
    while (rest := total - sum(lengths)) > 0:
        lengths.append(min(draw(length), rest) if len(lengths) < 40 else rest)
    return draw(st.permutations(lengths)), num_ranks


def relative_work(order: TokenOrder, window: int = 0) -> float:
    work = order.attention_work(window)
    return max(work) * len(work) / sum(work)


def count_by_token(order: TokenOrder, window: int) -> tuple[list[int], list[int]]:
    """Work and keys fetched of each rank, counted token by token."""
    scores, fetched = [], []
    for rank in order.segments:
        tokens = [(one.document, i) for one in rank for i in range(one.start, one.stop)]
        keys = [
            {(document, j) for j in range(max(0, i - window + 1) if window else 0, i + 1)}
            for document, i in tokens
        ]
        scores.append(sum(map(len, keys)))
        fetched.append(len(set().union(*keys) - set(tokens)))
    return scores, fetched


@settings(max_examples=150, deadline=None)
@given(samples())
def test_every_order_is_a_permutation_with_equal_tokens_and_is_deterministic(
    sample: tuple[list[int], int],
) -> None:
    lengths, num_ranks = sample
    for name in ORDERS:
        order = order_tokens(lengths, num_ranks, name)
        numbers = order.token_numbers
        assert numbers.shape == (num_ranks, sum(lengths) // num_ranks)
        assert np.array_equal(np.sort(numbers, axis=None), np.arange(sum(lengths)))
        assert order == order_tokens(lengths, num_ranks, name)
        # Adjacent segments of a document are one segment.
        for rank in order.segments:
            assert all(one.num_tokens > 0 for one in rank)
            ends = {(one.document, one.stop) for one in rank}
            assert name == "zigzag" or not ends & {(one.document, one.start) for one in rank}


@settings(max_examples=40, deadline=None)
@given(samples().filter(lambda sample: sum(sample[0]) <= 256), st.sampled_from([0, 1, 2, 15, 999]))
def test_work_and_fetched_keys_equal_those_counted_by_token(
    sample: tuple[list[int], int], window: int
) -> None:
    for name in ORDERS:
        order = order_tokens(*sample, name)
        scores, fetched = count_by_token(order, window)
        assert list(order.attention_work(window)) == scores
        assert list(order.num_fetched(window)) == fetched


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8, 32])
def test_one_document_is_ordered_as_zigzag(num_ranks: int) -> None:
    order = order_tokens([num_ranks * 1024], num_ranks, "balanced")
    assert order == order_tokens([num_ranks * 1024], num_ranks, "zigzag")
    all_gather = num_ranks * 1024 * (1 - 1 / num_ranks)
    assert np.mean(order.num_fetched()) == pytest.approx(0.75 * all_gather)


def lognormal_documents(total: int, seed: int) -> list[int]:
    """Lengths like those of code files: median 1,500 tokens and a long tail."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while (rest := total - sum(lengths)) > 0:
        lengths.append(min(max(int(np.exp(rng.normal(np.log(1500), 1.6))), 1), rest))
    return lengths


BALANCED_CASES = {
    "code 0": (lognormal_documents(131072, 0), 8),
    "code 1": (lognormal_documents(131072, 1), 8),
    "code 2": (lognormal_documents(131072, 2), 4),
    "code of a million tokens": (lognormal_documents(1048576, 0), 32),
    "almost the whole sample": ([7, 131072 - 12, 5], 8),
    "one long, thousands of short": ([65536, *[16] * 4096], 8),
    "documents of one token": ([8192, *[1] * 8192], 8),
    "primes": ([997] * 123 + [8441], 8),
    "a rank more or less": ([16384, 16383, 16385, 32768, 49152], 8),
    "two documents, three ranks": ([30000, 18000], 3),
    "padding at the end": ([*[700] * 40, 9000, 131072 - 37000], 8),
}


@pytest.mark.parametrize("case", BALANCED_CASES)
def test_work_of_the_balanced_order_differs_by_five_percent_at_most(case: str) -> None:
    order = order_tokens(*BALANCED_CASES[case], "balanced")
    assert relative_work(order) <= 1.05


@pytest.mark.parametrize("case", ["code 0", "code 1", "code of a million tokens"])
def test_other_orders_are_not_balanced_for_packed_documents(case: str) -> None:
    for name in ("contiguous", "zigzag"):
        assert relative_work(order_tokens(*BALANCED_CASES[case], name)) > 1.2


@pytest.mark.parametrize("seed", range(3))
def test_balanced_order_fetches_fewer_keys_than_zigzag_of_each_document(seed: int) -> None:
    lengths = lognormal_documents(131072, seed)
    fetched = np.mean(order_tokens(lengths, 8, "balanced").num_fetched())
    assert fetched <= 0.4 * 0.75 * 131072 * (1 - 1 / 8)


WHOLE_CASES = {
    "equal documents": ([2048] * 64, 8),
    "equal documents on three ranks": ([500] * 9, 3),
    "the same lengths on each rank": ([5000, 3001, 991, 17, 3] * 6, 6),
    "documents of one token": ([1] * 64, 8),
    "as many documents as ranks": ([77] * 5, 5),
    "swaps of several documents": ([830, 170, 620, 380, 810, 190, 600, 400, 820, 180, 610, 390], 3),
}


@pytest.mark.parametrize("case", WHOLE_CASES)
def test_nothing_is_fetched_where_documents_can_be_whole(case: str) -> None:
    order = order_tokens(*WHOLE_CASES[case], "balanced")
    assert sum(order.num_fetched()) == 0
    assert relative_work(order) <= 1.05


def test_nothing_is_fetched_for_many_random_documents_with_a_whole_order() -> None:
    rng = np.random.default_rng(0)
    ranks = [np.diff([0, *sorted(rng.choice(16383, 99, False) + 1), 16384]) for _ in range(4)]
    order = order_tokens([int(n) for rank in ranks for n in rank], 4, "balanced")
    assert sum(order.num_fetched()) == 0


def test_segments_are_counted_by_rank() -> None:
    segments = ((TokenSegment(0, 0, 2), TokenSegment(1, 1, 3)), (TokenSegment(0, 2, 6),))
    order = TokenOrder((6, 3), segments)
    assert order.num_segments == (2, 1)
    assert order.num_fetched() == (1, 2)
    assert order.num_fetched(window=2) == (1, 1)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_packed_windows_of_any_lengths_have_an_order(num_ranks: int) -> None:
    drawn = np.random.default_rng(num_ranks)
    windows = [(9, 29, 21, 2, 44, 23)]
    for _ in range(150):
        total = int(drawn.choice([1024, 2048, 4096]))
        lengths: list[int] = []
        while (rest := total - sum(lengths)) > 0:
            lengths.append(min(rest, 1 + int(np.exp(drawn.normal(5.0, 1.5)))))
        windows.append(tuple(lengths))
    for lengths in windows:
        order = order_tokens(lengths, num_ranks, "balanced")
        assert np.array_equal(np.sort(order.token_numbers, axis=None), np.arange(sum(lengths)))
        assert relative_work(order) < 1.1
