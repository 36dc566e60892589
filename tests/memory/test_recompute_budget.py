"""Budgets: what is chosen fits, costs least of all that fits, and more memory never costs more."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ranvier.memory.recompute_budget import (
    RECOMPUTE_COST,
    USEFUL_TOKENS,
    BlockMemory,
    PassMemory,
    StepMemory,
    candidate_micro_batches,
    candidate_modes,
    choose_recompute_modes,
    estimate_pass,
    interpolate_pass,
    min_step_bytes,
    recompute_fraction,
    relative_token_time,
)

PASS = PassMemory(
    {
        "none": BlockMemory(100, 120, 110),
        "selective": BlockMemory(60, 120, 110),
        "full": BlockMemory(10, 120, 110),
    },
    input_bytes=3,
    head_peak=50,
    after_head=5,
    embedding_peak=9,
    block_grad=7,
    outside_grad=4,
)
SIMPLE = StepMemory((PASS,), num_blocks=4, fixed_bytes=1000)

sizes = st.integers(0, 200)


@st.composite
def needs(draw: st.DrawFn) -> StepMemory:
    """Any numbers; a block needs at least what it keeps."""
    passes, before = [], 0
    kept = {kind: draw(sizes) for kind in RECOMPUTE_COST}
    for _ in range(draw(st.integers(1, 3))):
        blocks = {kind: BlockMemory(k, k + draw(sizes), k) for kind, k in kept.items()}
        numbers = {
            name: draw(sizes)
            for name in ("input_bytes", "head_peak", "after_head", "embedding_peak", "outside_grad")
        }
        passes.append(
            PassMemory(blocks, block_grad=draw(sizes), earlier_block_grad=before, **numbers)
        )
        before = passes[-1].block_grad
    return StepMemory(tuple(passes), num_blocks=draw(st.integers(1, 6)), fixed_bytes=draw(sizes))


def with_pass(need: StepMemory, **changes: object) -> StepMemory:
    return replace(need, passes=tuple(replace(one, **changes) for one in need.passes))  # type: ignore[arg-type]


def test_peak_of_a_step_is_at_the_end_of_forward_or_in_backward() -> None:
    keep = ("none",) * 4
    # the last block runs, then the one before it beside the gradient of the last, ...
    assert with_pass(SIMPLE, head_peak=20).peak_bytes(keep) == 1000 + 3 + 3 * 100 + 120 + 5
    assert SIMPLE.peak_bytes(keep) == 1000 + 3 + 400 + 50
    # where little is kept, gradients are what grows: the peak is at the first block
    small = with_pass(SIMPLE, block_grad=100)
    assert small.peak_bytes(("full",) * 4) == 1000 + 3 + 120 + 5 + 3 * 100
    assert (
        with_pass(small, embedding_peak=300).peak_bytes(("full",) * 4)
        == 1000 + 3 + 5 + 4 * 100 + 300
    )
    added = with_pass(SIMPLE, earlier_block_grad=6)
    assert added.peak_bytes(keep) == 1000 + 3 + 4 * 6 + 400 + 50
    assert replace(SIMPLE, weight_gather_bytes=900).peak_bytes(keep) == 1000 + 900 + 4 * 7 + 4


def test_what_waits_elsewhere_takes_no_room() -> None:
    keep, small = ("none",) * 4, with_pass(SIMPLE, head_peak=0)

    def most(**how: float | bool) -> int:
        return max(peak.total_bytes for peak in small.memory_peaks(keep, **how))  # type: ignore[arg-type]

    assert most() == 3 + 300 + 120 + 5
    # at the last block the one before has come back, of the others the half is there
    assert small.offloaded_fraction(0.375) == 0.5, "of three blocks of four"
    assert most(away=0.375) == 3 + 50 + 50 + 100 + 120 + 5
    assert most(away=1.0) == 3 + 100 + 120 + 5 + 2 * 7
    heavy = with_pass(small, block_grad=1000, blocks={"none": BlockMemory(1, 1001, 2)})
    found = [
        max(p.total_bytes for p in heavy.memory_peaks(keep, stowed=stowed))
        for stowed in (False, True)
    ]
    assert found == [3 + 5 + 4 * 1000 + 9, 3 + 2 + 1001 + 5 + 1000]
    # an update that goes on beside the next forward pass: gradients go as blocks are used
    late = with_pass(heavy, blocks={"none": BlockMemory(1, 1001, 5000)}, embedding_peak=0)
    wait = [
        max(p.total_bytes for p in late.memory_peaks(keep, waits=waits)) for waits in (False, True)
    ]
    assert wait == [3 + 1001 + 5 + 3 * 1000, 3 + 5000 + 3 * 1000 + 4]


@given(need=needs(), away=st.sampled_from((0.0, 0.5, 1.0)))
def test_ends_of_kinds_tell_the_peak(need: StepMemory, away: float) -> None:
    """Against the sum over all blocks, one by one."""
    for kinds in candidate_modes(need)[::3]:
        want = 0.0
        for one in need.passes:
            kept = [one.blocks[kind].saved_bytes for kind in kinds]
            stays = [k * (1.0 - need.offloaded_fraction(away)) for k in kept[:-1]] + kept[-1:]
            want = max(
                want,
                one.input_bytes
                + sum(stays)
                + one.head_peak
                + need.num_blocks * one.earlier_block_grad,
            )
            for i, kind in enumerate(kinds):
                back = sum(stays[:i]) + (kept[i - 1] - stays[i - 1] if i else 0.0)
                grads = (need.num_blocks - 1 - i) * one.block_grad + (
                    i + 1
                ) * one.earlier_block_grad
                want = max(
                    want,
                    one.input_bytes
                    + back
                    + one.blocks[kind].backward_peak
                    + one.after_head
                    + grads,
                )
            want = max(
                want,
                one.input_bytes
                + one.after_head
                + need.num_blocks * one.block_grad
                + one.embedding_peak,
            )
        last = need.passes[-1]
        want = max(want, need.num_blocks * last.block_grad + last.outside_grad)
        assert abs(max(p.total_bytes for p in need.memory_peaks(kinds, away=away)) - want) <= 1


def test_passes_between_and_below_what_was_measured() -> None:
    double = replace(
        PASS, blocks={kind: BlockMemory(200, 233, 220) for kind in RECOMPUTE_COST}, input_bytes=6
    )
    middle = interpolate_pass(PASS, double, 0.5)
    assert middle.blocks["none"] == BlockMemory(150, 176, 165)
    assert (middle.input_bytes, middle.head_peak) == (4, 50)
    only = replace(PASS, blocks={"none": PASS.blocks["none"]})
    half = estimate_pass(only, only, 0.5, output=20)
    assert half.blocks["none"] == BlockMemory(50, round(7 + 113 / 2), 55)
    assert half.blocks["full"] == BlockMemory(10, half.blocks["none"].backward_peak + 10, 55)
    assert (half.input_bytes, half.head_peak, half.block_grad) == (1, 5 + 22, 7)


def test_memory_is_used_for_what_costs_most_again() -> None:
    assert choose_recompute_modes(SIMPLE, SIMPLE.peak_bytes(("none",) * 4)) == ("none",) * 4
    assert choose_recompute_modes(SIMPLE, 10**6) == ("none",) * 4
    assert choose_recompute_modes(SIMPLE, 1400) == ("selective", "selective", "none", "none")
    assert choose_recompute_modes(SIMPLE, 1240) == ("full", "full", "selective", "none")
    assert choose_recompute_modes(SIMPLE, min_step_bytes(SIMPLE) - 1) is None


def test_a_kind_that_keeps_no_less_than_a_cheaper_one_is_left_out() -> None:
    need = with_pass(SIMPLE, blocks={**PASS.blocks, "selective": BlockMemory(100, 120)})
    found = {choose_recompute_modes(need, room) for room in range(min_step_bytes(need), 1500)}
    assert not any("selective" in kinds for kinds in found if kinds is not None)
    assert len(found) > 2
    one = with_pass(SIMPLE, blocks={"selective": BlockMemory(100, 120)})
    assert candidate_modes(one) == [("selective",) * 4]


@given(need=needs(), room=st.integers(0, 3000), more=st.integers(0, 500))
def test_what_is_chosen_fits_and_more_memory_costs_no_more(
    need: StepMemory, room: int, more: int
) -> None:
    kinds, richer = choose_recompute_modes(need, room), choose_recompute_modes(need, room + more)
    if kinds is None:
        assert room < min_step_bytes(need)
        return
    assert need.peak_bytes(kinds) <= room
    assert richer is not None and recompute_fraction(richer) <= recompute_fraction(kinds)


@given(need=needs(), room=st.integers(0, 3000))
def test_nothing_cheaper_fits(need: StepMemory, room: int) -> None:
    """Against all assignments, where kinds are what they are said to be."""
    first = need.passes[0]
    kept = sorted((block.saved_bytes for block in first.blocks.values()), reverse=True)
    peak = max(block.backward_peak for block in first.blocks.values())
    ordered = {kind: BlockMemory(k, peak) for kind, k in zip(RECOMPUTE_COST, kept, strict=True)}
    need = replace(need, passes=(replace(first, blocks=ordered, head_peak=0),))
    found = choose_recompute_modes(need, room)
    every = itertools.product(RECOMPUTE_COST, repeat=need.num_blocks)
    fits = [kinds for kinds in every if need.peak_bytes(kinds) <= room]
    if found is None:
        assert not fits
    elif len(set(kept)) == len(kept):
        assert recompute_fraction(found) <= min(map(recompute_fraction, fits)) + 1e-12


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
