"""Whole runs whose ranks are killed, and which go on as if they had not been."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from commands import SMALL_OPTIONS, call, ended, losses, metrics, started
from ranvier.checkpoint.directory import find_checkpoints
from ranvier.train.resume import run_directory as folders

PAIR = ["train", *SMALL_OPTIONS, "--model.layers", "1", "--nproc", "2", "--train.steps", "8"]
ONCE = """
import os
_{name} = Trainer.{name}
def _patched(self, *arguments, **options):
    if self.state.step == {step} and self.grid.rank == {rank} and not os.path.exists("once"):
        open("once", "w").close()
        os.kill(os.getpid(), {number})
    return _{name}(self, *arguments, **options)
Trainer.{name} = _patched
"""


def patch(name: str, *, step: int, rank: int, number: int = 9) -> tuple[str, str]:
    """Have a rank get a signal once, when a method of its trainer is called."""
    return "ranvier.train.trainer", ONCE.format(name=name, step=step, rank=rank, number=number)


KILLS = {
    "the host of the store in a step": ("issue_step", 5, 0),
    "in the first save": ("save_checkpoint", 2, 1),
}
"""The method in which a rank is killed, the step, the rank."""
End = tuple[Path, tuple[int, str, str]]


@pytest.fixture(scope="module")
def ends(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, End]:
    """An undisturbed run and those with a killed rank, at the same time: a start of ranks imports
    modules one after the other, which leaves cores idle.
    """
    collected = [item for item in request.session.items if isinstance(item, pytest.Function)]
    wanted = [kill for kill in KILLS if any(kill in item.nodeid for item in collected)]
    begun = {}
    for kill in ("", *wanted):
        folder = tmp_path_factory.mktemp("run")
        words = [*PAIR, "--checkpoint.interval", "2", "--checkpoint.async-save", "False"]
        faults = ("", "")
        if kill:
            name, step, rank = KILLS[kill]
            faults = patch(name, step=step, rank=rank)
        begun[kill] = folder, started(folder, *words, patch=faults)
    return {kill: (folder, ended(process)) for kill, (folder, process) in begun.items()}


FAREWELL = """
import os
_say_farewell = _print_farewell
def _print_farewell(trainer, folder):
    if not os.path.exists("once"):
        open("once", "w").close()
        os.kill(os.getpid(), 9)
    _say_farewell(trainer, folder)
"""


@pytest.mark.full
def test_a_rank_killed_between_the_last_save_and_the_report(tmp_path: Path) -> None:
    """The ranks that are started again have no step left to take, and write the report."""
    patch = ("ranvier.train.train", FAREWELL)
    code, out, errors = ended(started(tmp_path, *PAIR, patch=patch))
    run = tmp_path / "runs" / "tiny"
    assert code == 0 and "was killed by signal 9" in errors, out + errors
    assert json.loads((run / "run.json").read_text())["status"] == "finished"
    assert (run / "report.html").exists() and "Report:" in out


@pytest.mark.full
@pytest.mark.parametrize(("kill", "begins"), [*zip(KILLS, (4, 0), strict=True)], ids=KILLS)
def test_a_killed_rank_changes_no_loss(ends: dict[str, End], kill: str, begins: int) -> None:
    """The directory is one that nobody asked for: the second attempt finds it."""
    (undisturbed, alone), (folder, (code, out, errors)) = ends[""], ends[kill]
    assert alone[0] == 0, alone
    whole, rank = losses(undisturbed / "runs" / "tiny"), KILLS[kill][2]
    assert code == 0, errors
    assert f"Rank {rank} was killed by signal 9 (SIGKILL) at step" in errors
    assert "Restarting all ranks from the latest checkpoint (1 of 3" in errors
    said = f"Resuming after step {begins}" if begins else "no complete checkpoint"
    assert said in out, out
    assert [path.name for path in (folder / "runs").iterdir()] == ["tiny"]
    run = folder / "runs" / "tiny"
    assert losses(run) == whole and [row["step"] for row in metrics(run)] == list(range(8))
    known = folders.read_run_json(run)
    (launch,) = known["launches"]
    (failure,) = launch["failures"]
    assert failure["attempt"] == 0 and failure["grid"] == "data=2" and "SIGKILL" in failure["why"]
    assert 0.0 < known["goodput"] < 1.0 and launch["seconds"] > 0.0
    assert "Ranks were restarted 1 time(s)" in out
    assert "Ranks were restarted 1 time(s)" in (run / "report.html").read_text()


@pytest.mark.full
def test_a_signal_to_one_rank_stops_all(tmp_path: Path) -> None:
    faults = patch("issue_step", step=3, rank=1, number=signal.SIGUSR2)
    code, out, errors = ended(started(tmp_path, *PAIR, "--train.output-dir", "run", patch=faults))
    assert code == 75 and errors == "", errors
    done = len(metrics(tmp_path / "run"))
    assert 3 < done < 8 and f"Stopped after step {done} of 8; saved in" in out
    assert find_checkpoints(tmp_path / "run" / "checkpoints")[-1].name == f"step-{done:08}"


def test_a_directory_in_use_is_refused_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    with folders.lock_dir(tmp_path / "run"):
        assert call(*PAIR, "--train.output-dir", "run") == 77
    text = capsys.readouterr().err
    assert "train.output_dir='run' is in use by process" in text and "Wait for it, stop it" in text
    folders.lock_dir(tmp_path / "run").close()


def test_grids_that_cannot_be_are_refused_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(*PAIR, "--launch.fallback-grids", "dat=1", "row=2") == 64
    text = capsys.readouterr().err
    assert "Did you mean 'data'" in text and "'row=2' has 2 ranks, but the plan has 2" in text
    assert not (tmp_path / "runs").exists()


def test_time_of_several_launches_adds_up(tmp_path: Path) -> None:
    rows = [{"step": step, "step_seconds": 2.0} for step in range(5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    launches = [{"began": 0.0, "seconds": 15.0, "failures": []}]
    launches += [{"began": 1e12, "seconds": 0.0, "failures": []}]
    folders.update_run_json(tmp_path, launches=launches)
    assert folders.compute_goodput(tmp_path)["goodput"] == pytest.approx(10.0 / 15.0)
