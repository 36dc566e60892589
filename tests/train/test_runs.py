"""Whole runs as a user has them: what they leave, how they stop, go on and fail."""

from __future__ import annotations

import gzip
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from commands import SMALL_OPTIONS, call, ended, losses, metrics, started
from data.corpora import write_pair
from pool import Pool
from ranvier.checkpoint.directory import find_checkpoints
from ranvier.errors import RanvierError
from ranvier.grid import Grid
from ranvier.infer.generate import TextGenerator
from ranvier.infer.load import load_model
from ranvier.infer.text_stream import AnswerStream
from ranvier.system.terminal import CONTROL_CHARACTERS, escape_controls
from ranvier.train import text
from ranvier.train.resume import run_directory as folders
from ranvier.train.resume.open_directory import hold_open
from ranvier.train.trainer import Trainer
from training import run_of, stored, trainer_of

FAST = [*SMALL_OPTIONS, "--nproc", "1"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def interrupted(monkeypatch: pytest.MonkeyPatch, at: int, action: Callable[[], Any]) -> None:
    """Have something happen when a step is issued."""
    issue = Trainer.issue_step

    def patched(self: Trainer, *arguments: Any, **options: Any) -> Any:
        if self.state.step == at:
            action()
        return issue(self, *arguments, **options)

    monkeypatch.setattr(Trainer, "issue_step", patched)


MIXTURE = [
    *("--model.experts", "4", "--model.experts-per-token", "2", "--model.expert-mlp", "16"),
    *("--model.expert-bias-update-rate", "0.01", "--model.dense-first-layers", "1"),
]


def test_a_mixture_with_a_router_bias_ends_with_a_sample(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What chooses the experts besides weights is a buffer; text is that of the grid's model."""
    words = ("--train.steps", "4", "--train.sample-prompt", "def ", "--train.output-dir", "run")
    assert call("train", *FAST, *MIXTURE, *words) == 0
    known = json.loads((folder / "run" / "run.json").read_text())
    assert known["status"] == "finished" and known["sample"]["text"]
    capsys.readouterr()
    assert call("generate", "run", "--prompt", "def ", "--max-new-tokens", "4") == 0
    assert capsys.readouterr().out.startswith("def ")
    serial = TextGenerator.from_run(Path("run"), "cpu").model
    tensors = {**dict(serial.named_parameters()), **dict(serial.named_buffers())}
    assert not [name for name, x in tensors.items() if x.is_meta]
    biases = {name: x for name, x in tensors.items() if name.endswith("mlp.bias")}
    assert biases and all(x.abs().max() > 0.0 for x in biases.values())
    ids = torch.arange(16).view(1, -1)
    with torch.no_grad():
        want = load_model(Path("run"), Grid({}), "cpu")(ids)
        assert torch.allclose(serial(ids), want, rtol=1e-5, atol=1e-5)


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("on the meta device\nand more")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("text.sample_text", "Generating a sample failed: RuntimeError: on the meta device"),
        (
            "train.report.write_report",
            "Writing the report failed: RuntimeError: on the meta device",
        ),
        (
            "train.breakdown.MemoryTracker.to_dict",
            "Writing the statistics to run.json failed: RuntimeError",
        ),
    ],
)
def test_what_comes_after_the_last_step_never_costs_a_run(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    words: str,
) -> None:
    monkeypatch.setattr(f"ranvier.train.{name}", fail)
    steps = ("--train.steps", "3", "--train.sample-prompt", "def ", "--train.output-dir", "run")
    assert call("train", *FAST, *steps) == 0
    out, run = capsys.readouterr().out, folder / "run"
    assert words in out and "Try next:" in out
    assert json.loads((run / "run.json").read_text())["status"] == "finished"
    assert find_checkpoints(run / "checkpoints")[-1].name == "step-00000003"
    assert (run / "report.html").exists() == (name != "train.report.write_report")


