"""A run with any optimizer goes on with the same losses, and may change its optimizer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from commands import SMALL_OPTIONS, call, losses, metrics
from ranvier.checkpoint import manifest as manifests
from ranvier.checkpoint.directory import find_checkpoints
from ranvier.checkpoint.load import load_full_tensors
from ranvier.optim import jorge
from ranvier.optim.matrix_update import SIDES

FAST = [*SMALL_OPTIONS, "--nproc", "1", "--model.layers", "1"]
# The same learning rates whatever the number of steps.
FAST += ["--optim.warmup-steps", "1", "--optim.schedule", "wsd", "--optim.decay-ratio", "0"]
STATES = {
    "adamw": {"mean", "square"},
    "muon": {"mean"},
    "jorge": {"momentum", "preconditioned", "left", "right"},
    "sgd": {"momentum"},
}
LAST = ["--train.output-dir", "run", "--train.steps"]
WEIGHT = "blocks.0.attention.o.weight"


def train(folder: str, optimizer: str, steps: int) -> int:
    options = ["--optim.name", optimizer, "--train.steps", str(steps)]
    return call("train", *FAST, *options, "--train.output-dir", folder)


def states_of(folder: str) -> set[str]:
    """Kinds of the states of a hidden matrix in the newest checkpoint."""
    tensors = manifests.read_manifest(find_checkpoints(Path(folder) / "checkpoints")[-1]).tensors
    names = [name for name in tensors if name.startswith(f"{WEIGHT}.")]
    return {name.removeprefix(f"{WEIGHT}.") for name in names} - {"master"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["muon", "jorge", "sgd"])
def test_a_resumed_run_has_the_losses_of_a_whole_one(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train("whole", optimizer, 4) == 0
    assert train("run", optimizer, 2) == 0
    assert states_of("run") == STATES[optimizer]
    assert train("run", optimizer, 4) == 0
    assert losses(Path("run"))[-2:] == pytest.approx(losses(Path("whole"))[-2:], rel=1e-6)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("before", "after", "anew"),
    [
        ("adamw", "muon", ""),
        ("muon", "adamw", "square"),
        ("adamw", "jorge", "left, momentum, preconditioned, right"),
        ("jorge", "sgd", ""),
    ],
)
def test_a_run_may_change_its_optimizer(
    before: str,
    after: str,
    anew: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train("run", before, 2) == 0
    capsys.readouterr()
    assert train("run", after, 4) == 0
    said = capsys.readouterr().err
    assert f"saved with optim.name={before!r}" in said
    kept = re.search(rf"Weights continue, and the states (.+) where optim.name={after!r}", said)
    # Those of matrices, and those that AdamW has for the rest.
    assert kept is not None and STATES[before] & STATES[after] <= {*kept[1].split(", ")}
    assert (f"Its states {anew} start from" in said) == bool(anew)
    assert states_of("run") == STATES[after]
    first, *_, last = losses(Path("run"))
    assert last < first + 0.5


@pytest.mark.parametrize(
    ("before", "after", "kept"), [("sgd", "jorge", True), ("sgd", "muon", False)]
)
def test_a_learning_rate_is_kept_only_if_it_suits(
    before: str, after: str, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("train", *FAST, "--optim.name", before, "--optim.lr", "0.07", *LAST, "2") == 0
    assert call("train", "run", "--optim.name", after, "--train.steps", "3") == 0
    rates = [row["lr"] for row in metrics(Path("run"))]
    assert rates[:2] == [0.07, 0.07] and (rates[2] == 0.07) == kept and rates[2] < 0.08


def test_other_tiles_begin_anew_with_their_first_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tiles of 8 have as many elements in all as whole matrices, in another order."""
    monkeypatch.chdir(tmp_path)
    # All weights have at most 48 rows or columns, so that tiles of 64 and 128 are whole matrices.
    for size, interval, steps in ((128, 1, 1), (64, 1, 2), (8, 10, 3)):
        options = ["--optim.max-preconditioner-dim", str(size)]
        options += ["--optim.precondition-interval", str(interval)]
        assert call("train", *FAST, "--optim.name", "jorge", *options, *LAST, str(steps)) == 0
        said = capsys.readouterr().err
        assert ("Its states left, right start from" in said) == (size < 64), size
    assert "was saved with optim.max_preconditioner_dim=64" in said
    checkpoint = find_checkpoints(Path("run") / "checkpoints")[-1]
    first = jorge.initial_side(1, 8, like=torch.zeros(()))
    for side in SIDES:
        tiles = load_full_tensors(checkpoint, side)[WEIGHT].view(-1, 8, 8)
        assert torch.equal(tiles, tiles.mT) and (tiles != first).flatten(1).any(1).all()
