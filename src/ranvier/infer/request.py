"""What goes into the engine, and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ranvier.infer.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
"""stop: an end token or a stop string; length: `max_tokens` or the context length; abort: by the
caller; error: this request alone has failed."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt, and how to continue it. Never changes."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    stream: int = 0
    """Selects the random numbers together with the seed: choice i of n, or prompt i of a batch."""
    parent_id: str = ""
    """Request with the same prompt whose blocks are shared; this one starts after the parent's
    prompt is computed. Empty if there is none."""
    priority: int = 0
    """Requests with a lower number are admitted first."""
    cache_salt: str = ""
    """Only requests with equal salts share blocks of the prefix cache."""
    adapter: str = ""
    """Name of the LoRA adapter; empty for the base model."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability of a token, and the most likely tokens at its position."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens and their log-probabilities, in descending order."""


@dataclass(frozen=True, kw_only=True)
class TokenOutput:
    """New tokens of a request after a step."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    """New tokens. An end token is included; it is the last one."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each new token, if the request asks for them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each token of the prompt but the first; with the first output only."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that were found in the prefix cache."""
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    """The token that ended the request, if one did."""
    error: str = ""
    """What went wrong, if the reason is error."""
    is_invalid: bool = False
    """Whether the error is one of the request itself, which would fail again in the same way."""
    queue_seconds: float | None = None
    """Seconds between `add` and the first step that computed tokens of the request; with the first
    output only, and None if the engine does not measure it."""


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counters and gauges of an engine; counters only grow."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    """Prompt tokens of waiting requests."""
    num_blocks: int = 0
    """Blocks of the pool that requests can use."""
    num_free_blocks: int = 0
    """Blocks that no request uses, including those of the prefix cache."""
    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens of all admitted requests."""
    num_generated_tokens: int = 0
    num_computed_tokens: int = 0
    """Tokens that went through the model, including recomputed ones."""
    prefix_cache_queries: int = 0
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    """Prompt tokens that were found there."""
    collective_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes that collectives have moved, by axis."""
    host_seconds: float = 0.0
    """Seconds of steps in which the host scheduled, prepared inputs and handled results, without
    launching and waiting."""
    bytes_read: int = 0
    """Bytes of weights, keys and values that the steps of the first rank had to read."""
    num_iterated_tokens: int = 0
    """Tokens with logits in a model with recurrent depth and early exits: those that may exit, and
    the last one of each prompt, which has all iterations."""
    num_iterations: int = 0
    """Iterations of these tokens."""
    compile_failure: str = ""
    """What runs without a graph because it could not be compiled or captured, and why."""

    @property
    def mean_iterations(self) -> float:
        """Mean number of iterations of these tokens; 0 without any."""
        return self.num_iterations / max(self.num_iterated_tokens, 1)


class EngineInterface(Protocol):
    """The engine as the server sees it. Only one thread calls it."""

    max_model_len: int
    """Maximum number of tokens of a sequence, prompt and output together."""
    vocab_size: int

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs."""

    def add(self, request: Request) -> None:
        """Adds a request to the queue. Raises a `RanvierError` for one that can never run."""

    def abort(self, request_id: str) -> None:
        """Ends a request; unknown and finished ones are ignored. It has no further output."""

    def step(self) -> Sequence[TokenOutput]:
        """Computes the next tokens of some requests. An exception ends the engine."""

    def stats(self) -> EngineStats:
        """Returns the counters and gauges of now."""
