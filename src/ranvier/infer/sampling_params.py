"""Sampling parameters of a request, with the names of vLLM and the OpenAI API.

The logits of a step are changed and sampled in this order:

    allowed and forbidden tokens, grammar mask, `min_tokens`
    `logit_bias`
    repetition, presence and frequency penalties
    temperature, `top_k`, `top_p`, `min_p`
    draw

Reported log-probabilities are those of the unchanged logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

MAX_LOGPROBS = 20
"""Maximum number of most likely tokens whose log-probabilities are reported."""
MAX_LOGIT_BIAS = 1024
"""Maximum number of tokens with a logit bias."""
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
"""Maximum number of characters of a stop string."""

StructureKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True)
class StructuredOutput:
    """A language that the generated text must belong to."""

    kind: StructureKind
    value: str = ""
    """The schema as JSON text, the regular expression, the choices as a JSON list, or the grammar;
    empty for json_object."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are sampled, and when it ends."""

    max_tokens: int | None = 16
    """Maximum number of generated tokens; None means up to the context length of the model."""
    min_tokens: int = 0
    """Number of tokens before which no end token and no stop string ends the request."""
    temperature: float = 1.0
    """Divisor of the logits; 0 takes the most likely token."""
    top_p: float = 1.0
    """Samples from the fewest most likely tokens whose probabilities sum to at least this."""
    top_k: int = 0
    """Samples from the k most likely tokens; 0 means all."""
    min_p: float = 0.0
    """Drops tokens whose probability is below this fraction of the most likely one's."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that were generated before."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of generated tokens, once for each time."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the output."""
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    """Added to the logits of these tokens."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that may be sampled; None means all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that may not be generated: the last token is forbidden after the others.
    """
    seed: int = 0
    """Seed of the draws; a draw depends on the seed, the stream and the position."""
    stop: tuple[str, ...] = ()
    """Strings that end the text."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the request, in addition to the end tokens of the model."""
    ignore_eos: bool = False
    """Whether the end tokens of the model do not end the request."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    logprobs: int | None = None
    """Number of most likely tokens whose log-probabilities are reported in addition to that of the
    sampled token; None reports nothing, 0 only that of the sampled token."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, except the first."""
    structured_output: StructuredOutput | None = None
    """Language of the generated text; None means any text."""

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0.0

    @property
    def can_forbid_all(self) -> bool:
        """Whether the parameters may leave no token to sample at some position."""
        return (
            self.allowed_token_ids is not None
            or self.structured_output is not None
            or bool(self.bad_words)
        )

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (
            0.0,
            0.0,
            1.0,
        )

    def problems(self, vocab: int) -> Iterator[tuple[str, str]]:
        """Yields the name of each invalid parameter, and its value, rule and remedy.

        vocab: number of tokens of the model.
        """
        for name, low, high, default in (
            ("temperature", 0.0, 2.0, "1.0"),
            ("top_p", math.ulp(0.0), 1.0, "1.0"),
            ("min_p", 0.0, 1.0, "0.0"),
            ("presence_penalty", -2.0, 2.0, "0.0"),
            ("frequency_penalty", -2.0, 2.0, "0.0"),
            ("repetition_penalty", math.ulp(0.0), math.inf, "1.0"),
        ):
            value = getattr(self, name)
            if not (low <= value <= high and math.isfinite(value)):
                shown = (
                    f"above 0 and at most {high:g}"
                    if low not in (0.0, -2.0)
                    else (f"in [{low:g}, {high:g}]")
                )
                shown = "a finite number above 0" if high == math.inf else shown
                yield name, f"{name}={value} is out of range. It must be {shown}. Use {default}."
        if self.max_tokens is not None and self.max_tokens < 1:
            yield (
                "max_tokens",
                f"max_tokens={self.max_tokens} is too small. It must be at least 1. Use 16.",
            )
        if self.min_tokens < 0 or self.min_tokens > (self.max_tokens or math.inf):
            yield (
                "min_tokens",
                f"min_tokens={self.min_tokens} is out of range. It must be in [0, max_tokens]. "
                "Use 0.",
            )
        if self.top_k < 0:
            yield "top_k", f"top_k={self.top_k} is negative. 0 means all tokens. Use 0."
        if not -(2**63) <= self.seed < 2**63:
            yield "seed", f"seed={self.seed} is out of range. It must fit into 64 bits. Use 0."
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                yield (
                    name,
                    f"{name}={value} is out of range. It must be in [0, {MAX_LOGPROBS}]. Use "
                    f"{MAX_LOGPROBS}.",
                )
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            yield (
                "logit_bias",
                f"logit_bias has {len(self.logit_bias)} tokens. It may have at most "
                f"{MAX_LOGIT_BIAS}. Remove some.",
            )
        for token, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                yield (
                    "logit_bias",
                    f"logit_bias of token {token} is {bias}. It must be in [-100, 100]. Use 100.",
                )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            yield (
                "allowed_token_ids",
                "allowed_token_ids is empty. At least one token must be allowed. Remove it.",
            )
        named = {
            "logit_bias": tuple(self.logit_bias),
            "allowed_token_ids": self.allowed_token_ids or (),
            "stop_token_ids": tuple(self.stop_token_ids),
            "bad_words": tuple(token for word in self.bad_words for token in word),
        }
        for name, tokens in named.items():
            for token in tokens:
                if not 0 <= token < vocab:
                    yield (
                        name,
                        f"{name} has the token {token}. Tokens must be in [0, {vocab}). Remove it.",
                    )
        if len(self.stop) > MAX_STOP_STRINGS:
            yield (
                "stop",
                f"stop has {len(self.stop)} strings. It may have at most {MAX_STOP_STRINGS}. "
                "Remove some.",
            )
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_LENGTH:
                yield (
                    "stop",
                    f"A stop string has {len(text)} characters. It must have 1 to "
                    f"{MAX_STOP_LENGTH}. Shorten it.",
                )
