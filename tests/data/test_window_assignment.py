"""Windows of a step are assigned to ranks and micro-batches by cost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier.data.window_assignment import assign_windows, assignment_efficiency, window_cost
from ranvier.sharding import TokenSegment


def tail_costs(num_windows: int, tokens: int, seed: int) -> list[float]:
    """Costs in an 8 B model of windows with Pareto lengths."""
    rng = np.random.default_rng(seed)
    costs = []
    for _ in range(num_windows):
        lengths: list[int] = []
        rest = tokens
        while rest:
            lengths.append(min(int(300 * (rng.pareto(1.1) + 1)), rest))
            rest -= lengths[-1]
        costs.append(
            window_cost(
                lengths, num_parameters=8 * 10**9, attention_features=4096, layer_windows=[0] * 32
            )
        )
    return costs


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 9), st.integers(1, 6), st.integers(1, 3))
def test_every_window_is_assigned_once_and_alike_on_all_ranks(
    data: st.DataObject, num_ranks: int, num_micro_batches: int, micro_batch: int
) -> None:
    number = num_ranks * num_micro_batches * micro_batch
    costs = data.draw(st.lists(st.floats(0, 1e18), min_size=number, max_size=number))
    assigned = assign_windows(costs, num_ranks, num_micro_batches, micro_batch)
    assert assigned.shape == (num_ranks, num_micro_batches, micro_batch)
    assert sorted(assigned.ravel().tolist()) == list(range(number))
    again = assign_windows(costs, num_ranks, num_micro_batches, micro_batch)
    assert np.array_equal(assigned, again)


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(6)), st.lists(st.integers(1, 50), min_size=6, max_size=6))
def test_no_other_assignment_waits_less_in_micro_batches(
    order: list[int], costs: list[int]
) -> None:
    ours = assignment_efficiency(costs, assign_windows(costs, 2, 3))
    other = assignment_efficiency(costs, np.array(order).reshape(2, 3, 1))
    assert ours.micro_batch >= other.micro_batch - 1e-12


def test_assigned_windows_of_a_long_tail_are_efficient() -> None:
    costs = tail_costs(256, 131072, seed=0)
    assigned = assignment_efficiency(costs, assign_windows(costs, 32, 8))
    in_order = assignment_efficiency(costs, np.arange(256).reshape(32, 8, 1))
    assert in_order.micro_batch < 0.7
    assert assigned.micro_batch >= 0.85
    assert assigned.step >= max(0.9, in_order.step)


def test_sums_over_the_step_are_similar_too() -> None:
    costs = np.random.default_rng(0).uniform(1, 2, 64).tolist()
    assert assignment_efficiency(costs, assign_windows(costs, 8, 8)).step > 0.995
    assert assignment_efficiency(costs, assign_windows(costs, 8, 4, 2)).step > 0.99


@pytest.mark.parametrize("window", [0, 1, 7, 100])
def test_cost_counts_matrices_and_the_keys_that_tokens_see(window: int) -> None:
    lengths = [1, 7, 8, 64]
    scores = sum(TokenSegment(0, 0, n).num_scores(window) for n in lengths)
    full = sum(TokenSegment(0, 0, n).num_scores() for n in lengths)
    cost = window_cost(
        lengths, num_parameters=1000, attention_features=16, layer_windows=[window, 0, window]
    )
    assert cost == 2 * 1000 * 80 + 4 * 16 * (2 * scores + full)
