"""Structured output: masks, forced tokens, and grammars that are made to explode."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import random
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers

from ranvier.data.tokenizer import ByteTokenizer, Tokenizer, train_tokenizer
from ranvier.errors import PlanError
from ranvier.infer import grammar
from ranvier.infer.grammar import StructuredOutputError
from ranvier.infer.sampling_params import StructuredOutput
from ranvier.infer.structured_output import (
    GrammarCompiler,
    GrammarLimits,
    GrammarMatcher,
    json_schema_output,
)
from ranvier.system import file_handles


def byte_fallback_tokenizer() -> Tokenizer:
    """A BPE of characters with `▁` for the space, whose unknown characters are bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [chr(code) for code in range(33, 127)]
    merges = [("▁", "t"), ("i", "n"), ('"', ":"), ("{", '"'), ("t", "r"), ("tr", "u"), ("tru", "e")]
    pieces += ["".join(pair) for pair in merges]
    model = tokenizers.models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=merges,
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    made = tokenizers.Tokenizer(model)
    made.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    made.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
        ]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(made.to_str(), len(pieces), 2)


TEXTS = ('{"name": "Ada", "age": 36, "tags": ["a", "b"], "null": null, "true": true}\n',) * 4 + (
    "the quick brown fox jumps over the lazy dog; städte und straßen, 東京\n",
)


@functools.cache
def tokenizer(name: str) -> Tokenizer:
    if name == "bytes":
        return ByteTokenizer()
    if name == "byte_level":
        return train_tokenizer(TEXTS, 420)
    return byte_fallback_tokenizer()


TOKENIZERS = ("bytes", "byte_level", "byte_fallback")


@functools.cache
def compiler(name: str) -> GrammarCompiler:
    """A compiler that tries nothing in another process; the model has 7 tokens more."""
    one = tokenizer(name)
    return GrammarCompiler(one, one.vocab_size + 7, [one.eos_token_id], trusts_input=True)


def allowed(matcher: GrammarMatcher) -> np.ndarray:
    bits = np.unpackbits(matcher.next_mask().view(np.uint8), bitorder="little")
    return np.flatnonzero(bits)


