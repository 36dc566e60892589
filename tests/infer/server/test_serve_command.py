"""`ranvier serve` with real engines: the official client, replicas that fail, and refusals.

The server has two replicas of one rank each. The last test of it ends it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import torch
from openai.types.chat import ChatCompletion

from commands import call
from infer.fake_server import ServerProcess
from infer.tiny_model import POSITIONS, write_tiny_model
from ranvier.config.plan import Plan
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.infer.generate import generate_tokens
from ranvier.infer.model_source import ModelSource
from ranvier.infer.sampling_params import SamplingParams
from ranvier.infer.server.config import ServeConfig
from ranvier.infer.server.serve import ServerOptions, run_server

MESSAGES: list[Any] = [{"role": "user", "content": "Good morning."}]
PROMPT = "a b c"
LONG = POSITIONS - 16
"""Tokens of an answer that takes a while."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ab", "cd"]}, "size": {"type": "boolean"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Rome", "Oslo"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "ranvier", "serve", *map(str, words), "--serve.port", "0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory for temporary files of the server."""
    return tmp_path_factory.mktemp("tmp")


@pytest.fixture(scope="module")
def server(folder: Path, place: Path) -> Iterator[ServerProcess]:
    words = command(folder, "--plan.data", 2, "--device", "cpu", "--engine.block-size", 16)
    environment = {"TMPDIR": str(place), "OMP_NUM_THREADS": "1"}
    with ServerProcess(words, environment) as server:
        wait_until(lambda: states(server) == ["ready", "ready"])
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with make_client(server) as client:
        yield client


def make_client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def complete(client: openai.OpenAI, **options: Any) -> Any:
    given = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0.0}
    return client.completions.create(**{**given, **options})


def chat(client: openai.OpenAI, **options: Any) -> Any:
    given = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "seed": 5}
    return client.chat.completions.create(**{**given, **options})


def states(server: ServerProcess) -> list[str]:
    return [one["state"] for one in server.http.get("/health").json()["replicas"]]


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(2400):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("the condition was not reached")


def test_tokens_are_those_of_the_engine(client: openai.OpenAI, folder: Path) -> None:
    prompts = [PROMPT, "x" * 40, "another text"]
    model = ModelSource.find(folder).load(Grid({}), torch.device("cpu"), Plan())
    want = generate_tokens(
        model,
        [list(prompt.encode()) for prompt in prompts],
        SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
    )
    answer = complete(
        client, prompt=prompts, extra_body={"ignore_eos": True, "return_token_ids": True}
    )
    assert [choice.token_ids for choice in answer.choices] == want
    assert answer.usage.completion_tokens == 36


def test_a_stream_has_the_text_of_the_whole_answer(client: openai.OpenAI) -> None:
    for options in ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "max_tokens": 40}):
        whole = chat(client, **options)
        chunks = list(chat(client, **options, stream=True, stream_options={"include_usage": True}))
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage.model_copy(
            update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
        )
        reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
        assert reasons[-1] == whole.choices[0].finish_reason


def test_seeds_repeat_and_choices_differ(client: openai.OpenAI) -> None:
    def texts(seed: int) -> list[str]:
        answer = complete(client, n=2, seed=seed, temperature=1.0, max_tokens=16)
        return [choice.text for choice in answer.choices]

    first = texts(1)
    assert first[0] != first[1] and texts(1) == first and texts(2) != first


def test_log_probabilities_of_prompt_and_answer(client: openai.OpenAI) -> None:
    answer = complete(client, logprobs=2, max_tokens=4).choices[0]
    found = answer.logprobs
    assert len(found.token_logprobs) == len(found.top_logprobs) == 4
    # Greedy: each token is the most likely one.
    for value, top in zip(found.token_logprobs, found.top_logprobs, strict=True):
        assert value <= 0.0 and value == max(top.values()) and len(top) == 2
    scored = complete(client, echo=True, logprobs=0, max_tokens=0).choices[0]
    assert scored.text == PROMPT and scored.logprobs.token_logprobs[0] is None
    assert all(value < 0.0 for value in scored.logprobs.token_logprobs[1:])
    both = complete(client, echo=True, logprobs=0, max_tokens=4).choices[0]
    assert both.text == PROMPT + answer.text
    want = [*scored.logprobs.token_logprobs[1:], *found.token_logprobs]
    assert both.logprobs.token_logprobs[1:] == pytest.approx(want, abs=1e-5)
    top = chat(client, logprobs=True, top_logprobs=3, max_tokens=2).choices[0].logprobs.content
    assert [len(one.top_logprobs) for one in top] == [3, 3]


def test_answers_have_the_required_form(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    answer = chat(client, response_format=form, max_tokens=200)
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)
    # A model with random weights calls again and again, if it may.
    answer = chat(client, tools=TOOLS, tool_choice="required", max_tokens=200)
    named = {"type": "function", "function": {"name": "weather"}}
    once = chat(client, tools=TOOLS, tool_choice=named, max_tokens=200)
    assert once.choices[0].finish_reason == "tool_calls"
    for one in (answer, once):
        called = one.choices[0].message.tool_calls[0].function
        assert called.name == "weather"
        assert json.loads(called.arguments)["city"] in ("Rome", "Oslo")


CALL = r'<tool_call>\n\{"name": "weather", "arguments": \{"city": "(Rome|Oslo)"\}\}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "weather"}}
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"extra_body": {"structured_outputs": {"regex": "[ab]{3,5}x"}}}, "[ab]{3,5}x"),
    "choice": ({"extra_body": {"structured_outputs": {"choice": ["so", "it is"]}}}, "so|it is"),
    "grammar": ({"extra_body": {"structured_outputs": {"grammar": 'start: "q"'}}}, "q"),
    "json_object": ({"response_format": {"type": "json_object"}}, r"\{[\s\S]*"),
    "text": ({"response_format": {"type": "text"}}, r"[\s\S]+"),
}


@pytest.mark.parametrize("name", FORMS)
def test_answers_have_forms_of_all_kinds(client: openai.OpenAI, name: str) -> None:
    options, pattern = FORMS[name]
    choice = chat(client, max_tokens=24, **options).choices[0]
    assert re.fullmatch(pattern, choice.message.content), choice
    assert name in ("json_object", "text") or choice.finish_reason == "stop"
    stream = chat(client, max_tokens=24, stream=True, **options)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == choice.message.content


def test_prompts_have_four_forms(client: openai.OpenAI) -> None:
    tokens = list(PROMPT.encode())
    want = complete(client).choices[0].text
    for prompt, count in (([PROMPT, PROMPT], 2), (tokens, 1), ([tokens, tokens], 2)):
        answer = complete(client, prompt=prompt)
        assert [one.text for one in answer.choices] == [want] * count
        assert answer.usage.prompt_tokens == count * len(tokens)


def test_stop_strings_end_the_text(client: openai.OpenAI) -> None:
    whole = complete(client, max_tokens=24).choices[0].text
    stop = whole[5:7]
    for options in ({"stop": stop}, {"stop": ["never there", stop]}):
        choice = complete(client, max_tokens=24, **options).choices[0]
        assert choice.text == whole[: whole.index(stop)] and choice.finish_reason == "stop"
        stream = complete(client, max_tokens=24, stream=True, **options)
        assert "".join(chunk.choices[0].text for chunk in stream) == choice.text


def called(answer: Any) -> list[tuple[str, str]]:
    """Names and arguments of the calls of an answer, whole or streamed."""
    if isinstance(answer, ChatCompletion):
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        return [(one.function.name, one.function.arguments) for one in message.tool_calls or ()]
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for chunk in answer:
        for one in chunk.choices[0].delta.tool_calls or ():
            names[one.index] = names.get(one.index, "") + (one.function.name or "")
            arguments[one.index] = arguments.get(one.index, "") + one.function.arguments
    assert chunk.choices[0].finish_reason == "tool_calls"
    return [(names[i], arguments[i]) for i in sorted(names)]


def test_tools_are_called_as_often_as_allowed(client: openai.OpenAI) -> None:
    # Random weights call no tool by themselves, so the text is forced.
    forced = {"structured_outputs": {"regex": rf"{CALL}\n{CALL}"}}
    cases: list[tuple[dict[str, Any], int]] = [
        ({"tool_choice": "auto", "extra_body": forced}, 2),
        ({"tool_choice": "auto", "extra_body": forced, "parallel_tool_calls": False}, 1),
        ({"tool_choice": "required", "parallel_tool_calls": False}, 1),
        ({"tool_choice": NAMED}, 1),
    ]
    for options, count in cases:
        found = called(chat(client, tools=TOOLS, max_tokens=300, **options))
        assert [name for name, _ in found] == ["weather"] * count, options
        assert all(json.loads(text)["city"] in ("Rome", "Oslo") for _, text in found)
        assert called(chat(client, tools=TOOLS, max_tokens=300, stream=True, **options)) == found


def test_async_clients_get_what_sync_ones_do(client: openai.OpenAI, server: ServerProcess) -> None:
    async def run() -> list[str]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as other:
            assert [one.id async for one in await other.models.list()] == ["tiny"]

            async def ask(seed: int) -> str:
                stream = await other.chat.completions.create(
                    model="tiny", messages=MESSAGES, max_tokens=12, seed=seed, stream=True
                )
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            with pytest.raises(openai.NotFoundError):
                await other.completions.create(model="huge", prompt="x")
            return await asyncio.gather(*map(ask, range(8)))

    want = [chat(client, seed=seed).choices[0].message.content for seed in range(8)]
    assert asyncio.run(run()) == want


def test_mistakes_that_the_engine_finds_are_bad_requests(client: openai.OpenAI) -> None:
    """Clients repeat requests after a 500, but not after a 400."""
    complex_one = {"structured_outputs": {"regex": "(a?){200}a{200}"}}
    hopeless = {"structured_outputs": {"regex": "a+"}, "allowed_token_ids": [98]}
    for body, part in ((complex_one, "too complex"), (hopeless, "forbid all tokens")):
        for stream in (False, True):
            with pytest.raises(openai.APIError, match=part) as caught:
                list(complete(client, stream=stream, extra_body=body))
            assert caught.value.type == "invalid_request_error"
            assert stream or isinstance(caught.value, openai.BadRequestError)
    assert complete(client).choices[0].text


def test_a_ready_server_shows_no_progress(server: ServerProcess) -> None:
    health = server.http.get("/health").json()
    assert health["status"] == "ok"
    assert [(one["progress"], one["cause"]) for one in health["replicas"]] == [(None, None)] * 2


def test_a_prompt_that_is_too_long_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=f"{POSITIONS} positions") as error:
        complete(client, prompt="x" * POSITIONS, max_tokens=1)
    assert error.value.code == "context_length_exceeded"
    assert complete(client, prompt="x" * (POSITIONS - 1), max_tokens=1).choices[0].text is not None


def test_a_killed_replica_fails_alone_and_comes_back(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    engines = server.child_pids(b"run_replica")
    assert len(engines) == 2
    has_begun = concurrent.futures.Future[None]()

    def read(number: int) -> tuple[int, str]:
        """Number of pieces of a stream, and the error that ended it."""
        options = {"ignore_eos": True, "return_token_ids": True}
        count = 0
        try:
            for _ in complete(
                client, prompt=f"{number} x", max_tokens=LONG, stream=True, extra_body=options
            ):
                count += 1
                if count == 2 and not has_begun.done():
                    has_begun.set_result(None)
        except openai.APIError as error:
            return count, str(error)
        return count, ""

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        running = [threads.submit(read, number) for number in range(4)]
        has_begun.result(120)
        wait_until(lambda: running_requests(server) == 4)
        os.kill(engines[0], signal.SIGKILL)
        results = [one.result(240) for one in running]
    errors = [error for _, error in results if error]
    assert len(errors) == 2 and all("its process has ended" in error for error in errors), results
    server.wait_for_line("has ended with code -9")
    wait_until(lambda: states(server) == ["ready", "ready"])
    answers = [complete(client, prompt=f"again {i}").choices[0].text for i in range(4)]
    assert all(answers)
    assert engines[1] in server.child_pids(b"run_replica"), "the other one went on"


def running_requests(server: ServerProcess) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("ranvier:num_requests_running")
    )


def test_sigterm_finishes_open_requests_and_leaves_nothing(
    server: ServerProcess, client: openai.OpenAI, place: Path
) -> None:
    group = process_group(server.process.pid)
    assert len(group) >= 3
    stream = complete(client, max_tokens=LONG, stream=True, extra_body={"ignore_eos": True})
    next(stream)
    # As Ctrl-C and systemd do it: to all processes.
    os.killpg(server.process.pid, signal.SIGTERM)
    server.wait_for_line("Stopping after")
    assert server.http.get("/ready").status_code == 503
    with pytest.raises(openai.InternalServerError) as refused:
        complete(client)
    assert refused.value.code == "draining" and refused.value.response.headers["retry-after"]
    assert list(stream)[-1].choices[0].finish_reason == "length"
    assert server.process.wait(60) == 0
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", server.port))
    wait_until(lambda: not process_group(server.process.pid))
    assert server.lines[-2:][0] == "The server has stopped."
    assert list(place.iterdir()) == []
    names = [name for name in os.listdir("/dev/shm") if any(str(pid) in name for pid in group)]
    assert names == []


def process_group(pid: int) -> list[int]:
    """Processes of a group that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
            if int(group) == pid and state != "Z":
                found.append(int(path.parent.name))
    return found


# ---- without a server -----------------------------------------------------------------------


def test_dry_run_shows_memory_and_the_longest_request(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--engine.kv-cache-gib", "0.001")
    assert call("serve", str(folder), "--dry-run", *small) == 0
    text = capsys.readouterr().out
    assert f"Longest request: {POSITIONS} tokens" in text and "KV cache: 0.001 GiB" in text
    assert "Device: CPU, weights in fp32" in text
    words = ("--random", "--model.size", "llama3-8b", "--dry-run")
    assert call("serve", *words, "--device", "cpu") == 0
    text = capsys.readouterr().out
    # Eight billion parameters of four bytes.
    assert "Weights: 29.9" in text and "KV cache: 1 GiB" in text, text
    grid = ("--plan.row", "2", "--plan.data", "2")
    assert call("serve", *words, *grid, "--cluster", "dgx-h200") == 0
    text = capsys.readouterr().out
    assert "Weights: 7.48 GiB" in text and "Longest request: 8,192 tokens" in text, text
    # 90 % of the memory of a device without its weights.
    assert "weights in bf16" in text and "KV cache: 118.3 GiB" in text, text


def test_dry_run_counts_the_pages_of_all_ranks_of_context(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("serve", str(folder), "--dry-run", "--engine.kv-cache-gib", "0.00005")
    assert call(*words) == 0
    text = capsys.readouterr().out
    assert "2 blocks of 64 tokens" in text and "Longest request: 129 tokens" in text, text
    assert call(*words, "--plan.context", "3") == 0
    text = capsys.readouterr().out
    assert "2 blocks of 192 tokens" in text and "Longest request: 385 tokens" in text, text
    assert "64 tokens on each of 3 ranks of context" in text, text
    assert "Requests of that length at the same time: 1" in text, text


def test_replicas_are_no_options(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        call("serve", "--help")
    text = capsys.readouterr().out
    assert "--serve.port" in text and "--replica" not in text


def refusals(folder: Path) -> dict[str, tuple[str, ...]]:
    return {
        "is neither a run nor a model": (str(folder.parent),),
        "is not known. Random weights": ("--random", "--model.size", "huge"),
        "Neither a path nor --random": (),
        "is too large. The model has 512 positions": (
            *(str(folder), "--dry-run", "--engine.max-model-len", "513"),
        ),
        "must fit. Use a larger engine.kv_cache_gib": (
            *(str(folder), "--dry-run", "--engine.kv-cache-gib", "0.00001"),
            *("--engine.max-model-len", "400"),
        ),
        "--adapter 'mine' is not valid": (str(folder), "--adapter", "mine"),
        "is not an adapter. It must be": (str(folder), "--adapter", f"mine={folder}"),
        "row=3 does not divide": (str(folder), "--plan.row", "3"),
        "engine.block_size=0 is too small": (str(folder), "--engine.block-size", "0"),
        "serve.port=70000 is too large": (str(folder), "--serve.port", "70000"),
    }


def test_what_cannot_be_served_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part, words in refusals(folder).items():
        assert call("serve", *words) == PlanError.exit_code, part
        text = capsys.readouterr().err
        assert part in text and "Traceback" not in text, text


def test_an_engine_that_can_never_start_ends_the_server(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = f"raise SystemExit({PlanError.exit_code})"
    options = ServerOptions(config=ServeConfig(port=0), folder=folder)
    started = []

    def launch(path: str, index: int) -> subprocess.Popen[bytes]:
        started.append(index)
        return subprocess.Popen([sys.executable, "-S", "-c", program])

    assert run_server(options, launch) == PlanError.exit_code
    assert started == [0] and "started again" not in capsys.readouterr().out


# ---- more processes -------------------------------------------------------------------------


@pytest.mark.full
def test_a_pool_smaller_than_a_request_is_refused_by_the_engine(folder: Path) -> None:
    words = ("--engine.kv-cache-gib", 0.0001, "--engine.max-model-len", 400, "--device", "cpu")
    ended = subprocess.run(command(folder, *words), capture_output=True, text=True, check=False)
    assert ended.returncode == PlanError.exit_code
    assert "must fit. Use a larger engine.kv_cache_gib" in ended.stderr
    assert "Traceback" not in ended.stderr + ended.stdout


GRIDS = [("--plan.row", 2), ("--plan.pipe", 2), ("--plan.col", 2), ("--plan.context", 2)]


@pytest.mark.full
@pytest.mark.parametrize("words", GRIDS)
def test_a_grid_gives_the_same_answers_and_drains(
    folder: Path, words: tuple[Any, ...], tmp_path: Path
) -> None:
    """Signals to all processes, as from a terminal, do not end ranks before the front."""
    texts = []
    for more in ((), words):
        with (
            ServerProcess(
                command(folder, "--device", "cpu", *more), {"TMPDIR": str(tmp_path)}
            ) as server,
            make_client(server) as client,
        ):
            texts.append(
                [complete(client).choices[0].text, chat(client).choices[0].message.content]
            )
            stream = complete(client, max_tokens=100, stream=True, extra_body={"ignore_eos": True})
            next(stream)
            for pid in (server.process.pid, *server.child_pids(b"run_replica")):
                os.kill(pid, signal.SIGINT)
            assert list(stream)[-1].choices[0].finish_reason == "length"
            assert server.process.wait(60) == 0
        assert list(tmp_path.iterdir()) == []
    assert texts[0] == texts[1]


@pytest.mark.full
def test_random_weights_are_served_with_structured_output() -> None:
    words = ("--random", "--model.size", "tiny", "--device", "cpu")
    with ServerProcess(command(*words)) as server, make_client(server) as client:
        (model,) = client.models.list().data
        assert model.id == "tiny"
        answer = complete(client, prompt="t5 t6", max_tokens=3)
        assert len(answer.choices[0].text.split()) == 3
        more = {"structured_outputs": {"choice": ["t7 t8", "t9"]}}
        answer = complete(client, prompt="t5 t6", max_tokens=8, extra_body=more)
        assert answer.choices[0].text.strip() in ("t7 t8", "t9")
