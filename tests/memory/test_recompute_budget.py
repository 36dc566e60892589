"""Budgets: what is chosen fits, costs least of all that fits, and more memory never costs more."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ranvier.memory.recompute_budget import (
    COST,
    USEFUL_TOKENS,
    Block,
    Need,
    Pass,
    assigned,
    between,
    estimated,
    least,
    share,
    time,
    useful,
    ways,
)

PASS = Pass(
    {"none": Block(100, 120, 110), "selective": Block(60, 120, 110), "full": Block(10, 120, 110)},
    enter=3,
    head=50,
    after=5,
    leave=9,
    gradient=7,
    rest=4,
)
SIMPLE = Need((PASS,), count=4, fixed=1000)

sizes = st.integers(0, 200)


@st.composite
def needs(draw: st.DrawFn) -> Need:
    """Any numbers; a block needs at least what it keeps."""
    passes, before = [], 0
    kept = {kind: draw(sizes) for kind in COST}
    for _ in range(draw(st.integers(1, 3))):
        blocks = {kind: Block(k, k + draw(sizes), k) for kind, k in kept.items()}
        numbers = {name: draw(sizes) for name in ("enter", "head", "after", "leave", "rest")}
        passes.append(Pass(blocks, gradient=draw(sizes), before=before, **numbers))
        before = passes[-1].gradient
    return Need(tuple(passes), count=draw(st.integers(1, 6)), fixed=draw(sizes))


def with_pass(need: Need, **changes: object) -> Need:
    return replace(need, passes=tuple(replace(one, **changes) for one in need.passes))  # type: ignore[arg-type]


def test_peak_of_a_step_is_at_the_end_of_forward_or_in_backward() -> None:
    keep = ("none",) * 4
    # the last block runs, then the one before it beside the gradient of the last, ...
    assert with_pass(SIMPLE, head=20).of(keep) == 1000 + 3 + 3 * 100 + 120 + 5
    assert SIMPLE.of(keep) == 1000 + 3 + 400 + 50
    # where little is kept, gradients are what grows: the peak is at the first block
    small = with_pass(SIMPLE, gradient=100)
    assert small.of(("full",) * 4) == 1000 + 3 + 120 + 5 + 3 * 100
    assert with_pass(small, leave=300).of(("full",) * 4) == 1000 + 3 + 5 + 4 * 100 + 300
    added = with_pass(SIMPLE, before=6)
    assert added.of(keep) == 1000 + 3 + 4 * 6 + 400 + 50
    assert replace(SIMPLE, publish=900).of(keep) == 1000 + 900 + 4 * 7 + 4


def test_what_waits_elsewhere_takes_no_room() -> None:
    keep, small = ("none",) * 4, with_pass(SIMPLE, head=0)

    def most(**how: float | bool) -> int:
        return max(peak.total for peak in small.peaks(keep, **how))  # type: ignore[arg-type]

    assert most() == 3 + 300 + 120 + 5
    # at the last block the one before has come back, of the others the half is there
    assert small.sent(0.375) == 0.5, "of three blocks of four"
    assert most(away=0.375) == 3 + 50 + 50 + 100 + 120 + 5
    assert most(away=1.0) == 3 + 100 + 120 + 5 + 2 * 7
    heavy = with_pass(small, gradient=1000, blocks={"none": Block(1, 1001, 2)})
    found = [max(p.total for p in heavy.peaks(keep, stowed=stowed)) for stowed in (False, True)]
    assert found == [3 + 5 + 4 * 1000 + 9, 3 + 2 + 1001 + 5 + 1000]
    # an update that goes on beside the next forward pass: gradients go as blocks are used
    late = with_pass(heavy, blocks={"none": Block(1, 1001, 5000)}, leave=0)
    wait = [max(p.total for p in late.peaks(keep, waits=waits)) for waits in (False, True)]
    assert wait == [3 + 1001 + 5 + 3 * 1000, 3 + 5000 + 3 * 1000 + 4]


@given(need=needs(), away=st.sampled_from((0.0, 0.5, 1.0)))
def test_ends_of_kinds_tell_the_peak(need: Need, away: float) -> None:
    """Against the sum over all blocks, one by one."""
    for kinds in ways(need)[::3]:
        want = 0.0
        for one in need.passes:
            kept = [one.blocks[kind].kept for kind in kinds]
            stays = [k * (1.0 - need.sent(away)) for k in kept[:-1]] + kept[-1:]
            want = max(want, one.enter + sum(stays) + one.head + need.count * one.before)
            for i, kind in enumerate(kinds):
                back = sum(stays[:i]) + (kept[i - 1] - stays[i - 1] if i else 0.0)
                grads = (need.count - 1 - i) * one.gradient + (i + 1) * one.before
                want = max(want, one.enter + back + one.blocks[kind].peak + one.after + grads)
            want = max(want, one.enter + one.after + need.count * one.gradient + one.leave)
        last = need.passes[-1]
        want = max(want, need.count * last.gradient + last.rest)
        assert abs(max(p.total for p in need.peaks(kinds, away=away)) - want) <= 1


def test_passes_between_and_below_what_was_measured() -> None:
    double = replace(PASS, blocks={kind: Block(200, 233, 220) for kind in COST}, enter=6)
    middle = between(PASS, double, 0.5)
    assert middle.blocks["none"] == Block(150, 176, 165)
    assert (middle.enter, middle.head) == (4, 50)
    only = replace(PASS, blocks={"none": PASS.blocks["none"]})
    half = estimated(only, only, 0.5, output=20)
    assert half.blocks["none"] == Block(50, round(7 + 113 / 2), 55)
    assert half.blocks["full"] == Block(10, half.blocks["none"].peak + 10, 55)
    assert (half.enter, half.head, half.gradient) == (1, 5 + 22, 7)


def test_memory_is_used_for_what_costs_most_again() -> None:
    assert assigned(SIMPLE, SIMPLE.of(("none",) * 4)) == ("none",) * 4
    assert assigned(SIMPLE, 10**6) == ("none",) * 4
    assert assigned(SIMPLE, 1400) == ("selective", "selective", "none", "none")
    assert assigned(SIMPLE, 1240) == ("full", "full", "selective", "none")
    assert assigned(SIMPLE, least(SIMPLE) - 1) is None


def test_a_kind_that_keeps_no_less_than_a_cheaper_one_is_left_out() -> None:
    need = with_pass(SIMPLE, blocks={**PASS.blocks, "selective": Block(100, 120)})
    found = {assigned(need, room) for room in range(least(need), 1500)}
    assert not any("selective" in kinds for kinds in found if kinds is not None)
    assert len(found) > 2
    one = with_pass(SIMPLE, blocks={"selective": Block(100, 120)})
    assert ways(one) == [("selective",) * 4]


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
    first = need.passes[0]
    kept = sorted((block.kept for block in first.blocks.values()), reverse=True)
    peak = max(block.peak for block in first.blocks.values())
    ordered = {kind: Block(k, peak) for kind, k in zip(COST, kept, strict=True)}
    need = replace(need, passes=(replace(first, blocks=ordered, head=0),))
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
