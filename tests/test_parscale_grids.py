"""ParScale on the grid: a model with streams equals one process in float64 on grids of all axes."""

from __future__ import annotations

import functools
import itertools
import math
import random
from typing import Any
from unittest import mock

import pytest
import torch

from equivalence import (
    Case,
    Serial,
    batch_of,
    compare,
    copied,
    gradients,
    micros_of,
    reload,
    run_case,
    sized,
    worst,
)
from grids import label
from pool import Pool
from ranvier.grid import Grid
from ranvier.models import decoder
from ranvier.models.prefix_attention import prefix_rows
from ranvier.optim.optimizer import Optimizer
from ranvier.optim.rules import Muon, Rule
from ranvier.optim.state_store import StatePlacement
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.train.step import forward_backward
from states import assemble

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
def serial(model: str, packed: bool, rule: Rule | None = None) -> Serial:
    batch = batch_of(model, samples=16, packed=packed)
    return Serial(model, batch, LR, CLIP, steps=3, rule=rule)


def differences(pool: Pool, degrees: dict[str, int], case: Case) -> list[str]:
    """What differs from one process: losses, gradients, norms, weights, and communication."""
    whole = serial(case.model, case.packed, case.rule)
    return compare(whole, pool.on_grid(degrees, run_case, case, whole.batch, LR, CLIP))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("degrees", "case"), list_cases())
def test_a_model_with_streams_equals_one_process(
    pool: Pool, degrees: dict[str, int], case: Case
) -> None:
    assert differences(pool, degrees, case) == []


def test_the_state_reloads_on_another_grid(pool: Pool) -> None:
    """Checkpoints know no grid: prefixes are split over kv heads, or whole."""
    case = Case(sized(layers=2, **STREAMS), inner="features", steps=3)
    whole = serial(case.model, False)
    results = pool.on_grid({"depth": 2, "row": 2}, run_case, case, whole.batch, LR, CLIP)
    state = [assemble(result[key] for result in results) for key in ("after", "optimizer")]
    found = pool.on_grid({"row": 2, "col": 2}, reload, Case(case.model, steps=3), *state)
    assert [line for lines in found for line in lines] == []


# ---- other ways to run the model -----------------------------------------------------------------


def run_with_mixed_streams(grid: Grid, case: Case, batch: Any) -> dict[str, Any]:
    """All ranks of col take the prefixes of the first samples."""
    mixed = staticmethod(lambda prefix, first, samples: prefix_rows(prefix, first + 1, samples))
    with mock.patch.object(decoder.AttentionCore, "prefix_rows", mixed):
        return run_case(grid, case, batch, LR, CLIP)


def test_prefixes_of_other_streams_are_noticed(pool: Pool) -> None:
    case = Case(sized(layers=2, **STREAMS), steps=3)
    whole = serial(case.model, False)
    lines = compare(whole, pool.on_grid({"col": 2}, run_with_mixed_streams, case, whole.batch))
    assert any("prefix_k" in line for line in lines), lines


def compiled_differences(grid: Grid, case: Case) -> list[str]:
    """What a compiled model computes otherwise than one process."""
    torch._dynamo.reset()
    whole = serial(case.model, case.packed)
    model = case.on(grid, compiled="aot_eager")
    loss = forward_backward(model, micros_of(whole.batch, grid, 1)).item()
    lines = worst("loss", torch.tensor(loss), torch.tensor(whole.losses[0]), 1e-12)
    for name, (part, shard) in gradients(get_parallel_model(model)).items():
        want = shard.slice_from(whole.grads[name])
        scale = whole.grads[name].abs().max().item()
        lines += worst(f"gradient of {name}", part.cpu(), want, 1e-12, scale)
    return lines


@pytest.mark.compiled
@pytest.mark.full
@pytest.mark.parametrize(
    ("degrees", "recompute"),
    [({"data": 1}, "none"), ({"row": 2}, "selective"), ({"depth": 2, "col": 2}, "full")],
    ids=str,
)
def test_compiled_blocks_equal_one_process(
    pool: Pool, degrees: dict[str, int], recompute: str
) -> None:
    case = Case(sized(layers=2, **STREAMS), recompute=recompute, packed=True)
    found = pool.on_grid(degrees, compiled_differences, case)
    assert [line for lines in found for line in lines] == []


