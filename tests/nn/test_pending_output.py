"""Outputs whose reduction is pending: the trace shows the overlap, and no bit depends on it.

Blocks with a ladder residual run recomputed, compiled, in chunks of tokens, offloaded, with
adapters, experts and dropout, compared with one process.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

import leaf_cases
from equivalence import (
    Case,
    Serial,
    batch_of,
    compare,
    gradients,
    micros_of,
    run_case,
    sized,
    switched,
    worst,
)
from offload_cases import ALONE, ON_GRID, passes
from pool import Pool
from ranvier.grid import Grid
from ranvier.nn.linear import Linear
from ranvier.nn.pending_output import PendingOutput
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.sharding import ShardedStateDict
from ranvier.trace import COMPUTE, Event
from ranvier.train.step import forward_backward
from states import assemble

LR, CLIP = 1e-2, 0.5
LADDER = sized(layers=2, residual="'ladder'")
DEEP = sized(layers=4, residual="'ladder'")


@functools.cache
def serial(model: str) -> Serial:
    return Serial(model, batch_of(model, samples=8, packed=False), LR, CLIP)


def differences(pool: Pool, degrees: dict[str, int], case: Case) -> list[str]:
    """What differs from one process: losses, gradients, norms, weights, and communication."""
    whole = serial(case.model)
    return compare(whole, pool.on_grid(degrees, run_case, case, whole.batch, LR, CLIP))


# ---- the overlap ---------------------------------------------------------------------------------


def traced(grid: Grid, model: str, overlap: tuple[str, ...], recompute: str) -> list[Event]:
    """Events of a step."""
    built = Case(model, recompute=recompute).on(grid, overlap=overlap)
    micros = micros_of(batch_of(model, samples=8, packed=False), grid, 1)
    with grid.trace.record_events() as events:
        forward_backward(built, micros)
    return events


def find(events: list[Event], op: str, where: str) -> list[Event]:
    """Events of a layer, in order."""
    return [event for event in events if event.op == op and event.where == where]


def check_overlap(events: list[Event]) -> None:
    """Each reduction, and the gather of its gradient, is in flight while another module runs."""
    for first, then in (("0.attention.o", "0.mlp"), ("0.mlp.down", "1.attention")):
        entrance = "enter" if then.endswith("mlp") else "qkv"
        exit = "down" if then.endswith("mlp") else "o"
        (reduction,) = find(events, "reduce_scatter", f"blocks.{first}")
        gather, *_ = find(events, "all_gather", f"blocks.{then}.{entrance}")
        (later,) = find(events, "reduce_scatter", f"blocks.{then}.{exit}")
        assert reduction.issue_time < gather.issue_time, "issued before the module began"
        assert reduction.wait_time > later.issue_time, "awaited after its last product"
        (backward,) = find(events, "all_gather", f"blocks.{first}")
        began, ended = (
            find(events, COMPUTE, f"dW blocks.{then}.{name}")[0] for name in (exit, entrance)
        )
        assert backward.issue_time < began.issue_time, "issued before the module's backward pass"
        assert backward.wait_time >= ended.done_time, "awaited after it"


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.full)])
def test_reductions_run_behind_the_next_module(pool: Pool, recompute: str) -> None:
    for events in pool.on_grid({"row": 2}, traced, LADDER, ("residual",), recompute):
        check_overlap(events)


def test_off_means_awaited_at_once(pool: Pool) -> None:
    for events in pool.on_grid({"row": 2}, traced, LADDER, (), "none"):
        for event, then in itertools.pairwise(events):
            if event.op != COMPUTE:
                assert event.wait_time <= then.issue_time
        # The test can fail: nothing is left to overlap.
        with pytest.raises(AssertionError, match="awaited after its last product"):
            check_overlap(events)


def test_a_serial_model_has_nothing_pending(pool: Pool) -> None:
    serial_model = sized(layers=2)
    for events in pool.on_grid({"row": 2}, traced, serial_model, ("residual",), "none"):
        with pytest.raises(AssertionError, match=r"issued before the module began|awaited after"):
            check_overlap(events)


@pytest.mark.parametrize(
    ("degrees", "case"),
    [
        ({"row": 2}, Case(LADDER, recompute="full")),
        pytest.param(
            {"depth": 2, "row": 2, "col": 2},
            Case(LADDER, inner="features", recompute="selective"),
            marks=pytest.mark.full,
        ),
    ],
    ids=["row", "cube"],
)
def test_switching_overlaps_off_changes_no_bit(
    pool: Pool, degrees: dict[str, int], case: Case
) -> None:
    assert [line for lines in pool.on_grid(degrees, switched, case) for line in lines] == []


def pending_layers(grid: Grid, model: str, compiled: str) -> list[str]:
    """Layers whose reduction is pending while the next module runs."""
    parallel = get_parallel_model(Case(model).on(grid, compiled=compiled))
    layers = parallel.layers.items()
    return [name for name, one in layers if isinstance(one, Linear) and one.defers_reduction]


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        (LADDER, "0.attention.o 0.mlp.down 1.attention.o 1.mlp.down"),
        # The serial layer before a ladder layer leaves the addition of its MLP output.
        (sized(layers=3, residual="'ladder'", ladder_layers="(1,)"), "0.mlp.down 1.* 1.*"),
        (sized(layers=1, residual="'ladder'", norm_position="'both'"), ""),
        (sized(layers=1, residual="'ladder'", dropout=0.1), ""),
        ("ladder dora", ""),
        ("ladder lora", "0.attention.o 0.mlp.down 1.attention.o 1.mlp.down"),
    ],
)
def test_which_outputs_are_pending(model: str, layers: str) -> None:
    """Norms, dropout and adapters read an output at once."""
    grid = Grid({"row": 2}, rank=0, connected=False)
    want = [
        f"blocks.{name}" for name in layers.replace("1.* 1.*", "1.attention.o 1.mlp.down").split()
    ]
    assert pending_layers(grid, model, "") == want
    assert pending_layers(grid, model, "aot_eager") == []


# ---- other ways to run a block -------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("degrees", "case"),
    [
        ({"row": 2}, Case("ladder dora", recompute="full")),
        ({"row": 2}, Case("ladder lora", recompute="selective", collectives="save")),
        ({"row": 2, "col": 2}, Case("ladder lora", inner="features", recompute="full")),
        ({}, Case(DEEP, token_chunk=8, recompute="full")),
        ({"context": 2}, Case(DEEP, token_chunk=2)),
        ({"pipe": 2}, Case(DEEP, token_chunk=8, micro_batches=2, recompute="selective")),
        (
            {"expert": 2, "row": 2},
            Case(sized(layers=2, residual="'ladder'", experts=8, experts_per_token=2)),
        ),
    ],
    ids=["dora", "lora", "lora grid", "chunks", "chunks context", "chunks pipe", "experts"],
)
def test_blocks_equal_one_process(pool: Pool, degrees: dict[str, int], case: Case) -> None:
    assert differences(pool, degrees, case) == []


def compiled_differences(grid: Grid, case: Case) -> list[str]:
    """What a compiled model computes otherwise than one process."""
    torch._dynamo.reset()
    whole = serial(case.model)
    model = case.on(grid, compiled="aot_eager")
    lines = []
    for _ in range(2):
        loss = forward_backward(model, micros_of(whole.batch, grid, 1)).item()
        lines += worst("loss", torch.tensor(loss), torch.tensor(whole.losses[0]), 1e-12)
        for name, (part, shard) in leaf_cases.gradients(get_parallel_model(model)).items():
            want = shard.slice_from(whole.grads[name])
            scale = whole.grads[name].abs().max().item()
            lines += worst(f"gradient of {name}", part.cpu(), want, 1e-12, scale)
    return lines


@pytest.mark.compiled
@pytest.mark.full
@pytest.mark.parametrize(
    ("degrees", "case"),
    [
        ({"row": 2}, Case(sized(layers=4, residual="'ladder'", ladder_layers="(2,3)"))),
        ({}, Case(DEEP, recompute="full")),
        ({"row": 2}, Case(DEEP, recompute="selective")),
        (
            {"expert": 2},
            Case(sized(layers=2, residual="'ladder'", experts=8, experts_per_token=2)),
        ),
    ],
    ids=["some layers", "full", "selective", "experts"],
)
def test_compiled_blocks_equal_one_process(pool: Pool, degrees: dict[str, int], case: Case) -> None:
    found = pool.on_grid(degrees, compiled_differences, case)
    assert [line for lines in found for line in lines] == []


@pytest.mark.parametrize(
    ("degrees", "case", "ways"),
    [
        ({"row": 2}, Case(DEEP), [ALONE[2]]),
        pytest.param({"row": 2}, Case(DEEP), [*ALONE, *ON_GRID], marks=pytest.mark.full),
        pytest.param(
            {"pipe": 2, "row": 2}, Case(DEEP, micro_batches=2), ON_GRID, marks=pytest.mark.full
        ),
    ],
    ids=["row", "ways", "pipe"],
)
def test_offloaded_activations_change_no_bit(
    pool: Pool, degrees: dict[str, int], case: Case, ways: list[str]
) -> None:
    for lines, went in pool.on_grid(degrees, passes, case, ways):
        assert lines == []
        for none, some, every in zip(*[iter(went)] * 3, strict=True):
            assert none == (0, 0) and 0 < some[0] < every[0]
            assert some[1] == every[1] == 0, "all of it came back, or is gone"


def dropped_gradients(grid: Grid, model: str, recompute: str) -> ShardedStateDict:
    built = Case(model, recompute=recompute).on(grid, seed=3)
    forward_backward(built, micros_of(batch_of(model, samples=8, packed=False), grid, 1))
    return gradients(get_parallel_model(built))


def test_dropout_is_the_same_on_a_grid(pool: Pool) -> None:
    model = sized(layers=2, residual="'ladder'", dropout=0.2)
    want = assemble(pool.on_grid({}, dropped_gradients, model, "none"))
    have = assemble(pool.on_grid({"row": 2}, dropped_gradients, model, "full"))
    for name, grad in want.items():
        assert worst(name, have[name], grad, 1e-12) == []


def mixed_modes(grid: Grid, case: Case) -> list[str]:
    """What differs if only some blocks are recomputed."""
    whole = serial(case.model)
    model = replace(case, recompute="full").on(grid)
    parallel = get_parallel_model(model)
    for number, name in enumerate(parallel.recompute_modes):
        parallel.recompute_modes[name] = ("none", "full", "selective")[number % 3]
    forward_backward(model, micros_of(whole.batch, grid, 1))
    return [
        line
        for name, (part, shard) in gradients(parallel).items()
        for line in worst(name, part, shard.slice_from(whole.grads[name]), 1e-12)
    ]


def test_blocks_with_different_modes(pool: Pool) -> None:
    for lines in pool.on_grid({"row": 2}, mixed_modes, Case(DEEP)):
        assert lines == []


def read_twice(grid: Grid) -> str:
    """What a second read of a pending output says."""
    layer = get_parallel_model(Case(LADDER).on(grid)).layers["blocks.0.mlp.down"]
    x = torch.ones(1, 2, 12, dtype=torch.float64)
    y: Any = layer(x)
    assert isinstance(y, PendingOutput)
    assert torch.stack([y, torch.zeros(1, 1, 16)]).shape == (2, 1, 1, 16)
    try:
        y.wait()
    except RuntimeError as error:
        return str(error)
    return ""


def test_an_output_is_read_once(pool: Pool) -> None:
    for message in pool.on_grid({"row": 2}, read_twice):
        assert "was read twice" in message and "Compute the loss again" in message
    layer = get_parallel_model(Case(LADDER).on(Grid({}))).layers["blocks.0.mlp.down"]
    y = layer(torch.ones(1, 2, 24, dtype=torch.float64))
    assert isinstance(y, torch.Tensor), "on one rank nothing is pending"
