"""Verbs on the pool: results, handles, events, and what is said when ranks disagree or are lost."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pool import Pool, RankError
from ranvier.comm import collectives
from ranvier.comm.collectives import PendingTensor
from ranvier.errors import CommunicationError
from ranvier.grid import Axis, Grid

SHAPE = (4, 8, 12)


def tensor_of(rank: int, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> Tensor:
    """What a rank starts from, known to all."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def expect(lines: list[str], name: str, have: Tensor, want: Tensor) -> None:
    if have.shape != want.shape or not torch.allclose(have, want, rtol=1e-14, atol=1e-14):
        lines.append(f"{name}: {have} instead of {want}")


def results(grid: Grid) -> list[str]:
    """All verbs on one axis against what one process computes."""
    axis, lines = grid.axis("row"), list[str]()
    n, i = axis.size, axis.index
    every = [tensor_of(rank) for rank in axis.ranks]
    mine, total = every[i].clone(), sum(every, torch.zeros(SHAPE, dtype=torch.float64))
    for dim in (0, 1, -1, 2):
        part = SHAPE[dim] // n
        gathered = collectives.all_gather(mine, axis, dim).wait()
        expect(lines, f"all_gather {dim}", gathered, torch.cat(every, dim))
        scattered = collectives.reduce_scatter(mine, axis, dim).wait()
        expect(lines, f"reduce_scatter {dim}", scattered, total.narrow(dim, i * part, part))
    strided = mine.transpose(0, 2)
    expect(
        lines,
        "strided",
        collectives.all_gather(strided, axis).wait(),
        torch.cat([x.transpose(0, 2) for x in every]),
    )
    expect(
        lines, "strided sum", collectives.all_reduce(strided, axis).wait(), total.transpose(0, 2)
    )
    expect(lines, "sum", collectives.all_reduce(mine, axis).wait(), total)
    expect(
        lines, "max", collectives.all_reduce(mine, axis, "max").wait(), torch.stack(every).amax(0)
    )
    expect(
        lines, "min", collectives.all_reduce(mine, axis, "min").wait(), torch.stack(every).amin(0)
    )
    chunks = [x.chunk(n)[i] for x in every]
    expect(lines, "all_to_all", collectives.all_to_all(mine, axis).wait(), torch.cat(chunks))
    for source in range(n):
        expect(
            lines,
            "broadcast",
            collectives.broadcast(mine, axis, index=source).wait(),
            every[source],
        )
    expect(lines, "input", mine, every[i])
    return lines + ragged(axis) + point_to_point(axis)


def ragged(axis: Axis) -> list[str]:
    """Different numbers of rows, some none: an all-to-all, an all-gather, a reduce-scatter."""
    n, i, lines = axis.size, axis.index, list[str]()
    counts = [[(3 * of + to) % 4 for to in range(n)] for of in range(n)]
    every = [tensor_of(of, (sum(counts[of]), 5)) for of in range(n)]
    want = torch.cat([every[of].split(counts[of])[i] for of in range(n)])
    received = [counts[of][i] for of in range(n)]
    have = collectives.all_to_all(every[i], axis, counts[i], received).wait()
    expect(lines, "ragged all_to_all", have, want)
    parts = [(3 * of) % 4 for of in range(n)]
    shares = [tensor_of(of, (parts[of], 5)) for of in range(n)]
    have = collectives.all_gather(shares[i], axis, counts=parts).wait()
    expect(lines, "ragged all_gather", have, torch.cat(shares))
    wholes = [tensor_of(of, (sum(parts), 5)) for of in range(n)]
    have = collectives.reduce_scatter(wholes[i], axis, counts=parts).wait()
    expect(lines, "ragged reduce_scatter", have, torch.stack(wholes).sum(0).split(parts)[i])
    return lines


def point_to_point(axis: Axis) -> list[str]:
    """Round the ring, received before it is sent for."""
    n, i, lines = axis.size, axis.index, list[str]()
    pending = collectives.receive(torch.empty(SHAPE, dtype=torch.float64), axis, (i - 1) % n)
    sent = collectives.send(tensor_of(i), axis, (i + 1) % n)
    expect(lines, "receive", pending.wait(), tensor_of((i - 1) % n))
    sent.wait()
    return lines


