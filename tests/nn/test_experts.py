"""Models with experts on grids against one process: every axis, router, capacity and shared expert.

The suite runs a seeded sample in which every pair of two options occurs, `--full` the product.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest

from equivalence import Case, Serial, batch_of, compare, reload, run_case
from grids import label, pairwise, product
from pool import Pool
from ranvier.checkpoint.state import assemble

LR, CLIP = 1e-2, 1.0
AXES = ("pipe", "data", "expert", "depth", "row", "col")
OPTIONS: dict[str, list[Any]] = {
    "world": [2, 4, 8],
    "expert": [1, 2, 4, 8],
    "second": ["data", "depth", "row", "col", "pipe"],
    "third": ["data", "depth", "row", "col"],
    "top": ["1 of 8", "2 of 8", "8 of 16"],
    "capacity": [False, True],
    "shared": [False, True],
    "kind": ["", "sigmoid", "every", "raw"],
    "inner": ["samples", "features"],
    "recompute": ["none", "selective", "full"],
    "collectives": ["again", "keep"],
    "micro_batches": [1, 2],
}


def valid(row: dict[str, Any]) -> bool:
    rest = row["world"] // row["expert"]
    if row["recompute"] == "none" and row["collectives"] == "keep":
        return False
    if row["second"] == row["third"] or rest < 1:
        return False
    return rest > 2 or AXES.index(row["third"]) == (1 if row["second"] != "data" else 3)


def grid_of(row: dict[str, Any]) -> dict[str, int]:
    """Ranks that are not on expert lie on the second axis, and from four on on the third, too."""
    rest = row["world"] // row["expert"]
    found = dict.fromkeys(AXES, 1) | {"expert": row["expert"]}
    found[row["second"]] = min(rest, 2)
    found[row["third"]] *= rest // found[row["second"]]
    return found


def case_of(row: dict[str, Any], steps: int) -> Case:
    words = ["capacity"] * row["capacity"] + ["shared"] * row["shared"]
    words += [row["kind"]] * bool(row["kind"])
    return Case(
        " ".join(["moe", row["top"], *words]),
        inner=row["inner"],
        recompute=row["recompute"],
        collectives=row["collectives"],
        micro_batches=row["micro_batches"],
        steps=steps,
    )


def sample() -> list[dict[str, Any]]:
    """Every pair of routing options; each with another grid, small ones more often."""
    drawn = pairwise({k: v for k, v in OPTIONS.items() if k not in GRID}, lambda row: True, 2)
    grids = product({k: OPTIONS[k] for k in GRID}, lambda row: valid({**NONE, **row}))
    small = [row for row in grids if row["world"] < 8]
    large = [row for row in grids if row["world"] == 8]
    turns = itertools.cycle([*small[::5], *large[::11]])
    return [row for row in ({**row, **next(turns)} for row in drawn) if valid(row)]


GRID = ("world", "expert", "second", "third")
NONE = {"recompute": "none", "collectives": "again"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "row" in metafunc.fixturenames:
        rows = product(OPTIONS, valid) if metafunc.config.getoption("--full") else sample()
        names = [f"{label(grid_of(row))}-{case_of(row, 3).label}" for row in rows]
        metafunc.parametrize("row", rows, ids=names)


@functools.cache
def serial(model: str, steps: int) -> Serial:
    return Serial(model, batch_of(model, samples=16, packed=False), LR, CLIP, steps)


def test_experts_equal_one_process(
    pool: Pool, row: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    case, degrees = case_of(row, 3), grid_of(row)
    whole = serial(case.model, case.steps)
    assert whole.extras[0] > 0.0
    results = pool.on_grid(degrees, run_case, case, whole.batch, LR, CLIP)
    assert compare(whole, results) == []
    if math.prod(degrees.values()) == 8 or request.config.getoption("--full"):
        state = {key: assemble(result[key] for result in results) for key in ("after", "optimizer")}
        other = {"expert": 2, "row": 2} if degrees["expert"] != 2 else {"depth": 2, "col": 2}
        bad = pool.on_grid(other, reload, case, state["after"], state["optimizer"])
        assert [line for lines in bad for line in lines] == []