def test_run_json_is_true_after_any_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While it trains, after an error that breaks its account too, and after a kill."""
    run, seen = folder / "run", list[str]()

    def facts() -> dict[str, Any]:
        known: dict[str, Any] = json.loads((run / "run.json").read_text())
        return known

    def look() -> None:
        seen.extend([facts()["status"], folders.run_status(run, facts())])
        monkeypatch.setattr("ranvier.train.train.breakdown.MemoryTracker.to_dict", fail)
        raise ValueError("a bug")

    interrupted(monkeypatch, 2, look)
    assert call("train", *FAST, "--train.steps", "4", "--train.output-dir", "run") == 70
    assert seen == ["unfinished", "running"]
    assert facts()["status"] == "failed: ValueError: a bug"
    began = folders.read_launches(run)[-1]["began"]
    folders.update_run_json(run, status=folders.UNFINISHED)  # as a kill of all processes leaves it
    assert folders.run_status(run, facts()).startswith("unfinished: it was killed")
    with folders.lock_dir(run):  # another run has it
        folders.record_failure(run, began, 71, "Rank 0 was killed.")
    folders.record_failure(run, began + 1.0, 71, "Rank 0 was killed.")  # so has one before
    assert facts()["status"] == "unfinished"
    folders.record_failure(run, began, 71, "Rank 0 was killed.\nMore.")
    assert facts()["status"] == "failed: Rank 0 was killed."


def delete(run: Path) -> None:
    shutil.rmtree(run)


def rename(run: Path) -> None:
    run.rename("elsewhere")


def replace_it(run: Path) -> None:
    """By one that has all that a save needs."""
    run.rename("elsewhere")
    (run / "checkpoints").mkdir(parents=True)


def delete_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def renew_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()


HARMS = [delete, rename, replace_it, delete_checkpoints, renew_checkpoints]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("harm", "at"), [(delete, 2), (replace_it, 2), *((harm, 4) for harm in HARMS[1:])]
)
def test_a_run_does_not_outlive_its_directory(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    harm: Callable[[Path], None],
    at: int,
) -> None:
    """It ends soon, with 73, and leaves nothing where the directory was."""
    last = list[int]()

    def harmed() -> None:
        harm(folder / "run")
        last.append(at)

    if at == 2:
        monkeypatch.setattr("ranvier.train.resume.open_directory.CHECK_INTERVAL_SECONDS", 0.0)
    interrupted(monkeypatch, at, harmed)
    interrupted(monkeypatch, 4, lambda: last.append(4))
    assert call("train", *FAST, "--train.steps", "5", "--train.output-dir", "run") == 73
    assert "is no longer the directory that this run started in" in capsys.readouterr().err
    assert last == ([2] if at == 2 else [4, 4])
    run = folder / "run"
    assert not [*run.rglob("step-*")]
    assert run.exists() == (harm in HARMS[2:])
    if harm in (delete_checkpoints, renew_checkpoints):
        status = json.loads((run / "run.json").read_text())["status"]
        assert status.startswith("failed: ") and "checkpoints is no longer the directory" in status
    if harm is replace_it:
        assert [path.name for path in run.iterdir()] == ["checkpoints"]


def lost_directory(grid: Grid, corpus: str, out: str) -> tuple[int, int]:
    """Exit code and steps of a run of several ranks, whose directory is deleted after a step."""
    trainer = trainer_of(grid, corpus, run_of(out, dict(grid.degrees), 8))
    paths = (Path(out), trainer.checkpointer.saver.folder)  # all ranks ask for the saver
    with (
        hold_open(*paths if grid.rank == 0 else ()) as directory,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("ranvier.train.resume.open_directory.CHECK_INTERVAL_SECONDS", 0.0)
        trainer.checkpointer.watch_directory(directory)
        try:
            for row in trainer.run_steps():
                if row["step"] == 1 and grid.rank == 0:
                    shutil.rmtree(out)
            trainer.save_checkpoint()
        except RanvierError as error:
            return error.exit_code, trainer.state.step
    return 0, trainer.state.step


def test_all_ranks_end_when_the_directory_is_gone(pool: Pool, tmp_path: Path) -> None:
    corpus = stored(tmp_path)
    ends = pool.on_grid({"row": 2}, lost_directory, corpus, str(tmp_path / "run"))
    assert ends[0] == ends[1] and ends[0][0] == 73 and ends[0][1] < 8
    assert not (tmp_path / "run").exists()


class Failing:
    """A log that fails when it is written or closed."""

    def __init__(self, when: str) -> None:
        self.when = when

    def __enter__(self) -> Callable[[Any], None]:
        return fail if self.when == "row" else (lambda row: None)

    def __exit__(self, *_: object) -> None:
        if self.when == "end":
            fail()


@pytest.mark.parametrize("when", ["row", "end"])
def test_a_log_that_fails_never_costs_a_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], when: str
) -> None:
    monkeypatch.setattr("ranvier.train.loggers.LOGGERS", {"tensorboard": lambda *_: Failing(when)})
    words = ("--train.steps", "3", "--train.loggers", "tensorboard", "--train.output-dir", "run")
    assert call("train", *FAST, *words) == 0
    assert capsys.readouterr().err.count("tensorboard has failed: RuntimeError") == 1
    assert find_checkpoints(folder / "run" / "checkpoints")[-1].name == "step-00000003"


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["pipe", "full"])
def test_a_run_goes_on_when_nobody_reads_what_it_prints(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As in `ranvier train | head -1`, or with its output on a full disk."""
    reader, writer = os.pipe() if kind == "pipe" else (-1, os.open("/dev/full", os.O_WRONLY))
    with os.fdopen(writer, "w") as stream:
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, stream)
            monkeypatch.setattr(sys, f"__{name}__", stream)
        if kind == "pipe":
            os.close(reader)
        words = ("--train.steps", "4", "--train.sample-prompt", "def ", "--train.output-dir", "run")
        assert call("train", *FAST, *words) == 0
        assert sys.stdout is stream
    assert len(metrics(folder / "run")) == 4 and (folder / "run" / "report.html").exists()
    assert json.loads((folder / "run" / "run.json").read_text())["status"] == "finished"
    assert find_checkpoints(folder / "run" / "checkpoints")


