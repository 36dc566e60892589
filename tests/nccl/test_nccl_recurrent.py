"""Recurrent depth over NCCL: results of one process, bits without overlap, drawn iterations."""

from __future__ import annotations

import functools

import pytest

from equivalence import Case, Serial, batch_of, compare, run_case, switched
from pool import NcclPools

pytestmark = pytest.mark.nccl
LR, CLIP, STEPS = 1e-2, 0.5, 3
GRIDS = [
    {"row": 2},
    {"col": 4},
    {"depth": 2, "row": 2, "col": 2},
    {"context": 2, "depth": 2, "row": 2},
    {"data": 2, "expert": 2, "col": 2},
    {"depth": 8},
]


@functools.cache
def serial(model: str) -> Serial:
    return Serial(model, batch_of(model, samples=16, packed=False), LR, CLIP, STEPS)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "plain"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("inner", ["samples", "features"])
@pytest.mark.parametrize("degrees", GRIDS, ids=str)
def test_three_steps_are_those_of_one_process(
    pool: NcclPools, degrees: dict[str, int], inner: str, recompute: str, overlap: bool
) -> None:
    case = Case("recurrent", inner=inner, overlap=overlap, recompute=recompute, steps=STEPS)
    whole = serial("recurrent")
    assert compare(whole, pool.on_grid(degrees, run_case, case, whole.batch, LR, CLIP)) == []


@pytest.mark.parametrize("inner", ["samples", "features"])
def test_overlap_changes_no_bit(pool: NcclPools, inner: str) -> None:
    found = pool.on_grid({"depth": 2, "row": 2, "col": 2}, switched, Case("recurrent", inner=inner))
    assert [line for lines in found for line in lines] == []
