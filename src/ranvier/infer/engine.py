"""Inference engine: continuous batching of requests on a grid.

A sequence is its tokens and the number of them whose keys and values are in the cache. Each step
computes some tokens of some sequences, as the scheduler decides, and samples the next token of
those that have no tokens left to compute. Prefill, chunks of it, decode, hits of the prefix cache
and recomputing after preemption are all the same.

On a GPU the engine is one step ahead of the host (`engine.async_scheduling`): the next step is
launched before the tokens of the last one are known, and reads them on the device. A sequence that
ends with such a token was computed once too often, and that result is not used.

The engine runs on the leader of the grid; the other ranks follow with `ModelRunner.follow`.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ranvier.comm.consensus import max_over_ranks
from ranvier.config.engine import EngineConfig
from ranvier.config.plan import RowSplitChoice
from ranvier.errors import PlanError, RanvierError
from ranvier.infer.block_pool import BlockPool
from ranvier.infer.early_exit import DECIDE
from ranvier.infer.memory_traffic import MemoryTraffic
from ranvier.infer.model_runner import (
    FAILED,
    HomeOutput,
    ModelRunner,
    PendingStep,
    count_kv_caches,
)
from ranvier.infer.policy import ScheduledStep, WorkItem
from ranvier.infer.request import EngineStats, FinishReason, Request, TokenLogprobs, TokenOutput
from ranvier.infer.sampler import TokenScores
from ranvier.infer.sampling_inputs import SamplingInputs, SamplingRow, SamplingState
from ranvier.infer.sampling_params import SamplingParams, StructuredOutput
from ranvier.infer.scheduler import Scheduler
from ranvier.infer.sequence import Sequence as EngineSequence
from ranvier.infer.step_input import HomeInput, SequenceChunk, StepInput
from ranvier.infer.step_table import StepLog
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.sharding import round_up

if TYPE_CHECKING:
    from ranvier.infer.structured_output import GrammarMatcher

T = TypeVar("T")

HomeWork = tuple[WorkItem, "RequestState", range]
"""An item of a step, its request, and the positions whose next token is scored."""

DEFAULT_CPU_CACHE_GIB = 1.0


@dataclass(eq=False)
class RequestState:
    """What the engine knows about a request that has not ended."""

    sequence: EngineSequence
    sampling: SamplingState
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of the tokens of the prompt so far, if the request asks for them."""
    has_output: bool = False
    """Whether a token was returned before."""
    added_time: float = field(default_factory=time.monotonic)
    start_time: float | None = None
    """When the first step with tokens of the request was built."""
    matcher: GrammarMatcher | None = None
    """Position in the grammar of the request, if its output is structured."""
    error: str = ""
    """Why it cannot continue; it ends with this."""
    is_invalid: bool = True
    """Whether the request is the cause of the error, as it is of those of its grammar."""

    def next_row(self) -> SamplingRow:
        """Returns how the next token is sampled; some tokens before it may not be known yet."""
        mask = None
        if self.matcher is not None and not self.error:
            try:
                mask = self.matcher.next_mask()
            except RanvierError as error:
                self.error = str(error)
        return self.sampling.next_row(position=self.next_position, mask=mask)

    @property
    def next_position(self) -> int:
        """Number of tokens before the next one, with those that steps in flight sample."""
        # A step samples only after all tokens, so that the scheduler has counted this one, too.
        return len(self.sampling.output_token_ids) + self.sequence.num_pending_tokens - 1


@dataclass(frozen=True, eq=False)
class StepInFlight:
    """A step that was launched and has not finished."""

    scheduled: ScheduledStep
    states: Sequence[RequestState]
    """State of each item."""
    num_scored: Sequence[int]
    """Number of scored tokens of each item."""
    pending: PendingStep
    launch_time: float


