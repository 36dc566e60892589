"""`ranvier verify` trains, saves, reloads and trains on; it sees faults in each of these."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from commands import call
from ranvier.config.run import RunConfig, run_from_tables
from ranvier.grid import Grid
from ranvier.launch import ProcessInfo
from ranvier.optim import pruning as prune
from ranvier.tools.verify import AFTER_STEPS_LIMIT, ONE_PASS_LIMIT, shrink_run
from ranvier.tools.verify_run import (
    SAVED_STEPS,
    TOTAL_STEPS,
    RunVerification,
    short_run,
    train_and_judge,
)
from ranvier.train import pruning
from ranvier.train.pruning import MaskLoader
from ranvier.train.resolve import ResolveContext, resolve_run
from ranvier.train.resume import checkpointing
from ranvier.train.resume import run_directory as folders

CPU = torch.device("cpu")
WEIGHTS_OF_MASKS = MaskLoader.weights_to_fill


def report_of(**changes: Any) -> RunVerification:
    """What is found of a run on one rank; changes: `section__setting=value`."""
    run = RunConfig()
    for name, value in changes.items():
        section, _, key = name.partition("__")
        part = dataclasses.replace(getattr(run, section), **{key: value})
        run = dataclasses.replace(run, **{section: part})
    return train_and_judge(
        shrink_run(resolve_run(run, ResolveContext(world_size=1))), ProcessInfo(), Grid({}), CPU
    )


def wrong(report: RunVerification) -> list[str]:
    """What differs, in short."""
    limits = {True: ONE_PASS_LIMIT, False: AFTER_STEPS_LIMIT}
    found = [
        what.partition(" (largest")[0]
        for what, (off, once) in report.differences.items()
        if not off <= limits[once]
    ]
    return found + report.complaints


def without_masks(masks: MaskLoader) -> Any:
    """Where weights rest, with nothing pruned: masks follow what they are filled with."""
    state = WEIGHTS_OF_MASKS(masks)
    for bucket in masks.parallel.bucket_scheduler.buckets:
        bucket.set_sparsity_mask(None)
    return state


def with_masks_of_initial_values(masks: MaskLoader) -> Any:
    """The fault: what is read later is pruned inside of the masks of the initial values."""
    state = without_masks(masks)
    prune.prune_buckets(
        masks.parallel.bucket_scheduler, pruning.choose_masks(masks.run, masks.parallel, 0)
    )
    return state


PRUNED: list[dict[str, Any]] = [
    {"prune__sparsity": 0.5, "memory__optimizer_states": "host", "memory__parameters": "host"},
    {"prune__n_m_pattern": "2:4", "memory__optimizer_states": "host"},
    {"prune__sparsity": 0.7, "prune__update_interval": 5, "prune__final_step": 50},
    {"prune__n_m_pattern": "1:8"},
]


@pytest.mark.parametrize(
    "changes", [PRUNED[0], *(pytest.param(x, marks=pytest.mark.full) for x in PRUNED[1:])]
)
def test_a_pruned_run_on_the_host_is_verified(changes: dict[str, Any]) -> None:
    with mock.patch.object(MaskLoader, "weights_to_fill", without_masks):
        report = report_of(**changes)
    assert wrong(report) == [] and len(report.differences) == 8


def test_samples_with_canaries_and_dropped_targets_are_verified() -> None:
    changes = {"data__goldfish_k": 2, "data__canaries": "canaries.jsonl", "data__canary_samples": 9}
    report = report_of(**changes, train__canary_interval=1)
    assert wrong(report) == [] and len(report.differences) == 7


def test_masks_of_other_weights_are_seen() -> None:
    with mock.patch.object(MaskLoader, "weights_to_fill", with_masks_of_initial_values):
        found = wrong(report_of(prune__sparsity=0.5))
    assert "masks of pruned matrices: share that differs" in found
    assert "loss of step 1" in found and "weights in the checkpoint" in found


def test_a_wrong_reload_and_a_wrong_end_are_seen() -> None:
    take, record = checkpointing._restore_facts, folders.update_run_json

    def from_the_first_sample(state: Any, manifest: Any) -> None:
        take(state, manifest)
        state.samples = 0

    def unfinished(folder: Path, **facts: Any) -> None:
        record(folder, **{**facts, "status": "running"} if "status" in facts else facts)

    with (
        mock.patch.object(checkpointing, "_restore_facts", from_the_first_sample),
        mock.patch.object(folders, "update_run_json", unfinished),
    ):
        found = wrong(report_of())
    assert found[:2] == ["loss of step 3 (reloaded)", "norm of step 3 (reloaded)"]
    assert found[2:] == [
        "weights in the checkpoint",
        "run.json has status 'running', but the run has finished",
    ]


@pytest.mark.full
def test_what_was_verified_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--memory.optimizer-states", "host", "--memory.parameters", "host")
    assert call("verify", "--nproc", "1", *words) == 0
    said = capsys.readouterr().out
    assert (
        "and continued for one step: optimizer states in host memory, weights in host memory"
        in said
    )
    assert "loss of step 3 (reloaded)" in said and "verified" in said.splitlines()[-1]


@pytest.mark.parametrize(
    "tables",
    [
        {"lora": {"rank": 4, "alpha": 8.0, "dora": True}},
        {"prune": {"sparsity": 0.5, "update_interval": 4, "final_step": 20}},
        {"memory": {"optimizer_states": "host", "auto": False}},
        {"optim": {"warmup_steps": 40}, "train": {"steps": 50, "float8": "off"}},
        {"plan": {"recompute": "memory_budget"}},
        {"checkpoint": {"interval": 5}, "guard": {"on_spike": "rewind"}},
    ],
    ids=str,
)
def test_the_short_run_of_any_settings_is_one_that_trains(
    tables: dict[str, Any], tmp_path: Path
) -> None:
    """A run is resolved on its ranks, so what verify makes of it must pass all checks."""
    run = shrink_run(resolve_run(run_from_tables(tables), ResolveContext(world_size=1)))
    for steps in (SAVED_STEPS, TOTAL_STEPS):
        short = short_run(run, tmp_path, steps=steps)
        assert resolve_run(short, ResolveContext(world_size=1, device=CPU)).train.dtype == "fp64"
