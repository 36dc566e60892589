"""Attention over the context axis of real grids: results, and recorded events."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from context_cases import (
    HEAD_DIM,
    cut_rows,
    dense_results,
    document_lengths,
    largest_error,
    make_inputs,
    make_order,
    order_from_numbers,
)
from pool import Pool
from ranvier.cost.context_attention import (
    EventScope,
    KeyShape,
    KVGatherLayout,
    RingLayout,
    UlyssesLayout,
)
from ranvier.grid import Grid
from ranvier.models.segment_attention import SegmentAttention
from ranvier.nn.context_attention import AxisExchange, KVGather, Ring, Ulysses
from ranvier.sharding import TokenOrder
from ranvier.trace import diff_events

HEADS, KV_HEADS = 8, 2
WHERE = "blocks.0.core"


def attend_on_grid(
    grid: Grid, method: str, orders: tuple[TokenOrder, ...], window: int, cap: float
) -> tuple[int, list[Tensor], list[str]]:
    """Index, y, dq, dk, dv of a rank, and how its events differ from the predicted ones."""
    axis = grid.axis("context")
    rank = axis.index
    inputs = make_inputs(len(orders), sum(orders[0].lengths), HEADS, KV_HEADS)
    q, k, v, dy = (cut_rows(x, orders, rank) for x in inputs)
    for x in (q, k, v):
        x.requires_grad_()
    scopes = [EventScope(axis.names, WHERE)]
    with grid.trace.record_events() as events:
        with grid.trace.named_scope(WHERE):
            if method == "near_kv_gather":
                core = Ulysses(UlyssesLayout(orders, rank, 2, window), SegmentAttention)
                near = AxisExchange(grid.axis(share={"context": 2}))
                far = AxisExchange(grid.strided_axis("context", stride=2))
                y = core.attend(q, k, v, near, cap, far_exchange=far)
                layout: UlyssesLayout | KVGatherLayout | RingLayout = core.layout
            elif method == "ulysses":
                core = Ulysses(UlyssesLayout(orders, rank, axis.size, window), SegmentAttention)
                y = core.attend(q, k, v, AxisExchange(axis), cap)
                layout = core.layout
            elif method == "ring":
                layout = RingLayout(orders, rank)
                y = Ring(layout, SegmentAttention).attend(q, k, v, AxisExchange(axis), cap)
            else:
                layout = KVGatherLayout(orders, rank, window)
                y = KVGather(layout, SegmentAttention).attend(q, k, v, AxisExchange(axis), cap)
        # Backward runs outside of the scope of the layer.
        grads = torch.autograd.grad(y, (q, k, v), dy)
    shape = KeyShape(HEADS, KV_HEADS, HEAD_DIM, 8, 8)
    predicted = layout.forward_events(shape, *scopes) + layout.backward_events(shape, *scopes)
    return rank, [y.detach(), *grads], diff_events(predicted, events)


def gathered_orders() -> tuple[TokenOrder, ...]:
    """Every rank needs nearly all keys."""
    return (order_from_numbers((96,), np.arange(96).reshape(24, 4).T),)


@pytest.mark.parametrize(
    ("degrees", "method", "order", "window", "cap"),
    [
        ({"context": 4}, "kv_gather", "zigzag", 7, 0.0),
        ({"context": 4}, "kv_gather", "gathered", 0, 5.0),
        ({"context": 4}, "ring", "random", 0, 0.0),
        ({"context": 4}, "ulysses", "random", 5, 5.0),
        ({"context": 4}, "near_kv_gather", "zigzag", 0, 0.0),
        ({"context": 3}, "ring", "zigzag", 0, 5.0),
        ({"data": 2, "context": 2, "row": 2}, "kv_gather", "random", 0, 0.0),
    ],
    ids=str,
)
def test_grids_compute_dense_attention_and_record_what_is_predicted(
    pool: Pool, degrees: dict[str, int], method: str, order: str, window: int, cap: float
) -> None:
    if order == "gathered":
        orders = gathered_orders()
    else:
        lengths = document_lengths("several", degrees["context"])
        orders = tuple(make_order(some, degrees["context"], order) for some in lengths)
    found = pool.on_grid(degrees, attend_on_grid, method, orders, window, cap)
    inputs = make_inputs(len(orders), sum(orders[0].lengths), HEADS, KV_HEADS)
    wanted = dense_results(inputs, [one.lengths for one in orders], window, cap)
    for rank, results, lines in found:
        assert not lines
        for have, want in zip(results, wanted, strict=True):
            mine = [cut_rows(want, orders, i) for i in range(degrees["context"])]
            mine[rank] = have
            assert largest_error(mine, want, orders) <= 1e-12
