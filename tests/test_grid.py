"""Grids: coordinates and members without processes, groups with them, on any order of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch

from pool import Pool
from ranvier import launch
from ranvier.comm import collectives
from ranvier.config.plan import AXES, Plan
from ranvier.errors import PlanError
from ranvier.grid import Grid

DEGREES = {"data": 2, "depth": 2, "row": 3, "col": 2}


def test_coordinates_and_members_without_processes() -> None:
    ranks = np.arange(24).reshape(2, 2, 3, 2)
    for rank, place in zip(range(24), product(*(range(n) for n in ranks.shape)), strict=True):
        grid = Grid(DEGREES, rank=rank)
        assert tuple(grid.index[axis] for axis in DEGREES) == place
        for dim, name in enumerate(DEGREES):
            axis = grid.axis(name)
            line = ranks[tuple(slice(None) if i == dim else at for i, at in enumerate(place))]
            assert axis.ranks == tuple(line.tolist())
            assert (axis.size, axis.index) == (DEGREES[name], place[dim])
            assert axis.ranks[axis.index] == rank
            assert axis.group is None
    assert not torch.distributed.is_initialized()


def test_fused_axes_are_outermost_first_however_asked_for() -> None:
    grid = Grid(DEGREES, rank=3)
    axis = grid.axis("col", "data")
    assert axis is grid.axis("data", "col")
    assert axis.names == ("data", "col")
    assert axis.ranks == (2, 3, 14, 15)
    assert str(axis) == "data·col"
    assert grid.axis(*AXES).ranks == tuple(range(24))
    assert grid.axis().size == grid.axis("pipe").size == 1
    assert str(grid.axis()) == "none"


def test_partial_axes_are_consecutive_ranks() -> None:
    degrees = {"row": 6, "col": 2}
    found = {Grid(degrees, rank=rank).axis(share={"row": 3}).ranks for rank in range(12)}
    assert found == {(0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11)}
    both = Grid(degrees, rank=7).axis("col", share={"row": 2})
    assert both.ranks == (4, 5, 6, 7)
    with pytest.raises(AssertionError, match="does not divide"):
        Grid(degrees).axis(share={"row": 4})


def test_a_plan_places_ranks_in_its_order() -> None:
    plan = Plan(pipe=2, data=3, row=4, rank_order=("row", "pipe"))
    grid = Grid.from_plan(plan, rank=0, ranks_per_node=8)
    assert plan.axis_order[-3:] == ("col", "row", "pipe")
    assert grid.axis("pipe").ranks == (0, 1) and grid.axis("row").ranks == (0, 2, 4, 6)
    assert grid.axis("data").ranks == (0, 8, 16) and grid.axis("data").crosses_nodes
    assert Grid.from_plan(Plan(pipe=2, data=3, row=4)).axis("row").ranks == (0, 1, 2, 3)


def test_explicit_order_permutes_members() -> None:
    order = [5, 2, 0, 4, 1, 3]
    grid = Grid({"row": 3, "col": 2}, rank=4, order=order)  # [[5, 2], [0, 4], [1, 3]]
    assert grid.index == dict.fromkeys(AXES, 0) | {"row": 1, "col": 1}
    assert grid.axis("row").ranks == (2, 4, 3)
    assert grid.axis("row").order == (0, 2, 1)
    assert grid.axis("col").ranks == (0, 4)
    assert grid.axis("row", "col").ranks == tuple(order)


def test_crosses_nodes() -> None:
    grid = Grid({"data": 2, "row": 2, "col": 2}, rank=5, ranks_per_node=4)
    assert grid.axis("data").crosses_nodes
    assert not grid.axis("row", "col").crosses_nodes
    assert not grid.axis().crosses_nodes
    spread = Grid({"data": 2, "col": 4}, order=[0, 4, 1, 5, 2, 6, 3, 7], ranks_per_node=4)
    assert spread.axis("col").crosses_nodes
    assert not spread.axis("data").crosses_nodes


def test_grid_of_a_plan() -> None:
    plan = Plan(row=2, col=2).resolve(8)
    grid = Grid.from_plan(plan, rank=7)
    assert grid.world_size == 8
    assert grid.degrees == plan.degrees
    assert grid.index["data"] == 1


@pytest.mark.parametrize(
    ("degrees", "options", "message"),
    [
        ({"row": 2}, {"order": [0, 0]}, r"1 different entries.*permutation of the 2 ranks"),
        ({"row": 2}, {"order": [0, 1, 2]}, r"3 different entries.*permutation of the 2 ranks"),
        ({"row": 2}, {"rank": 2}, r"rank=2 is not on a grid of 2 ranks.*less than 2"),
        ({"row": 2}, {"rank": -2}, r"rank=-2 is not on a grid"),
        ({"data": -1}, {}, r"data=-1 is invalid on a grid.*at least 1.*Resolve"),
    ],
)
def test_bad_grids(degrees: dict[str, int], options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Grid(degrees, **options)


def count_groups(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[int]]:
    """Fill a list with the ranks of every group that is made."""
    made: list[Sequence[int]] = []
    new_group = torch.distributed.new_group

    def counted(ranks: Sequence[int], **options: Any) -> Any:
        made.append(ranks)
        return new_group(ranks, **options)

    monkeypatch.setattr(torch.distributed, "new_group", counted)
    return made


def test_groups_of_many_ranks_take_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of 16,384 makes only the groups that it is in, once each."""
    made = count_groups(monkeypatch)
    degrees = {"data": 64, "depth": 8, "row": 8, "col": 4}
    with launch.fake_process_group(16384, rank=9999):
        grid = Grid(degrees, rank=9999, connected=True)
        for _ in range(2):
            for first, second in [*((a, a) for a in degrees), *pairwise(degrees)]:
                axis = grid.axis(first, second)
                assert axis.ranks[axis.index] == 9999
                assert torch.distributed.get_world_size(axis.group) == axis.size
            assert grid.axis(*AXES).size == 16384
        assert len(made) == 8
        channel = grid.axis("row", channel="second")
        assert channel.group is not grid.axis("row").group
        assert channel.group_name != grid.axis("row").group_name
        assert grid.axis("pipe").group is None
        assert len(made) == 9
        assert all(9999 in ranks for ranks in made)