def handles(grid: Grid) -> list[str]:
    """Two under way, awaited in reverse and twice; an axis of one rank."""
    axis, one, lines = grid.axis("row"), grid.axis("col"), list[str]()
    a, b = (tensor_of(grid.rank, seed=seed) for seed in (1, 2))
    first, second = collectives.all_reduce(a, axis), collectives.all_gather(b, axis)
    for seed, pending in ((2, second), (1, first)):
        every = [tensor_of(rank, seed=seed) for rank in axis.ranks]
        want = torch.cat(every) if seed == 2 else sum(every, torch.zeros_like(a))
        value = pending.wait()
        expect(lines, f"tensor {seed}", value, want)
        if pending.wait() is not value:
            lines.append("a second wait gave another tensor")
    alone: list[Callable[[], PendingTensor]] = [
        lambda: collectives.all_gather(a, one, 1),
        lambda: collectives.reduce_scatter(a, one, 1),
        lambda: collectives.all_reduce(a, one),
        lambda: collectives.all_to_all(a, one),
        lambda: collectives.broadcast(a, one),
    ]
    grid.trace.recent_events.clear()
    with grid.trace.record_events() as events:
        lines += ["not the same tensor" for call in alone if call().wait() is not a]
    return lines + [f"recorded {event}" for event in events] + grid.trace.recent_ops


def events_of(grid: Grid) -> list[tuple[str, tuple[str, ...], int, str, bool, bool]]:
    """What is recorded: operation, axis, bytes, place, times in order, done."""
    axis = grid.axis("row")
    x = torch.ones(4, 3)
    with grid.trace.record_events() as events, grid.trace.named_scope("here"):
        pending = [
            collectives.all_gather(x, axis),
            collectives.reduce_scatter(x, axis),
            collectives.all_reduce(x, axis),
            collectives.all_to_all(x, axis),
            collectives.broadcast(x, axis),
        ]
        for one in pending:
            one.wait()
        point_to_point(axis)
    return [
        (
            event.op,
            event.axis,
            event.bytes,
            event.where,
            (event.issue_time or 9e9) <= (event.wait_time or 0.0) <= (event.resume_time or 0.0),
            event.done_time is not None
            and event.issue_time is not None
            and event.issue_time <= event.done_time,
        )
        for event in events
    ]


def test_results(pool: Pool) -> None:
    for ranks in (2, 4):
        assert pool.on_grid({"row": ranks}, results) == [[]] * ranks


def test_handles_and_axes_of_one_rank(pool: Pool) -> None:
    assert pool.on_grid({"row": 2}, handles) == [[]] * 2


def test_events(pool: Pool) -> None:
    """Bytes are those of the whole: gathered, or before the scatter."""
    tensor = 4 * 3 * 4
    whole = 4 * 8 * 12 * 8
    want = [
        ("all_gather", 2 * tensor),
        ("reduce_scatter", tensor),
        ("all_reduce", tensor),
        ("all_to_all", tensor),
        ("broadcast", tensor),
        ("receive", whole),
        ("send", whole),
    ]
    for events in pool.on_grid({"row": 2}, events_of):
        assert events == [(op, ("row",), size, "here", True, True) for op, size in want]


# ---- ranks that disagree ------------------------------------------------------------------------


def swapped(grid: Grid, check: bool) -> tuple[str, float, float]:
    """Two sums of equal shape, which rank 1 issues in the other order."""
    axis, sums = grid.axis("row"), {}
    grid.trace.check_collectives = check
    places = ("a", "b") if grid.rank == 0 else ("b", "a")
    try:
        for place in places:
            with grid.trace.named_scope(place):
                value = torch.tensor(1.0 if place == "a" else 10.0)
                sums[place] = collectives.all_reduce(value, axis).wait().item()
    except CommunicationError as error:
        return str(error), 0.0, 0.0
    return "", sums["a"], sums["b"]


def agreeing(grid: Grid) -> list[str]:
    """Right programs stay right in debug mode: all verbs, ragged ones, messages of some ranks."""
    grid.trace.check_collectives = True
    return results(grid) + (one_message(grid.axis("row")) if grid.world_size > 2 else [])


def one_message(axis: Axis) -> list[str]:
    """Only two of the ranks take part."""
    lines: list[str] = []
    if axis.index == 0:
        collectives.send(tensor_of(0), axis, 1).wait()
    elif axis.index == 1:
        received = collectives.receive(torch.empty(SHAPE, dtype=torch.float64), axis, 0).wait()
        expect(lines, "message", received, tensor_of(0))
    return lines


