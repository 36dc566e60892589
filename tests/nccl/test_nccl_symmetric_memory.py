"""Collectives over symmetric memory on one GPU: bits, order, graphs, overlap, a missing rank."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from pool import NcclPools, Pool, RankError
from ranvier.comm.transports.symmetric_memory import (
    DTYPES,
    SymmetricMemoryCommunicator,
    availability,
)
from ranvier.grid import Grid
from symmetric_cases import COLLECTIVES, expected, same_bits, values_of

pytestmark = pytest.mark.nccl
DEVICE = torch.device("cuda", 0)
BYTES = (1 << 10, (1 << 10) + 24, (1 << 18) + 8, 4 << 20)


def connect(grid: Grid, **options: Any) -> SymmetricMemoryCommunicator:
    """A communicator over the row axis; its order is that of the axis."""
    axis = grid.axis("row")
    assert axis.group is not None
    reason = availability(axis.group, DEVICE, share_gpu=True)
    assert not reason, reason
    options = {"capacity": 8 << 20, "order": axis.order, "timeout_seconds": 60.0} | options
    return SymmetricMemoryCommunicator(axis.group, DEVICE, **options)


def inputs_of(name: str, numel: int, ranks: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Inputs of all ranks, whose parts have `numel` elements in all but an all-reduce."""
    count = numel * ranks if name == "reduce_scatter" else numel
    return [values_of(100 * seed + rank, count, dtype) for rank in range(ranks)]


def compare(grid: Grid, use_torch_kernels: bool) -> list[str]:
    """All collectives, dtypes and sizes, in place and not, against the plain sum."""
    memory = connect(grid, use_torch_kernels=use_torch_kernels)
    index, ranks = memory.index, memory.size
    wrong = []
    for dtype in DTYPES:
        for num_bytes in BYTES:
            for name in COLLECTIVES:
                numel = num_bytes // dtype.itemsize // (ranks if name == "reduce_scatter" else 1)
                inputs = inputs_of(name, numel, ranks, dtype)
                want = expected(name, inputs, index).to(DEVICE)
                x = inputs[index].to(DEVICE)
                have = torch.empty_like(want)
                getattr(memory, name)(have, x).wait()
                if not same_bits(have, want):
                    wrong.append(f"{name} of {num_bytes} bytes of {dtype}")
                if "all_reduce" in name:
                    getattr(memory, name)(x, x, async_op=True).wait()
                    if not same_bits(x, want):
                        wrong.append(f"{name} in place of {num_bytes} bytes of {dtype}")
    return wrong


@pytest.mark.parametrize("use_torch_kernels", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_bits_are_those_of_the_plain_sum(
    pool: NcclPools, ranks: int, use_torch_kernels: bool
) -> None:
    found = pool.on_grid({"row": ranks}, compare, use_torch_kernels)
    assert found == [[]] * ranks


def test_ranks_are_added_in_the_order_of_the_axis(pool: NcclPools) -> None:
    found = pool.on_grid({"row": 4}, compare, True, order=(2, 0, 3, 1))
    assert found == [[]] * 4


def replay(grid: Grid, use_torch_kernels: bool) -> list[str]:
    """All collectives in one graph, replayed with other inputs, next to calls outside of it."""
    memory = connect(grid, use_torch_kernels=use_torch_kernels)
    index, ranks = memory.index, memory.size
    numel, dtype = 1024, torch.float32
    inputs = {name: inputs_of(name, numel, ranks, dtype)[index].to(DEVICE) for name in COLLECTIVES}
    outputs = {
        name: torch.empty_like(expected(name, inputs_of(name, numel, ranks, dtype), 0)).to(DEVICE)
        for name in COLLECTIVES
    }
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        # One in the background of the others, and one that is waited for at once.
        pending = [
            getattr(memory, name)(outputs[name], inputs[name], async_op=name != "all_gather")
            for name in COLLECTIVES
        ]
        for work in pending:
            work.wait()
    wrong = []
    for seed in range(20):
        every = {name: inputs_of(name, numel, ranks, dtype, seed) for name in COLLECTIVES}
        for name in COLLECTIVES:
            inputs[name].copy_(every[name][index])
        graph.replay()
        eager = torch.empty_like(outputs["all_gather"])
        memory.all_gather(eager, inputs["all_gather"], async_op=True).wait()
        for name in COLLECTIVES:
            if not same_bits(outputs[name].cpu(), expected(name, every[name], index)):
                wrong.append(f"{name} in replay {seed}")
        if not same_bits(eager, outputs["all_gather"]):
            wrong.append(f"all_gather after replay {seed}")
    return wrong


@pytest.mark.parametrize("use_torch_kernels", [False, True])
def test_calls_can_be_captured_in_a_graph(pool: NcclPools, use_torch_kernels: bool) -> None:
    assert pool.on_grid({"row": 2}, replay, use_torch_kernels) == [[]] * 2


def overlap(grid: Grid) -> list[str]:
    """Three collectives in flight next to compute, whose inputs are computed right before."""
    memory = connect(grid)
    index, ranks = memory.index, memory.size
    matrix = torch.randn(1024, 1024, device=DEVICE)
    wrong = []
    for seed in range(100):
        every = [
            inputs_of("all_gather", 4096, ranks, torch.float32, 3 * seed + i) for i in range(3)
        ]
        works, outputs = [], []
        for inputs in every:
            # The input exists only after the compute stream has reached this place.
            torch.cuda._sleep(100_000)
            x = inputs[index].to(DEVICE) * 1.0
            outputs.append(torch.empty_like(x))
            works.append(memory.one_shot_all_reduce(outputs[-1], x, async_op=True))
            # The work keeps its input; without it this memory would be reused at once.
            del x
            matrix = torch.nn.functional.normalize(matrix @ matrix)
        for work, output, inputs in zip(works, outputs, every, strict=True):
            work.wait()
            total = expected("one_shot_all_reduce", inputs, index)
            if not same_bits(output.cpu(), total):
                wrong.append(f"call {seed}")
    return wrong


def test_calls_overlap_with_compute(pool: NcclPools) -> None:
    assert pool.on_grid({"row": 2}, overlap) == [[]] * 2


def describe_limits(grid: Grid) -> list[str]:
    memory = connect(grid, capacity=1000)
    tensors = [
        torch.empty(252, device=DEVICE),
        torch.empty(253, device=DEVICE),
        torch.empty(4),
        torch.empty(4, device=DEVICE, dtype=torch.complex64),
    ]
    empty = torch.empty(0, device=DEVICE)
    memory.one_shot_all_reduce(empty, empty).wait()
    return [memory.limitation(x) for x in tensors]


def test_other_tensors_are_refused_with_the_reason(pool: NcclPools) -> None:
    for fits, long, host, dtype in pool.on_grid({"row": 2}, describe_limits):
        assert fits == "" and long == "1012 bytes exceed the capacity of 1008"
        assert host == "the tensor is on cpu, not on cuda:0" and "complex64 is not" in dtype


def call_alone(grid: Grid) -> None:
    """Rank 1 does not join a collective of rank 0."""
    memory = connect(grid, timeout_seconds=5.0)
    x = torch.ones(4, device=DEVICE)
    if grid.rank == 1:
        time.sleep(15.0)
        return
    memory.one_shot_all_reduce(x, x).wait()
    torch.cuda.synchronize()


def test_a_missing_rank_ends_the_wait() -> None:
    own = Pool(2, "nccl", mps=False)
    try:
        with pytest.raises(RankError, match="rank 0"):
            own.on_grid({"row": 2}, call_alone, timeout=60.0)
    finally:
        own.stop()
