"""Kills and signals at each phase of a run, and what a checkpoint's readers and writers see.

Cases A and D of the reliability list; benchmarks/faults.py plays all of them with real processes.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import SMALL_OPTIONS, call, ended, losses, metrics, started
from ranvier.checkpoint import checksummed_file, load, rank_file
from ranvier.checkpoint.async_saver import AsyncSaver
from ranvier.checkpoint.directory import RetentionPolicy, find_checkpoints
from ranvier.errors import CheckpointError, RanvierError, WriteError
from ranvier.grid import Grid
from ranvier.sharding import Shard, ShardedStateDict
from ranvier.train.resume import run_directory as folders

STEPS = 9
WORDS = ["train", *SMALL_OPTIONS, "--train.steps", str(STEPS), "--train.output-dir", "run"]
PAIR = [*WORDS, "--nproc", "2"]
EVERY = ["--checkpoint.interval", "2", "--checkpoint.async-save", "False"]
KILLS = """
import os
from ranvier.checkpoint import load as _load
from ranvier.buckets.scheduler import BucketScheduler
from ranvier.optim import optimizer as _optimizer
NOW = [None]

def once(name, step, rank=1):
    "Kill this rank, the first time that any has come here."
    now = NOW[0]
    if now is None or now.step != step or now.grid.rank != rank or os.path.exists(name):
        return
    open(name, "w").close()
    os.kill(os.getpid(), 9)

def before(owner, name, action):
    inner = getattr(owner, name)
    def patched(*arguments, **options):
        action()
        return inner(*arguments, **options)
    setattr(owner, name, patched)

def hook(module, inputs, output):
    once("forward", 1)
    if output.requires_grad:
        output.register_hook(lambda _: once("backward", 2))

_post = Trainer.__post_init__
def _made(self):
    _post(self)
    NOW[0] = self
    next(iter(self.state.model.blocks)).register_forward_hook(hook)
Trainer.__post_init__ = _made

before(BucketScheduler, "_reduce_over_data", lambda: once("reduce", 3))
before(_optimizer.fused_adamw, "fused_adamw", lambda: once("optimizer", 4))
before(Trainer, "next_lr", lambda: once("scheduler", 5))
before(Trainer, "read_step", lambda: once("logging", 6))
before(Trainer, "compute_val_loss", lambda: once("evaluation", 8))
before(_load.ElementCopy, "copy_from", lambda: once("load", 0, rank=0))
"""
PHASES = ("forward", "backward", "reduce", "optimizer", "scheduler", "logging", "evaluation")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    code, _, errors = ended(started(folder, *PAIR))
    assert code == 0, errors
    return folder / "run"


@pytest.mark.full
def test_a_kill_in_any_phase_of_a_step_changes_no_loss(tmp_path: Path, whole: Path) -> None:
    """A5 (forward, backward, reduction, update, schedule, logging, evaluation), A12 (load)."""
    words = [*PAIR, *EVERY, "--train.eval-interval", "4", "--data.validation-fraction", "0"]
    process = started(tmp_path, *words, patch=("ranvier.train.trainer", KILLS))
    code, _, errors = ended(process)
    assert code == 0, errors
    killed = [name for name in (*PHASES, "load") if (tmp_path / name).exists()]
    assert killed == [*PHASES, "load"], errors
    assert errors.count("Restarting all ranks") == len(killed), errors
    assert losses(tmp_path / "run") == losses(whole)
    assert [row["step"] for row in metrics(tmp_path / "run")] == list(range(STEPS))
    ours, theirs = (
        load.load_full_tensors(find_checkpoints(run / "checkpoints")[-1])
        for run in (tmp_path / "run", whole)
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


SENT = """
import os
from ranvier.pipeline.step import PipelineStep
_send, _count = PipelineStep._send_result, []
def _sent(self, *arguments):
    _count.append(0)
    if len(_count) == 3 * 4 + 2 and self.executor.grid.rank == 1 and not os.path.exists("once"):
        open("once", "w").close()
        os.kill(os.getpid(), 9)
    return _send(self, *arguments)
PipelineStep._send_result = _sent
"""


@pytest.mark.full
def test_a_kill_between_messages_of_stages_leaves_no_half_update(
    tmp_path: Path, whole: Path
) -> None:
    """A6: four micro-batches are on their way."""
    words = [*PAIR, *EVERY, "--plan.pipe", "2", "--plan.micro-batch", "2"]
    code, out, errors = ended(started(tmp_path, *words, patch=("ranvier.train.trainer", SENT)))
    assert code == 0 and "Rank 1 was killed by signal 9" in errors, errors
    assert "Resuming after step 2" in out
    assert losses(tmp_path / "run") == pytest.approx(losses(whole), rel=1e-6)


ALWAYS = """
import os
_issue = Trainer.issue_step
def _killed(self, *arguments, **options):
    if self.state.step == 5 and self.grid.rank == 1:
        os.kill(os.getpid(), 9)
    return _issue(self, *arguments, **options)