def test_a_run_leaves_what_people_look_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--train.steps", "12", "--train.eval-interval", "6", "--train.sample-prompt", "def "]
    words += ["--data.validation-fraction", "0.3"]
    assert call("train", *FAST, *words, "--train.loggers", "tensorboard") == 0
    out = capsys.readouterr().out
    run = folder / "runs" / "tiny"
    for part in ("data fingerprint", "group matrix", "val loss", "A sample of text"):
        assert part in out, out
    assert "Report: runs/tiny/report.html" in out and "ranvier generate runs/tiny" in out
    names = {path.name for path in run.iterdir()}
    assert names >= {"config.toml", "metrics.jsonl", "run.json", "checkpoints", "report.html"}
    rows = metrics(run)
    held_out = [row["val_loss"] for row in rows if row["val_loss"] is not None]
    assert len(rows) == 12 and held_out[-1] < held_out[0]
    page = (run / "report.html").read_text()
    for word in ("Loss", "Throughput", "Learning rate", "Gradient norm", "Where the time went"):
        assert word.lower() in page.lower(), word
    known = json.loads((run / "run.json").read_text())
    assert known["status"] == "finished" and known["sample"]["prompt"] == "def "
    assert list((run / "tensorboard").iterdir())

    (run / "report.html").unlink()
    assert call("report", "runs/tiny") == 0 and (run / "report.html").exists()
    capsys.readouterr()
    again = []
    for _ in range(2):
        assert call("generate", "runs/tiny", "--prompt", "import", "--max-new-tokens", "20") == 0
        again.append(capsys.readouterr().out)
    assert again[0] == again[1] and again[0].startswith("import")
    assert call("generate", "runs/tiny", "--step", "5") == 64
    assert "Saved steps are 12." in capsys.readouterr().err


