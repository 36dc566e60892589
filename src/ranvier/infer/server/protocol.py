"""Bodies of requests, in the words of the OpenAI API and of vLLM.

`parse_body` checks a body completely, except for what depends on the model: its name, the length of
the prompt, and numbers of tokens.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from ranvier.infer.sampling_params import MAX_LOGPROBS, StructuredOutput
from ranvier.infer.server.api_errors import ApiError, invalid_request
from ranvier.infer.server.json_body import build_body, parse_json
from ranvier.setting import setting

MAX_CHOICES = 128
"""Maximum of `n`."""
MAX_TOOLS = 128
MAX_BAD_WORDS = 128
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

USE_STRUCTURED = "Use response_format or structured_outputs."
UNSUPPORTED: dict[str, str] = {
    "best_of": "Use n, and choose among the answers.",
    "suffix": "Put the text around the gap into the prompt.",
    "use_beam_search": "Use temperature=0.",
    "length_penalty": "Use max_tokens.",
    "early_stopping": "Use stop.",
    "chat_template": "The template of the model is used; set serve.chat_template on the server.",
    "audio": "Only text is generated.",
    "modalities": "Only text is generated.",
    "images": "Only text is read.",
    "image_url": "Only text is read.",
    "prompt_embeds": "Use prompt.",
    "prediction": "Leave it out.",
    "functions": "Use tools.",
    "function_call": "Use tool_choice.",
    "web_search_options": "Use tools.",
    "guided_json": USE_STRUCTURED,
    "guided_regex": USE_STRUCTURED,
    "guided_choice": USE_STRUCTURED,
    "guided_grammar": USE_STRUCTURED,
    "mm_processor_kwargs": "Only text is read.",
    "documents": "Put the documents into a message.",
    "recurrence": "It is the same for all requests; set engine.recurrence on the server.",
    "exit": "It is the same for all requests; set engine.exit on the server.",
    "kv_share": "It is the same for all requests; set engine.kv_share on the server.",
}
"""Parameters of other servers, and settings of the engine, that are refused, and what to use
instead."""
HARMLESS: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "modalities": (["text"],),
    "early_stopping": (False,),
    "suffix": ("",),
}
"""Values of these that ask for nothing special; clients may send them."""


# ---- parts of bodies ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """What a stream contains in addition to text."""

    include_usage: bool = False


@dataclass(frozen=True, kw_only=True)
class JsonSchemaFormat:
    """A JSON schema with a name."""

    name: str = ""
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


@dataclass(frozen=True, kw_only=True)
class ResponseFormat:
    """OpenAI's description of the format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """vLLM's description of the format of an answer; exactly one must be given."""

    json: dict[str, Any] | str | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


@dataclass(frozen=True, kw_only=True)
class FunctionTool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


@dataclass(frozen=True, kw_only=True)
class ToolBody:
    """A tool that the model may call."""

    function: FunctionTool
    type: Literal["function"] = "function"


@dataclass(frozen=True, kw_only=True)
class NamedFunction:
    """The name of a function."""

    name: str


@dataclass(frozen=True, kw_only=True)
class NamedToolChoice:
    """The function that must be called."""

    function: NamedFunction
    type: Literal["function"] = "function"


@dataclass(frozen=True, kw_only=True)
class TextPart:
    """A part of the content of a message."""

    text: str
    type: Literal["text"] = "text"


@dataclass(frozen=True, kw_only=True)
class CalledFunction:
    """The name and the arguments of a call."""

    name: str
    arguments: str | dict[str, Any] = "{}"


@dataclass(frozen=True, kw_only=True)
class MessageToolCall:
    """A tool call of an earlier answer."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"


@dataclass(frozen=True, kw_only=True)
class MessageBody:
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[MessageToolCall] | None = None

    def to_template(self, path: str) -> dict[str, Any]:
        """Returns the message as chat templates read it.

        Parts of a content become one text, and arguments of tool calls an object.
        """
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        # Templates know no developer; OpenAI's new name of the system.
        role = "system" if self.role == "developer" else self.role
        found: dict[str, Any] = {"role": role, "content": content or ""}
        for name in ("name", "reasoning_content", "tool_call_id"):
            value = getattr(self, name)
            if value is not None:
                found[name] = value
        if self.tool_calls:
            found["tool_calls"] = [
                {
                    "id": one.id or "",
                    "type": "function",
                    "function": {
                        "name": one.function.name,
                        "arguments": _read_arguments(one.function.arguments, path),
                    },
                }
                for one in self.tool_calls
            ]
        return found


