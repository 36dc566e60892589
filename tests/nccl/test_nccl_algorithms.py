"""Every algorithm of collectives over NCCL: equal to the plain sum, beside compute, many times."""

from __future__ import annotations

import pytest
import torch

from pool import NcclPools
from ranvier.comm import collectives
from ranvier.comm.algorithms.registry import ALGORITHMS
from ranvier.grid import Grid

pytestmark = pytest.mark.nccl
NAMES = [
    *ALGORITHMS,
    *("hierarchical/doubling/ring", "hierarchical/ring/direct", "hierarchical/native/folded"),
    "nvrar/direct",
]
SIZES = (0, 1, 7, 1000, 2**18)
"""Elements of a part."""
CALLS = 1000


def values(rank: int, count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype == torch.int64:
        return torch.randint(-(2**40), 2**40, (count,), generator=generator)
    # Small integers, whose sums have no rounding, so that any order of additions is exact.
    return torch.randint(-8, 8, (count,), generator=generator).to(dtype)


def check_results(grid: Grid, name: str) -> list[str]:
    """All collectives for several sizes and dtypes, against the plain result."""
    axis = grid.axis("row")
    lines = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
        for count in SIZES:
            every = [values(rank, count * axis.size, dtype) for rank in axis.ranks]
            own = every[axis.index].cuda()
            total = sum(every, torch.zeros_like(every[0]))
            gathered = collectives.all_gather(own[:count].clone(), axis)
            scattered = collectives.reduce_scatter(own, axis)
            reduced = collectives.all_reduce(own, axis)
            mine = slice(axis.index * count, (axis.index + 1) * count)
            for op, have, want in (
                ("all_reduce", reduced, total),
                ("reduce_scatter", scattered, total[mine]),
                ("all_gather", gathered, torch.cat([x[:count] for x in every])),
            ):
                if not torch.equal(have.wait().cpu(), want):
                    lines.append(f"{name}: {op} of {count} {dtype}")
    return lines


def run_beside_compute(grid: Grid, calls: int) -> list[str]:
    """Many collectives, three of them in flight, while the compute stream is busy."""
    axis = grid.axis("row")
    lines = []
    work = torch.randn(256, 256, device="cuda")
    x = torch.full((64 * axis.size,), float(axis.index + 1), device="cuda")
    total = axis.size * (axis.size + 1) / 2
    wrong = torch.zeros((), device="cuda")
    for _ in range(calls // 3 + 1):
        started = [
            collectives.all_reduce(x, axis),
            collectives.reduce_scatter(x, axis),
            collectives.all_gather(x[:8].clone(), axis),
        ]
        work = (work @ work).clamp(-1.0, 1.0)
        reduced, scattered, gathered = (one.wait() for one in started)
        wrong += (reduced != total).sum() + (scattered != total).sum()
        wrong += (gathered.view(axis.size, 8).sum() - 8 * total).abs()
    if wrong.item():
        lines.append(f"{wrong.item():g} values differ")
    return lines


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_over_nccl(pool: NcclPools, name: str, ranks: int) -> None:
    how = {"algorithm": name, "ranks_per_node": max(ranks // 2, 1)}
    flat = name in ("direct", "one_shot")
    if flat:
        # On one node these use symmetric memory.
        results = pool.on_grid({"row": ranks}, check_results, name, algorithm=name)
        assert results == [[]] * ranks
    assert pool.on_grid({"row": ranks}, check_results, name, **how) == [[]] * ranks
    assert pool.on_grid({"row": ranks}, run_beside_compute, CALLS, **how) == [[]] * ranks
