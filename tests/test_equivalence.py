"""Any grid equals one process: all leaves and all models, on every grid of 1, 2, 4 and 8 ranks.

For each: losses, every gradient, gradient norms and weights after steps equal plain PyTorch's; the
recorded communication is the predicted one; the state reloads bit for bit on another grid. By
default a sample of two steps in which every model, every value of an option and every axis with two
and four ranks occurs; `--full` runs the whole product, with a third step.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from typing import Any

import pytest

import leaf_cases
from equivalence import Case, Serial, batch_of, compare, reload, run_case, switched
from grids import grids, label, pairwise, product
from hf_models import HF_MODELS
from pool import Pool
from ranvier.models import EXAMPLES
from states import assemble

pytestmark = pytest.mark.nccl
LR, CLIP = 1e-2, 0.5
GRIDS = grids()
SOME = [
    grid
    for grid in GRIDS
    if math.prod(grid.values()) < 8 or max(grid.values()) == 2 or grid["row"] == 8
]
"""Grids of the suite: up to four ranks, three axes of two, and eight ranks on row.

Eight ranks on few cores take most of the time.
"""
OPTIONS: dict[str, list[Any]] = {
    "model": [*EXAMPLES, *HF_MODELS],
    "inner": ["samples", "features"],
    "overlap": [True, False],
    "recompute": ["none", "selective", "full"],
    "collectives": ["rerun", "save"],
    "micro_batches": [1, 2],
    "packed": [False, True],
    "fast": [True, False],
}

KEYS = ("model", "inner", "recompute", "fast")


def valid(row: dict[str, Any]) -> bool:
    """The reference has nothing to overlap; in Hugging Face models col splits features.

    A block that computes nothing again keeps nothing for it.
    """
    if row["model"] in HF_MODELS and row["inner"] != "features":
        return False
    if row["recompute"] == "none" and row.get("collectives") == "save":
        return False
    return row["fast"] or row.get("overlap", True)


@functools.cache
def serial(model: str, packed: bool, steps: int, device: str = "cpu") -> Serial:
    """One process; the number of micro-batches makes no difference to it.

    device: rotary angles of Hugging Face's models are made in 32 bits, which devices round apart.
    """
    return Serial(model, batch_of(model, samples=16, packed=packed), LR, CLIP, steps, device)


def sample() -> list[tuple[dict[str, int], Case]]:
    """Few cases in which every grid of SOME and every pair of two options' values occurs.

    The suite runs some of them, in which every value occurs: see the marker `sample`.
    """
    cases = pairwise(OPTIONS, valid)
    rounds = range(max(len(cases), len(SOME)))
    return [(SOME[i % len(SOME)], Case(**cases[i % len(cases)])) for i in rounds]


def whole_product() -> list[tuple[dict[str, int], Case]]:
    """Every grid with every model, way for col and recomputation.

    A third of them runs with the reference, too. A case with overlaps on computes the gradients
    with all of them off as well, which must be equal to the bit. Micro-batches, packing and
    collectives are drawn.
    """
    found, drawn = [], random.Random(0)
    for grid, row in itertools.product(GRIDS, product({k: OPTIONS[k] for k in KEYS}, valid)):
        more = {k: drawn.choice(OPTIONS[k]) for k in ("micro_batches", "packed", "collectives")}
        drawn_recompute = drawn.choice(OPTIONS["recompute"])
        if not valid({**row, **more}):
            more["collectives"] = "rerun"
        if row["fast"] or row["recompute"] == drawn_recompute:
            found.append((grid, Case(**row, **more, steps=3, both=row["fast"])))
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    full = metafunc.config.getoption("--full")
    if "case" in metafunc.fixturenames:
        pairs = whole_product() if full else sample()
        names = [f"{label(grid)}-{case.label}" for grid, case in pairs]
        metafunc.parametrize(("degrees", "case"), pairs, ids=names)
    elif "leaves_on" in metafunc.fixturenames:
        every = [(grid, inner, (True, False)) for grid in GRIDS for inner in OPTIONS["inner"]]
        some = [(g, OPTIONS["inner"][i % 2], (i // 2 % 2 == 0,)) for i, g in enumerate(SOME)]
        chosen = every if full else some
        names = [f"{label(grid)}-{inner}-{ways}" for grid, inner, ways in chosen]
        metafunc.parametrize("leaves_on", chosen, ids=names)


def test_the_whole_product_has_every_grid_and_every_option() -> None:
    found = whole_product()
    assert all(grid in [other for other, _ in found] for grid in GRIDS)
    for name in {*OPTIONS} - {"overlap"}:  # off in every case with both
        assert {getattr(case, name) for _, case in found} == {*OPTIONS[name]}, name


@pytest.mark.sample(4)
def test_model_equals_one_process(
    pool: Pool, degrees: dict[str, int], case: Case, request: pytest.FixtureRequest
) -> None:
    theirs = case.model in HF_MODELS and request.config.getoption("--nccl")
    whole = serial(case.model, case.packed, case.steps, "cuda" if theirs else "cpu")
    results = pool.on_grid(degrees, run_case, case, whole.batch, LR, CLIP)
    assert compare(whole, results) == []
    if GRIDS.index(degrees) % 5 and not request.config.getoption("--full"):
        return  # files of other grids are loaded in tests/checkpoint/test_grids.py
    state = {key: assemble(result[key] for result in results) for key in ("after", "optimizer")}
    other = GRIDS[(GRIDS.index(degrees) * 11 + 5) % len(GRIDS)]
    bad = pool.on_grid(other, reload, case, state["after"], state["optimizer"])
    assert [line for lines in bad for line in lines] == [], f"reloaded on {label(other)}"


@pytest.mark.sample(3)
def test_leaves_equal_serial(
    pool: Pool, leaves_on: tuple[dict[str, int], str, tuple[bool, ...]]
) -> None:
    degrees, inner, ways = leaves_on
    found = pool.on_grid(degrees, leaf_cases.check_all, inner, ways)
    assert [line for lines in found for line in lines] == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("degrees", "inner"),
    [
        ({"depth": 2, "row": 2, "col": 2}, "samples"),
        pytest.param({"data": 2, "row": 2}, "features", marks=pytest.mark.full),
    ],
    ids=["cube", "data"],
)
def test_switching_overlaps_off_changes_no_bit(
    pool: Pool, degrees: dict[str, int], inner: str
) -> None:
    case = Case("biased", inner=inner)
    assert [x for lines in pool.on_grid(degrees, switched, case) for x in lines] == []
