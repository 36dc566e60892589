"""Checkpoints of a train state: no trainer is needed to save one and to resume from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ranvier.checkpoint.directory import find_checkpoints
from ranvier.config.run import RunConfig
from ranvier.data.dataset import open_data
from ranvier.grid import Grid
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.train.build_model import build_model
from ranvier.train.health.loss_guard import LossGuard
from ranvier.train.resume import checkpointer
from ranvier.train.resume.checkpointer import Checkpointer
from ranvier.train.resume.checkpointing import state_tensors
from ranvier.train.state import TrainState
from training import run_of, stored

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stored(tmp_path_factory.mktemp("corpus"))


def checkpointer_of(run: RunConfig, corpus: str) -> Checkpointer:
    """The checkpointer of a state that no step has changed."""
    model = build_model(run, Grid({}), CPU, local_ranks=1)
    optimizer = Optimizer(get_parallel_model(model).bucket_scheduler)
    state = TrainState(model, optimizer, LossGuard(run.guard, CPU))
    data = open_data([corpus], seq=run.data.seq_len, seed=run.train.seed, held_out=0.1)
    return Checkpointer(run, state, data)


def test_a_state_is_resumed_as_it_was_saved(tmp_path: Path, corpus: str) -> None:
    run = run_of(str(tmp_path), {}, 8)
    first = checkpointer_of(run, corpus)
    first.state.step, first.state.samples, first.state.val_loss = 3, 24, 5.5
    first.state.guard.spikes = 2
    for number, (name, (part, _)) in enumerate(state_tensors(first.state).items()):
        if not name.startswith("random."):
            part.fill_(number)
    first.record_read_step(3)
    path = first.save(wait=True)
    second = checkpointer_of(run, corpus)
    assert path is not None and second.resume_from(path) == []
    state = second.state
    assert (state.step, state.samples, state.val_loss) == (3, 24, 5.5)
    assert state.guard.counts == (0, 2, 0, 0)
    found = state_tensors(state)
    for name, (part, _) in state_tensors(first.state).items():
        assert torch.equal(part, found[name][0]), name


def test_the_guard_of_a_step_is_added_once_the_step_is_read(tmp_path: Path, corpus: str) -> None:
    run = run_of(str(tmp_path), {}, 8)
    first = checkpointer_of(run, corpus)
    first.state.step, first.state.samples = 1, 8
    first.save(wait=False)
    first.state.guard.spikes = 1
    first.record_read_step(1)
    second = checkpointer_of(run, corpus)
    second.resume_from(*first.latest_checkpoints())
    assert second.state.guard.spikes == 1


def test_a_step_is_saved_once_and_later_ones_are_set_aside(tmp_path: Path, corpus: str) -> None:
    run = run_of(str(tmp_path), {}, 8, checkpoint__keep_latest=0)
    first = checkpointer_of(run, corpus)
    for step in (1, 2, 2):
        first.state.step = step
        first.record_read_step(step)
        first.save(wait=True)
    early, late = find_checkpoints(first.checkpoint_dir)
    second = checkpointer_of(run, corpus)
    assert second.describe_latest() == str(late)
    (line,) = second.resume_from(early)
    assert (
        line.startswith("set aside, because the run resumes from an earlier step")
        and late.name in line
    )
    assert second.latest_checkpoints() == [early]


def test_a_save_is_skipped_while_the_previous_one_is_written(
    tmp_path: Path,
    corpus: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(checkpointer, "SAVE_WAIT_SECONDS", 0.0)
    first = checkpointer_of(run_of(str(tmp_path), {}, 8), corpus)
    monkeypatch.setattr(first.saver, "wait_for_save", lambda seconds: seconds > 0.0)
    first.state.step = 1
    assert first.save(wait=False) is None
    assert first.skipped_saves == 1 and find_checkpoints(first.checkpoint_dir) == []
    assert "Skipped the checkpoint of step 1" in capsys.readouterr().err
