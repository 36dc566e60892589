"""Budgets: what is chosen fits, costs least of all that fits, and more memory never costs more."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ranvier.memory.budget import (
    COST,
    USEFUL_TOKENS,
    Block,
    Need,
    assigned,
    least,
    share,
    time,
    useful,
)

SIMPLE = Need(
    {"none": Block(100, 120), "selective": Block(60, 120), "full": Block(10, 120)},
    count=4,
    gradient=7,
    fixed=1000,
    head=50,
    outside=5,
)

sizes = st.integers(0, 200)


@st.composite
def needs(draw: st.DrawFn) -> Need:
    """Any numbers; a block needs at least what it keeps."""
    blocks = {}
    for kind in COST:
        kept = draw(sizes)
        blocks[kind] = Block(kept, kept + draw(sizes))
    return Need(
        blocks,
        count=draw(st.integers(1, 6)),
        gradient=draw(sizes),
        fixed=draw(sizes),
        head=draw(sizes),
        outside=draw(sizes),
        accumulated=draw(st.booleans()),
    )


def test_peak_of_a_step_is_at_the_end_of_forward_or_in_backward() -> None:
    keep = ("none",) * 4
    # the last block runs, then the one before it beside the gradient of the last, ...
    assert SIMPLE.of(keep) == 1000 + 5 + 3 * 100 + 120 + 0 * 7 + max(0, 50 + 400 - 425)
    assert replace(SIMPLE, head=500).of(keep) == 1000 + 400 + 500
    # where little is kept, gradients are what grows: the peak is at the first block
    small = replace(SIMPLE, gradient=200)
    assert small.of(("full",) * 4) == 1000 + 5 + 120 + 3 * 200
    added = replace(SIMPLE, accumulated=True)
    assert added.of(keep) == 1000 + 4 * 7 + 5 + 400 + 50


def test_memory_is_used_for_what_costs_most_again() -> None:
    assert assigned(SIMPLE, SIMPLE.of(("none",) * 4)) == ("none",) * 4
    assert assigned(SIMPLE, 10**6) == ("none",) * 4
    assert assigned(SIMPLE, 1400) == ("selective", "selective", "none", "none")
    assert assigned(SIMPLE, 1210) == ("full", "full", "selective", "selective")
    assert assigned(SIMPLE, least(SIMPLE) - 1) is None


def test_a_kind_that_keeps_no_less_than_a_cheaper_one_is_left_out() -> None:
    blocks = {**SIMPLE.blocks, "selective": Block(100, 120)}
    need = replace(SIMPLE, blocks=blocks)
    found = {assigned(need, room) for room in range(least(need), 1500)}
    assert not any("selective" in kinds for kinds in found if kinds is not None)
    assert len(found) > 2


@given(need=needs(), room=st.integers(0, 3000), more=st.integers(0, 500))
def test_what_is_chosen_fits_and_more_memory_costs_no_more(
    need: Need, room: int, more: int
) -> None:
    kinds, richer = assigned(need, room), assigned(need, room + more)
    if kinds is None:
        assert room < least(need)
        return
    assert need.of(kinds) <= room
    assert richer is not None and share(richer) <= share(kinds)


@given(need=needs(), room=st.integers(0, 3000))
def test_nothing_cheaper_fits(need: Need, room: int) -> None:
    """Against all assignments, where kinds are what they are said to be."""
    blocks, need = list(need.blocks.values()), replace(need, head=0)
    kept = sorted((block.kept for block in blocks), reverse=True)
    peak = max(block.peak for block in blocks)
    ordered = {kind: Block(k, peak) for kind, k in zip(COST, kept, strict=True)}
    need = replace(need, blocks=ordered)
    found = assigned(need, room)
    every = itertools.product(COST, repeat=need.count)
    fits = [kinds for kinds in every if need.of(kinds) <= room]
    if found is None:
        assert not fits
    elif len(set(kept)) == len(kept):
        assert share(found) <= min(map(share, fits)) + 1e-12


def test_useful_micro_batches() -> None:
    assert useful(64, 2048) == [8, 4, 2, 1]
    assert useful(12, 2048) == [12, 6, 4, 3, 2, 1]  # 6 have too few tokens
    assert useful(4, 1024) == [4, 2, 1]
    assert useful(3, USEFUL_TOKENS * 2) == [1]
    assert useful(24, 4096, multiple=3) == [6, 3]
    assert useful(6, 16, multiple=6) == [6]


def test_time_weighs_small_micro_batches_against_recomputation() -> None:
    full, selective = share(("full",)), share(("selective",))
    assert time(16384) < time(8192) < time(16384, selective) < time(4096) < time(16384, full)
    assert share(("none", "full", "full", "none")) == full / 2
