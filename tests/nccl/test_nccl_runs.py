"""Runs over NCCL: the trainer with all its ways, resumed elsewhere, without allocations, sealed."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from pool import NcclPools
from ranvier.grid import Grid
from training import run_of, stored, trainer_of

pytestmark = pytest.mark.nccl
STEPS = 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stored(tmp_path_factory.mktemp("corpus"))


def train(grid: Grid, corpus: str, out: str, changes: dict[str, Any], resume: str) -> list[Any]:
    """Losses and gradient norms of a run, whose groups are all made before its first step."""
    run = run_of(out, dict(grid.degrees), 2 * STEPS if resume else STEPS, **changes)
    trainer = trainer_of(grid, corpus, run)
    if resume:
        trainer.checkpointer.resume_from(Path(resume))
    if run.checkpoint.interval >= 0 and out:
        _ = trainer.checkpointer.saver
    grid.seal_groups()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="A group over")
        rows = list(trainer.run_steps())
        held_out = trainer.compute_val_loss()
        if out:
            trainer.save_checkpoint()
    return [(row["loss"], row["grad_norm"]) for row in rows] + [held_out]


def train_alone(corpus: str, changes: dict[str, Any]) -> list[Any]:
    """The same in this process, on the CPU; of the settings only those that change results."""
    sections = ("model", "lora", "optim", "data")
    kept = {name: value for name, value in changes.items() if name.split("__")[0] in sections}
    return train(Grid({}), corpus, "", kept, "")


def assert_close(found: list[Any], want: list[Any], rel: float = 1e-9) -> None:
    for have, wanted in zip(found, want, strict=True):
        assert have == pytest.approx(wanted, rel=rel)


CASES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"data": 2}, {"memory__parameters": "host", "memory__optimizer_states": "host"}),
    ({"pipe": 2, "depth": 2}, {"plan__micro_batch": 1, "plan__reshard_after": "step"}),
    ({"depth": 2, "row": 2}, {"lora__rank": 4, "plan__recompute": "full"}),
    ({"pipe": 2, "row": 2}, {"lora__rank": 4, "plan__micro_batch": 2}),
    ({"pipe": 2, "data": 2}, {"plan__virtual_stages": 2, "plan__micro_batch": 1}),
    (
        {"pipe": 2},
        {"plan__virtual_stages": 2, "plan__schedule": "interleaved", "plan__micro_batch": 1},
    ),
    ({"pipe": 2, "row": 2}, {"plan__schedule": "zero-bubble", "plan__micro_batch": 1}),
    ({"pipe": 2, "col": 2}, {"plan__schedule": "gpipe", "plan__micro_batch": 2}),
    (
        {"pipe": 4},
        {"plan__schedule": "1f1b", "plan__micro_batch": 1, "model__tie_embeddings": True},
    ),
    ({"pipe": 2, "row": 2}, {"plan__vocab_over_pipe": True, "plan__micro_batch": 1}),
    ({"depth": 2}, {"plan__overlap": (), "plan__recompute": "selective"}),
    (
        {"row": 2, "col": 2},
        {"memory__recompute_collectives": "save", "plan__recompute": "selective"},
    ),
    ({"data": 2, "row": 2}, {"data__goldfish_k": 3}),
    (
        {"pipe": 2, "depth": 2},
        {"data__goldfish_k": 4, "data__goldfish_strategy": "hash-table", "plan__micro_batch": 1},
    ),
    ({"context": 2, "col": 2}, {"data__goldfish_k": 2, "data__goldfish_strategy": "static"}),
    (
        {"row": 2, "col": 2, "depth": 2},
        {"data__goldfish_k": 3, "data__goldfish_strategy": "random"},
    ),
]


@pytest.mark.parametrize(("degrees", "changes"), CASES, ids=str)
def test_a_run_over_nccl_equals_one_process(
    pool: NcclPools, corpus: str, degrees: dict[str, int], changes: dict[str, Any]
) -> None:
    want = train_alone(corpus, changes)
    for found in pool.on_grid(degrees, train, corpus, "", changes, ""):
        assert_close(found, want)


@pytest.mark.parametrize(
    "policy", ["message_driven", "1f1b", "gpipe", "zero-bubble", "interleaved"]
)
def test_every_policy_runs_on_eight_ranks(pool: NcclPools, corpus: str, policy: str) -> None:
    changes: dict[str, Any] = {"plan__schedule": policy, "plan__micro_batch": 1}
    changes |= {"plan__virtual_stages": 2} if policy == "interleaved" else {}
    want = train_alone(corpus, {})
    for found in pool.on_grid({"pipe": 2, "row": 2, "depth": 2}, train, corpus, "", changes, ""):
        assert_close(found, want)


@pytest.mark.parametrize("degrees", [{"row": 2}, {"depth": 2, "row": 2}, {"pipe": 2, "data": 2}])
def test_compiled_blocks_equal_eager_ones(
    pool: NcclPools, corpus: str, degrees: dict[str, int]
) -> None:
    changes = {"plan__compile": "on", "plan__micro_batch": 2}
    want = train_alone(corpus, {})
    for found in pool.on_grid(degrees, train, corpus, "", changes, "", timeout=300.0):
        assert_close(found, want)


def test_a_run_is_resumed_on_another_grid(pool: NcclPools, corpus: str, tmp_path: Path) -> None:
    saved = {"checkpoint__interval": STEPS}
    pool.on_grid({"pipe": 2, "row": 2}, train, corpus, str(tmp_path / "a"), saved, "")
    (checkpoint,) = (tmp_path / "a" / "checkpoints").glob("step-*")
    want = train(Grid({}), corpus, "", {}, str(checkpoint))
    for degrees in ({"depth": 2, "data": 2}, {"pipe": 2}):
        for found in pool.on_grid(degrees, train, corpus, "", {}, str(checkpoint)):
            assert_close(found, want)


def count_allocations(grid: Grid, corpus: str, changes: dict[str, Any]) -> list[tuple[int, int]]:
    """Bytes that the allocator has taken from the device and given back, after each step."""
    run = run_of("", dict(grid.degrees), 8, train__dtype="fp32", **changes)
    trainer = trainer_of(grid, corpus, run)
    found = []
    for _ in trainer.run_steps():
        stats = torch.cuda.memory_stats()
        found.append((stats["reserved_bytes.all.allocated"], stats["reserved_bytes.all.freed"]))
    return found


@pytest.mark.parametrize("policy", ["message_driven", "1f1b", "gpipe", "zero-bubble"])
def test_steps_after_the_second_allocate_nothing(pool: NcclPools, corpus: str, policy: str) -> None:
    """Rows come one step behind the device: the third tells of two steps or three."""
    changes = {"plan__schedule": policy, "plan__micro_batch": 1}
    for found in pool.on_grid({"pipe": 2, "row": 2}, count_allocations, corpus, changes):
        assert len(set(found[3:])) == 1, found


def list_groups(grid: Grid, corpus: str) -> list[tuple[str, str]]:
    """Axes, channels and backends of what a run makes that shares no group with others."""
    own = Grid(dict(grid.degrees), connected=True)
    list(trainer_of(own, corpus, run_of("", dict(own.degrees), 1, plan__micro_batch=2)).run_steps())
    return [(f"{'·'.join(one.names)} {one.channel}", one.backend) for one in own.communicators]


def test_only_used_communicators_are_made(pool: NcclPools, corpus: str) -> None:
    assert pool.on_grid({"data": 2}, list_groups, corpus)[0] == [("data ", "nccl")]
    assert sorted(pool.on_grid({"pipe": 2}, list_groups, corpus)[0]) == [
        ("pipe ", "nccl"),
        ("pipe control", "gloo"),
        ("pipe down", "nccl"),
        ("pipe up", "nccl"),
    ]


def test_verify_runs_over_nccl() -> None:
    command = [
        *(sys.executable, "-m", "ranvier", "verify", "--train.backend", "nccl"),
        *("--launch.share-gpu", "True", "--plan.pipe", "2", "--plan.row", "2", "--plan.data", "1"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ)
    assert done.returncode == 0 and "verified" in done.stdout, done.stdout + done.stderr
