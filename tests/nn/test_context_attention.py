"""Attention over context equals dense attention: all ranks played in one process."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from context_cases import (
    DOCUMENTS,
    HEAD_DIM,
    ORDERS,
    Board,
    ThreadExchange,
    cut_rows,
    dense_results,
    document_lengths,
    largest_error,
    make_inputs,
    make_order,
    run_ranks,
    tokens_per_rank,
)
from ranvier.cost.context_attention import (
    EventScope,
    KeyShape,
    KVGatherLayout,
    RingLayout,
    UlyssesLayout,
)
from ranvier.models.segment_attention import SegmentAttention
from ranvier.nn.context_attention import KVGather, Ring, Ulysses
from ranvier.sharding import TokenOrder
from ranvier.trace import Event, diff_events

RANKS = (2, 3, 4, 6, 8)
HEADS = ((8, 8), (8, 2), (8, 1))
CAPS = (0.0, 5.0)
METHODS = ("kv_gather", "ring", "ulysses", "near_kv_gather", "near_ring")
"""The last two split heads over two ranks, and communicate keys between the rest."""


@dataclass(frozen=True)
class Case:
    """One attention of some samples."""

    method: str
    orders: tuple[TokenOrder, ...]
    heads: int
    kv_heads: int
    window: int
    cap: float
    overlap: bool = True

    @property
    def num_ranks(self) -> int:
        return self.orders[0].num_ranks

    @property
    def near(self) -> int:
        return {"ulysses": self.num_ranks}.get(self.method, 2)


Results = list[list[Tensor]]
"""y, dq, dk, dv, each of all ranks."""


def run_case(
    case: Case, inputs: Sequence[Tensor]
) -> tuple[Results, list[list[Event]], list[list[Event]]]:
    """Results, recorded and predicted events of all ranks."""
    near = case.near
    whole = Board(case.num_ranks)
    near_boards = [Board(near) for _ in range(case.num_ranks // near)]
    far_boards = [Board(case.num_ranks // near) for _ in range(near)]
    shape = KeyShape(case.heads, case.kv_heads, HEAD_DIM, 8, 8)

    def play(rank: int) -> tuple[list[Tensor], list[Event], list[Event]]:
        q, k, v, dy = (cut_rows(x, case.orders, rank) for x in inputs)
        for x in (q, k, v):
            x.requires_grad_()
        core, scopes = make_core(case, rank), [EventScope(("context",), "")]
        if isinstance(core, Ulysses):
            scopes = [EventScope((name,), "") for name in ("near", "far")]
            exchanges = [
                ThreadExchange(near_boards[rank // near], rank % near, ("near",)),
                ThreadExchange(far_boards[rank % near], rank // near, ("far",)),
            ]
            y = core.attend(q, k, v, exchanges[0], case.cap, far_exchange=exchanges[1])
        else:
            exchanges = [ThreadExchange(whole, rank)]
            y = core.attend(q, k, v, exchanges[0], case.cap)
        grads = torch.autograd.grad(y, (q, k, v), dy)
        recorded = [event for one in exchanges for event in one.events]
        layout = core.layout
        predicted = layout.forward_events(shape, *scopes) + layout.backward_events(shape, *scopes)
        return [y.detach(), *grads], recorded, predicted

    rows = run_ranks(case.num_ranks, play, [whole, *near_boards, *far_boards])
    results, events, predicted = zip(*rows, strict=True)
    return [list(some) for some in zip(*results, strict=True)], [*events], [*predicted]


def make_core(case: Case, rank: int) -> Any:
    if case.method == "kv_gather":
        gathered = KVGatherLayout(case.orders, rank, case.window)
        return KVGather(gathered, SegmentAttention, overlap=case.overlap)
    if case.method == "ring":
        return Ring(RingLayout(case.orders, rank), SegmentAttention, overlap=case.overlap)
    far: Literal["ring", "kv_gather"] = "ring" if case.method == "near_ring" else "kv_gather"
    layout = UlyssesLayout(case.orders, rank, case.near, case.window, far)
    return Ulysses(layout, SegmentAttention, overlap=case.overlap)


def is_valid(method: str, num_ranks: int) -> bool:
    if method == "ulysses":
        return 8 % num_ranks == 0
    return not method.startswith("near") or num_ranks in (4, 6)


def windows_of(method: str, num_ranks: int) -> list[int]:
    t = tokens_per_rank(num_ranks)
    return [0] if method.endswith("ring") else [0, 1, 2, t - 1, t + 1, t * num_ranks + 5]


@pytest.mark.sample(16)
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("method", "num_ranks"),
    [(method, n) for method in METHODS for n in RANKS if is_valid(method, n)],
)
def test_all_ranks_together_compute_dense_attention(
    method: str, num_ranks: int, order: str, documents: str, request: pytest.FixtureRequest
) -> None:
    lengths = document_lengths(documents, num_ranks)
    orders = tuple(make_order(some, num_ranks, order) for some in lengths)
    combinations = list(itertools.product(HEADS, windows_of(method, num_ranks), CAPS))
    if not request.config.getoption("--full"):
        combinations = random.Random(request.node.name).sample(combinations, 2)
    for (heads, kv_heads), window, cap in combinations:
        case = Case(method, orders, heads, kv_heads, window, cap)
        inputs = make_inputs(len(lengths), sum(lengths[0]), heads, kv_heads)
        results, events, predicted = run_case(case, inputs)
        wanted = dense_results(inputs, lengths, window, cap)
        for name, have, want in zip(("y", "dq", "dk", "dv"), results, wanted, strict=True):
            assert largest_error(have, want, orders) <= 1e-12, (name, case)
        for have_events, want_events in zip(events, predicted, strict=True):
            assert not diff_events(want_events, have_events), case
