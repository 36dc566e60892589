"""Ladder residuals over NCCL: results of one process, bits without overlap."""

from __future__ import annotations

import functools

import pytest

from equivalence import Case, Serial, batch_of, compare, run_case, sized, switched
from pool import NcclPools

pytestmark = pytest.mark.nccl
LR, CLIP, STEPS = 1e-2, 0.5, 3
LADDER = sized(layers=3, residual="'ladder'")
SOME = sized(layers=4, residual="'ladder'", ladder_layers="(2,3)", bias=True)
DEEP = sized(layers=8, residual="'ladder'")
GRIDS = [
    {"row": 2},
    {"row": 4},
    {"row": 2, "col": 2},
    {"depth": 2, "row": 2, "col": 2},
    {"context": 2, "row": 2, "col": 2},
    {"data": 2, "row": 4},
]


@functools.cache
def serial(model: str) -> Serial:
    return Serial(model, batch_of(model, samples=16, packed=False), LR, CLIP, STEPS)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "plain"])
@pytest.mark.parametrize("inner", ["samples", "features"])
@pytest.mark.parametrize("degrees", GRIDS, ids=str)
@pytest.mark.parametrize("model", [LADDER, SOME], ids=["all", "last"])
def test_three_steps_are_those_of_one_process(
    pool: NcclPools, degrees: dict[str, int], inner: str, overlap: bool, model: str
) -> None:
    case = Case(model, inner=inner, overlap=overlap, steps=STEPS)
    whole = serial(model)
    assert compare(whole, pool.on_grid(degrees, run_case, case, whole.batch, LR, CLIP)) == []


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("degrees", [{"pipe": 2, "row": 2}, {"pipe": 4, "row": 2}], ids=str)
@pytest.mark.parametrize("policy", ["message_driven", "zero-bubble"])
def test_stages_of_a_pipeline(
    pool: NcclPools, degrees: dict[str, int], policy: str, recompute: str
) -> None:
    case = Case(DEEP, micro_batches=2, policy=policy, recompute=recompute, steps=STEPS)
    whole = serial(case.model)
    assert compare(whole, pool.on_grid(degrees, run_case, case, whole.batch, LR, CLIP)) == []


@pytest.mark.parametrize("inner", ["samples", "features"])
def test_overlap_changes_no_bit(pool: NcclPools, inner: str) -> None:
    case = Case(LADDER, inner=inner, recompute="full")
    found = pool.on_grid({"depth": 2, "row": 2, "col": 2}, switched, case)
    assert [line for lines in found for line in lines] == []
