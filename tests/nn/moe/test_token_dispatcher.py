"""Tokens on their way: beside the shared expert, in narrow types, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from equivalence import Case, batch_of, flow_of, gradients, micros_of, worst
from expert_cases import batch_with_alike, even, exchanged
from pool import Pool
from ranvier.config.plan import Plan
from ranvier.grid import Grid
from ranvier.nn.moe.token_dispatcher import decode_rows, encode_rows
from ranvier.optim.optimizer import Optimizer
from ranvier.tools.verify import predict_events
from ranvier.trace import Event, diff_events
from ranvier.train.step import forward_backward

MODEL = "moe 2 of 8 shared"
GRID = {"expert": 2, "row": 2}
LEAF = "blocks.1.mlp"


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "at once": {"overlap": ("dx", "dw", "weight_gather")},
    "bf16": {"moe_dispatch_dtype": "bf16"},
    "fp8": {"moe_dispatch_dtype": "fp8"},
}


def stepped(grid: Grid, case: Case, **changes: Any) -> dict[str, Any]:
    """Events of a step of balanced experts, its loss and gradients, and what was not predicted."""
    model = case.on(grid, **changes)
    even(model)
    parallel: Any = model.parallel
    batch = batch_of(case.model, samples=16, packed=False)
    optimizer = Optimizer(parallel.bucket_scheduler, lr=1e-2)
    with grid.trace.record_events() as events:
        loss = forward_backward(model, micros_of(batch, grid, case.micro_batches))
        optimizer.step()
    predicted = predict_events(
        parallel, flow_of(batch, grid, case.micro_batches), case.micro_batches
    )
    state = {name: part.clone() for name, (part, _) in parallel.sharded_state().items()}
    return {
        "events": [e for e in events if e.where.startswith(LEAF)],
        "lines": diff_events(predicted, events),
        "loss": loss,
        "state": state,
    }


def varied(grid: Grid) -> dict[str, dict[str, Any]]:
    """The same step in several ways."""
    return {name: stepped(grid, Case(MODEL), **changes) for name, changes in VARIANTS.items()}


def between(events: list[Event], swap: Event, where: str) -> list[Event]:
    """Communication of a layer that began while rows were under way."""
    assert swap.issue_time is not None and swap.wait_time is not None
    mine = [e for e in events if e.where == f"{LEAF}.{where}"]
    return [e for e in mine if swap.issue_time < e.issue_time < swap.wait_time]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("recompute", "collectives"),
    [("none", "rerun"), ("full", "save"), pytest.param("full", "rerun", marks=pytest.mark.full)],
)
def test_the_shared_expert_is_computed_while_tokens_travel(
    pool: Pool, recompute: Any, collectives: Any
) -> None:
    """Forward: its hidden layer behind the dispatch, its last product behind the combine.

    Backward: the mirror image.
    """
    case = Case(MODEL, recompute=recompute, collectives=collectives)
    for found in pool.on_grid(GRID, stepped, case):
        events = found["events"]
        assert found["lines"] == []
        swaps = [e for e in events if e.op == "all_to_all"]
        repeated = recompute != "none" and collectives == "rerun"
        assert len(swaps) == (6 if repeated else 4)
        for swap, where in [
            (swaps[0], "shared.enter"),
            (swaps[1], "shared.down"),
            (swaps[-2], "shared.down"),
            (swaps[-1], "shared.enter"),
        ]:
            assert between(events, swap, where), where
        gathers = [e for e in events if e.where == LEAF and e.axis == ("row",)]
        assert swaps[0].wait_time < gathers[0].issue_time, "experts begin when their rows are there"


@pytest.fixture(scope="module")
def variants(pool: Pool) -> list[dict[str, dict[str, Any]]]:
    """Of each rank what it did in several ways."""
    return pool.on_grid(GRID, varied)


def test_waiting_at_once_changes_no_bit(variants: list[dict[str, dict[str, Any]]]) -> None:
    for found in variants:
        a, b = found["plain"], found["at once"]
        swaps = [e for e in b["events"] if e.op == "all_to_all"]
        shared = ("shared.enter", "shared.down")
        assert not any(between(b["events"], e, where) for e in swaps for where in shared)
        assert torch.equal(a["loss"], b["loss"])
        assert all(torch.equal(a["state"][name], b["state"][name]) for name in a["state"])


# ---- narrow types -----------------------------------------------------------------------


def rows() -> Tensor:
    """Rows of many magnitudes, one of zeros, one of a single large number."""
    made = torch.randn(64, 48, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    made = made * torch.logspace(-6, 6, 64, dtype=torch.float64).unsqueeze(1)
    made[:, ::5] *= 1e-4
    made[5], made[6] = 0.0, 0.0
    made[6, 3] = 448.0
    return made


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_arrives_is_as_near_as_is_said(dtype: torch.dtype) -> None:
    x = rows().to(dtype)
    assert encode_rows(x, "model") is x and torch.equal(decode_rows(x, "model", dtype), x)
    wide, largest = x.double(), x.double().abs().amax(1, keepdim=True)
    half = encode_rows(x, "bf16")
    assert half.dtype == torch.bfloat16
    assert bool(
        ((decode_rows(half, "bf16", dtype).double() - wide).abs() <= wide.abs() / 2**8).all()
    )
    eighth = encode_rows(x, "fp8")
    assert eighth.dtype == torch.uint8 and eighth.shape == (64, 48 + 4)
    error = (decode_rows(eighth, "fp8", dtype).double() - wide).abs()
    assert bool((error <= wide.abs() / 2**4 + largest / 2**17).all())
    assert error.max() > 0.0
    broken = x.clone()
    broken[2, 2] = torch.nan
    assert decode_rows(encode_rows(broken, "fp8"), "fp8", dtype)[2].isnan().any()


@pytest.mark.parametrize("dispatch", ["model", "bf16", "fp8"])
@pytest.mark.parametrize("features", [6, 48])
def test_no_rows_have_a_format_too(dispatch: Any, features: int) -> None:
    x = torch.empty(0, features, dtype=torch.float64)
    sent = encode_rows(x, dispatch)
    one = encode_rows(torch.ones(1, features, dtype=torch.float64), dispatch)
    assert (sent.dtype, sent.shape[1:]) == (one.dtype, one.shape[1:])
    received = decode_rows(one[:0].clone(), dispatch, torch.float64)
    assert (received.dtype, received.shape) == (x.dtype, x.shape)


@pytest.mark.parametrize(("dispatch", "digits"), [("bf16", 8), ("fp8", 4)])
def test_a_narrow_dispatch_is_near_and_counted(
    variants: list[dict[str, dict[str, Any]]], dispatch: str, digits: int
) -> None:
    """Only rows to the experts are narrow: bytes as predicted, the loss within its rounding."""
    for found in variants:
        a, b = found["plain"], found[dispatch]
        assert b["lines"] == []
        sent = [[e.bytes for e in one["events"] if e.op == "all_to_all"] for one in (a, b)]
        count = sent[0][0] // (16 * 8)  # rows of 16 features in float64
        assert sent[1][0] == count * (16 * 2 if dispatch == "bf16" else 16 + 4)
        assert sent[0][1:] == sent[1][1:]
        assert 0.0 < abs(1.0 - (b["loss"] / a["loss"]).item()) < 2.0**-digits


def test_a_word_that_is_none_is_told() -> None:
    wrong = Plan(data=1, moe_dispatch_dtype="fp16")  # type: ignore[arg-type]
    assert any("moe_dispatch_dtype='fp16' is unknown" in line for line in wrong.find_problems({}))


def test_a_narrow_dispatch_sends_no_rows(pool: Pool) -> None:
    """Some ranks of row have no rows for the experts of some ranks, or none of them has any."""
    model = "moe 1 of 8"
    for alike in (4, 8):
        batch = batch_with_alike(model, alike)
        plain, *narrow = (
            pool.on_grid(GRID, exchanged, Case(model), batch, dispatch)
            for dispatch in ("model", "bf16", "fp8")
        )
        for some in narrow:
            for a, b in zip(plain, some, strict=True):
                assert 0.0 < abs(1.0 - (b["loss"] / a["loss"]).item()) < 2.0**-4


# ---- compiled blocks --------------------------------------------------------------------


def compiled(grid: Grid, recompute: Any) -> list[str]:
    """What differs between compiled blocks and eager ones, and between said and predicted."""
    lines, found = [], []
    for backend in ("", "aot_eager"):
        case = Case("moe 2 of 8 shared every", recompute=recompute, micro_batches=2)
        model: Any = case.on(grid, compiled=backend)
        even(model)
        batch = batch_of(case.model, samples=16, packed=False)
        with grid.trace.record_events() as events:
            loss = forward_backward(model, micros_of(batch, grid, 2))
        graphs = (
            []
            if model.parallel.compiled_blocks is None
            else list(model.parallel.compiled_blocks.graphs)
        )
        tokens = [e for e in events if e.op == "all_to_all"]
        assert len(tokens) == 2 * (4 if recompute == "none" else 6), len(tokens)
        assert bool(graphs) == bool(backend)
        found.append({n: g for n, (g, _) in gradients(model.parallel).items()} | {"": loss})
    for name, want in found[0].items():
        lines += worst(name, found[1][name], want, 1e-12)
    return lines


@pytest.mark.compiled
@pytest.mark.full
@pytest.mark.filterwarnings("default")  # compilers give some
@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.full)])
def test_a_graph_ends_where_tokens_travel(pool: Pool, recompute: str) -> None:
    """Dense blocks and the rest of a block are graphs, the experts are none; numbers stay."""
    assert pool.on_grid({"expert": 2}, compiled, recompute) == [[], []]
