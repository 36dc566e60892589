"""A sample of benchmarks/fuzz_server.py."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from infer.fake_server import FakeServer, write_model


@pytest.fixture(scope="module")
def fuzz_server() -> ModuleType:
    path = Path(__file__).resolve().parents[3] / "benchmarks" / "fuzz_server.py"
    spec = importlib.util.spec_from_file_location("fuzz_server", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_server"] = module
    spec.loader.exec_module(module)
    return module


def test_a_case_is_always_the_same(fuzz_server: ModuleType) -> None:
    cases = [fuzz_server.build_case(1, number) for number in range(300)]
    assert cases == [fuzz_server.build_case(1, number) for number in range(300)]
    assert cases != [fuzz_server.build_case(2, number) for number in range(300)]
    assert len({case.kind for case in cases}) >= 8


def test_odd_requests_do_no_harm(fuzz_server: ModuleType, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    with FakeServer(
        write_model(tmp_path / "model"),
        engine={"max_model_len": 128},
        limits={"header_seconds": 1.0, "body_seconds": 1.0, "linger_seconds": 0.5},
    ) as server:
        for count in (200, 400):
            run = fuzz_server.FuzzRun(server.url, 3)
            good = asyncio.run(
                fuzz_server.fuzz(run, count=count, pid=server.process.pid, state=state)
            )
            assert good, run.failures
            # The second run continues where the first has ended.
            assert 150 < sum(run.statuses.values()) <= 200
            assert any(name.startswith("valid 200") for name in run.statuses)


def test_a_server_that_fails_is_found(fuzz_server: ModuleType, tmp_path: Path) -> None:
    """Negative control: the fuzzer sees a 5xx, and an engine that was restarted."""
    with FakeServer(write_model(tmp_path / "model")) as server:
        run = fuzz_server.FuzzRun(server.url, 0)
        body = b'{"prompt": "BREAK_STEP"}'
        case = fuzz_server.FuzzCase(
            "valid", fuzz_server._http_request("/v1/completions", body, b"")
        )
        run._check(0, case, asyncio.run(run._exchange(case)))
        assert "500" in run.failures[0] and asyncio.run(run.find_problem())
