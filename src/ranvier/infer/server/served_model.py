"""What the front knows about a model: names, tokenizer, chat template, and the texts of tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from ranvier.data.chat.template import BUILT_IN, load_chat_template
from ranvier.data.chat.tokenize import ChatEncoder
from ranvier.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from ranvier.errors import RanvierError
from ranvier.infer.sampling_params import SamplingParams, StructuredOutput
from ranvier.infer.server.api_errors import ApiError, invalid_request
from ranvier.infer.server.protocol import ConversationBody, TokenizeBody


class TextStream(Protocol):
    """Text of a growing list of tokens, up to a stop string (`IncrementalDetokenizer`)."""

    stop_string: str | None
    """The stop string that has ended the text."""

    def append(self, token_ids: Iterable[int], *, stop_token: int | None = None) -> str:
        """Adds tokens. Returns new text, which is never taken back.

        stop_token: the last of the tokens, if it has ended the request; it has no text.
        """

    def finish(self) -> str:
        """Returns the rest of the text, once no token follows."""


class ToolParserInterface(Protocol):
    """Finds tool calls in a growing text.

    It returns deltas: with `text` for text outside of calls; with `index`, `name` (of the function,
    with the first part of a call only) and `arguments` (further JSON text) for parts of calls.
    """

    def feed(self, text: str) -> Sequence[Any]:
        """Adds text. Returns what is new."""

    def finish(self) -> Sequence[Any]:
        """Returns what was held back, once no text follows."""


class ToolFormat(Protocol):
    """How a family of models writes tool calls."""

    needs_special_tokens: bool
    """Whether special tokens of the text belong to calls."""

    def make_parser(self) -> ToolParserInterface:
        """Returns a parser for one answer."""

    def build_structure(
        self, tools: Sequence[dict[str, Any]], name: str, *, several: bool = True
    ) -> StructuredOutput:
        """Returns the language of answers that call a tool.

        name: of the tool, empty for any. several: whether there may be more than one call.
        """


class StructureCheckerInterface(Protocol):
    """Tries whether structured outputs compile; called from threads."""

    def check(self, structure: StructuredOutput) -> None:
        """Raises a `RanvierError` for one that does not compile."""

    def close(self) -> None:
        """Ends its process."""


@dataclass(kw_only=True)
class ServedModel:
    """A model as the API shows it."""

    name: str
    tokenizer: Tokenizer
    chat: ChatEncoder | None = None
    """Encoder of conversations; None if the model has no chat template."""
    make_text_stream: Callable[[Tokenizer, Sequence[int], SamplingParams], TextStream]
    """Makes the text of an answer from tokenizer, tokens of the prompt, and parameters."""
    tool_calls: ToolFormat | None = None
    structures: StructureCheckerInterface | None = None
    """Check of structured outputs; None if the server has none."""
    adapters: tuple[str, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model and its adapters."""
        return (self.name, *self.adapters)

    def adapter_of(self, name: str) -> str:
        """Returns the adapter that a request names; empty for the model itself."""
        if name in ("", self.name):
            return ""
        if name in self.adapters:
            return name
        raise ApiError(
            404,
            f"The model {name[:100]!r} does not exist. This server has {', '.join(self.names)}. "
            "Use one of these names.",
            param="model",
            code="model_not_found",
        )

    @cached_property
    def longest_token(self) -> int:
        """Number of characters of the longest token, to bound the tokens of a text from below."""
        if isinstance(self.tokenizer, ByteTokenizer):
            return 1
        return max(map(len, self.tokenizer.token_names.values()), default=1)

    def encode_text(self, text: str, max_tokens: int) -> list[int]:
        """Returns the tokens of a text; an empty one starts a new document.

        A text that must have more than `max_tokens` tokens is refused without tokenizing it.
        """
        least = -(-len(text) // self.longest_token)
        if max_tokens and least > max_tokens:
            raise too_long_error(least, max_tokens, at_least=True)
        try:
            found: list[int] = self.tokenizer.encode([text])[0].tolist()
        except RanvierError as error:
            raise invalid_request(str(error), param="prompt", code="invalid_value") from None
        return found or [self.tokenizer.eos_token_id]

    def encode_chat(self, body: ConversationBody | TokenizeBody, max_tokens: int) -> list[int]:
        """Returns the tokens of a conversation."""
        messages, tools, chat, more = self._conversation(body)
        size = sum(len(one["content"]) for one in messages)
        least = -(-size // self.longest_token)
        if max_tokens and least > max_tokens:
            raise too_long_error(least, max_tokens, at_least=True)
        try:
            return chat.encode_prompt(messages, tools, **more)
        except RanvierError as error:
            raise _template_error(error) from None

    def render_chat(self, body: ConversationBody) -> str:
        """Returns the text of a conversation."""
        messages, tools, chat, more = self._conversation(body)
        try:
            return chat.render_prompt(messages, tools, **more)
        except RanvierError as error:
            raise _template_error(error) from None

    def _conversation(
        self, body: ConversationBody | TokenizeBody
    ) -> tuple[list[dict[str, Any]], list[Any] | None, ChatEncoder, dict[str, Any]]:
        if self.chat is None:
            raise invalid_request(
                f"The model {self.name} has no chat template. A conversation needs the template "
                "that the model was trained with. Use /v1/completions.",
                param="messages",
                code="no_chat_template",
            )
        messages = [one.to_template(f"messages[{i}]") for i, one in enumerate(body.messages or ())]
        more = {
            "variables": body.chat_template_kwargs or {},
            "add_generation_prompt": body.add_generation_prompt,
            "continue_final_message": body.continue_final_message,
        }
        return messages, tool_objects(body), self.chat, more

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes of a token; of a special token, its name."""
        found = self._known_bytes.get(token)
        if found is None:
            found = _bytes_of_token(self.tokenizer, token, is_byte_level=self._is_byte_level)
            self._known_bytes[token] = found
        return found

    @cached_property
    def _is_byte_level(self) -> bool:
        return "ByteLevel" in self.tokenizer.json_text

    @cached_property
    def _known_bytes(self) -> dict[int, bytes]:
        return {}

    def token_text(self, token: int) -> str:
        """Returns the text of a token; bytes that are not UTF-8 are shown as `bytes:\\xff`."""
        data = self.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{one:02x}" for one in data)


def tool_objects(body: ConversationBody | TokenizeBody) -> list[Any] | None:
    """Returns the tools of a body as templates read them; None without tools."""
    if not body.tools:
        return None
    found = []
    for tool in body.tools:
        given = {name: value for name, value in vars(tool.function).items() if value is not None}
        found.append({"type": "function", "function": given})
    return found


def read_model_directory(
    folder: Path,
    make_text_stream: Callable[[Tokenizer, Sequence[int], SamplingParams], TextStream],
    *,
    name: str = "",
    chat_template: str = "",
) -> ServedModel:
    """Loads the tokenizer and the chat template in the directory of a model.

    The built-in template, on which the model was not trained, is not used.
    """
    tokenizer = load_tokenizer(folder, folder)
    template = load_chat_template(tokenizer, folder, chat_template)
    has_chat = template.origin != BUILT_IN
    return ServedModel(
        name=name or folder.resolve().name,
        tokenizer=tokenizer,
        chat=ChatEncoder(template, tokenizer) if has_chat else None,
        make_text_stream=make_text_stream,
    )


def too_long_error(num_tokens: int, max_tokens: int, *, at_least: bool = False) -> ApiError:
    """Returns the error of a prompt that leaves no room for an answer."""
    return invalid_request(
        f"The prompt has {'at least ' * at_least}{num_tokens} tokens. The model has "
        f"{max_tokens} positions, of which at least 1 is for the answer. Shorten the prompt, or "
        "use truncate_prompt_tokens.",
        param="prompt",
        code="context_length_exceeded",
    )


def _template_error(error: RanvierError) -> ApiError:
    return invalid_request(str(error), param="messages", code="invalid_conversation")


def _byte_alphabet() -> dict[str, int]:
    """Characters that byte-level tokenizers write for bytes (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    found = {chr(one): one for one in plain}
    others = (one for one in range(256) if one not in set(plain))
    found.update({chr(256 + i): one for i, one in enumerate(others)})
    return found


BYTES_OF_CHARACTERS = _byte_alphabet()


def _bytes_of_token(tokenizer: Tokenizer, token: int, *, is_byte_level: bool) -> bytes:
    if isinstance(tokenizer, ByteTokenizer):
        return bytes([token]) if token < 256 else b"<|end|>"
    name = tokenizer.token_names.get(token, "")
    if name in tokenizer.special_token_ids:
        return name.encode()
    # Byte fallback of SentencePiece.
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        try:
            return bytes([int(name[3:5], 16)])
        except ValueError:
            return name.encode()
    if "\u2581" in name:
        return name.replace("\u2581", " ").encode()
    if is_byte_level and all(one in BYTES_OF_CHARACTERS for one in name):
        return bytes(BYTES_OF_CHARACTERS[one] for one in name)
    return name.encode(errors="replace")