def unlike(grid: Grid, kind: str) -> str:
    """What debug mode says of a collective that rank 1 issues in another way."""
    grid.trace.check_collectives = True
    axis, odd = grid.axis("row"), grid.rank == 1
    x = torch.ones(4, 2)
    try:
        if kind == "op":
            (collectives.all_gather if odd else collectives.reduce_scatter)(x, axis).wait()
        elif kind == "shape":
            collectives.all_reduce(x.T if odd else x, axis).wait()
        elif kind == "dtype":
            collectives.all_reduce(x.double() if odd else x, axis).wait()
        elif kind == "long":
            with grid.trace.named_scope("·" * 200 + str(grid.rank)):
                collectives.all_reduce(x.double() if odd else x, axis).wait()
    except CommunicationError as error:
        return str(error)
    return ""


def test_swapped_collectives_are_silently_wrong_without_debug_mode(pool: Pool) -> None:
    """The control: torch adds what meets, 1 + 10, and says nothing."""
    assert pool.on_grid({"row": 2}, swapped, False) == [("", 11.0, 11.0)] * 2


def test_debug_mode_reports_what_each_rank_issues(pool: Pool) -> None:
    for text, _, _ in pool.on_grid({"row": 2}, swapped, True):
        assert text.startswith("The ranks of row issue different collectives: ")
        assert "rank 0: all_reduce () torch.float32 at a; " in text
        assert "rank 1: all_reduce () torch.float32 at b. " in text
        assert "same order" in text


@pytest.mark.parametrize("kind", ["op", "shape", "dtype", "long"])
def test_debug_mode_finds_what_differs(pool: Pool, kind: str) -> None:
    for text in pool.on_grid({"row": 2}, unlike, kind):
        assert "rank 0: " in text and "rank 1: " in text


def test_debug_mode_accepts_right_programs(pool: Pool) -> None:
    for ranks in (2, 4):
        assert pool.on_grid({"row": ranks}, agreeing) == [[]] * ranks


# ---- ranks that are lost -------------------------------------------------------------------------


def lose(grid: Grid, when: str) -> None:
    """Rank 1 vanishes; rank 0 has to say so."""
    axis = grid.axis("row")
    with grid.trace.named_scope("before"):
        collectives.all_reduce(torch.ones(3), axis).wait()
    if grid.rank == 1 and when == "at once":
        os._exit(3)
    with grid.trace.named_scope("block 7"):
        pending = collectives.all_gather(torch.ones(1000), axis)
        if grid.rank == 1:
            os._exit(3)
        pending.wait()


@pytest.mark.parametrize("when", ["at once", "under way"])
def test_a_lost_peer_is_a_communication_error(when: str) -> None:
    pool = Pool(2)
    try:
        with pytest.raises(RankError) as error:
            pool.on_grid({"row": 2}, lose, when, timeout=30.0)
    finally:
        pool.stop()
    text = str(error.value)
    assert "rank 1 died" in text
    if when == "at once":  # a gather under way may still have reached rank 0
        assert "CommunicationError: all_gather over row of 8000 bytes at block 7 failed" in text
        assert "failed on rank 0 (index 0 of ranks [0, 1])" in text
        assert (
            "the last operations on this rank were: all_reduce over row of 12 bytes at before; "
            in text
        )


def lonely(grid: Grid) -> str:
    """A peer that never comes, with a short limit."""
    impatient = Grid(grid.degrees, rank=grid.rank, connected=True, timeout_seconds=1.0)
    axis = impatient.axis("row")
    if grid.rank == 1:
        return ""
    try:
        collectives.all_reduce(torch.ones(3), axis).wait()
    except CommunicationError as error:
        return str(error)
    return "no error"


def test_a_missing_peer_is_a_communication_error_after_the_limit() -> None:
    pool = Pool(2)
    try:
        text, _ = pool.on_grid({"row": 2}, lonely, timeout=30.0)
    finally:
        pool.stop()
    assert "all_reduce over row of 12 bytes at ? failed on rank 0" in text
    assert "imed out" in text


def test_a_grid_without_processes_says_so() -> None:
    axis = Grid({"row": 2}).axis("row")
    with pytest.raises(AssertionError, match="all_reduce over row: this grid has no processes"):
        collectives.all_reduce(torch.ones(2), axis)
    with pytest.raises(AssertionError, match="give both send and receive counts, or neither"):
        collectives.all_to_all(torch.ones(2), axis, [1, 1])
