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

from ranvier.comm.consensus import told
from ranvier.errors import INTERNAL, CommunicationError, ElsewhereError, RanvierError
from ranvier.eval.tokenization import Words
from ranvier.grid import ORDERS
from ranvier.infer.generate_distributed import drawn, generated
from ranvier.infer.logprobs import Scored, scores, together_of
from ranvier.parallel.parallelize import parallel_of

T = TypeVar("T")
Progress = Callable[[str, int, int], None]
"""Is told what is done, how much of it, of how much."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """How texts are to be made."""

    count: int
    """Tokens at most."""
    stops: tuple[str, ...] = ()
    """Texts that end it."""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@dataclass
class Served:
    """A model, its words, and what rank 0 may ask."""

    model: nn.Module
    words: Words
    batch: int = 8
    """Sequences of a micro-batch."""
    progress: Progress | None = None

    def score(self, sequences: Sequence[Sequence[int]], what: str = "scoring") -> list[Scored]:
        """What each sequence is worth. Communicates: orders, then as `scores`."""
        order = sorted(range(len(sequences)), key=lambda i: (-len(sequences[i]), i))
        found: dict[int, Scored] = {}
        for some in self._groups(order, what):
            chosen = [list(map(int, sequences[i])) for i in some]
            self._order(do="score", sequences=chosen)
            found |= zip(some, scores(self.model, chosen, batch=self.batch), strict=True)
        return [found[i] for i in range(len(sequences))]

    def generate(
        self, prompts: Sequence[Sequence[int]], wish: Wish, what: str = "generating"
    ) -> list[str]:
        """The text that follows each prompt, cut before what stops it.

        Communicates: orders, then as `generated`.
        """
        order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
        found: dict[int, list[int]] = {}
        for some in self._groups(order, what):
            chosen = [list(map(int, prompts[i])) for i in some]
            self._order(do="generate", prompts=chosen, numbers=some, wish=asdict(wish))
            found |= zip(some, self._generated(chosen, some, wish), strict=True)
        return [self.words.cut(found[i], wish.stops) for i in range(len(prompts))]

    def _generated(
        self, prompts: Sequence[Sequence[int]], numbers: Sequence[int], wish: Wish
    ) -> list[list[int]]:
        """What follows prompts that fit at once; on all ranks."""
        choose = drawn(
            temperature=wish.temperature, top_k=wish.top_k, top_p=wish.top_p, seed=wish.seed
        )
        return generated(
            self.model,
            prompts,
            wish.count,
            choose,
            ended=self.words.ended(wish.stops),
            numbers=numbers,
            batch=self.batch,
        )

    def _groups(self, order: Sequence[int], what: str) -> Iterator[list[int]]:
        """As many at a time as all ranks take at once."""
        size = together_of(parallel_of(self.model), self.batch)
        for start in range(0, len(order), size):
            if self.progress is not None:
                self.progress(what, start, len(order))
            yield list(order[start : start + size])
        if self.progress is not None and order:
            self.progress(what, len(order), len(order))

    def _order(self, **order: Any) -> dict[str, Any]:
        """Tell the other ranks what to do, or be told. Communicates: a text over all axes."""
        text = json.dumps(order) if order else ""
        found: dict[str, Any] = json.loads(
            told(text, parallel_of(self.model).grid, "cpu", channel=ORDERS)
        )
        return found

    def attend(self, work: Callable[[Served], T]) -> T | None:
        """Have rank 0 work with the model; the others serve, and get None.

        An error of rank 0 ends them all. Communicates: orders over all axes.
        """
        if parallel_of(self.model).grid.rank != 0:
            self._serve()
            return None
        try:
            found = work(self)
        except CommunicationError:
            raise  # nobody can be told
        except Exception as error:
            code = error.exit_code if isinstance(error, RanvierError) else INTERNAL
            with suppress(CommunicationError):
                self._order(do="end", code=code)
            raise
        self._order(do="end", code=0)
        return found

    def _serve(self) -> None:
        """Do as rank 0 says, until it is done."""
        while (order := self._order())["do"] != "end":
            if order["do"] == "score":
                scores(self.model, order["sequences"], batch=self.batch)
            else:
                wish = Wish(**{**order["wish"], "stops": tuple(order["wish"]["stops"])})
                self._generated(order["prompts"], order["numbers"], wish)
        if order["code"]:
            raise ElsewhereError(order["code"])
