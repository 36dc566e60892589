"""Tool calls in generated text: one small parser for each family of models.

Models write calls in the syntax they were trained on. A parser takes the text in pieces of any size
and returns what is certain: text outside of calls, the name of a call once it is complete, and its
arguments as they come. What was returned is never taken back; the result does not depend on where
the text was split. Text that looks like a call but is none remains text.

For `tool_choice` required or a name, `tool_choice_output` returns the grammar of calls in the same
syntax.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ranvier.errors import PlanError
from ranvier.infer.grammar import JSON_OPTIONS, check_schema
from ranvier.infer.sampling_params import StructuredOutput


@dataclass(frozen=True)
class TextDelta:
    """More text outside of calls."""

    text: str


@dataclass(frozen=True)
class ToolCallDelta:
    """The beginning of a call, or more of its arguments."""

    index: int
    """Number of the call in the text, from 0."""
    name: str
    """Name of the tool in the first delta of a call, otherwise empty."""
    arguments: str
    """More of the JSON text of the arguments."""


Delta = TextDelta | ToolCallDelta


@dataclass(frozen=True)
class ToolCall:
    """A whole call."""

    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A tool as the request describes it."""

    name: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments."""


class JsonScanner:
    """Finds the end of a JSON object or list in text that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find_end(self, text: str, start: int) -> int:
        """Returns the position after the value; -1 if it ends later. Each piece is given once."""
        for position in range(start, len(text)):
            letter = text[position]
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = letter == "\\"
                self._in_string = letter != '"'
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return position + 1
        return -1


STRING = r'"(?:[^"\\]|\\.)*"'
CALL_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*'
    rf'({STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)',
    re.DOTALL,
)
"""A call up to its arguments, in the order in which models write it."""


MAX_HEAD = 4096
"""Number of characters among which the head of a call is searched."""


class ToolCallParser:
    """Parses the calls of one family; the rest of the text is returned as it is.

    The text between two calls belongs to no call if it is whitespace.
    """

    opening: str = ""
    """What comes before calls."""
    arguments_key: str = "arguments"

    def __init__(self) -> None:
        self._buffer = ""
        self._deltas: list[Delta] = []
        self._state: Callable[[], bool] = self._read_text
        self._num_calls = 0
        self._is_first = True
        # Text since the beginning of what may be a call, returned as text if it is none.
        self._raw = ""
        self._scanner = JsonScanner()
        self._scanned = 0

    def feed(self, text: str) -> list[Delta]:
        """Returns what more text makes certain."""
        self._buffer += text
        while self._buffer and self._state():
            pass
        return self._take_deltas()

    def finish(self) -> list[Delta]:
        """Returns the rest at the end of the text."""
        if self._state == self._read_text:
            # Whitespace after the last call is not an answer.
            if self._num_calls == 0 or self._buffer.strip():
                self._add_text(self._buffer)
        elif self._state == self._read_call:
            self._add_text(self._raw + self._buffer)
        self._buffer = ""
        return self._take_deltas()

    # ---- states: each consumes a part of the buffer; False if it needs more text -------------

    def _read_text(self) -> bool:
        """Reads text up to a call."""
        found = self._find_opening()
        if found is None:
            return False
        start, end = found
        # Whitespace before a call is text only if the call is none.
        kept = len(self._buffer[:start].rstrip())
        self._add_text(self._buffer[:kept])
        self._begin_call(self._buffer[kept:end])
        self._buffer = self._buffer[end:]
        return True

    def _find_opening(self) -> tuple[int, int] | None:
        """Returns where `opening` begins and ends; None after returning the text before it."""
        start = self._buffer.find(self.opening)
        if start >= 0:
            return start, start + len(self.opening)
        # What may be the beginning of a call, and whitespace before it, waits.
        keep = len(self._buffer) - _overlap(self._buffer, self.opening)
        keep = len(self._buffer[:keep].rstrip())
        self._add_text(self._buffer[:keep])
        self._buffer = self._buffer[keep:]
        return None

    def _begin_call(self, raw: str) -> None:
        self._raw = raw
        self._scanner = JsonScanner()
        self._scanned = 0
        self._state = self._read_call

    def _read_call(self) -> bool:
        """Reads a call up to its arguments, or as a whole where they do not come last."""
        body = self._buffer.lstrip()
        if not body:
            return False
        self._raw += self._buffer[: len(self._buffer) - len(body)]
        self._buffer = body
        if not body.startswith("{"):
            return self._reject()
        head = None
        if self._scanned < MAX_HEAD:
            head = CALL_HEAD.match(body, 0, MAX_HEAD)
        name = _parse_string(head[1]) if head else None
        if head and name:
            self._add_call(name, "")
            self._buffer = body[head.end() :]
            self._scanner = JsonScanner()
            self._state = self._read_arguments
            return True
        end = self._scanner.find_end(body, self._scanned)
        self._scanned = len(body)
        if end < 0:
            return False
        call = parse_call(body[:end])
        if call is None:
            return self._reject()
        self._add_call(call.name, call.arguments)
        self._buffer = body[end:]
        self._state = self._read_separator
        return True

    def _reject(self) -> bool:
        """Returns what looked like a call as text."""
        self._add_text(self._raw)
        self._raw = ""
        self._state = self._read_text
        self._is_first = False
        return True

    def _read_arguments(self) -> bool:
        """Reads the JSON object of the arguments."""
        end = self._scanner.find_end(self._buffer, 0)
        part = self._buffer if end < 0 else self._buffer[:end]
        self._deltas.append(ToolCallDelta(self._num_calls - 1, "", part))
        self._buffer = self._buffer[len(part) :]
        if end >= 0:
            # The closing brace of the call is one deeper.
            self._scanner = JsonScanner()
            self._scanner.find_end("{", 0)
            self._state = self._read_call_end
        return True

    def _read_call_end(self) -> bool:
        """Skips what follows the arguments inside of the call."""
        end = self._scanner.find_end(self._buffer, 0)
        if end < 0:
            self._buffer = ""
            return False
        self._buffer = self._buffer[end:]
        self._state = self._read_separator
        return True

    def _read_separator(self) -> bool:
        """Reads what comes after a call."""
        self._state = self._read_text
        return True

    # ---- results ------------------------------------------------------------------------------

    def _add_text(self, text: str) -> None:
        if text:
            self._deltas.append(TextDelta(text))

    def _add_call(self, name: str, arguments: str) -> None:
        self._deltas.append(ToolCallDelta(self._num_calls, name, arguments))
        self._num_calls += 1
        self._is_first = False
        self._raw = ""

    def _take_deltas(self) -> list[Delta]:
        deltas = self._deltas
        self._deltas = []
        return deltas

    # ---- grammar ------------------------------------------------------------------------------

    @classmethod
    def calls_rule(cls, call: str, literal: Callable[[str], str], *, several: bool) -> str:
        """Returns the Lark expression of calls.

        call: name of the rule of one call, a JSON object.
        literal: returns the expression of a text that may be a special token.
        """
        raise NotImplementedError


