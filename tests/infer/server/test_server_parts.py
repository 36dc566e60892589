"""Parts of the server without a process: messages, routing, keys, settings, and the worker."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import math
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.fake_engine import FakeEngine
from infer.fake_server import write_model
from ranvier.data.tokenizer import ByteTokenizer, train_tokenizer
from ranvier.errors import PlanError
from ranvier.infer.detokenizer import IncrementalDetokenizer
from ranvier.infer.request import EngineStats, Request, TokenLogprobs, TokenOutput
from ranvier.infer.sampling_params import SamplingParams, StructuredOutput
from ranvier.infer.server import engine_worker, messages, serve
from ranvier.infer.server.answers import ChatAnswer, Choice
from ranvier.infer.server.api_errors import ApiError
from ranvier.infer.server.authentication import ApiKeys, read_api_keys
from ranvier.infer.server.config import ServeConfig
from ranvier.infer.server.engine_client import EngineClient
from ranvier.infer.server.engine_worker import EngineWorker, FrontConnection, report_fault
from ranvier.infer.server.metrics import ServerMetrics
from ranvier.infer.server.openapi import build_openapi
from ranvier.infer.server.request_log import HttpRecord, RequestLog
from ranvier.infer.server.routing import PrefixMemory, ReplicaLoad, choose_replica, name_blocks
from ranvier.infer.server.serve import check_serve_extra
from ranvier.infer.server.served_model import ServedModel
from ranvier.infer.tool_calls import HermesParser

LETTERS = "ab\né€😀"


def test_requests_and_outputs_survive_the_socket() -> None:
    params = SamplingParams(
        max_tokens=None,
        temperature=0.25,
        logit_bias={3: -1.5},
        allowed_token_ids=(1, 2),
        bad_words=((1,), (2, 3)),
        stop=("é",),
        stop_token_ids=frozenset([7, 8]),
        logprobs=0,
        structured_output=StructuredOutput("regex", "a+"),
        seed=-(2**63),
    )
    request = Request(
        request_id="a", prompt_token_ids=(1, 2), params=params, stream=3, parent_id="b", priority=-1
    )
    plain = Request(request_id="c", prompt_token_ids=(5,), params=SamplingParams())
    for one in (request, plain):
        (found,) = messages.MessageReader().feed(
            messages.encode_message({"add": messages.pack_request(one)})
        )
        assert messages.unpack_request(found["add"]) == one
    scores = (TokenLogprobs(-1.0, 2, ((4, -0.5), (5, -float("inf")))),)
    outputs = [
        TokenOutput(request_id="a", token_ids=(1,)),
        TokenOutput(
            request_id="a",
            token_ids=(0,),
            logprobs=scores,
            prompt_logprobs=scores,
            num_cached_tokens=16,
            finish_reason="stop",
            stop_token=0,
            queue_seconds=0.5,
        ),
        TokenOutput(request_id="a", finish_reason="error", error="why"),
        TokenOutput(request_id="a", finish_reason="error", error="why", is_invalid=True),
        TokenOutput(request_id="a", token_ids=(1,), prompt_logprobs=()),
    ]
    for output in outputs:
        (found,) = messages.MessageReader().feed(
            messages.encode_message({"x": messages.pack_output(output)})
        )
        assert messages.unpack_output(found["x"]) == output
    stats = EngineStats(num_running=3, collective_bytes={"row": 5})
    assert messages.unpack_stats(messages.pack_stats(stats)) == stats


@given(st.lists(st.text(LETTERS), max_size=5), st.integers(1, 7))
def test_messages_may_arrive_in_any_pieces(texts: list[str], size: int) -> None:
    data = b"".join(messages.encode_message({"x": text}) for text in texts)
    reader = messages.MessageReader()
    found = [m for i in range(0, len(data), size) for m in reader.feed(data[i : i + size])]
    assert [one["x"] for one in found] == texts


def test_names_of_blocks_depend_on_all_before_them() -> None:
    names = name_blocks(range(70), 16, "")
    assert len(names) == 4 and len(set(names)) == 4
    assert name_blocks(range(33), 16, "") == names[:2]
    assert name_blocks([9, *range(1, 70)], 16, "")[1:] != names[1:]
    assert name_blocks(range(70), 16, "salt")[0] != names[0]


def test_a_replica_is_chosen_by_prefix_then_load() -> None:
    memories = {0: PrefixMemory(), 1: PrefixMemory()}
    names = name_blocks(range(64), 16, "")

    def choose(*loads: tuple[int, int]) -> int:
        return choose_replica(names, memories, {i: ReplicaLoad(*x) for i, x in enumerate(loads)})

    assert choose((0, 0), (0, 0)) == 0 and choose((0, 1), (0, 0)) == 1
    assert choose((5, 0), (0, 9)) == 1
    memories[0].add(names[:2])
    assert choose((5, 9), (0, 0)) == 0
    # A common prefix does not overload a replica.
    assert choose((5, 17), (0, 0)) == 1
    memories[1].add(names[:3])
    assert choose((0, 0), (5, 9)) == 1


def test_keys_come_from_file_and_variable(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nfirst\n\n  second \n")
    keys = read_api_keys(str(path), "third, ,fourth")
    assert sorted(keys) == ["first", "fourth", "second", "third"]
    known = ApiKeys.from_texts(keys)
    assert known.find_owner(b"Bearer second") and known.find_owner(b"bearer third ")
    owners = {known.find_owner(f"Bearer {key}".encode()) for key in keys}
    assert len(owners) == 4 and not any(key in str(owners) for key in keys)
    for header in (b"", b"Bearer", b"Bearer x", b"Basic first", b"first", b"Bearer \xff"):
        assert known.find_owner(header) is None
    assert ApiKeys().find_owner(b"") == ""
    path.write_text("#\n")
    for wrong in (str(path), str(tmp_path / "none")):
        with pytest.raises(PlanError, match="api_key_file"):
            read_api_keys(wrong, "")


BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"port": 70000}, "serve.port=70000"),
    ({"drain_seconds": -1.0}, "serve.drain_seconds=-1.0"),
    ({"max_queued_requests": 0}, "serve.max_queued_requests=0"),
    ({"host": "a\nb"}, "serve.host"),
    ({"allowed_origins": ("example.org",)}, "https://example.org"),
    ({"chat_template": "/nowhere"}, "serve.chat_template"),
    ({"api_key_file": "/nowhere"}, "serve.api_key_file"),
]


@pytest.mark.parametrize(("values", "part"), BAD_SETTINGS)
def test_settings_are_checked(values: dict[str, Any], part: str) -> None:
    (problem,) = ServeConfig(**values).find_problems()
    assert part in problem and not list(ServeConfig().find_problems())


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_serve_extra()
    monkeypatch.setitem(sys.modules, "starlette", None)
    with pytest.raises(PlanError, match=r"starlette is not installed.*ranvier\[serve\]"):
        check_serve_extra()


def test_the_front_imports_no_torch_and_the_library_no_http() -> None:
    code = (
        "import sys, ranvier.infer.server.serve\n"
        "assert not {'uvicorn', 'starlette', 'prometheus_client'} & {*sys.modules}\n"
        "import ranvier.infer.server.engine_worker, ranvier.infer.server.front_process\n"
        "assert 'torch' not in sys.modules and 'pyarrow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class ScriptedConnection(FrontConnection):
    """A front that sends given messages and keeps what it gets."""

    def __init__(self, script: list[list[dict[str, Any]]]) -> None:
        self.script = script
        self.sent: list[dict[str, Any]] = []
        self.waits: list[bool] = []
        self.is_closed = False
        self.replica = 0

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def receive(self, *, wait: bool) -> Any:
        self.waits.append(wait)
        return iter(self.script.pop(0) if self.script else [{"stop": True}])

    def close(self) -> None:
        self.is_closed = True


def build_request(name: str, prompt: str, count: int = 3) -> dict[str, Any]:
    params = SamplingParams(max_tokens=count)
    request = Request(request_id=name, prompt_token_ids=tuple(prompt.encode()), params=params)
    return {"add": messages.pack_request(request)}


def test_the_worker_waits_only_without_requests() -> None:
    script: list[list[dict[str, Any]]] = [[build_request("a", "x")], [], [], []]
    connection = ScriptedConnection(script)
    assert EngineWorker(FakeEngine(), connection).run(messages.EngineInfo()) == 0
    assert connection.waits == [True, False, False, True, True]
    steps = [one["step"] for one in connection.sent if "step" in one]
    assert [len(outputs) for outputs, *_ in steps] == [0, 1, 1, 1]
    assert [seen for _, _, seen, _ in steps] == [0, 1, 1, 1]


def test_the_worker_isolates_requests_and_reports_faults() -> None:
    adds = [build_request(word, word) for word in ("REFUSE", "BREAK_ADD", "fine")]
    connection = ScriptedConnection([adds, [{"abort": "fine"}, {"abort": "unknown"}]])
    assert EngineWorker(FakeEngine(), connection).run(messages.EngineInfo()) == 0
    refused = [one["refused"][:2] for one in connection.sent if "refused" in one]
    assert refused == [["REFUSE", "invalid"], ["BREAK_ADD", "error"]]
    # The abort is seen before the next step.
    assert sum(len(one["step"][0]) for one in connection.sent if "step" in one) == 1
    connection = ScriptedConnection([[build_request("a", "BREAK_STEP")]])
    with pytest.raises(RuntimeError, match="the step is broken"):
        EngineWorker(FakeEngine(), connection).run(messages.EngineInfo())
    assert connection.sent[-1] == {"fault": "RuntimeError: the step is broken"}
    assert connection.is_closed


def test_the_worker_reads_all_that_has_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abort behind long prompts does not wait for further steps."""
    monkeypatch.setattr(engine_worker, "READ_BYTES", 16)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        connection = FrontConnection(str(tmp_path / "s"))
        front, _ = listener.accept()
        with front:
            sent: list[dict[str, Any]] = [{"abort": "x" * 50}, {"abort": "y"}, {"stop": True}]
            front.sendall(b"".join(messages.encode_message(one) for one in sent))
            assert list(connection.receive(wait=True)) == sent
            assert list(connection.receive(wait=False)) == []
        assert list(connection.receive(wait=True)) == []
        assert connection.is_closed
        connection.close()


