"""Folder: the checkpoints of a run, and what makes one of them appear or vanish at once.

    checkpoints/step-00000100/rank-00000.safetensors ... manifest.json
    checkpoints/latest                                 the name of the newest, for people and tools

A checkpoint is written under a hidden name and renamed when the disk holds all of it. What bears a
name `step-...` was finished; `latest` is a hint only and never trusted.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranvier.checkpoint import checksummed_file, rank_file
from ranvier.checkpoint import manifest as manifests
from ranvier.checkpoint.manifest import DTYPES, Entry, Manifest, Part
from ranvier.errors import RanvierError, RefusedError, WriteError
from ranvier.sharding import Place

STEP = re.compile(r"step-(\d{8,18})(?:\.(\d{1,9}))?")
"""Names of checkpoints: a step, and which of several of that step it is."""
POINTER = "latest"
ASIDE = "aside-"
"""How the names of checkpoints begin that a run has gone back behind."""


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay."""

    last: int = 0
    """The newest so many; 0: all."""
    every: int = 0
    """Those of steps that are multiples of it, for good; 0: none."""
    best: bool = False
    """The one with the lowest held-out loss."""


def found(folder: Path) -> list[Path]:
    """The checkpoints in a directory, by their step, oldest first."""
    if not folder.is_dir():
        return []
    matched = [(STEP.fullmatch(path.name), path) for path in folder.iterdir()]
    named = [((int(m[1]), int(m[2] or 1)), path) for m, path in matched if m and _own(path)]
    return [path for _, path in sorted(named)]


