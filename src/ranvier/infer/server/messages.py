"""Messages between the front and an engine process: length-prefixed JSON.

From the front:

    {"add": request}, {"abort": request_id}, {"stop": true}

From an engine:

    {"progress": text}          while it loads
    {"hello": EngineInfo}       when it accepts requests
    {"refused": [request_id, kind, text]}
    {"step": [outputs, stats, number of requests received so far, seconds of the step]}
    {"fault": text}             before it ends

JSON of the standard library is fast enough: a step of 256 sequences takes 0.2 ms.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ranvier.infer.request import EngineStats, Request, TokenLogprobs, TokenOutput
from ranvier.infer.sampling_params import SamplingParams, StructuredOutput

LENGTH_BYTES = 4
MAX_MESSAGE_BYTES = 1 << 30
STATS_FIELDS = tuple(one.name for one in dataclasses.fields(EngineStats))
DEFAULT_PARAMS = SamplingParams()
OUTPUT_FIELDS = (
    *("num_cached_tokens", "finish_reason", "stop_token", "error", "is_invalid", "queue_seconds"),
)
"""Fields of an output that most outputs do not have."""


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What the front needs to know about an engine."""

    replica: int = 0
    """Index on the data axis."""
    max_model_len: int = 0
    vocab_size: int = 0
    block_size: int = 64
    """Tokens of a block of the prefix cache, for routing."""
    num_blocks: int = 0
    plan: str = ""
    """Grid of the replica in words, for the fingerprint of answers."""
    adapters: tuple[str, ...] = ()
    """Names of LoRA adapters."""
    bandwidth: float = 0.0
    """Bytes per second that a copy on the device of the first rank reaches; 0 if not known."""
    details: Mapping[str, str] = field(default_factory=dict)
    """Further facts that the line at start-up shows."""


def encode_message(message: Mapping[str, Any]) -> bytes:
    """Returns a message with its length in front."""
    body = json.dumps(message, separators=(",", ":")).encode()
    assert len(body) <= MAX_MESSAGE_BYTES, len(body)
    return len(body).to_bytes(LENGTH_BYTES) + body


class MessageReader:
    """Splits a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yields the messages that are complete after these bytes."""
        self._buffer += data
        while len(self._buffer) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._buffer[:LENGTH_BYTES])
            assert end <= MAX_MESSAGE_BYTES + LENGTH_BYTES, end
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[LENGTH_BYTES:end])
            del self._buffer[:end]
            yield json.loads(body)


# ---- requests ----------------------------------------------------------------------------------


def pack_request(request: Request) -> dict[str, Any]:
    """Returns a request as JSON values; parameters with their default value are left out."""
    params: dict[str, Any] = {}
    for one in dataclasses.fields(SamplingParams):
        value = getattr(request.params, one.name)
        if value != getattr(DEFAULT_PARAMS, one.name):
            params[one.name] = value
    if "logit_bias" in params:
        params["logit_bias"] = list(params["logit_bias"].items())
    if "stop_token_ids" in params:
        params["stop_token_ids"] = sorted(params["stop_token_ids"])
    if "structured_output" in params:
        structure = params["structured_output"]
        params["structured_output"] = [structure.kind, structure.value]
    return {
        "request_id": request.request_id,
        "prompt_token_ids": request.prompt_token_ids,
        "params": params,
        "stream": request.stream,
        "parent_id": request.parent_id,
        "priority": request.priority,
        "cache_salt": request.cache_salt,
        "adapter": request.adapter,
    }


def pack_requests(requests: Sequence[Request]) -> Iterator[dict[str, Any]]:
    """Yields messages that add requests; choices of one prompt share its tokens in a message."""
    message: dict[str, Any] = {}
    first: Request | None = None
    for one in requests:
        # Long prompts with many choices would make gigabytes of messages.
        if first and one.prompt_token_ids is first.prompt_token_ids and one.params is first.params:
            message["copies"].append([one.request_id, one.stream, one.parent_id])
            continue
        if message:
            yield message
        first = one
        message = {"add": pack_request(one), "copies": []}
    yield message


def unpack_requests(message: Mapping[str, Any]) -> Iterator[Request]:
    """Yields the requests of a message of `pack_requests`."""
    first = unpack_request(message["add"])
    yield first
    for request_id, stream, parent_id in message.get("copies", ()):
        yield dataclasses.replace(first, request_id=request_id, stream=stream, parent_id=parent_id)


def unpack_request(values: Mapping[str, Any]) -> Request:
    """Returns the request of `pack_request`."""
    params = dict(values["params"])
    if "logit_bias" in params:
        params["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"]}
    if "stop_token_ids" in params:
        params["stop_token_ids"] = frozenset(params["stop_token_ids"])
    if "structured_output" in params:
        params["structured_output"] = StructuredOutput(*params["structured_output"])
    for name in ("allowed_token_ids", "stop"):
        if params.get(name) is not None:
            params[name] = tuple(params[name])
    if "bad_words" in params:
        params["bad_words"] = tuple(map(tuple, params["bad_words"]))
    return Request(
        **{
            **values,
            "prompt_token_ids": tuple(values["prompt_token_ids"]),
            "params": SamplingParams(**params),
        }
    )


# ---- outputs -----------------------------------------------------------------------------------


def pack_output(output: TokenOutput) -> list[Any]:
    """Returns an output as JSON values; most have only an id and a token."""
    packed: list[Any] = [output.request_id, output.token_ids]
    more: dict[str, Any] = {}
    if output.logprobs:
        more["logprobs"] = [_pack_logprobs(one) for one in output.logprobs]
    if output.prompt_logprobs is not None:
        more["prompt_logprobs"] = [_pack_logprobs(one) for one in output.prompt_logprobs]
    for name in OUTPUT_FIELDS:
        value = getattr(output, name)
        if value not in (None, 0, "") or (name == "stop_token" and value is not None):
            more[name] = value
    if more:
        packed.append(more)
    return packed


def unpack_output(packed: list[Any]) -> TokenOutput:
    """Returns the output of `pack_output`."""
    if len(packed) == 2:
        return TokenOutput(request_id=packed[0], token_ids=tuple(packed[1]))
    more = packed[2]
    for name in ("logprobs", "prompt_logprobs"):
        if name in more:
            more[name] = tuple(map(_unpack_logprobs, more[name]))
    return TokenOutput(request_id=packed[0], token_ids=tuple(packed[1]), **more)


def _pack_logprobs(one: TokenLogprobs) -> list[Any]:
    return [one.logprob, one.rank, one.top]


def _unpack_logprobs(packed: list[Any]) -> TokenLogprobs:
    logprob, rank, top = packed
    return TokenLogprobs(logprob, rank, tuple((token, value) for token, value in top))


def pack_stats(stats: EngineStats) -> list[Any]:
    """Returns the values of statistics in the order of their fields."""
    return [getattr(stats, name) for name in STATS_FIELDS]


def unpack_stats(packed: list[Any]) -> EngineStats:
    """Returns the statistics of `pack_stats`."""
    return EngineStats(**dict(zip(STATS_FIELDS, packed, strict=True)))
