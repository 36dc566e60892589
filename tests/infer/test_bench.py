"""`ranvier bench` against a server that plays its answers: workloads, times, failures, reports."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranvier.cli.main import COMMANDS
from ranvier.config.arguments import BenchOptions
from ranvier.errors import DataError, PlanError, WriteError
from ranvier.infer.bench import run_benchmark
from ranvier.infer.bench_client import BenchClient, RequestRecord
from ranvier.infer.bench_report import parse_limits, render_page, summarize
from ranvier.infer.bench_workload import build_workload, draw_lengths, draw_starts

# ---- workload -------------------------------------------------------------------------------


def test_equal_seeds_give_equal_requests() -> None:
    options = BenchOptions(requests=20, input_length="gamma:30:2", output_length="uniform:5:9")
    assert build_workload(options) == build_workload(options)
    assert build_workload(options) != build_workload(replace(options, seed=1))
    assert all(5 <= one.body["max_tokens"] <= 9 for one in build_workload(options))


@pytest.mark.parametrize(
    ("text", "mean", "deviation"),
    [
        ("512", 512, 0),
        ("fixed:7", 7, 0),
        ("uniform:100:1024", 562, 267),
        ("gamma:512:4", 512, 256),
        ("exponential:128", 128, 128),
    ],
)
def test_lengths_have_their_distribution(text: str, mean: float, deviation: float) -> None:
    lengths = draw_lengths("x", text, 20_000, np.random.default_rng(0))
    assert lengths.min() >= 1
    assert abs(lengths.mean() - mean) <= 0.03 * mean
    assert abs(lengths.std() - deviation) <= 0.03 * mean


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_requests_come_at_their_rate(burstiness: float) -> None:
    options = BenchOptions(rate=5.0, burstiness=burstiness)
    gaps = np.diff(draw_starts(options, 20_000, np.random.default_rng(0)))
    assert abs(gaps.mean() - 0.2) < 0.01
    # The coefficient of variation of a gamma distribution is 1 / sqrt(shape).
    assert abs(gaps.std() / gaps.mean() * burstiness**0.5 - 1) < 0.05
    assert not draw_starts(BenchOptions(), 9, np.random.default_rng(0)).any()


def test_prompts_share_prefixes_and_may_be_token_ids() -> None:
    options = BenchOptions(
        requests=4,
        prompts="token_ids",
        vocab=50,
        input_length="8",
        prefix_length=16,
        num_prefixes=2,
    )
    prompts = [one.body["prompt"] for one in build_workload(options)]
    assert all(len(prompt) == 24 and max(prompt) < 50 for prompt in prompts)
    assert prompts[0][:16] == prompts[2][:16] != prompts[1][:16] == prompts[3][:16]
    assert len({tuple(prompt[16:]) for prompt in prompts}) == 4
    (words,) = build_workload(BenchOptions(requests=1, input_length="9", endpoint="chat"))
    assert len(words.body["messages"][0]["content"].split()) == 9


def test_a_dataset_replaces_random_prompts(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    rows = [
        {"prompt": "one", "max_tokens": 3},
        {"prompt": [1, 2, 3]},
        {"input_length": 5, "output_length": 6},
        {"messages": [{"role": "user", "content": "four"}]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    options = BenchOptions(requests=5, dataset=str(path), output_length="9")
    bodies = [one.body for one in build_workload(options)]
    assert [one["max_tokens"] for one in bodies] == [3, 9, 6, 9, 3]
    assert [bodies[i]["prompt"] for i in (0, 1, 3, 4)] == ["one", [1, 2, 3], "four", "one"]
    assert len(bodies[2]["prompt"].split()) == 5
    for text, reason in (
        ("{", "Line 1"),
        ("[1]", "Line 1"),
        ('{"max_tokens": 3}', "Line 1"),
        ('{"prompt": "x", "max_tokens": 0}', "Line 1"),
        ("\n", "is empty"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=reason):
            build_workload(options)
    with pytest.raises(DataError, match="cannot be read"):
        build_workload(replace(options, dataset=str(tmp_path / "none")))


# ---- statistics -----------------------------------------------------------------------------


def record(start: float, *times: float, tokens: int = 0, error: str = "") -> RequestRecord:
    made = RequestRecord(0, start, list(times), times[-1] if times else start)
    made.output_tokens = tokens or len(times)
    made.prompt_tokens = 10
    made.error = error
    return made


def test_latencies_follow_their_definitions() -> None:
    records = [
        record(1.0, 1.5, 1.6, 1.8),
        # Two tokens came in one piece.
        record(2.0, 2.1, 2.5, tokens=3),
        record(3.0, 3.3),
        record(0.0, error="timeout"),
    ]
    found = summarize(records, 4.0, parse_limits(["ttft=400", "tpot=180"]))
    assert found["completed"] == 3 and found["failures"] == {"timeout": 1}
    assert found["output_tokens_per_second"] == pytest.approx(7 / 4)
    assert found["total_tokens_per_second"] == pytest.approx(37 / 4)
    assert found["ttft_ms"]["mean"] == pytest.approx(300)
    assert found["ttft_ms"]["p50"] == pytest.approx(300)
    assert found["tpot_ms"]["mean"] == pytest.approx((150 + 200) / 2)
    assert found["itl_ms"]["mean"] == pytest.approx((100 + 200 + 400) / 3)
    assert found["e2e_ms"]["p99"] == pytest.approx(np.percentile([800, 500, 300], 99))
    # The first is late, the second slow, the third good, the fourth has failed.
    assert found["goodput"] == pytest.approx(1 / 4) and found["goodput_share"] == 0.25


def test_nothing_measured_is_a_summary_too() -> None:
    found = summarize([record(0.0, error="connect")], 0.0, {})
    assert found["ttft_ms"]["p99"] is None and found["requests_per_second"] == 0
    assert "<svg" in render_page("x", found, [record(0.0, error="connect")], 0.0)
    assert "<svg" in render_page("x", summarize([], 0.0, {}), [], 0.0)


# ---- a server -------------------------------------------------------------------------------


class FakeServer:
    """Answers with as many tokens as asked; the prompt of a request says what goes wrong."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.num_connections = 0
        self.num_running = 0
        self.peak = 0
        self.port = 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> FakeServer:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *ends: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        tasks: set[asyncio.Task[None]] = set()

        def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.add(asyncio.create_task(self._handle(reader, writer)))

        server = await asyncio.start_server(begin, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = int(re.search(r"content-length: (\d+)", head)[1])  # type: ignore[index]
        key = re.search(r"authorization: (.*)\r", head)
        self.keys.append(key[1] if key else "")
        content = await reader.readexactly(size)
        if head.startswith("GET"):
            models = json.dumps({"data": [{"id": "tiny"}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(models) + models)
            return True
        body = json.loads(content)
        self.bodies.append(body)
        self.num_running += 1
        self.peak = max(self.peak, self.num_running)
        try:
            return await self._stream(writer, body, str(body.get("prompt", "")))
        finally:
            self.num_running -= 1

    async def _stream(
        self, writer: asyncio.StreamWriter, body: dict[str, Any], prompt: str
    ) -> bool:
        if prompt == "status":
            error = b'{"error": {"message": "The queue is full."}}'
            writer.write(
                b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: %d\r\n\r\n" % len(error) + error
            )
            return True
        if prompt == "garbage":
            writer.write(b"hello\r\n\r\n")
            return False
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        chat = "messages" in body
        for i in range(body["max_tokens"]):
            await asyncio.sleep(0.001)
            text = {"delta": {"content": "x"}} if chat else {"text": "x"}
            event = {"choices": [{"index": 0, **text, "finish_reason": None}]}
            if prompt == "error" and i == 1:
                event = {"error": {"message": "The engine has stopped."}}  # type: ignore[dict-item]
            self._chunk(writer, f"data: {json.dumps(event)}\n\n".encode())
            await writer.drain()
            if prompt == "close" and i == 1:
                return False
            if prompt == "hang" and i == 1:
                await asyncio.sleep(3600)
            if prompt == "interrupt" and i == 1:
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(3600)
        usage = {"prompt_tokens": 11, "completion_tokens": body["max_tokens"]}
        self._chunk(writer, f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
        # The end comes in two pieces, cut inside of a line.
        self._chunk(writer, b"data: [DO")
        self._chunk(writer, b"NE]\n\n")
        writer.write(b"0\r\n\r\n")
        return True

    def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n" % len(data) + data + b"\r\n")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as made:
        yield made


def dataset(path: Path, *prompts: str) -> str:
    file = path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    return str(file)


def test_every_token_is_counted(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, html = tmp_path / "deep" / "bench.json", tmp_path / "bench.html"
    words = "--requests 8 --input-length 5 --output-length 4 --concurrency 3 --warmup 1"
    files = ["--output", str(output), "--html", str(html)]
    assert COMMANDS["bench"]([server.url, *words.split(), "--goodput", "ttft=1e9", *files]) == 0
    content = json.loads(output.read_text())
    assert content["model"] == "tiny" and content["completed"] == 8
    assert content["output_tokens"] == 32 and content["prompt_tokens"] == 88
    assert content["goodput_share"] == 1.0 and not content["failures"]
    assert [one["index"] for one in content["requests"]] == list(range(8))
    for one in content["requests"]:
        moments = [one["start"], *one["token_times"], one["end"]]
        assert moments == sorted(moments) and len(moments) == 6
    assert len(server.bodies) == 9 and server.peak <= 3
    # Connections are used again.
    assert server.num_connections <= 3
    assert server.bodies[0]["ignore_eos"] is True and server.bodies[0]["model"] == "tiny"
    text = capsys.readouterr().out
    assert "8 of 8 requests" in text and "time to first token (TTFT), ms" in text
    page = html.read_text()
    assert page.count("<rect") >= 16 and "http-equiv" in page and "src=" not in page


def test_the_chat_endpoint_and_the_key(server: FakeServer, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    output = tmp_path / "bench.json"
    options = BenchOptions(
        requests=2,
        endpoint="chat",
        output_length="3",
        api_key_file=str(key),
        ignore_eos=False,
        output=str(output),
        rate=1000.0,
    )
    assert run_benchmark(f"{server.url}/v1/", options) == 0
    assert {*server.keys} == {"Bearer secret"} and "ignore_eos" not in server.bodies[0]
    assert json.loads(output.read_text())["output_tokens"] == 6
    assert "secret" not in output.read_text() and "key" not in json.loads(output.read_text())


def test_failures_are_counted_by_kind(server: FakeServer, tmp_path: Path) -> None:
    prompts = ("good", "status", "garbage", "error", "close", "hang", "good")
    output = tmp_path / "bench.json"
    options = BenchOptions(
        requests=7,
        dataset=dataset(tmp_path, *prompts),
        output_length="4",
        timeout=1.0,
        output=str(output),
        html=str(tmp_path / "bench.html"),
    )
    assert run_benchmark(server.url, options) == 0
    content = json.loads(output.read_text())
    assert content["completed"] == 2 and content["failures"] == {
        "HTTP 429": 1,
        "protocol": 1,
        "stream error": 1,
        "disconnected": 1,
        "timeout": 1,
    }
    messages = [one["message"] for one in content["requests"]]
    assert messages[1] == "The queue is full." and messages[3] == "The engine has stopped."
    assert "The queue is full." in (tmp_path / "bench.html").read_text()


def test_ctrl_c_keeps_what_was_measured(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "bench.json"
    options = BenchOptions(
        requests=6,
        dataset=dataset(tmp_path, "good", "good", "interrupt"),
        output_length="4",
        concurrency=1,
        output=str(output),
    )
    assert run_benchmark(server.url, options) == 130
    content = json.loads(output.read_text())
    assert content["interrupted"] and content["completed"] == 2 and content["output_tokens"] == 8
    assert "2 of 6 requests" in capsys.readouterr().out


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    with FakeServer() as gone:
        url = gone.url
    with pytest.raises(PlanError, match="does not answer: connect"):
        run_benchmark(url, BenchOptions())
    assert run_benchmark(url, BenchOptions(model="x", requests=2)) == 1


BAD: list[tuple[dict[str, Any], str]] = [
    ({"requests": 0}, "requests=0"),
    ({"rate": -1.0}, "rate=-1.0"),
    ({"burstiness": 0.0}, "burstiness=0.0"),
    ({"timeout": float("nan")}, "timeout=nan"),
    ({"input_length": "many"}, "input_length='many'"),
    ({"output_length": "uniform:5:2"}, "output_length='uniform:5:2'"),
    ({"output_length": "gamma:0"}, "output_length='gamma:0'"),
    ({"prompts": "token_ids", "endpoint": "chat"}, "prompts=token_ids"),
    ({"goodput": ("speed=3",)}, "'speed=3'"),
    ({"goodput": ("ttft=x",)}, "'ttft=x'"),
]


@pytest.mark.parametrize(("options", "reason"), BAD)
def test_wrong_options_are_named(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanError, match=re.escape(reason)):
        run_benchmark("http://127.0.0.1:1", BenchOptions(**options))


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:port"])
def test_a_wrong_url_is_named(url: str) -> None:
    with pytest.raises(PlanError, match="is not the URL of a server"):
        BenchClient(url)


def test_results_that_cannot_be_written_are_named(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    options = BenchOptions(requests=1, output_length="1", output=str(tmp_path / "file" / "x.json"))
    with pytest.raises(WriteError, match="cannot be written"):
        run_benchmark(server.url, options)
    with pytest.raises(DataError, match="--api-key-file"):
        run_benchmark(server.url, BenchOptions(api_key_file=str(tmp_path / "none")))
