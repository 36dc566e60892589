"""benchmarks/ladder.py judges its claim."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ranvier.trace import Event


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """The script as a module."""
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "ladder.py"
    spec = importlib.util.spec_from_file_location("benchmark_ladder", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_claim_is_judged_by_means_and_errors(bench: ModuleType) -> None:
    serial = [4.0, 4.1, 3.9]
    assert bench.check_claim(serial, [4.04, 4.14, 3.94]) == ""
    assert "is +2.00%" in bench.check_claim(serial, [1.02 * loss for loss in serial])
    # 1.6 % above on average, but not by more than the error of the difference.
    assert bench.check_claim(serial, [4.2, 4.1, 3.892]) == ""


def test_runs_differ_in_the_residual_only(bench: ModuleType) -> None:
    serial, ladder, last = (
        bench.make_run(case, 1, 250, bench.HeldOut(0.02, 4))
        for case in (*bench.CASES, bench.LAST_HALF)
    )
    assert serial.model.size == "tiny" and serial.train == ladder.train == last.train
    assert [run.model.residual for run in (serial, ladder, last)] == ["serial", "ladder", "ladder"]
    assert [last.model.is_ladder_layer(layer) for layer in range(4)] == [False, False, True, True]


def test_only_outputs_over_row_are_counted(bench: ModuleType) -> None:
    names = ("blocks.0.attention.o", "blocks.1.mlp.down", "blocks.0.mlp.enter", "head")
    events = [Event("reduce_scatter", ("row",), 8, name) for name in names]
    events.append(Event("all_gather", ("col",), 8, names[0]))
    assert [bench.of_outputs(event) for event in events] == [True, True, False, False, False]
