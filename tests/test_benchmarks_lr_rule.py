"""benchmarks/lr_rule.py finds best learning rates and judges its claims."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """The script as a module."""
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "lr_rule.py"
    spec = importlib.util.spec_from_file_location("benchmark_lr_rule", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_best_rate_is_that_of_a_parabola(bench: ModuleType) -> None:
    best = 2.0**0.7
    losses = {2.0**k: 3.0 + 0.1 * (k - 0.7) ** 2 for k in range(-2, 5)}
    assert bench.best_rate(losses) == pytest.approx(best)
    # At an edge, and beside a run that diverged, it is the rate itself.
    assert bench.best_rate({1.0: 2.0, 2.0: 3.0, 4.0: 4.0}) == 1.0
    assert bench.best_rate({1.0: 3.0, 2.0: 2.0, 4.0: math.inf}) == 2.0


def test_claims_are_judged_by_spreads(bench: ModuleType) -> None:
    # Equal lr_eff: plain rates differ as width · sqrt(depth) does.
    rule, plain = bench.spreads(dict.fromkeys(bench.SHAPES, 3.0))
    assert rule == 1.0 and plain == pytest.approx(256 / 32)
    assert bench.check_claims((rule, plain), [(1.2, 7.0), (1.1, 8.0), (1.5, 6.0)]) == []
    # Equal plain rates: the rule does not help.
    rates = {shape: bench.rule_divisor(shape) for shape in bench.SHAPES}
    failed = bench.check_claims(bench.spreads(rates), [(8.0, 1.0), (8.0, 1.1), (7.0, 1.0)])
    assert len(failed) == 3


def test_a_run_uses_the_rule(bench: ModuleType) -> None:
    run = bench.make_run((64, 6), 2.0, 0, bench.STEPS, 4)
    assert run.peak_lr == pytest.approx(2.0 / bench.rule_divisor((64, 6)))
    assert not [*run.find_problems()]
