"""Ranks of context that one process plays, documents, orders of tokens, and dense attention."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ranvier.sharding import TokenOrder, TokenSegment, order_tokens
from ranvier.trace import Event

HEAD_DIM = 4
ORDERS = ("contiguous", "zigzag", "random", "shuffled_segments")
DOCUMENTS = ("one", "packed", "exact", "around", "almost", "padding", "several")


def tokens_per_rank(num_ranks: int) -> int:
    """An odd number for some sizes, so that parts of a zigzag order are unequal."""
    return 7 if num_ranks % 3 == 0 else 6


def fill_with(lengths: Sequence[int], total: int) -> tuple[int, ...]:
    """The lengths again and again, the last one cut."""
    found: list[int] = []
    for length in cycle(lengths):
        rest = total - sum(found)
        if rest <= length:
            return (*found, rest)
        found.append(length)
    raise AssertionError


def document_lengths(name: str, num_ranks: int) -> list[tuple[int, ...]]:
    """Lengths of the documents of each sample."""
    t = tokens_per_rank(num_ranks)
    total = t * num_ranks
    samples: dict[str, list[tuple[int, ...]]] = {
        "one": [(total,)],
        "packed": [fill_with((1, 2, 3, 5, 7, 11, 13, 1), total)],
        "exact": [(t,) * num_ranks],
        "around": [fill_with((t - 1, t + 1, t), total)],
        "almost": [(1, total - 2, 1)],
        # In a contiguous order the last rank has documents of one token only.
        "padding": [(total - t - 2, 2, *(1,) * t)],
    }
    samples["several"] = [*samples["almost"], *samples["packed"], *samples["one"]]
    return samples[name]


def make_order(lengths: Sequence[int], num_ranks: int, name: str, seed: int = 0) -> TokenOrder:
    """An order of tokens; `random` has segments of one token, if they do not continue others."""
    if name == "contiguous":
        return order_tokens(lengths, num_ranks, "contiguous")
    if name == "zigzag":
        return order_tokens(lengths, num_ranks, "zigzag")
    rng = np.random.default_rng([seed, num_ranks, *lengths])
    if name == "random":
        return order_from_numbers(lengths, rng.permutation(sum(lengths)).reshape(num_ranks, -1))
    # Segments of a few tokens, in any order.
    total = sum(lengths)
    cuts = np.sort(rng.choice(np.arange(1, total), min(3 * num_ranks, total - 1), replace=False))
    parts = np.split(np.arange(total), cuts)
    numbers = np.concatenate([parts[i] for i in rng.permutation(len(parts))])
    return order_from_numbers(lengths, numbers.reshape(num_ranks, -1))


def order_from_numbers(lengths: Sequence[int], numbers: np.ndarray) -> TokenOrder:
    """The order with these numbers of tokens on each rank."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    rows = []
    for row in numbers.tolist():
        segments: list[TokenSegment] = []
        for number in row:
            document = int(np.searchsorted(starts, number, side="right")) - 1
            place = number - int(starts[document])
            last = segments[-1] if segments else None
            if last is not None and last.document == document and last.stop == place:
                segments[-1] = TokenSegment(document, last.start, place + 1)
            else:
                segments.append(TokenSegment(document, place, place + 1))
        rows.append(tuple(segments))
    return TokenOrder(tuple(lengths), tuple(rows))


# ---- ranks in threads ---------------------------------------------------------------------------


@dataclass
class Board:
    """What the ranks of one axis have posted."""

    size: int
    posted: dict[int, dict[int, tuple[str, Tensor, Any]]] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    broken: bool = False


