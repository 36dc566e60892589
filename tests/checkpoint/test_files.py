"""Checkpoints: whole or not there, on every rank or on none, and equal to what was saved."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError

from equivalence import Case
from pool import Pool
from ranvier.checkpoint import files
from ranvier.errors import CommunicationError, DataError
from ranvier.grid import Grid
from ranvier.optim.optimizer import Optimizer
from ranvier.sharding import Place, State

ALONE = Grid({})


def state(value: float) -> State:
    place = Place((2, 3), (0, 0), (2, 3), (2, 3))
    return {"a.master": (torch.full((2, 3), value), place)}


def facts(step: int) -> dict[str, object]:
    return {"samples": step, "updates": float(step), "fingerprint": "f"}


def save(folder: Path, step: int, value: float, keep: int = 0) -> Path:
    return files.save(folder, step, state(value), facts(step), ALONE, "cpu", keep=keep)


def test_what_is_saved_is_found_and_loaded(tmp_path: Path) -> None:
    assert files.found(tmp_path / "none") == []
    for step in (5, 10, 123456789):
        save(tmp_path, step, float(step))
    assert [p.name for p in files.found(tmp_path)] == [
        *("step-00000005", "step-00000010", "step-123456789")
    ]
    mine = state(0.0)
    files.load(files.found(tmp_path)[1], mine, ALONE)
    assert mine["a.master"][0].tolist() == [[10.0] * 3] * 2
    assert files.facts(files.found(tmp_path)[1])["samples"] == 10
    assert files.wholes(files.found(tmp_path)[0])["a"].tolist() == [[5.0] * 3] * 2


def test_only_the_newest_are_kept_and_a_step_can_be_saved_again(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, 0.0, keep=2)
    (tmp_path / ".step-00000009.writing").mkdir()  # of a save that was killed
    last = save(tmp_path, 3, 7.0, keep=2)
    assert [p.name for p in tmp_path.iterdir() if p.name != last.name] == ["step-00000002"]
    assert files.wholes(last)["a"][0, 0] == 7.0


def full(*_: object, **__: object) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left (os error 28)")


def test_a_full_disk_leaves_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, 1.0, keep=1)
    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError) as error:
        save(tmp_path, 2, 2.0, keep=1)
    assert error.value.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert files.wholes(files.found(tmp_path)[-1])["a"][0, 0] == 1.0


def one_fails(grid: Grid, folder: str) -> str:
    """What a rank raises when the disk of rank 1 is full."""
    if grid.rank == 1:
        safetensors.torch.save_file, kept = full, safetensors.torch.save_file
    try:
        files.save(Path(folder), 2, state(0.0), {}, grid, "cpu")
    except (OSError, CommunicationError) as error:
        return type(error).__name__
    finally:
        if grid.rank == 1:
            safetensors.torch.save_file = kept
    return ""


def test_a_full_disk_of_one_rank_is_an_error_of_all(pool: Pool, tmp_path: Path) -> None:
    found = pool.on_grid({"row": 2}, one_fails, str(tmp_path))
    assert found == ["ElsewhereError", "OSError"]
    assert list(tmp_path.iterdir()) == []


def saved(grid: Grid, folder: str) -> dict[str, torch.Tensor]:
    """Save a fresh model; rank 0 gives its whole weights."""
    model = Case("qwen3").on(grid)
    optimizer = Optimizer(model.parallel.queue)  # type: ignore[arg-type,union-attr]
    path = files.save(Path(folder), 1, optimizer.state(), facts(1), grid, "cpu")
    return files.wholes(path) if grid.rank == 0 else {}


@pytest.mark.parametrize("degrees", [{"data": 2, "depth": 2}, {"row": 4, "col": 2}], ids=str)
def test_whole_weights_come_from_any_grid(
    pool: Pool, tmp_path: Path, degrees: dict[str, int]
) -> None:
    whole, *_ = pool.on_grid(degrees, saved, str(tmp_path))
    plain = dict(Case("qwen3").build().named_parameters())
    assert set(whole) == set(plain)
    for name, value in plain.items():
        assert torch.equal(whole[name], value), name


def test_damage_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, 1, 1.0)
    weights = path / "rank-00000.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-5])
    with pytest.raises(DataError, match=r"rank-00000\.safetensors cannot be read"):
        files.load(path, state(0.0), ALONE)
    weights.write_bytes(good)
    with pytest.raises(DataError, match="differ in 2 tensors"):
        files.load(path, {"b.master": state(0.0)["a.master"]}, ALONE)
    other = Place((4, 3), (0, 0), (2, 3), (2, 3))
    with pytest.raises(DataError, match="saved on another grid"):
        files.load(path, {"a.master": (torch.zeros(2, 3), other)}, ALONE)
    for bad in ({"format": 1}, {"format": 1, **facts(1), "step": "2", "ranks": 1}):
        (path / "state.json").write_text(json.dumps(bad))
        with pytest.raises(DataError, match="is damaged"):
            files.facts(path)
    (path / "state.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(DataError, match="format 99"):
        files.facts(path)
    (path / "state.json").unlink()
    with pytest.raises(DataError, match=r"state\.json cannot be read"):
        files.facts(path)
