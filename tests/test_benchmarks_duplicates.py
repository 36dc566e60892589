"""benchmarks/duplicates.py counts and compares."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """The script as a module."""
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "duplicates.py"
    spec = importlib.util.spec_from_file_location("benchmark_duplicates", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.full
def test_bytes_fall_and_duplicates_do_not(
    bench: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bench, "GRIDS", ((1, 1), (2, 2)))
    file = tmp_path / "found.json"
    words = ["--size", "moe-tiny", "--expert", "2", "--seq", "16", "--json", str(file)]
    assert bench.main(words) == 0
    facts = json.loads(file.read_text())
    one, four = facts["rows"]
    # two layers, there and back, forward and backward, of 4 x 16 tokens with 4 choices of 192 bf16
    assert one["ours"] == one["duplicated"] == 2 * 4 * 4 * 16 * 4 * 192 * 2
    assert four["ours"] * 4 == four["duplicated"] == one["ours"]
    assert facts["calls"]["none"] == facts["calls"]["full, save"] < facts["calls"]["full, rerun"]
    assert "PASS" in capsys.readouterr().out
