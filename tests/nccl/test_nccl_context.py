"""Runs with context over NCCL: losses and gradient norms of one process, bits without overlap."""

from __future__ import annotations

from typing import Any

import pytest

from pool import NcclPools
from ranvier.grid import Grid
from training import run_of, stored, trainer_of

pytestmark = pytest.mark.nccl
STEPS = 5
PACKED: dict[str, Any] = {"data__document_mask": True}
UNPACKED: dict[str, Any] = {"data__document_mask": False}
WINDOWS: dict[str, Any] = {"model__sliding_window": 5}
GRIDS = [{"context": 2}, {"context": 2, "row": 2}, {"context": 4, "depth": 2}]
METHODS = ["kv_gather", "ring", "ulysses", "auto"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stored(tmp_path_factory.mktemp("corpus"))


def train(grid: Grid, corpus: str, changes: dict[str, Any], device: str = "") -> list[Any]:
    """Losses and gradient norms of a run."""
    run = run_of("", dict(grid.degrees), STEPS, **changes)
    trainer = trainer_of(grid, corpus, run, device)
    return [(row["loss"], row["grad_norm"]) for row in trainer.run_steps()]


def list_runs() -> list[Any]:
    runs = []
    for degrees in GRIDS:
        for method in METHODS:
            for name, data in (
                ("packed", PACKED),
                ("one document", UNPACKED),
                ("windows", WINDOWS),
            ):
                # A ring has no windows, and two kv heads of a row are one.
                if method == "ring" and data is WINDOWS:
                    continue
                label = f"{degrees}-{method}-{name}"
                runs.append(pytest.param(degrees, method, data, id=label))
    return runs


@pytest.mark.parametrize(("degrees", "method", "data"), list_runs())
def test_five_steps_are_those_of_one_process(
    pool: NcclPools, corpus: str, degrees: dict[str, int], method: str, data: dict[str, Any]
) -> None:
    want = train(Grid({}), corpus, data, "cpu")
    changes = data | {"plan__context_attention": method}
    for found in pool.on_grid(degrees, train, corpus, changes):
        for have, wanted in zip(found, want, strict=True):
            assert have == pytest.approx(wanted, rel=1e-9)


BF16: dict[str, Any] = {
    "train__dtype": "bf16",
    "model__embed": 256,
    "model__head_dim": 64,
    "data__seq_len": 128,
}
"""Enough for the kernels of flash attention."""


@pytest.mark.parametrize("data", [PACKED, WINDOWS, {"model__attn_logit_softcap": 5.0}], ids=str)
@pytest.mark.parametrize("degrees", GRIDS, ids=str)
def test_kernels_of_bf16_have_the_losses_of_one_rank(
    pool: NcclPools, corpus: str, degrees: dict[str, int], data: dict[str, Any]
) -> None:
    (want,) = pool.on_grid({"data": 1}, train, corpus, data | BF16)
    for method in ("auto", "kv_gather") if "model__sliding_window" in data else METHODS:
        changes = data | BF16 | {"plan__context_attention": method}
        for found in pool.on_grid(degrees, train, corpus, changes, timeout=300.0):
            for have, wanted in zip(found, want, strict=True):
                assert have == pytest.approx(wanted, rel=3e-2), method


@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
@pytest.mark.parametrize("method", ["kv_gather", "ring", "ulysses"])
def test_overlap_changes_no_bit(pool: NcclPools, corpus: str, method: str, dtype: str) -> None:
    changes = PACKED | (BF16 if dtype == "bf16" else {}) | {"plan__context_attention": method}
    without = changes | {"plan__overlap": ()}
    for degrees in ({"context": 2, "row": 2}, {"context": 4, "depth": 2}):
        one, other = (pool.on_grid(degrees, train, corpus, some) for some in (changes, without))
        assert one == other
