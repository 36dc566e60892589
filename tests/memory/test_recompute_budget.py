"""Budgets: which modes and micro-batches are tried."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ranvier.memory.recompute_budget import (
    RECOMPUTE_COST,
    USEFUL_TOKENS,
    RecomputeMode,
    candidate_micro_batches,
    candidate_modes,
    efficient_modes,
    recompute_fraction,
    relative_token_time,
)

SAVED: dict[RecomputeMode, int] = {"none": 100, "selective": 60, "full": 10}
LAYERS = 4


def test_late_blocks_keep_most() -> None:
    found = candidate_modes(SAVED, LAYERS)
    assert found[0] == ("none",) * LAYERS and found[-1] == ("full",) * LAYERS
    assert ("selective", "none", "none", "none") in found
    assert ("full", "full", "selective", "selective") in found
    assert len(found) == 1 + 2 * LAYERS
    assert candidate_modes(SAVED, 0) == [()] and len(candidate_modes(SAVED, 400)) < 100


def test_a_mode_that_frees_little_for_its_time_is_left_out() -> None:
    assert efficient_modes(SAVED) == ["none", "selective", "full"]
    assert efficient_modes({**SAVED, "selective": 99}) == ["none", "full"]
    assert efficient_modes({**SAVED, "selective": 100}) == ["none", "full"]
    assert efficient_modes({**SAVED, "full": 60}) == ["none", "selective"]


saved_bytes = st.fixed_dictionaries({kind: st.integers(0, 200) for kind in RECOMPUTE_COST})


@given(saved=saved_bytes, room=st.integers(0, 800))
def test_nothing_much_cheaper_fits(saved: dict[RecomputeMode, int], room: int) -> None:
    """Against all assignments: less than the recomputation of one block is lost."""

    def fits(kinds: tuple[RecomputeMode, ...]) -> bool:
        return sum(saved[kind] for kind in kinds) <= room

    costs = [*map(recompute_fraction, candidate_modes(saved, LAYERS))]
    assert costs == sorted(costs)
    every = [kinds for kinds in itertools.product(RECOMPUTE_COST, repeat=LAYERS) if fits(kinds)]
    found = next(filter(fits, candidate_modes(saved, LAYERS)), None)
    assert (found is None) == (not every)
    if found is not None:
        least = min(map(recompute_fraction, every))
        assert recompute_fraction(found) < least + RECOMPUTE_COST["full"] / LAYERS


def test_useful_micro_batches() -> None:
    assert candidate_micro_batches(64, 2048) == [8, 4, 2, 1]
    assert candidate_micro_batches(12, 2048) == [12, 6, 4, 3, 2, 1]  # 6 have too few tokens
    assert candidate_micro_batches(4, 1024) == [4, 2, 1]
    assert candidate_micro_batches(3, USEFUL_TOKENS * 2) == [1]
    assert candidate_micro_batches(24, 4096, multiple=3) == [6, 3]
    assert candidate_micro_batches(6, 16, multiple=6) == [6]


def test_time_weighs_small_micro_batches_against_recomputation() -> None:
    full, selective = recompute_fraction(("full",)), recompute_fraction(("selective",))
    assert (
        relative_token_time(16384)
        < relative_token_time(8192)
        < relative_token_time(16384, selective)
        < relative_token_time(4096)
        < relative_token_time(16384, full)
    )
    assert recompute_fraction(("none", "full", "full", "none")) == full / 2
