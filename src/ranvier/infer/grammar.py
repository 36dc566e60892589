"""Grammars of structured output, compiled with llguidance.

llguidance turns a JSON schema, a regular expression or a context-free grammar into a parser of
tokens. Its options are fixed here so that every text of an accepted schema is valid: unknown
formats and keywords are errors, whitespace is bounded, and strings have no `\\u` escapes, with
which a key could repeat a declared property under another spelling.

Limits bound the work of compiling and of each step, because requests are untrusted input.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ranvier.errors import PlanError, RanvierError
from ranvier.infer.sampling_params import StructuredOutput

INSTALL_COMMAND = "pip install 'ranvier[grammar]'"
DATA_KEYWORDS = frozenset({"const", "enum", "default", "examples", "x-guidance"})
"""Keywords of a schema whose values are data, not schemas."""
NAMED_SCHEMA_KEYWORDS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords whose values map names to schemas."""
JSON_OPTIONS: Mapping[str, Any] = {
    "item_separator": ",",
    "key_separator": ":",
    # Bounded: with any amount of it, a model may write whitespace until its length limit.
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}",
    "json_allowed_escapes": 'nrbtf\\"',
    "lenient": False,
    "coerce_one_of": False,
}


class StructuredOutputError(RanvierError):
    """A grammar that is not valid, too large or too slow, or a token outside of its language."""


@dataclass(frozen=True, kw_only=True)
class GrammarLimits:
    """Limits of compiling a grammar, and of each step of its parser."""

    max_characters: int = 65_536
    """Maximum length of a schema, regular expression or grammar."""
    compile_seconds: float = 3.0
    """Maximum time to compile a grammar and compute its first mask."""
    compile_mib: int = 512
    """Maximum additional memory to compile a grammar."""
    step_seconds: float = 0.25
    """Maximum CPU time of a mask or a token; a slower grammar ends its request."""
    max_lexer_states: int = 20_000
    """Maximum number of lexer states of a request, of 1 to 2 KiB each."""
    initial_lexer_fuel: int = 300_000
    """Limit of the work to build regular expressions; about 50,000 take a millisecond."""
    step_lexer_fuel: int = 100_000
    """Limit of the lexer's work for a mask; about 14,000 take a millisecond."""
    step_max_items: int = 30_000
    """Limit of the parser's items for a mask; about 20,000 take a millisecond."""


def import_llguidance() -> Any:
    """Returns the module llguidance, of the extra `grammar`."""
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise PlanError(
            f"The package llguidance cannot be imported ({error}). Structured output and required "
            f"tool calls need it. Install it: {INSTALL_COMMAND}"
        ) from None


def build_grammar_tokenizer(json_text: str, num_tokens: int, end_token_ids: Iterable[int]) -> Any:
    """Returns llguidance's tokenizer of a tokenizer.json.

    num_tokens: number of ids, at least the largest id of the file plus 1.
    """
    library = import_llguidance()
    try:
        return library.LLTokenizer(json_text, n_vocab=num_tokens, eos_token=list(end_token_ids))
    except BaseException as error:
        if not _is_library_error(error):
            raise
        raise StructuredOutputError(
            f"The tokenizer cannot be used for structured output: {error!s:.200}. Its tokens must "
            "be byte-level BPE, or have byte fallback. Send the request without structured output."
        ) from None


def build_parser(tokenizer: Any, structure: StructuredOutput, limits: GrammarLimits) -> Any:
    """Returns llguidance's parser of a grammar, before the first token, with its first mask."""
    library = import_llguidance()
    _check_size(structure, limits)
    try:
        parser = library.LLMatcher(
            tokenizer,
            _grammar_text(library, structure),
            log_level=0,
            limits=library.LLParserLimits(
                initial_lexer_fuel=limits.initial_lexer_fuel,
                step_lexer_fuel=limits.step_lexer_fuel,
                step_max_items=limits.step_max_items,
                max_lexer_states=limits.max_lexer_states,
                verbose_errors=False,
            ),
        )
        parser.compute_bitmask()
    except RanvierError:
        raise
    except BaseException as error:
        if not _is_library_error(error):
            raise
        raise _invalid(structure, str(error)) from None
    if parser.is_error():
        raise _invalid(structure, parser.get_error())
    return parser


