"""Choices: what is chosen fits, is the fastest of what fits, and is said."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier.config.plan import Plan
from ranvier.memory.recompute_budget import RECOMPUTE_COST, recompute_fraction
from ranvier.planner import offload_search
from ranvier.planner.device_rates import DeviceRates, measure_rates
from ranvier.planner.memory import breakdown
from ranvier.planner.memory.breakdown import GIB, MemoryBreakdown
from ranvier.planner.memory.rank_memory import RankMemory
from ranvier.planner.model_spec import dense_decoder
from ranvier.planner.offload_search import (
    SEARCHABLE_SETTINGS,
    FitProblem,
    Placement,
    cheapest_changes,
    diff_options,
    enumerate_fits,
    explain_fit,
    fastest_fit,
    min_device_bytes,
)
from ranvier.planner.time.offload import (
    CONCURRENT_ADAM_SHARE,
    StepTraffic,
    StepWork,
    estimate_step_seconds,
    offloaded_update_seconds,
)

MIB = 2**20
LAYERS = 6
MODEL = dense_decoder(
    layers=LAYERS,
    embed=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp=14336,
    gated=True,
    vocab=65536,
)
"""A model of 1.85 billion parameters."""
RANK = RankMemory(MODEL, Plan(data=1, global_batch=8, micro_batch=8), seq=4096, itemsize=2)
SIZES = RANK.sizes
RATES = DeviceRates(flops=6e14, memory=4e12, to_device=5e10, to_host=5e10, adam=2e9)


CASE = FitProblem(
    (RANK,),
    (8, 4, 2, 1),
    RATES,
    device_limit=80 * GIB,
    host_limit=100 * GIB,
    given_placement=Placement(8, ("none",) * LAYERS, optimizer_step_on="auto"),
    open_settings=frozenset(SEARCHABLE_SETTINGS),
    library_bytes=100 * MIB,
)
STAGES = replace(
    CASE,
    stages=tuple(
        replace(
            RANK,
            plan=replace(RANK.plan, pipe=2, schedule="1f1b"),
            options=RANK.options._replace(simulates_schedule=False),
            stage=stage,
        )
        for stage in range(2)
    ),
)
"""The same in a pipeline of two stages."""


def at(gib: float, **changes: object) -> FitProblem:
    return replace(CASE, device_limit=int(gib * GIB), **changes)  # type: ignore[arg-type]


def test_more_memory_is_never_slower_and_less_leads_to_the_host() -> None:
    found = {gib: fastest_fit(enumerate_fits(at(gib))) for gib in (200, 80, 40, 24, 12, 8)}
    assert all(found.values())
    times = [fit.seconds.total for fit in found.values() if fit is not None]
    assert times == sorted(times)
    rich, poor = found[200], found[8]
    assert rich is not None and poor is not None
    assert rich.placement == replace(CASE.given_placement, optimizer_step_on="device"), (
        "all that is fastest fits"
    )
    assert poor.placement.optimizer_states in ("host", "split") and poor.host_bytes > 8 * GIB
    assert fastest_fit(enumerate_fits(at(1))) is None
    low = min_device_bytes(CASE)
    assert (
        fastest_fit(enumerate_fits(at((low + 1) / GIB))) is not None
        and fastest_fit(enumerate_fits(at((low - 2) / GIB))) is None
    )
    assert (
        fastest_fit(enumerate_fits(at(24, host_limit=GIB))) is None
        or fastest_fit(enumerate_fits(at(24, host_limit=GIB))) != found[24]
    )


@pytest.mark.full
@settings(max_examples=15)
@given(gib=st.floats(5.0, 120.0), host=st.integers(0, 60))
def test_what_is_chosen_fits_as_its_table_says(gib: float, host: int) -> None:
    case = at(gib, host_limit=host * GIB)
    found = fastest_fit(enumerate_fits(case))
    if found is None:
        return
    shown = offload_search.predict_breakdown(case, found.placement)
    assert shown.total_bytes == pytest.approx(found.device_bytes, abs=16)
    assert found.device_bytes <= case.device_limit and found.host_bytes <= case.host_limit
    assert sum(shown.host.values()) == found.host_bytes
    states = sum(column.get(name, 0) for column in (shown.device, shown.host) for name in STATES)
    assert states == pytest.approx(SIZES.state_bytes, abs=4)
    assert min(*shown.device.values(), *shown.host.values(), 0) == 0


STATES = ("master", "moments")


def test_what_is_given_is_kept() -> None:
    given = replace(
        CASE.given_placement,
        optimizer_states="host",
        optimizer_step_on="device",
        recompute_modes=("full",) * LAYERS,
    )
    case = at(
        200,
        given_placement=given,
        open_settings=frozenset({"micro_batch", "activation_offload_fraction"}),
    )
    found = fastest_fit(enumerate_fits(case))
    assert found is not None
    assert found.placement == replace(given, micro_batch=8)
    split = replace(given, optimizer_states="split")
    part = fastest_fit(
        enumerate_fits(
            at(
                20,
                given_placement=split,
                open_settings=frozenset({"optimizer_states_on_device_gib"}),
                micro_batches=(8,),
            )
        )
    )
    assert (
        part is not None
        and part.placement.optimizer_states == "split"
        and part.placement.optimizer_state_bytes_on_device > 0
    )
    assert part.device_bytes == pytest.approx(20 * GIB, abs=16)
    whole = fastest_fit(
        enumerate_fits(
            at(
                200,
                given_placement=split,
                open_settings=frozenset({"optimizer_states_on_device_gib"}),
            )
        )
    )
    assert (
        whole is not None
        and whole.placement.optimizer_state_bytes_on_device == SIZES.state_bytes
        and whole.host_bytes == 0
    )


def test_it_is_said_what_was_chosen_and_why() -> None:
    for gib in (200, 24):
        every = [*enumerate_fits(at(gib))]
        found = fastest_fit(every)
        assert found is not None
        lines = explain_fit(at(gib), found, every)
        assert 2 <= len(lines) <= 6
        assert lines[0].startswith(
            f"memory: {found.device_bytes / GIB:.3g} of {gib} GiB, peak in the "
        )
        assert lines[2].startswith("next best: micro-batch ") and "%)" in lines[2]
        assert ("bottleneck: none." in lines[-1]) == (gib == 200)
    assert (
        "bottleneck: device memory." in lines[-1]
        and "GiB of optimizer states on the host" in lines[0]
    )


def test_the_cheapest_changes_that_fit() -> None:
    now = replace(CASE.given_placement, optimizer_step_on="device")
    case = at(50)
    assert not list(enumerate_fits(replace(case, open_settings=frozenset(), micro_batches=(8,))))
    found = cheapest_changes(case, now)
    assert len(found) == 3
    times = [one.sort_key[0] for one in found]
    assert times == sorted(times)
    assert len({diff_options(now, one.placement) for one in found}) == 3
    for one in found:
        assert (
            1 <= len(diff_options(now, one.placement)) <= 2
            and one.device_bytes <= case.device_limit
        )
        assert one.seconds.total >= offload_search.predict_fit_seconds(case, now).total
    full = replace(now, recompute_modes=("full",) * LAYERS, micro_batch=2)
    assert diff_options(now, full) == ("--plan.micro-batch 2", "--plan.recompute full")
    assert not cheapest_changes(at(3), now)


def test_recomputation_is_the_least_that_fits() -> None:
    """Against all mixtures; those of neighbouring modes cost less than a block more."""
    case = replace(CASE, open_settings=frozenset({"recompute"}), micro_batches=(8,))
    every = [
        replace(CASE.given_placement, recompute_modes=kinds)
        for kinds in itertools.combinations_with_replacement([*RECOMPUTE_COST][::-1], LAYERS)
    ]
    sizes = {one: offload_search.stage_device_bytes(case, RANK, one) for one in every}
    low, high = min(sizes.values()), max(sizes.values())
    fractions = list[float]()
    for share in (0.1, 0.4, 0.7, 1.0):
        limit = low + round((high - low) * share)
        found = fastest_fit(enumerate_fits(replace(case, device_limit=limit)))
        assert found is not None and found.device_bytes <= limit
        fractions.append(recompute_fraction(found.placement.recompute_modes))
        least = min(recompute_fraction(p.recompute_modes) for p, n in sizes.items() if n <= limit)
        assert fractions[-1] < least + RECOMPUTE_COST["full"] / LAYERS
    assert fractions == sorted(fractions, reverse=True) and fractions[-1] == 0.0 < fractions[0]
    assert fastest_fit(enumerate_fits(replace(case, device_limit=low - 1))) is None


def test_each_stage_recomputes_what_it_must() -> None:
    case = replace(STAGES, open_settings=frozenset({"recompute"}), micro_batches=(1,))
    plain = replace(case.given_placement, micro_batch=1)
    needs = [offload_search.stage_device_bytes(case, stage, plain) for stage in case.stages]
    assert needs[0] > needs[1], "the first stage holds more micro-batches"
    limit = needs[0] - 2 * GIB
    found = fastest_fit(enumerate_fits(replace(case, device_limit=limit)))
    assert found is not None
    modes = found.placement.recompute_modes
    first, last = ([modes[i] for i in stage.block_indices] for stage in case.stages)
    assert set(first) != {"none"} and len(first) + len(last) == LAYERS
    assert set(last) == {"none"}
    for stage in case.stages:
        assert offload_search.stage_device_bytes(case, stage, found.placement) <= limit
    shown = offload_search.predict_breakdown(case, found.placement, 0)
    assert shown.total_bytes == pytest.approx(found.device_bytes, abs=16)
    few, many = (
        offload_search.predict_fit_seconds(STAGES, replace(plain, micro_batch=n)).compute
        for n in (8, 1)
    )
    assert few > 1.5 * many, "a single micro-batch leaves half of the pipeline idle"


def test_a_pipeline_fits_with_everything_open() -> None:
    for gib in (60, 20, 8):
        found = fastest_fit(enumerate_fits(replace(STAGES, device_limit=gib * GIB)))
        assert found is not None and found.device_bytes <= gib * GIB
        for stage in STAGES.stages:
            assert offload_search.stage_device_bytes(STAGES, stage, found.placement) <= gib * GIB
    assert found.placement.parameters == "host" and found.host_bytes > GIB
    low = min_device_bytes(STAGES)
    assert fastest_fit(enumerate_fits(replace(STAGES, device_limit=low))) is not None
    assert fastest_fit(enumerate_fits(replace(STAGES, device_limit=low - 2))) is None


# ---- cost -------------------------------------------------------------------------------

NOTHING = StepTraffic(0, 0, 0, 0, 0, 0, 0)
EVEN = DeviceRates(flops=100.0, memory=50.0, to_device=10.0, to_host=5.0, adam=4.0)


def test_time_of_a_step() -> None:
    """By hand; of 10^9 tokens a micro-batch nothing is lost."""
    work = StepWork(forward=1000, backward=2000, block_share=0.5, samples=4, seq=10**9)

    def parts(
        moved: StepTraffic, micro: int = 4, again: float = 0.0, cpu: bool = False
    ) -> list[float]:
        found = estimate_step_seconds(
            work, moved, EVEN, micro=micro, share=again, blocks=10, cpu=cpu
        )
        return [found.compute, found.recompute, found.update, found.waiting]

    near = pytest.approx
    assert parts(NOTHING) == near([120.0, 0.0, 0.0, 0.0], rel=1e-5)
    assert parts(NOTHING, 1, 1 / 3) == near([120.0, 20.0, 0.0, 0.0], rel=1e-5)
    assert parts(replace(NOTHING, saved_activations=50, device_states=100)) == near(
        [126.0, 0, 4.0, 0], rel=1e-5
    )
    # forward takes 40: an update of 20 hides but for its first tenth, one of 60 leaves 20 and more
    assert parts(replace(NOTHING, host_states=100))[3] == near(2.0)
    assert parts(replace(NOTHING, host_states=300))[3] == near(60 - 40 + 4, rel=1e-5)
    assert parts(replace(NOTHING, host_states=300), micro=1)[3] == near(60 - 10 + 1, rel=1e-5)
    cpu = replace(NOTHING, host_states=300, host_parameters=40)
    quick = replace(EVEN, adam=100.0)  # then the bottleneck is the transfer of the gradients
    assert (
        offloaded_update_seconds(cpu, quick, cpu=True) == near(16.0)
        and offloaded_update_seconds(cpu, EVEN, cpu=False) == 60.0
    )
    assert offloaded_update_seconds(cpu, EVEN, cpu=True) == near(
        40 / (CONCURRENT_ADAM_SHARE * EVEN.adam)
    )
    # weights come twice, gradients leave: 500 / 10 - 40 forward, 100 / 10 hidden in backward
    assert parts(replace(NOTHING, host_weights=500))[3] == near(10.0, rel=1e-5)
    assert parts(replace(NOTHING, host_gradients=500))[3] == near(20.0, rel=1e-5)
    assert parts(replace(NOTHING, host_activations=250))[3] == near(10.0, rel=1e-5)


def test_rates_are_measured_on_this_machine() -> None:
    import torch

    found = measure_rates(torch.device("cpu"), torch.float32)
    assert all(getattr(found, name) > 1e5 for name in found.__dataclass_fields__)


# ---- tables -----------------------------------------------------------------------------


def test_a_table_is_told_and_read_again() -> None:
    shown = offload_search.predict_breakdown(
        CASE, replace(CASE.given_placement, optimizer_states="host", optimizer_step_on="device")
    )
    assert (
        MemoryBreakdown.from_dict(shown.to_dict()) == shown
        and MemoryBreakdown.from_dict({}) is None
        and MemoryBreakdown.from_dict(3) is None
    )
    assert MemoryBreakdown.from_dict(
        {"device": {"weights": 1, "odd": 2, "logits": "x"}}
    ) == MemoryBreakdown({"weights": 1})
    assert shown.allocated_bytes == shown.total_bytes - shown.device["fragmentation"]
    assert shown.device["logits"] > 0 and "in the loss" in shown.where
    over = offload_search.predict_breakdown(
        replace(CASE, communicator_bytes=390 * MIB), CASE.given_placement
    )
    plain = offload_search.predict_breakdown(CASE, CASE.given_placement)
    assert (
        over.total_bytes - plain.total_bytes == 390 * MIB
        and over.allocated_bytes == plain.allocated_bytes
    )
    known = MemoryBreakdown(
        {"weights": shown.device["weights"], "activations": 2 * GIB}, {"master": GIB}
    )
    lines = breakdown.format_breakdown(shown, known)
    assert lines[0].split() == ["GiB", "device", "measured", "host", "measured"]
    (weights,) = [line for line in lines if line.startswith("weights")]
    assert weights.split()[1:] == ["3.438", "3.438", "-", "-"]
    (logits,) = [line for line in lines if line.startswith("logits")]
    assert logits.split()[2:] == ["·", "-", "-"], "only a prediction tells it apart"
    assert any(line.startswith("measured vs. predicted on the device: -") for line in lines)
    assert not any(line.startswith("reshard_after") for line in lines)
    assert breakdown.format_breakdown(shown)[0].split() == ["GiB", "device", "host"]
    assert recompute_fraction(CASE.given_placement.recompute_modes) == 0.0
