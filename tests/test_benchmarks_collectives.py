"""What benchmarks/hierarchical_collectives.py computes from its measurements."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """The script as a module."""
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "hierarchical_collectives.py"
    spec = importlib.util.spec_from_file_location("benchmark_hierarchical_collectives", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def rows_of(bench: ModuleType, seconds: dict[str, list[list[float]]]) -> list[Any]:
    """Rows of all-gathers on two ranks; seconds: of each algorithm, by call and rank."""
    scenario = bench.SCENARIOS["2x4"]
    ranks: list[list[Any]] = [[], []]
    for algorithm, calls in seconds.items():
        for call in calls:
            for rank, time in enumerate(call):
                sent = scenario.whole_bytes * (1 + rank)
                ranks[rank].append(bench.Call("all_gather", algorithm, algorithm, time, sent))
    return list(bench.summarize("2x4", scenario, ranks))


def test_rows_are_medians_of_the_slowest_rank(bench: ModuleType) -> None:
    native, ring = rows_of(
        bench,
        {"native": [[1.0, 4.0], [8.0, 2.0], [1.0, 5.0]], "ring": [[2.0, 1.0]] * 3},
    )
    assert (native.seconds, native.ratio, native.leaving_node) == (5.0, 1.0, 2.0)
    assert (ring.seconds, ring.ratio) == (2.0, 2.5)


@pytest.mark.parametrize(("seconds", "bad"), [(0.9, 1), (0.6, 0)])
def test_the_best_candidate_must_reach_the_target(
    bench: ModuleType, seconds: float, bad: int
) -> None:
    first, second = bench.HIERARCHICAL
    times = {"native": 1.0, "ring": 0.1, first: 2.0, second: seconds}
    rows = rows_of(bench, {name: [[time, time]] for name, time in times.items()})
    assert bench.check_targets(bench.SCENARIOS["2x4"], rows) == bad


@pytest.mark.parametrize(
    ("native", "ring", "auto", "bad"),
    [(1.0, 2.0, 1.04, 0), (2.0, 1.0, 1.04, 0), (2.0, 1.0, 2.0, 1), (1.0, 2.0, 1.2, 2)],
)
def test_auto_must_be_close_to_the_best(
    bench: ModuleType, native: float, ring: float, auto: float, bad: int
) -> None:
    times = {"native": native, "ring": ring, "auto": auto}
    rows = rows_of(bench, {name: [[time, time]] for name, time in times.items()})
    assert bench.check_auto(rows) == bad


@pytest.mark.parametrize("name", ["2x4", "latency"])
def test_results_are_those_of_the_inputs(bench: ModuleType, name: str) -> None:
    scenario = bench.SCENARIOS[name]
    for operation in bench.OPERATIONS:
        made = [bench.make_tensors(operation, rank, scenario) for rank in range(8)]
        inputs = [x for x, _ in made]
        if operation == "all_gather":
            whole = torch.cat(inputs)
        else:
            whole = torch.stack(inputs).sum(0)
        assert whole.numel() * 4 == scenario.whole_bytes
        if operation == "reduce_scatter":
            assert torch.equal(torch.cat([y for _, y in made]), whole)
        else:
            assert all(torch.equal(y, whole) for _, y in made)
