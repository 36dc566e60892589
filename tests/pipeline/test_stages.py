"""Any pipeline equals one process: policies, grids, tied weights, documents, random delays.

By default a sample in which every axis and every value of an option occurs, each with its own seed
of delays; `--full` runs every grid with every policy, model and way for col, and a third step.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest

from equivalence import DEEP, Case, Serial, batch_of, compare, reload, run_case
from grids import label, pairwise, product
from pool import Pool
from states import assemble

LR, CLIP = 1e-2, 0.5
OPTIONS: dict[str, list[Any]] = {
    "model": [*DEEP],
    "policy": ["message_driven", "gpipe", "1f1b", "interleaved", "zero-bubble"],
    "chunks": [1, 2],
    "micro_batches": [1, 2, 4],
    "packed": [False, True],
    "inner": ["samples", "features"],
    "recompute": ["none", "full"],
    "keep": [False, True],
    "spread": [False, True],
}


def grids() -> list[dict[str, int]]:
    """Every way to put up to 8 ranks on pipe (2 or more), data, depth, row and col."""
    axes = ("pipe", "data", "depth", "row", "col")
    every = itertools.product((2, 4, 8), *[(1, 2, 4)] * 4)
    return [dict(zip(axes, d, strict=True)) for d in every if math.prod(d) <= 8]


GRIDS = grids()


def valid(row: dict[str, Any]) -> bool:
    """Orders are for one chunk or for several."""
    if row["policy"] == "message_driven":
        return True
    return (row["policy"] == "interleaved") == (row["chunks"] > 1)


def fits(degrees: dict[str, int], case: Case) -> bool:
    """Eight parts make eight virtual stages; col needs samples to split."""
    share = 16 // (degrees["data"] * degrees["depth"]) // case.micro_batches
    samples = case.inner == "features" or share % degrees["col"] == 0
    return degrees["pipe"] * case.chunks <= 8 and share > 0 and samples


def sample() -> list[tuple[dict[str, int], Case]]:
    """Few cases with every axis beside pipe and most pairs of options, each with its own delays.

    Where a row of options does not fit on a grid, the next one that fits takes its place. The suite
    runs some of the cases: see the marker `sample`.
    """
    rows, found = pairwise(OPTIONS, valid), list[tuple[dict[str, int], Case]]()
    some = [grid for grid in GRIDS if math.prod(grid.values()) <= 4 or grid["pipe"] == 8]
    some.append({**dict.fromkeys(GRIDS[0], 1), "pipe": 2, "row": 2, "col": 2})
    for i in range(max(len(rows), len(some))):
        for row in rows[i % len(rows) :] + rows:
            case = Case(**row, delay=i)
            if fits(some[i % len(some)], case):
                found.append((some[i % len(some)], case))
                break
    return found


def whole_product() -> list[tuple[dict[str, int], Case]]:
    """Every grid with every model, policy, number of chunks and way for col."""
    keys = ("model", "policy", "chunks", "inner")
    both = (False, True)
    rest = itertools.cycle(itertools.product((4, 1, 2), both, ("none", "full"), both, both))
    found = []
    every = itertools.product(GRIDS, product({k: OPTIONS[k] for k in keys}, valid))
    for i, (grid, row) in enumerate(every):
        micro_batches, packed, recompute, keep, spread = next(rest)
        more = {"micro_batches": micro_batches, "packed": packed, "recompute": recompute}
        more["steps"] = 3
        case = Case(**row, **more, keep=keep, spread=spread, delay=i)
        if fits(grid, case):
            found.append((grid, case))
    return found


@functools.cache
def serial(model: str, packed: bool, steps: int) -> Serial:
    """One process."""
    return Serial(model, batch_of(model, samples=16, packed=packed), LR, CLIP, steps)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        pairs = whole_product() if metafunc.config.getoption("--full") else sample()
        names = [
            f"{label(grid)}-{case.policy.replace('-', '_')}-chunks{case.chunks}-{case.label}"
            f"{'-keep' * case.keep}{'-spread' * case.spread}"
            for grid, case in pairs
        ]
        metafunc.parametrize(("degrees", "case"), pairs, ids=names)


@pytest.mark.sample(3)
@pytest.mark.nccl
def test_a_pipeline_equals_one_process(pool: Pool, degrees: dict[str, int], case: Case) -> None:
    """And, of some cases, the state reloads bit for bit on another grid with stages."""
    whole = serial(case.model, case.packed, case.steps)
    results = pool.on_grid(degrees, run_case, case, whole.batch, LR, CLIP)
    assert compare(whole, results) == []
    if case.delay % 4:
        return
    state = {key: assemble(result[key] for result in results) for key in ("after", "optimizer")}
    other = GRIDS[(GRIDS.index(degrees) * 7 + 3) % len(GRIDS)]
    plain = Case(case.model, inner="features", steps=case.steps)
    bad = pool.on_grid(other, reload, plain, state["after"], state["optimizer"])
    assert [line for lines in bad for line in lines] == [], f"reloaded on {label(other)}"
