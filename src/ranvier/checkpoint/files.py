"""Files of a checkpoint: one safetensors file a rank and one JSON file with the facts.

A checkpoint is a folder `step-00000100`. All ranks write into a folder of another name; when every
rank has written, rank 0 adds `state.json` and renames the folder: what bears the name is whole, and
a full disk or a killed rank leaves the checkpoint before it untouched. A tensor lies under its name
with its place in the whole (in the header of the file), so that whole tensors can be put together
without the grid. No pickle.

Not handled here: another grid than the one that saved (the places differ and are refused).
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ranvier.checkpoint.state import assemble
from ranvier.comm.agree import together
from ranvier.errors import DataError
from ranvier.grid import Grid
from ranvier.sharding import Place, State

FORMAT = 1
NAME = re.compile(r"step-(\d{8,})")


def found(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    if not folder.is_dir():
        return []
    named = [(int(m[1]), path) for path in folder.iterdir() if (m := NAME.fullmatch(path.name))]
    return [path for _, path in sorted(named)]


def save(
    folder: Path,
    step: int,
    state: State,
    facts: Mapping[str, Any],
    grid: Grid,
    device: torch.device | str,
    *,
    keep: int = 0,
) -> Path:
    """Save the parts of all ranks as the checkpoint after `step` steps; the newest `keep` stay.

    Communicates: three numbers over all axes; every rank returns or none does.
    """
    final = folder / f"step-{step:08d}"
    writing, old = (folder / f".{final.name}.{word}" for word in ("writing", "old"))
    whole = {**facts, "format": FORMAT, "step": step, "degrees": grid.degrees, "ranks": grid.world}

    def begin() -> None:
        for left in folder.glob(".step-*"):  # by a save that was killed
            shutil.rmtree(left, ignore_errors=True)
        writing.mkdir(parents=True)

    def end() -> None:
        (writing / "state.json").write_text(json.dumps(whole, indent=1) + "\n")
        for path in (*writing.iterdir(), writing):
            if path.suffix == ".safetensors":
                shutil.copymode(writing / "state.json", path)  # it was made for one user only
            _flush(path)
        if final.exists():  # the same step again, after a resume
            shutil.rmtree(old, ignore_errors=True)
            os.replace(final, old)
        os.replace(writing, final)
        shutil.rmtree(old, ignore_errors=True)
        _flush(folder)
        for path in found(folder)[:-keep] if keep else []:
            shutil.rmtree(path, ignore_errors=True)

    first = grid.rank == 0
    try:
        together(begin if first else _nothing, grid, device)
        together(lambda: _write(writing / f"rank-{grid.rank:05d}.safetensors", state), grid, device)
        together(end if first else _nothing, grid, device)
    except BaseException:
        if first:
            shutil.rmtree(writing, ignore_errors=True)
        raise
    return final


def _nothing() -> None:
    """What ranks above 0 do while rank 0 is at work."""


def _flush(path: Path) -> None:
    """Have the disk hold what was written."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(path: Path, state: State) -> None:
    """Write tensors and their places."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    places = {name: asdict(place) for name, (_, place) in state.items()}
    tensors = {name: part.detach().cpu().contiguous() for name, (part, _) in state.items()}
    try:
        save_file(tensors, path, metadata={"places": json.dumps(places)})
    except SafetensorError as error:  # it hides the number of the system's error
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code), str(path)) from None


def facts(checkpoint: Path) -> dict[str, Any]:
    """What `state.json` of a checkpoint says."""
    path = checkpoint / "state.json"
    try:
        table = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read: {error}. Every checkpoint has it. Remove {checkpoint} to use "
            "the one before."
        ) from None
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise DataError(
            f"{path} is of format {table.get('format') if isinstance(table, dict) else table!r}. "
            f"This version reads format {FORMAT}. Use the version that wrote it."
        )
    kinds: dict[str, Any] = {
        "step": int,
        "ranks": int,
        "samples": int,
        "updates": (int, float),
        "fingerprint": str,
    }
    odd = [key for key, kind in kinds.items() if not isinstance(table.get(key), kind)]
    if odd or table["step"] < 0 or table["ranks"] < 1:
        raise DataError(
            f"{path} is damaged: {', '.join(odd) or 'step, ranks'} cannot be. It must be as it was "
            f"written. Remove {checkpoint} to use the one before."
        )
    return table


def _read(path: Path) -> State:
    """Tensors and places of a rank."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            places = json.loads(file.metadata()["places"])
            return {name: (file.get_tensor(name), _place(places[name])) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read: {error}. It must be as it was written. Remove "
            f"{path.parent} to use the checkpoint before."
        ) from None


def _place(table: Mapping[str, Any]) -> Place:
    values: dict[str, Any] = {key: x if x is None else tuple(x) for key, x in table.items()}
    return Place(**values)


def load(checkpoint: Path, state: State, grid: Grid) -> None:
    """Fill my parts from a checkpoint of the same grid."""
    saved = _read(checkpoint / f"rank-{grid.rank:05d}.safetensors")
    if set(saved) != set(state):
        odd = sorted(set(saved) ^ set(state))
        raise DataError(
            f"{checkpoint} and the model differ in {len(odd)} tensors: {', '.join(odd[:5])}. A "
            "checkpoint fits the model that saved it. Use the same model settings."
        )
    with torch.no_grad():
        for name, (part, place) in state.items():
            value, there = saved[name]
            if there != place:
                raise DataError(
                    f"{checkpoint} holds another part of {name} on rank {grid.rank}: {there}, not "
                    f"{place}. It was saved on another grid. Use the degrees in its state.json."
                )
            part.copy_(value)


def wholes(checkpoint: Path, kind: str = "master") -> dict[str, Tensor]:
    """Whole weights of a checkpoint by the name of their parameter, put together from all ranks."""
    count, end = int(facts(checkpoint)["ranks"]), f".{kind}"
    parts = (_read(checkpoint / f"rank-{rank:05d}.safetensors") for rank in range(count))
    mine = ({n.removesuffix(end): x for n, x in part.items() if n.endswith(end)} for part in parts)
    return assemble(mine)
