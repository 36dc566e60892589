"""An algorithm that is added as docs/contributing/extending.md explains: one file, one table line.

It is simulated, priced, executed and chosen as those of the package.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from comm.pairwise import PAIRWISE
from pool import Pool
from ranvier.comm import collectives
from ranvier.comm.algorithm_table import AlgorithmTable
from ranvier.comm.algorithms.registry import ALGORITHMS, algorithm_names, find_algorithm
from ranvier.comm.algorithms.schedule import AxisShape
from ranvier.grid import Grid
from schedule_simulator import Buffer, simulate

LINE = {"pairwise": PAIRWISE}
SHAPES = [(0,), (0, 1), (0, 0, 1), (0, 0, 1, 1), (0, 1, 0, 1, 2), (2, 0, 0, 1, 1, 2, 2)]


@pytest.fixture
def table() -> Iterator[None]:
    """The table with one more line."""
    with patch.dict(ALGORITHMS, LINE):
        yield


@pytest.mark.parametrize("nodes", SHAPES, ids=str)
def test_its_schedule_gathers_at_the_cost_of_its_closed_form(nodes: tuple[int, ...]) -> None:
    shape = AxisShape.of_nodes(nodes)
    p = shape.size
    buffers: list[Buffer] = [[None] * p for _ in range(p)]
    for rank in range(p):
        buffers[rank][rank] = np.array([float(rank)])
    traffic = simulate(PAIRWISE, "all_gather", shape, buffers)
    for buffer in buffers:
        assert [None if block is None else block.item() for block in buffer] == [*range(p)]
    cost = PAIRWISE.cost("all_gather", shape)
    assert traffic.rounds == cost.rounds
    assert max(traffic.sent_blocks.values(), default=0) / p == pytest.approx(cost.sent_bytes)
    assert max(traffic.leaving_blocks.values(), default=0) / p == pytest.approx(cost.leaving_node)


@pytest.mark.usefixtures("table")
def test_one_line_makes_it_a_name_and_a_level() -> None:
    assert find_algorithm("pairwise") is PAIRWISE
    names = algorithm_names()
    assert {"hierarchical/pairwise/ring", "hierarchical/ring/pairwise", "nvrar/pairwise"} <= {
        *names
    }
    shape = AxisShape.of_nodes([0, 0, 1, 1])
    parsed = AlgorithmTable.parse("row=pairwise,native")
    rules = parsed.rules_for(("row",), shape, backend="gloo", on_host=True)
    assert rules.algorithm("all_gather", 1000) == "pairwise"
    assert rules.algorithm("reduce_scatter", 1000) == "native"
    # Its companion reduces where it is a level.
    level = find_algorithm("hierarchical/pairwise/pairwise")
    assert not any(level.limitation(op, shape) for op in level.operations)


def gather(grid: Grid) -> tuple[list[float], str]:
    """Gathers with the new algorithm; returns the result and what was recorded."""
    with patch.dict(ALGORITHMS, LINE):
        own = Grid(
            grid.degrees,
            connected=True,
            groups=grid.groups,
            segments=grid.segments,
            algorithms=AlgorithmTable.parse("pairwise"),
        )
        with own.trace.record_events() as events:
            found = collectives.all_gather(torch.tensor([float(grid.rank)]), own.axis("row")).wait()
        return found.tolist(), events[0].algorithm


def test_it_runs(pool: Pool) -> None:
    assert pool.on_grid({"row": 4}, gather) == [([0.0, 1.0, 2.0, 3.0], "pairwise")] * 4


def test_the_page_shows_this_file() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "contributing" / "extending.md").read_text(encoding="utf-8")
    section = page.partition("## An algorithm for collectives")[2].partition("\n## ")[0]
    (file,) = re.findall(r"```python[^\n]*\n(.*?)```", section, re.DOTALL)
    assert file == (root / "tests" / "comm" / "pairwise.py").read_text(encoding="utf-8")
    assert '`"pairwise": PAIRWISE`' in section and LINE == {"pairwise": PAIRWISE}
