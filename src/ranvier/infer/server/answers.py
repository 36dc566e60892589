"""Answers of the two completions APIs, whole and as a stream.

An answer has one choice per prompt and per `n`. Outputs of the engine are added to it in any order;
text that has arrived since the last chunk goes into one chunk, so that a busy front sends fewer and
larger chunks instead of falling behind.
"""

from __future__ import annotations

import codecs
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ranvier.infer.request import TokenLogprobs, TokenOutput
from ranvier.infer.sampling_params import SamplingParams
from ranvier.infer.server.api_errors import ApiError, invalid_request
from ranvier.infer.server.served_model import ServedModel, TextStream, ToolParserInterface

LOWEST_LOGPROB = -9999.0
"""Shown for tokens with probability 0; JSON has no infinity."""
ScoredToken = tuple[int, TokenLogprobs | None]
"""A token and its log-probabilities; None for the first token of a prompt."""


@dataclass
class ChoiceDelta:
    """What is new in a choice since its last chunk."""

    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[ScoredToken] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return not (self.text or self.calls or self.logprobs or self.finish_reason)


@dataclass(kw_only=True)
class Choice:
    """One continuation of a prompt."""

    index: int
    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    stream: TextStream
    parser: ToolParserInterface | None = None
    max_calls: int | None = None
    """Maximum number of tool calls; further ones end the answer."""
    echo: str | None = None
    """Text of the prompt, if the answer starts with it."""
    drops_tokens: bool = False
    """Whether generated tokens are left out, for `max_tokens` 0."""
    is_first: bool = True
    """Whether it is the first choice of its prompt."""
    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[ScoredToken] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    num_tokens: int = 0
    num_cached_tokens: int = 0
    has_started: bool = False
    has_all_calls: bool = False
    """Whether one more tool call than allowed has begun."""
    delta: ChoiceDelta = field(default_factory=ChoiceDelta)

    @property
    def is_complete(self) -> bool:
        """Whether the text so far ends the choice: by a stop string, or by a call too many."""
        return self.has_all_calls or self.stream.stop_string is not None

    def add(self, output: TokenOutput) -> None:
        """Adds an output of the engine; outputs after the end are ignored."""
        if self.finish_reason is not None:
            return
        if not self.has_started:
            self._start(output)
        tokens = output.token_ids
        if not self.drops_tokens:
            self._add_tokens(output)
        if output.finish_reason is not None or self.is_complete:
            self._finish(output.finish_reason)
        elif tokens and self.drops_tokens:
            self._finish("length")

    def _start(self, output: TokenOutput) -> None:
        self.has_started = True
        self.num_cached_tokens = output.num_cached_tokens
        self.prompt_logprobs = output.prompt_logprobs
        if self.echo is not None:
            self._add_text(self.echo)
            if self.params.logprobs is not None:
                scores = (None, *(self.prompt_logprobs or ()))
                self._add_logprobs(list(zip(self.prompt, scores, strict=False)))

    def _add_tokens(self, output: TokenOutput) -> None:
        tokens = output.token_ids
        self.num_tokens += len(tokens)
        self.token_ids.extend(tokens)
        self.delta.token_ids.extend(tokens)
        if output.logprobs:
            self._add_logprobs(list(zip(tokens, output.logprobs, strict=False)))
        self._add_parsed(self.stream.append(tokens, stop_token=output.stop_token))

    def _finish(self, reason: str | None) -> None:
        if not self.drops_tokens:
            self._add_parsed(self.stream.finish())
        if self.parser is not None:
            self._add_deltas(self.parser.finish())
        # The rest of the text may contain a stop string, too.
        found = "stop" if self.is_complete or reason is None else reason
        if found == "stop" and self.calls:
            found = "tool_calls"
        self.finish_reason = self.delta.finish_reason = found

    def _add_parsed(self, text: str) -> None:
        if self.parser is None:
            self._add_text(text)
        elif text:
            self._add_deltas(self.parser.feed(text))

    def _add_deltas(self, deltas: Sequence[Any]) -> None:
        for one in deltas:
            if self.has_all_calls:
                return
            if hasattr(one, "index"):
                self._add_call(one)
            else:
                self._add_text(one.text)

    def _add_call(self, one: Any) -> None:
        if self.max_calls is not None and one.index >= self.max_calls:
            self.has_all_calls = True
            return
        part: dict[str, Any] = {"index": one.index, "function": {"arguments": one.arguments}}
        if one.index >= len(self.calls):
            name = f"call_{secrets.token_hex(12)}"
            part |= {"id": name, "type": "function"}
            part["function"] = {"name": one.name, "arguments": one.arguments}
            call = {"id": name, "type": "function", "function": dict(part["function"])}
            self.calls.append(call)
        else:
            self.calls[one.index]["function"]["arguments"] += one.arguments
        self.delta.calls.append(part)

    def _add_text(self, text: str) -> None:
        self.text += text
        self.delta.text += text

    def _add_logprobs(self, scored: list[ScoredToken]) -> None:
        self.logprobs.extend(scored)
        self.delta.logprobs.extend(scored)

    def take_delta(self) -> ChoiceDelta:
        """Returns what is new, and starts the next chunk."""
        found = self.delta
        self.delta = ChoiceDelta()
        return found


