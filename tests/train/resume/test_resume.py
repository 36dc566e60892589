"""Going on: the newest good checkpoint, what is refused and what a flag allows, and the verbs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from commands import SMALL_OPTIONS, call, ended, losses, metrics, started
from ranvier.checkpoint import load
from ranvier.checkpoint import manifest as manifests
from ranvier.checkpoint.directory import find_checkpoints
from ranvier.config import run as runs
from ranvier.train.resolve import ResolveContext, resolve_run

FAST = [*SMALL_OPTIONS, "--nproc", "1", "--model.layers", "1"]
SAVING = ["--checkpoint.interval", "2", "--checkpoint.keep-latest", "0"]
NEW = ("cost", "balanced")
"""data.balance and data.packing of a new run."""
EARLIER = ("none", "full")
"""Those of a run from before they existed."""
FILE = "rank-00000.safetensors"


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with three checkpoints."""
    folder = tmp_path_factory.mktemp("origin")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert call("train", *FAST, *SAVING, "--train.steps", "6", "--train.output-dir", "run") == 0
        assert call("train", *FAST, "--train.steps", "8", "--train.output-dir", "whole") == 0
    return folder


@pytest.fixture
def folder(origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, and of a run of eight steps that nothing disturbed."""
    for name in ("run", "whole"):
        shutil.copytree(origin / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def place_of(checkpoint: Path, name: str) -> int:
    """A byte in the middle of a tensor in its file."""
    entry = manifests.read_manifest(checkpoint).tensors[name]
    return entry.shards[0].offset + torch.Size(entry.shape).numel() * entry.dtype.itemsize // 2


def without_data_settings(checkpoint: Path, *names: str) -> None:
    """Make a checkpoint one that was saved before these settings of data existed."""
    path = checkpoint / manifests.MANIFEST_NAME
    body = manifests.read_digested(path)
    for name in names:
        del body["facts"]["config"]["data"][name]
    path.write_bytes(manifests.add_digest(json.dumps(body).encode()))


@pytest.mark.parametrize("how", ["directory", "output_dir", "resume"])
def test_a_resumed_run_keeps_how_samples_are_made_and_assigned(folder: Path, how: str) -> None:
    """Also if it was saved before this could be chosen, by each way to resume it."""
    checkpoints = find_checkpoints(folder / "run" / "checkpoints")
    config = folder / "run" / "config.toml"
    context = ResolveContext(world_size=1)
    stored = runs.load_run_config(config, in_run=True)
    assert (stored.data.balance, stored.data.packing) == NEW
    changes: dict[str, dict[str, str]] = {
        "directory": {"output_dir": "run"},
        "output_dir": {"output_dir": "run"},
        "resume": {"resume": str(checkpoints[-1])},
    }
    for was in (NEW, EARLIER):
        if was == EARLIER:
            without_data_settings(checkpoints[-1], "balance", "packing")
            lines = config.read_text().splitlines()
            kept = [one for one in lines if not one.startswith(("balance", "packing"))]
            config.write_text("\n".join(kept))
        run = runs.load_run_config(config, in_run=True)
        if how != "directory":
            run = replace(run, data=replace(run.data, balance="auto", packing="auto"))
        section = "checkpoint" if how == "resume" else "train"
        part = replace(getattr(run, section), **changes[how])
        run = replace(run, **{section: part})
        found = resolve_run(run, context)
        assert (found.data.balance, found.data.packing) == was
        # A run that starts from its first step chooses anew.
        new = replace(
            run,
            data=replace(run.data, balance="auto", packing="auto"),
            train=replace(run.train, output_dir="other"),
            checkpoint=replace(run.checkpoint, resume="auto"),
        )
        found = resolve_run(new, context)
        assert (found.data.balance, found.data.packing) == NEW


def test_settings_of_another_version_are_refused_in_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the directory of a run, as a file, as initial weights, and in a checkpoint."""
    config = folder / "run" / "config.toml"
    assert config.read_text().startswith("format = 2\n")
    assert json.loads((folder / "run" / "run.json").read_text())["format"] == 2
    steps = ["--train.steps", "8"]
    checkpoint = str(find_checkpoints(folder / "run" / "checkpoints")[-1])
    new = ["train", *FAST, *steps, "--train.output-dir"]
    before = sorted(path.name for path in (folder / "run").iterdir())
    for how in ("another version", "no number"):
        if how == "another version":
            monkeypatch.setattr(runs, "SETTINGS_FORMAT", 3)
        else:
            monkeypatch.undo()
            monkeypatch.chdir(folder)
            config.write_text(config.read_text().removeprefix("format = 2\n"))
        commands = [["train", "run", *steps], ["report", "run"], ["generate", "run"]]
        commands += [["export", "run"], [*new, "a", "--train.init-from", "run"]]
        if how == "another version":
            commands += [["train", str(config)], [*new, "b", "--checkpoint.resume", checkpoint]]
        for words in commands:
            assert call(*words) == 64, words
            said = capsys.readouterr().err
            assert "was written by another version of Ranvier" in said, words
            assert said.count("\n") == 1 and "Traceback" not in said, said
    assert sorted(path.name for path in (folder / "run").iterdir()) == before


@pytest.mark.full
def test_a_run_continues_with_context_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps of one process, three with context=2, three of one process: the losses of nine,
    with documents packed into the samples."""
    monkeypatch.chdir(tmp_path)
    # A constant learning rate, which does not depend on the number of steps.
    same = ["--optim.schedule", "wsd", "--optim.decay-ratio", "0", "--optim.warmup-steps", "0"]
    same += ["--checkpoint.keep-latest", "0"]
    new = ["train", *FAST, *same, "--train.output-dir"]
    assert call(*new, "whole", "--train.steps", "9") == 0
    assert call(*new, "run", "--train.steps", "3") == 0
    wide = ["--nproc", "2", "--plan.context", "2"]
    assert call("train", "run", *wide, "--train.steps", "6") == 0
    alone = ["--nproc", "1", "--plan.context", "1"]
    assert call("train", "run", *alone, "--train.steps", "9") == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)
    saved = find_checkpoints(tmp_path / "run" / "checkpoints")
    assert [manifests.read_manifest(path).degrees["context"] for path in saved] == [1, 2, 1]


TENSORS = ["head.weight.master", "head.weight.square", "random.cpu", "run.updates"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [*TENSORS, "manifest"])
def test_a_flipped_bit_leads_to_the_checkpoint_before(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """D1, D5: in weights, moments, random numbers, counts and the data's position."""
    path = folder / "run" / "checkpoints" / "step-00000006"
    if name == "manifest":
        flip(path / "manifest.json", 300)
    else:
        flip(path / FILE, place_of(path, name))
    assert call("checkpoint", "verify", "run") == 66
    assert "damaged" in capsys.readouterr().out
    assert call("train", "run", "--nproc", "1", "--train.steps", "8") == 0
    out = capsys.readouterr().out
    assert "skipped a damaged checkpoint: run/checkpoints/step-00000006" in out, out
    assert "Resuming after step 4 of 8" in out and "aside-step-00000006" in out
    assert [row["step"] for row in metrics(folder / "run")] == list(range(8))
    names = [p.name for p in find_checkpoints(folder / "run" / "checkpoints")]
    assert names[-2:] == ["step-00000006", "step-00000008"]


def test_a_run_goes_on_to_the_bit_and_newer_ones_are_set_aside(folder: Path) -> None:
    words = ["train", "whole", "--nproc", "1", "--train.steps", "10", "--train.output-dir"]
    source = "whole/checkpoints/step-00000008"
    assert call(*words, "a", "--checkpoint.resume", source) == 0
    assert call(*words, "b", "--checkpoint.resume", "whole") == 0
    assert losses(folder / "a") == losses(folder / "b") and len(losses(folder / "a")) == 10
    assert losses(folder / "a")[:8] == losses(folder / "whole"), "metrics come with it"
    assert call(*words[:-1], "--checkpoint.resume", source) == 0
    assert losses(folder / "whole") == losses(folder / "a")
    assert call(*words, "run", "--checkpoint.resume", source) == 0
    own = [path.name for path in find_checkpoints(folder / "run" / "checkpoints")]
    assert own == ["step-00000010"], "those of its own past are set aside"


def test_all_damaged_is_an_error_that_lists_each(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """D7: never a silent start from scratch."""
    for number, path in enumerate(find_checkpoints(folder / "run" / "checkpoints")):
        if number == 0:
            (path / FILE).unlink()
        elif number == 1:
            (path / FILE).write_bytes(b"")
        else:
            (path / "manifest.json").write_text("{}")
    before = sorted(p.name for p in (folder / "run" / "checkpoints").iterdir())
    assert call("train", "run", "--nproc", "1", "--train.steps", "8") == 66
    text = capsys.readouterr().err
    for step in (2, 4, 6):
        assert f"step-0000000{step}" in text
    assert sorted(p.name for p in (folder / "run" / "checkpoints").iterdir()) == before
    assert len(metrics(folder / "run")) == 6


REFUSED: dict[str, tuple[list[str], int, str]] = {
    "D8 nothing there": (["--checkpoint.resume", "nowhere"], 66, "has no checkpoint"),
    "D9 layers": (["--model.layers", "2"], 66, "model.layers=2"),
    "D9 tied": (["--model.tie-embeddings", "True"], 66, "model.tie_embeddings=True"),
    "D9 vocab": (["--model.vocab", "300"], 66, "model.vocab=300"),
    "D9 norm": (["--model.norm", "layer"], 66, "model.norm='layer'"),
    "the type": (["--train.dtype", "fp64"], 66, "train.dtype='fp64'"),
    "D13 moments": (["--optim.state-dtype", "bf16"], 66, "optim.state_dtype='bf16'"),
    "the seed": (["--train.seed", "5"], 66, "train.seed=5"),
    "E3 the corpus": (["--data.max-bytes", "50000"], 65, "has the fingerprint"),
    "E3 the shuffled order of other weights": (
        ["--data.validation-fraction", "0.3"],
        66,
        "data.validation_fraction=0.3",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_with_the_difference(
    folder: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    words, code, text = REFUSED[case]
    assert call("train", "run", "--nproc", "1", "--train.steps", "8", *words) == code
    said = capsys.readouterr().err
    assert text in said and "Traceback" not in said
    assert len(metrics(folder / "run")) == 6, "nothing was touched"


def test_flags_accept_what_else_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """D10, D13: other data, other settings, more layers."""
    words = ["train", "run", "--nproc", "1", "--train.steps", "8", "--train.output-dir"]
    source = ["--checkpoint.resume", "run/checkpoints/step-00000004"]
    change = ["--data.max-bytes", "50000", "--checkpoint.allow-data-mismatch", "True"]
    assert call(*words, "a", *source, *change) == 0
    change = ["--optim.state-dtype", "bf16", "--checkpoint.allow-config-mismatch", "True"]
    assert call(*words, "b", *source, *change) == 0
    change = ["--model.layers", "2", "--checkpoint.allow-config-mismatch", "True"]
    assert call(*words, "c", *source, *change) == 66
    assert "missing: blocks.1." in capsys.readouterr().err
    assert call(*words, "c", *source, *change, "--checkpoint.strict", "False") == 0
    assert "does not contain blocks.1." in capsys.readouterr().err
    assert [len(losses(folder / name)) for name in "abc"] == [8, 8, 8]
    change = ["--model.layers", "1", "--checkpoint.allow-config-mismatch", "True"]
    source = ["--checkpoint.resume", "c"]
    assert (
        call(*words[:-3], "--train.steps", "9", "--train.output-dir", "d", *source, *change) == 66
    )


def test_never_begins_anew_beside_what_was_there(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = losses(folder / "run")
    words = ["train", "run", "--nproc", "1", "--checkpoint.resume", "never"]
    assert call(*words, "--checkpoint.interval", "0") == 0
    assert "the previous run is now run/before-1-" in capsys.readouterr().out
    assert losses(folder / "run") == before
    assert [p.name for p in find_checkpoints(folder / "run" / "checkpoints")] == ["step-00000006"]
    assert len(find_checkpoints(folder / "run" / "before-1-checkpoints")) == 3
    assert call("train", "run", "--nproc", "1", "--train.steps", "8") == 0
    assert "Resuming after step 6 of 8" in capsys.readouterr().out, "never was for that launch"


def test_a_longer_run_and_another_batch_go_on_by_rule(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """D13, F9: the schedule follows the new length; the next sample comes next."""
    words = ["train", "run", "--nproc", "1", "--train.steps", "8", "--plan.global-batch", "4"]
    assert call(*words) == 0
    out = capsys.readouterr().out
    assert "changed: train.steps from 6 to 8" in out and "plan.global_batch from 8 to 4" in out
    samples = manifests.read_manifest(find_checkpoints(folder / "run" / "checkpoints")[-1]).facts[
        "samples"
    ]
    assert samples == 6 * 8 + 2 * 4


@pytest.mark.full
def test_a_run_goes_on_on_another_grid_by_its_command(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """D11: degrees and micro-batch that nobody gives follow from the ranks there are."""
    steps = ["--train.steps", "8", "--optim.warmup-steps", "2"]
    assert (
        call(
            "train",
            "run",
            "--nproc",
            "1",
            *steps,
            "--train.output-dir",
            "one",
            "--checkpoint.resume",
            "run",
        )
        == 0
    )
    code, out, errors = ended(
        started(folder, "train", "run", "--nproc", "4", "--plan.row", "2", *steps)
    )
    assert code == 0 and "grid: data 2 · row 2" in out, errors
    assert losses(folder / "run") == pytest.approx(losses(folder / "one"), rel=1e-6)


def test_a_stop_at_a_saved_step_saves_nothing_twice(folder: Path) -> None:
    """A18: the last step is due and final at once."""
    names = [p.name for p in (folder / "run" / "checkpoints").iterdir()]
    assert sorted(names) == ["latest", *(f"step-0000000{n}" for n in (2, 4, 6))]


def test_the_verbs_of_checkpoints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = find_checkpoints(folder / "run" / "checkpoints")
    assert call("checkpoint", "ls", "run") == 0
    out = capsys.readouterr().out
    assert "step-00000006" in out and "complete, latest" in out and "one rank" in out
    assert call("checkpoint", "verify", "run") == 0
    assert capsys.readouterr().out.count("valid") == 3
    assert call("checkpoint", "diff", str(paths[0]), str(paths[1])) == 1
    out = capsys.readouterr().out
    assert "step: 2 | 4" in out and "elements differ, by at most" in out
    assert call("checkpoint", "diff", str(paths[1]), str(paths[1])) == 0
    assert call("checkpoint", "convert", "run", "one") == 0
    assert call("checkpoint", "diff", "run", "one") == 0
    assert call("checkpoint", "convert", "run", "weights", "--form", "weights") == 0
    index = json.loads((folder / "weights" / "model.safetensors.index.json").read_text())
    (name,) = set(index["weight_map"].values())
    weights, whole = load_file(folder / "weights" / name), load.load_full_tensors(paths[-1])
    assert set(weights) == set(whole)
    assert all(torch.equal(weights[key], whole[key]) for key in whole)
    (paths[0] / FILE).unlink()
    assert call("checkpoint", "ls", "run") == 66
    assert "rank-00000.safetensors is missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["ls", "nothing"], 66),
        (["verify", "nothing"], 66),
        (["diff", "run"], 64),
        (["convert", "run", "run"], 64),
        (["convert", "run", "x", "--form", "gguf"], 64),
        (["convert", "run", "x", "--dtype", "bf16"], 64),
        (["vreify", "run"], 64),
        ([], 64),
        (["--help"], 0),
    ],
    ids=str,
)
def test_mistakes_in_the_verbs_have_a_message(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int
) -> None:
    assert call("checkpoint", *words) == code
    said = capsys.readouterr()
    assert "Traceback" not in said.err and (code == 0 or said.err)
    assert not (folder / "x").exists()


def test_a_directory_without_manifest_is_no_checkpoint(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """I1: other files are not read, whatever they are called."""
    path = find_checkpoints(folder / "run" / "checkpoints")[-1]
    for name in ("step-00000006", "other"):
        shutil.copytree(path, folder / name)
        (folder / name / "manifest.json").rename(folder / name / "state.json")
    words = ["train", "run", "--nproc", "1", "--train.steps", "8", "--train.output-dir", "new"]
    assert call(*words, "--checkpoint.resume", "step-00000006") == 66
    assert "step-00000006 has no manifest.json. It is written last" in capsys.readouterr().err
    assert call(*words, "--checkpoint.resume", "other") == 66
    assert "checkpoint.resume='other' has no checkpoint. It must be" in capsys.readouterr().err
    assert call("checkpoint", "convert", "step-00000006", "x") == 66
    assert call("checkpoint", "convert", "other", "x") == 66
    assert not (folder / "x").exists()


HOSTILE: dict[str, Callable[[Path], object]] = {
    "latest leads out": lambda folder: (folder / "latest").write_text("../../../etc"),
    "a link": lambda folder: (folder / "step-00000099").symlink_to("/tmp"),
    "a linked file": lambda folder: _linked(folder / "step-00000006" / FILE),
}


def _linked(path: Path) -> None:
    path.rename(path.parent.parent / "outside")
    path.symlink_to(path.parent.parent / "outside")


@pytest.mark.parametrize("case", HOSTILE)
def test_what_could_do_harm_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    HOSTILE[case](folder / "run" / "checkpoints")
    assert call("train", "run", "--nproc", "1", "--train.steps", "8") == 77
    assert "Traceback" not in capsys.readouterr().err
    assert len(metrics(folder / "run")) == 6