def test_texts_are_shown_and_commands_can_be_pasted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, prompt = "it's $(touch hit); `x`", "-\x1b]0;t\x07 $(touch hit) '\u202e"
    evil = "\x1b[2J\x1b]52;c;eA==\x07\x9b1m\ra\x85b\n\tc\u202e"
    monkeypatch.setattr(text, "sample_text", lambda *_: evil)
    words = ["--train.steps", "2", f"--train.sample-prompt={prompt}", "--train.output-dir", out]
    assert call("train", *FAST, *words) == 0
    said = capsys.readouterr().out
    assert not CONTROL_CHARACTERS.search(said), ascii(said)
    shown = f"  {escape_controls(prompt + evil)}".replace("\n", "\n  ")
    assert f"A sample of text:\n\n{shown}\n" in said
    known = json.loads((folder / out / "run.json").read_text())
    assert known["sample"]["text"] == evil, "what is kept is exact"
    lines = said.partition("Try next:\n")[2].splitlines()[:2]
    for line, meant in zip(
        lines,
        [
            ["ranvier", "generate", out, f"--prompt={prompt.strip()} "],
            ["ranvier", "train", out, "--train.steps", "4"],
        ],
        strict=True,
    ):
        script = f"ranvier() {{ printf '%s\\0' ranvier \"$@\"; }}; {line}"
        got = subprocess.run(["bash", "-c", script], capture_output=True, check=True).stdout
        assert got.decode().split("\0")[:-1] == meant, line
    assert not (folder / "hit").exists()

    monkeypatch.setattr(AnswerStream, "pieces", lambda _: iter(["\x1b", "[2J", "\u202e\nx"]))
    assert call("generate", out, "--prompt", "\x07") == 0
    assert capsys.readouterr().out == "\\x07\\x1b[2J\\u202e\nx\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of eight steps that nobody disturbed."""
    out = tmp_path_factory.mktemp("whole")
    assert call("train", *FAST, "--train.steps", "8", "--train.output-dir", str(out)) == 0
    return losses(out)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGUSR2, marks=pytest.mark.full)],
)
def test_a_signal_ends_the_step_and_the_run_goes_on_as_if_undisturbed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, whole: list[float], number: int
) -> None:
    words = ["train", *FAST, "--train.steps", "8"]
    with monkeypatch.context() as patch:
        interrupted(patch, 3, lambda: os.kill(os.getpid(), number))
        assert call(*words, "--train.output-dir", "run") == 75
    done = len(metrics(folder / "run"))
    assert 3 < done < 8
    assert find_checkpoints(folder / "run" / "checkpoints")[-1].name == f"step-{done:08}"
    assert f"stopped by signal {number}" in (folder / "run" / "run.json").read_text()
    assert call("train", "run", "--nproc", "1") == 0
    assert losses(folder / "run") == whole
    assert [row["step"] for row in metrics(folder / "run")] == list(range(8))


def test_steps_after_the_last_checkpoint_are_taken_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train", *FAST, "--train.steps", "6", "--checkpoint.interval", "2"]
    assert call(*words, "--train.output-dir", "whole") == 0

    def breaks() -> None:
        raise RuntimeError("a cable")

    with monkeypatch.context() as patch:
        interrupted(patch, 5, breaks)
        assert call(*words, "--train.output-dir", "run") == 70
    assert len(metrics(folder / "run")) == 5, "one more than the checkpoint holds"
    assert call("train", "run", "--nproc", "1") == 0
    assert [row["step"] for row in metrics(folder / "run")] == list(range(6))
    assert losses(folder / "run") == losses(folder / "whole")


@pytest.mark.full
def test_ranks_stop_together_and_go_on_together(folder: Path) -> None:
    """Ctrl-C of two ranks, then the same command again."""
    words = ["train", *SMALL_OPTIONS, "--nproc", "2", "--train.steps", "2000"]
    words += ["--train.output-dir", "run"]
    words += ["--optim.warmup-steps", "2"]
    process = started(folder, *words)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step "):
            break
    process.send_signal(signal.SIGINT)
    code, out, errors = ended(process)
    assert code == 75 and "Traceback" not in errors, errors
    assert "ranvier train run" in out and "Stopping after this step" in errors
    done = len(metrics(folder / "run"))
    more = ["train", "run", "--nproc", "2", "--train.steps", str(done + 3)]
    code, out, errors = ended(started(folder, *more))
    assert code == 0 and f"Resuming after step {done}" in out, errors
    assert [row["step"] for row in metrics(folder / "run")] == list(range(done + 3))


