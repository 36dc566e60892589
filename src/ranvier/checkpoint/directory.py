"""The checkpoint directory of a run: checkpoints appear and vanish atomically.

    checkpoints/step-00000100/rank-00000.safetensors ... manifest.json
    checkpoints/latest                                 the name of the newest, for people and tools

A checkpoint is written under a hidden name and renamed once all of it is on disk. Every directory
named `step-...` is complete; `latest` is a hint only and never trusted.
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
from ranvier.checkpoint.manifest import DTYPES, CheckpointManifest, StoredShard, TensorEntry
from ranvier.errors import RanvierError, UnsafeInputError, WriteError
from ranvier.sharding import Shard

CHECKPOINT_NAME = re.compile(r"step-(\d{8,18})(?:\.(\d{1,9}))?")
"""Names of checkpoints: a step, and a counter if there are several of that step."""
LATEST_POINTER = "latest"
ASIDE_PREFIX = "aside-"
"""Prefix of checkpoints that were set aside because the run resumed from an earlier one."""


@dataclass(frozen=True)
class RetentionPolicy:
    """Which checkpoints to keep."""

    keep_latest: int = 0
    """Number of newest checkpoints to keep; 0 keeps all."""
    keep_interval: int = 0
    """Also keep checkpoints of steps that are multiples of this permanently; 0 disables it."""
    keep_best: bool = False
    """Also keep the checkpoint with the lowest validation loss."""


def find_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a directory, sorted by step, oldest first."""
    if not folder.is_dir():
        return []
    matched = [(CHECKPOINT_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    named = [
        # Several saves of one step are ordered by their counter; the first has none.
        ((int(m[1]), int(m[2] or 1)), path)
        for m, path in matched
        if m and _is_own_directory(path)
    ]
    return [path for _, path in sorted(named)]


def _is_own_directory(path: Path) -> bool:
    """Whether a path is a real directory; symbolic links are refused."""
    if path.is_symlink():
        raise UnsafeInputError(
            f"{path} is a symbolic link. The checkpoints of a run must be in its own directory. "
            "Pass the target of the link as checkpoint.resume, or remove the link."
        )
    return path.is_dir()


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint."""
    match = CHECKPOINT_NAME.fullmatch(checkpoint.name)
    assert match, checkpoint
    return int(match[1])


def newest_checkpoints(folder: Path) -> tuple[list[Path], list[str]]:
    """Checkpoints, newest first, and warnings about the `latest` pointer."""
    paths = find_checkpoints(folder)[::-1]
    if not paths:
        return [], []
    name, why = read_latest_pointer(folder)
    if name == paths[0].name:
        return paths, []
    state = f"names {name}" if name else why
    return paths, [f"{folder / LATEST_POINTER} {state}; the newest checkpoint is {paths[0].name}"]


def read_latest_pointer(folder: Path) -> tuple[str, str]:
    """The checkpoint that `latest` names, or the reason why there is none."""
    path = folder / LATEST_POINTER
    if not path.is_symlink() and not path.exists():
        return "", "is missing"
    with os.fdopen(checksummed_file.open_plain_file(path), "rb") as file:
        text = file.read(4096).decode(errors="replace").removesuffix("\n")
    # The pointer is untrusted: it must not lead out of the directory.
    if "/" in text or "\\" in text or text.startswith(".."):
        raise UnsafeInputError(
            f"{path} names {text[:100]!r}. It must name a checkpoint in the same directory. Remove "
            "it; the newest checkpoint is found without it."
        )
    if not CHECKPOINT_NAME.fullmatch(text):
        return "", f"does not name a checkpoint ({text[:40]!r})"
    return text, ""


def temporary_path(folder: Path, step: int, nonce: str) -> Path:
    """Where the ranks of a run write a checkpoint until it is complete."""
    return folder / f".step-{step:08d}.{nonce}.writing"


def remove_leftovers(folder: Path, nonce: str) -> None:
    """Remove the files that interrupted saves and removals have left behind."""
    for left in folder.glob(".*"):
        ours = re.fullmatch(r"\.(step-.*\.(writing|removing)|latest\.writing)", left.name)
        # Directories with the nonce of this run belong to the save in progress.
        if ours and f".{nonce}." not in left.name:
            _remove_path(left)


def _remove_path(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_manifest(
    here: Path,
    step: int,
    degrees: Mapping[str, int],
    facts: Mapping[str, Any],
    *,
    files: int | None = None,
) -> None:
    """Write the manifest of the rank files that all ranks have written; may be repeated.

    files: number of files, if not one per rank.
    """
    if files is None:
        count = math.prod(degrees.values())
    else:
        count = files
    text = manifests.serialize_manifest(_merge_rank_reports(here, step, count, degrees, facts))
    # A retry must remove a partial manifest first, since files are created exclusively.
    (here / manifests.MANIFEST_NAME).unlink(missing_ok=True)
    checksummed_file.write_checksummed(here / manifests.MANIFEST_NAME, [memoryview(text)])


def publish_checkpoint(folder: Path, here: Path, step: int) -> Path:
    """Atomically rename a complete temporary directory to the name of a checkpoint."""
    final = _unused_path(folder, step)
    rename_finished(here, final)
    return final


def rename_finished(here: Path, final: Path) -> None:
    """Atomically rename a complete directory."""
    # The reports of the ranks are merged into the manifest by now.
    for rank_report in here.glob("rank-*.json"):
        rank_report.unlink()
    # The entries must be on disk before the rename makes them visible.
    checksummed_file.fsync_path(here)
    os.replace(here, final)


def _unused_path(folder: Path, step: int) -> Path:
    """An unused name for a checkpoint of this step: existing checkpoints are never overwritten."""
    count = 1
    while True:
        path = folder / (f"step-{step:08d}" + f".{count}" * (count > 1))
        if not path.exists():
            return path
        count += 1


def write_latest_pointer(folder: Path, name: str) -> None:
    """Atomically let `latest` name a checkpoint."""
    hidden = folder / f".{LATEST_POINTER}.writing"
    hidden.unlink(missing_ok=True)
    checksummed_file.write_checksummed(hidden, [memoryview(f"{name}\n".encode())])
    os.replace(hidden, folder / LATEST_POINTER)
    checksummed_file.fsync_path(folder)


def _merge_rank_reports(
    here: Path, step: int, ranks: int, degrees: Mapping[str, int], facts: Mapping[str, Any]
) -> CheckpointManifest:
    """The manifest built from the reports of all ranks."""
    files = {}
    parts = dict[str, list[StoredShard]]()
    kinds = dict[str, tuple[Any, tuple[int, ...]]]()
    for rank in range(ranks):
        name = rank_file.rank_file_names(rank)[0]
        files[name], tensors = rank_file.read_rank_report(here, rank)
        if not (here / name).is_file():
            raise WriteError(
                f"{here / name} was removed before the checkpoint was committed. Nothing else may "
                "change this directory during a save. Resume from the previous checkpoint."
            )
        for tensor, (word, shape, (_, begin, start, valid, local, flat)) in tensors.items():
            whole = tuple(shape)
            box = tuple(start), tuple(valid), tuple(local)
            place = Shard(whole, *box, flat_range=(flat[0], flat[1]) if flat else None)
            # All ranks must agree on dtype and global shape of a tensor they share.
            assert kinds.setdefault(tensor, (word, whole)) == (word, whole), tensor
            parts.setdefault(tensor, []).append(StoredShard(rank, begin, place))
    entries = {
        name: TensorEntry(DTYPES[kinds[name][0]], kinds[name][1], tuple(parts[name]))
        for name in parts
    }
    return CheckpointManifest(step, degrees, facts, manifests.package_versions(), files, entries)


def prune_checkpoints(folder: Path, keep: RetentionPolicy) -> None:
    """Remove the checkpoints that the policy does not keep, each atomically."""
    paths = find_checkpoints(folder)
    if keep.keep_latest == 0 or not paths:
        return
    # Paths are sorted, so that the latest save of a step wins.
    newest_of = {step_of(path): path for path in paths}
    good = list(newest_of.values())
    stay = {*good[-keep.keep_latest :]}
    if keep.keep_interval:
        stay |= {path for step, path in newest_of.items() if step % keep.keep_interval == 0}
    if keep.keep_best:
        losses = {path: loss for path in good if (loss := _validation_loss(path)) is not None}
        stay |= {min(losses, key=lambda path: (losses[path], step_of(path)))} if losses else set()
    for path in paths:
        if path not in stay:
            hidden = folder / f".{path.name}.removing"
            _remove_path(hidden)
            # Renamed first: a partially removed directory must not look like a checkpoint.
            os.replace(path, hidden)
            _remove_path(hidden)


def _validation_loss(checkpoint: Path) -> float | None:
    try:
        loss = manifests.read_manifest(checkpoint).facts.get("held_out_loss")
    # A damaged checkpoint cannot be the best one; pruning continues without it.
    except (RanvierError, OSError):
        return None
    if isinstance(loss, float):
        return loss
    return None


def set_aside(folder: Path, after: int) -> list[Path]:
    """Rename, unchanged, all checkpoints of steps after `after`, the step a run resumes from.

    They are damaged, or belong to a history that the run discards: the checkpoints that it saves
    next must be the newest ones.
    """
    moved = []
    for path in find_checkpoints(folder):
        if step_of(path) > after:
            into = next(
                name
                for count in range(1, 10**6)
                if not (name := folder / f"{ASIDE_PREFIX}{path.name}-{count}").exists()
            )
            os.replace(path, into)
            moved.append(into)
    return moved
