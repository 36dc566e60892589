"""Faults and load: disconnects, full queues, engines that fail, and shutdown."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from infer.fake_server import FakeServer, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[FakeServer]:
    engine = {"step_seconds": 0.005, "max_num_seqs": 4, "num_blocks": 600}
    with FakeServer(
        folder,
        engine=engine,
        replicas=2,
        max_queued_requests=6,
        queue_timeout_seconds=20.0,
    ) as server:
        wait_until(lambda: len(states(server)) == 2 and set(states(server)) == {"ready"})
        yield server


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("the condition was not reached")


def states(server: FakeServer) -> list[str]:
    replicas = server.http.get("/health").json()["replicas"]
    return [one["state"] for one in replicas]


def metric(server: FakeServer, name: str) -> float:
    """Sum of a metric over its labels."""
    lines = server.http.get("/metrics").text.splitlines()
    return sum(float(x.split()[-1]) for x in lines if x.startswith(f"ranvier:{name}{{"))


def is_idle(server: FakeServer) -> bool:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return sum(metric(server, name) for name in names) == 0


def post(server: FakeServer, prompt: str, **options: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 10, **options}
    return server.http.post("/v1/completions", json=body, timeout=60)


def leave_early(server: FakeServer, after: float, **options: Any) -> None:
    """Sends a request and closes the connection after some seconds."""
    body = json.dumps({"prompt": "y" * 3000, "max_tokens": 900, **options}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            + f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        time.sleep(after)


def test_disconnects_free_what_they_held_and_change_no_other(server: FakeServer) -> None:
    expected = [post(server, f"stay {i}", seed=1).json()["choices"][0]["text"] for i in range(4)]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        leaving = [
            pool.submit(leave_early, server, 0.003 * i, stream=i % 2 == 0) for i in range(24)
        ]
        staying = [pool.submit(post, server, f"stay {i % 4}", seed=1, priority=i) for i in range(8)]
        found = [one.result() for one in staying]
        for one in leaving:
            one.result()
    for i, answer in enumerate(found):
        # Some are refused, because the queue is small.
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] == expected[i % 4]
        else:
            assert answer.status_code == 429
    wait_until(lambda: is_idle(server))


def test_client_timeouts_leave_nothing_behind(server: FakeServer) -> None:
    def give_up(_: int) -> None:
        with contextlib.suppress(httpx.TimeoutException):
            server.http.post(
                "/v1/completions",
                json={"prompt": "z", "max_tokens": 4000},
                timeout=0.2,
            )

    with concurrent.futures.ThreadPoolExecutor(14) as pool:
        list(pool.map(give_up, range(40)))
    assert post(server, "SAY:short|").json()["choices"][0]["text"] == "short"
    wait_until(lambda: is_idle(server))


def test_a_full_queue_refuses_at_once(server: FakeServer) -> None:
    with concurrent.futures.ThreadPoolExecutor(30) as pool:
        answers = list(pool.map(lambda i: post(server, f"q{i}", max_tokens=40), range(30)))
    codes = [answer.status_code for answer in answers]
    assert set(codes) == {200, 429}
    refused = answers[codes.index(429)]
    assert refused.json()["error"]["code"] == "queue_full"
    assert int(refused.headers["retry-after"]) >= 1
    for answer in answers:
        if answer.status_code == 200:
            assert answer.json()["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize(
    ("word", "cause"),
    [
        ("BREAK_STEP", "the step is broken"),
        pytest.param("KILL", "its process has ended", marks=pytest.mark.full),
    ],
)
def test_a_failed_replica_fails_alone_and_comes_back(
    server: FakeServer, word: str, cause: str
) -> None:
    """With data = 2, the requests of the other replica are untouched; new ones go around."""
    wait_until(lambda: is_idle(server))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        # Two long requests, one on each replica.
        long = [pool.submit(post, server, f"long {i}", max_tokens=400) for i in range(2)]
        wait_until(lambda: metric(server, "num_requests_running") == 2)
        broken = post(server, word)
        assert broken.status_code == 500 and cause in broken.json()["error"]["message"]
        health = server.http.get("/health")
        assert health.status_code == 200
        assert {one["restarts"] for one in health.json()["replicas"]} != {0}
        assert post(server, "SAY:around|").json()["choices"][0]["text"] == "around"
        codes = sorted(one.result().status_code for one in long)
    assert codes == [200, 500]
    wait_until(lambda: states(server) == ["ready", "ready"])
    assert post(server, "SAY:again|").json()["choices"][0]["text"] == "again"


def test_health_names_what_could_not_be_compiled(folder: Path) -> None:
    with FakeServer(folder) as server:
        assert server.http.get("/health").json()["replicas"][0]["compile_failure"] is None
        assert post(server, "NO_GRAPH SAY:slow|").json()["choices"][0]["text"] == "slow"
        health = server.http.get("/health").json()
        assert health["status"] == "ok"
        line = "Blocks run without a graph and are slower: Unsupported"
        assert health["replicas"][0]["compile_failure"] == line


def test_prefixes_return_to_their_replica(server: FakeServer) -> None:
    prompts = [f"{name * 200}?" for name in "abcd"]
    for prompt in prompts:
        post(server, prompt)
    for prompt in prompts * 2:
        usage = post(server, prompt).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 192


def test_keys_are_checked_and_never_shown(folder: Path) -> None:
    key = "sk-" + "k" * 40
    with FakeServer(folder, environment={"RANVIER_API_KEY": f"{key},other"}) as server:
        for name, good in ((key, True), ("other", True), ("wrong", False), ("", False)):
            headers = {"authorization": f"Bearer {name}"} if name else {}
            answer = server.http.get("/v1/models", headers=headers)
            assert answer.status_code == (200 if good else 401)
        assert server.http.get("/health").status_code == 200
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="no", max_retries=0).models.list()
        # A prefix that one key has computed is not visible to another.
        body = {"prompt": "p" * 100, "max_tokens": 1}
        found = []
        for name in (key, key, "other"):
            answer = server.http.post(
                "/v1/completions",
                json=body,
                headers={"authorization": f"Bearer {name}"},
            )
            found.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert found == [0, 96, 0]
        assert server.stop() == 0
        assert key not in "\n".join(server.lines)


@pytest.mark.full
def test_a_server_that_loads_is_alive_but_not_ready(folder: Path) -> None:
    with FakeServer(folder, engine={"load_seconds": 1.0}, wait=False) as server:
        assert server.http.get("/health").json()["status"] == "loading"
        assert server.http.get("/ready").status_code == 503
        answer = post(server, "x")
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert answer.json()["error"]["code"] == "loading"
        server.wait_for_line("Ready:")
        assert server.http.get("/ready").status_code == 200


@pytest.mark.full
def test_sigterm_drains_and_leaves_nothing(folder: Path) -> None:
    with FakeServer(folder, engine={"step_seconds": 0.01}) as server:
        (engine,) = server.engine_pids()
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            running = pool.submit(post, server, "x", max_tokens=80, stream=True)
            wait_until(lambda: metric(server, "num_requests_running") == 1)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for_line("Stopping after")
            assert server.http.get("/ready").status_code == 503
            assert post(server, "y").json()["error"]["code"] == "draining"
            assert running.result().text.rstrip().endswith("data: [DONE]")
        assert server.process.wait(20) == 0
        assert not Path(f"/proc/{engine}").exists()
        with pytest.raises(ConnectionError):
            socket.create_connection(("127.0.0.1", server.port))


@pytest.mark.full
def test_draining_ends_after_its_time_and_at_a_second_signal(folder: Path) -> None:
    for seconds, signals, code in ((0.2, 1, 0), (60.0, 2, 128 + signal.SIGTERM)):
        engine = {"step_seconds": 0.01}
        with FakeServer(folder, engine=engine, drain_seconds=seconds) as server:
            (pid,) = server.engine_pids()
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                running = pool.submit(post, server, "x", max_tokens=4000, stream=True)
                wait_until(lambda: metric(server, "num_requests_running") == 1)
                server.process.send_signal(signal.SIGTERM)
                server.wait_for_line("Stopping after")
                if signals == 2:
                    server.process.send_signal(signal.SIGTERM)
                assert server.process.wait(20) == code
                if signals == 1:
                    assert '"code": "draining"' in running.result().text
                else:
                    assert running.exception() is not None or "[DONE]" not in running.result().text
            assert not Path(f"/proc/{pid}").exists()


@pytest.mark.full
def test_a_killed_front_leaves_no_engine(folder: Path) -> None:
    with FakeServer(folder) as server:
        (pid,) = server.engine_pids()
        os.kill(server.process.pid, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{pid}").exists())
