"""What blocks of a run keep: results of collectives as far as they fit, a share on the host."""

from __future__ import annotations

import unittest.mock as mock
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from pool import Pool
from ranvier.config.plan import Plan
from ranvier.config.run import Run
from ranvier.config.sections import MemoryConfig
from ranvier.cost.layers import Flow
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.memory.activation_offload import Activations
from ranvier.parallel.parallelize import parallel_of
from ranvier.trace import communication, difference
from ranvier.train.memory import placement, saved_collectives
from ranvier.train.memory.breakdown import Account
from ranvier.train.memory.resolve import foreseen
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
    parallel, plan, run = parallel_of(plain.model), plain.run.plan, plain.run
    flow = Flow(plan.micro_batch, run.data.seq, itemsize=8, statistics=8)
    results = saved_collectives.results_of(parallel, list(parallel.kinds), flow, plain.device)
    most = sum(result.bytes for result in results)

    def half(*given: Any) -> Account:
        """Half of it fits: bytes on a host depend on when a collective ends, so not measured."""
        account = foreseen(*given)
        assert account.case is not None and account.predicted is not None
        limit = account.predicted.total + most // 2
        return replace(account, case=replace(account.case, limit=limit))

    with mock.patch.object(saved_collectives, "foreseen", half):
        some = made(corpus, grid, memory__collectives="auto", memory__limit=1.0)
    names = parallel_of(some.model).moment.keeping.chosen
    assert names is not None
    batches = [batch.to("cpu") for batch in some._loaded()(0)]
    with grid.trace.recording() as events:
        forward_backward(some.model, batches)
    inside = [e for e in communication(events) if e.where.startswith("blocks.")]
    inside = [e for e in inside if e.where.count(".") > 1]
    predicted = parallel_of(some.model).events(flow)
    predicted = [e for e in predicted if e.where.startswith("blocks.") and e.where.count(".") > 1]
    return {
        "names": sorted(names),
        "share": sum(result.bytes for result in results if result.name in names) / most,
        "lines": difference(predicted, inside),
        "saved": len(parallel.events(flow)) - len(parallel_of(some.model).events(flow)),
        "losses": [[row["loss"] for row in trainer.steps()] for trainer in (plain, some)],
        "note": some.notes[-1],
    }


def test_auto_keeps_what_fits(pool: Pool, corpus: str) -> None:
    found = pool.on_grid({"row": 2}, chosen, corpus)
    first = found[0]
    assert 0.2 < first["share"] <= 0.5 and first["saved"] > 0
    assert first["losses"][0] == first["losses"][1], "to the bit"
    assert f"memory: {len(first['names'])} of 8 results of collectives are kept" in first["note"]
    for other in found:
        assert other["names"] == first["names"], "all ranks choose alike"
        assert other["lines"] == []


def test_auto_without_a_limit_keeps_all(corpus: str) -> None:
    trainer = made(corpus, Grid({}), memory__collectives="auto")
    keeping = parallel_of(trainer.model).moment.keeping
    assert keeping.all and keeping.keeps("blocks.0.mlp.down") and trainer.notes == []


@pytest.mark.parametrize("kind", [pytest.param("none", marks=pytest.mark.full), "full"])
def test_a_run_with_activations_on_the_host_is_the_same(
    corpus: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "Activations", partial(Activations, small=1))
    losses = []
    for share in (0.0, 1.0):
        run = run_of("", {}, 2, plan__recompute=kind, guard__replay=1, memory__activations=share)
        trainer = trainer_of(Grid({}), corpus, run)
        losses.append([row["loss"] for row in trainer.steps()])
    assert losses[0] == losses[1]
    store = parallel_of(trainer.model).moment.keeping.store
    assert isinstance(store, Activations) and store.held() == (0, 0)
    steps = 2 * 2  # each was computed twice
    assert store.sent % steps == 0 and store.sent >= steps * 8 * 16 * 16 * 8, "the input at least"


@pytest.mark.parametrize(
    ("plan", "memory", "words"),
    [
        ({"graph": True}, {"activations": 0.5}, r"activations=0\.5 with plan\.graph=True\. .* Use"),
        ({}, {"activations": -0.5}, r"activations=-0\.5 is no share\. It lies in \[0, 1\]"),
        ({}, {"activations": 1.5}, r"activations=1\.5 is too large"),
        (
            {"pipe": 2},
            {"collectives": "auto", "limit": 2.0},
            r"'auto' with memory\.limit=2\.0 and a pipeline\. .* Use 'keep' or 'again'",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    plan: dict[str, Any], memory: dict[str, Any], words: str
) -> None:
    run = Run(plan=Plan(**plan), memory=MemoryConfig(**memory))
    run = replace(run, data=replace(run.data, packed=False))
    with pytest.raises(PlanError, match=words):
        run.check(plan.get("pipe", 1))
