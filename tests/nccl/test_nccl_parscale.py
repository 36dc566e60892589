"""Models with streams over NCCL: results of one process, bits without overlap."""

from __future__ import annotations

import functools

import pytest

from equivalence import Case, Serial, batch_of, compare, run_case, sized, switched
from pool import NcclPools

pytestmark = pytest.mark.nccl
LR, CLIP, STEPS = 1e-2, 0.5, 3
GRIDS = [
    {"row": 2},
    {"col": 4},
    {"depth": 2, "row": 2, "col": 2},
    {"context": 2, "row": 2, "col": 2},
    {"data": 2, "context": 4},
]
STREAMS = {"parscale_streams": 2, "parscale_prefix_tokens": 3}


@functools.cache
def serial(model: str, packed: bool) -> Serial:
    return Serial(model, batch_of(model, samples=16, packed=packed), LR, CLIP, STEPS)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "plain"])
@pytest.mark.parametrize("inner", ["samples", "features"])
@pytest.mark.parametrize("degrees", GRIDS, ids=str)
def test_three_steps_are_those_of_one_process(
    pool: NcclPools, degrees: dict[str, int], inner: str, overlap: bool
) -> None:
    case = Case(
        sized(layers=2, **STREAMS), inner=inner, overlap=overlap, packed=overlap, steps=STEPS
    )
    whole = serial(case.model, case.packed)
    assert compare(whole, pool.on_grid(degrees, run_case, case, whole.batch, LR, CLIP)) == []


@pytest.mark.parametrize("degrees", [{"pipe": 2}, {"pipe": 2, "row": 2, "col": 2}], ids=str)
@pytest.mark.parametrize("policy", ["message_driven", "zero-bubble"])
def test_stages_of_a_pipeline(pool: NcclPools, degrees: dict[str, int], policy: str) -> None:
    case = Case(sized(layers=6, **STREAMS), micro_batches=2, policy=policy, steps=STEPS)
    whole = serial(case.model, case.packed)
    assert compare(whole, pool.on_grid(degrees, run_case, case, whole.batch, LR, CLIP)) == []


def test_experts_of_a_model_with_streams(pool: NcclPools) -> None:
    model = sized(layers=2, experts_per_token=2, experts=8, **STREAMS)
    case = Case(model, steps=STEPS)
    whole = serial(model, False)
    degrees = {"expert": 2, "row": 2, "col": 2}
    assert compare(whole, pool.on_grid(degrees, run_case, case, whole.batch, LR, CLIP)) == []


@pytest.mark.parametrize("inner", ["samples", "features"])
def test_overlap_changes_no_bit(pool: NcclPools, inner: str) -> None:
    case = Case(sized(layers=2, **STREAMS), inner=inner)
    found = pool.on_grid({"depth": 2, "row": 2, "col": 2}, switched, case)
    assert [line for lines in found for line in lines] == []
