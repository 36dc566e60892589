"""Collectives over symmetric buffers, with threads as ranks and tensors on the CPU.

`tests/nccl/test_nccl_symmetric_memory.py` runs the same collectives on a GPU.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pool import Pool
from ranvier.comm.transports.symmetric_memory import (
    DTYPES,
    RankDevice,
    SymmetricBuffers,
    availability,
    chunk_ranges,
    describe_device,
    find_obstacle,
    local_limitation,
    sum_in_order,
)
from ranvier.grid import Grid
from symmetric_cases import COLLECTIVES, expected, plain_sum, same_bits, values_of

SIZES = (1, 2, 3, 17, 256, 1001)


def run_ranks(ranks: int, function: Callable[[SymmetricBuffers], Any], barriers: int = -1) -> Any:
    """Results of a function on threads that share buffers.

    barriers: number of barriers that the last rank waits for, before it waits for none; all by
    default.
    """
    capacity = 1 << 17
    memory = [torch.zeros(capacity, dtype=torch.uint8) for _ in range(ranks)]
    meeting = threading.Barrier(ranks)
    results: dict[int, Any] = {}

    def serve(index: int) -> None:
        delays = random.Random(index)
        left = [barriers if index == ranks - 1 else -1]

        def barrier() -> None:
            time.sleep(delays.choice((0.0, 0.0, 1e-4)))
            if left[0] != 0:
                meeting.wait(timeout=20.0)
            left[0] -= 1

        try:
            results[index] = function(SymmetricBuffers(memory, index, barrier))
        except BaseException:
            meeting.abort()
            raise

    threads = [threading.Thread(target=serve, args=(index,)) for index in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[index] for index in range(ranks)]


def compare(buffers: SymmetricBuffers, dtype: torch.dtype) -> list[str]:
    """All collectives and sizes in a row, which must not disturb each other."""
    wrong = []
    ranks, index = buffers.size, buffers.index
    for seed, numel in enumerate(SIZES):
        for name in COLLECTIVES:
            count = numel * ranks if name == "reduce_scatter" else numel
            inputs = [values_of(100 * seed + rank, count, dtype) for rank in range(ranks)]
            want = expected(name, inputs, index)
            have = torch.empty_like(want)
            getattr(buffers, name)(have, inputs[index])
            if not same_bits(have, want):
                wrong.append(f"{name} of {numel}")
    return wrong


@pytest.mark.sample(10)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_collectives_return_the_bits_of_the_plain_sum(ranks: int, dtype: torch.dtype) -> None:
    assert run_ranks(ranks, lambda buffers: compare(buffers, dtype)) == [[]] * ranks


def test_the_order_of_additions_matters_in_these_tests() -> None:
    """Otherwise the test above could not see a wrong order."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        addends = [values_of(rank, 1001, dtype) for rank in range(3)]
        assert not same_bits(plain_sum(addends), plain_sum(addends[::-1]))
    narrow = [values_of(rank, 1001, torch.bfloat16) for rank in range(3)]
    rounded_each_time = narrow[0] + narrow[1] + narrow[2]
    assert not same_bits(plain_sum(narrow), rounded_each_time)


def leave_early(buffers: SymmetricBuffers) -> bool:
    """Whether a rank reads its input of the first call although others have written the next."""
    first, second = (torch.full((64,), float(value)) for value in (1, 2))
    output = torch.empty_like(first)
    if buffers.index == 1:
        buffers.all_gather(torch.empty(128), first)
        buffers.publish(second)  # without waiting for the end of the first call
        return True
    views = buffers._exchange(first)
    time.sleep(0.05)
    output.copy_(views[1])
    return torch.equal(output, first)


def test_a_missing_barrier_at_the_end_is_seen() -> None:
    assert run_ranks(2, leave_early, barriers=1) == [False, True]


@pytest.mark.parametrize("name", ["one_shot_all_reduce", "two_shot_all_reduce"])
def test_an_all_reduce_may_be_in_place_and_of_any_layout(name: str) -> None:
    def reduce(buffers: SymmetricBuffers) -> bool:
        inputs = [values_of(rank, 60, torch.float32).view(6, 10).t() for rank in range(3)]
        want = plain_sum([x.contiguous() for x in inputs])
        output = torch.empty(10, 6)
        getattr(buffers, name)(output, inputs[buffers.index])
        x = inputs[buffers.index].contiguous()
        getattr(buffers, name)(x, x)
        return same_bits(output, want) and same_bits(x, want)

    assert run_ranks(3, reduce) == [True] * 3


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("place", [0, 1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_may_be_stored_in_an_addend(count: int, place: int, dtype: torch.dtype) -> None:
    addends = [values_of(rank, 257, dtype) for rank in range(count)]
    want = plain_sum(addends)
    sum_in_order(addends, out=addends[place])
    assert same_bits(addends[place], want)


@pytest.mark.parametrize("total", [1, 2, 7, 16, 31, 1000])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_chunks_are_aligned_and_cover_all(total: int, count: int) -> None:
    chunks = chunk_ranges(total, count, 4)
    assert len(chunks) == count and chunks[0][0] == 0 and chunks[-1][1] == total
    assert all(a[1] == b[0] for a, b in itertools.pairwise(chunks))
    assert all(start % 4 == 0 or start == total for start, _ in chunks)


def other(rank: int, **changes: Any) -> RankDevice:
    """A rank on its own device of a node with two."""
    own: dict[str, Any] = {
        "host": "a",
        "device": rank,
        "uuid": f"gpu{rank}",
        "visible": ("gpu0", "gpu1"),
        "accessible": (f"gpu{1 - rank}",),
    }
    return RankDevice(rank, changes.pop("problem", ""), **(own | changes))


OBSTACLES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {}, ""),
    ({}, {"host": "b"}, "ranks 0 and 1 are on different nodes"),
    ({}, {"problem": "no CUDA"}, "rank 1: no CUDA"),
    ({}, {"accessible": ()}, "the device of rank 1 cannot read that of rank 0"),
    # A process that sees only its own device cannot tell; the allocation will.
    ({}, {"visible": ("gpu1",), "accessible": ()}, ""),
    ({}, {"device": 0, "uuid": "gpu0"}, "both use cuda:0; launch.share_gpu"),
    ({"allows_overlap": True}, {"device": 0, "uuid": "gpu0"}, "both use cuda:0"),
    ({"allows_overlap": True}, {"device": 0, "uuid": "gpu0", "allows_overlap": True}, ""),
]


@pytest.mark.parametrize(("first", "second", "reason"), OBSTACLES)
def test_ranks_that_cannot_share_memory_are_named(
    first: dict[str, Any], second: dict[str, Any], reason: str
) -> None:
    found = find_obstacle([other(0, **first), other(1, **second)])
    assert (reason in found) if reason else not found, found


def test_a_cpu_has_no_symmetric_memory() -> None:
    cpu = torch.device("cpu")
    assert "needs CUDA tensors, not tensors on cpu" in local_limitation(cpu)
    assert describe_device(3, cpu, share_gpu=False).problem == local_limitation(cpu)


def ask(grid: Grid) -> str:
    group = grid.axis("row").group
    assert group is not None
    return availability(group, torch.device("cpu"))


def test_all_ranks_get_the_same_answer(pool: Pool) -> None:
    answers = pool.on_grid({"row": 2}, ask)
    assert answers[0].startswith("rank 0: symmetric memory needs CUDA") and len({*answers}) == 1
