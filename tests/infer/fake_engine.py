"""An engine without a model, for tests of the server.

Tokens are bytes. A request generates letters that depend on its prompt, seed, stream and position
only; at temperature 0 on prompt and position. Words in a prompt ask for more:

    SAY:text|        generates this text and an end token
    REFUSE           `add` raises an error for users
    BREAK_ADD        `add` raises another error
    BREAK_REQUEST    the request ends with an error at its second token
    BREAK_STEP       the step raises
    NO_GRAPH         the engine says that blocks could not be compiled
    KILL             the process ends
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from ranvier.errors import PlanError
from ranvier.infer.request import EngineStats, Request, TokenLogprobs, TokenOutput

END_TOKEN = 256


@dataclass
class FakeSequence:
    """A request that waits or runs."""

    request: Request
    prompt: bytes
    add_time: float
    num_computed: int = 0
    num_cached: int = 0
    num_tokens: int = 0
    waited: float = 0.0

    def next_token(self) -> int:
        said = self.prompt.partition(b"SAY:")[2].partition(b"|")[0]
        if b"SAY:" in self.prompt:
            return said[self.num_tokens] if self.num_tokens < len(said) else END_TOKEN
        params = self.request.params
        drawn = (0, 0) if params.is_greedy else (params.seed, self.request.stream)
        key = repr((self.prompt, drawn, self.num_tokens)).encode()
        key += self.request.adapter.encode()
        return 97 + zlib.crc32(key) % 26


class FakeEngine:
    """Runs up to `max_num_seqs` requests, in order of arrival, in blocks of `block_size` tokens."""

    def __init__(
        self,
        *,
        max_model_len: int = 4096,
        vocab_size: int = 257,
        step_seconds: float = 0.0,
        max_num_seqs: int = 64,
        num_blocks: int = 4096,
        block_size: int = 16,
        max_num_batched_tokens: int = 1024,
    ) -> None:
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.step_seconds = step_seconds
        self.max_num_seqs = max_num_seqs
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self._compile_failure = ""
        self._waiting: dict[str, FakeSequence] = {}
        self._running: dict[str, FakeSequence] = {}
        self._cache: set[tuple[str, tuple[int, ...]]] = set()
        self._counts = dict.fromkeys(
            (
                *("num_steps", "num_prompt_tokens", "num_generated_tokens", "num_computed_tokens"),
                *("prefix_cache_queries", "prefix_cache_hits"),
            ),
            0,
        )

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        assert request.params.max_tokens is not None
        assert len(request.prompt_token_ids) + request.params.max_tokens <= self.max_model_len
        assert not list(request.params.problems(self.vocab_size))
        prompt = bytes(token for token in request.prompt_token_ids if token < 256)
        if b"REFUSE" in prompt:
            raise PlanError("The prompt asks for it. It is refused. Send another.")
        if b"BREAK_ADD" in prompt:
            raise RuntimeError("add is broken")
        self._waiting[request.request_id] = FakeSequence(request, prompt, time.monotonic())

    def abort(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        self._running.pop(request_id, None)

    def step(self) -> Sequence[TokenOutput]:
        if self.step_seconds:
            time.sleep(self.step_seconds)
        self._counts["num_steps"] += 1
        self._admit()
        budget = self.max_num_batched_tokens
        outputs = []
        for one in list(self._running.values()):
            if b"KILL" in one.prompt:
                os._exit(9)
            if b"BREAK_STEP" in one.prompt:
                raise RuntimeError("the step is broken")
            if b"NO_GRAPH" in one.prompt:
                self._compile_failure = "Blocks run without a graph and are slower: Unsupported"
            ahead = len(one.request.prompt_token_ids) + one.num_tokens - one.num_computed
            count = min(ahead, budget)
            budget -= count
            one.num_computed += count
            self._counts["num_computed_tokens"] += count
            if count == ahead:
                outputs.append(self._generate(one))
        return outputs

    def _admit(self) -> None:
        for name, one in list(self._waiting.items()):
            if len(self._running) >= self.max_num_seqs:
                return
            if self._num_free_blocks < self._num_blocks_of(one):
                return
            del self._waiting[name]
            self._running[name] = one
            one.waited = time.monotonic() - one.add_time
            self._counts["num_prompt_tokens"] += len(one.request.prompt_token_ids)
            self._look_up(one)

    def _look_up(self, one: FakeSequence) -> None:
        prompt = one.request.prompt_token_ids
        self._counts["prefix_cache_queries"] += len(prompt)
        for end in range(self.block_size, len(prompt), self.block_size):
            name = (one.request.cache_salt, prompt[:end])
            if name in self._cache and one.num_cached == end - self.block_size:
                one.num_cached = end
            self._cache.add(name)
        one.num_computed = one.num_cached
        self._counts["prefix_cache_hits"] += one.num_cached

    def _generate(self, one: FakeSequence) -> TokenOutput:
        params = one.request.params
        if b"BREAK_REQUEST" in one.prompt and one.num_tokens == 1:
            del self._running[one.request.request_id]
            return TokenOutput(
                request_id=one.request.request_id, finish_reason="error", error="it is broken"
            )
        token = one.next_token()
        first = one.num_tokens == 0
        one.num_tokens += 1
        self._counts["num_generated_tokens"] += 1
        ended = token in params.stop_token_ids and one.num_tokens > params.min_tokens
        reason = "stop" if ended else "length" if one.num_tokens == params.max_tokens else None
        if reason:
            del self._running[one.request.request_id]
        prompt_logprobs = None
        if first and params.prompt_logprobs is not None:
            tokens = one.request.prompt_token_ids[1:]
            prompt_logprobs = tuple(self._score(t, params.prompt_logprobs) for t in tokens)
        return TokenOutput(
            request_id=one.request.request_id,
            token_ids=(token,),
            logprobs=() if params.logprobs is None else (self._score(token, params.logprobs),),
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=one.num_cached if first else 0,
            finish_reason=reason,  # type: ignore[arg-type]
            stop_token=token if ended else None,
            queue_seconds=one.waited if first else None,
        )

    def _score(self, token: int, count: int) -> TokenLogprobs:
        top = tuple(((token + i) % 256, -0.5 - i) for i in range(count))
        return TokenLogprobs(-0.5, 1, top)

    def _num_blocks_of(self, one: FakeSequence) -> int:
        return -(-(len(one.request.prompt_token_ids) + one.num_tokens) // self.block_size)

    @property
    def _num_free_blocks(self) -> int:
        return self.num_blocks - sum(map(self._num_blocks_of, self._running.values()))

    def stats(self) -> EngineStats:
        waiting = self._waiting.values()
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(waiting),
            num_waiting_tokens=sum(len(one.request.prompt_token_ids) for one in waiting),
            num_blocks=self.num_blocks,
            num_free_blocks=self._num_free_blocks,
            compile_failure=self._compile_failure,
            **self._counts,  # type: ignore[arg-type]
        )


def main() -> int:
    """Runs the worker of a replica: SOCKET REPLICA OPTIONS."""
    from ranvier.infer.server.engine_worker import (
        FrontConnection,
        handle_stop_signals,
        run_engine_worker,
    )
    from ranvier.infer.server.messages import EngineInfo

    handle_stop_signals()
    path, replica, options = sys.argv[1:]
    connection = FrontConnection(path, int(replica))
    connection.report_progress("Loading weights.")
    values = json.loads(options)
    time.sleep(values.pop("load_seconds", 0.0))
    engine = FakeEngine(**values)
    info = EngineInfo(
        replica=int(replica),
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        block_size=engine.block_size,
        num_blocks=engine.num_blocks,
    )
    return run_engine_worker(engine, connection, info)


if __name__ == "__main__":
    sys.exit(main())