def _is_library_error(error: BaseException) -> bool:
    """Whether llguidance raised it: plain exceptions, or a Rust panic."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _grammar_text(library: Any, structure: StructuredOutput) -> str:
    """Returns a grammar in the JSON format of llguidance."""
    matcher = library.LLMatcher
    text: str
    match structure.kind:
        case "json_object":
            text = matcher.grammar_from_json_schema('{"type":"object"}', overrides=JSON_OPTIONS)
        case "json_schema":
            schema = parse_json(structure)
            check_schema(schema)
            # The library takes options in objects only; `true` is the schema without keywords.
            schema = {} if schema is True else schema
            text = matcher.grammar_from_json_schema(
                json.dumps(schema, ensure_ascii=False, separators=(",", ":")),
                overrides=JSON_OPTIONS,
            )
        case "regex":
            text = matcher.grammar_from_regex(structure.value)
        case "choice":
            text = matcher.grammar_from_lark(_choice_grammar(structure))
        case "grammar":
            convert = importlib.import_module("llguidance.gbnf_to_lark").any_to_lark
            text = matcher.grammar_from_lark(convert(structure.value))
    return text


def parse_json(structure: StructuredOutput) -> Any:
    """Returns the value of a structure that is JSON text."""

    def refuse_constant(name: str) -> float:
        raise ValueError(f"{name} is not JSON")

    def parse_number(text: str) -> float:
        number = float(text)
        if not math.isfinite(number):
            raise ValueError(f"the number {text:.40} is too large")
        return number

    try:
        value = json.loads(
            structure.value, parse_constant=refuse_constant, parse_float=parse_number
        )
        json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError:
        raise _invalid(structure, "it has a lone surrogate") from None
    except RecursionError:
        raise _invalid(structure, "it is nested too deeply") from None
    except ValueError as error:
        raise _invalid(structure, str(error)) from None


def _choice_grammar(structure: StructuredOutput) -> str:
    """Returns the Lark grammar of a JSON list of texts."""
    choices = parse_json(structure)
    if not isinstance(choices, list) or not choices:
        raise _invalid(structure, f"{structure.value:.80} is not a list of at least one text")
    for choice in choices:
        if not isinstance(choice, str):
            raise _invalid(structure, f"{choice!r:.80} is not a text")
    texts = (json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices))
    return "start: " + " | ".join(texts)


def check_schema(schema: Any) -> None:
    """Raises a `StructuredOutputError` for a schema whose texts might not be valid."""
    if not isinstance(schema, dict) and schema is not True:
        raise _invalid(StructuredOutput("json_schema"), "it is not an object or true")
    if problem := next(_schema_problems(schema), None):
        raise _invalid(StructuredOutput("json_schema"), problem)


def _schema_problems(schema: Any) -> Iterator[str]:
    """Yields what llguidance accepts in a schema although its texts might not be valid."""
    if isinstance(schema, list):
        for one in schema:
            yield from _schema_problems(one)
    if not isinstance(schema, dict):
        return
    for keyword in ("exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(schema.get(keyword), bool):
            yield f"{keyword} is {str(schema[keyword]).lower()}, not a number"
    divisor = schema.get("multipleOf", 1)
    if not isinstance(divisor, int | float) or isinstance(divisor, bool) or divisor <= 0:
        yield f"multipleOf is {divisor!r:.40}, not a number above 0"
    required = schema.get("required")
    names = {str(name) for name in required} if isinstance(required, list) else set()
    least = schema.get("minProperties", 0)
    # The names of further properties may repeat, so only required ones are counted.
    if isinstance(least, int) and least > max(1, len(names)):
        yield f"minProperties is {least}, more than the number of required properties"
    for keyword, value in schema.items():
        if keyword in NAMED_SCHEMA_KEYWORDS and isinstance(value, dict):
            for one in value.values():
                yield from _schema_problems(one)
        elif keyword not in DATA_KEYWORDS:
            yield from _schema_problems(value)


RULES = {
    "json_object": "",
    "json_schema": "It must be a JSON schema with keywords that a grammar can express",
    "regex": "It must be a regular expression without look-around and back-references",
    "choice": "It must be a JSON list of texts",
    "grammar": "It must be a grammar in the syntax of Lark or GBNF",
}


def _check_size(structure: StructuredOutput, limits: GrammarLimits) -> None:
    if structure.kind not in RULES:
        raise StructuredOutputError(
            f"{structure.kind!r:.40} is not a kind of structured output. It must be one of "
            f"{', '.join(RULES)}. Use json_schema."
        )
    if len(structure.value) > limits.max_characters:
        raise StructuredOutputError(
            f"The {structure.kind} has {len(structure.value)} characters. It may have at most "
            f"{limits.max_characters}. Shorten it."
        )


def _invalid(structure: StructuredOutput, reason: str) -> StructuredOutputError:
    """Returns the error for a grammar that cannot be compiled."""
    # Only one line: the others repeat the input.
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    first = next((line for line in lines if line.startswith("error:")), " ".join(lines[:1]))[:200]
    return StructuredOutputError(
        f"The {structure.kind} is not accepted: {first.rstrip('.')}. {RULES[structure.kind]}. "
        "Correct it, or simplify it."
    )
