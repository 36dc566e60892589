"""Runs that must be the same: resumed, on other grids, in other micro-batches (cases G9 to G14)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pool import Pool
from ranvier.checkpoint import directory as folders
from ranvier.checkpoint.load import load_full_tensors
from ranvier.checkpoint.manifest import read_manifest
from ranvier.grid import Grid
from training import losses_of, run_of, stored, trainer_of

Curve = list[tuple[float, float]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stored(tmp_path_factory.mktemp("corpus"))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("degrees", "changes"),
    [
        ({"data": 2}, {"train__seed": 1, "optim__state_dtype": "bf16", "train__dtype": "bf16"}),
        ({"row": 2}, {"train__seed": 2, "model__dropout": 0.2, "train__dtype": "fp32"}),
        ({"pipe": 2}, {"train__seed": 3, "train__dtype": "fp32", "guard__on_spike": "skip"}),
        ({"depth": 2}, {"train__seed": 1, "model__dropout": 0.2, "train__dtype": "fp16"}),
        ({"col": 2}, {"train__seed": 2, "train__dtype": "bf16"}),
    ],
    ids=["G9 data", "G9 G13 row", "G9 pipe", "G9 G13 depth", "G9 col"],
)
def test_a_resumed_run_repeats_its_bits(
    pool: Pool, tmp_path: Path, corpus: str, degrees: dict[str, int], changes: dict[str, Any]
) -> None:
    """G9, G13: weights, moments, guard, dropout and loss scale of the uninterrupted run."""
    options = {**changes, "checkpoint__interval": 2, "checkpoint__keep_latest": 0}
    whole, *_ = pool.on_grid(degrees, losses_of, corpus, str(tmp_path / "a"), 4, "", options)
    middle, end = folders.find_checkpoints(tmp_path / "a" / "checkpoints")
    rest = pool.on_grid(degrees, losses_of, corpus, str(tmp_path / "b"), 4, str(middle), options)
    assert rest == [whole[2:]] * 2
    (again,) = folders.find_checkpoints(tmp_path / "b" / "checkpoints")
    for kind in ("master", "mean", "square"):
        wanted, found = load_full_tensors(end, kind), load_full_tensors(again, kind)
        assert all(torch.equal(x, found[name]) for name, x in wanted.items()), kind
    assert read_manifest(again).facts["guard"] == read_manifest(end).facts["guard"]


def curve(grid: Grid, corpus: str, steps: int, changes: dict[str, Any]) -> Curve:
    """Losses and gradient norms of a run."""
    trainer = trainer_of(grid, corpus, run_of("", dict(grid.degrees), steps, **changes))
    return [(row["loss"], row["grad_norm"]) for row in trainer.run_steps()]


def same(found: Curve, wanted: Curve, limit: float) -> bool:
    """Whether losses and norms agree within a relative error."""
    return all(a == pytest.approx(b, rel=limit) for a, b in zip(found, wanted, strict=True))


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "limit", "degrees"),
    [
        ("fp64", 1e-9, {"data": 2, "row": 2}),
        pytest.param("fp32", 1e-5, {"depth": 2, "pipe": 2}, marks=pytest.mark.full),
    ],
    ids=["G10 G12 fp64", "G10 G12 fp32"],
)
def test_twenty_steps_on_a_grid_are_those_of_one_process(
    pool: Pool, corpus: str, dtype: str, limit: float, degrees: dict[str, int]
) -> None:
    """G10 the loss, and G12 the norm before a clipping that bites."""
    changes = {"train__dtype": dtype, "optim__max_grad_norm": 0.1, "optim__lr": 1e-3}
    wanted = curve(Grid({}), corpus, 20, changes)
    for found in pool.on_grid(degrees, curve, corpus, 20, changes):
        assert same(found, wanted, limit)


@pytest.mark.parametrize(
    "micro",
    [
        *(pytest.param(4, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)),
        1,
    ],
    ids="G14 {}".format,
)
def test_micro_batches_add_up(corpus: str, micro: int) -> None:
    """G14: 8 samples at once, or in 2, 4 or 8 parts."""
    wanted = curve(Grid({}), corpus, 4, {})
    assert same(curve(Grid({}), corpus, 4, {"plan__micro_batch": micro}), wanted, 1e-9)


def test_samples_of_one_token(pool: Pool, corpus: str) -> None:
    """G11: nothing to attend to, and still the same on two ranks."""
    changes = {"data__seq_len": 1, "data__document_mask": False}
    wanted = curve(Grid({}), corpus, 3, changes)
    assert all(loss > 0.0 for loss, _ in wanted)
    for found in pool.on_grid({"data": 2}, curve, corpus, 3, changes):
        assert same(found, wanted, 1e-9)


@pytest.mark.parametrize("factor", [1e-40, 0.0], ids=["G11 denormal", "G11 zero"])
def test_tiny_weights_give_numbers(corpus: str, factor: float) -> None:
    """G11: weights that are no normal numbers, or none at all, train without a bad step."""
    trainer = trainer_of(Grid({}), corpus, run_of("", {}, 3, train__dtype="fp32"))
    state = trainer.state.parallel.sharded_state()
    trainer.state.parallel.load_full_state(
        {name: part * factor for name, (part, _) in state.items()}
    )
    rows = list(trainer.run_steps())
    assert all(row["loss"] is not None and row["grad_norm"] is not None for row in rows)
    assert trainer.state.guard.nonfinite_steps == 0