def _read_arguments(arguments: str | dict[str, Any], path: str) -> dict[str, Any]:
    if isinstance(arguments, dict):
        return arguments
    try:
        value = parse_json(arguments.encode() or b"{}")
    except ApiError:
        value = None
    if not isinstance(value, dict):
        raise invalid_request(
            f"The arguments of a tool call in {path} are not a JSON object. Templates need their "
            "values. Send them as the model wrote them.",
            param=path,
            code="invalid_value",
        )
    return value


# ---- bodies ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GenerationBody:
    """Parameters of both completions APIs."""

    model: str = ""
    """Name of the model; empty for the only one."""
    max_tokens: int | None = setting(None, minimum=0, usual=16, unit="tokens")
    min_tokens: int = setting(0, minimum=0, unit="tokens")
    temperature: float = setting(1.0, minimum=0.0, maximum=2.0, usual=1.0)
    top_p: float = setting(1.0, minimum=1e-9, maximum=1.0, usual=1.0)
    top_k: int = setting(0, minimum=-1)
    """Number of most likely tokens to sample from; -1 and 0 mean all."""
    min_p: float = setting(0.0, minimum=0.0, maximum=1.0)
    presence_penalty: float = setting(0.0, minimum=-2.0, maximum=2.0)
    frequency_penalty: float = setting(0.0, minimum=-2.0, maximum=2.0)
    repetition_penalty: float = setting(1.0, minimum=1e-3, maximum=1e3)
    logit_bias: dict[str, float] | None = None
    """Added to the logits of tokens, from -100 to 100 by token number."""
    seed: int | None = setting(None, minimum=-(2**63), maximum=2**63 - 1)
    n: int = setting(1, minimum=1, maximum=MAX_CHOICES)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = setting(None, minimum=0, maximum=MAX_LOGPROBS)
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = setting(None, minimum=1, unit="tokens")
    """Number of last tokens of the prompt that are used."""
    priority: int = setting(0, minimum=-(2**31), maximum=2**31)
    """Requests with a lower number start first."""
    cache_salt: str | None = None
    """Only requests with equal salts share cached prefixes."""
    return_token_ids: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end the text."""
        if isinstance(self.stop, str):
            return (self.stop,)
        return tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def read_structure(self) -> StructuredOutput | None:
        """Returns the language of the answer; None means any text."""
        found = [*_structures_of_format(self.response_format)]
        found += _structures_of_outputs(self.structured_outputs)
        if len(found) > 1:
            raise invalid_request(
                f"The format of the answer is described {len(found)} times. Only one description "
                "is possible. Remove the others.",
                param="structured_outputs",
                code="invalid_value",
            )
        return found[0] if found else None


@dataclass(frozen=True, kw_only=True)
class CompletionBody(GenerationBody):
    """Body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    """A text, a list of texts, the tokens of a text, or a list of those."""
    logprobs: int | None = setting(None, minimum=0, maximum=MAX_LOGPROBS)
    echo: bool = False
    """Whether the answer starts with the prompt."""


