"""What a machine is measured to do, and what the planner makes of ranks that share its cores."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from machines import machine
from pool import Pool
from ranvier.comm import bandwidth as rates
from ranvier.config.plan import Plan
from ranvier.config.run import RunConfig
from ranvier.config.sections import CommConfig
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.planner import cluster, request
from ranvier.planner.algorithm_choice import restrict_algorithms
from ranvier.planner.cluster import Cluster, CollectiveTiming, MatmulRate, MeasuredRate
from ranvier.planner.frameworks import RANVIER
from ranvier.planner.microbenchmarks import BenchmarkShapes, Microbenchmark
from ranvier.planner.model_spec import load_shipped_spec
from ranvier.planner.predict import Candidate, Workload, predict_step
from ranvier.planner.time import shared_cores
from ranvier.planner.time.compute import ComputeContext, Fp8Scaling, block_times
from ranvier.planner.time.links import RankGroup, collective_seconds
from ranvier.tools import benchmark_cluster, calibrate, local_cluster

CPU = torch.device("cpu")
TINY = BenchmarkShapes(
    ((8, 6, 4),), ((1, 8, 2, 1, 4),), copy_bytes=4096, update_parameters=64, min_seconds=1e-4
)


def seconds(made: Cluster, **degrees: Any) -> dict[str, float]:
    """The parts of a step of the default job."""
    run = RunConfig(plan=Plan(**{"data": 1, **degrees}))
    plan = run.check_and_resolve(run.plan.world_size).plan
    job = Workload(
        load_shipped_spec("tiny"),
        run.data.seq_len,
        plan.global_batch,
        dtype="fp32",
        packs_documents=True,
    )
    placed = replace(made, per_node=plan.world_size)
    return dict(
        predict_step(job, Candidate(plan, axis_order=plan.axis_order), placed).seconds_by_part
    )


def test_a_gauge_fills_all_rows_of_a_device() -> None:
    """Each product has the shape of its kind, and no number is none."""
    rows = Microbenchmark(CPU, shapes=TINY).run_all()
    products = {(r.kind, r.m, r.n, r.k) for r in rows if isinstance(r, MatmulRate)}
    assert products == {("y", 8, 6, 4), ("dx", 8, 4, 6), ("dw", 6, 4, 8)}
    kinds = {row.kind for row in rows if isinstance(row, MeasuredRate)}
    assert kinds == {"launch", "pair", "memory", "between", "update", "norm"}
    numbers = [
        getattr(row, name)
        for row in rows
        for name in benchmark_cluster.AVERAGED_FIELDS
        if hasattr(row, name)
    ]
    assert len(numbers) == 3 + 2 + 6 and min(numbers) > 0.0


def test_a_cluster_of_rows_is_written_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANVIER_CACHE", str(tmp_path))
    assert cluster.load_measured_cluster() is None
    made = machine()
    cluster.write_cluster(made, cluster.measured_cluster_path("cpu"))
    read = cluster.load_measured_cluster("cpu")
    assert read is not None and cluster.load_measured_cluster("another") is None
    assert read.device.products == made.device.products
    assert [round(row.value, 9) for row in read.device.rates] == [
        round(row.value, 9) for row in made.device.rates
    ]
    assert read.collectives == made.collectives and read.cores == 2


def _timed(grid: Grid, op: str) -> tuple[float, float]:
    found = rates.measure_collective(op, grid.axis("data"), CPU, large=2**16, calls=2)
    return found.latency, found.bandwidth


def test_every_collective_is_measured(pool: Pool) -> None:
    for op in rates.MEASURED_OPS:
        for latency, bandwidth in pool.on_grid({"data": 2}, _timed, op):
            assert 0.0 < latency < 10.0 and 0.0 < bandwidth < 1e12, op


def test_a_ring_sends_what_it_must() -> None:
    """all-gather and reduce-scatter (g-1)/g of the whole, all-reduce twice that."""
    assert (
        rates.wire_bytes("all_gather", 4, 100.0)
        == rates.wire_bytes("reduce_scatter", 4, 100.0)
        == 75.0
    )
    assert rates.wire_bytes("all_reduce", 4, 100.0) == 150.0
    assert rates.wire_bytes("send", 2, 100.0) == 100.0


# ---- ranks that share cores -------------------------------------------------------------


def test_ranks_that_share_cores_save_nothing() -> None:
    """Twice the ranks on the same cores take as long for the products, and talk besides."""
    two, eight = (seconds(machine(), data=n) for n in (2, 8))
    assert sum(eight.values()) > sum(two.values())
    many = seconds(machine(cores=8), data=8)
    assert many["compute"] < 0.5 * two["compute"]


def test_each_call_of_a_layout_has_its_latency() -> None:
    """row=2: 44 gathers and scatters and 4 sums a step, as the trace of a run counts them."""
    slow, fast = (seconds(machine(latency=x), row=2) for x in (2e-3, 1e-3))
    assert sum(slow.values()) - sum(fast.values()) == pytest.approx(48e-3, rel=0.05)


def test_ranks_without_a_core_are_waited_for() -> None:
    """row=4, 52 calls, on two cores: each a slice, twice the shortest; on four cores none."""
    talk = {cores: seconds(machine(cores=cores), row=4)["row"] for cores in (2, 4)}
    assert talk[2] - talk[4] == pytest.approx(52 * 2 * shared_cores.SCHEDULER_SLICE, rel=0.05)


def test_several_rounds_are_one_measurement() -> None:
    rows = [MeasuredRate("memory", 2.0, 4), MeasuredRate("memory", 8.0, 4)]
    assert benchmark_cluster._average_rounds(rows) == MeasuredRate("memory", pytest.approx(4.0), 4)  # type: ignore[arg-type]
    assert benchmark_cluster._average_rounds(rows[:1]) is rows[0]


def test_a_bubble_costs_only_idle_cores() -> None:
    assert seconds(machine(), pipe=2, micro_batch=8)["bubble"] > 0.0
    assert seconds(machine(), pipe=2, data=4, micro_batch=1)["bubble"] == 0.0


def test_what_is_computed_again_costs() -> None:
    parts = {kind: seconds(machine(), data=2, recompute=kind) for kind in ("none", "full")}
    assert parts["none"]["recompute"] == 0.0
    assert 0.2 < parts["full"]["recompute"] / parts["full"]["compute"] < 0.6


def test_a_moment_is_enough_to_guess_a_host() -> None:
    made = benchmark_cluster.estimate_cluster(4)
    assert made.per_node == 4 and made.cores >= 1 and "estimated" in made.source
    assert {row.size for row in made.collectives} == {2, 4}
    # Runs without timings take shared memory, which is faster; the link is that of Gloo.
    by_name = {
        row.algorithm: row for row in made.collectives if (row.op, row.size) == ("all_gather", 4)
    }
    native, shared = by_name["native"], by_name["shared_memory"]
    assert shared.latency < native.latency and shared.bandwidth > native.bandwidth
    assert made.link.bandwidth == native.bandwidth
    assert sum(seconds(made, data=4).values()) > 0.0
    assert shared_cores.PYTHON_OVERHEAD > 1.0


def _run_of(algorithm: str) -> RunConfig:
    run = RunConfig(plan=Plan(data=2), comm=CommConfig(algorithm=algorithm))
    return replace(run, train=replace(run.train, device="cpu", dtype="fp32")).check_and_resolve(2)


def test_a_run_is_predicted_with_the_algorithms_that_it_may_take() -> None:
    """Shared memory is five times as fast as Gloo, the ring half as fast."""
    base = machine()
    timings = [
        CollectiveTiming(op, name, 2, 1, n, factor * (1e-3 + 1e-9 * n))
        for op in ("all_gather", "reduce_scatter", "all_reduce")
        for name, factor in (("native", 1.0), ("shared_memory", 0.2), ("ring", 2.0))
        for n in (4**i for i in range(5, 14))
    ]
    timed = replace(base, timings=tuple(timings))
    rows = [
        replace(row, algorithm="shared_memory", latency=row.latency / 5) for row in base.collectives
    ]
    estimated = replace(base, collectives=(*base.collectives, *rows))
    plain = local_cluster.predict_run(_run_of("auto"), base).seconds_by_part["data"]
    for made in (timed, estimated):
        parts = {
            name: local_cluster.predict_run(_run_of(name), made).seconds_by_part["data"]
            for name in ("auto", "native", "shared_memory", "ring", "data=ring,native")
        }
        assert parts["auto"] < 0.7 * plain and parts["shared_memory"] == parts["auto"]
        assert parts["native"] == parts["ring"] == parts["data=ring,native"] == plain


def test_a_search_prices_the_algorithms_that_a_run_may_take() -> None:
    made = replace(
        machine(),
        timings=(
            CollectiveTiming("all_gather", "native", 2, 1, 2**20, 1.0),
            CollectiveTiming("all_gather", "shared_memory", 2, 1, 2**20, 0.5),
        ),
    )
    for name, count in (("auto", 2), ("native", 1), ("row=shared_memory,native", 2)):
        wish = request.build_request(_run_of(name), made, frozenset())
        assert len(wish.cluster.timings) == count


# ---- a run folded back ------------------------------------------------------------------


def _run_folder(folder: Path, run: RunConfig, step: float, exposed: float) -> Path:
    from ranvier.config.run import to_toml

    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(run))
    row = {"step_seconds": step, "exposed_communication_seconds": exposed}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(8)))
    return folder


def test_a_run_brings_the_cluster_nearer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine that is half as fast as its file: after one run predictions are right."""
    run = RunConfig(plan=Plan(data=2))
    run = replace(run, train=replace(run.train, device="cpu", dtype="fp32")).check_and_resolve(2)
    made, path = machine(), tmp_path / "here.toml"
    cluster.write_cluster(made, path)
    parts = seconds(made, data=2)
    folder = _run_folder(tmp_path / "run", run, 2.0 * sum(parts.values()), 2.0 * parts["data"])
    assert calibrate.calibrate_cluster(folder, str(path)) == 0
    said = capsys.readouterr().out
    assert "before" in said and "(-50" in said
    after = sum(seconds(cluster.read_cluster(path), data=2).values())
    assert after == pytest.approx(2.0 * sum(parts.values()), rel=0.02)