def test_choices_of_a_prompt_share_its_tokens_in_a_message() -> None:
    prompts = [tuple(range(200)), (7,)]
    params = SamplingParams(max_tokens=3)
    requests = [
        Request(
            request_id=f"{prompt}{i}",
            prompt_token_ids=prompts[prompt],
            params=params,
            stream=3 * prompt + i,
            parent_id=f"{prompt}0" if i else "",
        )
        for prompt in (0, 1)
        for i in range(3)
    ]
    packed = list(messages.pack_requests(requests))
    assert len(packed) == 2
    (first, *_), second = (
        list(messages.unpack_requests(next(messages.MessageReader().feed(data))))
        for data in map(messages.encode_message, packed)
    )
    assert first == requests[0] and second == requests[3:]
    connection = ScriptedConnection([packed])
    engine = FakeEngine()
    worker = EngineWorker(engine, connection)
    worker._receive()
    assert worker.num_received == 6 and list(engine._waiting) == [
        one.request_id for one in requests
    ]


def test_engines_are_started_again_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "RESTART_SECONDS", (0.0,))
    monkeypatch.setattr(serve, "END_SECONDS", 0.0)
    started: list[int] = []

    def launch(_: str, index: int) -> subprocess.Popen[bytes]:
        started.append(index)
        if len(started) == 1:
            raise OSError(errno.ENOMEM, "no memory")
        return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])

    engines = serve.EngineProcesses(launch, "", 2)
    engines.start_missing()
    assert started == [0, 1]
    engines.start_missing()
    # The first could not be started, and the second has lost its connection.
    assert started == [0, 1, 0]
    engines.note_failure(1)
    process = engines._processes[1]
    engines.start_missing()
    assert process.wait(60) == -signal.SIGKILL
    engines.start_missing()
    engines.start_missing()
    assert started == [0, 1, 0, 1] and engines._processes[1].poll() is None
    engines.stop(at_once=True)