def test_a_run_goes_on_only_as_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", *FAST, "--train.steps", "2", "--train.output-dir", "run"]
    assert call(*words) == 0
    assert call(*words) == 64
    assert "train.steps above 2" in capsys.readouterr().err
    assert call(*words[:-3], "4", "--train.output-dir", "run", "--model.layers", "3") == 66
    assert "model.layers=3, but run/checkpoints/step-00000002 has 2" in capsys.readouterr().err
    assert call(*words[:-3], "4", "--train.output-dir", "run", "--data.max-bytes", "50000") == 65
    assert "has the fingerprint" in capsys.readouterr().err
    assert call(*words[:-3], "4", "--train.output-dir", "run", "--optim.lr", "1e-4") == 0
    assert "changed: optim.lr from 0.018 to 0.0001" in capsys.readouterr().out


def test_a_run_that_broke_before_its_first_checkpoint_begins_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "train",
        *FAST,
        "--train.steps",
        "4",
        "--train.output-dir",
        "run",
        "--checkpoint.interval",
        "-1",
    ]

    def breaks() -> None:
        raise RuntimeError("a cable")

    with monkeypatch.context() as patch:
        interrupted(patch, 2, breaks)
        assert call(*words) == 70
    first = losses(folder / "run")
    assert len(first) == 2 and "a cable" in capsys.readouterr().err
    assert call(*words) == 0
    assert "starts from the beginning" in capsys.readouterr().out
    assert losses(folder / "run")[:2] == first and len(metrics(folder / "run")) == 4
    assert call(*words) == 64
    assert "A finished run is not repeated" in capsys.readouterr().err


def test_any_text_survives_in_the_config(folder: Path) -> None:
    (folder / "😀 text.txt").write_text("some text 😀 " * 60, encoding="utf-8")
    words = ["--data.sources", "😀 text.txt", "--train.steps", "2", "--train.output-dir", "r 😀"]
    assert call("train", *FAST, *words, "--train.sample-prompt", "\x7f\n😀\\") == 0
    assert call("train", "r 😀", "--train.steps", "3", "--nproc", "1") == 0
    assert call("report", "r 😀") == 0 and call("generate", "r 😀", "--max-new-tokens", "3") == 0


def test_a_tied_model_speaks_with_the_loss_it_was_trained_to(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--model.tie-embeddings",
        "True",
        "--model.position-embedding",
        "learned",
        "--model.bias",
        "True",
    ]
    words += ["--train.steps", "30", "--train.output-dir", "run", "--optim.lr", "0.02"]
    (folder / "ab.txt").write_text("abcdefgh" * 400)
    assert call("train", *FAST, *words, "--data.sources", "ab.txt", "--model.max-seq", "32") == 0
    capsys.readouterr()
    options = ["--prompt", "abcdefgh", "--max-new-tokens", "16", "--temperature", "0"]
    assert call("generate", "run", *options) == 0
    assert capsys.readouterr().out == "abcdefgh" * 3 + "\n"


def test_a_directory_holds_one_run_at_a_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", *FAST, "--train.steps", "3", "--train.output-dir", "run"]
    codes: list[int] = []
    with monkeypatch.context() as patch:
        interrupted(patch, 2, lambda: codes.append(call(*words)) if not codes else None)
        assert call(*words) == 0
    errors = capsys.readouterr().err
    assert codes == [77] and f"is in use by process {os.getpid()} on" in errors


def test_weights_that_are_no_numbers_are_not_saved(folder: Path) -> None:
    words = ["--optim.lr", "1e39", "--optim.warmup-steps", "0", "--checkpoint.interval", "1"]
    assert call("train", *FAST, *words, "--train.steps", "4", "--train.output-dir", "run") == 74
    assert find_checkpoints(folder / "run" / "checkpoints") == []


