"""Models with experts on grids against one process: every axis, router, capacity and shared expert.

The suite runs a seeded sample in which every axis and every value of an option occurs, `--full`
every grid of up to eight ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from equivalence import Case, Serial, batch_of, compare, reload, run_case
from expert_cases import batch_with_alike
from grids import label, pairwise, product
from pool import Pool
from ranvier import counter_rng
from ranvier.models.moe import MoELayer
from states import assemble

LR, CLIP = 1e-2, 1.0
AXES = ("pipe", "data", "expert", "depth", "row", "col")
OPTIONS: dict[str, list[Any]] = {
    "top": ["1 of 8", "2 of 8", "8 of 16"],
    "capacity": [False, True],
    "shared": [False, True],
    "kind": ["", "sigmoid", "every", "raw"],
    "inner": ["samples", "features"],
    "recompute": ["none", "selective", "full"],
    "collectives": ["rerun", "save"],
    "micro_batches": [1, 2],
}
ROUTER, RUN = ("top", "capacity", "shared"), ("inner", "recompute", "collectives", "micro_batches")


def valid(row: dict[str, Any]) -> bool:
    """A model that computes nothing again keeps nothing for it."""
    return row["recompute"] != "none" or row["collectives"] == "rerun"


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
    """Few cases in which every grid of SOME and every pair of two options' values occurs.

    The suite runs some of them, in which every value occurs: see the marker `sample`.
    """
    rows = pairwise(OPTIONS, valid, 2)
    return [(SOME[i % len(SOME)], case_of(row)) for i, row in enumerate(rows)]


def whole_product() -> list[tuple[dict[str, int], Case]]:
    """Every grid of up to eight ranks and every router, the other options in turn."""
    turns = itertools.cycle(product({k: OPTIONS[k] for k in ("kind", *RUN)}, valid))
    routers = product({k: OPTIONS[k] for k in ROUTER}, lambda row: True)
    found = []
    for grid, row in itertools.product(grids(), routers):
        deep = {"kind": "deep"} if grid["pipe"] > 2 else {}  # layers for all stages
        found.append((grid, case_of({**row, **next(turns), **deep})))
    return found


def grids() -> list[dict[str, int]]:
    """Every way to put 1, 2, 4 or 8 ranks on the axes."""
    every = itertools.product((1, 2, 4, 8), repeat=len(AXES))
    good = (degrees for degrees in every if math.prod(degrees) in (1, 2, 4, 8))
    return [dict(zip(AXES, degrees, strict=True)) for degrees in good]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        is_full = metafunc.config.getoption("--full")
        pairs = whole_product() if is_full else sample()
        pairs = [(grid, fitting(case, grid)) for grid, case in pairs]
        if not is_full:
            pairs = [(grid, dataclasses.replace(case, steps=2)) for grid, case in pairs]
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


@pytest.mark.sample(2)
@pytest.mark.nccl
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


def some(grids: list[dict[str, int]], more: list[dict[str, int]]) -> list[Any]:
    """Grids as parameters; more of them with `--full`."""
    rest = [pytest.param(grid, marks=pytest.mark.full, id=label(grid)) for grid in more]
    return [*(pytest.param(grid, id=label(grid)) for grid in grids), *rest]


LOPSIDED = some(
    [{"expert": 4}, {"expert": 2, "row": 2}],
    [{"expert": 8}, {"row": 2, "col": 2}, {"expert": 2, "row": 2, "col": 2}],
)


@pytest.mark.sample(1)
@pytest.mark.nccl
@pytest.mark.parametrize("degrees", LOPSIDED)
def test_one_expert_gets_all_tokens_or_none(pool: Pool, degrees: dict[str, int]) -> None:
    whole = serial("lopsided", 2)
    idle = [whole.grads[f"blocks.{i}.mlp.up"][0].abs().max().item() for i in range(2)]
    assert idle == [0.0, 0.0]
    results = pool.on_grid(degrees, run_case, Case("lopsided"), whole.batch, LR, CLIP)
    assert compare(whole, results) == []


@pytest.mark.nccl
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("degrees", "alike"),
    [
        ({"expert": 2, "row": 2}, 4),
        ({"expert": 2, "row": 2}, 8),
        ({"expert": 2, "col": 2}, 8),
        pytest.param({"expert": 2, "row": 2, "col": 2}, 4, marks=pytest.mark.full),
        pytest.param({"expert": 2, "row": 2, "col": 2}, 8, marks=pytest.mark.full),
        pytest.param({"expert": 2, "row": 2, "depth": 2}, 8, marks=pytest.mark.full),
        pytest.param({"expert": 4, "row": 2}, 4, marks=pytest.mark.full),
        pytest.param({"data": 2, "expert": 2, "row": 2}, 8, marks=pytest.mark.full),
        pytest.param({"row": 4}, 4, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_experts_without_rows(pool: Pool, degrees: dict[str, int], alike: int) -> None:
    """Experts of some ranks get no row from one rank of row, or none at all."""
    case = Case("moe 1 of 8 capacity shared", recompute="full", collectives="save", steps=3)
    batch = batch_with_alike(case.model, alike)
    whole = Serial(case.model, batch, LR, CLIP, case.steps)
    results = pool.on_grid(degrees, run_case, case, batch, LR, CLIP)
    assert compare(whole, results) == []


JITTERED = some(
    [{}, {"expert": 2, "row": 2}, {"pipe": 2, "depth": 2}],
    [{"row": 2, "col": 2}, {"pipe": 2, "data": 2, "depth": 2}, {"expert": 2, "row": 2, "col": 2}],
)


@pytest.mark.sample(1)
@pytest.mark.nccl
@pytest.mark.parametrize("degrees", JITTERED)
def test_jitter_is_the_same_on_every_grid(pool: Pool, degrees: dict[str, int]) -> None:
    still, shaken = serial("moe 2 of 8 capacity", 2), keyed()
    assert abs(still.losses[0] - shaken.losses[0]) > 1e-4
    case = Case("jitter", recompute="full")
    results = pool.on_grid(degrees, run_case, case, shaken.batch, LR, CLIP)
    assert compare(shaken, results) == []


@functools.cache
def keyed() -> Serial:
    """The plain model with the noise of grids: a function of seed, layer, sample, token, expert."""
    layers = itertools.cycle(f"blocks.{i}.mlp" for i in range(2))

    def noise(_: MoELayer, logits: Tensor) -> Tensor:
        bits = torch.tensor(counter_rng.random_key(0, "jitter", next(layers)))
        samples, tokens = torch.arange(16).view(-1, 1, 1), torch.arange(8).view(-1, 1)
        for counter in (samples, tokens, torch.arange(8)):
            bits = counter_rng.scramble_bits(bits ^ counter)
        return (counter_rng.uniform_bits(bits).double() / 2**31 - 1.0).view_as(logits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MoELayer, "router_noise", noise)
        return Serial("jitter", batch_of("jitter", samples=16, packed=False), LR, CLIP)
