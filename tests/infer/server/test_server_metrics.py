"""Metrics of a server agree with what was sent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from infer.fake_server import FakeServer, write_model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with FakeServer(write_model(tmp_path_factory.mktemp("served"))) as server:
        yield server


def read_metrics(server: FakeServer) -> dict[str, float]:
    """Values by name, without buckets; labels are left out, except reasons."""
    text = server.http.get("/metrics").text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("ranvier:")
            name += "".join(
                f":{sample.labels[x]}"
                for x in ("finished_reason", "kind", "le")
                if x in sample.labels
            )
            found[name] = sample.value
    return found


def test_ten_requests_of_ten_tokens_have_ninety_gaps(server: FakeServer) -> None:
    for i in range(10):
        # Streams and whole answers count alike, and so do several choices.
        body = {"prompt": f"{i:032}", "max_tokens": 10, "stream": i % 2 == 0}
        assert server.http.post("/v1/completions", json=body).status_code == 200
    found = read_metrics(server)
    expected = {
        "time_to_first_token_seconds_count": 10,
        "inter_token_latency_seconds_count": 90,
        "e2e_request_latency_seconds_count": 10,
        "request_queue_time_seconds_count": 10,
        "request_prefill_time_seconds_count": 10,
        "request_decode_time_seconds_count": 10,
        "prompt_tokens_total": 320,
        "generation_tokens_total": 100,
        "request_prompt_tokens_sum": 320,
        "request_generation_tokens_sum": 100,
        "request_success_total:length": 10,
        "prefix_cache_queries_total": 320,
        # All prompts but the first begin with the same block.
        "prefix_cache_hits_total": 9 * 16,
        "iteration_tokens_total_sum": 320 - 9 * 16 + 90,
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
        "num_preemptions_total": 0,
        "num_steps_total": 100,
        "step_seconds_count:mixed": 10,
        "step_seconds_count:decode": 90,
    }
    assert {name: found.get(name) for name in expected} == expected