def test_a_full_disk_does_not_end_answers(capsys: pytest.CaptureFixture[str]) -> None:
    log = RequestLog("/dev/full", quiet=True)
    record = HttpRecord("r1", "POST", "/v1/completions", "-", usage={"prompt_tokens": 1})
    log.write(record)
    log.close()
    assert "The usage of r1 cannot be written: No space" in capsys.readouterr().err


def build_client(**options: Any) -> EngineClient:
    """A client with one replica that is ready."""
    client = EngineClient(ServerMetrics("x"), **options)
    (replica,) = client.replicas
    client.handle_message(replica, {"progress": "loading the model", "replica": 0})
    assert replica.progress
    info = messages.EngineInfo(max_model_len=64, vocab_size=256)
    client.handle_message(replica, {"hello": {**vars(info), "details": {}}})
    return client


def test_a_replica_that_is_ready_reports_no_progress() -> None:
    (replica,) = build_client().replicas
    assert replica.state == "ready" and replica.progress == "" and replica.cause == ""


def test_any_rank_tells_why_it_has_failed(tmp_path: Path) -> None:
    path = str(tmp_path / "s")

    async def run() -> list[str]:
        client = build_client()
        await client.start(path)
        request = Request(request_id="a", prompt_token_ids=(1,), params=SamplingParams())
        generation = client.submit([request])
        await asyncio.to_thread(report_fault, path, 0, MemoryError("none is left"))
        with pytest.raises(ApiError) as caught:
            await generation.next_outputs()
        # Nobody listens for a replica that does not exist, or at another place.
        await asyncio.to_thread(report_fault, path, 7, MemoryError())
        await asyncio.to_thread(report_fault, path + "x", 0, MemoryError())
        await client.close()
        (replica,) = client.replicas
        return [caught.value.message, replica.cause, replica.state]

    message, cause, state = asyncio.run(run())
    assert cause == "MemoryError: none is left" and cause in message and state == "down"


