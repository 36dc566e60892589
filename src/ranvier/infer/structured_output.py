"""Structured output: which tokens may come next, so that the text belongs to a language.

`GrammarCompiler` makes a `GrammarMatcher` for each request. The engine asks it for a mask before
sampling, and tells it each new token. Tokens without an alternative are appended unsampled.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import numpy as np

from ranvier.data.tokenizer import Tokenizer
from ranvier.infer.grammar import (
    GrammarLimits,
    StructuredOutputError,
    build_grammar_tokenizer,
    build_parser,
    import_llguidance,
)
from ranvier.infer.grammar_worker import GrammarWorker
from ranvier.infer.sampling_params import StructuredOutput

__all__ = ["GrammarCompiler", "GrammarLimits", "GrammarMatcher", "StructuredOutputError"]

CACHED_GRAMMARS = 64
"""Number of compiled grammars that are kept."""


class GrammarMatcher:
    """The position of one request in its grammar."""

    def __init__(
        self, parser: Any, vocab_size: int, end_token_ids: frozenset[int], limits: GrammarLimits
    ) -> None:
        self._parser = parser
        self._vocab_size = vocab_size
        self._end_token_ids = end_token_ids
        self._limits = limits
        self._ended = False
        self._mask: np.ndarray | None = None
        self._end_words = _pack_tokens(vocab_size, sorted(end_token_ids))
        self._other_words = ~self._end_words & _pack_tokens(vocab_size, slice(vocab_size))

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete: an end token has come, or nothing else may follow."""
        return self._ended or (self._parser.is_stopped() and not self._parser.is_error())

    @property
    def is_accepting(self) -> bool:
        """Whether the text may end here."""
        return self._ended or bool(self._parser.is_accepting())

    def next_mask(self) -> np.ndarray:
        """Returns the tokens that may come next, as bits.

        Bit i of word j is set if token 32 j + i is allowed. End tokens are allowed only where the
        text may end. The words are never all 0.

        mask: int32 words (ceil(V / 32),)
        """
        if self._mask is None:
            began = time.thread_time()
            words = np.frombuffer(self._parser.compute_bitmask(), dtype=np.int32)
            self._check(began)
            words = words[: len(self._other_words)] & self._other_words
            if self.is_accepting:
                words |= self._end_words
            if not words.any():
                raise StructuredOutputError(
                    "No token of the vocabulary continues the text. The grammar must be "
                    "expressible in tokens of the model. Allow other characters in it."
                )
            self._mask = words
        return self._mask

    def forced_tokens(self) -> list[int]:
        """Returns the next tokens that have no alternative; often none."""
        if self.is_finished:
            return []
        began = time.thread_time()
        tokens = []
        for token in self._parser.compute_ff_tokens():
            if token in self._end_token_ids or token >= self._vocab_size:
                break
            tokens.append(int(token))
        self._check(began)
        return tokens

    def advance(self, token: int) -> None:
        """Appends a token of the mask."""
        if self._ended:
            raise StructuredOutputError(
                f"Token {token} comes after the end of the text. No token may follow an end token. "
                "End the request."
            )
        self._mask = None
        if token in self._end_token_ids and self.is_accepting:
            self._ended = True
            return
        began = time.thread_time()
        if token in self._end_token_ids or not self._parser.consume_token(token):
            # An allowed token may still exceed the limits of the parser.
            if "too many" in self._first_line().lower():
                self._check(began)
            raise StructuredOutputError(
                f"Token {token} does not continue the text. Only tokens of the mask may be "
                f"appended. {self._first_line() or 'Sample within the mask'}."
            )
        self._check(began)

    def _check(self, began: float) -> None:
        """Raises if the parser has failed, or has used too much time since `began`."""
        if self._parser.is_error():
            raise StructuredOutputError(
                f"The grammar has become too complex: {self._first_line()}. The work for a token "
                "is limited. Simplify the grammar: fewer repetitions and alternatives."
            )
        seconds = time.thread_time() - began
        if seconds > self._limits.step_seconds:
            raise StructuredOutputError(
                f"The grammar took {seconds:.2f} s for a token. It may take at most "
                f"{self._limits.step_seconds:g} s. Simplify it: fewer repetitions and alternatives."
            )

    def _first_line(self) -> str:
        text: str = self._parser.get_error()
        return text.partition("\n")[0][:200].rstrip(".")


