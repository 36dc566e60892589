"""Models with experts on grids against one process: every axis, router, capacity and shared expert.

The suite runs a seeded sample in which every pair of two options occurs, `--full` the product.
"""

from __future__ import annotations

import dataclasses
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
    "top": ["1 of 8", "2 of 8", "8 of 16"],
    "capacity": [False, True],
    "shared": [False, True],
    "kind": ["", "sigmoid", "every", "raw"],
    "inner": ["samples", "features"],
    "recompute": ["none", "selective", "full"],
    "collectives": ["again", "keep"],
    "micro_batches": [1, 2],
}
ROUTER, RUN = ("top", "capacity", "shared"), ("inner", "recompute", "collectives", "micro_batches")


def valid(row: dict[str, Any]) -> bool:
    """A model that computes nothing again keeps nothing for it."""
    return row["recompute"] != "none" or row["collectives"] == "again"


def case_of(row: dict[str, Any]) -> Case:
    words = ["capacity"] * row["capacity"] + ["shared"] * row["shared"]
    words += [row["kind"]] * bool(row["kind"])
    run = {name: row[name] for name in RUN}
    return Case(" ".join(["moe", row["top"], *words]), **run, steps=3)


SOME = [
    {"expert": 2},
    {"expert": 2, "row": 2},
    {"expert": 2, "col": 2},
    {"expert": 2, "depth": 2},
    {"pipe": 2, "expert": 2},
    {"data": 2, "expert": 2},
    {"row": 2, "col": 2},
    {"expert": 4},
    {"depth": 4},
    {"expert": 2, "row": 2, "col": 2},
    {"pipe": 2},
    {"expert": 2, "depth": 2, "row": 2},
]
"""Grids that take their turns in the suite: each axis with experts, few of eight ranks."""


def sample() -> list[tuple[dict[str, int], Case]]:
    """Every pair of two options once, each on another grid."""
    rows = pairwise(OPTIONS, valid, 2)
    return [(SOME[i % len(SOME)], case_of(row)) for i, row in enumerate(rows)]


def whole_product() -> list[tuple[dict[str, int], Case]]:
    """Every grid of up to eight ranks and every router, the other options in turn."""
    turns = itertools.cycle(product({k: OPTIONS[k] for k in ("kind", *RUN)}, valid))
    routers = product({k: OPTIONS[k] for k in ROUTER}, lambda row: True)
    return [(grid, case_of({**row, **next(turns)})) for grid in grids() for row in routers]


def grids() -> list[dict[str, int]]:
    """Every way to put 1, 2, 4 or 8 ranks on the axes; at most two stages."""
    found = []
    for degrees in itertools.product((1, 2, 4, 8), repeat=len(AXES)):
        if math.prod(degrees) in (1, 2, 4, 8) and degrees[0] <= 2:
            found.append(dict(zip(AXES, degrees, strict=True)))
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        pairs = whole_product() if metafunc.config.getoption("--full") else sample()
        pairs = [(grid, fitting(case, grid)) for grid, case in pairs]
        names = [f"{label(grid)}-{case.label}" for grid, case in pairs]
        metafunc.parametrize(("degrees", "case"), pairs, ids=names)


def fitting(case: Case, grid: dict[str, int]) -> Case:
    """The case with as many micro-batches as the samples of a rank allow."""
    share = 16 // math.prod(grid.get(axis, 1) for axis in ("data", "expert", "depth"))
    least = grid.get("col", 1) if case.inner == "samples" else 1
    if share // least >= case.micro_batches:
        return case
    return dataclasses.replace(case, micro_batches=1, inner="features")


@functools.cache
def serial(model: str, steps: int) -> Serial:
    return Serial(model, batch_of(model, samples=16, packed=False), LR, CLIP, steps)


def test_experts_equal_one_process(
    pool: Pool, degrees: dict[str, int], case: Case, request: pytest.FixtureRequest
) -> None:
    whole = serial(case.model, case.steps)
    assert whole.extras[0] > 0.0
    results = pool.on_grid(degrees, run_case, case, whole.batch, LR, CLIP)
    assert compare(whole, results) == []
    if math.prod(degrees.values()) == 8 or request.config.getoption("--full"):
        state = {key: assemble(result[key] for result in results) for key in ("after", "optimizer")}
        other = {"expert": 2, "row": 2} if degrees.get("expert") != 2 else {"depth": 2, "col": 2}
        bad = pool.on_grid(other, reload, case, state["after"], state["optimizer"])
        assert [line for lines in bad for line in lines] == []


@pytest.mark.parametrize("degrees", [{"expert": 4}, {"row": 2, "col": 2}], ids=label)
def test_one_expert_gets_all_tokens_or_none(pool: Pool, degrees: dict[str, int]) -> None:
    whole = serial("lopsided", 2)
    idle = [whole.grads[f"blocks.{i}.mlp.up"][0].abs().max().item() for i in range(2)]
    assert idle == [0.0, 0.0]
    results = pool.on_grid(degrees, run_case, Case("lopsided"), whole.batch, LR, CLIP)
    assert compare(whole, results) == []