class Engine:
    """Runs requests on a model; see `EngineInterface`.

    Args:
        runner: The model on this rank, which must be the leader.
        config: Settings of the engine.
        max_model_len: Maximum number of tokens of a sequence.
        num_blocks: Number of blocks of each home, including block 0.
        end_token_ids: Tokens that end a request.
        model_name: Name of the checkpoint; keys and values depend on it and on the tokens.
        compile_grammar: Returns the matcher of a structured output; None if there is no support.
        adapters: Names of the adapters of the model, in their order.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        *,
        max_model_len: int,
        num_blocks: int,
        end_token_ids: Collection[int],
        model_name: str = "",
        compile_grammar: Callable[[StructuredOutput], GrammarMatcher] | None = None,
        adapters: Sequence[str] = (),
    ) -> None:
        self.runner = runner
        self._adapters = {name: i for i, name in enumerate(("", *adapters))}
        """Number of each adapter; 0 is the model without one."""
        self._compile_grammar = compile_grammar
        self.config = config
        self.max_model_len = max_model_len
        self.vocab_size = runner.vocab_size
        self.end_token_ids = frozenset(end_token_ids)
        self.model_name = model_name
        self.max_steps_ahead = 0
        """Number of steps that may be in flight while the host schedules the next one."""
        self._has_exits = config.exit_criterion is not None
        self._num_iterations = 0
        self._num_iterated_tokens = 0
        """Tokens whose iterations an early exit decided, and the sum of these."""
        if self._has_exits:
            # Deciding on exits waits for the device in each iteration.
            self.max_steps_ahead = 0
        elif config.async_scheduling == "on":
            self.max_steps_ahead = 1
        elif config.async_scheduling == "auto":
            self.max_steps_ahead = int(runner.device.type == "cuda")
        self.scheduler = Scheduler(
            [BlockPool(num_blocks, runner.tokens_per_block) for _ in range(runner.num_homes)],
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            policy=config.scheduling_policy,
            # Keys and values of a token with an early exit depend on more than the tokens.
            enable_prefix_caching=config.enable_prefix_caching and not self._has_exits,
            lookahead=self.max_steps_ahead > 0,
            target_itl_seconds=config.target_itl_ms / 1e3,
            decodes_alone=self._has_exits,
        )
        self._states: dict[str, RequestState] = {}
        self._in_flight: deque[StepInFlight] = deque()
        self._step_log: StepLog | None = None
        if config.step_log and runner.grid.rank == 0:
            self._step_log = StepLog(config.step_log)
        self._sampled_places: dict[str, int] = {}
        """Where the last launched step samples the token of each request."""
        self._last_sampling: dict[int, tuple[list[RequestState], SamplingInputs]] = {}
        """Requests of the last step of each home, and their parameters, if these do not change."""
        self._num_steps = 0
        self._host_seconds = 0.0
        self._device_seconds = 0.0
        """Seconds of launching steps and of waiting for their results."""
        self._finish_time = 0.0
        """When the last step has finished."""
        self._memory = MemoryTraffic.of_model(runner.model, config)
        self._bytes_read = 0
        self._num_generated_tokens = 0
        self._collective_bytes: Counter[str] = Counter()
        self._bytes_of_step: dict[tuple[int, str, bool, str], Counter[str]] = {}
        model_config: Any = runner.model.config
        self._longrope_limit = math.inf
        """Sequences with more tokens have other frequencies, in models with LongRoPE."""
        if model_config.position_embedding == "rope" and model_config.rope == "longrope":
            self._longrope_limit = model_config.original_max_position

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs, or a step is in flight."""
        return self.scheduler.has_unfinished or bool(self._in_flight)

    def add(self, request: Request) -> None:
        """Adds a request to the queue. Raises a `PlanError` for one that can never run."""
        problems = [text for _, text in request.params.problems(self.vocab_size)]
        wrong = [token for token in request.prompt_token_ids if not 0 <= token < self.vocab_size]
        if wrong:
            problems.append(
                f"The prompt has the token {wrong[0]}. Tokens must be in [0, {self.vocab_size}). "
                "Use the tokenizer of the model."
            )
        if request.adapter not in self._adapters:
            problems.append(
                f"The adapter {request.adapter[:100]!r} does not exist. A request uses an adapter "
                f"of the engine ({', '.join(self._adapters).lstrip(', ') or 'none'}). Use another "
                "name, or none."
            )
        if problems:
            raise PlanError(problems)
        sequence = EngineSequence(
            request=request,
            block_size=self.runner.tokens_per_block,
            max_model_len=self.max_model_len,
            model=self._block_name(len(request.prompt_token_ids)),
        )
        matcher = self._make_matcher(request.params)
        sampling = SamplingState(
            request.params,
            stream=request.stream,
            prompt_token_ids=request.prompt_token_ids,
            end_token_ids=self.end_token_ids,
            vocab=self.vocab_size,
        )
        sequence.waits_for_tokens = sampling.needs_last_token or matcher is not None
        self.scheduler.add(sequence)
        self._states[request.request_id] = RequestState(sequence, sampling, matcher=matcher)

    def _make_matcher(self, params: SamplingParams) -> GrammarMatcher | None:
        """Returns the matcher of a structured output; None for any text."""
        if params.structured_output is None:
            return None
        if self._compile_grammar is None:
            raise PlanError(
                f"The request asks for structured output ({params.structured_output.kind}), which "
                "this engine does not support. It needs the extra `grammar` and a tokenizer. "
                "Install it: pip install 'ranvier[grammar]'"
            )
        return self._compile_grammar(params.structured_output)

    def abort(self, request_id: str) -> None:
        """Ends a request; unknown and finished ones are ignored. It has no further output."""
        self.scheduler.abort(request_id)
        self._states.pop(request_id, None)

    def step(self) -> list[TokenOutput]:
        """Starts the next step, and returns new tokens; those of the step before, if it is ahead.

        Communicates: as `ModelRunner.launch`.
        """
        start = time.monotonic()
        device_seconds = self._device_seconds
        outputs: list[TokenOutput] = []
        scheduled = self.scheduler.schedule()
        if scheduled.items:
            self._in_flight.append(self._launch(scheduled))
        is_behind = len(self._in_flight) > self.max_steps_ahead
        if self._in_flight and (is_behind or not scheduled.items):
            outputs = self._finish_step(self._in_flight.popleft())
        self._host_seconds += time.monotonic() - start - self._device_seconds + device_seconds
        return outputs

    def close(self) -> None:
        """Closes the log of steps."""
        if self._step_log is not None:
            self._step_log.close()

    def stats(self) -> EngineStats:
        """Returns the counters and gauges of now."""
        scheduler = self.scheduler
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_waiting_tokens=scheduler.num_waiting_tokens,
            num_blocks=sum(pool.num_usable for pool in scheduler.pools),
            num_free_blocks=scheduler.num_free_blocks,
            num_steps=self._num_steps,
            num_preemptions=scheduler.num_preemptions,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_computed_tokens=scheduler.num_computed_tokens,
            prefix_cache_queries=scheduler.prefix_cache_queries,
            prefix_cache_hits=scheduler.prefix_cache_hits,
            collective_bytes=dict(self._collective_bytes),
            host_seconds=self._host_seconds,
            bytes_read=self._bytes_read,
            num_iterations=self._num_iterations,
            num_iterated_tokens=self._num_iterated_tokens,
            compile_failure=self.runner.parallel.compile_fallback.reason,
        )

    # ---- a step -----------------------------------------------------------------------------

    def _launch(self, scheduled: ScheduledStep) -> StepInFlight:
        """Starts a step."""
        states = [self._states[item.request_id] for item in scheduled.items]
        for state in states:
            if state.start_time is None:
                state.start_time = time.monotonic()
        scored = [
            self._scored_places(state, item)
            for state, item in zip(states, scheduled.items, strict=True)
        ]
        work = [*zip(scheduled.items, states, scored, strict=True)]
        homes: list[list[HomeWork]] = [[] for _ in range(self.runner.num_homes)]
        for one in work:
            homes[one[0].home].append(one)
        step = self._build_step([self._build_home(i, home) for i, home in enumerate(homes)], states)
        self._sampled_places = {}
        for i, home in enumerate(homes):
            sampling = [item.request_id for item, _, _ in home if item.samples]
            first = i * self.config.max_num_seqs
            self._sampled_places |= zip(sampling, range(first, first + len(sampling)), strict=True)
        start = time.monotonic()
        pending = self.runner.launch(step)
        self._device_seconds += time.monotonic() - start
        self._num_steps += 1
        self._bytes_read += self._memory.count_bytes(scheduled.items)
        self._collective_bytes.update(self._predict_bytes(step))
        return StepInFlight(scheduled, states, [len(places) for places in scored], pending, start)

    def _build_step(self, homes: Sequence[HomeInput], states: Sequence[RequestState]) -> StepInput:
        """Returns the input of a step."""
        num_tokens = max(self.runner.min_tokens, *(home.num_tokens for home in homes))
        context_splits = self.runner.choose_context_splits(num_tokens)
        row_splits = self.runner.choose_row_splits(num_tokens, context_splits)
        # A home without tokens, and the rest of other homes, is padding.
        multiple = self.runner.token_multiple(row_splits, context_splits)
        num_tokens = round_up(num_tokens, multiple)
        num_top = -1
        for state in states:
            params = state.sampling.params
            if params.logprobs is not None:
                num_top = max(num_top, params.logprobs)
            if params.prompt_logprobs is not None:
                num_top = max(num_top, params.prompt_logprobs)
        has_adapters = len(self._adapters) > 1 and any(
            state.sequence.request.adapter for state in states
        )
        return StepInput(homes, num_tokens, row_splits, num_top, has_adapters, context_splits)

    def _build_home(self, home: int, work: Sequence[HomeWork]) -> HomeInput:
        """Returns the part of a step that belongs to one home."""
        chunks: list[SequenceChunk] = []
        sampling: list[RequestState] = []
        sampled: list[int] = []
        scored: list[int] = []
        targets: list[int] = []
        first = 0
        for item, state, places in work:
            sequence = state.sequence
            stop = item.start + item.num_tokens
            known = len(sequence.token_ids)
            tokens = sequence.token_ids[item.start : stop]
            if stop > known:
                # The last token is still on the device.
                tokens.append(-1 - self._sampled_places[item.request_id])
                known = stop
            adapter = self._adapters[sequence.request.adapter]
            limits: list[int] = []
            if self._has_exits:
                decided = {*places}
                is_scored = sequence.is_scored
                if item.samples and (stop > sequence.num_prompt_tokens or is_scored):
                    decided.add(stop - 1)
                # A token that is computed again has as many iterations as before.
                limits = [
                    sequence.iterations.get(
                        place, DECIDE if place in decided else self.runner.num_iterations
                    )
                    for place in range(item.start, stop)
                ]
            chunks.append(
                SequenceChunk(tokens, item.start, known, sequence.block_ids, adapter, limits)
            )
            for place in places:
                scored.append(first + place - item.start)
                targets.append(sequence.token_ids[place + 1])
            first += item.num_tokens
            if item.samples:
                sampled.append(first - 1)
                sampling.append(state)
        return HomeInput(chunks, self._sampling_inputs(home, sampling), sampled, scored, targets)

    def _sampling_inputs(self, home: int, states: list[RequestState]) -> SamplingInputs:
        """Returns how the next tokens of requests are sampled."""
        last, inputs = self._last_sampling.get(home, ([], None))
        # Often only the positions have changed since the last step.
        if inputs is not None and last == states:
            places = [state.next_position for state in states]
            positions = torch.tensor(places, dtype=torch.int64)
            return dataclasses.replace(inputs, positions=positions)
        inputs = SamplingInputs.from_rows([state.next_row() for state in states], self.vocab_size)
        self._last_sampling.pop(home, None)
        if not any(
            state.sequence.waits_for_tokens or state.sampling.changes_at(state.next_position)
            for state in states
        ):
            self._last_sampling[home] = (states, inputs)
        return inputs

    @staticmethod
    def _scored_places(state: RequestState, item: WorkItem) -> range:
        """Returns the positions of an item whose next token is a token of a scored prompt."""
        if state.sequence.request.params.prompt_logprobs is None:
            return range(0)
        # After a preemption the first ones are computed again, but not scored again.
        start = max(item.start, len(state.prompt_logprobs))
        return range(start, min(item.start + item.num_tokens, state.sequence.num_prompt_tokens - 1))

    def _finish_step(self, step: StepInFlight) -> list[TokenOutput]:
        """Waits for a step, records its results, and returns what is new."""
        start = time.monotonic()
        results = step.pending.wait()
        now = time.monotonic()
        self._device_seconds += now - start
        # A step that was launched ahead starts when the one before it has finished.
        seconds = now - max(step.launch_time, self._finish_time)
        self.scheduler.record_seconds(step.scheduled, seconds)
        if self._step_log is not None:
            self._step_log.write(step.scheduled.items, seconds)
        self._finish_time = now
        outputs: list[TokenOutput] = []
        next_row = [0] * len(results)
        next_scored = [len(home.sampled_rows) for home in step.pending.step.homes]
        for item, state, num_scored in zip(
            step.scheduled.items, step.states, step.num_scored, strict=True
        ):
            home = item.home
            row, scored = next_row[home], next_scored[home]
            next_row[home] += item.samples
            next_scored[home] += num_scored
            # It may have ended, or started again, since the step was launched.
            if not state.sequence.takes_tokens:
                continue
            for i in range(scored, scored + num_scored):
                scores = results[home].scores
                assert scores is not None
                count = state.sequence.request.params.prompt_logprobs
                place = len(state.prompt_logprobs)
                self._record_iterations(state.sequence, place, results[home], i)
                state.prompt_logprobs.append(_logprobs_of(scores, i, count))
            if item.samples:
                last = item.start + item.num_tokens - 1
                self._record_iterations(state.sequence, last, results[home], row)
                outputs.append(self._make_output(state, results[home], row))
        ended = [one.request_id for one in outputs if one.finish_reason is not None]
        # Only the first token was sampled; others were forced by a grammar.
        tokens = {one.request_id: one.token_ids[:1] for one in outputs}
        self.scheduler.finish_step(step.scheduled, tokens, ended)
        for request_id in ended:
            del self._states[request_id]
        for one in outputs:
            self._num_generated_tokens += len(one.token_ids)
            if one.finish_reason is None:
                sequence = self._states[one.request_id].sequence
                if len(one.token_ids) > 1:
                    sequence.append_tokens(one.token_ids[1:])
                self._restart_if_longer(sequence)
        return outputs

    def _record_iterations(
        self, sequence: EngineSequence, position: int, result: HomeOutput, row: int
    ) -> None:
        """Records the number of iterations of a token, if early exits decide."""
        if result.iterations:
            sequence.iterations[position] = result.iterations[row]
            self._num_iterations += result.iterations[row]
            self._num_iterated_tokens += 1

    def _make_output(self, state: RequestState, result: HomeOutput, row: int) -> TokenOutput:
        """Returns the output of a request whose next token was sampled."""
        sequence = state.sequence
        common: dict[str, Any] = {"request_id": sequence.request_id}
        if not state.has_output:
            common["num_cached_tokens"] = sequence.num_cached_tokens
            assert state.start_time is not None, sequence.request_id
            common["queue_seconds"] = state.start_time - state.added_time
            if sequence.request.params.prompt_logprobs is not None:
                common["prompt_logprobs"] = tuple(state.prompt_logprobs)
        state.has_output = True
        token = result.tokens[row]
        if token == FAILED and not state.error:
            state.error = (
                "No token can be sampled: the parameters of the request forbid all tokens, or the "
                "logits are not finite."
            )
            state.is_invalid = sequence.request.params.can_forbid_all
        forced = self._advance_grammar(state, token)
        if state.error:
            return TokenOutput(
                **common, finish_reason="error", error=state.error, is_invalid=state.is_invalid
            )
        for one in (token, *forced):
            state.sampling.append(one)
        count = sequence.request.params.logprobs
        if count is not None:
            assert result.scores is not None
            common["logprobs"] = (_logprobs_of(result.scores, row, count),)
        reason, stop_token = self._finish_reason(sequence, token)
        # A text that is complete was not cut off.
        if state.matcher is not None and state.matcher.is_finished:
            reason = "stop"
        return TokenOutput(
            **common, token_ids=(token, *forced), finish_reason=reason, stop_token=stop_token
        )

    def _advance_grammar(self, state: RequestState, token: int) -> list[int]:
        """Appends a token to the text of a grammar, and returns tokens that must follow it.

        What the grammar raises ends only this request.
        """
        sequence, params = state.sequence, state.sequence.request.params
        if state.matcher is None or state.error:
            return []
        # An end token that does not end the request is not part of the text.
        if params.ignore_eos and token in self.end_token_ids:
            return []
        forced: list[int] = []
        try:
            state.matcher.advance(token)
            # Forced tokens have no log-probabilities, and one more token must be sampled.
            room = sequence.max_num_tokens - sequence.num_confirmed - 2
            if params.logprobs is None and token not in params.stop_token_ids:
                forced = state.matcher.forced_tokens()[: max(room, 0)]
            for one in forced:
                state.matcher.advance(one)
        except RanvierError as error:
            state.error = str(error)
        return forced

    def _finish_reason(
        self, sequence: EngineSequence, token: int
    ) -> tuple[FinishReason | None, int | None]:
        """Returns why a sequence ends with a new token, and the token if that is why."""
        params = sequence.request.params
        is_end = token in params.stop_token_ids
        is_end |= not params.ignore_eos and token in self.end_token_ids
        if is_end:
            return "stop", token
        if sequence.num_confirmed + 1 >= sequence.max_num_tokens:
            return "length", None
        return None, None

    # ---- LongRoPE ---------------------------------------------------------------------------

    def _block_name(self, num_tokens: int) -> str:
        """Returns what keys and values of a sequence depend on, except its tokens."""
        frequencies = "long" if num_tokens > self._longrope_limit else ""
        return f"{self.model_name} {frequencies}"

    def _restart_if_longer(self, sequence: EngineSequence) -> None:
        """Computes all keys again when a sequence gets so long that its frequencies change."""
        name = self._block_name(len(sequence.token_ids))
        if name != sequence.model:
            self.scheduler.restart(sequence, model=name)

    # ---- statistics -------------------------------------------------------------------------

    def _predict_bytes(self, step: StepInput) -> Counter[str]:
        """Returns the bytes that the collectives of a step move, by axis."""
        key = (step.num_tokens, step.row_splits, step.has_adapters, step.context_splits)
        if key not in self._bytes_of_step:
            self._bytes_of_step[key] = self.runner.predict_bytes(step)
        return self._bytes_of_step[key]


