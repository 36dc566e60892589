"""The official client of OpenAI against a server with a fake engine, over a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from infer.fake_server import FakeServer, write_model
from ranvier.infer.server.parameters import RequestSeeds

MESSAGES: list[Any] = [{"role": "user", "content": "Say SAY:Good morning.|"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    folder = tmp_path_factory.mktemp("served")
    with FakeServer(
        write_model(folder / "model"),
        usage_log=str(folder / "usage.jsonl"),
        allowed_origins=["https://example.org"],
        adapters=["tuned"],
    ) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: FakeServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client: openai.OpenAI, prompt: Any = "abc", **options: Any) -> Any:
    return client.completions.create(model="fake", prompt=prompt, **options)


def test_models_are_listed(client: openai.OpenAI) -> None:
    model, adapter = client.models.list().data
    assert model.id == "fake" and model.max_model_len == 4096  # type: ignore[attr-defined]
    assert (model.parent, adapter.parent) == (None, "fake")  # type: ignore[attr-defined]
    assert (adapter.id, adapter.root) == ("tuned", "fake")  # type: ignore[attr-defined]
    assert client.models.retrieve("fake").id == "fake"
    assert client.models.retrieve("tuned").id == "tuned"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_the_name_of_the_model_chooses_an_adapter(client: openai.OpenAI) -> None:
    base, tuned = (
        client.completions.create(model=name, prompt="abc", temperature=0.0)
        for name in ("fake", "tuned")
    )
    assert (base.model, tuned.model) == ("fake", "tuned")
    assert base.choices[0].text != tuned.choices[0].text
    with pytest.raises(openai.NotFoundError, match="This server has fake, tuned"):
        client.completions.create(model="other", prompt="abc")


def test_seeds_that_are_not_given_come_from_the_seed_of_the_server(client: openai.OpenAI) -> None:
    seeds = RequestSeeds(0)
    known = {str(seeds.draw()) for _ in range(10_000)}
    drawn = []
    for _ in range(2):
        answer = client.completions.create(model="fake", prompt="abc")
        drawn.append(answer.system_fingerprint.rpartition("-")[2])
    assert known.issuperset(drawn) and drawn[0] != drawn[1]
    assert RequestSeeds(1).draw() != RequestSeeds(0).draw() == RequestSeeds(0).draw()


def test_a_conversation_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=MESSAGES)
    (choice,) = answer.choices
    assert choice.message.content == "Good morning." and choice.finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-") and answer.system_fingerprint
    assert answer.usage is not None
    # The template writes the role before and after the message; the end token counts.
    prompt = f"<user>{MESSAGES[0]['content']}\n<assistant>"
    assert answer.usage.prompt_tokens == len(prompt) and answer.usage.completion_tokens == 14
    again = client.chat.completions.create(model="fake", messages=MESSAGES)
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == len(prompt) // 16 * 16


def test_a_stream_has_role_text_reason_and_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "Good morning."
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert not chunks[-1].choices and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 14
    assert len({chunk.id for chunk in chunks}) == 1


def test_n_choices_and_seeds(client: openai.OpenAI) -> None:
    def texts(seed: int | None, temperature: float = 1.0) -> list[str]:
        answer = complete(client, n=3, seed=seed, temperature=temperature, max_tokens=8)
        assert [one.index for one in answer.choices] == [0, 1, 2]
        assert answer.usage.prompt_tokens == 3 and answer.usage.completion_tokens == 24
        return [one.text for one in answer.choices]

    assert texts(5) == texts(5) and len(set(texts(5))) == 3
    assert texts(5) != texts(6) and texts(None) != texts(None)
    assert len(set(texts(5, 0.0))) == 1


def test_streams_of_several_choices_are_complete(client: openai.OpenAI) -> None:
    whole = complete(client, n=3, seed=1, max_tokens=20)
    found = ["", "", ""]
    for chunk in complete(client, n=3, seed=1, max_tokens=20, stream=True):
        for one in chunk.choices:
            found[one.index] += one.text
    assert found == [one.text for one in whole.choices]


def test_stop_strings_end_the_text(client: openai.OpenAI) -> None:
    prompt = "SAY:one two three|"
    assert complete(client, prompt, max_tokens=50, stop="two").choices[0].text == "one "
    kept = complete(
        client,
        prompt,
        max_tokens=50,
        stop=["three", "two"],
        extra_body={"include_stop_str_in_output": True},
    ).choices[0]
    assert kept.text == "one two" and kept.finish_reason == "stop"
    assert complete(client, prompt, max_tokens=4, stop=["two"]).choices[0].finish_reason == "length"


def test_log_probabilities_in_both_shapes(client: openai.OpenAI) -> None:
    for count in (0, 2):
        answer = client.chat.completions.create(
            model="fake", messages=MESSAGES, logprobs=True, top_logprobs=count, max_tokens=3
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        assert [one.token for one in logprobs.content] == list("Goo")
        assert [one.bytes for one in logprobs.content] == [[71], [111], [111]]
        assert {len(one.top_logprobs) for one in logprobs.content} == {count}
        shape = complete(client, "SAY:Goo|", logprobs=count, max_tokens=3).choices[0].logprobs
        assert shape.tokens == list("Goo") and shape.token_logprobs == [-0.5] * 3
        assert {len(one) for one in shape.top_logprobs} == {max(1, count)}
        assert shape.text_offset == [0, 1, 2]
    assert complete(client, max_tokens=1).choices[0].logprobs is None


def test_echo_repeats_the_prompt_with_its_log_probabilities(client: openai.OpenAI) -> None:
    choice = complete(client, "SAY:yes|", echo=True, logprobs=1, max_tokens=1).choices[0]
    assert choice.text == "SAY:yes|y"
    assert choice.logprobs.tokens == list("SAY:yes|y")
    assert choice.logprobs.token_logprobs == [None, *[-0.5] * 8]
    only = complete(client, "SAY:yes|", echo=True, logprobs=1, max_tokens=0)
    assert only.choices[0].text == "SAY:yes|" and only.usage.completion_tokens == 0
    assert only.choices[0].logprobs.tokens == list("SAY:yes|")


def test_log_probabilities_of_a_long_prompt(client: openai.OpenAI) -> None:
    text = "x" * 1000
    choice = complete(client, text, echo=True, logprobs=20, max_tokens=1).choices[0]
    assert choice.text[:1000] == text and len(choice.logprobs.tokens) == 1001
    assert [len(one) for one in choice.logprobs.top_logprobs[1:]] == [20] * 1000


def test_prompts_have_four_forms(client: openai.OpenAI) -> None:
    tokens = list(b"SAY:four|")
    one = "SAY:four|"
    for prompt, count in ((one, 1), ([one, one], 2), (tokens, 1), ([tokens, tokens], 2)):
        answer = complete(client, prompt, max_tokens=10)
        assert [choice.text for choice in answer.choices] == ["four"] * count
        assert answer.usage.prompt_tokens == len(tokens) * count


def test_tokens_are_returned_on_request(client: openai.OpenAI) -> None:
    answer = complete(client, "SAY:ab|", extra_body={"return_token_ids": True}).choices[0]
    assert answer.token_ids == [97, 98, 256] and answer.prompt_token_ids == list(b"SAY:ab|")


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {}}},
    }
    for name in ("look", "add")
]
CALLS = (
    '<tool_call>{"name": "look", "arguments": {"at": "sky"}}</tool_call>'
    '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
)


@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "function", "function": {"name": "add"}}], ids=str
)
def test_tool_calls_are_parsed_whole_and_streamed(client: openai.OpenAI, choice: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": f"SAY:Well {CALLS}|"}]

    def ask(**options: Any) -> Any:
        return client.chat.completions.create(
            model="fake", messages=messages, tools=TOOLS, tool_choice=choice, **options
        )

    (whole,) = ask().choices
    assert whole.finish_reason == "tool_calls" and whole.message.content.strip() == "Well"
    found = [(one.function.name, one.function.arguments) for one in whole.message.tool_calls]
    assert found == [("look", '{"at": "sky"}'), ("add", "{}")]
    names: dict[int, str] = {}
    arguments = {0: "", 1: ""}
    reasons = []
    for chunk in ask(stream=True):
        reasons.append(chunk.choices[0].finish_reason)
        for call in chunk.choices[0].delta.tool_calls or ():
            if call.function.name:
                assert call.id.startswith("call_")
                names[call.index] = call.function.name
            arguments[call.index] += call.function.arguments
    assert [(names[i], arguments[i]) for i in (0, 1)] == found and reasons[-1] == "tool_calls"


def test_calls_stay_text_without_tools(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": f"SAY:{CALLS}|"}]
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        answer = client.chat.completions.create(model="fake", messages=messages, **options)
        assert answer.choices[0].message.content == CALLS
        assert answer.choices[0].finish_reason == "stop"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 3.0}, "temperature"),
    ({"logprobs": 21}, "logprobs"),
    ({"logit_bias": {"300": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"max_tokens": 5000}, "max_tokens"),
    ({"prompt": [1, 300]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": "x" * 4096}, "prompt"),
    ({"best_of": 2}, "best_of"),
    ({"extra_body": {"recurrence": 2}}, "recurrence"),
    ({"extra_body": {"exit": "kl:0"}}, "exit"),
    ({"suffix": "x"}, "suffix"),
    ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
    ({"extra_body": {"structured_outputs": {"regex": "("}}}, "response_format"),
    ({"n": 129}, "n"),
    ({"stop": [""]}, "stop"),
]


@pytest.mark.parametrize(("options", "name"), BAD, ids=str)
def test_mistakes_are_bad_requests(
    client: openai.OpenAI, options: dict[str, Any], name: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, **{"prompt": "abc", **options})
    assert caught.value.param == name and caught.value.type == "invalid_request_error"


def test_a_long_prompt_names_both_numbers(client: openai.OpenAI) -> None:
    # One token of the longest sequence must be left for the answer.
    assert complete(client, [1] * 4095, max_tokens=1).usage.prompt_tokens == 4095
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, [1] * 4096, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"
    assert "4096 tokens" in caught.value.message and "4096 positions" in caught.value.message


def test_truncation_keeps_the_last_tokens(client: openai.OpenAI) -> None:
    answer = complete(
        client,
        "x" * 5000 + "SAY:end|",
        max_tokens=3,
        extra_body={"truncate_prompt_tokens": 8},
    )
    assert answer.choices[0].text == "end" and answer.usage.prompt_tokens == 8


def test_errors_have_the_types_of_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="It is refused"):
        complete(client, "REFUSE")
    with pytest.raises(openai.InternalServerError, match="add is broken"):
        complete(client, "BREAK_ADD")
    with pytest.raises(openai.InternalServerError, match="it is broken"):
        complete(client, "BREAK_REQUEST")
    with pytest.raises(openai.APIError, match="it is broken"):
        list(complete(client, "BREAK_REQUEST", stream=True))
    with pytest.raises(openai.NotFoundError, match="/v1/completions"):
        client.embeddings.create(model="fake", input="x")
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="fake", input="x")
    # None of these has touched another request.
    assert complete(client, "SAY:fine|", max_tokens=9).choices[0].text == "fine"


def test_unknown_parameters_are_named_in_a_header(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model="fake", prompt="abc", extra_body={"new_idea": 1, "a b\n": 2}
    )
    assert raw.headers["x-ranvier-ignored-parameters"] == "new_idea,a?b?"
    assert raw.parse().choices[0].text


def test_request_ids_are_echoed_if_harmless(client: openai.OpenAI) -> None:
    for given, kept in (("trace-1", True), ("a b", False), ("x" * 65, False)):
        raw = client.completions.with_raw_response.create(
            model="fake", prompt="abc", extra_headers={"x-request-id": given}
        )
        assert (raw.headers["x-request-id"] == given) is kept and raw.headers["x-request-id"]


def test_messages_of_all_kinds_are_rendered(server: FakeServer) -> None:
    body = {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": "So"},
        ],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "tools": [{"type": "function", "function": {"name": "add"}}],
    }
    answer = server.http.post("/apply-template", json=body)
    assert answer.json() == {"prompt": "[tool add]<system>Be brief.\n<user>a\nb\n<assistant>So"}
    tokens = server.http.post("/tokenize", json={**body, "return_token_strs": True}).json()
    assert bytes(tokens["tokens"]).decode() == answer.json()["prompt"]
    assert tokens["count"] == len(tokens["tokens"]) and tokens["token_strs"][0] == "["
    text = server.http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert text == answer.json()


def test_async_clients_share_the_server(server: FakeServer) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client:

            async def ask(i: int) -> str:
                stream = await client.chat.completions.create(
                    model="fake",
                    messages=[{"role": "user", "content": f"SAY:number {i}|"}],
                    stream=True,
                )
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            return await asyncio.gather(*map(ask, range(20)))

    assert asyncio.run(run()) == [f"number {i}" for i in range(20)]


def test_usage_is_logged_without_prompts(server: FakeServer, client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(model="fake", prompt="SECRET SAY:hi|")
    path = Path(json.loads(server.process.args[2])["config"]["usage_log"])  # type: ignore[index]
    name = raw.headers["x-request-id"]
    # The log is written after the answer.
    server.wait_for_line(name)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    (line,) = [one for one in lines if one["request_id"] == name]
    assert line["prompt_tokens"] == 14 and line["completion_tokens"] == 3
    assert line["finish_reasons"] == ["stop"] and line["time_to_first_token_seconds"] > 0
    assert "SECRET" not in path.read_text() + "\n".join(server.lines)


def test_only_named_origins_may_use_the_server(server: FakeServer) -> None:
    for origin, allowed in (("https://example.org", True), ("https://evil.example", False)):
        answer = server.http.get("/v1/models", headers={"origin": origin})
        assert ("access-control-allow-origin" in answer.headers) is allowed


def test_the_page_and_the_description_are_served(server: FakeServer) -> None:
    page = server.http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    paths = server.http.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize"} <= paths.keys()


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
    before = read_metrics(server)
    for i in range(10):
        # Streams and whole answers count alike, and so do several choices.
        body = {"prompt": f"{i:032}", "max_tokens": 10, "stream": i % 2 == 0}
        assert server.http.post("/v1/completions", json=body).status_code == 200
    after = read_metrics(server)
    found = {name: after[name] - before.get(name, 0.0) for name in after}
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
        "host_seconds_count": 100,
    }
    assert {name: found.get(name) for name in expected} == expected
