"""benchmarks/algorithm_choice.py reads files of timings and scores choices."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """The script as a module."""
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "algorithm_choice.py"
    spec = importlib.util.spec_from_file_location("benchmark_algorithm_choice", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def write_timings(path: Path, sizes: range, *, slow: float = 1.0) -> Path:
    """Two methods that cross at 64 MiB. slow: factor of `hybrid` from there."""
    lines = ["machine,set,op,method,gpus,mebibytes,milliseconds"]
    for gpus in (8, 16, 32):
        for size in (2.0**i for i in sizes):
            factor = slow if size >= 64 else 1.0
            for method, time in (("nccl", 6.4 + 0.1 * size), ("hybrid", 0.2 * size * factor)):
                lines.append(f"frontier,first,all_gather,{method},{gpus},{size},{time}")
    # One method leaves nothing to choose.
    lines.append("frontier,second,all_gather,hybrid,8,1.0,0.5")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_cross_validation(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = write_timings(tmp_path / "given.csv", range(11))
    assert bench.main([str(given), "--seeds", "2"]) == 0
    shown = capsys.readouterr().out
    assert "PASS" in shown and "second" not in shown
    assert "    66  " in shown  # 33 cells, each left out once for each seed


def test_kept_timings_are_scored(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = write_timings(tmp_path / "given.csv", range(0, 11, 2))
    kept = write_timings(tmp_path / "kept.csv", range(1, 11, 2))
    assert bench.main([str(given), "--score", str(kept)]) == 0
    # On another machine, where what was slow is fast, the same choices are bad ones.
    other = write_timings(tmp_path / "other.csv", range(1, 11, 2), slow=0.1)
    assert bench.main([str(given), "--score", str(other)]) == 1
    assert "FAIL" in capsys.readouterr().out
