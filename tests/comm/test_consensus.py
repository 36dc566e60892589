"""Facts that all ranks share: who says them is a rank, wherever it is placed on the grid."""

from __future__ import annotations

from collections import Counter

import pytest

from pool import Pool
from ranvier.comm import consensus
from ranvier.grid import Grid

ORDERS = [None, [0, 2, 1, 3], [3, 1, 0, 2]]


def words_of_each(grid: Grid) -> list[str]:
    """What each rank in turn says of itself."""
    ranks = range(grid.world_size)
    return [consensus.broadcast_text(f"I am {grid.rank}", grid, "cpu", rank=rank) for rank in ranks]


def facts_differ(grid: Grid) -> tuple[list[str], str]:
    """Two ranks have other facts, and complain."""
    odd = grid.rank in (1, 2)
    lines = consensus.find_rank_differences({"seed": "2" if odd else "1"}, grid, "cpu")
    return lines, consensus.broadcast_first_error(
        f"rank {grid.rank} complains" if odd else "", grid, "cpu"
    )


@pytest.mark.parametrize("order", ORDERS)
def test_a_rank_is_the_same_in_every_order(pool: Pool, order: list[int] | None) -> None:
    for said in pool.on_grid({"pipe": 2, "row": 2}, words_of_each, order=order):
        assert said == [f"I am {rank}" for rank in range(4)]
    for lines, complaint in pool.on_grid({"pipe": 2, "row": 2}, facts_differ, order=order):
        assert lines == [f"seed=2 on rank {rank}, but 1 on rank 0" for rank in (1, 2)]
        assert complaint == "rank 1 complains"


def test_the_axis_of_all_ranks_has_each_at_its_number() -> None:
    for rank in range(4):
        axis = Grid({"pipe": 2, "row": 2}, rank=rank, order=[3, 1, 0, 2]).world_axis()
        assert axis.index == rank and axis.ranks == (0, 1, 2, 3)
        assert Counter(axis.names) == Counter(["pipe", "row"])
