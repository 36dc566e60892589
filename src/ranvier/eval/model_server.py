"""Served: a model on a grid that one rank asks, while the others do what it asks for.

Tasks, texts and programs are the business of rank 0 alone: only sequences of tokens go out to the
others, and what becomes of them comes back. So nothing has to be the same everywhere but the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from torch import nn

from ranvier.comm.consensus import broadcast_text
from ranvier.errors import INTERNAL_EXIT_CODE, CommunicationError, OtherRankError, RanvierError
from ranvier.eval.tokenization import EvalTokenizer
from ranvier.grid import ORDERS_CHANNEL
from ranvier.infer.generate_distributed import generate_tokens, make_sampler
from ranvier.infer.logprobs import TokenLogprobs, score_sequences, sequences_per_round
from ranvier.parallel.parallelize import get_parallel_model

T = TypeVar("T")
ProgressCallback = Callable[[str, int, int], None]
"""Is told what is done, how much of it, of how much."""


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How texts are to be made."""

    max_new_tokens: int
    """Tokens at most."""
    stops: tuple[str, ...] = ()
    """Texts that end it."""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@dataclass
class ModelServer:
    """A model, its words, and what rank 0 may ask."""

    model: nn.Module
    tokenizer: EvalTokenizer
    batch: int = 8
    """Sequences of a micro-batch."""
    progress: ProgressCallback | None = None

    def score_sequences(
        self, sequences: Sequence[Sequence[int]], what: str = "scoring"
    ) -> list[TokenLogprobs]:
        """What each sequence is worth. Communicates: orders, then as `scores`."""
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
        """The text that follows each prompt, cut before what stops it.

        Communicates: orders, then as `generated`.
        """
        order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
        found: dict[int, list[int]] = {}
        for some in self._split_rounds(order, what):
            chosen = [list(map(int, prompts[i])) for i in some]
            self._broadcast_order(do="generate", prompts=chosen, numbers=some, wish=asdict(wish))
            found |= zip(some, self._generate_tokens(chosen, some, wish), strict=True)
        return [self.tokenizer.decode_until_stop(found[i], wish.stops) for i in range(len(prompts))]

    def _generate_tokens(
        self, prompts: Sequence[Sequence[int]], numbers: Sequence[int], wish: GenerationConfig
    ) -> list[list[int]]:
        """What follows prompts that fit at once; on all ranks."""
        choose = make_sampler(
            temperature=wish.temperature, top_k=wish.top_k, top_p=wish.top_p, seed=wish.seed
        )
        return generate_tokens(
            self.model,
            prompts,
            wish.max_new_tokens,
            choose,
            ended=self.tokenizer.make_stop_check(wish.stops),
            numbers=numbers,
            batch=self.batch,
        )

    def _split_rounds(self, order: Sequence[int], what: str) -> Iterator[list[int]]:
        """As many at a time as all ranks take at once."""
        size = sequences_per_round(get_parallel_model(self.model), self.batch)
        for start in range(0, len(order), size):
            if self.progress is not None:
                self.progress(what, start, len(order))
            yield list(order[start : start + size])
        if self.progress is not None and order:
            self.progress(what, len(order), len(order))

    def _broadcast_order(self, **order: Any) -> dict[str, Any]:
        """Tell the other ranks what to do, or be told. Communicates: a text over all axes."""
        text = json.dumps(order) if order else ""
        found: dict[str, Any] = json.loads(
            broadcast_text(text, get_parallel_model(self.model).grid, "cpu", channel=ORDERS_CHANNEL)
        )
        return found

    def run_on_first_rank(self, work: Callable[[ModelServer], T]) -> T | None:
        """Have rank 0 work with the model; the others serve, and get None.

        An error of rank 0 ends them all. Communicates: orders over all axes.
        """
        if get_parallel_model(self.model).grid.rank != 0:
            self._serve_orders()
            return None
        try:
            found = work(self)
        except CommunicationError:
            raise  # nobody can be told
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
        """Do as rank 0 says, until it is done."""
        while (order := self._broadcast_order())["do"] != "end":
            if order["do"] == "score":
                score_sequences(self.model, order["sequences"], batch=self.batch)
            else:
                wish = GenerationConfig(**{**order["wish"], "stops": tuple(order["wish"]["stops"])})
                self._generate_tokens(order["prompts"], order["numbers"], wish)
        if order["code"]:
            raise OtherRankError(order["code"])
