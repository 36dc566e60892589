"""Bodies of requests: what is read, and what is refused with which parameter."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ranvier.infer.sampling_params import StructuredOutput
from ranvier.infer.server.api_errors import ApiError
from ranvier.infer.server.json_body import MAX_DEPTH, parse_json
from ranvier.infer.server.protocol import ChatBody, CompletionBody, parse_body

NOT_JSON = [
    b"",
    b"{",
    b'{"a": NaN}',
    b'{"a": Infinity}',
    b'{"a": -1e999}',
    b'{"a": "\xff"}',
    b'{"a": "\\ud800"}',
    b'{"\\udc00": 1}',
    b'{"a": ' + b"9" * 5000 + b"}",
    b"[" * 100_000,
    b'{"a": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}",
]


@pytest.mark.parametrize("data", NOT_JSON, ids=lambda data: str(data[:20]))
def test_what_is_not_strict_json_is_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_json(data)
    assert caught.value.status == 400 and caught.value.code == "invalid_json"


def test_json_up_to_the_limits_is_read() -> None:
    deep = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert parse_json(deep)[0] is not None
    assert parse_json('"\\ud83d\\ude00 é"'.encode()) == "😀 é"


USER = [{"role": "user", "content": "x"}]
WRONG: list[tuple[type, dict[str, Any], str | None]] = [
    (CompletionBody, {}, "prompt"),
    (CompletionBody, {"prompt": 1}, "prompt"),
    (CompletionBody, {"prompt": ["a", 1]}, "prompt"),
    (CompletionBody, {"prompt": [[1], ["a"]]}, "prompt"),
    (CompletionBody, {"prompt": "x", "temperature": "1"}, "temperature"),
    (CompletionBody, {"prompt": "x", "temperature": True}, "temperature"),
    (CompletionBody, {"prompt": "x", "temperature": 10**400}, "temperature"),
    (CompletionBody, {"prompt": "x", "n": 0}, "n"),
    (CompletionBody, {"prompt": "x", "n": 1.5}, "n"),
    (CompletionBody, {"prompt": "x", "stream": "yes"}, "stream"),
    (CompletionBody, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
    (CompletionBody, {"prompt": "x", "max_tokens": 10**30}, "max_tokens"),
    (CompletionBody, {"prompt": "x", "top_p": 0}, "top_p"),
    (CompletionBody, {"prompt": "x", "seed": 2**63}, "seed"),
    (CompletionBody, {"prompt": "x", "logprobs": True}, "logprobs"),
    (CompletionBody, {"prompt": "x", "stream_options": {}}, "stream_options"),
    (CompletionBody, {"prompt": "x", "stop": [1]}, "stop"),
    (CompletionBody, {"prompt": "x", "logit_bias": {"1": "a"}}, "logit_bias.1"),
    (CompletionBody, {"prompt": "x", "structured_outputs": {"choice": []}}, "structured_outputs"),
    (
        CompletionBody,
        {"prompt": "x", "structured_outputs": {"regex": "a", "grammar": "b"}},
        "structured_outputs",
    ),
    (
        CompletionBody,
        {"prompt": "x", "response_format": {"type": "json_schema"}},
        "response_format",
    ),
    (CompletionBody, {"prompt": "x", "response_format": {"type": "xml"}}, "response_format.type"),
    (ChatBody, {"messages": []}, "messages"),
    (ChatBody, {"messages": [1]}, "messages[0]"),
    (ChatBody, {"messages": [{"role": "user"}]}, "messages"),
    (ChatBody, {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    (ChatBody, {"messages": USER, "chat_template": "x"}, "chat_template"),
    (ChatBody, {"messages": USER, "top_logprobs": 1}, "top_logprobs"),
    (ChatBody, {"messages": USER, "logprobs": 5}, "logprobs"),
    (ChatBody, {"messages": USER, "tool_choice": "required"}, "tool_choice"),
    (ChatBody, {"messages": USER, "tools": [{"function": {"name": "a b"}}]}, "tools"),
    (ChatBody, {"messages": USER, "continue_final_message": True}, "continue_final_message"),
    (
        ChatBody,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content",
    ),
    (ChatBody, {"messages": USER, "audio": {}}, "audio"),
]


@pytest.mark.parametrize(("cls", "body", "name"), WRONG, ids=str)
def test_mistakes_name_the_parameter(cls: type, body: dict[str, Any], name: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(cls, json.dumps(body).encode(), strict=False)
    assert caught.value.status == 400 and caught.value.param == name
    assert len(caught.value.message) < 400 and caught.value.message.count(". ") >= 1


def test_null_means_the_default_and_harmless_values_pass() -> None:
    body = {"prompt": "x", "temperature": None, "best_of": 1, "suffix": None, "n": 2.0}
    found, ignored = parse_body(CompletionBody, json.dumps(body).encode(), strict=True)
    assert found.temperature == 1.0 and found.n == 2 and not ignored


def test_unknown_parameters_are_ignored_or_refused() -> None:
    data = b'{"prompt": "x", "novelty": 1}'
    assert parse_body(CompletionBody, data, strict=False)[1] == ["novelty"]
    with pytest.raises(ApiError) as caught:
        parse_body(CompletionBody, data, strict=True)
    assert caught.value.param == "novelty" and caught.value.code == "unknown_parameter"


FORMATS: list[tuple[dict[str, Any], StructuredOutput | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, StructuredOutput("json_object")),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        StructuredOutput("json_schema", "{}"),
    ),
    ({"structured_outputs": {"json_object": False}}, None),
    ({"structured_outputs": {"regex": "a+"}}, StructuredOutput("regex", "a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutput("choice", '["a", "b"]')),
    ({"structured_outputs": {"json": '{"a": 1}'}}, StructuredOutput("json_schema", '{"a": 1}')),
]


@pytest.mark.parametrize(("body", "structure"), FORMATS, ids=str)
def test_formats_become_structures(body: dict[str, Any], structure: StructuredOutput) -> None:
    data = json.dumps({"prompt": "x", **body}).encode()
    assert parse_body(CompletionBody, data, strict=True)[0].read_structure() == structure


def test_arguments_of_calls_become_objects_for_the_template() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    body = parse_body(ChatBody, json.dumps({"messages": messages}).encode(), strict=True)[0]
    shown = body.messages[0].to_template("messages[0]")
    assert shown["content"] == "" and shown["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    call["function"]["arguments"] = "[1]"  # type: ignore[index]
    body = parse_body(ChatBody, json.dumps({"messages": messages}).encode(), strict=True)[0]
    with pytest.raises(ApiError):
        body.messages[0].to_template("messages[0]")
