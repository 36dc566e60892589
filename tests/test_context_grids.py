"""Models whose tokens are split over context, compared with one process in float64.

Loss, all gradients, their norm and the weights after some steps, with every method of attention,
order of tokens and other axes; recorded communication equals what is predicted from the documents
of each micro-batch.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest

from equivalence import Case, Serial, batch_of, compare, micros_of, run_case
from grids import label
from pool import Pool
from ranvier.grid import Grid
from ranvier.nn.dropout import Dropout
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.train.step import forward_backward

pytestmark = pytest.mark.nccl
LR, CLIP = 1e-2, 0.5
METHODS = ("kv_gather", "ring", "ulysses", "auto")
ORDERS = ("contiguous", "zigzag", "balanced", "random")
GRIDS: list[dict[str, int]] = [
    {"context": 2},
    {"context": 4},
    {"context": 8},
    {"data": 2, "context": 2},
    {"context": 2, "depth": 2},
    {"context": 2, "row": 2},
    {"context": 4, "row": 2},
    {"context": 2, "col": 2},
    {"context": 2, "row": 2, "col": 2},
    {"expert": 2, "context": 2},
    {"expert": 2, "context": 2, "row": 2},
    {"pipe": 2, "context": 2},
    {"pipe": 2, "data": 2, "context": 2},
    {"pipe": 2, "context": 2, "row": 2},
]


@functools.cache
def serial(model: str, packed: bool) -> Serial:
    """The model in one process."""
    return Serial(model, batch_of(model, samples=16, packed=packed), LR, CLIP)


def choose_options(degrees: dict[str, int], number: int) -> dict[str, Any]:
    """A model, and options that vary with the number of the case."""
    options: dict[str, Any] = {"packed": bool(number % 4), "recompute": "none"}
    options["recompute"] = ("none", "full", "selective")[number % 3]
    options["inner"] = ("samples", "features")[number % 2]
    if "expert" in degrees:
        models = ["moe 2 of 8 capacity", "moe 1 of 8 shared sigmoid", "moe 2 of 8 capacity raw"]
    elif "pipe" in degrees:
        models = ["deep tied", "deep learned"]
        options |= {"micro_batches": 2, "policy": ("message_driven", "zero-bubble")[number % 2]}
    else:
        models = ["deep", "gemma2", "dora", "gpt2", "qwen3", "deep tied"]
    options["model"] = models[number % len(models)]
    return options


def list_cases() -> list[Any]:
    """All grids with all methods and orders."""
    product = itertools.product(GRIDS, METHODS, ORDERS)
    cases = []
    for number, (degrees, method, order) in enumerate(product):
        options = choose_options(degrees, number)
        # The heads of a rank must be divisible, and Gemma has windows.
        if method == "ulysses" and degrees["context"] * degrees.get("row", 1) > 4:
            method = "kv_gather"
        if method == "ring" and options["model"] == "gemma2":
            options["model"] = "deep"
        case = Case(token_order=order, context_attention=method, **options)
        name = f"{label(degrees)}-{case.label}-{order}-{method}"
        cases.append(pytest.param(degrees, case, id=name))
    return cases


@pytest.mark.sample(4)
@pytest.mark.parametrize(("degrees", "case"), list_cases())
def test_a_grid_with_context_equals_one_process(
    pool: Pool, degrees: dict[str, int], case: Case
) -> None:
    whole = serial(case.model, case.packed)
    assert compare(whole, pool.on_grid(degrees, run_case, case, whole.batch, LR, CLIP)) == []


def run_with_noise(grid: Grid, case: Case, dropout: float) -> tuple[float, float]:
    """Loss and gradient norm of a model with random masks."""
    model = case.on(grid)
    for layer in model.modules():
        if isinstance(layer, Dropout):
            layer.p = dropout
    model.train()
    batch = batch_of(case.model, samples=8, packed=case.packed)
    loss = forward_backward(model, micros_of(batch, grid, 1, case.model, case.token_order))
    optimizer = Optimizer(get_parallel_model(model).bucket_scheduler)
    return loss.item(), optimizer.step().item()


@pytest.mark.parametrize(("model", "dropout"), [("jitter", 0.0), ("deep", 0.2)])
def test_random_masks_do_not_depend_on_the_order_of_tokens(
    pool: Pool, model: str, dropout: float
) -> None:
    case = Case(model, packed=True, token_order="random", recompute="full")
    (alone,) = pool.on_grid({}, run_with_noise, case, dropout)
    (exact,) = pool.on_grid({}, run_with_noise, replace(case, model="deep"), 0.0)
    assert alone[0] != pytest.approx(exact[0], rel=1e-3), "the masks change the loss"
    for found in pool.on_grid({"context": 2, "row": 2}, run_with_noise, case, dropout):
        assert found == pytest.approx(alone, rel=1e-12)
