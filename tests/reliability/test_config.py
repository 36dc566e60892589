"""Settings that cannot be, that ranks do not share, or that change (cases F of the list; C10, I4).

Already tested elsewhere: F1 tests/config/test_plan.py (what does not divide), F2
tests/config/test_run.py and tests/cli/test_cli.py (unknown keys), F5 tests/cli/test_cli.py (options
win over the file), F8 tests/train/memory/test_resolve.py (too small a budget).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from commands import SMALL_OPTIONS, call, metrics
from pool import Pool
from ranvier.checkpoint import directory as folders
from ranvier.config.run import RunConfig
from ranvier.config.sections import TrainConfig
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.train import train
from ranvier.train.health.determinism import check_deterministic, deterministic_algorithms
from ranvier.train.resume.run_directory import check_output_dir
from training import losses_of, run_of, stored, trainer_of

FAST = [*SMALL_OPTIONS, "--nproc", "1"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stored(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("optim__lr", 0.0),
        ("optim__lr", -1.0),
        ("optim__lr", float("nan")),
        ("optim__lr", float("inf")),
        ("optim__beta1", 1.0),
        ("optim__beta2", 1.5),
        ("optim__warmup_steps", 5),
        ("model__position_embedding", "learned"),
        ("checkpoint__interval", -2),
        ("checkpoint__keep_latest", -1),
        ("guard__max_skipped_steps", -1),
        ("guard__spike_threshold", 0.5),
        ("guard__spike_threshold", float("nan")),
        ("guard__spike_window", 2),
    ],
    ids=lambda value: f"F3 F7 {value}",
)
def test_senseless_numbers_are_refused(name: str, value: Any) -> None:
    """F3, F7: before any work, with the setting, its value and what to use."""
    more = {"model__max_seq": 8} if value == "learned" else {}
    with pytest.raises(PlanError, match=r"Use ") as caught:
        run_of("", {}, 3, **{name: value}, **more)
    assert caught.value.exit_code == 64
    assert name.replace("__", ".") in str(caught.value) or "max_seq" in str(caught.value)


@pytest.mark.parametrize("every", [0, 100], ids=["F7 every 0", "F7 longer than the run"])
def test_the_last_step_is_saved_whatever_the_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """F7: an interval longer than the run, and keep=0, which keeps all."""
    monkeypatch.chdir(tmp_path)
    words = [
        "--train.steps",
        "2",
        "--checkpoint.interval",
        str(every),
        "--checkpoint.keep-latest",
        "0",
    ]
    assert call("train", *FAST, *words, "--train.output-dir", "run") == 0
    assert [p.name for p in folders.find_checkpoints(tmp_path / "run" / "checkpoints")] == [
        "step-00000002"
    ]


def disagreeing(grid: Grid, equal: bool) -> str:
    """What is said of ranks whose settings differ."""
    lr = 1e-3 if equal or grid.rank != 1 else 2e-3
    run = run_of("", dict(grid.degrees), 3 if equal or grid.rank < 2 else 4, optim__lr=lr)
    try:
        train.check_same_settings(run, grid, torch.device("cpu"))
    except PlanError as error:
        return f"{error.exit_code} {error}"
    return ""


def test_ranks_with_other_settings_are_named(pool: Pool) -> None:
    """F4: all ranks stop, and each names the keys and the ranks."""
    assert pool.on_grid({"data": 4}, disagreeing, True) == [""] * 4
    found = pool.on_grid({"data": 4}, disagreeing, False)
    assert len(set(found)) == 1 and found[0].startswith("64 "), found
    for part in (
        "optim.lr=0.002 on rank 1, but 0.001 on rank 0",
        "train.steps=4 on rank 2, but 3 on rank 0",
        "train.steps=4 on rank 3",
    ):
        assert part in found[0]


def test_odd_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F6: spaces, other letters, relative paths; a name too long is refused."""
    monkeypatch.chdir(tmp_path)
    for name in ("a b/ö ~x", "./sub/../run"):
        assert call("train", *FAST, "--train.steps", "1", "--train.output-dir", name) == 0
        assert len(metrics(tmp_path / name)) == 1
    with pytest.raises(PlanError, match="cannot be a directory"):
        check_output_dir(RunConfig(train=TrainConfig(output_dir="x" * 10_000)))


def test_a_run_goes_on_with_other_lengths_and_batches(tmp_path: Path, corpus: str) -> None:
    """F9: steps and batch may change; the next sample follows the last that was used."""
    grid = Grid({})
    losses_of(grid, corpus, str(tmp_path), 2)
    checkpoint = folders.find_checkpoints(tmp_path / "checkpoints")[-1]
    for batch, steps in ((8, 5), (4, 3)):
        run = run_of(str(tmp_path), {}, steps, plan__global_batch=batch)
        trainer = trainer_of(grid, corpus, run)
        trainer.checkpointer.resume_from(checkpoint)
        rows = list(trainer.run_steps())
        assert [row["step"] for row in rows] == list(range(2, steps))
        assert rows[0]["tokens"] == 16 * (2 * 8 + batch)


def test_metrics_that_cannot_be_written_do_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """C10: one warning, and the run goes on to its end."""
    monkeypatch.chdir(tmp_path)
    plain = Path.open

    def refused(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if self.name == "metrics.jsonl" and "a" in mode:
            raise PermissionError(13, "Permission denied", str(self))
        return plain(self, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refused)
    assert call("train", *FAST, "--train.steps", "3", "--train.output-dir", "run") == 0
    assert capsys.readouterr().err.count("metrics.jsonl cannot be written: Permission") == 1
    assert len(folders.find_checkpoints(tmp_path / "run" / "checkpoints")) == 1


def test_other_threads_are_told(
    tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """I4: a checkpoint knows its threads, as other ones give other bits."""
    losses_of(Grid({}), corpus, str(tmp_path), 1)
    trainer = trainer_of(Grid({}), corpus, run_of(str(tmp_path), {}, 2))
    (checkpoint,) = folders.find_checkpoints(tmp_path / "checkpoints")
    trainer.checkpointer.resume_from(checkpoint)
    assert "threads" not in capsys.readouterr().err
    count = torch.get_num_threads()
    torch.set_num_threads(count + 1)
    try:
        trainer.checkpointer.resume_from(checkpoint)
    finally:
        torch.set_num_threads(count)
    assert f"{count} threads per rank, not {count + 1}" in capsys.readouterr().err


def test_a_deterministic_run_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """G9: settings that depend on measurements are refused, and flags of torch come back."""
    changes = {
        "train__deterministic": True,
        "memory__auto": True,
        "plan__recompute": "memory_budget",
    }
    with pytest.raises(PlanError) as caught:
        check_deterministic(run_of("", {}, 1, **changes))
    assert len(caught.value.problems) == 2
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with deterministic_algorithms(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.benchmark and torch.backends.cudnn.deterministic
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.deterministic
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with (
        pytest.raises(PlanError, match="CUBLAS_WORKSPACE_CONFIG=':0:0'"),
        deterministic_algorithms(True),
    ):
        pass
