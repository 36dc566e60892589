"""schemathesis on the server's own description: no 5xx, and all answers fit the schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    load_all_checks,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from infer.fake_server import FakeServer, write_model
from ranvier.infer.server.openapi import build_openapi

OPERATIONS = [(path, method) for path, item in build_openapi()["paths"].items() for method in item]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    load_all_checks()
    with FakeServer(write_model(tmp_path_factory.mktemp("served"))) as server:
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


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_answers_fit_the_schema(server: FakeServer, path: str, mode: GenerationMode) -> None:
    check_operation(server, path, "POST", mode, 8)


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
