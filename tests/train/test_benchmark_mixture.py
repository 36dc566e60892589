"""benchmarks/moe_tiny.py runs, and refuses models that cannot be compared."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ranvier.errors import PlanError
from ranvier.models.config import MODEL_SIZES
from training import stored


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """The script as a module."""
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "moe_tiny.py"
    spec = importlib.util.spec_from_file_location("benchmark_moe_tiny", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.full
def test_it_trains_both_and_tells_losses_and_loads(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "seen.json"
    assert bench.main(["--smoke", "--corpus", stored(tmp_path), "--json", str(out)]) == 0
    dense, mixture = json.loads(out.read_text())
    assert len(dense["losses"]) == len(mixture["losses"]) == 3 and dense["loads"] == []
    assert all(1.0 <= load <= 4.0 for step in mixture["loads"] for load in step)
    assert "moe-tiny" in capsys.readouterr().out


def test_it_judges(bench: ModuleType) -> None:
    def curve(model: str, loss: float, load: float) -> object:
        loads = [[1.1, load]] * 2 if model == "moe-tiny" else []
        return bench.Curve(model, 0, [9.0] * 9 + [loss], loss, loads, 1.0)

    asked = bench.settings([])
    dense = curve("tiny", 5.0, 1.0)
    assert bench.judged([dense, curve("moe-tiny", 4.9, 1.4)], asked)
    assert not bench.judged([dense, curve("moe-tiny", 5.1, 1.4)], asked)
    assert not bench.judged([dense, curve("moe-tiny", 4.9, 1.6)], asked)


def test_only_equal_active_weights_are_compared(bench: ModuleType) -> None:
    dense, mixture = MODEL_SIZES["tiny"], MODEL_SIZES["moe-tiny"]
    bench.check(dense, mixture)
    for change in (
        {"shared_expert_mlp": 512},
        {"experts_per_token": 5},
        {"heads": 4},
        {"experts": 0},
    ):
        with pytest.raises(PlanError, match="equal except for their experts"):
            bench.check(dense, dataclasses.replace(mixture, **change))
