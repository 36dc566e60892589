"""Tool calls in generated text: families, streaming, and grammars of required calls."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier.data.tokenizer import ByteTokenizer
from ranvier.errors import PlanError
from ranvier.infer.grammar import StructuredOutputError
from ranvier.infer.structured_output import GrammarCompiler
from ranvier.infer.tool_calls import (
    TOOL_PARSERS,
    Delta,
    TextDelta,
    Tool,
    ToolCall,
    detect_tool_parser,
    join_deltas,
    parse_tool_calls,
    tool_choice_output,
)

F = ToolCall("f", '{"a": 1}')
NESTED = ToolCall("g.h", '{"q": "}{\\"]", "list": [1, {"x": {}}]}')
CASES: list[tuple[str, str, str, list[ToolCall]]] = [
    ("hermes", "just text <tool", "just text <tool", []),
    ("hermes", "", "", []),
    ("hermes", " \n", " \n", []),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [F]),
    (
        "hermes",
        'Let me look. \n\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
        '<tool_call>\n{"arguments": {"a": 1}, "name": "f"}\n</tool_call>\n',
        "Let me look.",
        [F, F],
    ),
    (
        "hermes",
        f'<tool_call>{{"name": "g.h", "arguments": {NESTED.arguments}, "id": {{"}}": 1}}}}'
        "</tool_call> Done.",
        " Done.",
        [NESTED],
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [ToolCall("f", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [F],
    ),
    ("hermes", "a <tool_call>no JSON</tool_call>", "a <tool_call>no JSON</tool_call>", []),
    ("hermes", '<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
    # Cut by the length limit.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a', "", [ToolCall("f", '{"a')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool', "", [F]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [F]),
    ("llama3_json", '\n<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [F]),
    (
        "llama3_json",
        '{"type": "function", "name": "f", "parameters": {"a": 1}}; '
        '{"name": "f", "parameters": {"a": 1}}',
        "",
        [F, F],
    ),
    ("llama3_json", '{"answer": {"name": 1}} is it', '{"answer": {"name": 1}} is it', []),
    (
        "llama3_json",
        'See {"name": "f", "parameters": {}}',
        'See {"name": "f", "parameters": {}}',
        [],
    ),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', "", [F]),
    (
        "mistral",
        'Yes.[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, '
        f'{{"name": "g.h", "arguments": {NESTED.arguments}}}]',
        "Yes.",
        [F, NESTED],
    ),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f{"a": 1}', "", [F, F]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{"a": 1}', "", [F]),
    ("mistral", "[TOOL_CALLS]no call", "[TOOL_CALLS]no call", []),
    ("mistral", "[TOOL_CALLS]f[AR", "[TOOL_CALLS]f[AR", []),
    ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
]


@pytest.mark.parametrize(("name", "text", "outside", "calls"), CASES)
def test_calls_are_found(name: str, text: str, outside: str, calls: list[ToolCall]) -> None:
    assert parse_tool_calls(TOOL_PARSERS[name](), text) == (outside, calls)


def feed_pieces(name: str, pieces: list[str]) -> list[Delta]:
    parser = TOOL_PARSERS[name]()
    return [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()


@pytest.mark.parametrize(("name", "text", "outside", "calls"), CASES)
def test_every_split_gives_the_same(
    name: str, text: str, outside: str, calls: list[ToolCall]
) -> None:
    letters = feed_pieces(name, list(text))
    assert join_deltas(letters) == (outside, calls)
    for i in range(len(text) + 1):
        assert join_deltas(feed_pieces(name, [text[:i], text[i:]])) == (outside, calls)


PIECES = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *('{"name": "f", "arguments": ', '{"name": "f", "parameters": ', '{"a": "}"}', "}", "{", "]"),
    *("[", ",", ";", '"', "\\", " ", "\n", "f", "text", "é", '{"arguments": {}, "name": "g"}'),
]


@given(
    st.sampled_from(sorted(TOOL_PARSERS)),
    st.lists(st.sampled_from(PIECES), max_size=14).map("".join),
    st.randoms(use_true_random=False),
)
def test_any_text_and_any_split(name: str, text: str, draw: random.Random) -> None:
    cuts = sorted(draw.randrange(len(text) + 1) for _ in range(6))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = join_deltas(feed_pieces(name, [text]))
    assert join_deltas(feed_pieces(name, pieces)) == whole
    assert join_deltas(feed_pieces(name, list(text))) == whole
    if not whole[1]:
        assert whole[0] == text


def test_text_and_arguments_come_as_soon_as_they_are_certain() -> None:
    parser = TOOL_PARSERS["hermes"]()
    assert parser.feed("Hello <") == [TextDelta("Hello")]
    assert parser.feed("b> ") == [TextDelta(" <b>")]
    assert parser.feed('<tool_call>{"name": "f"') == []
    assert parser.feed(', "arguments": ') == []
    deltas = parser.feed('{"a": ')
    assert join_deltas(deltas) == ("", [ToolCall("f", '{"a": ')])


TEMPLATES = {
    "{{ '<tool_call>' }}": "hermes",
    "[AVAILABLE_TOOLS] [TOOL_CALLS]": "mistral",
    "<|python_tag|>": "llama3_json",
    "{{ messages }}": None,
}


@pytest.mark.parametrize(("template", "name"), TEMPLATES.items())
def test_the_template_determines_the_parser(template: str, name: str | None) -> None:
    assert detect_tool_parser(template) == name


TOOLS = [
    Tool(
        name="weather",
        parameters={
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "東京"]}, "days": {"$ref": "#/$defs/days"}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    ),
    Tool(name='now"', parameters={"properties": {}, "additionalProperties": False}),
]


def sample_text(compiler: GrammarCompiler, structure: Any, draw: random.Random) -> str:
    """A random text of a grammar, of bytes."""
    matcher = compiler.compile(structure)
    tokens: list[int] = []
    while not matcher.is_finished and len(tokens) < 2000:
        mask = matcher.next_mask().view("uint8")
        allowed = [i for i in range(257) if mask[i // 8] >> i % 8 & 1]
        token = 256 if 256 in allowed and draw.random() < 0.5 else draw.choice(allowed)
        matcher.advance(token)
        tokens.append(token)
    assert matcher.is_finished
    return ByteTokenizer().decode(tokens)


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_required_calls_parse_and_are_valid(name: str) -> None:
    compiler = GrammarCompiler(ByteTokenizer(), 257, [256], trusts_input=True)
    counts = set()
    for seed in range(8):
        structure = tool_choice_output(name, TOOLS, {})
        text, calls = parse_tool_calls(
            TOOL_PARSERS[name](), sample_text(compiler, structure, random.Random(seed))
        )
        assert not text and calls
        counts.add(len(calls))
        for call in calls:
            arguments = json.loads(call.arguments)
            assert call.name in {"weather", 'now"'}
            if call.name == "weather":
                assert arguments["city"] in ("Oslo", "東京") and 1 <= arguments["days"] <= 9
            else:
                assert arguments == {}
    assert len(counts) > 1
    for structure in (
        tool_choice_output(name, TOOLS, {}, name="weather"),
        tool_choice_output(name, TOOLS[:1], {}, several=False),
    ):
        for seed in range(4):
            text = sample_text(compiler, structure, random.Random(seed))
            (call,) = parse_tool_calls(TOOL_PARSERS[name](), text)[1]
            assert call.name == "weather"


def test_a_special_token_is_written_as_a_token() -> None:
    structure = tool_choice_output("mistral", TOOLS, {"[TOOL_CALLS]": 9})
    assert structure.value.startswith('start: <[9]> "["')


def test_what_cannot_be_required_is_named() -> None:
    with pytest.raises(PlanError, match="names the tool 'rain', and tools has: weather, now\""):
        tool_choice_output("hermes", TOOLS, {}, name="rain")
    with pytest.raises(StructuredOutputError, match="minProperties is 3"):
        tool_choice_output("hermes", [Tool(name="f", parameters={"minProperties": 3})], {})
