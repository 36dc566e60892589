"""Runs of models with experts: metrics, report, and checkpoints that other grids go on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pool import Pool
from ranvier.checkpoint.directory import find_checkpoints
from ranvier.checkpoint.load import load_full_tensors
from ranvier.grid import Grid
from ranvier.models import Decoder
from ranvier.tools.verify import compare_with_serial, shrink_run
from ranvier.train.report import moe
from training import losses_of, run_of, stored, trainer_of

CHANGES: dict[str, Any] = {
    "optim__schedule": "wsd",
    "optim__warmup_steps": 0,
    "optim__decay_ratio": 0.0,
    "model__experts": 4,
    "model__expert_mlp": 16,
    "model__aux_loss_coeff": 0.02,
    "model__expert_bias_update_rate": 0.01,
    "model__capacity_factor": 1.0,
    "model__shared_expert_mlp": 8,
}


def rows_of(grid: Grid, corpus: str, out: str) -> list[dict[str, Any]]:
    trainer = trainer_of(grid, corpus, run_of(out, dict(grid.degrees), 3, **CHANGES))
    return list(trainer.run_steps())


TILED = {**CHANGES, "memory__optimizer_states": "host", "memory__offload_tile": 4096}
"""Optimizer states on the host, updated tile by tile: an expert's matrices are several."""
WAY: list[tuple[int, dict[str, int], dict[str, Any]]] = [
    (2, {"data": 2, "expert": 2}, TILED),
    (4, {"expert": 4}, CHANGES),
    (5, {"expert": 2, "col": 2}, CHANGES),
    (6, {"pipe": 2, "row": 2}, CHANGES),
]
"""Steps up to which a run goes on a grid: experts on 2, 4, 2 and 1 ranks."""


@pytest.mark.full
def test_a_run_goes_on_wherever_its_experts_are(pool: Pool, tmp_path: Path) -> None:
    corpus = stored(tmp_path)
    whole = pool.on_grid({}, losses_of, corpus, str(tmp_path / "whole"), 6, "", CHANGES)[0]
    last, losses = "", list[float]()
    for steps, degrees, changes in WAY:
        out = str(tmp_path / str(steps))
        losses += pool.on_grid(degrees, losses_of, corpus, out, steps, last, changes)[0]
        last = str(find_checkpoints(Path(out) / "checkpoints")[-1])
    assert losses == pytest.approx(whole, rel=1e-9)
    want, have = (
        load_full_tensors(find_checkpoints(tmp_path / "whole" / "checkpoints")[-1]),
        load_full_tensors(Path(last)),
    )
    assert want.keys() == have.keys() and any(name.endswith("mlp.up") for name in want)
    for name, x in want.items():
        assert torch.allclose(x, have[name], rtol=1e-9, atol=1e-12), name


def verified(grid: Grid, changes: dict[str, Any]) -> list[str]:
    """What `ranvier verify` finds wrong on a grid, on this rank."""
    run = shrink_run(run_of("", dict(grid.degrees), 3, **changes))
    torch.manual_seed(run.train.seed)
    findings, lines, _ = compare_with_serial(run, grid, Decoder(run.model).double())
    names = [finding.quantity for finding in findings]
    assert "auxiliary loss" in " ".join(names) and any("mlp.router" in name for name in names)
    return lines + [finding.quantity for finding in findings if not finding.is_within_limit]


@pytest.mark.full
@pytest.mark.parametrize(
    ("degrees", "changes"),
    [
        ({"expert": 2, "row": 2}, CHANGES),
        pytest.param(
            {"pipe": 2, "expert": 2}, {**CHANGES, "plan__recompute": "full"}, marks=pytest.mark.full
        ),
    ],
    ids=["row", "pipe"],
)
def test_verify_takes_mixtures(
    pool: Pool, degrees: dict[str, int], changes: dict[str, Any]
) -> None:
    assert pool.on_grid(degrees, verified, changes) == [[]] * 4


def test_metrics_tell_what_routers_did(pool: Pool, tmp_path: Path) -> None:
    corpus = stored(tmp_path)
    rows = pool.on_grid({"expert": 2, "row": 2}, rows_of, corpus, str(tmp_path / "run"))[0]
    for row in rows:
        assert sum(row["expert_loads"]) == pytest.approx(1.0, abs=1e-3)
        assert 1.0 <= row["expert_load"] <= 4.0
        assert 0.0 < row["expert_drops"] < 1.0
        assert row["expert_loss"] >= 0.02 * 0.9
    page = moe.experts_section(json.loads(json.dumps(rows)))
    assert "Load of the busiest expert" in page and "fraction of dropped choices" in page
    assert moe.experts_section([{"step": 0, "loss": 1.0}]) == ""
