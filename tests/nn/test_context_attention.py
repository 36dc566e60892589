"""Attention over context equals dense attention: all ranks played in one process."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
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
    order_from_numbers,
    run_ranks,
    tokens_per_rank,
)
from ranvier.config.plan import AXES
from ranvier.cost.context_attention import (
    EventScope,
    KeyShape,
    KVGatherLayout,
    RingLayout,
    UlyssesLayout,
    check_ring_window,
    check_ulysses_heads,
)
from ranvier.cost.layers import ActivationShape, AttentionCost, LayoutContext
from ranvier.errors import PlanError
from ranvier.models.segment_attention import SegmentAttention
from ranvier.nn.context_attention import KVGather, Ring, RunOnce, Ulysses, run_always
from ranvier.sharding import ShardingTable, TokenOrder, TokenSegment, order_tokens
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


SCOPES: tuple[EventScope, ...] = (EventScope(("context",), ""), EventScope(("far",), ""))
"""Of the whole axis, or its near ranks; and of the far ones."""
Results = list[list[Tensor]]
"""y, dq, dk, dv, each of all ranks."""


def run_case(
    case: Case,
    inputs: Sequence[Tensor],
    run_once_on: Callable[[int], RunOnce] = lambda rank: run_always,
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
        core = make_core(case, rank)
        run_once = run_once_on(rank)
        if isinstance(core, Ulysses):
            scopes = SCOPES
            exchanges = [
                ThreadExchange(near_boards[rank // near], rank % near),
                ThreadExchange(far_boards[rank % near], rank // near, ("far",)),
            ]
            y = core.attend(q, k, v, exchanges[0], case.cap, run_once, far_exchange=exchanges[1])
        else:
            scopes = SCOPES[:1]
            exchanges = [ThreadExchange(whole, rank)]
            y = core.attend(q, k, v, exchanges[0], case.cap, run_once)
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


@pytest.mark.sample(12)
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


def make_case(method: str, num_ranks: int, order: str, documents: str, **changes: Any) -> Case:
    lengths = document_lengths(documents, num_ranks)
    orders = tuple(make_order(some, num_ranks, order) for some in lengths)
    settings: dict[str, Any] = {"heads": 8, "kv_heads": 2, "window": 0, "cap": 0.0}
    return Case(method, orders, **{**settings, **changes})


def case_inputs(case: Case) -> list[Tensor]:
    lengths = [order.lengths for order in case.orders]
    inputs: list[Tensor] = make_inputs(len(lengths), sum(lengths[0]), case.heads, case.kv_heads)
    return inputs


def case_errors(case: Case, results: Results) -> list[float]:
    lengths = [order.lengths for order in case.orders]
    wanted = dense_results(case_inputs(case), lengths, case.window, case.cap)
    return [
        largest_error(have, want, case.orders) for have, want in zip(results, wanted, strict=True)
    ]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_no_bit_depends_on_overlap(method: str, dtype: torch.dtype) -> None:
    case = make_case(method, 4, "zigzag", "several")
    inputs = [x.to(dtype) for x in case_inputs(case)]
    results, events, _ = run_case(case, inputs)
    others, other_events, _ = run_case(replace(case, overlap=False), inputs)
    for some, other in zip(results, others, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(some, other, strict=True))
    for recorded, other_recorded in zip(events, other_events, strict=True):
        assert [one.match_key for one in recorded] == [one.match_key for one in other_recorded]


@pytest.mark.parametrize("method", METHODS)
def test_bf16_is_as_exact_as_its_inputs(method: str) -> None:
    case = make_case(method, 4, "zigzag", "several", cap=5.0)
    rounded = [x.bfloat16() for x in case_inputs(case)]
    results, _, _ = run_case(case, rounded)
    exact = dense_results(
        [x.double() for x in rounded], [order.lengths for order in case.orders], 0, 5.0
    )
    for have, want in zip(results, exact, strict=True):
        assert {x.dtype for x in have} == {torch.bfloat16}
        assert largest_error(have, want, case.orders) < 2**-7


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_windows_communicate_only_halos(order: str) -> None:
    num_ranks, samples, seq = 4, 2, 1024
    window = seq // 32
    orders = (make_order((seq,), num_ranks, order),) * samples
    shape = KeyShape(heads=8, kv_heads=2, head_dim=16, itemsize=2, gradient_itemsize=4)
    scope = EventScope(("context",), "core")
    halo = 2 * samples * (window - 1) * shape.kv_heads * shape.head_dim * shape.itemsize
    sent = []
    for rank in range(num_ranks):
        layout = KVGatherLayout(orders, rank, window)
        forward = sum(event.bytes for event in layout.forward_events(shape, scope))
        received = sum(map(len, layout.received_keys)) * halo // (samples * (window - 1))
        # A rank has one halo per part of the order.
        assert max(forward, received) <= 1.05 * halo * (2 if order == "zigzag" else 1)
        sent.append(forward)
    assert max(sent) > 0


def test_whole_documents_on_ranks_communicate_nothing() -> None:
    case = make_case("kv_gather", 4, "contiguous", "exact")
    _, events, predicted = run_case(case, case_inputs(case))
    assert not any(events) and not any(predicted)
    assert KVGatherLayout(case.orders, 0).head_groups(8) == [(0, 8)]


@pytest.mark.parametrize("kv_heads", [8, 1])
def test_keys_that_nearly_all_ranks_need_are_gathered(kv_heads: int) -> None:
    # Places 0, 4, 8, ...: every rank needs all but the last few keys.
    numbers = np.arange(96).reshape(24, 4).T
    orders = (order_from_numbers((96,), numbers),) * 2
    case = Case("kv_gather", orders, 8, kv_heads, 0, 0.0)
    assert KVGatherLayout(orders, 1).fetched_counts == [138, 140, 142, 144]
    results, events, predicted = run_case(case, case_inputs(case))
    assert max(case_errors(case, results)) < 1e-12
    assert not diff_events(predicted[0], events[0])
    groups = min(kv_heads, 2)
    assert [event.op for event in events[0]].count("all_gather") == 2 * groups
    assert [event.op for event in events[0]].count("reduce_scatter") == groups


def test_a_rank_counts_the_scores_of_its_queries() -> None:
    for method in METHODS:
        case = make_case(method, 4, "random", "packed")
        layouts = [make_core(case, rank).layout for rank in range(case.num_ranks)]
        total = sum(n * (n + 1) // 2 for n in case.orders[0].lengths)
        copies = case.near if isinstance(layouts[0], UlyssesLayout) else 1
        assert sum(layout.num_scores for layout in layouts) == copies * total


@pytest.mark.parametrize("method", ["kv_gather", "ring", "ulysses"])
@pytest.mark.parametrize("window", [0, 3])
def test_flops_of_attention_count_documents(method: Any, window: int) -> None:
    """A rank computes a query with each key that it sees, and all ranks together compute all."""
    if method == "ring" and window:
        pytest.skip("a ring has no windows")
    lengths = ((1, 2, 5), (8,))
    orders = tuple(order_tokens(some, 2, "zigzag") for some in lengths)
    degrees = dict.fromkeys(AXES, 1) | {"context": 2}
    units = {"heads": 4, "kv_heads": 2}
    layout = LayoutContext(degrees, ShardingTable(), units, context_attention=method)
    flow = ActivationShape(2, 8, 8, 8, token_orders=orders)
    each = [
        AttentionCost("", layout, "heads", HEAD_DIM, window, context_index=rank).flops(flow)
        for rank in range(2)
    ]
    seen = [min(i + 1, window or 8) for some in lengths for n in some for i in range(n)]
    assert sum(each) == 4 * sum(seen) * 4 * HEAD_DIM
    assert method != "ulysses" or each[0] == each[1]


def test_messages_need_few_bytes_of_a_zigzag_order() -> None:
    num_ranks, seq = 8, 1024
    orders = (make_order((seq,), num_ranks, "zigzag"),)
    fetched = KVGatherLayout(orders, 0).fetched_counts
    # Three quarters of an all-gather: a rank of the middle sees half of the keys.
    assert np.mean(fetched) / (seq - seq // num_ranks) == pytest.approx(0.75, abs=0.01)


# ---- negative controls: each of these mistakes is far off ---------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_forgotten_documents_are_far_off(method: str) -> None:
    case = make_case(method, 4, "zigzag", "packed")
    (order,) = case.orders
    one_document = order_from_numbers((sum(order.lengths),), order.token_numbers)
    results, _, _ = run_case(replace(case, orders=(one_document,)), case_inputs(case))
    assert min(case_errors(case, results)) > 0.05


@pytest.mark.parametrize("method", METHODS)
def test_places_local_to_a_rank_are_far_off(method: str) -> None:
    case = make_case(method, 4, "zigzag", "one")
    # Each rank takes its tokens for a document of its own.
    t = tokens_per_rank(case.num_ranks)
    rows = tuple((TokenSegment(rank, 0, t),) for rank in range(case.num_ranks))
    local = TokenOrder((t,) * case.num_ranks, rows)
    renumbered = [
        torch.cat([cut_rows(x, case.orders, rank) for rank in range(case.num_ranks)], 1)
        for x in case_inputs(case)
    ]
    results, _, _ = run_case(replace(case, orders=(local,)), renumbered)
    assert min(case_errors(case, results)) > 0.05


def test_log_sum_exp_of_a_block_in_backward_is_far_off(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = SegmentAttention.backward

    def backward(self: Any, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        _, lse = self.forward(q, k, v)
        return whole(self, dy, q, k, v, rest[0], lse, *rest[2:])

    case = make_case("ring", 4, "zigzag", "one")
    results, _, _ = run_case(case, case_inputs(case))
    assert max(case_errors(case, results)) < 1e-12
    monkeypatch.setattr(SegmentAttention, "backward", backward)
    results, _, _ = run_case(case, case_inputs(case))
    y, *grads = case_errors(case, results)
    assert y < 1e-12 and min(grads) > 0.05


# ---- what is refused ----------------------------------------------------------------------------


def test_ring_refuses_windows() -> None:
    check_ring_window(0)
    with pytest.raises(PlanError, match=r"ring.*window of 4096 tokens.*Use context_attention=kv_g"):
        check_ring_window(4096)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "near", "valid"),
    [(28, 4, 8, "1, 2, 4, 28"), (8, 8, 3, "1, 2, 4, 8"), (12, 3, 2, "1, 3, 6, 12")],
)
def test_ulysses_refuses_heads_that_do_not_divide(
    heads: int, kv_heads: int, near: int, valid: str
) -> None:
    with pytest.raises(PlanError, match=rf"{heads} query heads.*{near} ranks.*Use {valid} ranks"):
        check_ulysses_heads(heads, kv_heads, near)
    for number in map(int, valid.split(", ")):
        check_ulysses_heads(heads, kv_heads, number)


@pytest.mark.parametrize("method", METHODS)
def test_recomputation_neither_computes_nor_communicates_again(method: str) -> None:
    case = make_case(method, 4, "zigzag", "several")
    saved: list[dict[int, tuple[Tensor, ...]]] = [{} for _ in range(case.num_ranks)]

    def run_once_on(rank: int) -> RunOnce:
        number = itertools.count()

        def run_once(work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
            i = next(number)
            if i not in saved[rank]:
                saved[rank][i] = work()
            return tuple(x.detach() for x in saved[rank][i])

        return run_once

    first, events, _ = run_case(case, case_inputs(case), run_once_on)
    again, repeated, _ = run_case(case, case_inputs(case), run_once_on)
    for some, other in zip(first, again, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(some, other, strict=True))
    # The second time only backward communicates.
    layouts = [make_core(case, rank).layout for rank in range(case.num_ranks)]
    for layout, whole, rest in zip(layouts, events, repeated, strict=True):
        scopes = SCOPES if isinstance(layout, UlyssesLayout) else SCOPES[:1]
        shape = KeyShape(case.heads, case.kv_heads, HEAD_DIM, 8, 8)
        assert not diff_events(layout.backward_events(shape, *scopes), rest)
        assert len(rest) < len(whole)