def _pack_tokens(vocab_size: int, tokens: list[int] | slice) -> np.ndarray:
    """Returns words in which the bits of these tokens are set: int32 (ceil(V / 32),)."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=bool)
    bits[tokens] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


class GrammarCompiler:
    """Compiles structured outputs for one tokenizer; keeps those that were used last.

    Its methods may be called from several threads. They may wait for `limits.compile_seconds`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        end_token_ids: Iterable[int],
        *,
        limits: GrammarLimits | None = None,
        trusts_input: bool = False,
    ) -> None:
        """
        vocab_size: number of tokens of the model; that of the tokenizer may differ.
        trusts_input: compile here without trying first in another process, for structures that
            another compiler has checked.
        """
        import_llguidance()
        self._vocab_size = vocab_size
        self._end_token_ids = frozenset(t for t in end_token_ids if 0 <= t < vocab_size)
        self._limits = limits or GrammarLimits()
        self._num_tokens = max(vocab_size, tokenizer.vocab_size)
        self._tokenizer_json = tokenizer.json_text
        self._ends = sorted(self._end_token_ids) or [tokenizer.eos_token_id]
        self._tokenizer: Any = None
        self._worker: GrammarWorker | None = None
        if not trusts_input:
            self._worker = GrammarWorker(
                self._tokenizer_json, self._num_tokens, self._ends, self._limits
            )
        self._lock = threading.Lock()
        self._cache: OrderedDict[StructuredOutput, Any] = OrderedDict()

    def check(self, structure: StructuredOutput) -> None:
        """Compiles a structure. Raises a `StructuredOutputError` if that fails."""
        self._compiled(structure)

    def compile(self, structure: StructuredOutput) -> GrammarMatcher:
        """Returns a matcher at the beginning of the text."""
        parser = self._compiled(structure)
        with self._lock:
            copy = parser.deep_copy()
        return GrammarMatcher(copy, self._vocab_size, self._end_token_ids, self._limits)

    def close(self) -> None:
        """Ends the process that tries grammars."""
        if self._worker is not None:
            self._worker.close()

    def _compiled(self, structure: StructuredOutput) -> Any:
        """Returns the parser of a structure, from the cache if it is there."""
        with self._lock:
            found = self._cache.get(structure)
            if found is not None:
                self._cache.move_to_end(structure)
        if found is None:
            found = self._compile_or_error(structure)
            with self._lock:
                self._cache[structure] = found
                while len(self._cache) > CACHED_GRAMMARS:
                    self._cache.popitem(last=False)
        if isinstance(found, StructuredOutputError):
            raise StructuredOutputError(str(found))
        return found

    def _compile_or_error(self, structure: StructuredOutput) -> Any:
        """Returns the parser of a structure, or the error, which is kept as well: what was killed
        once is not started again."""
        try:
            if len(structure.value) <= self._limits.max_characters and self._worker is not None:
                self._worker.check(structure)
            if self._tokenizer is None:
                self._tokenizer = build_grammar_tokenizer(
                    self._tokenizer_json, self._num_tokens, self._ends
                )
            return build_parser(self._tokenizer, structure, self._limits)
        except StructuredOutputError as error:
            return error


def json_schema_output(schema: Any) -> StructuredOutput:
    """Returns the structured output of JSON texts that are valid under a schema."""
    return StructuredOutput("json_schema", json.dumps(schema, ensure_ascii=False))