def sample(
    matcher: GrammarMatcher, one: Tokenizer, draw: random.Random, limit: int = 400
) -> tuple[str, bool]:
    """A text of random tokens within the masks, and whether it has come to its end."""
    tokens: list[int] = []
    closing = {one.eos_token_id, *(int(i) for i in np.concatenate(one.encode(['"', "}", "]"])))}
    while not matcher.is_finished and len(tokens) < limit:
        forced = matcher.forced_tokens() if draw.random() < 0.5 else []
        if forced:
            choices = set(allowed(matcher))
            assert forced[0] in choices
        else:
            mask = [int(token) for token in allowed(matcher)]
            # Random texts would hardly ever end.
            ends = [token for token in mask if token in closing]
            forced = [draw.choice(ends if ends and draw.random() < 0.4 else mask)]
        for token in forced:
            matcher.advance(token)
        tokens += forced
    return one.decode(tokens), matcher.is_finished


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "pattern": "^[a-z]{1,4}@[a-z]{1,4}$"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS: list[Any] = [
    True,
    {"type": "object"},
    PERSON,
    {"type": "array", "items": PERSON, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "items": False},
    {"enum": ["red", "grün", 3, None, {"a": [1, 2]}]},
    {"const": {"quote": '"\\\n', "text": "東京"}},
    {"type": "number", "minimum": -2.5, "exclusiveMaximum": 7},
    {"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 100},
    {"type": ["string", "null"], "maxLength": 5},
    {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "boolean"}}]},
    {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}]},
    {"allOf": [{"required": ["a"]}, {"properties": {"a": {"type": "integer"}}}]},
    {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 3},
    {"type": "object", "minProperties": 1, "additionalProperties": {"type": "boolean"}},
    {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
    {"type": "object", "patternProperties": {"^n": {"type": "null"}}},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_every_text_is_valid(name: str, schema: Any) -> None:
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    ends = 0
    for seed in range(5):
        matcher = compiler(name).compile(json_schema_output(schema))
        text, ended = sample(matcher, tokenizer(name), random.Random(seed))
        if ended:
            ends += 1
            validator.validate(json.loads(text))
    assert ends


@pytest.mark.parametrize("name", TOKENIZERS)
def test_json_objects_are_objects(name: str) -> None:
    for seed in range(5):
        matcher = compiler(name).compile(StructuredOutput("json_object"))
        text, ended = sample(matcher, tokenizer(name), random.Random(seed), limit=3000)
        assert ended and isinstance(json.loads(text), dict)


REGEXES = [
    r"[a-f0-9]{2}(:[a-f0-9]{2}){3}",
    r"(yes|no), \d{1,3}%?",
    r"[ä-ü]{1,4}",
    r"a*b?",
    r"(\d\d/){2}\d",
]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("pattern", REGEXES)
def test_texts_match_the_regex(name: str, pattern: str) -> None:
    for seed in range(5):
        matcher = compiler(name).compile(StructuredOutput("regex", pattern))
        text, ended = sample(matcher, tokenizer(name), random.Random(seed))
        assert ended and re.fullmatch(pattern, text), text


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_choice_is_one_of_the_texts(name: str) -> None:
    choices = ["yes", "yesterday", "nö", 'a "quoted"\\\n text', "/x/ | y", "东京"]
    structure = StructuredOutput("choice", json.dumps(choices))
    found = set()
    for seed in range(40):
        matcher = compiler(name).compile(structure)
        text, ended = sample(matcher, tokenizer(name), random.Random(seed))
        assert ended and text in choices, text
        found.add(text)
    assert len(found) > 3


LARK = 'start: term (("+" | "-") term){0,3}\nterm: /[0-9]{1,3}/ | "(" start ")"'
GBNF = 'root ::= term (("+" | "-") term)?\nterm ::= [0-9] | "(" root ")"'


@pytest.mark.parametrize("text", [LARK, GBNF], ids=["lark", "gbnf"])
def test_grammars_of_two_syntaxes(text: str) -> None:
    ends = 0
    for seed in range(12):
        matcher = compiler("byte_level").compile(StructuredOutput("grammar", text))
        made, ended = sample(matcher, tokenizer("byte_level"), random.Random(seed), limit=100)
        if ended:
            ends += 1
            eval(re.sub(r"\b0+(\d)", r"\1", made), {})
    assert ends > 3


def test_the_end_token_is_allowed_only_where_the_text_may_end() -> None:
    one = tokenizer("byte_level")
    matcher = compiler("byte_level").compile(StructuredOutput("regex", "ab?"))
    assert one.eos_token_id not in allowed(matcher) and not matcher.is_accepting
    with pytest.raises(StructuredOutputError, match="does not continue"):
        compiler("byte_level").compile(StructuredOutput("regex", "a")).advance(one.eos_token_id)
    (letter,) = one.encode(["a"])[0]
    matcher.advance(int(letter))
    states = [matcher.is_finished]
    assert one.eos_token_id in allowed(matcher)
    matcher.advance(one.eos_token_id)
    states.append(matcher.is_finished)
    assert states == [False, True] and matcher.forced_tokens() == []
    with pytest.raises(StructuredOutputError, match="after the end"):
        matcher.advance(int(letter))


def test_a_complete_text_is_finished_before_its_end_token() -> None:
    one = tokenizer("byte_level")
    matcher = compiler("byte_level").compile(StructuredOutput("choice", '["true"]'))
    tokens = matcher.forced_tokens()
    assert one.decode(tokens) == "true"
    for token in tokens:
        assert not matcher.is_finished
        matcher.advance(token)
    assert matcher.is_finished and [*allowed(matcher)] == [one.eos_token_id]


def test_several_end_tokens_and_none() -> None:
    one = tokenizer("byte_level")
    other = int(one.encode(["~"])[0][0])
    two = GrammarCompiler(one, one.vocab_size, [one.eos_token_id, other], trusts_input=True)
    matcher = two.compile(StructuredOutput("regex", "(a|~)?"))
    assert {one.eos_token_id, other} < {*allowed(matcher)}
    none = GrammarCompiler(one, one.vocab_size, [], trusts_input=True)
    matcher = none.compile(StructuredOutput("regex", "a"))
    matcher.advance(int(allowed(matcher)[0]))
    assert matcher.is_finished


def test_a_smaller_vocabulary_than_the_tokenizers() -> None:
    one = tokenizer("byte_level")
    small = GrammarCompiler(one, 300, [one.eos_token_id], trusts_input=True)
    matcher = small.compile(StructuredOutput("json_object"))
    assert matcher.next_mask().shape == (10,) and max(allowed(matcher)) < 300
    assert all(token < 300 for token in matcher.forced_tokens())


def test_special_tokens_are_not_text() -> None:
    one = tokenizer("byte_fallback")
    matcher = compiler("byte_fallback").compile(StructuredOutput("regex", "(.|\\n)*"))
    assert not {0, 1} & {*allowed(matcher)} and one.eos_token_id in allowed(matcher)
    assert max(allowed(matcher)) < one.vocab_size


def test_matchers_of_one_grammar_are_independent() -> None:
    first, second = (compiler("bytes").compile(StructuredOutput("regex", "ab")) for _ in range(2))
    first.advance(ord("a"))
    assert [*allowed(first)] == [ord("b")] and [*allowed(second)] == [ord("a")]


REFUSED: list[tuple[str, str, str]] = [
    ("json_schema", "{", "Expecting property name"),
    ("json_schema", "[1]", "not an object or true"),
    ("json_schema", "false", "not an object or true"),
    ("json_schema", '{"minimum": NaN}', "NaN is not JSON"),
    ("json_schema", '{"minimum": 1e999}', "1e999 is too large"),
    ("json_schema", '{"const": "\\ud800"}', "surrogate|hex escape"),
    ("json_schema", "[" * 60_000, "nested too deeply|recursion"),
    ("json_schema", '{"not": {}}', "Unimplemented keys"),
    ("json_schema", '{"uniqueItems": true}', "Unimplemented keys"),
    ("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}', "Unimplemented keys"),
    ("json_schema", '{"items": {"minProperties": 2}}', "minProperties is 2"),
    ("json_schema", '{"required": ["a", "a"], "minProperties": 2}', "minProperties is 2"),
    ("json_schema", '{"exclusiveMinimum": true, "minimum": 3}', "exclusiveMinimum is true"),
    ("json_schema", '{"multipleOf": -2}', "multipleOf is -2"),
    ("json_schema", '{"$ref": "https://example.com/x"}', "not present"),
    ("json_schema", '{"format": "colour"}', "Unknown format"),
    ("regex", "(", "unclosed group"),
    ("regex", "(?=a)a", "look-around"),
    ("regex", "x" * 70_000, "70000 characters"),
    ("choice", "[]", "not a list"),
    ("choice", '{"a": 1}', "not a list"),
    ("choice", "[1]", "1 is not a text"),
    ("grammar", "start: missing", "missing"),
    ("other", "", "'other' is not a kind"),
]


@pytest.mark.parametrize(("kind", "value", "reason"), REFUSED, ids=lambda word: str(word)[:30])
def test_what_is_not_accepted_is_named(kind: Any, value: str, reason: str) -> None:
    with pytest.raises(StructuredOutputError, match=reason) as error:
        compiler("bytes").check(StructuredOutput(kind, value))
    assert str(error.value).count(". ") >= 2 and len(str(error.value)) < 500


def test_a_key_cannot_repeat_a_property_in_another_spelling() -> None:
    schema = {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    for text in ('{"a":1,"a":"x"}', '{"\\u0061":"x"}'):
        matcher = compiler("bytes").compile(json_schema_output(schema))
        with pytest.raises(StructuredOutputError, match="does not continue"):
            for byte in text.encode():
                matcher.advance(byte)


# ---- untrusted input ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded() -> Iterator[GrammarCompiler]:
    """A compiler that tries grammars in another process, with limits that are soon exceeded."""
    one = tokenizer("byte_level")
    limits = GrammarLimits(compile_seconds=1.0, compile_mib=256, initial_lexer_fuel=10**9)
    made = GrammarCompiler(one, one.vocab_size, [one.eos_token_id], limits=limits)
    yield made
    made.close()


def exploding_schema() -> str:
    """A schema whose expansion doubles with every definition."""
    definitions: dict[str, Any] = {"x0": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}}
    for i in range(1, 24):
        before = {"$ref": f"#/$defs/x{i - 1}"}
        definitions[f"x{i}"] = {
            "allOf": [{"anyOf": [before, {"required": [f"c{i}"]}]}, {"anyOf": [before, before]}]
        }
    return json.dumps({"$defs": definitions, "$ref": "#/$defs/x23"})


HOSTILE = [
    StructuredOutput("regex", "((a{1000}){1000}){1000}"),
    StructuredOutput("json_schema", exploding_schema()),
]


def test_a_grammar_that_explodes_is_refused_and_others_compile(guarded: GrammarCompiler) -> None:
    one = tokenizer("byte_level")
    for structure in HOSTILE:
        for _ in range(2):
            with pytest.raises(StructuredOutputError, match=r"1 s or 256 MiB|not accepted"):
                guarded.compile(structure)
    text, ended = sample(guarded.compile(json_schema_output(PERSON)), one, random.Random(1))
    assert ended and jsonschema.Draft202012Validator(PERSON).is_valid(json.loads(text))


def test_the_process_is_read_among_many_open_files(guarded: GrammarCompiler) -> None:
    """A server with more than a thousand connections compiles grammars, too."""
    file_handles.raise_limit()
    worker = guarded._worker
    assert worker is not None
    worker.close()
    with contextlib.ExitStack() as stack:
        for _ in range(1030):
            stack.enter_context(open(os.devnull))
        worker.check(StructuredOutput("regex", "a+"))
        assert worker._process is not None and worker._process.stdout is not None
        assert worker._process.stdout.fileno() > 1024
    worker.close()


def test_a_process_that_compiles_is_ended_at_once(guarded: GrammarCompiler) -> None:
    worker = guarded._worker
    assert worker is not None
    worker.check(StructuredOutput("regex", "b+"))
    worker._limits = dataclasses.replace(worker._limits, compile_seconds=3600.0)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        process = worker._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        checked = threads.submit(worker.check, StructuredOutput("regex", "c+"))
        while not worker._lock.locked():
            pass
        worker.close()
        with pytest.raises(StructuredOutputError):
            checked.result()
    worker._limits = dataclasses.replace(worker._limits, compile_seconds=1.0)


def test_errors_are_the_same_in_the_process(guarded: GrammarCompiler) -> None:
    for kind, value, reason in REFUSED[6:9]:
        with pytest.raises(StructuredOutputError, match=reason):
            guarded.check(StructuredOutput(kind, value))  # type: ignore[arg-type]


def test_a_grammar_that_is_slow_later_ends_its_own_request() -> None:
    one = tokenizer("byte_level")
    limits = GrammarLimits(max_lexer_states=200)
    made = GrammarCompiler(
        one, one.vocab_size, [one.eos_token_id], limits=limits, trusts_input=True
    )
    matcher = made.compile(StructuredOutput("regex", "[bc](a{1000}){1000}"))
    with pytest.raises(StructuredOutputError, match="too complex"):
        sample(matcher, one, random.Random(0))
    matcher = made.compile(StructuredOutput("regex", "[ab]{3}"))
    matcher._limits = GrammarLimits(step_seconds=-1.0)
    with pytest.raises(StructuredOutputError, match="at most -1 s"):
        matcher.next_mask()


def test_grammars_that_were_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from ranvier.infer import structured_output

    calls: list[str] = []
    build = grammar.build_parser

    def counted(one: Any, structure: StructuredOutput, limits: GrammarLimits) -> Any:
        calls.append(structure.value)
        return build(one, structure, limits)

    monkeypatch.setattr(structured_output, "build_parser", counted)
    monkeypatch.setattr(structured_output, "CACHED_GRAMMARS", 2)
    made = GrammarCompiler(ByteTokenizer(), 257, [256], trusts_input=True)
    for value in ("a", "b", "a", "c", "a", "b", "("):
        if value == "(":
            for _ in range(2):
                with pytest.raises(StructuredOutputError):
                    made.check(StructuredOutput("regex", value))
        else:
            made.check(StructuredOutput("regex", value))
    assert calls == ["a", "b", "c", "b", "("]


def test_without_the_extra_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(PlanError, match=r"pip install 'ranvier\[grammar\]'") as error:
        GrammarCompiler(ByteTokenizer(), 257, [256])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("trusts_input", [True, False])
def test_the_tokenizer_must_have_all_bytes(trusts_input: bool) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<eos>": 1}, unk_token="a"))
    one = Tokenizer(words.to_str(), 2, 1)
    made = GrammarCompiler(one, 2, [1], trusts_input=trusts_input)
    for value in ("a", "b"):
        with pytest.raises(StructuredOutputError, match="byte-level BPE"):
            made.check(StructuredOutput("regex", value))
    made.close()


def test_the_extra_names_the_package() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert grammar.INSTALL_COMMAND == "pip install 'ranvier[grammar]'"
    assert 'grammar = ["llguidance' in text
