"""What benchmarks/pipeline.py computes, as far as it does not take time."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from statistics import fmean
from types import ModuleType

import pytest

from ranvier.pipeline.policy import PipelineShape
from ranvier.pipeline.policy_search import choose_policy
from ranvier.pipeline.simulator import JobTimes, simulate_step


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """The script as a module."""
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "pipeline.py"
    spec = importlib.util.spec_from_file_location("benchmark_pipeline", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def setting(bench: ModuleType, ranks: int, case: str) -> object:
    sizes = {"repeat": 3, "ms": 10.0, "layers": 8, "width": 64, "rows": 4}
    return bench.Setting(ranks=ranks, case=case, micros=8, **sizes)


def test_work_is_drawn_from_the_numbers_of_a_job_alone(bench: ModuleType) -> None:
    def factors(seed: int) -> list[float]:
        effort = bench.Effort(setting(bench, 4, "jitter"), 1, seed)
        return [effort.factor(s, s, m, k) for s in range(4) for m in range(8) for k in "FBW"]

    assert factors(3) == factors(3) != factors(4)
    assert len(set(factors(3))) == 96
    assert fmean(x for seed in range(50) for x in factors(seed)) == pytest.approx(1.0, abs=0.03)


def test_real_work_is_whole_layers_and_backward_is_that_of_forward(bench: ModuleType) -> None:
    effort = bench.Effort(setting(bench, 2, "jitter"), 2, 1)
    for micro in range(8):
        layers = [effort.factor(0, 2, micro, kind) * 4 for kind in "FBW"]
        assert layers == [round(layers[0])] * 3
        assert layers[0] >= 1


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("name", ["message_driven", "zero-bubble"])
@pytest.mark.parametrize("case", ["balanced", "slow"])
def test_a_prediction_without_jitter_is_that_of_simulate(
    bench: ModuleType, chunks: int, name: str, case: str
) -> None:
    each = tuple(1.0 + v / 10 for v in range(4 * chunks))
    times, shape = JobTimes(each, each, each, link=0.1), PipelineShape(4, 8, chunks)
    policy = choose_policy(name, shape, times)
    said = bench.prediction(setting(bench, 4, case), chunks, policy, times, 0)
    assert said == pytest.approx(simulate_step(shape, policy, times).seconds)


def test_the_bound_is_reached_by_an_even_pipeline(bench: ModuleType) -> None:
    times, shape = JobTimes((1.0,) * 4, (1.0,) * 4, (1.0,) * 4), PipelineShape(4, 8)
    least = bench.bound(setting(bench, 4, "slow"), 1, times)
    assert least == 8 * 3 + 3 * 3
    assert simulate_step(shape, choose_policy("1f1b", shape, times), times).seconds == least


def test_the_bound_counts_what_comes_before_the_slow_stage(bench: ModuleType) -> None:
    uneven = (1.0, 2.0, 1.0, 1.0)
    times = JobTimes(uneven, uneven, uneven)
    assert bench.bound(setting(bench, 4, "slow"), 1, times) == 8 * 6 + 3


def test_pairs_count_as_wrong_only_beyond_five_percent(bench: ModuleType) -> None:
    def row(seconds: float, said: float) -> object:
        return bench.Row("message_driven", 1, "", [seconds] * 3, [1], 0.0, [said] * 3)

    assert bench.wrong([row(1.0, 2.0), row(1.04, 1.0)]) == 0
    assert bench.wrong([row(1.0, 2.0), row(1.06, 1.0)]) == 1
    assert bench.wrong([row(1.0, 1.0), row(1.06, 2.0)]) == 0
