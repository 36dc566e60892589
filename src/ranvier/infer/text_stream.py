"""The text of one request, as the engine generates it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence

from ranvier.data.tokenizer import Tokenizer
from ranvier.errors import DataError
from ranvier.infer.detokenizer import IncrementalDetokenizer
from ranvier.infer.request import EngineInterface, FinishReason, Request
from ranvier.infer.sampling_params import SamplingParams


class AnswerStream:
    """A request that an engine without other requests continues.

    Args:
        engine: The engine.
        tokenizer: The tokenizer of its model.
        prompt_token_ids: Tokens to continue.
        params: Sampling parameters.
    """

    def __init__(
        self,
        engine: EngineInterface,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
    ) -> None:
        self.engine = engine
        self.finish_reason: FinishReason | None = None
        self.num_cached_tokens = 0
        """Tokens of the prompt that were found in the prefix cache."""
        self._request = Request(
            request_id=secrets.token_hex(8),
            prompt_token_ids=tuple(prompt_token_ids),
            params=params,
        )
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids, params)

    @property
    def text(self) -> str:
        """The text so far."""
        return self._detokenizer.text

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens so far."""
        return self._detokenizer.num_tokens

    def pieces(self, *, is_stopped: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """Yields pieces of text until the end.

        is_stopped: whether to end after the current step. Raises a `RanvierError` for a request
        that cannot run.
        """
        self.engine.add(self._request)
        while self.finish_reason is None:
            for output in self.engine.step():
                if output.finish_reason == "error":
                    raise DataError(output.error)
                self.num_cached_tokens += output.num_cached_tokens
                piece = self._detokenizer.append(output.token_ids, stop_token=output.stop_token)
                self.finish_reason = output.finish_reason
                if self._detokenizer.stop_string is not None:
                    self._end("stop")
                elif is_stopped():
                    self._end("abort")
                if self.finish_reason is not None:
                    piece += self._detokenizer.finish()
                if piece:
                    yield piece

    def _end(self, reason: FinishReason) -> None:
        if self.finish_reason is None:
            self.engine.abort(self._request.request_id)
            self.finish_reason = reason