def test_grids_of_one_process_share_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_groups(monkeypatch)
    with launch.fake_process_group(8):
        one = Grid({"row": 4, "col": 2}, connected=True)
        two = Grid({"row": 8}, connected=True, groups=one.groups)
        three = Grid({"col": 8}, connected=True)
        assert one.axis("row", "col").group is two.axis("row").group
        assert one.axis("row", "col").group is not three.axis("col").group
        assert one.axis("row", "col").group_name != three.axis("col").group_name
        assert len(made) == 2
        assert one.trace is not two.trace


@pytest.fixture(scope="module")
def fresh() -> Iterator[Pool]:
    """A pool of its own: grids that make groups need ranks that have made equally many before."""
    pool = Pool(6)
    yield pool
    pool.stop()


def in_axis_order(grid: Grid, order: list[int]) -> list[str]:
    """Compare every collective on a permuted grid with what the order of the axis demands."""
    mixed = Grid(grid.degrees, rank=grid.rank, order=order, connected=True)
    wrong = []
    for names in (("row",), ("col",), ("row", "col")):
        axis = mixed.axis(*names)
        n = axis.size

        def mine(of: int, to: int) -> torch.Tensor:
            """What the rank at index `of` sends to index `to`: one row that names both."""
            return torch.tensor([[axis.ranks[of] * 100.0 + axis.ranks[to]]])  # noqa: B023

        everything = torch.cat([mine(axis.index, to) for to in range(n)])
        results = {
            "all_gather": collectives.all_gather(mine(axis.index, 0), axis, 0),
            "all_gather of dim 1": collectives.all_gather(mine(axis.index, 0), axis, 1),
            "reduce_scatter": collectives.reduce_scatter(everything, axis, 0),
            "all_to_all": collectives.all_to_all(everything, axis),
            "broadcast": collectives.broadcast(mine(axis.index, 0), axis, index=n - 1),
        }
        counts = [[(of + 2 * to) % 3 for to in range(n)] for of in range(n)]
        ragged = [mine(axis.index, to).expand(counts[axis.index][to], 1) for to in range(n)]
        received = [counts[of][axis.index] for of in range(n)]
        results["ragged"] = collectives.all_to_all(
            torch.cat(ragged), axis, counts[axis.index], received
        )
        gathered = torch.cat([mine(of, 0) for of in range(n)])
        expected = {
            "all_gather": gathered,
            "all_gather of dim 1": gathered.T,
            "reduce_scatter": sum(mine(of, axis.index) for of in range(n)),
            "all_to_all": torch.cat([mine(of, axis.index) for of in range(n)]),
            "broadcast": mine(n - 1, 0),
            "ragged": torch.cat([mine(of, axis.index).expand(received[of], 1) for of in range(n)]),
        }
        wrong += [
            f"{name} over {axis}: {results[name].wait().tolist()}"
            for name, want in expected.items()
            if not torch.equal(results[name].wait(), torch.as_tensor(want))
        ]
    return wrong


