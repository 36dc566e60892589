"""All ranks with the same shard of a weight split its gradient and its optimizer states.

The replica axis fuses data, context, and expert for dense weights: any such grid equals one process
in losses, gradients, norms and weights, communicates as predicted, and its state reloads bit for
bit on another grid. The models have windows of one token, so attention needs no other rank's keys.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from equivalence import Case, Serial, batch_of, compare, micros_of, reload, run_case
from pool import Pool
from ranvier.data.batch import Batch
from ranvier.grid import Grid
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.train.step import forward_backward
from states import assemble

LR, CLIP = 1e-2, 0.5
GRIDS: list[tuple[dict[str, int], str]] = [
    ({"data": 2, "context": 2}, "local"),
    ({"expert": 2, "data": 2}, "local moe"),
    ({"expert": 2, "context": 2}, "local moe"),
    ({"context": 2, "depth": 2}, "local tied"),
    ({"context": 2, "row": 2}, "local"),
    ({"context": 2, "col": 2}, "local tied"),
    ({"pipe": 2, "context": 2}, "local tied"),
    ({"context": 2, "row": 4}, "local"),
    ({"expert": 2, "context": 2, "depth": 2}, "local moe"),
    ({"data": 2, "context": 2, "depth": 2}, "local"),
]


@functools.cache
def serial(model: str) -> Serial:
    return Serial(model, batch_of(model, samples=16, packed=False), LR, CLIP, 3)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("degrees", "model"), GRIDS, ids=str)
def test_replicas_share_the_update(pool: Pool, degrees: dict[str, int], model: str) -> None:
    whole = serial(model)
    case = Case(model, micro_batches=2, steps=3, both=True)
    results = pool.on_grid(degrees, run_case, case, whole.batch, LR, CLIP)
    assert compare(whole, results) == []
    check_reload(pool, case, results, GRIDS.index((degrees, model)) + 3)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("degrees", "model"), GRIDS, ids=str)
def test_weights_are_gathered_over_context_and_depth(
    pool: Pool, degrees: dict[str, int], model: str
) -> None:
    whole = serial(model)
    again = {"recompute": "full", "collectives": "save"}
    case = Case(model, micro_batches=2, steps=3, both=True, weights_over="depth_context", **again)
    results = pool.on_grid(degrees, run_case, case, whole.batch, LR, CLIP)
    assert compare(whole, results) == []
    check_reload(pool, replace(case, weights_over="depth"), results, GRIDS.index((degrees, model)))


def check_reload(pool: Pool, case: Case, results: list[dict[str, Any]], number: int) -> None:
    """A state loads bit for bit on another grid, without pipe and with expert only for experts."""
    state = {key: assemble(result[key] for result in results) for key in ("after", "optimizer")}
    other = GRIDS[number % len(GRIDS)][0]
    if other.get("pipe", 1) == 1 and ("expert" not in other or "moe" in case.model):
        bad = pool.on_grid(other, reload, case, state["after"], state["optimizer"])
        assert [line for lines in bad for line in lines] == []


def step_of(grid: Grid, case: Case, batch: Batch) -> tuple[dict[str, int], list[tuple[Any, ...]]]:
    """Elements of each first moment on this rank, and the communication of the buckets."""
    model = case.on(grid)
    queue = get_parallel_model(model).bucket_scheduler
    optimizer = Optimizer(queue, lr=LR)
    with grid.trace.record_events() as events:
        forward_backward(model, micros_of(batch, grid, case.micro_batches))
        optimizer.step()
    names = {bucket.name for bucket in queue.buckets}
    state = optimizer.sharded_state().items()
    sizes = {name: part.numel() for name, (part, _) in state if name.endswith(".mean")}
    return sizes, [(e.where, e.op, e.axis, e.bytes) for e in events if e.where in names]


def test_each_state_is_on_one_rank_and_gradients_are_reduced_once(pool: Pool) -> None:
    case, batch = Case("local moe"), batch_of("local moe", samples=16, packed=False)
    results = pool.on_grid({"data": 2, "expert": 2, "context": 2}, step_of, case, batch)
    model = case.build()
    for name, weight in model.named_parameters():
        sizes = [sizes[f"{name}.mean"] for sizes, _ in results]
        assert sum(sizes) == weight.numel(), name
    # The largest share of a rank is an eighth of all, up to padding and the bounds of weights.
    each = [sum(sizes.values()) for sizes, _ in results]
    assert max(each) <= -(-sum(each) // 8) + 8
    for _, events in results:
        assert {op for _, op, _, _ in events} == {"reduce_scatter", "all_gather"}
        block = [event for event in events if event[0] == "blocks.0"]
        reduced = {axis: size for _, op, axis, size in block if op == "reduce_scatter"}
        # Experts are split over expert, so that half of them are reduced on a rank.
        experts = sum(
            p.numel()
            for n, p in model.named_parameters()
            if n.startswith("blocks.0.") and n.rpartition(".")[2] in ("gate", "up", "down")
        )
        assert reduced.pop(("data", "context")) == experts // 2 * 8
        assert set(reduced) == {("data", "expert", "context")}
        # Hidden matrices, the router, and experts: each has a reduction and a gather.
        assert len(block) == 6
