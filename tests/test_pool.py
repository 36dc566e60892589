"""The pool itself: failures and hangs are shown, and it works again afterwards."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from unittest.mock import call, create_autospec

import pytest
import torch

from grids import grid_key
from pool import NcclPools, Pool, RankError, lines
from ranvier.comm import collectives
from ranvier.grid import Grid


@pytest.fixture
def small() -> Iterator[Pool]:
    """A pool of two of its own: these tests break it."""
    pool = Pool(2)
    yield pool
    pool.stop()


def double(rank: int, factor: int = 2) -> int:
    return factor * rank


def fail_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError(f"no more on rank {rank}")


def sleep_on_one(rank: int) -> None:
    if rank == 1:
        oversleep()


def oversleep() -> None:
    time.sleep(600)


def die(rank: int) -> None:
    if rank == 0:
        os._exit(7)


def miss(grid: Grid) -> None:
    """Rank 0 waits for a sum that rank 1 never joins."""
    if grid.rank == 0:
        collectives.all_reduce(torch.ones(1), grid.axis("row")).wait()


def sum_of_ranks(grid: Grid) -> float:
    return collectives.all_reduce(torch.tensor(float(grid.rank)), grid.axis("row")).wait().item()


def test_results_are_in_rank_order(pool: Pool) -> None:
    assert pool.run(double, 8) == [0, 2, 4, 6, 8, 10, 12, 14]
    assert pool.run(double, 3, 5) == [0, 5, 10]


def test_a_failure_shows_its_traceback_and_the_pool_works_again(small: Pool) -> None:
    with pytest.raises(RankError) as error:
        small.run(fail_on_one, 2)
    text = str(error.value)
    assert text.startswith("rank 1 raised:\nTraceback")
    assert "in fail_on_one" in text
    assert "ValueError: no more on rank 1" in text
    assert "rank 0" not in text
    assert small.on_grid({"row": 2}, sum_of_ranks) == [1.0, 1.0]


def test_a_hang_shows_all_stacks_and_the_pool_works_again(small: Pool) -> None:
    small.run(double, 2)
    before = [worker for worker, _ in small.workers]
    with pytest.raises(RankError) as error:
        small.run(sleep_on_one, 2, timeout=0.5)
    text = str(error.value)
    assert text.startswith("ranks [1] hang; the stacks of all ranks:")
    first, second = text.split("rank 1:\n")
    assert "in oversleep" in second
    assert "in _serve" in second
    assert "in _serve" in first  # it waits for work
    assert "oversleep" not in first
    assert not any(worker.is_alive() for worker in before)
    assert small.run(double, 2) == [0, 2]


def test_a_collective_without_its_peer_is_a_hang(small: Pool) -> None:
    small.on_grid({"row": 2}, sum_of_ranks)
    with pytest.raises(RankError, match=r"ranks \[0\] hang") as error:
        small.on_grid({"row": 2}, miss, timeout=0.5)
    assert "in miss" in str(error.value)
    assert small.on_grid({"row": 2}, sum_of_ranks) == [1.0, 1.0]


def test_a_rank_that_dies(small: Pool) -> None:
    with pytest.raises(RankError, match="rank 0 died"):
        small.run(die, 2)
    assert small.run(double, 2) == [0, 2]


def test_lines_hold_every_axis_of_a_grid() -> None:
    """Whatever axis a rank can ask for, its group is among those made beforehand."""
    degrees = {"data": 2, "row": 4}
    known = set(lines(degrees))
    for rank in range(8):
        grid = Grid(degrees, rank=rank)
        axes = [grid.axis("data"), grid.axis("row"), grid.axis("data", "row")]
        axes += [grid.axis(share={"row": 2}), grid.axis("data", share={"row": 2})]
        assert {tuple(sorted(axis.ranks)) for axis in axes} <= known


def test_grids_with_equal_groups_have_one_key() -> None:
    assert grid_key({"row": 2}) == grid_key({"row": 2, "data": 1}) == (2, (("row", 2),))
    assert grid_key({"col": 2, "data": 4}) == grid_key({"data": 4, "col": 2})
    assert grid_key({"row": 2}) != grid_key({"col": 2})
    assert grid_key({"data": 1}) < grid_key({"row": 2}) < grid_key({"data": 4})


def test_the_last_pools_over_nccl_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)  # starts no service
    pools = NcclPools()
    first, second, again = pools.pool(1), pools.pool(4), pools.pool(1)
    assert again is first and [*pools.pools] == [4, 1]
    stop = create_autospec(Pool.stop, side_effect=Pool.stop)
    monkeypatch.setattr(Pool, "stop", stop)
    pools.pool(8)
    assert stop.call_args_list == [call(second)] and [*pools.pools] == [1, 8]
