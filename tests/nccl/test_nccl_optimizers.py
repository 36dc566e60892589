"""Muon, Jorge and SGD over NCCL: losses and gradient norms of one process."""

from __future__ import annotations

from typing import Any

import pytest

from pool import NcclPools
from ranvier.grid import Grid
from training import run_of, stored, trainer_of

pytestmark = pytest.mark.nccl
STEPS = 4
GRIDS = [{"data": 2}, {"row": 2, "depth": 2}, {"row": 2, "col": 2, "depth": 2}]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stored(tmp_path_factory.mktemp("corpus"))


def train(grid: Grid, corpus: str, changes: dict[str, Any], device: str = "") -> list[Any]:
    """Losses and gradient norms of a run."""
    run = run_of("", dict(grid.degrees), STEPS, **changes)
    trainer = trainer_of(grid, corpus, run, device)
    return [(row["loss"], row["grad_norm"]) for row in trainer.run_steps()]


@pytest.mark.parametrize("name", ["muon", "jorge", "sgd"])
@pytest.mark.parametrize("degrees", GRIDS, ids=str)
def test_steps_are_those_of_one_process(
    pool: NcclPools, corpus: str, degrees: dict[str, int], name: str
) -> None:
    changes = {"optim__name": name, "optim__max_preconditioner_dim": 16}
    want = train(Grid({}), corpus, changes, "cpu")
    for found in pool.on_grid(degrees, train, corpus, changes):
        for have, wanted in zip(found, want, strict=True):
            assert have == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("name", ["muon", "jorge"])
def test_states_on_the_host_change_no_bit(pool: NcclPools, corpus: str, name: str) -> None:
    changes = {"optim__name": name, "train__dtype": "bf16"}
    here = pool.on_grid({"row": 2}, train, corpus, changes)
    host = {"memory__optimizer_states": "host"}
    assert pool.on_grid({"row": 2}, train, corpus, changes | host) == here
