"""Cases of benchmarks/serve_robustness.py that do not depend on the speed of the machine."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def robustness() -> ModuleType:
    path = Path(__file__).resolve().parents[3] / "benchmarks" / "serve_robustness.py"
    spec = importlib.util.spec_from_file_location("serve_robustness", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["serve_robustness"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["disconnects", "large_body", "long_prompt", "counters", "faults", "replicas"]
)
def test_nobody_hurts_another(robustness: ModuleType, name: str) -> None:
    print(asyncio.run(robustness.CASES[name](0.05)))


def test_a_case_that_fails_is_reported(
    robustness: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wrong(scale: float) -> str:
        robustness.check(scale == 1.0, "the scale is wrong")
        return "right"

    monkeypatch.setitem(robustness.CASES, "wrong", wrong)
    assert robustness.run_case("wrong", 1.0) and not robustness.run_case("wrong", 0.5)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("PASS wrong") and "the scale is wrong" in second
