"""Parses conversations from records in any of the common formats.

Formats: `messages` with role and content; `conversations` with from and value (ShareGPT); or a
question and its answer in two fields, each a string or a list of messages. `tools` are passed to
the template. Assistant messages with `weight` 0 are not learned, as in OpenAI's files; neither are
assistant messages in a `prompt` that is a list of messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ranvier.data.tokenizer import repair_surrogates
from ranvier.errors import DataError

SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bard", "bing"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function"), "tool"),
    "system": "system",
}
"""Roles by ShareGPT's `from`."""
QUESTION_FIELDS = ("prompt", "instruction", "question")
ANSWER_FIELDS = ("completion", "response", "output", "answer")
ASSISTANT = "assistant"


@dataclass(frozen=True)
class Conversation:
    """Messages, and which of them are learned."""

    messages: list[dict[str, Any]]
    is_learned: list[bool]
    """Per message; only entries of assistant messages count."""
    tools: list[Any] | None = None
    location: str = ""
    """File and line, for error messages."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template, such as enable_thinking."""

    @property
    def assistant_turns(self) -> list[int]:
        """Indices of the assistant's messages."""
        return [i for i, one in enumerate(self.messages) if one["role"] == ASSISTANT]

    @property
    def message_texts(self) -> list[str]:
        """Contents of the messages that are plain strings."""
        return [one["content"] for one in self.messages if isinstance(one["content"], str)]


def is_conversation(record: Mapping[str, Any]) -> bool:
    """Whether a record has one of the known formats."""
    if isinstance(record.get("messages", record.get("conversations")), list):
        return True
    return (
        _first_field(record, QUESTION_FIELDS) is not None
        and _first_field(record, ANSWER_FIELDS) is not None
    )


def parse_conversation(record: Any, at: str) -> Conversation:
    """The conversation of a record; at: its file and line."""
    if not isinstance(record, dict):
        raise _record_error(at, f"the record is a {type(record).__name__}, not an object")
    tools = record.get("tools")
    # Some datasets store the list of tools as a JSON string.
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise _record_error(at, f"tools is {tools!r:.60}, not a list or JSON") from None
    if tools and not isinstance(tools, list):
        raise _record_error(at, f"tools is a {type(tools).__name__}, not a list")
    head = record.get("system")
    if record.get("messages") is not None:
        found = _message_list(record, "messages", at)
        asked = 0
    elif record.get("conversations") is not None:
        found = [_parse_sharegpt(x, at) for x in _message_list(record, "conversations", at)]
        asked = 0
    else:
        found, asked = _question_and_answer(record, at)
    if isinstance(head, str) and head and not (found and found[0].get("role") == "system"):
        found = [{"role": "system", "content": head}, *found]
        # The system message in front shifts the first answer.
        asked = asked + 1
    if not found:
        raise _record_error(at, "the record has no messages")
    messages = [_parse_message(one, number, at) for number, one in enumerate(found)]
    # Messages before `asked` are the prompt.
    learned = [i >= asked and one.get("weight", 1) != 0 for i, one in enumerate(found)]
    return Conversation(messages, learned, _repair_texts(tools) if tools else None, at)


def _first_field(record: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if isinstance(record.get(name), (str, list))), None)


def _record_error(at: str, what: str) -> DataError:
    return DataError(
        f"{at}: {what}. A conversation must have messages (role and content), conversations (from "
        "and value), or a prompt and a completion. Fix the record, or use data.format=text."
    )


def _message_list(record: Mapping[str, Any], name: str, at: str) -> list[dict[str, Any]]:
    value = record[name]
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise _record_error(at, f"{name} is {value!r:.60}, not a list of objects")
    return value


def _question_and_answer(record: Mapping[str, Any], at: str) -> tuple[list[dict[str, Any]], int]:
    """Messages of a question and its answer, and the number of messages before the answer."""
    question = _first_field(record, QUESTION_FIELDS)
    answer = _first_field(record, ANSWER_FIELDS)
    if question is None or answer is None:
        fields = ", ".join(map(repr, record)) or "none"
        raise _record_error(at, f"the record is not a conversation; its fields are {fields}")
    # Alpaca's optional context for the instruction.
    more = record.get("input")
    asked = record[question]
    if isinstance(asked, list):
        asked = _message_list(record, question, at)
    else:
        if isinstance(more, str) and more:
            text = f"{asked}\n\n{more}"
        else:
            text = asked
        asked = [{"role": "user", "content": text}]
    replies = record[answer]
    if isinstance(replies, list):
        replies = _message_list(record, answer, at)
    else:
        replies = [{"role": ASSISTANT, "content": replies}]
    return [*asked, *replies], len(asked)


def _parse_sharegpt(one: Mapping[str, Any], at: str) -> dict[str, Any]:
    """A ShareGPT message; variants with role and content are accepted."""
    name = one.get("from", one.get("role"))
    if not isinstance(name, str) or name not in SHAREGPT_ROLES:
        raise _record_error(at, f"from is {name!r:.60}, not one of {', '.join(SHAREGPT_ROLES)}")
    rest = {key: value for key, value in one.items() if key not in ("from", "value", "role")}
    return {"role": SHAREGPT_ROLES[name], "content": one.get("value", one.get("content")), **rest}


def _parse_message(one: Mapping[str, Any], number: int, at: str) -> dict[str, Any]:
    role = one.get("role")
    content = one.get("content")
    if not isinstance(role, str) or not role:
        raise _record_error(
            at,
            f"message {number} has the role {role!r:.60}, which must be a non-empty string such as "
            "'user'",
        )
    if isinstance(content, list):
        good = all(isinstance(part, (str, dict)) for part in content)
    else:
        good = isinstance(content, str) or (content is None and role == ASSISTANT)
    if not good:
        raise _record_error(
            at,
            f"message {number} has the content {content!r:.60}, which must be a string or a list "
            "of strings and objects",
        )
    plain: dict[str, Any] = _repair_texts({k: v for k, v in one.items() if k != "weight"})
    # Only a message with tool calls may have no content.
    if content is None and not plain.get("tool_calls"):
        plain["content"] = ""
    return plain


def _repair_texts(value: Any) -> Any:
    """A JSON value whose strings can be encoded as UTF-8."""
    if isinstance(value, str):
        return repair_surrogates(value)
    if isinstance(value, dict):
        return {repair_surrogates(str(key)): _repair_texts(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_repair_texts(one) for one in value]
    return value
