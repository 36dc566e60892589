"""What blocks of a run keep: results of collectives as far as they fit, a share on the host."""

from __future__ import annotations

import unittest.mock as mock
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from pool import Pool
from ranvier.config.plan import Plan
from ranvier.config.run import RunConfig
from ranvier.config.sections import MemoryConfig
from ranvier.cost.layers import ActivationShape
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.memory.activation_offload import ActivationOffload
from ranvier.trace import communication_events, diff_events
from ranvier.train.memory import placement, saved_collectives
from ranvier.train.memory.breakdown import MemoryTracker
from ranvier.train.memory.resolve import predict_memory
from ranvier.train.step import forward_backward
from ranvier.train.trainer import Trainer
from training import run_of, stored, trainer_of


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stored(tmp_path_factory.mktemp("corpus"))


def made(corpus: str, grid: Grid, **changes: Any) -> Trainer:
    run = run_of("", dict(grid.degrees), 2, plan__recompute="full", **changes)
    return trainer_of(grid, corpus, run)


def chosen(grid: Grid, corpus: str) -> dict[str, Any]:
    """What a run keeps if half of all that it could keep fits; its losses, and those without."""
    plain = made(corpus, grid)
    parallel, plan, run = plain.state.parallel, plain.run.plan, plain.run
    flow = ActivationShape(plan.micro_batch, run.data.seq_len, itemsize=8, statistics_itemsize=8)
    results = saved_collectives.collective_results(
        parallel, list(parallel.blocks), flow, plain.device
    )
    most = sum(result.bytes for result in results)

    def half(*given: Any) -> MemoryTracker:
        """Half of it fits: bytes on a host depend on when a collective ends, so not measured."""
        account = predict_memory(*given)
        assert account.fit_problem is not None and account.predicted_usage is not None
        limit = account.predicted_usage.total_bytes + most // 2
        return replace(account, fit_problem=replace(account.fit_problem, device_limit=limit))

    with mock.patch.object(saved_collectives, "predict_memory", half):
        some = made(
            corpus, grid, memory__recompute_collectives="auto", memory__device_limit_gib=1.0
        )
    names = some.state.parallel.step_context.save_policy.chosen_layers
    assert names is not None
    batches = [batch.to("cpu") for batch in some._batch_maker()(0)]
    with grid.trace.record_events() as events:
        forward_backward(some.state.model, batches)
    inside = [e for e in communication_events(events) if e.where.startswith("blocks.")]
    inside = [e for e in inside if e.where.count(".") > 1]
    predicted = some.state.parallel.events(flow)
    predicted = [e for e in predicted if e.where.startswith("blocks.") and e.where.count(".") > 1]
    return {
        "names": sorted(names),
        "share": sum(result.bytes for result in results if result.name in names) / most,
        "lines": diff_events(predicted, inside),
        "saved": len(parallel.events(flow)) - len(some.state.parallel.events(flow)),
        "losses": [[row["loss"] for row in trainer.run_steps()] for trainer in (plain, some)],
        "note": some.notes[-1],
    }


def test_auto_keeps_what_fits(pool: Pool, corpus: str) -> None:
    found = pool.on_grid({"row": 2}, chosen, corpus)
    first = found[0]
    assert 0.2 < first["share"] <= 0.5 and first["saved"] > 0
    assert first["losses"][0] == first["losses"][1], "to the bit"
    assert f"memory: {len(first['names'])} of 8 results of collectives are saved" in first["note"]
    for other in found:
        assert other["names"] == first["names"], "all ranks choose alike"
        assert other["lines"] == []


def test_auto_without_a_limit_keeps_all(corpus: str) -> None:
    trainer = made(corpus, Grid({}), memory__recompute_collectives="auto")
    keeping = trainer.state.parallel.step_context.save_policy
    assert (
        keeping.saves_all_layers
        and keeping.saves_layer("blocks.0.mlp.down")
        and trainer.notes == []
    )


@pytest.mark.parametrize("kind", [pytest.param("none", marks=pytest.mark.full), "full"])
def test_a_run_with_activations_on_the_host_is_the_same(
    corpus: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "ActivationOffload", partial(ActivationOffload, small=1))
    losses = []
    for share in (0.0, 1.0):
        run = run_of(
            "",
            {},
            2,
            plan__recompute=kind,
            guard__replay_interval=1,
            memory__activation_offload_fraction=share,
        )
        trainer = trainer_of(Grid({}), corpus, run)
        losses.append([row["loss"] for row in trainer.run_steps()])
    assert losses[0] == losses[1]
    store = trainer.state.parallel.step_context.save_policy.store
    assert isinstance(store, ActivationOffload) and store.saved_bytes() == (0, 0)
    steps = 2 * 2  # each was computed twice
    assert (
        store.offloaded_bytes % steps == 0 and store.offloaded_bytes >= steps * 8 * 16 * 16 * 8
    ), "the input at least"


@pytest.mark.parametrize(
    ("plan", "memory", "words"),
    [
        (
            {"cuda_graph": True},
            {"activation_offload_fraction": 0.5},
            r"activation_offload_fraction=0\.5 with plan\.cuda_graph=True\. .* Use",
        ),
        (
            {},
            {"activation_offload_fraction": -0.5},
            r"activation_offload_fraction=-0\.5 is not a fraction\. It must be in \[0, 1\]",
        ),
        (
            {},
            {"activation_offload_fraction": 1.5},
            r"activation_offload_fraction=1\.5 is too large",
        ),
        (
            {"pipe": 2},
            {"recompute_collectives": "auto", "device_limit_gib": 2.0},
            r"'auto' with memory\.device_limit_gib=2\.0 and a pipeline\. .* Use 'save' or 'rerun'",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    plan: dict[str, Any], memory: dict[str, Any], words: str
) -> None:
    run = RunConfig(plan=Plan(**plan), memory=MemoryConfig(**memory))
    run = replace(run, data=replace(run.data, document_mask=False))
    with pytest.raises(PlanError, match=words):
        run.check_and_resolve(plan.get("pipe", 1))