@dataclass
class ThreadExchange:
    """Communication between threads, which each play a rank of context."""

    board: Board
    index: int
    names: tuple[str, ...] = ("context",)
    events: list[Event] = field(default_factory=list)
    num_calls: int = 0

    def all_gather(self, x: Tensor) -> PostedTensor:
        self.events.append(Event("all_gather", self.names, x.nbytes * self.board.size))
        return self._post("all_gather", x, None, lambda parts: torch.cat([y for y, _ in parts]))

    def reduce_scatter(self, x: Tensor) -> PostedTensor:
        self.events.append(Event("reduce_scatter", self.names, x.nbytes))

        def finish(parts: list[tuple[Tensor, Any]]) -> Tensor:
            chunks = [y.chunk(self.board.size)[self.index] for y, _ in parts]
            return torch.stack(chunks).sum(0)

        return self._post("reduce_scatter", x, None, finish)

    def all_to_all(
        self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> PostedTensor:
        self.events.append(Event("all_to_all", self.names, x.nbytes))
        assert sum(send_counts) == x.shape[0]

        def finish(parts: list[tuple[Tensor, Any]]) -> Tensor:
            mine = [y.split(list(counts))[self.index] for y, counts in parts]
            assert [len(y) for y in mine] == list(receive_counts)
            return torch.cat(mine)

        return self._post("all_to_all", x, tuple(send_counts), finish)

    def _post(
        self, op: str, x: Tensor, counts: Any, finish: Callable[[list[Any]], Tensor]
    ) -> PostedTensor:
        board = self.board
        number = self.num_calls
        self.num_calls += 1
        with board.changed:
            # A copy, as messages are; and so that later changes of x cannot be seen.
            board.posted.setdefault(number, {})[self.index] = (op, x.detach().clone(), counts)
            board.changed.notify_all()
        return PostedTensor(self, number, op, finish)


@dataclass
class PostedTensor:
    """Waits until all ranks have posted."""

    exchange: ThreadExchange
    number: int
    op: str
    finish: Callable[[list[Any]], Tensor]
    result: Tensor | None = None

    def wait(self) -> Tensor:
        if self.result is None:
            board = self.exchange.board
            with board.changed:
                board.changed.wait_for(
                    lambda: board.broken or len(board.posted[self.number]) == board.size,
                    timeout=60.0,
                )
                posted = board.posted[self.number]
                assert len(posted) == board.size, f"{self.op}: other ranks have failed"
                rows = [posted[rank] for rank in range(board.size)]
            assert {op for op, _, _ in rows} == {self.op}
            self.result = self.finish([(x, counts) for _, x, counts in rows])
        return self.result


def run_ranks(num_ranks: int, play: Callable[[int], Any], boards: Sequence[Board]) -> list[Any]:
    """Calls play(rank) for all ranks at once, and returns the results."""
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def call(rank: int) -> None:
        try:
            results[rank] = play(rank)
        except BaseException as error:
            errors.append(error)
            for board in boards:
                with board.changed:
                    board.broken = True
                    board.changed.notify_all()

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(num_ranks)]


# ---- dense attention ----------------------------------------------------------------------------


def make_inputs(samples: int, seq: int, heads: int, kv_heads: int) -> list[Tensor]:
    """q, k, v and the gradient of the output of whole samples, `[b, s, h, k]`."""
    generator = torch.Generator().manual_seed(seq + 10 * heads + kv_heads)
    return [
        torch.randn(samples, seq, n, HEAD_DIM, generator=generator, dtype=torch.float64)
        for n in (heads, kv_heads, kv_heads, heads)
    ]


def dense_results(
    inputs: Sequence[Tensor], documents: Sequence[Sequence[int]], window: int, cap: float
) -> list[Tensor]:
    """y, dq, dk, dv of dense attention with a mask, `[b, s, h, k]`."""
    *leaves, dy = (x.detach().clone().requires_grad_() for x in inputs)
    q, k, v = leaves
    seq = q.shape[1]
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhk,bshk->bhqs", q, k) * HEAD_DIM**-0.5
    if cap:
        scores = torch.tanh(scores / cap) * cap
    ids = torch.stack(
        [torch.arange(len(cuts)).repeat_interleave(torch.tensor(cuts)) for cuts in documents]
    )
    distance = torch.arange(seq)[:, None] - torch.arange(seq)
    seen = (ids[:, :, None] == ids[:, None]) & (distance >= 0)
    if window:
        seen &= distance < window
    p = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    y = torch.einsum("bhqs,bshk->bqhk", p, v)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def cut_rows(x: Tensor, orders: Sequence[TokenOrder], rank: int) -> Tensor:
    """The tokens of a rank, `[b, s/context, ...]`."""
    rows = [
        y[torch.from_numpy(order.token_numbers[rank])] for y, order in zip(x, orders, strict=True)
    ]
    return torch.stack(rows)


def largest_error(have: Sequence[Tensor], want: Tensor, orders: Sequence[TokenOrder]) -> float:
    """Largest difference over ranks, relative to the largest magnitude of the whole tensor."""
    differences = [
        (x - cut_rows(want, orders, rank)).abs().max().item() for rank, x in enumerate(have)
    ]
    scale = want.abs().max().item()
    # Gradients of queries that see one key are 0; they are compared with inputs of magnitude 1.
    if scale < 1e-9:
        scale = 1.0
    return max(differences) / scale
