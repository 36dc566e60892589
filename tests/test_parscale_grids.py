"""ParScale on the grid: a model with streams equals one process in float64 on grids of all axes."""

from __future__ import annotations

import functools
import itertools
import math
import random
from typing import Any

import pytest

from equivalence import (
    Case,
    Serial,
    batch_of,
    compare,
    run_case,
    sized,
)
from grids import label
from pool import Pool

pytestmark = pytest.mark.nccl
LR, CLIP = 1e-2, 0.5
AXES = ("pipe", "data", "expert", "context", "depth", "row", "col")
STREAMS = {"parscale_streams": 2, "parscale_prefix_tokens": 3}


def list_cases() -> list[Any]:
    """All grids of up to 8 ranks with both splits of col, overlapped and not; the rest is drawn."""
    sizes = itertools.product((1, 2, 4, 8), repeat=len(AXES))
    grids = [dict(zip(AXES, some, strict=True)) for some in sizes if math.prod(some) <= 8]
    cases = []
    for number, degrees in enumerate(grids):
        for inner, overlap in itertools.product(("samples", "features"), (True, False)):
            drawn = random.Random(f"{number} {inner} {overlap}")
            stages = degrees["pipe"] > 1
            changes: dict[str, Any] = {"layers": 6 if stages else 2, **STREAMS}
            changes["parscale_streams"] = drawn.choice((2, 3, 4))
            changes["kv_heads"] = drawn.choice((1, 2, 8))
            if degrees["expert"] > 1 or drawn.random() < 0.2:
                changes |= {"experts_per_token": 2, "experts": 8}
            methods = ["auto", "kv_gather", "ring"]
            heads = 8 // degrees["row"] // (degrees["col"] if inner == "features" else 1)
            if heads % degrees["context"] == 0 and changes["kv_heads"] == 8:
                methods.append("ulysses")
            case = Case(
                sized(**changes),
                inner=inner,
                overlap=overlap,
                recompute=drawn.choice(("none", "selective", "full")),
                micro_batches=2 if stages else 1,
                packed=drawn.random() < 0.5,
                policy=drawn.choice(("message_driven", "1f1b", "zero-bubble")),
                spread=stages and drawn.random() < 0.3,
                context_attention=drawn.choice(methods),
                weights_over=drawn.choice(("depth", "depth_context")),
                steps=3,
            )
            name = f"{label(degrees)}-{case.label}{'-overlap' * overlap}-{case.context_attention}"
            cases.append(pytest.param(degrees, case, id=name))
    return cases


@functools.cache
def serial(model: str, packed: bool) -> Serial:
    return Serial(model, batch_of(model, samples=16, packed=packed), LR, CLIP, steps=3)


def differences(pool: Pool, degrees: dict[str, int], case: Case) -> list[str]:
    """What differs from one process: losses, gradients, norms, weights, and communication."""
    whole = serial(case.model, case.packed)
    return compare(whole, pool.on_grid(degrees, run_case, case, whole.batch, LR, CLIP))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("degrees", "case"), list_cases())
def test_a_model_with_streams_equals_one_process(
    pool: Pool, degrees: dict[str, int], case: Case
) -> None:
    assert differences(pool, degrees, case) == []