@pytest.mark.parametrize("own_row", [False, True])
def test_calls_are_compared_with_the_algorithm_that_they_took(own_row: bool) -> None:
    """A run that takes twice as long as its algorithm, which is four times as fast as native."""
    made = machine()
    native = next(row for row in made.collectives if (row.op, row.size) == ("all_gather", 2))
    if own_row:
        fast = replace(
            native,
            algorithm="shared_memory",
            latency=native.latency / 4,
            bandwidth=native.bandwidth * 4,
        )
        made = replace(made, collectives=(*made.collectives, fast))
    timings = [
        CollectiveTiming("all_gather", name, 2, 1, n, factor * (1e-4 + 1e-9 * n))
        for name, factor in (("native", 1.0), ("shared_memory", 0.25))
        for n in (4**i for i in range(5, 14))
    ]
    made = replace(made, per_node=2, timings=tuple(timings))
    run = RunConfig(plan=Plan(data=2))
    run = replace(run, train=replace(run.train, device="cpu", dtype="fp32")).check_and_resolve(2)
    pair = RankGroup(2, 2)
    before = collective_seconds(made, "all_gather", 2**20, pair)
    plain = restrict_algorithms(made, "native")
    assert before == pytest.approx(
        collective_seconds(plain, "all_gather", 2**20, pair) / 4, rel=0.02
    )
    seen = calibrate.RunTiming(1.0, 0.0, {("all_gather", 2): [(2**20, 2 * before)]})
    after = calibrate._fit_collectives(run, seen, made)
    assert collective_seconds(after, "all_gather", 2**20, pair) == pytest.approx(2 * before)
    assert after.timings == made.timings