def test_what_is_no_number_stops_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--optim.lr", "1e30", "--optim.max-grad-norm", "0", "--optim.warmup-steps", "0"]
    assert call("train", *FAST, *words, "--train.steps", "20", "--train.output-dir", "run") == 74
    text = capsys.readouterr().err
    assert (
        "NumericError" in text
        and "The first non-finite tensor is the" in text
        and "Traceback" not in text
    )
    assert "failed" in (folder / "run" / "report.html").read_text()
    assert find_checkpoints(folder / "run" / "checkpoints") == []


def test_a_full_disk_keeps_the_last_checkpoint(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", *FAST, "--train.steps", "2", "--train.output-dir", "run"]
    assert call(*words) == 0
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # no file may be larger
    try:
        assert call("train", "run", "--train.steps", "4", "--nproc", "1") == 73
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    text = capsys.readouterr().err
    assert (
        "rank-00000.safetensors" in text and "Free disk space" in text and "Traceback" not in text
    )
    assert {p.name for p in (folder / "run" / "checkpoints").iterdir()} == {
        *("latest", "step-00000002")
    }
    assert call("train", "run", "--train.steps", "4", "--nproc", "1") == 0


TEXTS = [f"Document {n} says {n} and {n + 1}. " * (1 + n % 4) for n in range(60)]


def written(folder: Path, kind: str) -> str:
    """The texts as a corpus of a kind."""
    import pyarrow as pa
    from pyarrow import parquet

    path = folder / f"texts.{kind}"
    lines = "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(TEXTS))
    if kind == "txt":
        path.write_text("\n".join(TEXTS))
    elif kind == "jsonl":
        path.write_text(lines)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif kind == "parquet":
        parquet.write_table(pa.table({"text": TEXTS}), path)
    elif kind == "bin":
        tokens = [[*np.frombuffer(text.encode(), np.uint8).tolist(), 256] for text in TEXTS]
        write_pair(folder / "texts", tokens)
    else:
        path.mkdir()
        for i, text in enumerate(TEXTS):
            (path / f"{i:03}.txt").write_text(text)
    return str(path)


@pytest.mark.full
def test_every_kind_of_corpus_trains_alike(folder: Path) -> None:
    found = {}
    for kind in ("txt", "jsonl", "jsonl.gz", "parquet", "bin", "folder"):
        words = ["--data.sources", written(folder, kind), "--train.steps", "3"]
        assert call("train", *FAST, *words, "--train.output-dir", f"run-{kind}") == 0
        found[kind] = losses(folder / f"run-{kind}")
    assert call("data", "prepare", "texts.jsonl", "--output", "made", "--tokenizer", "bytes") == 0
    words = ["--data.sources", "made", "--train.steps", "3", "--train.output-dir", "run-made"]
    assert call("train", *FAST, *words) == 0
    found["prepared"] = losses(folder / "run-made")
    one = found.pop("txt")  # a file is one document
    assert len(one) == 3 and one != found["jsonl"]
    assert all(values == found["jsonl"] for values in found.values()), found


def test_prepare_learns_a_tokenizer_and_refuses_to_overwrite(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(folder, "jsonl")
    words = ["data", "prepare", "texts.jsonl", "--tokenizer", "train", "--vocab", "300"]
    assert call(*words) == 0
    out = capsys.readouterr().out
    assert "60 documents" in out and "ranvier train --data.sources data/texts" in out
    assert call("data", "show", "data/texts") == 0
    assert "tokenizer fingerprint" in capsys.readouterr().out
    (folder / "other").mkdir()
    (folder / "other" / "mine.txt").write_text("keep me")
    assert call(*words, "--output", "other") in (64, 65)
    assert (folder / "other" / "mine.txt").read_text() == "keep me"


def test_a_missing_log_package_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert call("train", *FAST, "--train.loggers", "wandb") == 64
    assert "pip install -e '.[log]'" in capsys.readouterr().err


@pytest.mark.full
def test_weights_and_biases_get_the_metrics(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    words = ["--train.steps", "2", "--train.output-dir", "run", "--train.loggers", "wandb"]
    assert call("train", *FAST, *words) == 0
    assert list((folder / "run" / "wandb").glob("offline-run-*/*.wandb"))
