"""The trace of a step on 8 ranks shows the three overlaps."""

from __future__ import annotations

from collections.abc import Callable

from equivalence import Case, batch_of, micros_of
from pool import Pool
from ranvier.grid import Grid
from ranvier.optim.optimizer import Optimizer
from ranvier.trace import COMPUTE, Event
from ranvier.train.step import forward_backward

CUBE = {"depth": 2, "row": 2, "col": 2}


def traced(grid: Grid, overlap: tuple[str, ...]) -> list[Event]:
    """Events of the second step: the first one records the order of the gathers."""
    model = Case("llama").on(grid, overlap=overlap)
    optimizer = Optimizer(model.parallel.bucket_scheduler)
    micros = micros_of(batch_of("llama", samples=8, packed=False), grid, 1)
    for _ in range(2):
        with grid.trace.record_events() as events:
            forward_backward(model, micros)
            optimizer.step()
    return events


def one(events: list[Event], which: Callable[[Event], bool]) -> Event:
    return next(event for event in events if which(event))


def gather_of(events: list[Event], block: str) -> Event:
    return one(events, lambda e: e.op == "all_gather" and e.axis == ("depth",) and e.where == block)


def test_weights_are_gathered_before_the_block_that_uses_them(pool: Pool) -> None:
    for events in pool.on_grid(CUBE, traced, ("dx", "dw", "weight_gather")):
        for block, before in (
            ("blocks.0", "embed"),
            ("blocks.1", "blocks.0"),
            ("head", "blocks.1"),
        ):
            gather, user = gather_of(events, block), gather_of(events, before)
            assert gather.issue_time < user.wait_time, (
                "issued before the one before it was even awaited"
            )
            if before != "embed":
                span = one(events, lambda e, name=before: e.where == f"forward {name}")
                assert gather.issue_time < span.done_time, (
                    "issued while the block before it computes"
                )
        back = [e for e in events if e.op == "all_gather" and e.axis == ("depth",)]
        assert [e.where for e in back] == [
            "embed",
            "blocks.0",
            "blocks.1",
            "head",
            "blocks.1",
            "blocks.0",
            # The update of vectors, whose states are split over depth.
            "vectors",
        ]


def test_dx_is_in_flight_while_dw_is_computed(pool: Pool) -> None:
    for events in pool.on_grid(CUBE, traced, ("dx", "dw", "weight_gather")):
        spans = [e for e in events if e.op == COMPUTE and e.where.startswith("dW ")]
        assert len(spans) == 8  # four a block
        for span in spans:
            leaf = span.where.removeprefix("dW ")
            mine = [e for e in events if e.op == "reduce_scatter" and e.where == leaf]
            dx = max((e for e in mine if e.axis != ("depth",)), key=lambda e: e.issue_time)
            assert dx.issue_time < span.issue_time and dx.wait_time >= span.done_time


def test_dw_is_reduced_behind_the_backward_of_the_next_block(pool: Pool) -> None:
    for events in pool.on_grid(CUBE, traced, ("dx", "dw", "weight_gather")):
        depth = [e for e in events if e.op == "reduce_scatter" and e.axis == ("depth",)]
        # Vectors are not gathered over depth; their states are split over it.
        assert [e.where for e in depth] == ["head", "blocks.1", "blocks.0", "embed", "vectors"]
        next_leaf = one(events, lambda e: e.where == "dW blocks.0.mlp.down")
        assert depth[1].issue_time < next_leaf.issue_time < depth[1].wait_time


def test_off_means_awaited_at_once(pool: Pool) -> None:
    for events in pool.on_grid(CUBE, traced, ()):
        for i, event in enumerate(events[:-1]):
            if event.op != COMPUTE and event.where != "norm":
                assert event.wait_time <= events[i + 1].issue_time
