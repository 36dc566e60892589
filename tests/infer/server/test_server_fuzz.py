"""Generated requests: schemathesis on the server's description, and a sample of the fuzzer."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from infer.fake_server import FakeServer, write_model
from ranvier.infer.server.openapi import build_openapi

OPERATIONS = [(path, method) for path, item in build_openapi()["paths"].items() for method in item]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with FakeServer(
        write_model(tmp_path_factory.mktemp("served")),
        engine={"max_model_len": 128},
        limits={"header_seconds": 1.0, "body_seconds": 1.0, "linger_seconds": 0.5},
    ) as server:
        yield server


def check_operation(
    server: FakeServer, path: str, method: str, mode: GenerationMode, examples: int
) -> None:
    """Sends generated requests to one operation."""
    document: dict[str, Any] = server.http.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=server.url)
    operation = schema[path][method]

    @hypothesis.seed(0)
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        response = case.call(timeout=60)
        case.validate_response(
            response,
            checks=(
                not_a_server_error,
                status_code_conformance,
                content_type_conformance,
                response_schema_conformance,
            ),
        )

    send()


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_answers_fit_the_schema(server: FakeServer, mode: GenerationMode) -> None:
    check_operation(server, "/v1/completions", "POST", mode, 8)


@pytest.mark.full
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_all_answers_fit_the_schema(
    server: FakeServer, path: str, method: str, mode: GenerationMode
) -> None:
    if mode is GenerationMode.NEGATIVE and method == "get":
        # Without parameters there is nothing to make invalid.
        return
    check_operation(server, path, method.upper(), mode, 200)


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


def test_odd_requests_do_no_harm(
    fuzz_server: ModuleType, server: FakeServer, tmp_path: Path
) -> None:
    state = tmp_path / "state.json"
    for count in (150, 300):
        run = fuzz_server.FuzzRun(server.url, 3)
        good = asyncio.run(fuzz_server.fuzz(run, count=count, pid=server.process.pid, state=state))
        assert good, run.failures
        # The second run continues where the first has ended.
        assert 100 < sum(run.statuses.values()) <= 150
        assert any(name.startswith("valid 200") for name in run.statuses)
    # Negative control, which ends the engine: a 5xx and a restart are found.
    data = fuzz_server._http_request("/v1/completions", b'{"prompt": "BREAK_STEP"}', b"")
    case = fuzz_server.FuzzCase("valid", data)
    run._check(0, case, asyncio.run(run._exchange(case)))
    assert "500" in run.failures[0] and asyncio.run(run.find_problem())