def test_a_run_too_short_or_of_another_machine_is_refused(tmp_path: Path) -> None:
    run = RunConfig(plan=Plan(data=2)).check_and_resolve(2)
    run = replace(run, train=replace(run.train, device="cpu", dtype="fp32"))
    path = tmp_path / "here.toml"
    cluster.write_cluster(machine(), path)
    folder = _run_folder(tmp_path / "run", run, 1e4, 0.0)
    with pytest.raises(PlanError, match="times as long"):
        calibrate.calibrate_cluster(folder, str(path))
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(PlanError, match="at least 4 steps"):
        calibrate.calibrate_cluster(folder, str(path))


def test_the_trace_of_a_run_says_how_long_calls_took(tmp_path: Path) -> None:
    """Of two ranks the one that waited for nobody counts."""
    from ranvier.trace import Event, write_chrome_trace

    for rank, taken in ((0, 0.5), (1, 0.2)):
        event = Event("all_gather", ("row",), 100, "x", issue_time=1.0, done_time=1.0 + taken)
        write_chrome_trace(tmp_path / f"trace-rank{rank}.json", {rank: [event]})
    calls = calibrate.read_collective_calls(tmp_path, RunConfig(plan=Plan(data=1, row=2)))
    assert calls == {("all_gather", 2): [(100, pytest.approx(0.2))]}