@dataclass(frozen=True, kw_only=True)
class ConversationBody:
    """A conversation and how it is rendered."""

    messages: list[MessageBody]
    tools: list[ToolBody] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template."""


@dataclass(frozen=True, kw_only=True)
class ChatBody(ConversationBody, GenerationBody):
    """Body of /v1/chat/completions."""

    max_completion_tokens: int | None = setting(None, minimum=1, usual=16, unit="tokens")
    logprobs: bool = False
    top_logprobs: int | None = setting(None, minimum=0, maximum=MAX_LOGPROBS)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool = True
    """Whether an answer may have more than one tool call."""

    @property
    def choice_of_tool(self) -> str:
        """none, auto, required, or `=` and the name of a function."""
        if isinstance(self.tool_choice, NamedToolChoice):
            return f"={self.tool_choice.function.name}"
        return self.tool_choice or ("auto" if self.tools else "none")


@dataclass(frozen=True, kw_only=True)
class TokenizeBody:
    """Body of /tokenize: a text or a conversation."""

    model: str = ""
    prompt: str | None = None
    messages: list[MessageBody] | None = None
    tools: list[ToolBody] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


@dataclass(frozen=True, kw_only=True)
class DetokenizeBody:
    """Body of /detokenize."""

    tokens: list[int]
    model: str = ""


@dataclass(frozen=True, kw_only=True)
class TemplateBody(ConversationBody):
    """Body of /apply-template."""

    model: str = ""


AnyBody = TypeVar("AnyBody")


def parse_body(cls: type[AnyBody], data: bytes, *, strict: bool) -> tuple[AnyBody, list[str]]:
    """Returns the body of a request, and the names of parameters that are ignored.

    strict: unknown parameters are refused instead.
    """
    value = parse_json(data)
    if not isinstance(value, dict):
        raise invalid_request(
            f"The body is a {type(value).__name__}. It must be a JSON object. Send "
            "{...} with the parameters.",
            code="invalid_type",
        )
    for name, given in value.items():
        if name in UNSUPPORTED and given is not None and given not in HARMLESS.get(name, ()):
            raise _unsupported_error(name, UNSUPPORTED[name])
    _check_parts(value.get("messages"))
    body, unknown = build_body(cls, value)
    ignored = [name for name in unknown if name not in UNSUPPORTED]
    if ignored and strict:
        raise invalid_request(
            f"The parameter {ignored[0][:80]!r} is unknown. serve.strict_parameters refuses "
            "unknown parameters. Remove it.",
            param=ignored[0][:80],
            code="unknown_parameter",
        )
    _check_body(body)
    return body, ignored


def _unsupported_error(name: str, remedy: str) -> ApiError:
    return invalid_request(
        f"{name} is not supported. This server generates text from text. {remedy}",
        param=name,
        code="unsupported_parameter",
    )


def _check_parts(messages: Any) -> None:
    """Refuses images and audio in messages by name, before types are checked."""
    if not isinstance(messages, list):
        return
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                name = f"messages[{number}].content"
                raise ApiError(
                    400,
                    f"{name} has a part of the type {kind[:40]!r}. Only text is supported. Remove "
                    "the part.",
                    param=name,
                    code="unsupported_value",
                )


def _check_body(body: Any) -> None:
    """Checks what types and bounds do not say."""
    if isinstance(body, (ConversationBody, TokenizeBody)):
        _check_conversation(body)
    if isinstance(body, GenerationBody):
        if body.stream_options is not None and not body.stream:
            raise invalid_request(
                "stream_options is given without stream. It describes a stream. Add stream=true.",
                param="stream_options",
                code="invalid_value",
            )
        if len(body.bad_words or ()) > MAX_BAD_WORDS:
            raise invalid_request(
                f"bad_words has {len(body.bad_words or ())} entries. It may have at most "
                f"{MAX_BAD_WORDS}. Remove some.",
                param="bad_words",
                code="invalid_value",
            )
        body.read_structure()
    if isinstance(body, ChatBody):
        _check_chat(body)
    if isinstance(body, CompletionBody):
        if not body.prompt and not isinstance(body.prompt, str):
            raise invalid_request(
                "prompt is an empty list. It must have at least one prompt or token. Add one.",
                param="prompt",
                code="invalid_value",
            )
        if body.max_tokens == 0 and not body.echo:
            raise invalid_request(
                "max_tokens=0 without echo. An answer without tokens is only useful with the "
                "prompt. Use max_tokens=1, or echo=true.",
                param="max_tokens",
                code="invalid_value",
            )
    if isinstance(body, TokenizeBody) and (body.prompt is None) == (body.messages is None):
        raise invalid_request(
            "Either prompt or messages must be given. They are two forms of a text. Send one.",
            param="prompt",
            code="invalid_value",
        )


def _check_conversation(body: ConversationBody | TokenizeBody) -> None:
    messages = body.messages
    if messages is not None and not messages:
        raise invalid_request(
            "messages is empty. A conversation has at least one message. Add one.",
            param="messages",
            code="invalid_value",
        )
    for message in messages or ():
        if message.content is None and message.role != "assistant":
            raise invalid_request(
                f"A message of the role {message.role} has no content. Only assistants may have "
                "none, with tool calls. Add the content.",
                param="messages",
                code="invalid_value",
            )
    if body.continue_final_message:
        if body.add_generation_prompt:
            raise invalid_request(
                "add_generation_prompt and continue_final_message are both true. The last message "
                "is continued, or a new one starts. Add add_generation_prompt=false.",
                param="continue_final_message",
                code="invalid_value",
            )
        if messages and messages[-1].role != "assistant":
            raise invalid_request(
                "continue_final_message is true, but the last message is not the assistant's. Only "
                "such a message can be continued. Add one.",
                param="continue_final_message",
                code="invalid_value",
            )
    names = [tool.function.name for tool in body.tools or ()]
    for name in names:
        if not TOOL_NAME.fullmatch(name):
            raise invalid_request(
                f"The tool name {name[:80]!r} is not valid. It may have 1 to 64 letters, digits, "
                "'_', '.' and '-'. Rename the tool.",
                param="tools",
                code="invalid_value",
            )
    if len(names) > MAX_TOOLS or len(set(names)) < len(names):
        raise invalid_request(
            f"tools has {len(names)} entries with {len(set(names))} names. At most {MAX_TOOLS} "
            "tools with different names are possible. Remove some.",
            param="tools",
            code="invalid_value",
        )


def _check_chat(body: ChatBody) -> None:
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid_request(
            f"top_logprobs={body.top_logprobs} without logprobs. It needs them. Add logprobs=true.",
            param="top_logprobs",
            code="invalid_value",
        )
    if body.max_tokens == 0:
        raise invalid_request(
            "max_tokens=0 is too small. It must be at least 1. Use 1 or more.",
            param="max_tokens",
            code="invalid_value",
        )
    choice = body.choice_of_tool
    names = [tool.function.name for tool in body.tools or ()]
    if choice.startswith("=") and choice[1:] not in names:
        raise invalid_request(
            f"tool_choice names {choice[1:][:80]!r}, which is not in tools. Only a given tool can "
            "be called. Add it to tools.",
            param="tool_choice",
            code="invalid_value",
        )
    if choice == "required" and not names:
        raise invalid_request(
            "tool_choice='required' without tools. A call needs a tool. Add tools.",
            param="tool_choice",
            code="invalid_value",
        )
    if choice not in ("none", "auto") and body.read_structure() is not None:
        raise invalid_request(
            "tool_choice and the format of the answer both restrict the text. Only one of them is "
            "possible. Remove one.",
            param="tool_choice",
            code="invalid_value",
        )


def _structures_of_format(given: ResponseFormat | None) -> list[StructuredOutput]:
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        return [StructuredOutput("json_object")]
    if given.json_schema is None or given.json_schema.schema is None:
        raise invalid_request(
            "response_format has no json_schema.schema. The type json_schema needs one. Add it.",
            param="response_format",
            code="invalid_value",
        )
    return [StructuredOutput("json_schema", json.dumps(given.json_schema.schema))]


def _structures_of_outputs(given: StructuredOutputs | None) -> list[StructuredOutput]:
    if given is None:
        return []
    found = []
    if given.json is not None:
        text = given.json if isinstance(given.json, str) else json.dumps(given.json)
        parse_json(text.encode())
        found.append(StructuredOutput("json_schema", text))
    if given.json_object:
        found.append(StructuredOutput("json_object"))
    if given.regex is not None:
        found.append(StructuredOutput("regex", given.regex))
    if given.choice is not None:
        if not given.choice or not all(given.choice):
            raise invalid_request(
                "structured_outputs.choice is empty or has an empty text. The answer must be one "
                "of the choices. Add texts.",
                param="structured_outputs",
                code="invalid_value",
            )
        found.append(StructuredOutput("choice", json.dumps(given.choice)))
    if given.grammar is not None:
        found.append(StructuredOutput("grammar", given.grammar))
    return found