def test_collectives_are_in_axis_order(fresh: Pool) -> None:
    order = [3, 1, 5, 0, 4, 2]
    assert fresh.on_grid({"row": 3, "col": 2}, in_axis_order, order) == [[]] * 6


def two_grids(grid: Grid) -> tuple[float, float]:
    """Sums over axes of two grids of the same ranks, interleaved."""
    other = Grid({"col": 2, "data": 2}, rank=grid.rank, connected=True)
    x = torch.tensor(float(2**grid.rank))
    first, second = (
        collectives.all_reduce(x, grid.axis("row")),
        collectives.all_reduce(x, other.axis("col")),
    )
    return second.wait().item(), first.wait().item()


def test_two_grids_in_one_process(fresh: Pool) -> None:
    """Rows of the first are (0, 2), (1, 3), columns of the second (0, 1), (2, 3)."""
    results = fresh.on_grid({"row": 2, "col": 2}, two_grids)
    assert results == [(3.0, 5.0), (3.0, 10.0), (12.0, 5.0), (12.0, 10.0)]


def make_late(grid: Grid) -> tuple[list[str], int, bool]:
    """What is said of a group that is made after the grid was sealed."""
    own = Grid(dict(grid.degrees), connected=True)
    line = own.axis_without_group("data", "row")
    connected = bool(own.communicators) or line.group is not None
    own.axis("row")
    own.seal_groups()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        own.axis("row")
        own.axis("data")
    return [str(one.message) for one in said], line.index, connected


def test_a_group_made_after_the_seal_is_a_warning() -> None:
    """And an axis that is asked for as a line makes none."""
    pool = Pool(size=4)
    try:
        found = pool.on_grid({"data": 2, "row": 2}, make_late)
    finally:
        pool.stop()
    for rank, (said, index, connected) in enumerate(found):
        assert index == rank and not connected
        assert len(said) == 1 and "A group over data" in said[0], said


def test_strided_axes_and_shared_ones_factor_an_axis() -> None:
    degrees = {"data": 2, "context": 6, "row": 2}
    for rank in range(24):
        grid = Grid(degrees, rank=rank)
        whole = grid.axis("context")
        near, far = grid.axis(share={"context": 2}), grid.strided_axis("context", stride=2)
        assert whole.index == far.index * near.size + near.index
        assert far.ranks == whole.ranks[near.index :: 2] and far.names == ("context",)
        assert grid.strided_axis("context", stride=6).size == 1
