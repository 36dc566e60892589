"""Model server: a model on a grid that rank 0 uses, while the other ranks serve its requests.

Tasks, texts and programs exist only on rank 0. Only token sequences are sent to the other ranks,
and their results come back, so only the model must be the same on all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from torch import nn

from ranvier.comm.consensus import broadcast_text
from ranvier.config.engine import EngineConfig, RecurrenceOptions
from ranvier.errors import INTERNAL_EXIT_CODE, CommunicationError, OtherRankError, RanvierError
from ranvier.eval.tokenization import EvalTokenizer
from ranvier.grid import ORDERS_CHANNEL
from ranvier.infer.generate import generate_tokens, score_in_engine
from ranvier.infer.logprobs import TokenLogprobs, score_sequences, sequences_per_round
from ranvier.infer.request import EngineStats
from ranvier.infer.sampling_params import SamplingParams
from ranvier.parallel.parallel_model import get_parallel_model

T = TypeVar("T")
ProgressCallback = Callable[[str, int, int], None]
"""Called with the activity, the number of completed items and the total."""


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Settings of text generation."""

    max_new_tokens: int
    """Maximum number of tokens."""
    stops: tuple[str, ...] = ()
    """Strings that end a text."""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@dataclass
class ModelServer:
    """A model, its tokenizer, and the requests that rank 0 may make."""

    model: nn.Module
    tokenizer: EvalTokenizer
    batch: int = 8
    """Sequences per micro-batch."""
    progress: ProgressCallback | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Settings of the engine; of a model with recurrent depth also the iterations of scores."""
    num_iterated_tokens: int = 0
    num_iterations: int = 0
    """Tokens whose iterations an early exit decided so far, and their iterations; on rank 0."""

    def score_sequences(
        self, sequences: Sequence[Sequence[int]], what: str = "scoring"
    ) -> list[TokenLogprobs]:
        """Scores each sequence. Communicates: requests, then as `logprobs.score_sequences`."""
        if self.engine.exit:
            chosen = [list(map(int, one)) for one in sequences]
            self._broadcast_order(do="score_in_engine", sequences=chosen)
            return self._score_in_engine(chosen, what)
        # Sorted here, so that each round has sequences of similar length.
        order = sorted(range(len(sequences)), key=lambda i: (-len(sequences[i]), i))
        found: dict[int, TokenLogprobs] = {}
        for some in self._split_rounds(order, what):
            chosen = [list(map(int, sequences[i])) for i in some]
            self._broadcast_order(do="score", sequences=chosen)
            found |= zip(some, score_sequences(self.model, chosen, batch=self.batch), strict=True)
        return [found[i] for i in range(len(sequences))]

    def generate(
        self, prompts: Sequence[Sequence[int]], wish: GenerationConfig, what: str = "generating"
    ) -> list[str]:
        """Returns the text that follows each prompt, cut before the first stop string.

        Communicates: requests, then as `generate_tokens`.
        """
        found = self.generate_ids(prompts, wish, what)
        return [self.tokenizer.decode_until_stop(tokens, wish.stops) for tokens in found]

    def generate_ids(
        self, prompts: Sequence[Sequence[int]], wish: GenerationConfig, what: str = "generating"
    ) -> list[list[int]]:
        """Returns the tokens that follow each prompt, up to the end token or a stop string.

        Communicates: requests, then as `generate_tokens`.
        """
        if not prompts:
            return []
        chosen = [list(map(int, prompt)) for prompt in prompts]
        self._broadcast_order(do="generate", prompts=chosen, wish=asdict(wish))
        return self._generate_tokens(chosen, wish, what)

    def _generate_tokens(
        self, prompts: Sequence[Sequence[int]], wish: GenerationConfig, what: str = ""
    ) -> list[list[int]]:
        """Generates the tokens that follow each prompt; called on all ranks."""
        params = SamplingParams(
            max_tokens=wish.max_new_tokens,
            temperature=wish.temperature,
            top_k=wish.top_k,
            top_p=wish.top_p,
            seed=wish.seed,
        )

        def report(done: int, total: int) -> None:
            if self.progress is not None:
                self.progress(what, done, total)

        return generate_tokens(
            self.model,
            prompts,
            params,
            is_finished=self.tokenizer.make_stop_check(wish.stops),
            on_progress=report,
            config=self.engine,
            on_stats=self._count_iterations,
        )

    def _score_in_engine(
        self, sequences: Sequence[Sequence[int]], what: str = ""
    ) -> list[TokenLogprobs]:
        """Scores each sequence with early exits; called on all ranks."""

        def report(done: int, total: int) -> None:
            if self.progress is not None:
                self.progress(what, done, total)

        return score_in_engine(
            self.model,
            sequences,
            self.engine,
            on_progress=report,
            on_stats=self._count_iterations,
        )

    def _count_iterations(self, stats: EngineStats) -> None:
        """Adds the iterations of an engine, which only counts its own."""
        self.num_iterated_tokens += stats.num_iterated_tokens
        self.num_iterations += stats.num_iterations

    def set_recurrence(self, options: RecurrenceOptions) -> None:
        """Sets the iterations of all following requests. Communicates: the options to all ranks."""
        self._broadcast_order(do="set_recurrence", options=asdict(options))
        self._set_recurrence(options)

    def _set_recurrence(self, options: RecurrenceOptions) -> None:
        model: Any = self.model
        self.engine = replace(self.engine, **asdict(options))
        model.eval_recurrence = options.num_iterations(model.config.mean_recurrence)
        self.num_iterated_tokens = self.num_iterations = 0

    def _split_rounds(self, order: Sequence[int], what: str) -> Iterator[list[int]]:
        """Yields as many items as all ranks process at once."""
        size = sequences_per_round(get_parallel_model(self.model), self.batch)
        for start in range(0, len(order), size):
            if self.progress is not None:
                self.progress(what, start, len(order))
            yield list(order[start : start + size])
        if self.progress is not None and order:
            self.progress(what, len(order), len(order))

    def _broadcast_order(self, **order: Any) -> dict[str, Any]:
        """Send a request to the other ranks, or receive it. Communicates: a text over all axes."""
        text = json.dumps(order) if order else ""
        # A channel with a long timeout, because ranks may wait for the next request while rank 0
        # runs programs.
        found: dict[str, Any] = json.loads(
            broadcast_text(text, get_parallel_model(self.model).grid, "cpu", channel=ORDERS_CHANNEL)
        )
        return found

    def run_on_first_rank(self, work: Callable[[ModelServer], T]) -> T | None:
        """Runs `work` on rank 0; the other ranks serve its requests and return None.

        An error on rank 0 ends all ranks. Communicates: requests over all axes.
        """
        if get_parallel_model(self.model).grid.rank != 0:
            self._serve_orders()
            return None
        try:
            found = work(self)
        except CommunicationError:
            # The other ranks cannot be reached; they notice the failure themselves.
            raise
        except Exception as error:
            if isinstance(error, RanvierError):
                code = error.exit_code
            else:
                code = INTERNAL_EXIT_CODE
            with suppress(CommunicationError):
                self._broadcast_order(do="end", code=code)
            raise
        self._broadcast_order(do="end", code=0)
        return found

    def _serve_orders(self) -> None:
        """Serve the requests of rank 0 until it ends."""
        while (order := self._broadcast_order())["do"] != "end":
            if order["do"] == "score":
                score_sequences(self.model, order["sequences"], batch=self.batch)
            elif order["do"] == "score_in_engine":
                self._score_in_engine(order["sequences"])
            elif order["do"] == "set_recurrence":
                self._set_recurrence(RecurrenceOptions(**order["options"]))
            else:
                wish = GenerationConfig(**{**order["wish"], "stops": tuple(order["wish"]["stops"])})
                self._generate_tokens(order["prompts"], wish)
        if order["code"]:
            raise OtherRankError(order["code"])
