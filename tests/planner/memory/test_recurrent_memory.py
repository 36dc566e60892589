"""Predicted memory of recurrent models: that of a dry run, and independent of the recurrence."""

from __future__ import annotations

from typing import Any

import pytest

from ranvier.config.run import RunConfig, run_from_tables
from ranvier.cost.layers import ActivationShape
from ranvier.planner.memory.total import peak_memory
from ranvier.planner.model_spec import resolve_model_spec
from ranvier.tools.dry_run import dry_run, resolve_dry_run

SAMPLES, SEQ = 8, 512


def recurrent_run(recompute: str, mean_recurrence: int = 8, **degrees: int) -> RunConfig:
    tables: dict[str, dict[str, Any]] = {
        "model": {"size": "recurrent-tiny", "mean_recurrence": mean_recurrence},
        "plan": {
            "recompute": recompute,
            "global_batch": 32,
            "micro_batch": SAMPLES,
            "compile": "off",
            **degrees,
        },
        "data": {"seq_len": SEQ, "document_mask": False},
        "train": {"dtype": "bf16"},
    }
    return run_from_tables(tables)


def predicted_bytes(run: RunConfig, world: int) -> int:
    run = resolve_dry_run(run, world=world, rank=0)
    flow = ActivationShape(SAMPLES, SEQ, 2, 4)
    return peak_memory(resolve_model_spec(run), run.plan, flow).allocated_bytes


@pytest.mark.parametrize(
    ("recompute", "degrees"),
    [
        ("none", {"depth": 2, "row": 2}),
        pytest.param("none", {}, marks=pytest.mark.full),
        pytest.param("selective", {}, marks=pytest.mark.full),
        pytest.param("full", {}, marks=pytest.mark.full),
        pytest.param("full", {"depth": 2, "row": 2}, marks=pytest.mark.full),
    ],
)
def test_predicted_memory_is_what_a_dry_run_counts(recompute: str, degrees: dict[str, int]) -> None:
    run = recurrent_run(recompute, **degrees)
    world = 4 if degrees else 1
    counted = dry_run(run, world=world, rank=0).memory.allocated_bytes
    assert predicted_bytes(run, world) == pytest.approx(counted, rel=0.05)


def test_predicted_memory_does_not_depend_on_the_recurrence() -> None:
    few, many = (predicted_bytes(recurrent_run("none", n), 1) for n in (8, 64))
    assert few == many