def test_the_host_of_a_block_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0.0 < benchmark_cluster._passes_seconds(CPU, 1, "off") < 60.0
    ends, each = 7.0, {"off": 0.3, "tensorwise": 0.6}
    monkeypatch.setattr(
        benchmark_cluster, "_passes_seconds", lambda device, n, fp8: ends + n * each[fp8]
    )
    found = {row.kind: row.value for row in benchmark_cluster.measure_block_rates(CPU, fp8=True)}
    assert found == {"block": pytest.approx(0.1), "block8": pytest.approx(0.2)}


def test_a_block_that_is_not_compiled_takes_the_host_as_long_as_measured() -> None:
    device = cluster.find_device("H200-SXM-141GB")
    rows = (*device.rates, MeasuredRate("block", 0.5), MeasuredRate("block8", 0.75))
    known, part = replace(device, rates=rows), load_shipped_spec("llama3-8b").parts[1]

    def launch(fp8: Fp8Scaling = "", compiled: bool = False, whose: Any = RANVIER) -> float:
        setup = ComputeContext(samples=1, seq=64, fp8=fp8, is_compiled=compiled)
        return block_times(part, known, setup, whose).launch

    assert launch() == 0.5 and launch("tensor") == launch("row") == 0.75
    assert launch(compiled=True) < 0.01 and launch(whose=replace(RANVIER, name="other")) < 0.01


def test_scales_by_rows_cost_what_their_kernels_do() -> None:
    device = cluster.find_device("H200-SXM-141GB")
    rows = tuple(
        MatmulRate(8192, 4096, 4096, kind, rate)
        for kind, rate in (("bf16", 4e14), ("fp8", 8e14), ("fp8row", 2e14))
    )
    part = load_shipped_spec("llama3-8b").parts[1]

    def products(fp8: Fp8Scaling, compiled: bool, known: Any) -> float:
        setup = ComputeContext(samples=2, seq=4096, fp8=fp8, is_compiled=compiled)
        return block_times(part, replace(device, products=known), setup, RANVIER).matmuls

    wide = products("", True, rows)
    assert products("tensor", True, rows) == products("row", True, rows)
    assert products("tensor", True, rows) == pytest.approx(wide / 2)
    assert products("row", False, rows) == pytest.approx(wide * 2)  # eager kernels
    assert products("row", False, rows[:2]) == wide