Trainer.issue_step = _killed
"""


@pytest.mark.full
def test_a_run_goes_on_with_a_smaller_grid(tmp_path: Path, whole: Path) -> None:
    """A25, elastic: one of two ranks is lost for good."""
    words = [*PAIR, *EVERY, "--launch.fallback-grids", "data=1", "--launch.max-restarts", "1"]
    code, _, errors = ended(started(tmp_path, *words, patch=("ranvier.train.trainer", ALWAYS)))
    assert code == 0 and "Continuing on the grid data=1 with 1 rank(s)" in errors, errors
    assert losses(tmp_path / "run") == pytest.approx(losses(whole), rel=1e-6)
    (launch,) = folders.read_launches(tmp_path / "run")
    assert [failure["grid"] for failure in launch["failures"]] == ["data=2", "data=2"]


def test_a_signal_while_a_save_runs_saves_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A18: that save is finished, then the last step is saved."""
    monkeypatch.chdir(tmp_path)
    write = rank_file.write_rank_file

    def slow(folder: Path, *arguments: Any) -> None:
        if ".step-00000004" in folder.name:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
        write(folder, *arguments)

    monkeypatch.setattr(rank_file, "write_rank_file", slow)
    assert (
        call(*WORDS, "--nproc", "1", "--checkpoint.interval", "2", "--checkpoint.keep-latest", "0")
        == 75
    )
    names = [path.name for path in find_checkpoints(tmp_path / "run" / "checkpoints")]
    done = len(metrics(tmp_path / "run"))
    assert names[:2] == ["step-00000002", "step-00000004"] and names[-1] == f"step-{done:08}"
    assert len(names) == len({name.partition(".")[0] for name in names}) and done < STEPS


# ---- savers and readers -----------------------------------------------------------------


def state(value: float) -> ShardedStateDict:
    """A tensor of several blocks and a small one."""
    large, small = torch.full((700, 700), value), torch.full((3,), value)
    return {
        f"{name}.master": (x, Shard(tuple(x.shape), (0,) * x.dim(), *(tuple(x.shape),) * 2))
        for name, x in (("a", large), ("b", small))
    }


def saver_in(folder: Path, **keep: Any) -> AsyncSaver:
    return AsyncSaver(folder, Grid({}), torch.device("cpu"), RetentionPolicy(**keep))


FAILURES = [
    (OSError(errno.ENOSPC, "No space left on device"), WriteError),
    (OSError(errno.EIO, "Input/output error"), WriteError),
    (MemoryError(), MemoryError),
    (SystemExit(0), SystemExit),
]


@pytest.mark.parametrize(("error", "kind"), FAILURES, ids=["full", "twice", "memory", "exit"])
def test_a_writing_thread_that_ends_is_an_error_of_the_next_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    kind: type[BaseException],
) -> None:
    """A11: nothing hangs, nothing half is committed, and the next save works."""
    saver = saver_in(tmp_path)
    saver.save(1, state(1.0), {})
    saver.finish_saving()
    with monkeypatch.context() as patch:

        def fails(*_: Any) -> None:
            raise error

        patch.setattr(checksummed_file, "write_checksummed", fails)
        saver.save(2, state(2.0), {})
        saver.wait_for_copies()
        with pytest.raises(kind):
            saver.wait_for_save(10.0)
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step-00000001"]
    saver.save(3, state(3.0), {})
    assert saver.finish_saving() == tmp_path / "step-00000003"


@pytest.fixture
def saving(tmp_path: Path) -> Iterator[Path]:
    """A directory in which each checkpoint replaces the one before."""
    over = threading.Event()

    def work() -> None:
        saver, step = saver_in(tmp_path, keep_latest=1), 0
        while not over.is_set():
            step += 1
            saver.save(step, state(float(step)), {})
            saver.finish_saving()

    thread = threading.Thread(target=work)
    thread.start()
    yield tmp_path
    over.set()
    thread.join()


@pytest.mark.full
def test_a_reader_sees_a_whole_checkpoint_or_none(saving: Path) -> None:
    """D18: what is read may be removed meanwhile."""
    good, limit = 0, time.monotonic() + 20.0
    while good < 30 and time.monotonic() < limit:
        for path in find_checkpoints(saving)[-1:]:
            try:
                read = load.load_full_tensors(path)
            except CheckpointError:  # it is gone: a clean error, not half of it
                continue
            except RanvierError as error:
                pytest.fail(f"{type(error).__name__}: {error}")
            values = {float(x) for tensor in read.values() for x in tensor.unique()}
            assert values == {float(path.name.removeprefix("step-"))}
            good += 1
    assert good == 30
