"""Whole runs whose states and weights rest on the host: checkpoints, other grids, the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from commands import SMALL_OPTIONS, call
from pool import Pool
from ranvier.checkpoint.directory import find_checkpoints
from ranvier.checkpoint.load import load_full_tensors
from ranvier.comm import collectives
from ranvier.errors import PlanError
from ranvier.grid import Axis, Grid
from training import losses_of, run_of, stored

EVEN = {"optim__schedule": "wsd", "optim__warmup_steps": 0, "optim__decay_ratio": 0.0}
"""The learning rate does not depend on how many steps there will be."""
HOST = {"memory__optimizer_states": "host", "memory__offload_tile": 4096, **EVEN}
AWAY = {**HOST, "memory__parameters": "host"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stored(tmp_path_factory.mktemp("corpus"))


def test_a_run_goes_on_wherever_states_rest(pool: Pool, corpus: str, tmp_path: Path) -> None:
    """From the device to the host on another grid, and back."""
    whole = losses_of(Grid({}), corpus, str(tmp_path / "whole"), 6, changes=EVEN)
    last, losses = "", list[float]()
    for steps, degrees, changes in ((2, {}, EVEN), (4, {"data": 2}, AWAY), (6, {"row": 2}, HOST)):
        out = str(tmp_path / str(steps))
        ranks = pool.on_grid(degrees, losses_of, corpus, out, steps, last, changes)
        losses += ranks[0]
        last = str(find_checkpoints(Path(out) / "checkpoints")[-1])
    assert losses == pytest.approx(whole, rel=1e-12)
    want, have = (
        load_full_tensors(find_checkpoints(tmp_path / "whole" / "checkpoints")[-1]),
        load_full_tensors(Path(last)),
    )
    assert want.keys() == have.keys()
    for name, x in want.items():
        assert torch.allclose(x, have[name], rtol=1e-9, atol=1e-12), name


def losses_read_late(
    grid: Grid, corpus: str, steps: int, changes: dict[str, Any]
) -> tuple[list[float], int]:
    """Losses of a run, and gathers whose input lost its memory before they were awaited."""
    gather, lost = collectives.all_gather, 0

    def watched(x: torch.Tensor, axis: Axis, dim: int = 0) -> collectives.PendingTensor:
        pending = gather(x.clone(), axis, dim)  # a copy: memory that is gone would end the process
        wait = pending.wait

        def late() -> torch.Tensor:
            nonlocal lost
            lost += x.untyped_storage().nbytes() < x.nbytes
            return wait()

        pending.wait = late  # type: ignore[method-assign]
        return pending

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "all_gather", watched)
        return losses_of(
            grid, corpus, "", steps, changes={**changes, "checkpoint__interval": -1}
        ), lost


RELATIVES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"pipe": 2, "depth": 2}, {"memory__parameters": "host", "plan__schedule": "1f1b"}),
    ({"pipe": 2, "depth": 2}, {"memory__parameters": "host", "plan__schedule": "zero-bubble"}),
    ({"pipe": 2, "depth": 2}, {**AWAY, "plan__virtual_stages": 2, "model__layers": 6}),
    ({"pipe": 2, "data": 2, "depth": 2}, {**AWAY, "plan__overlap": ("dw",)}),
    ({"pipe": 2, "depth": 2, "row": 2}, {**AWAY, "plan__recompute": "full"}),
    ({"pipe": 2, "depth": 2}, {**AWAY, "plan__reshard_after": "step"}),
]


@pytest.mark.parametrize(
    ("degrees", "changes"),
    [
        ({"pipe": 2, "depth": 2}, AWAY),
        *(pytest.param(*one, marks=pytest.mark.full) for one in RELATIVES),
    ],
)
def test_memory_of_weights_stays_while_it_is_read(
    pool: Pool, corpus: str, degrees: dict[str, int], changes: dict[str, Any]
) -> None:
    """A stage that uses a block twice in a row gathers it anew while the first gather arrives."""
    changes = {"model__layers": 4, **EVEN, **changes}
    shape = {key: changes[key] for key in ("model__layers", *EVEN)}
    whole = losses_of(Grid({}), corpus, "", 3, changes={**shape, "checkpoint__interval": -1})
    for losses, lost in pool.on_grid(degrees, losses_read_late, corpus, 3, changes):
        assert lost == 0
        assert losses == pytest.approx(whole, rel=1e-12)


@pytest.mark.sample(1)
@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_narrow_moments_go_on_to_the_bit(corpus: str, tmp_path: Path, moments: str) -> None:
    how: dict[str, Any] = {"train__dtype": "fp32", "optim__state_dtype": moments, **AWAY}
    whole = losses_of(Grid({}), corpus, str(tmp_path / "whole"), 5, changes=how)
    first = losses_of(Grid({}), corpus, str(tmp_path / "a"), 2, changes=how)
    last = str(find_checkpoints(tmp_path / "a" / "checkpoints")[-1])
    assert first + losses_of(Grid({}), corpus, str(tmp_path / "b"), 5, last, how) == whole


@pytest.mark.full
def test_the_command_keeps_states_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        *SMALL_OPTIONS,
        "--train.output-dir",
        "run",
        "--memory.optimizer-states",
        "disk",
        "--memory.offload-dir",
        "disk",
    ]
    assert call("train", *words, "--memory.parameters", "host") == 0
    assert list((tmp_path / "disk").iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"memory__optimizer_states": "disk"},
            r"memory.optimizer_states='disk' without memory.offload_dir",
        ),
        (
            {"memory__offload_dir": "x"},
            r"memory.offload_dir='x' with memory.optimizer_states='device'",
        ),
        (
            {"memory__optimizer_states_on_device_gib": 1.0},
            r"memory.optimizer_states_on_device_gib=1.0 with memory.optimizer_states='device'",
        ),
        ({"memory__offload_tile": 10}, r"memory.offload_tile=10 is too small"),
        (
            {**HOST, "plan__cuda_graph": True},
            r"memory.optimizer_states='host' with plan.cuda_graph=True",
        ),
        (
            {**AWAY, "guard__replay_interval": 3},
            r"memory.parameters='host' with guard.replay_interval=3",
        ),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        run_of("", {}, 1, **changes)


def test_states_that_do_not_fit_the_host_are_refused(corpus: str) -> None:
    with pytest.raises(PlanError, match=r"GiB of host memory per rank, but only 9.99e-07 GiB"):
        losses_of(Grid({}), corpus, "", 1, changes={**HOST, "memory__host_limit_gib": 1e-6})
