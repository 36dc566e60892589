"""benchmarks/context_balance.py prints orders and assignments and checks their limits."""

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
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "context_balance.py"
    spec = importlib.util.spec_from_file_location("benchmark_context_balance", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_limits_of_orders_hold_and_are_written(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "time_order", lambda seed: 0.001)
    row = bench.AssignmentRow("tail", 131072, 32, 8, "by cost", 0.94, 0.89)
    monkeypatch.setattr(bench, "measure_assignments", lambda seed, steps: [row])
    lengths, output = tmp_path / "lengths.txt", tmp_path / "found.json"
    lengths.write_text("1\n997\n130000\n" + "64\n" * 100)
    words = ["--context", "8", "--windows", "4", "--lengths", str(lengths), "--output", str(output)]
    assert bench.main(words) == 0
    found = json.loads(output.read_text())
    kinds = {row["kind"] for row in found["orders"]}
    assert kinds == {*bench.KINDS, "lengths.txt"}
    assert all(check["holds"] for check in found["checks"])


def test_a_limit_that_does_not_hold_is_reported(bench: ModuleType) -> None:
    row = bench.OrderRow("code", 8, "balanced", 1.2, 1.3, 0.9, 60, False)
    blocks = bench.OrderRow("code", 8, "blocks", 1.0, 1.0, 0.6, 40, True)
    assert not any(check.holds for check in bench.check_orders([row, blocks]))
    slow = bench.AssignmentRow("tail", 131072, 32, 8, "by cost", 0.94, 0.87)
    assert not any(check.holds for check in bench.check_assignments([slow]))


@pytest.mark.parametrize("text", ["12\n0\n", "-3\n", "seven\n", ""])
def test_lengths_that_are_not_positive_are_an_error(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(text)
    with pytest.raises(SystemExit):
        bench.main(["--lengths", str(file)])
    assert "Write one positive number of tokens on each line." in capsys.readouterr().err


def test_blocks_by_work_hold_every_token_once(bench: ModuleType) -> None:
    order = bench.order_blocks([5000, 3000, 192], 4)
    assert sorted(order.token_numbers.ravel().tolist()) == list(range(8192))