class Answer(ABC):
    """The answer to an HTTP request."""

    object_name = ""
    chunk_name = ""

    def __init__(
        self,
        answer_id: str,
        model: ServedModel,
        model_name: str,
        fingerprint: str,
        choices: Sequence[Choice],
        *,
        returns_tokens: bool = False,
    ) -> None:
        self.answer_id = answer_id
        self.model = model
        self.choices = {one.request_id: one for one in choices}
        self.returns_tokens = returns_tokens
        self._head = {
            "id": answer_id,
            "object": self.object_name,
            "created": int(time.time()),
            "model": model_name,
            "system_fingerprint": fingerprint,
        }
        # All chunks have the same head; only their choices are encoded each time.
        head = json.dumps({**self._head, "object": self.chunk_name})
        self._chunk_start = f"data: {head[:-1]}, "

    @property
    def is_finished(self) -> bool:
        """Whether all choices have ended."""
        return all(one.finish_reason is not None for one in self.choices.values())

    @property
    def num_logprobs(self) -> int:
        """Number of log-probabilities that the answer shows."""
        count = 0
        for one in self.choices.values():
            params = one.params
            count += len(one.logprobs) * (1 + (params.logprobs or 0))
            count += len(one.prompt_logprobs or ()) * (1 + (params.prompt_logprobs or 0))
        return count

    def add(self, outputs: Sequence[TokenOutput]) -> list[str]:
        """Adds outputs. Returns requests that a stop string has ended and the engine has not."""
        ended = []
        for output in outputs:
            choice = self.choices[output.request_id]
            if output.is_invalid:
                raise invalid_request(output.error, code="invalid_value")
            if output.finish_reason in ("error", "abort"):
                cause = output.error.rstrip(".") or "the engine has ended it"
                raise ApiError(
                    500,
                    f"The request has failed: {cause}. Other requests are not affected. Send it "
                    "again, or change it.",
                    code="request_failed",
                )
            was_open = choice.finish_reason is None
            choice.add(output)
            if was_open and choice.finish_reason and output.finish_reason is None:
                ended.append(output.request_id)
        return ended

    def usage(self) -> dict[str, Any]:
        """Returns the numbers of tokens."""
        firsts = [one for one in self.choices.values() if one.is_first]
        prompt = sum(len(one.prompt) for one in firsts)
        completion = sum(one.num_tokens for one in self.choices.values())
        cached = sum(one.num_cached_tokens for one in firsts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def to_object(self) -> dict[str, Any]:
        """Returns the whole answer."""
        choices = []
        for one in self.choices.values():
            shown = self._choice_object(one)
            if one.params.prompt_logprobs is not None and one.echo is None:
                shown["prompt_logprobs"] = self._prompt_logprobs(one)
            if self.returns_tokens:
                shown["token_ids"] = one.token_ids
                shown["prompt_token_ids"] = one.prompt
            choices.append(shown)
        return {**self._head, "choices": choices, "usage": self.usage()}

    def start_chunks(self) -> bytes:
        """Returns the chunks that begin a stream."""
        return b""

    def take_chunks(self) -> bytes:
        """Returns a chunk for each choice that has something new."""
        chunks = []
        for one in self.choices.values():
            if one.delta.is_empty:
                continue
            delta = one.take_delta()
            shown = self._delta_object(one, delta)
            if self.returns_tokens:
                shown["token_ids"] = delta.token_ids
            chunks.append(self._chunk([shown]))
        return "".join(chunks).encode()

    def usage_chunk(self) -> bytes:
        """Returns the last chunk of a stream with usage."""
        return self._chunk([], {"usage": self.usage()}).encode()

    def _chunk(self, choices: list[Any], more: Mapping[str, Any] | None = None) -> str:
        body = json.dumps({"choices": choices, **(more or {})})
        return f"{self._chunk_start}{body[1:]}\n\n"

    @abstractmethod
    def _choice_object(self, choice: Choice) -> dict[str, Any]:
        """Returns a choice of the whole answer."""

    @abstractmethod
    def _delta_object(self, choice: Choice, delta: ChoiceDelta) -> dict[str, Any]:
        """Returns a choice of a chunk."""

    def _prompt_logprobs(self, choice: Choice) -> list[Any]:
        """Returns the log-probabilities of the prompt in the shape of vLLM."""
        found: list[Any] = [None]
        for token, one in zip(choice.prompt[1:], choice.prompt_logprobs or (), strict=False):
            ranks = {top: rank for rank, (top, _) in enumerate(one.top, 1)}
            values = {**dict(one.top), token: one.logprob}
            found.append(
                {
                    str(name): {
                        "logprob": finite(value),
                        "rank": ranks.get(name, one.rank),
                        "decoded_token": self.model.token_text(name),
                    }
                    for name, value in values.items()
                }
            )
        return found


class ChatAnswer(Answer):
    """Answer of /v1/chat/completions."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def start_chunks(self) -> bytes:
        """Returns the chunks with the role."""
        return "".join(
            self._chunk(
                [
                    {
                        "index": one.index,
                        "delta": {"role": "assistant", "content": ""},
                        "logprobs": None,
                        "finish_reason": None,
                    }
                ]
            )
            for one in self.choices.values()
        ).encode()

    def _choice_object(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = choice.calls
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice, choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def _delta_object(self, choice: Choice, delta: ChoiceDelta) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if delta.text:
            found["content"] = delta.text
        if delta.calls:
            found["tool_calls"] = delta.calls
        return {
            "index": choice.index,
            "delta": found,
            "logprobs": self._logprobs(choice, delta.logprobs),
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(self, choice: Choice, scored: Sequence[ScoredToken]) -> dict[str, Any] | None:
        if choice.params.logprobs is None:
            return None
        content = []
        for token, one in scored:
            assert one is not None, token
            top = [self._token_object(name, value) for name, value in one.top]
            content.append({**self._token_object(token, one.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token_object(self, token: int, logprob: float) -> dict[str, Any]:
        data = self.model.token_bytes(token)
        return {
            "token": self.model.token_text(token),
            "logprob": finite(logprob),
            "bytes": [*data],
        }


class TextOffsets:
    """Positions of tokens in a text; a character may consist of several tokens."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._position = 0

    def take(self, data: bytes) -> int:
        """Returns the position of the next token, and moves past its bytes."""
        position = self._position
        self._position += len(self._decoder.decode(data))
        return position


class CompletionAnswer(Answer):
    """Answer of /v1/completions."""

    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._offsets = {name: TextOffsets() for name in self.choices}
        """Position in the text of the next token of each choice, for streams."""

    def _choice_object(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": self._logprobs(choice, choice.logprobs, TextOffsets()),
            "finish_reason": choice.finish_reason,
        }

    def _delta_object(self, choice: Choice, delta: ChoiceDelta) -> dict[str, Any]:
        offsets = self._offsets[choice.request_id]
        return {
            "index": choice.index,
            "text": delta.text,
            "logprobs": self._logprobs(choice, delta.logprobs, offsets),
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(
        self, choice: Choice, scored: Sequence[ScoredToken], offsets: TextOffsets
    ) -> dict[str, Any] | None:
        """Returns log-probabilities in the legacy shape."""
        if choice.params.logprobs is None:
            return None
        return {
            "tokens": [self.model.token_text(token) for token, _ in scored],
            "token_logprobs": [None if one is None else finite(one.logprob) for _, one in scored],
            "top_logprobs": [
                None if one is None else self._top_values(token, one) for token, one in scored
            ],
            "text_offset": [offsets.take(self.model.token_bytes(token)) for token, _ in scored],
        }

    def _top_values(self, token: int, one: TokenLogprobs) -> dict[str, float]:
        """Returns the most likely tokens and the token itself, by their text."""
        found: dict[str, float] = {}
        for name, value in (*one.top, (token, one.logprob)):
            text = self.model.token_text(name)
            # Different tokens may have the same text; the likelier one is shown.
            found[text] = max(finite(value), found.get(text, LOWEST_LOGPROB))
        return found


def finite(logprob: float) -> float:
    """Returns a log-probability that JSON can express."""
    if logprob > LOWEST_LOGPROB:
        return logprob
    return LOWEST_LOGPROB


def error_event(error: ApiError) -> bytes:
    """Returns the event that ends a stream with an error."""
    return b"data: " + error.to_json() + b"\n\n"


def end_events(answer: Answer, *, includes_usage: bool) -> bytes:
    """Returns the last events of a stream."""
    usage = answer.usage_chunk() if includes_usage else b""
    return usage + b"data: [DONE]\n\n"
