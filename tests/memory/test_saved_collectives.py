"""Which results of collectives are kept: those that save most for their bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ranvier.comm.bandwidth import DEFAULT_RATE, CollectiveRate
from ranvier.memory.recompute_collectives import (
    SavableResult,
    choose_results,
    communication_seconds,
)
from ranvier.trace import Event

SLOW = SavableResult("slow", 100, 1e-3)
"""Little to keep, long to repeat."""
WIDE = SavableResult("wide", 1000, 2e-3)
FAST = SavableResult("fast", 100, 1e-4)
INSTEAD = SavableResult("instead", -500, 1e-6)
"""Takes the place of something larger."""


def test_seconds_are_those_of_the_axis() -> None:
    rates = {("row",): CollectiveRate(1e-5, 1e9), ("col",): CollectiveRate(1e-3, 1e6)}
    row, col = Event("all_gather", ("row",), 10**6), Event("reduce_scatter", ("col",), 10**6)
    assert communication_seconds([row], rates) == 1e-5 + 1e-3
    assert communication_seconds([row, col], rates) == (1e-5 + 1e-3) + (1e-3 + 1.0)
    assert communication_seconds([Event("all_reduce", ("row",), 10**6)], rates) == 1e-5 + 2e-3
    assert communication_seconds([row], {}) == DEFAULT_RATE.latency + 10**6 / DEFAULT_RATE.bandwidth


def test_the_best_are_kept_while_there_is_room() -> None:
    every = [WIDE, FAST, SLOW]
    assert choose_results(every, 10**6) == {"slow", "wide", "fast"}
    assert choose_results(every, 1100) == {"slow", "wide"}
    assert choose_results(every, 300) == {"slow", "fast"}, (
        "what does not fit leaves its place to the next"
    )
    assert choose_results(every, 100) == {"slow"}
    assert choose_results(every, 99) == frozenset()
    assert choose_results([*every, INSTEAD], 0) == {"instead", "slow", "fast"}, "it makes room"
    assert choose_results([SavableResult("silent", 0, 0.0)], 10) == frozenset()


results = st.lists(
    st.builds(
        SavableResult, st.text("abc", min_size=1), st.integers(-50, 500), st.floats(1e-6, 1.0)
    ),
    unique_by=lambda one: one.name,
)


@given(results=results, room=st.integers(0, 1500))
def test_what_is_kept_fits_and_is_the_best(results: list[SavableResult], room: int) -> None:
    chosen = choose_results(results, room)
    assert choose_results(results[::-1], room) == chosen, (
        "ranks that list them otherwise choose alike"
    )
    free = room - sum(one.bytes for one in results if one.name in chosen)
    left = [one for one in results if one.name not in chosen]
    assert free >= 0
    for one in left:  # no room for it beside those that are better
        better = [
            other
            for other in results
            if other.name in chosen and other.seconds_per_byte >= one.seconds_per_byte
        ]
        assert one.bytes > room - sum(other.bytes for other in better)
