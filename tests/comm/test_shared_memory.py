"""Shared memory between CPU ranks: what is specific to this transport."""

from __future__ import annotations

import errno
import gc
import os
import threading
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from pool import Pool
from ranvier.comm import collectives
from ranvier.comm.algorithm_table import AlgorithmTable
from ranvier.comm.transports import shared_memory
from ranvier.comm.transports.output_pool import BLOCK_BYTES, OutputPool
from ranvier.errors import CommunicationError
from ranvier.grid import HOST_CHANNEL, Grid
from ranvier.train.collective_algorithms import describe_algorithms


def sum_and_algorithm(grid: Grid) -> tuple[float, str]:
    """An all-reduce and its algorithm."""
    axis = grid.axis("row")
    with grid.trace.record_events() as events:
        total = collectives.all_reduce(torch.full((3,), float(grid.rank + 1)), axis).wait()
    return float(total[0]), events[0].algorithm


def refuse_memory(*_: Any) -> int:
    """Fails as a host whose shared memory is full does."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def without_memory(rank: int, ranks: int) -> tuple[float, str, list[str]]:
    """A grid one of whose ranks cannot create its segment."""
    with mock.patch.object(os, "memfd_create", refuse_memory) if rank == 1 else nullcontext():
        grid = Grid({"row": ranks}, rank=rank, connected=True)
        total, algorithm = sum_and_algorithm(grid)
    return total, algorithm, describe_algorithms(grid)


def one_node_without_memory(rank: int, ranks: int) -> tuple[float, str]:
    """The same on two nodes, with an algorithm that needs shared memory on both."""
    with mock.patch.object(os, "memfd_create", refuse_memory) if rank == 1 else nullcontext():
        return sum_and_algorithm(
            Grid(
                {"row": ranks},
                rank=rank,
                connected=True,
                ranks_per_node=2,
                algorithms=AlgorithmTable.parse("hierarchical/ring/shared_memory"),
            )
        )


def groups_of_uneven_lines(rank: int, ranks: int) -> tuple[int, float]:
    """The number of groups on a grid where one line of an axis is on one node, the other on two."""
    grid = Grid(
        {"data": 2, "row": 2},
        rank=rank,
        connected=True,
        node_of_rank=(0, 0, 0, 1),
        algorithms=AlgorithmTable.parse("hierarchical/ring/ring"),
    )
    total = sum(
        float(collectives.all_reduce(torch.ones(3), grid.axis(name)).wait()[0])
        for name in ("data", "row")
    )
    return len(grid.groups), total


def algorithms_by_channel(rank: int, ranks: int) -> dict[str, set[str]]:
    """The algorithms of an axis on channels of hosts and of collectives."""
    grid = Grid({"row": ranks}, rank=rank, connected=True)
    found = {}
    for channel in ("", HOST_CHANNEL):
        rules = grid.axis("row", channel=channel).rules
        assert rules is not None
        found[channel] = rules.algorithms
    return found


def sizes_that_differ(rank: int, ranks: int) -> str:
    """What a collective says whose tensors differ in size between its ranks."""
    grid = Grid({"row": ranks}, rank=rank, connected=True, timeout_seconds=3.0)
    with pytest.raises(CommunicationError) as found:
        collectives.all_reduce(torch.ones(3 + rank % 2), grid.axis("row")).wait()
    return str(found.value)


def test_without_memory_all_ranks_continue_natively_and_say_so() -> None:
    pool = Pool(4)
    try:
        for total, algorithm, lines in pool.run(without_memory, 4, 4):
            assert (total, algorithm) == (10.0, "native")
            assert any("rank 1 cannot create shared memory: [Errno 28]" in line for line in lines)
        assert pool.run(one_node_without_memory, 4, 4) == [(10.0, "native")] * 4
        groups, totals = zip(*pool.run(groups_of_uneven_lines, 4, 4), strict=True)
        # All ranks must have created equally many, or the next one never becomes complete.
        assert len({*groups}) == 1
        assert totals == (4.0,) * 4
        channels = {"": {"shared_memory"}, HOST_CHANNEL: {"native"}}
        assert pool.run(algorithms_by_channel, 4, 4) == [channels] * 4
        # Last, because workers cannot communicate after it.
        for message in pool.run(sizes_that_differ, 4, 4):
            assert "bytes where" in message and "differ between ranks" in message
    finally:
        pool.stop()


def large_sums_in_flight(grid: Grid, count: int) -> list[float]:
    """All-reduces of two axes in flight that together need more memory than there is."""
    axes = [grid.axis("row"), grid.axis("col")]
    runner = axes[0].runner
    assert runner is not None and runner.shared_memory is not None
    segment = runner.shared_memory.segment
    whole_size = segment._size
    x = torch.ones(20_000)
    with mock.patch.multiple(shared_memory, CHUNK_BYTES=1024, ONE_SHOT_BYTES=1024):
        # Messages of earlier tests may not have been acknowledged yet.
        taken = [place + size for place, size, _ in segment._allocations.values()]
        reserved = 1024 * shared_memory.RESERVED_CHUNKS
        segment._size = max([shared_memory._DATA_START, *taken]) + reserved + 4096
        started = [collectives.all_reduce(x * i, axis) for i in range(count) for axis in axes]
        # The ranks wait in different orders.
        order = reversed(started) if grid.rank % 2 else started
        totals = sorted(float(one.wait()[0]) for one in order)
    segment._size = whole_size
    return totals


def test_collectives_in_flight_that_need_more_memory_than_there_is(pool: Pool) -> None:
    want = sorted(2.0 * i for i in range(5) for _ in range(2))
    assert pool.on_grid({"row": 2, "col": 2}, large_sums_in_flight, 5) == [want] * 4


def test_two_runs_on_one_host_do_not_disturb_each_other(pool: Pool) -> None:
    other = Pool(2)
    try:
        answers: list[Any] = []
        thread = threading.Thread(
            target=lambda: answers.append(other.on_grid({"row": 2}, sum_and_algorithm))
        )
        thread.start()
        assert pool.on_grid({"row": 2}, sum_and_algorithm) == [(3.0, "shared_memory")] * 2
        thread.join()
        assert answers == [[(3.0, "shared_memory")] * 2]
    finally:
        other.stop()


def in_flight_together(grid: Grid, count: int) -> list[float]:
    """Many collectives of two axes that wait for each other, more than a mailbox has room for."""
    row, col = grid.axis("row"), grid.axis("col")
    x = torch.ones(5000)
    started = [collectives.all_reduce(x * i, axis) for i in range(count) for axis in (row, col)]
    order = reversed(started) if grid.rank % 2 else started
    return sorted(float(one.wait()[0]) for one in order)


def test_more_collectives_than_a_mailbox_has_room_for(pool: Pool) -> None:
    count = shared_memory.MAILBOX_ENTRIES
    want = sorted(2.0 * i for i in range(count) for _ in range(2))
    assert pool.on_grid({"row": 2, "col": 2}, in_flight_together, count) == [want] * 4


def from_threads(grid: Grid) -> list[float]:
    """Collectives of several threads of a process, on communicators of their own."""
    axes = [grid.axis("row", channel=name) for name in ("", "gather", "scatter")]
    totals = [0.0] * len(axes)

    def work(place: int) -> None:
        for number in range(40):
            x = torch.full((3000,), float(number))
            totals[place] += float(collectives.all_reduce(x, axes[place]).wait()[0])

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(axes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return totals


def test_threads_of_a_process_communicate_at_the_same_time(pool: Pool) -> None:
    want = [3.0 * sum(range(40))] * 3
    assert pool.on_grid({"row": 3}, from_threads) == [want] * 3


def test_messages_larger_than_a_chunk(pool: Pool) -> None:
    assert pool.on_grid({"row": 2}, small_chunks) == [[]] * 2
    assert pool.on_grid({"row": 3}, small_chunks) == [[]] * 3


def small_chunks(grid: Grid) -> list[str]:
    """Every collective in many chunks, in a segment that is full most of the time."""
    axis = grid.axis("row")
    every = [torch.arange(9000.0).mul(rank + 1) for rank in axis.ranks]
    own, total = every[axis.index], sum(every, torch.zeros(9000))
    memory = axis.runner.shared_memory if axis.runner is not None else None
    assert memory is not None
    whole_size = memory.segment._size
    lines = []
    with mock.patch.multiple(shared_memory, CHUNK_BYTES=1024, ONE_SHOT_BYTES=1024):
        # Messages of earlier tests may not have been acknowledged yet.
        taken = [place + size for place, size, _ in memory.segment._allocations.values()]
        memory.segment._size = max([shared_memory._DATA_START, *taken]) + 4096 * axis.size
        counts = [[100 * ((a + b) % 3) for b in range(axis.size)] for a in range(axis.size)]
        mine = counts[axis.index]
        started = {
            "all_reduce": (collectives.all_reduce(own, axis), total),
            "all_gather": (collectives.all_gather(own, axis), torch.cat(every)),
            "reduce_scatter": (
                collectives.reduce_scatter(own, axis),
                total.chunk(axis.size)[axis.index],
            ),
            "broadcast": (collectives.broadcast(own, axis, index=1), every[1]),
            "all_to_all": (
                collectives.all_to_all(
                    own[: sum(mine)], axis, mine, [row[axis.index] for row in counts]
                ),
                torch.cat(
                    [
                        x[: sum(row)].split(row)[axis.index]
                        for x, row in zip(every, counts, strict=True)
                    ]
                ),
            ),
        }
        for name, (pending, want) in started.items():
            if not torch.equal(pending.wait(), want):
                lines.append(name)
    memory.segment._size = whole_size
    return lines


# ---- memory of results -------------------------------------------------------------------


def axes_of_the_same_ranks(grid: Grid) -> tuple[float, float]:
    """Two axes of the same ranks, each with a collective in flight."""
    one = collectives.all_reduce(torch.full((4,), 1.0), grid.axis("data"))
    other = collectives.all_reduce(torch.full((4,), 100.0), grid.world_axis())
    return float(other.wait().sum()), float(one.wait().sum())


@pytest.mark.parametrize("algorithm", ["shared_memory", "ring"])
@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_axes_of_the_same_ranks_do_not_mix_messages(
    pool: Pool, algorithm: str, order: list[int]
) -> None:
    found = pool.on_grid({"data": 2}, axes_of_the_same_ranks, algorithm=algorithm, order=order)
    assert found == [(800.0, 8.0)] * 2


def reduce_in_modes(grid: Grid) -> list[float]:
    """All-reduces in inference mode and outside of it, also of a tensor with a gradient."""
    x = torch.ones(2**16)
    axis = grid.axis("data")
    with torch.inference_mode():
        first = float(collectives.all_reduce(x, axis).wait()[0])
    second = float(collectives.all_reduce(x, axis).wait()[0])
    third = float(collectives.all_reduce(x.requires_grad_(), axis).wait()[0])
    return [first, second, third]


def test_sums_do_not_depend_on_modes_of_autograd(pool: Pool) -> None:
    found = pool.on_grid({"data": 2}, reduce_in_modes, algorithm="shared_memory")
    assert found == [[2.0] * 3] * 2


def test_memory_of_results_is_reused() -> None:
    outputs = OutputPool()
    first = outputs.empty((2**19,), torch.float32)
    address = first.data_ptr()
    second = outputs.empty((2**19,), torch.float32)
    assert second.data_ptr() != address
    part = first[5:]
    del first
    gc.collect()
    assert outputs.free_bytes == 0, "a part of it is still used"
    del part
    assert outputs.free_bytes == BLOCK_BYTES
    assert outputs.empty((2**10, 2**9), torch.float32).data_ptr() == address
    assert outputs.empty((3,), torch.int64).numel() == 3


@pytest.mark.sample(4)
@pytest.mark.parametrize("world", [64, 4096])
@pytest.mark.parametrize("name", ["ring", "bruck", "folded", "doubling", "hierarchical", "nvrar"])
def test_schedules_of_thousands_of_ranks_on_the_fake_group(name: str, world: int) -> None:
    from ranvier.comm.algorithms.registry import find_algorithm
    from ranvier.launch.process_group import fake_process_group

    if name == "ring" and world > 64:
        pytest.skip("thousands of rounds one after the other")
    with fake_process_group(world, rank=7):
        # Native levels of the fake group return no values, so levels exchange messages.
        leveled = {"hierarchical": "hierarchical/bruck/ring", "nvrar": "nvrar/ring"}
        table = AlgorithmTable.parse(leveled.get(name, name))
        grid = Grid({"data": world}, rank=7, connected=True, algorithms=table)
        axis = grid.axis("data")
        x = torch.ones(world)
        with grid.trace.record_events() as events:
            collectives.all_gather(x[:1].clone(), axis).wait()
            collectives.reduce_scatter(x, axis).wait()
            collectives.all_reduce(x, axis).wait()
        for event in events:
            algorithm = find_algorithm(event.algorithm)
            if event.algorithm == "native":
                assert event.op not in find_algorithm(table.default).operations
                continue
            cost = algorithm.cost(event.op, axis.shape)  # type: ignore[arg-type]
            assert event.num_rounds == cost.rounds
            assert (
                event.sent_bytes is not None and event.sent_bytes <= cost.sent_bytes * 4 * world + 1
            )


def grids_in_a_row(rank: int, count: int) -> tuple[int, list[str]]:
    """File handles and threads that grids leave behind."""
    groups: dict[Any, Any] = {}
    early_threads: set[threading.Thread] = set()
    early_handles = 0
    for number in range(count):
        grid = Grid(
            {"row": 2},
            rank=rank,
            connected=True,
            groups=groups,
            algorithms=AlgorithmTable.parse("auto" if number % 2 else "ring"),
        )
        collectives.all_reduce(torch.ones(8), grid.axis("row")).wait()
        del grid
        gc.collect()
        # The first grids create the group and its threads.
        if number <= 2:
            early_threads |= set(threading.enumerate())
            early_handles = max(early_handles, len(os.listdir("/proc/self/fd")))
    # A thread of the last grid may still be on its way out, so it gets a moment to end.
    later_threads = set(threading.enumerate()) - early_threads
    for thread in later_threads:
        thread.join(timeout=5)
    handles = len(os.listdir("/proc/self/fd"))
    return max(handles - early_handles, 0), [t.name for t in later_threads if t.is_alive()]


def test_grids_leave_neither_handles_nor_threads_behind() -> None:
    own = Pool(2)
    try:
        assert own.run(grids_in_a_row, 2, 12) == [(0, [])] * 2
    finally:
        own.stop()
