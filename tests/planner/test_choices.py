"""Choices: what is chosen fits, is the fastest of what fits, and is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier.memory.recompute_budget import Block, Kind, Need, Pass, share
from ranvier.planner import offload_search
from ranvier.planner.device_rates import Rates, measured
from ranvier.planner.memory import breakdown
from ranvier.planner.memory.breakdown import GIB, Table
from ranvier.planner.memory.measured_states import Sizes
from ranvier.planner.offload_search import (
    OPEN,
    Case,
    Choice,
    best,
    cheapest,
    fits,
    least,
    options,
    said,
)
from ranvier.planner.time.offload import BESIDE, Moved, Work, seconds, streamed

MIB = 2**20
LAYERS = 6
SIZES = Sizes(
    block=341 * MIB,
    head=512 * MIB,
    others=512 * MIB,
    still=1 * MIB,
    count=LAYERS,
    master=6 * GIB,
    moments=12 * GIB,
    small=2 * MIB,
    ring=384 * MIB,
    wide_ring=576 * MIB,
    gathered=0,
    communication=0,
    returned=5 * GIB,
    publish=0,
    trained=1536 * MIB,
)
"""A model of 1.6 billion parameters in bf16."""
RATES = Rates(flops=6e14, memory=4e12, to_device=5e10, to_host=5e10, adam=2e9)


def need(samples: int, passes: int) -> Need:
    """A step in micro-batches of 4096 tokens a sample."""
    kept = {"none": 560 * MIB, "selective": 360 * MIB, "full": 16 * MIB}
    grad, made, before = 128 * MIB, list[Pass](), 0
    for i in range(passes):
        after = grad if i == 0 else 2 * grad
        blocks: dict[Kind, Block] = {
            kind: Block(k * samples, 700 * MIB * samples + after, 600 * MIB * samples)
            for kind, k in kept.items()  # type: ignore[misc]
        }
        made.append(
            Pass(
                blocks,
                enter=16 * MIB * samples + (GIB if i else 0),
                head=GIB + 600 * MIB * samples,
                after=GIB,
                leave=512 * MIB,
                gradient=after,
                before=before,
                rest=GIB,
                outside=GIB if i else 0,
            )
        )
        before = after
    return Need(tuple(made), LAYERS)


CASE = Case(
    {samples: need(samples, min(8 // samples, 3)) for samples in (8, 4, 2, 1)},
    SIZES,
    Work(forward=15 * 10**12, backward=30 * 10**12, blocks=0.8, samples=8, seq=4096),
    RATES,
    limit=80 * GIB,
    host=100 * GIB,
    given=Choice(8, ("none",) * LAYERS, update="auto"),
    open=frozenset(OPEN),
    libraries=100 * MIB,
    logits=dict.fromkeys((8, 4, 2, 1), 512 * MIB),
)


def at(gib: float, **changes: object) -> Case:
    return replace(CASE, limit=int(gib * GIB), **changes)  # type: ignore[arg-type]


def test_more_memory_is_never_slower_and_less_leads_to_the_host() -> None:
    found = {gib: best(fits(at(gib))) for gib in (200, 80, 40, 24, 12, 8)}
    assert all(found.values())
    times = [fit.seconds.total for fit in found.values() if fit is not None]
    assert times == sorted(times)
    rich, poor = found[200], found[8]
    assert rich is not None and poor is not None
    assert rich.choice == replace(CASE.given, update="device"), "all that is fastest fits"
    assert poor.choice.states in ("host", "split") and poor.host > 8 * GIB
    assert best(fits(at(1))) is None
    low = least(CASE)
    assert best(fits(at((low + 1) / GIB))) is not None and best(fits(at((low - 2) / GIB))) is None
    assert best(fits(at(24, host=GIB))) is None or best(fits(at(24, host=GIB))) != found[24]


@settings(max_examples=15)
@given(gib=st.floats(5.0, 120.0), host=st.integers(0, 60))
def test_what_is_chosen_fits_as_its_table_says(gib: float, host: int) -> None:
    case = at(gib, host=host * GIB)
    found = best(fits(case))
    if found is None:
        return
    shown = offload_search.table(case, found.choice)
    assert shown.total == pytest.approx(found.device, abs=16)
    assert found.device <= case.limit and found.host <= case.host
    assert sum(shown.host.values()) == found.host
    states = sum(column.get(name, 0) for column in (shown.device, shown.host) for name in STATES)
    assert states == pytest.approx(SIZES.states, abs=4)
    assert min(*shown.device.values(), *shown.host.values(), 0) == 0


STATES = ("master", "moments")


def test_what_is_given_is_kept() -> None:
    given = replace(CASE.given, states="host", update="device", kinds=("full",) * LAYERS)
    case = at(200, given=given, open=frozenset({"micro_batch", "activations"}))
    found = best(fits(case))
    assert found is not None
    assert found.choice == replace(given, micro_batch=8)
    split = replace(given, states="split")
    one = {8: CASE.needs[8]}
    part = best(fits(at(20, given=split, open=frozenset({"resident"}), needs=one)))
    assert part is not None and part.choice.states == "split" and part.choice.resident > 0
    assert part.device == pytest.approx(20 * GIB, abs=16)
    whole = best(fits(at(200, given=split, open=frozenset({"resident"}))))
    assert whole is not None and whole.choice.resident == SIZES.states and whole.host == 0


def test_it_is_said_what_was_chosen_and_why() -> None:
    for gib in (200, 24):
        every = [*fits(at(gib))]
        found = best(every)
        assert found is not None
        lines = said(at(gib), found, every)
        assert 2 <= len(lines) <= 6
        assert lines[0].startswith(f"memory: {found.device / GIB:.3g} of {gib} GiB, most in the ")
        assert lines[2].startswith("next best: micro-batch ") and "%)" in lines[2]
        assert ("nothing binds" in lines[-1]) == (gib == 200)
    assert "what binds is the device" in lines[-1] and "GiB of states on the host" in lines[0]


def test_the_cheapest_changes_that_fit() -> None:
    now = replace(CASE.given, update="device")
    case = at(50)
    assert not list(fits(replace(case, open=frozenset(), needs={8: CASE.needs[8]})))
    found = cheapest(case, now)
    assert len(found) == 3
    times = [one.key[0] for one in found]
    assert times == sorted(times)
    assert len({options(now, one.choice) for one in found}) == 3
    for one in found:
        assert 1 <= len(options(now, one.choice)) <= 2 and one.device <= case.limit
        assert one.seconds.total >= offload_search.seconds(case, now).total
    full = replace(now, kinds=("full",) * LAYERS, micro_batch=2)
    assert options(now, full) == ("--plan.micro-batch 2", "--plan.recompute full")
    assert not cheapest(at(3), now)


# ---- cost -------------------------------------------------------------------------------

NOTHING = Moved(0, 0, 0, 0, 0, 0, 0)
EVEN = Rates(flops=100.0, memory=50.0, to_device=10.0, to_host=5.0, adam=4.0)


def test_time_of_a_step() -> None:
    """By hand; of 10^9 tokens a micro-batch nothing is lost."""
    work = Work(forward=1000, backward=2000, blocks=0.5, samples=4, seq=10**9)

    def parts(moved: Moved, micro: int = 4, again: float = 0.0, cpu: bool = False) -> list[float]:
        found = seconds(work, moved, EVEN, micro=micro, share=again, blocks=10, cpu=cpu)
        return [found.compute, found.again, found.update, found.waiting]

    near = pytest.approx
    assert parts(NOTHING) == near([120.0, 0.0, 0.0, 0.0], rel=1e-5)
    assert parts(NOTHING, 1, 1 / 3) == near([120.0, 20.0, 0.0, 0.0], rel=1e-5)
    assert parts(replace(NOTHING, kept=50, states=100)) == near([126.0, 0, 4.0, 0], rel=1e-5)
    # forward takes 40: an update of 20 hides but for its first tenth, one of 60 leaves 20 and more
    assert parts(replace(NOTHING, away=100))[3] == near(2.0)
    assert parts(replace(NOTHING, away=300))[3] == near(60 - 40 + 4, rel=1e-5)
    assert parts(replace(NOTHING, away=300), micro=1)[3] == near(60 - 10 + 1, rel=1e-5)
    cpu = replace(NOTHING, away=300, numbers=40)
    quick = replace(EVEN, adam=100.0)  # then what binds is the way of the gradients
    assert streamed(cpu, quick, cpu=True) == near(16.0) and streamed(cpu, EVEN, cpu=False) == 60.0
    assert streamed(cpu, EVEN, cpu=True) == near(40 / (BESIDE * EVEN.adam))
    # weights come twice, gradients leave: 500 / 10 - 40 forward, 100 / 10 hidden in backward
    assert parts(replace(NOTHING, weights=500))[3] == near(10.0, rel=1e-5)
    assert parts(replace(NOTHING, gradients=500))[3] == near(20.0, rel=1e-5)
    assert parts(replace(NOTHING, activations=250))[3] == near(10.0, rel=1e-5)


def test_rates_are_measured_on_this_machine() -> None:
    import torch

    found = measured(torch.device("cpu"), torch.float32)
    assert all(getattr(found, name) > 1e5 for name in found.__dataclass_fields__)


# ---- tables -----------------------------------------------------------------------------


def test_a_table_is_told_and_read_again() -> None:
    shown = offload_search.table(CASE, replace(CASE.given, states="host", update="device"))
    assert Table.read(shown.facts()) == shown and Table.read({}) is None and Table.read(3) is None
    assert Table.read({"device": {"weights": 1, "odd": 2, "logits": "x"}}) == Table({"weights": 1})
    assert shown.allocated == shown.total - shown.device["fragmentation"]
    assert shown.device["logits"] == 512 * MIB and "in the loss" in shown.where
    over = offload_search.table(replace(CASE, communicators=390 * MIB), CASE.given)
    plain = offload_search.table(CASE, CASE.given)
    assert over.total - plain.total == 390 * MIB and over.allocated == plain.allocated
    known = Table({"weights": shown.device["weights"], "activations": 2 * GIB}, {"master": GIB})
    lines = breakdown.lines(shown, known)
    assert lines[0].split() == ["GiB", "device", "measured", "host", "measured"]
    (weights,) = [line for line in lines if line.startswith("weights")]
    assert weights.split()[1:] == ["2.999", "2.999", "-", "-"]
    (logits,) = [line for line in lines if line.startswith("logits")]
    assert logits.split()[1:] == ["0.500", "·", "-", "-"], "only a prediction tells it apart"
    assert any(line.startswith("measured / predicted on the device: 0.") for line in lines)
    assert not any(line.startswith("gathered") for line in lines)
    assert breakdown.lines(shown)[0].split() == ["GiB", "device", "host"]
    assert share(CASE.given.kinds) == 0.0
