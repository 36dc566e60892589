"""Attention over context equals dense attention: all ranks played in one process."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

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
from ranvier.cost.context_attention import EventScope, KeyShape, KVGatherLayout
from ranvier.models.segment_attention import SegmentAttention
from ranvier.nn.context_attention import KVGather
from ranvier.sharding import TokenOrder
from ranvier.trace import Event, diff_events

RANKS = (2, 3, 4, 6, 8)
HEADS = ((8, 8), (8, 2), (8, 1))
CAPS = (0.0, 5.0)
METHODS = ("kv_gather",)


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


Results = list[list[Tensor]]
"""y, dq, dk, dv, each of all ranks."""


def run_case(
    case: Case, inputs: Sequence[Tensor]
) -> tuple[Results, list[list[Event]], list[list[Event]]]:
    """Results, recorded and predicted events of all ranks."""
    board = Board(case.num_ranks)
    scope = EventScope(("context",), "")
    shape = KeyShape(case.heads, case.kv_heads, HEAD_DIM, 8, 8)

    def play(rank: int) -> tuple[list[Tensor], list[Event], list[Event]]:
        exchange = ThreadExchange(board, rank)
        q, k, v, dy = (cut_rows(x, case.orders, rank) for x in inputs)
        for x in (q, k, v):
            x.requires_grad_()
        layout = KVGatherLayout(case.orders, rank, case.window)
        core = KVGather(layout, SegmentAttention, overlap=case.overlap)
        y = core.attend(q, k, v, exchange, case.cap)
        grads = torch.autograd.grad(y, (q, k, v), dy)
        predicted = layout.forward_events(shape, scope) + layout.backward_events(shape, scope)
        return [y.detach(), *grads], exchange.events, predicted

    rows = run_ranks(case.num_ranks, play, [board])
    results, events, predicted = zip(*rows, strict=True)
    return [list(some) for some in zip(*results, strict=True)], [*events], [*predicted]


def windows_of(method: str, num_ranks: int) -> list[int]:
    t = tokens_per_rank(num_ranks)
    return [0] if method == "ring" else [0, 1, 2, t - 1, t + 1, t * num_ranks + 5]


@pytest.mark.sample(10)
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("method", METHODS)
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
