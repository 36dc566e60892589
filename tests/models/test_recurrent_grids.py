"""Recurrent depth on grids: the same as one process in float64, with predicted communication.

The iterations of each step are drawn, so that three steps have different numbers of them.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from equivalence import (
    Case,
    Serial,
    batch_of,
    compare,
    gradients,
    micros_of,
    run_case,
    switched,
    worst,
)
from grids import label
from nn.test_compile_blocks import fresh
from pool import Pool, device_of
from ranvier.config.plan import Plan
from ranvier.cost.layers import ActivationShape
from ranvier.grid import Grid
from ranvier.models import RecurrentDecoder
from ranvier.models.recurrence import Recurrence
from ranvier.nn.element_numbers import ElementNumbering
from ranvier.parallel.full_batch import call_on_full_batch
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.planner.comm_volume import step_comm_volume
from ranvier.planner.model_spec_torch import build_module_spec
from ranvier.trace import communication_events
from ranvier.train.step import begin_model_step, forward_backward

LR, CLIP, STEPS = 1e-2, 0.5, 3
AXES = ("data", "expert", "context", "depth", "row", "col")
CUBE = {"depth": 2, "row": 2, "col": 2}


def list_cases() -> list[Any]:
    """All grids of up to 8 ranks with both splits of col, overlapped and not; the rest is drawn."""
    sizes = itertools.product((1, 2, 4, 8), repeat=len(AXES))
    grids = [dict(zip(AXES, some, strict=True)) for some in sizes if math.prod(some) <= 8]
    cases = []
    for degrees in grids:
        for inner, overlap in itertools.product(("samples", "features"), (True, False)):
            drawn = random.Random(f"{degrees} {inner} {overlap}")
            case = Case(
                drawn.choice(("recurrent", "recurrent untied")),
                inner=inner,
                overlap=overlap,
                recompute=drawn.choice(("none", "selective", "full")),
                collectives=drawn.choice(("rerun", "save")),
                packed=drawn.choice((True, False)),
                weights_over=drawn.choice(("depth", "depth_context")),
                keep=drawn.choice((True, False)),
                steps=STEPS,
            )
            name = f"{label(degrees)}-{case.label}{'-overlap' * overlap}"
            cases.append(pytest.param(degrees, case, id=name))
    return cases


@functools.cache
def serial(model: str, packed: bool = False) -> Serial:
    return Serial(model, batch_of(model, samples=16, packed=packed), LR, CLIP, STEPS)


def wide(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)


@pytest.mark.nccl
@pytest.mark.sample(1)
@pytest.mark.parametrize(("degrees", "case"), list_cases())
def test_three_steps_equal_one_process(pool: Pool, degrees: dict[str, int], case: Case) -> None:
    whole = serial(case.model, case.packed)
    results = pool.on_grid(degrees, run_case, case, whole.batch, LR, CLIP)
    assert compare(whole, results) == []


def test_a_block_with_sandwich_norms_equals_one_process(pool: Pool) -> None:
    """Not only in a recurrent model, and also over stages."""
    case = Case("sandwich", inner="features", micro_batches=2, recompute="selective", steps=STEPS)
    whole = serial("sandwich")
    degrees = {"pipe": 2, "row": 2}
    assert compare(whole, pool.on_grid(degrees, run_case, case, whole.batch, LR, CLIP)) == []


@pytest.mark.full
def test_overlap_changes_no_bit(pool: Pool) -> None:
    found = pool.on_grid(CUBE, switched, Case("recurrent"))
    assert [line for lines in found for line in lines] == []


# ---- random numbers ------------------------------------------------------------------------------


def drawn_numbers(grid: Grid, micro_batches: int) -> tuple[list[Recurrence], list[Any]]:
    """The iterations of some steps, and the initial states of this rank with their places."""
    model = Case("recurrent").on(grid, seed=3)
    assert isinstance(model, RecurrentDecoder)
    batch = batch_of("", samples=8, packed=False)
    states = []

    def note(layer: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        numbers = layer.numbering.number_elements(args[0])
        tokens = numbers.tokens.expand(len(numbers.samples), -1)
        states.append(tuple(x.cpu() for x in (numbers.samples, tokens, numbers.features, output)))

    model.initial_state.register_forward_hook(note)
    recurrences = []
    for step in range(3):
        begin_model_step(model, step)
        recurrences.append(model.recurrence)
    forward_backward(model, micros_of(batch, grid, micro_batches))
    return recurrences, states


def check_same_numbers(pool: Pool, degrees: dict[str, int], micro_batches: int) -> None:
    plain = Case("recurrent").build()
    assert isinstance(plain, RecurrentDecoder)
    plain.initial_state.seed = 3
    whole = plain.initial_state(torch.zeros(8, 8, 16, dtype=torch.float64))
    seen = torch.zeros(whole.shape, dtype=torch.bool)
    for recurrences, states in pool.on_grid(degrees, drawn_numbers, micro_batches):
        for step, recurrence in enumerate(recurrences):
            plain.begin_step(3, step)
            assert recurrence == plain.recurrence
        for samples, tokens, features, state in states:
            at = (samples.view(-1, 1, 1), tokens.unsqueeze(-1), features)
            assert torch.equal(whole[at], state)
            seen[at] = True
    assert seen.all()


@pytest.mark.nccl
@pytest.mark.parametrize(
    ("degrees", "micro_batches"),
    [
        ({"data": 2, "context": 2, "row": 2}, 2),
        pytest.param(CUBE, 1, marks=pytest.mark.full),
        pytest.param({"context": 4, "col": 2}, 1, marks=pytest.mark.full),
    ],
)
def test_iterations_and_initial_states_have_the_same_bits(
    pool: Pool, degrees: dict[str, int], micro_batches: int
) -> None:
    check_same_numbers(pool, degrees, micro_batches)


def test_other_numbers_of_tokens_are_caught(pool: Pool) -> None:
    """If each rank counted its tokens from 0, the states would differ from those of one process."""
    whole = serial("recurrent")
    case = Case("recurrent", steps=STEPS)
    results = pool.on_grid({"row": 2}, run_with_local_tokens, case, whole.batch)
    assert any("losses of step 0" in line for line in compare(whole, results))


def run_with_local_tokens(grid: Grid, case: Case, batch: Any) -> dict[str, Any]:
    def count_from_zero(self: ElementNumbering, x: Tensor) -> Tensor:
        return torch.arange(x.shape[1], device=x.device).unsqueeze(0)

    with mock.patch.object(ElementNumbering, "_local_tokens", count_from_zero):
        return run_case(grid, case, batch, LR, CLIP)


# ---- communication -------------------------------------------------------------------------------


def core_events(grid: Grid, without_grad: int, with_grad: int) -> tuple[int, int, int]:
    """Gathers and reductions over depth of the core in a step, and its other communication."""
    case = Case("recurrent", recompute="full")
    model = case.on(grid)
    assert isinstance(model, RecurrentDecoder)
    model.recurrence = Recurrence(without_grad, with_grad)
    batch = batch_of("", samples=16, packed=False)
    with grid.trace.record_events() as events:
        forward_backward(model, micros_of(batch, grid, 1))
    core = model.core_name
    gathers = [e for e in events if e.op == "all_gather" and e.axis == ("depth",)]
    scatters = [e for e in events if e.op == "reduce_scatter" and e.axis == ("depth",)]
    inside = [e for e in communication_events(events) if e.where.startswith(f"{core}.")]
    return (
        sum(event.where == core for event in gathers),
        sum(event.where == core for event in scatters),
        len(inside),
    )


def test_a_pass_gathers_the_core_once(pool: Pool) -> None:
    """Once in forward and once in backward; its gradients are reduced once."""
    degrees = {"depth": 2, "row": 2}
    few = pool.on_grid(degrees, core_events, 0, 1)
    many = pool.on_grid(degrees, core_events, 5, 3)
    for one, other in zip(few, many, strict=True):
        assert one[:2] == other[:2] == (2, 1)
        assert other[2] > 3 * one[2]


@pytest.mark.parametrize("inner", ["samples", "features"])
def test_the_planner_predicts_what_the_layers_do(inner: Any) -> None:
    """The same communication without layers, also from a stored spec, for whole iterations."""
    grid = Grid(CUBE, rank=0, connected=False)
    plan = Plan(
        col_splits=inner, recompute="full", global_batch=16, micro_batch=8, compile="off"
    ).with_degrees(grid.degrees)
    plain = Case("recurrent").build()
    assert isinstance(plain, RecurrentDecoder)
    # On average, as many iterations as the model below has.
    plain.mean_layer_calls = plain.layer_calls  # type: ignore[method-assign]
    spec = build_module_spec(plain)
    spec = type(spec).from_dict(spec.to_dict())
    assert spec.is_recurrent and spec.num_layers == 3
    model = Case("recurrent", inner=inner, recompute="full").on(grid)
    parallel = get_parallel_model(model)
    flow = ActivationShape(8, 8, itemsize=8, statistics_itemsize=8)
    want: dict[Any, int] = {}
    for event in parallel.events(flow):
        key = (event.op, event.axis)
        want[key] = want.get(key, 0) + event.bytes
    volume = step_comm_volume(spec, plan, flow)
    phases = ("forward", "recompute", "backward", "gather", "scatter")
    have: dict[Any, float] = {}
    for row in volume.volumes_of_phases(*phases):
        key = (row.op, row.axis)
        have[key] = have.get(key, 0) + row.bytes * row.count
    assert have == want


# ---- other ways to run the model -----------------------------------------------------------------


def compiled_differences(grid: Grid) -> list[str]:
    """What a model with a compiled core computes otherwise, and what it compiles."""
    fresh()
    whole = serial("recurrent")
    model = Case("recurrent").on(grid, compiled="aot_eager")
    assert isinstance(model, RecurrentDecoder)
    begin_model_step(model, 0)
    loss = forward_backward(model, micros_of(whole.batch, grid, 1)).item()
    lines = worst("loss", wide(loss), wide(whole.losses[0]), 1e-12)
    for name, (part, shard) in gradients(get_parallel_model(model)).items():
        want = shard.slice_from(whole.grads[name])
        scale = whole.grads[name].abs().max().item()
        lines += worst(f"gradient of {name}", part.cpu(), want, 1e-12, scale)
    blocks = get_parallel_model(model).compiled_blocks
    assert blocks is not None
    # All numbers of iterations run the same graphs: one with and one without gradients.
    model.recurrence = Recurrence(1, 2)
    forward_backward(model, micros_of(whole.batch, grid, 1))
    before = len(blocks.graphs)
    model.recurrence = Recurrence(4, 3)
    forward_backward(model, micros_of(whole.batch, grid, 1))
    if len(blocks.graphs) != before:
        lines.append(f"{len(blocks.graphs) - before} more graphs for other iterations")
    kinds = [key for key in blocks.graphs if "RecurrentCore" in str(key)]
    if len(kinds) != 2:
        lines.append(f"{len(kinds)} graphs of the core")
    return lines


@pytest.mark.compiled
@pytest.mark.full
def test_one_compiled_iteration(pool: Pool) -> None:
    found = pool.on_grid({"row": 2}, compiled_differences)
    assert [line for lines in found for line in lines] == []


def offload_differences(grid: Grid) -> list[str]:
    """What changes if the weights of blocks are on the host between their uses."""
    whole = serial("recurrent")
    model = Case("recurrent").on(grid, room=1 << 30)
    begin_model_step(model, 0)
    loss = forward_backward(model, micros_of(whole.batch, grid, 1)).item()
    return worst("loss", wide(loss), wide(whole.losses[0]), 1e-12)


def test_weights_on_the_host(pool: Pool) -> None:
    found = pool.on_grid({"depth": 2}, offload_differences)
    assert [line for lines in found for line in lines] == []


def full_batch_differences(grid: Grid) -> list[str]:
    whole = serial("recurrent")
    model = Case("recurrent").on(grid)
    begin_model_step(model, 0)
    inputs = {k: x.to(device_of(grid)) for k, x in whole.batch.model_inputs().items()}
    loss = call_on_full_batch(model, **inputs) / (whole.batch.targets != -100).sum()
    return worst("loss", loss.detach().cpu(), wide(whole.losses[0]), 1e-12)


def test_a_full_batch(pool: Pool) -> None:
    found = pool.on_grid({"row": 2, "col": 2}, full_batch_differences)
    assert [line for lines in found for line in lines] == []
