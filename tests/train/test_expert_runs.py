"""Runs of models with experts: metrics, report, and checkpoints that other grids go on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pool import Pool
from ranvier.grid import Grid
from ranvier.train import routed
from training import losses_of, run_of, stored, trainer_of

CHANGES: dict[str, Any] = {
    "optim__schedule": "wsd",
    "optim__warmup": 0,
    "optim__cooldown": 0.0,
    "model__experts": 4,
    "model__expert_mlp": 16,
    "model__balance": 0.02,
    "model__router_bias": 0.01,
    "model__capacity": 1.0,
    "model__shared_mlp": 8,
}


def rows_of(grid: Grid, corpus: str, out: str) -> list[dict[str, Any]]:
    trainer = trainer_of(grid, corpus, run_of(out, dict(grid.degrees), 3, **CHANGES))
    return list(trainer.steps())


def test_a_run_goes_on_on_another_grid(pool: Pool, tmp_path: Path) -> None:
    corpus = stored(tmp_path)
    whole = pool.on_grid({}, losses_of, corpus, str(tmp_path / "a"), 6, "", CHANGES)[0]
    half = pool.on_grid(
        {"expert": 2, "col": 2}, losses_of, corpus, str(tmp_path / "b"), 3, "", CHANGES
    )
    assert half[0] == pytest.approx(whole[:3], rel=1e-9)
    resumed = str(tmp_path / "b" / "checkpoints" / "step-00000003")
    rest = pool.on_grid(
        {"pipe": 2, "expert": 2}, losses_of, corpus, str(tmp_path / "c"), 6, resumed, CHANGES
    )
    assert rest[0] == pytest.approx(whole[3:], rel=1e-9)


def test_metrics_tell_what_routers_did(pool: Pool, tmp_path: Path) -> None:
    corpus = stored(tmp_path)
    rows = pool.on_grid({"expert": 2, "row": 2}, rows_of, corpus, str(tmp_path / "run"))[0]
    for row in rows:
        assert sum(row["expert_loads"]) == pytest.approx(1.0, abs=1e-3)
        assert 1.0 <= row["expert_load"] <= 4.0
        assert 0.0 < row["expert_drops"] < 1.0
        assert row["expert_loss"] >= 0.02 * 0.9
    page = routed.section(json.loads(json.dumps(rows)))
    assert "Load of the busiest expert" in page and "share of dropped choices" in page
    assert routed.section([{"step": 0, "loss": 1.0}]) == ""