class HermesParser(ToolCallParser):
    """`<tool_call>{"name": .., "arguments": {..}}</tool_call>`: Hermes, Qwen."""

    opening = "<tool_call>"
    closing = "</tool_call>"

    def _read_separator(self) -> bool:
        body = self._buffer.lstrip()
        if body.startswith(self.closing):
            self._buffer = body[len(self.closing) :]
        elif not body or self.closing.startswith(body):
            return False
        self._state = self._read_text
        return True

    @classmethod
    def calls_rule(cls, call: str, literal: Callable[[str], str], *, several: bool) -> str:
        one = f'{literal(cls.opening)} "\\n" {call} "\\n" {literal(cls.closing)}'
        return f'{one} ("\\n" {one})*' if several else one


class Llama3JsonParser(ToolCallParser):
    """`{"name": .., "parameters": {..}}` as the whole text, also after `<|python_tag|>`: Llama 3.

    Several calls are separated by semicolons.
    """

    opening = "<|python_tag|>"
    arguments_key = "parameters"

    def _find_opening(self) -> tuple[int, int] | None:
        if self._is_first:
            body = self._buffer.lstrip()
            start = len(self._buffer) - len(body)
            if body.startswith("{"):
                return start, start
            if not body:
                return None
            if not self.opening.startswith(body[: len(self.opening)]):
                self._is_first = False
        return super()._find_opening()

    def _read_separator(self) -> bool:
        body = self._buffer.lstrip()
        if not body:
            return False
        if body.startswith(";"):
            self._begin_call(self._buffer[: len(self._buffer) - len(body) + 1])
            self._buffer = body[1:]
        else:
            self._state = self._read_text
        return True

    @classmethod
    def calls_rule(cls, call: str, literal: Callable[[str], str], *, several: bool) -> str:
        return f'{call} ("; " {call})*' if several else call