def _own(path: Path) -> bool:
    """Whether a checkpoint is a directory of its own."""
    if path.is_symlink():
        raise RefusedError(
            f"{path} is a symbolic link. Checkpoints of a run lie in its own directory. Give the "
            "path it leads to as checkpoint.resume, or remove it."
        )
    return path.is_dir()


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint."""
    match = STEP.fullmatch(checkpoint.name)
    assert match, checkpoint
    return int(match[1])


def newest(folder: Path) -> tuple[list[Path], list[str]]:
    """Checkpoints, newest first, and what there is to say of the pointer to them."""
    paths = found(folder)[::-1]
    if not paths:
        return [], []
    name, why = pointed(folder)
    if name == paths[0].name:
        return paths, []
    said = f"names {name}" if name else why
    return paths, [f"{folder / POINTER} {said}; the newest checkpoint is {paths[0].name}"]


def pointed(folder: Path) -> tuple[str, str]:
    """The checkpoint that `latest` names, or why it names none."""
    path = folder / POINTER
    if not path.is_symlink() and not path.exists():
        return "", "is missing"
    with os.fdopen(checksummed_file.opened(path), "rb") as file:
        text = file.read(4096).decode(errors="replace").removesuffix("\n")
    if "/" in text or "\\" in text or text.startswith(".."):
        raise RefusedError(
            f"{path} names {text[:100]!r}. It must be the name of a checkpoint next to it. Remove "
            "it: the newest checkpoint is found without it."
        )
    if not STEP.fullmatch(text):
        return "", f"names no checkpoint ({text[:40]!r})"
    return text, ""


def writing(folder: Path, step: int, nonce: str) -> Path:
    """Where the ranks of a run write a checkpoint until it is whole."""
    return folder / f".step-{step:08d}.{nonce}.writing"


def sweep(folder: Path, nonce: str) -> None:
    """Remove what saves and removals that were killed have left."""
    for left in folder.glob(".*"):
        ours = re.fullmatch(r"\.(step-.*\.(writing|removing)|latest\.writing)", left.name)
        if ours and f".{nonce}." not in left.name:
            _remove(left)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def seal(
    here: Path,
    step: int,
    degrees: Mapping[str, int],
    facts: Mapping[str, Any],
    *,
    files: int | None = None,
) -> None:
    """Write the manifest of the parts that all ranks have written; it may be done twice.

    files: how many there are, if not one for each rank.
    """
    count = math.prod(degrees.values()) if files is None else files
    text = manifests.dumped(_merged(here, step, count, degrees, facts))
    (here / manifests.NAME).unlink(missing_ok=True)
    checksummed_file.write(here / manifests.NAME, [memoryview(text)])


def publish(folder: Path, here: Path, step: int) -> Path:
    """Give what is sealed the name of a checkpoint, at once."""
    final = _free(folder, step)
    rename(here, final)
    return final


def rename(here: Path, final: Path) -> None:
    """Give a sealed directory its name, at once."""
    for told in here.glob("rank-*.json"):
        told.unlink()
    checksummed_file.flush(here)
    os.replace(here, final)


def _free(folder: Path, step: int) -> Path:
    """A name for a checkpoint of this step that none has: one that is there is never touched."""
    count = 1
    while True:
        path = folder / (f"step-{step:08d}" + f".{count}" * (count > 1))
        if not path.exists():
            return path
        count += 1


def point(folder: Path, name: str) -> None:
    """Have `latest` name a checkpoint, at once."""
    hidden = folder / f".{POINTER}.writing"
    hidden.unlink(missing_ok=True)
    checksummed_file.write(hidden, [memoryview(f"{name}\n".encode())])
    os.replace(hidden, folder / POINTER)
    checksummed_file.flush(folder)


def _merged(
    here: Path, step: int, ranks: int, degrees: Mapping[str, int], facts: Mapping[str, Any]
) -> Manifest:
    """The manifest of what all ranks have written."""
    files, parts, kinds = {}, dict[str, list[Part]](), dict[str, tuple[Any, tuple[int, ...]]]()
    for rank in range(ranks):
        name = rank_file.names(rank)[0]
        files[name], tensors = rank_file.told(here, rank)
        if not (here / name).is_file():
            raise WriteError(f"{here / name} has vanished. It must stay until it is committed.")
        for tensor, (word, shape, (_, begin, start, valid, local, flat)) in tensors.items():
            whole = tuple(shape)
            box = tuple(start), tuple(valid), tuple(local)
            place = Place(whole, *box, flat=(flat[0], flat[1]) if flat else None)
            assert kinds.setdefault(tensor, (word, whole)) == (word, whole), tensor
            parts.setdefault(tensor, []).append(Part(rank, begin, place))
    entries = {
        name: Entry(DTYPES[kinds[name][0]], kinds[name][1], tuple(parts[name])) for name in parts
    }
    return Manifest(step, degrees, facts, manifests.versions(), files, entries)


def prune(folder: Path, keep: Keep) -> None:
    """Remove the checkpoints that need not stay, each at once."""
    paths = found(folder)
    if keep.last == 0 or not paths:
        return
    newest_of = {step_of(path): path for path in paths}
    good = list(newest_of.values())
    stay = {*good[-keep.last :]}
    if keep.every:
        stay |= {path for step, path in newest_of.items() if step % keep.every == 0}
    if keep.best:
        losses = {path: loss for path in good if (loss := _held_out(path)) is not None}
        stay |= {min(losses, key=lambda path: (losses[path], step_of(path)))} if losses else set()
    for path in paths:
        if path not in stay:
            hidden = folder / f".{path.name}.removing"
            _remove(hidden)
            os.replace(path, hidden)  # a half removed one must not look like a checkpoint
            _remove(hidden)


def _held_out(checkpoint: Path) -> float | None:
    try:
        loss = manifests.read(checkpoint).facts.get("held_out_loss")
    except (RanvierError, OSError):
        return None
    return loss if isinstance(loss, float) else None


def set_aside(folder: Path, after: int) -> list[Path]:
    """Rename checkpoints of later steps than `after`, where a run goes on from that; as they are.

    They are damaged, or of a past that the run leaves: its next ones must be the newest.
    """
    moved = []
    for path in found(folder):
        if step_of(path) > after:
            into = next(
                name
                for count in range(1, 10**6)
                if not (name := folder / f"{ASIDE}{path.name}-{count}").exists()
            )
            os.replace(path, into)
            moved.append(into)
    return moved
