"""Algorithms of collectives in training: the same losses, chosen once, reported on resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pool import Pool
from ranvier.comm.algorithm_table import AlgorithmTable
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.launch import ProcessInfo
from ranvier.train.collective_algorithms import (
    check_algorithms,
    describe_algorithms,
    find_algorithm_changes,
    find_nodes,
)
from training import losses_of, stored

DEGREES = {"row": 2, "depth": 2}
STEPS = 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stored(tmp_path_factory.mktemp("corpus"))


def test_losses_do_not_depend_on_the_algorithm(pool: Pool, corpus: str, tmp_path: Path) -> None:
    losses: dict[str, Any] = {}
    for name, times in (("native", 1), ("auto", 2), ("hierarchical/ring/shared_memory", 2)):
        for time in range(times):
            out = str(tmp_path / f"{name.replace('/', '-')}{time}")
            ranks = pool.on_grid(DEGREES, losses_of, corpus, out, STEPS, algorithm=name)
            assert all(one == ranks[0] for one in ranks)
            assert losses.setdefault(name, ranks[0]) == ranks[0], "other bits in a second run"
    for name, found in losses.items():
        assert found == pytest.approx(losses["native"], rel=1e-9, abs=0.0), name


def test_a_run_describes_its_algorithms(pool: Pool) -> None:
    lines = pool.on_grid({"row": 3}, described, algorithm="doubling")[0]
    assert lines[0] == "collectives: row native"
    assert "row uses native instead of doubling" in lines[1]
    lines = pool.on_grid({"row": 2}, described, algorithm="auto")[0]
    assert lines == ["collectives: row shared_memory"]


def described(grid: Grid) -> list[str]:
    grid.axis("row")
    return describe_algorithms(grid)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rinng", "comm.algorithm has 'rinng'"),
        ("rows=ring", "comm.algorithm has axis 'rows'"),
        ("row=doubling", "comm.algorithm has row=doubling"),
        ("", "comm.algorithm='' has an empty item"),
        ("row=ring,row=bruck", "2 items for row"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused(text: str, words: str) -> None:
    with pytest.raises(PlanError) as error:
        check_algorithms(text, Grid({"row": 3}), "gloo")
    assert words in str(error.value)
    assert str(error.value).count(". ") >= 2, "value, rule and remedy"


def test_an_axis_may_have_its_own_algorithm() -> None:
    check_algorithms("row=folded,native", Grid({"row": 3}), "gloo")


def test_a_resumed_run_says_if_its_algorithms_have_changed() -> None:
    grid = Grid({"row": 2}, algorithms=AlgorithmTable.parse("ring"))
    saved = grid.algorithms.to_json()
    assert find_algorithm_changes(saved, grid) == ""
    assert find_algorithm_changes(None, grid) == ""
    other = Grid({"row": 2}, algorithms=AlgorithmTable.parse("native"))
    text = find_algorithm_changes(saved, other)
    assert "comm.algorithm='ring'" in text and "bit-identical" in text
    assert find_algorithm_changes(saved, Grid({}, algorithms=other.algorithms)) == ""


def test_one_node_needs_no_agreement() -> None:
    assert find_nodes(ProcessInfo(world_size=4, local_world_size=4)) is None
