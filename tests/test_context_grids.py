"""Models whose tokens are split over context, compared with one process in float64.

Loss, all gradients, their norm and the weights after some steps, with every method of attention,
order of tokens and other axes; recorded communication equals what is predicted from the documents
of each micro-batch.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest

from context_cases import fill_with
from equivalence import Case, Serial, batch_of, batch_with, compare, micros_of, run_case, sized
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
OTHERS = ("data", "depth", "row", "col", "expert", "pipe")
SEQ = SAMPLES = 24


def list_grids() -> list[dict[str, int]]:
    """All grids of up to 8 ranks with context, and one or two other axes."""
    found: list[dict[str, int]] = []
    for context in (2, 3, 4, 6, 8):
        others: list[dict[str, int]] = [{}]
        others += [{axis: size} for axis in OTHERS for size in (2, 3, 4)]
        others += [{one: 2, two: 2} for one, two in itertools.combinations(OTHERS, 2)]
        found += [{"context": context} | other for other in others]
    return [degrees for degrees in found if math.prod(degrees.values()) <= 8]


def list_documents(context: int) -> dict[str, tuple[int, ...]]:
    """Lengths of the documents of a sample."""
    t = SEQ // context
    return {
        "one": (SEQ,),
        "primes": fill_with((1, 2, 3, 5, 7, 1), SEQ),
        "exact": (t,) * context,
        "around": fill_with((t - 1, t + 1), SEQ),
        "almost": (1, SEQ - 2, 1),
        # In a contiguous order the last rank has documents of one token only.
        "padding": (SEQ - t - 2, 2, *(1,) * t),
    }


@functools.cache
def serial(model: str, documents: str, context: int) -> Serial:
    """The model in one process. Samples have the same documents in different orders."""
    lengths = list_documents(context)[documents]
    turns = [i % len(lengths) for i in range(SAMPLES)]
    return Serial(model, batch_with([lengths[i:] + lengths[:i] for i in turns]), LR, CLIP)


def draw_model(degrees: dict[str, int], method: str, drawn: random.Random) -> str:
    """A small model that the grid divides."""
    t = SEQ // degrees["context"]
    changes: dict[str, Any] = {"layers": 2, "max_seq": SEQ}
    if 3 in degrees.values() or 6 in degrees.values():
        changes |= {"heads": 6, "kv_heads": drawn.choice((6, 1)), "embed": 24}
    else:
        changes |= {"heads": 8, "kv_heads": drawn.choice((8, 2, 1))}
    # A ring has no windows.
    windows = (0,) if method == "ring" else (0, 0, 1, 2, t - 1, t + 1, SEQ + 5)
    changes["sliding_window"] = drawn.choice(windows)
    changes["attn_logit_softcap"] = drawn.choice((0.0, 5.0))
    if "expert" in degrees:
        changes |= {"experts": 24, "experts_per_token": drawn.choice((1, 2))}
        changes["capacity_factor"] = drawn.choice((0.0, 0.75))
    elif "pipe" in degrees:
        changes |= {"layers": 12, "tie_embeddings": drawn.choice((True, False))}
    else:
        changes["position_embedding"] = drawn.choice(("'rope'", "'learned'"))
    return sized(**changes)


def list_cases() -> list[Any]:
    """All grids with all documents; methods, orders and the rest take turns or are drawn."""
    cases = []
    for number, degrees in enumerate(list_grids()):
        for i, documents in enumerate(list_documents(degrees["context"])):
            drawn = random.Random(100 * number + i)
            method = METHODS[(number + i) % len(METHODS)]
            order = ORDERS[(number // 4 + i + i // 4) % len(ORDERS)]
            inner = ("samples", "features")[(number + i // 3) % 2]
            heads_over = degrees["context"] * degrees.get("row", 1)
            heads_over *= degrees.get("col", 1) if inner == "features" else 1
            model = draw_model(degrees, method, drawn)
            heads = 6 if "heads=6" in model else 8
            if method == "ulysses" and heads % heads_over:
                method = "kv_gather"
            case = Case(
                model,
                inner=inner,
                recompute=drawn.choice(("none", "full", "selective")),
                weights_over=drawn.choice(("depth", "depth_context")),
                micro_batches=2 if "pipe" in degrees else 1,
                policy=drawn.choice(("message_driven", "zero-bubble", "1f1b")),
                token_order=order,
                context_attention=method,
            )
            name = f"{label(degrees)}-{documents}-{order}-{method}-{case.label}"
            cases.append(pytest.param(degrees, documents, case, id=name))
    return cases


@pytest.mark.sample(3)
@pytest.mark.parametrize(("degrees", "documents", "case"), list_cases())
def test_a_grid_with_context_equals_one_process(
    pool: Pool, degrees: dict[str, int], documents: str, case: Case
) -> None:
    whole = serial(case.model, documents, degrees["context"])
    assert compare(whole, pool.on_grid(degrees, run_case, case, whole.batch, LR, CLIP)) == []


def test_cases_cover_all_pairs_of_grids_methods_orders_and_documents() -> None:
    words = [
        (label(degrees), case.context_attention, case.token_order, documents)
        for degrees, documents, case in (one.values for one in list_cases())
    ]
    # Ulysses does not divide the heads on every grid.
    values = [{word[i] for word in words} - {"ulysses"} for i in range(4)]
    for one, two in itertools.combinations(range(4), 2):
        found_pairs = {(word[one], word[two]) for word in words}
        assert found_pairs >= {*itertools.product(values[one], values[two])}


def test_choices_are_not_summed_over_context_without_auxiliary_loss(pool: Pool) -> None:
    """Recorded communication equals what is predicted, without them."""
    case = Case("moe without loss", token_order="balanced")
    whole = serial(case.model, "primes", 2)
    degrees = {"expert": 2, "context": 2}
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


@pytest.mark.sample(1)
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
