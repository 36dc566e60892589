"""Sampling parameters of a body."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from ranvier.data.tokenizer import Tokenizer
from ranvier.infer.sampling_params import SamplingParams, StructuredOutput
from ranvier.infer.server.api_errors import invalid_request
from ranvier.infer.server.protocol import ChatBody, GenerationBody
from ranvier.infer.server.served_model import ServedModel


class RequestSeeds:
    """Seeds of requests that have none, by the seed of the server and their order."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._num_drawn = 0

    def draw(self) -> int:
        """Returns the seed of the next request, at most 63 bits."""
        text = f"{self._seed} {self._num_drawn}"
        self._num_drawn += 1
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


def build_params(
    body: GenerationBody,
    model: ServedModel,
    vocab_size: int,
    seeds: RequestSeeds,
    *,
    structure: StructuredOutput | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Returns the sampling parameters of a body; raises for tokens that do not exist.

    They have no limit of tokens.
    """
    ends = set(body.stop_token_ids or ())
    # Every end token is given to the engine, except where the client ignores them.
    if not body.ignore_eos:
        ends.add(model.tokenizer.eos_token_id)
        if isinstance(body, ChatBody) and model.chat is not None:
            ends |= model.chat.end_token_ids
    allowed = body.allowed_token_ids
    params = SamplingParams(
        max_tokens=None,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(0, body.top_k),
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=_read_logit_bias(body.logit_bias or {}),
        allowed_token_ids=None if allowed is None else tuple(allowed),
        bad_words=_encode_bad_words(body.bad_words or (), model.tokenizer),
        seed=seeds.draw() if body.seed is None else body.seed,
        stop=body.stop_strings,
        stop_token_ids=frozenset(ends),
        ignore_eos=body.ignore_eos,
        include_stop_str_in_output=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs if prompt_logprobs is None else prompt_logprobs,
        structured_output=structure,
    )
    for name, problem in params.problems(vocab_size):
        raise invalid_request(problem, param=name, code="invalid_value")
    return params


def _encode_bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens of words, with and without a space before them."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not word or len(word) > 256:
            raise invalid_request(
                f"A word of bad_words has {len(word)} characters. It must have 1 to 256. "
                "Change it.",
                param="bad_words",
                code="invalid_value",
            )
        for text in (word, f" {word.lstrip()}"):
            found[tuple(tokenizer.encode([text])[0].tolist())] = None
    return tuple(one for one in found if one)


def _read_logit_bias(given: dict[str, float]) -> dict[int, float]:
    found = {}
    for key, bias in given.items():
        if not re.fullmatch(r"[0-9]{1,10}", key):
            raise invalid_request(
                f"logit_bias has the key {key[:60]!r}. Keys are numbers of tokens. Change it.",
                param="logit_bias",
                code="invalid_value",
            )
        found[int(key)] = bias
    return found