class MistralParser(ToolCallParser):
    """`[TOOL_CALLS][{"name": .., "arguments": {..}}, ..]`: Mistral.

    Newer models write `[TOOL_CALLS]name[ARGS]{..}` or `[TOOL_CALLS]name{..}`, once for each call.
    """

    opening = "[TOOL_CALLS]"
    named_head = re.compile(r"([\w.:/-]+)\s*(?:\[CALL_ID\]\w*)?\s*(?:\[ARGS\])?\s*(?=\{)")
    named_head_start = re.compile(r"[\w.:/-]+\s*(?:\[[A-Z_]*\]?\w*\s*)*")

    def __init__(self) -> None:
        super().__init__()
        self._in_list = False

    def _begin_call(self, raw: str) -> None:
        super()._begin_call(raw)
        self._in_list = False
        self._state = self._read_list

    def _read_list(self) -> bool:
        """Reads the bracket of a list, or the name of a call."""
        body = self._buffer.lstrip()
        if not body:
            return False
        if body[0] in "[{":
            self._in_list = body[0] == "["
            skipped = len(self._buffer) - len(body) + self._in_list
            self._raw += self._buffer[:skipped]
            self._buffer = self._buffer[skipped:]
            self._state = self._read_call
            return True
        head = self.named_head.match(body)
        if head:
            self._add_call(head[1], "")
            self._buffer = body[head.end() :]
            self._scanner = JsonScanner()
            self._state = self._read_named_arguments
            return True
        start = self.named_head_start.match(body)
        if start and start.end() == len(body):
            return False
        return self._reject()

    def _read_named_arguments(self) -> bool:
        """Reads arguments that no object surrounds."""
        self._read_arguments()
        if self._state == self._read_call_end:
            self._state = self._read_separator
        return True

    def finish(self) -> list[Delta]:
        """Returns the rest at the end of the text."""
        if self._state == self._read_list:
            self._state = self._read_call
        return super().finish()

    def _read_separator(self) -> bool:
        body = self._buffer.lstrip()
        if not body:
            return False
        if self._in_list and body.startswith(","):
            ToolCallParser._begin_call(self, self._buffer[: len(self._buffer) - len(body) + 1])
            self._buffer = body[1:]
            return True
        if self._in_list and body.startswith("]"):
            self._buffer = body[1:]
        self._in_list = False
        self._state = self._read_text
        return True

    @classmethod
    def calls_rule(cls, call: str, literal: Callable[[str], str], *, several: bool) -> str:
        calls = f'{call} (", " {call})*' if several else call
        return f'{literal(cls.opening)} "[" {calls} "]"'


TOOL_PARSERS: Mapping[str, type[ToolCallParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
}
"""Parsers by the names that vLLM gives them."""


def detect_tool_parser(chat_template: str) -> str | None:
    """Returns the name of the parser for the calls that a chat template writes; None for none."""
    if MistralParser.opening in chat_template:
        return "mistral"
    if HermesParser.opening in chat_template:
        return "hermes"
    if Llama3JsonParser.opening in chat_template or '"parameters": ' in chat_template:
        return "llama3_json"
    return None


def parse_tool_calls(parser: ToolCallParser, text: str) -> tuple[str, list[ToolCall]]:
    """Returns the text outside of calls, and the calls."""
    return join_deltas([*parser.feed(text), *parser.finish()])


def join_deltas(deltas: Sequence[Delta]) -> tuple[str, list[ToolCall]]:
    """Returns the text outside of calls, and the calls, that deltas make up."""
    text = ""
    calls: list[ToolCall] = []
    for delta in deltas:
        if isinstance(delta, TextDelta):
            text += delta.text
        elif delta.index == len(calls):
            calls.append(ToolCall(delta.name, delta.arguments))
        else:
            last = calls[delta.index]
            calls[delta.index] = ToolCall(last.name, last.arguments + delta.arguments)
    return text, calls


def parse_call(text: str) -> ToolCall | None:
    """Returns the call of a JSON object; None if it is none."""
    try:
        content = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    name = content.get("name")
    arguments = content.get("arguments", content.get("parameters", {}))
    # Some models write the arguments as JSON text within JSON.
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _parse_string(text: str) -> str | None:
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _overlap(text: str, marker: str) -> int:
    """Returns the length of the longest end of a text that begins a marker."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0


def tool_choice_output(
    parser: str,
    tools: Sequence[Tool],
    special_token_ids: Mapping[str, int],
    *,
    name: str = "",
    several: bool = True,
) -> StructuredOutput:
    """Returns the grammar of calls in the syntax of a parser.

    special_token_ids: special tokens of the tokenizer, which text cannot write.
    name: the only tool that may be called; empty for any of them.
    several: whether there may be more than one call.
    """
    family = TOOL_PARSERS[parser]
    chosen = [tool for tool in tools if name in ("", tool.name)]
    if not chosen:
        known = ", ".join(tool.name for tool in tools) or "none"
        raise PlanError(
            f"tool_choice names the tool {name!r}, and tools has: {known}. A required tool must be "
            "one of them. Correct the name."
        )

    def literal(text: str) -> str:
        if text in special_token_ids:
            return f"<[{special_token_ids[text]}]>"
        return json.dumps(text, ensure_ascii=False)

    rules = []
    for i, tool in enumerate(chosen):
        schema = {"type": "object", **tool.parameters, "x-guidance": {**JSON_OPTIONS}}
        check_schema(schema)
        before = f'{{"name": {json.dumps(tool.name)}, "{family.arguments_key}": '
        content = json.dumps(schema, ensure_ascii=False)
        rules.append(f'call_{i}: {json.dumps(before)} arguments_{i} "}}"')
        rules.append(f"arguments_{i}: %json {content}")
    calls = family.calls_rule("call", literal, several=several and not name)
    options = " | ".join(f"call_{i}" for i in range(len(chosen)))
    return StructuredOutput("grammar", "\n".join([f"start: {calls}", f"call: {options}", *rules]))