OTHERS = [
    ({"depth": 2}, {}, {"token_chunk": 4}),
    ({"context": 2, "depth": 2}, {}, {"token_chunk": 4}),
    ({"context": 2}, {"sliding_window": 3}, {"packed": True}),
    ({"context": 2, "row": 2}, {"attn_logit_softcap": 2.0}, {"recompute": "full"}),
    ({"row": 2, "col": 2}, {"sliding_window": 3}, {"packed": True, "recompute": "selective"}),
    ({"pipe": 2, "col": 2}, {"layers": 4}, {"chunks": 2, "micro_batches": 2}),
    ({"pipe": 2, "context": 2}, {"tie_embeddings": True}, {"spread": True, "micro_batches": 2}),
    ({"row": 2, "col": 2}, {"bias": True, "dropout": 0.0}, {"packed": True}),
    ({"col": 2, "row": 2}, {}, {"collectives": "save", "recompute": "full"}),
    (
        {"context": 2, "expert": 2},
        {"experts_per_token": 2, "experts": 8, "capacity_factor": 0.75},
        {},
    ),
    ({"depth": 2, "row": 2}, {}, {"rule": Muon()}),
]
"""Degrees, settings of the model, and of the case."""


@pytest.mark.sample(2)
@pytest.mark.parametrize(("degrees", "changes", "settings"), OTHERS, ids=str)
def test_other_settings_equal_one_process(
    pool: Pool, degrees: dict[str, int], changes: dict[str, Any], settings: dict[str, Any]
) -> None:
    model = sized(**{"layers": 2, **STREAMS, **changes})
    assert differences(pool, degrees, Case(model, steps=3, **settings)) == []


def test_adapters_of_a_model_with_streams(pool: Pool) -> None:
    """Prefixes and the average are frozen, and their gradients are not computed."""
    assert differences(pool, {"row": 2, "col": 2}, Case("streams lora", steps=3)) == []


def offloaded_differences(grid: Grid) -> list[str]:
    """What states and weights on the host change, in one bit."""
    case = Case(sized(layers=2, **STREAMS))
    batch = batch_of(case.model, samples=16, packed=False)
    results = []
    for home, room in ((None, None), (StatePlacement("host", tile_elements=64), 2**30)):
        model = case.on(grid, room=room)
        parallel = get_parallel_model(model)
        optimizer = Optimizer(parallel.bucket_scheduler, lr=LR, clip=CLIP, home=home)
        numbers = []
        for _ in range(3):
            loss = forward_backward(model, micros_of(batch, grid, 1))
            numbers += [loss.item(), optimizer.step().item()]
        results.append((numbers, copied(parallel.sharded_state())))
    (numbers, state), (others, rest) = results
    lines = [] if numbers == others else [f"{numbers} {others}"]
    return lines + [name for name, (x, _) in state.items() if not torch.equal(x, rest[name][0])]


def test_offloading_changes_no_bit(pool: Pool) -> None:
    assert pool.on_grid({"depth": 2}, offloaded_differences) == [[], []]


def test_dropout_does_not_depend_on_the_grid(pool: Pool) -> None:
    """Each stream of a sample has masks of its own."""
    case = Case(sized(layers=2, dropout=0.2, **STREAMS), steps=2)
    batch = batch_of(case.model, samples=8, packed=True)
    one, *_ = pool.on_grid({"data": 1}, run_case, case, batch, LR, CLIP)
    for degrees in ({"context": 2, "row": 2}, {"data": 2, "col": 2}):
        for found in pool.on_grid(degrees, run_case, case, batch, LR, CLIP):
            assert found["lines"] == []
            assert found["losses"] == pytest.approx(one["losses"], rel=1e-12)
            assert found["norms"] == pytest.approx(one["norms"], rel=1e-9)