def test_requests_that_wait_too_long_are_ended_by_priority() -> None:
    async def run() -> list[bool]:
        client = build_client()
        sent = [
            client.submit(
                [
                    Request(
                        request_id=f"{priority}",
                        prompt_token_ids=(1,),
                        params=SamplingParams(),
                        priority=priority,
                    )
                ]
            )
            for priority in (5, 0)
        ]
        # One of the two runs: the younger one, whose priority is higher.
        stats = messages.pack_stats(EngineStats(num_running=1, num_waiting=1))
        client.handle_message(client.replicas[0], {"step": [[], stats, 2, 0.1]})
        client.end_overdue(math.inf)
        return [bool(one.records) for one in sent]

    assert asyncio.run(run()) == [False, True]


def build_answer(text: str, **options: Any) -> tuple[ChatAnswer, list[str]]:
    """An answer that has received a text letter by letter, and the requests it has ended."""
    tokenizer, params = ByteTokenizer(), SamplingParams()
    choice = Choice(
        index=0,
        request_id="a",
        prompt=(1,),
        params=params,
        stream=IncrementalDetokenizer(tokenizer, (1,), params),
        **options,
    )
    model = ServedModel(
        name="m", tokenizer=tokenizer, chat=None, make_text_stream=IncrementalDetokenizer
    )
    answer = ChatAnswer("id", model, "m", "f", [choice])
    ended = []
    for byte in text.encode():
        ended += answer.add([TokenOutput(request_id="a", token_ids=(byte,))])
    return answer, ended


def test_one_call_is_the_last_without_parallel_calls() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n'
    answer, ended = build_answer(3 * call, parser=HermesParser(), max_calls=1)
    choice = answer.choices["a"]
    assert [one["function"]["name"] for one in choice.calls] == ["f"] and ended == ["a"]
    assert choice.finish_reason == "tool_calls" and choice.text == ""
    answer, ended = build_answer(3 * call, parser=HermesParser())
    assert len(answer.choices["a"].calls) == 3 and not ended


@pytest.mark.parametrize(("is_invalid", "status"), [(True, 400), (False, 500)])
def test_errors_of_a_request_are_the_clients_if_they_are(is_invalid: bool, status: int) -> None:
    answer, _ = build_answer("x")
    output = TokenOutput(
        request_id="a", finish_reason="error", error="It is so.", is_invalid=is_invalid
    )
    with pytest.raises(ApiError) as caught:
        answer.add([output])
    assert caught.value.status == status and "It is so. " in caught.value.message + " "
    assert ".." not in caught.value.message


def test_tokens_have_bytes_and_texts() -> None:
    def make(tokenizer: Any) -> ServedModel:
        return ServedModel(name="m", tokenizer=tokenizer, make_text_stream=IncrementalDetokenizer)

    plain = make(ByteTokenizer())
    assert plain.token_bytes(0xE9) == b"\xe9" and plain.token_text(0xE9) == "bytes:\\xe9"
    assert plain.token_text(97) == "a" and plain.token_text(256) == "<|end|>"
    trained = make(train_tokenizer(["né né né new words in a text"] * 50, 280))
    for text in ("né words", "日本"):
        tokens = trained.encode_text(text, 0)
        assert b"".join(map(trained.token_bytes, tokens)).decode() == text


def test_the_description_names_every_parameter() -> None:
    document = build_openapi()
    chat = document["components"]["schemas"]["ChatBody"]
    names = {
        *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
        *("repetition_penalty", "logit_bias", "seed", "n", "max_tokens", "max_completion_tokens"),
        *("min_tokens", "stop", "stop_token_ids", "ignore_eos", "logprobs", "top_logprobs"),
        *("prompt_logprobs", "allowed_token_ids", "bad_words", "skip_special_tokens"),
        *("include_stop_str_in_output", "truncate_prompt_tokens", "priority", "cache_salt"),
        *("return_token_ids", "response_format", "structured_outputs", "tools", "tool_choice"),
        *("chat_template_kwargs", "add_generation_prompt", "continue_final_message", "stream"),
        *("stream_options", "user", "model", "messages", "parallel_tool_calls"),
    }
    assert names == set(chat["properties"]) and chat["required"] == ["messages"]
    assert {"prompt", "echo", "logprobs"} <= set(
        document["components"]["schemas"]["CompletionBody"]["properties"]
    )
    temperature = chat["properties"]["temperature"]["anyOf"][0]
    assert temperature == {"type": "number", "minimum": 0.0, "maximum": 2.0}


def test_a_directory_without_a_template_has_no_chat(tmp_path: Path) -> None:
    from ranvier.infer.server.served_model import read_model_directory

    folder = write_model(tmp_path / "model")
    assert read_model_directory(folder, IncrementalDetokenizer).chat is not None
    (folder / "tokenizer_config.json").unlink()
    model = read_model_directory(folder, IncrementalDetokenizer)
    assert model.chat is None and model.name == "model"
    assert dataclasses.is_dataclass(model)