def _logprobs_of(scores: TokenScores, row: int, count: int | None) -> TokenLogprobs:
    """Returns the log-probabilities of a row, with the `count` most likely tokens."""
    top = zip(
        scores.top_tokens[row, : count or 0].tolist(),
        scores.top_logprobs[row, : count or 0].tolist(),
        strict=True,
    )
    return TokenLogprobs(float(scores.logprobs[row]), int(scores.ranks[row]), tuple(top))


# ---- size of the cache ----------------------------------------------------------------------


def count_cache_blocks(
    model: nn.Module, config: EngineConfig, lengths: Sequence[int] | None = None
) -> int:
    """Returns the number of blocks that fit into the memory of every rank, including block 0.

    lengths: numbers of tokens of all requests, if they are known; at most as many blocks as they
    need. Communicates: all-reduce of one number over all axes.
    """
    parallel = get_parallel_model(model)
    device = parallel.pipeline.executor.device
    gib = config.kv_cache_gib
    if gib > 0.0 or device.type != "cuda":
        num_bytes = int((gib or DEFAULT_CPU_CACHE_GIB) * 2**30)
    else:
        free, total = torch.cuda.mem_get_info(device)
        # Memory that the allocator holds without a tensor, for example after a training step.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        num_bytes = max(int(total * config.gpu_memory_utilization) - (total - free), 0)
    own = num_bytes // block_bytes(model, config)
    # Each rank has its share of the layers and heads; the smallest number is used on all.
    fits = -max_over_ranks(-own, parallel.grid, device)
    if lengths is None:
        return fits
    size = count_block_tokens(model, config)
    return min(fits, 1 + sum(-(-length // size) for length in lengths))


def count_block_tokens(model: nn.Module, config: EngineConfig) -> int:
    """Returns the number of tokens of a block: one page of it is on each rank of context."""
    parallel = get_parallel_model(model)
    return parallel.table.tokens_per_block(config.block_size, parallel.grid.degrees)


def block_bytes(model: nn.Module, config: EngineConfig) -> int:
    """Returns the bytes of a block on this rank: keys and values of all its layers."""
    from ranvier.models.decoder import AttentionCore

    parallel = get_parallel_model(model)
    caches = sum(
        count_kv_caches(module, model, config)
        for module in model.modules()
        if isinstance(module, AttentionCore)
    )
    itemsize = parallel.bucket_scheduler.buckets[0].data.element_size()
    shape = ModelRunner.kv_cache_shape(model, 1, config.block_size)
    return 2 * max(caches, 1) * math.prod(shape) * itemsize


def resolve_max_model_len(model: nn.Module, config: EngineConfig, num_blocks: int) -> int:
    """Returns the maximum length of a sequence; raises if the cache cannot hold one that long."""
    model_config: Any = model.config
    positions = model_config.max_seq
    if config.max_model_len > positions:
        raise PlanError(
            f"engine.max_model_len={config.max_model_len:,} is too large. The model has "
            f"{positions:,} positions (model.max_seq). Use {positions} or less."
        )
    # The last token is sampled, but its keys and values are never stored.
    size = count_block_tokens(model, config)
    fits = (num_blocks - 1) * size + 1
    if config.max_model_len > fits or fits < 2:
        raise PlanError(
            f"The KV cache has {max(num_blocks - 1, 0):,} blocks of {size} tokens. A "
            f"request of {config.max_model_len or positions:,} tokens (engine.max_model_len) must "
            f"fit. Use a larger engine.kv_cache_gib, or engine.max_model_len={max(fits, 2)}."
        )
    return config.max_model_len or min(positions, fits)


def run_with_engine(
    model: nn.Module,
    config: EngineConfig,
    work: Callable[[Engine], T],
    *,
    end_token_ids: Iterable[int] = (),
    num_blocks: int = 0,
    row_splits: RowSplitChoice = "auto",
) -> T | None:
    """Runs `work` with an engine on the leader; the other ranks follow and return None.

    num_blocks: number of blocks of each home; 0 means as many as `config` allows. row_splits: as in
    the plan. Communicates: as the steps of the engine.
    """
    with open_engine(
        model,
        config,
        end_token_ids=end_token_ids,
        num_blocks=num_blocks,
        row_splits=row_splits,
    ) as engine:
        if get_parallel_model(model).grid.rank == 0:
            return work(engine)
        engine.runner.follow()
    return None


@contextmanager
def open_engine(
    model: nn.Module,
    config: EngineConfig,
    *,
    end_token_ids: Iterable[int] = (),
    num_blocks: int = 0,
    compile_grammar: Callable[[StructuredOutput], GrammarMatcher] | None = None,
    row_splits: RowSplitChoice = "auto",
    adapters: Sequence[str] = (),
) -> Iterator[Engine]:
    """Context with an engine, whose steps only the leader may run; the other ranks follow.

    num_blocks: as for `run_with_engine`. compile_grammar, adapters: as for `Engine`. row_splits: as
    in the plan. Communicates: at the end, one number over all axes.
    """
    model_config: Any = model.config
    config.check_recurrence(model_config.mean_recurrence)
    num_blocks = num_blocks or count_cache_blocks(model, config)
    max_model_len = resolve_max_model_len(model, config, num_blocks)
    runner = ModelRunner(
        model,
        num_blocks=num_blocks,
        block_size=config.block_size,
        row_splits=row_splits,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        cuda_graphs=config.cuda_graphs != "off",
        batch_invariant=config.batch_invariant,
        recurrence=config,
    )
    # Whatever raises below, the layers are restored and the other ranks stop following.
    with ExitStack() as stack:
        stack.callback(runner.free_cache)
        if runner.grid.rank == 0:
            stack.callback(runner.stop)
        engine = Engine(
            runner,
            config,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            end_token_ids=frozenset(end_token_ids),
            compile_grammar=compile_grammar,
            adapters=adapters,
        )
        stack.callback(engine.close)
        if config.cuda_graphs == "startup":
            runner.capture_graphs()
        yield engine
