"""Show: what people ask of checkpoints. Which are there, are they good, how do two differ."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ranvier.checkpoint import directory as folders
from ranvier.checkpoint import load
from ranvier.checkpoint import manifest as manifests
from ranvier.checkpoint.manifest import NAME, Entry, Manifest
from ranvier.errors import CheckpointError, RanvierError
from ranvier.system.terminal import draw, escape_controls, print

HEAD = ("checkpoint", "step", "size", "grid", "samples", "held-out loss", "state")
SHOWN = 20
"""Tensors that a comparison names."""


def checkpoints(path: Path) -> list[Path]:
    """The checkpoints of a run or a directory of them, or the one that a path is."""
    if (path / NAME).exists() or _named(path):
        return [path]
    inside = path / "checkpoints"
    found = folders.found(inside if inside.is_dir() else path)
    if not found:
        raise CheckpointError(
            f"{path} has no checkpoint. Give a run, its directory checkpoints, or a checkpoint "
            "(step-00000100)."
        )
    return found


def _named(path: Path) -> bool:
    return bool(folders.STEP.fullmatch(path.name)) and path.is_dir()


def listed(path: Path) -> int:
    """Print a line for each checkpoint; what can be seen without reading all of it."""
    paths = checkpoints(path)
    pointed, _ = folders.pointed(paths[0].parent)
    rows: list[tuple[str, ...]] = [
        ("checkpoint", "step", "size", "grid", "samples", "held-out loss", "state")
    ]
    bad = 0
    for one in paths:
        try:
            manifest = manifests.read(one)
            state = _sizes(one, manifest)
        except RanvierError as error:
            rows.append((one.name, *[""] * 5, str(error)))
            bad += 1
            continue
        facts, grid = manifest.facts, _grid(manifest.degrees)
        loss = facts.get("held_out_loss")
        rows.append(
            (
                one.name,
                str(manifest.step),
                size_of(manifest.bytes),
                grid,
                str(facts.get("samples", "")),
                f"{loss:.4f}" if isinstance(loss, float) else "",
                state or ("complete, latest" if one.name == pointed else "complete"),
            )
        )
        bad += bool(state)
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:6], widths, strict=True)]
        print("  ".join([*cells, row[6]]).rstrip())
    return CheckpointError.exit_code if bad else 0


def _sizes(checkpoint: Path, manifest: Manifest) -> str:
    """The first file that is missing or has another size."""
    for name, sums in manifest.files.items():
        path = checkpoint / name
        there = path.lstat().st_size if path.is_file() else -1
        if there != sums.size:
            return (
                f"damaged: {name} has {there} bytes, not {sums.size}"
                if there >= 0
                else (f"damaged: {name} is missing")
            )
    return ""


def _grid(degrees: Mapping[str, int]) -> str:
    return " ".join(f"{axis}={n}" for axis, n in degrees.items() if n > 1) or "one rank"


def size_of(count: int) -> str:
    """Bytes for people."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def verified(path: Path) -> int:
    """Read every byte of checkpoints and compare checksums; the exit code."""
    worst = 0
    for one in checkpoints(path):
        problems = []
        try:
            manifest = manifests.read(one)
            _check_name(one, manifest)
            problems = list(_problems(one, manifest))
        except CheckpointError as error:
            problems = [str(error)]
        for problem in problems:
            print(problem)
        if problems:
            worst = CheckpointError.exit_code
            print(f"{one}: damaged, {len(problems)} problem(s)")
        else:
            print(f"{one}: good, {len(manifest.tensors)} tensors, {size_of(manifest.bytes)}")
    return worst


def _check_name(checkpoint: Path, manifest: Manifest) -> None:
    match = folders.STEP.fullmatch(checkpoint.name)
    if match and int(match[1]) != manifest.step:
        raise CheckpointError(f"{checkpoint} holds step {manifest.step}. It bears another name.")


def _problems(checkpoint: Path, manifest: Manifest) -> Iterator[str]:
    done, shown, tty = 0, -1, sys.stderr.isatty()
    for problem, count in load.damage(checkpoint, manifest):
        done += count
        share = 100 * done // max(manifest.bytes, 1)
        if tty and share > shown:
            shown = share
            draw(f"\r{escape_controls(checkpoint.name)}: {share} %", sys.stderr)
        if problem:
            yield problem
    if tty:
        draw("\r\x1b[K", sys.stderr)


def compared(one: Path, other: Path) -> int:
    """Print how two checkpoints differ; 0 if they do not, else 1."""
    paths = [checkpoints(path)[-1] for path in (one, other)]
    first, second = map(manifests.read, paths)
    print(f"{paths[0]} (step {first.step}) and {paths[1]} (step {second.step})")
    lines = list(_facts("", _told(first), _told(second)))
    odd = load.differing(first.tensors, second.tensors)
    lines += [f"tensor {name}: {_kind(first, name)} | {_kind(second, name)}" for name in odd]
    same, differ = 0, []
    for name in sorted(set(first.tensors) & set(second.tensors) - set(odd)):
        line = _tensors(paths, (first, second), name)
        if line:
            differ.append(f"tensor {name}: {line}")
        else:
            same += 1
    lines += differ[:SHOWN]
    if len(differ) > SHOWN:
        lines.append(f"... and {len(differ) - SHOWN} more tensors")
    for line in lines:
        print(f"  {line}")
    print(f"  {same} tensors are equal bit for bit, {len(differ) + len(odd)} are not")
    return 1 if lines else 0


def _told(manifest: Manifest) -> dict[str, Any]:
    return {"step": manifest.step, "grid": _grid(manifest.degrees), **manifest.facts}


def _facts(path: str, one: Any, other: Any) -> Iterator[str]:
    """A line for each fact that differs."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            yield from _facts(f"{path}.{key}".lstrip("."), one.get(key), other.get(key))
    elif one != other:
        yield f"{path}: {one!r:.80} | {other!r:.80}"


def _kind(manifest: Manifest, name: str) -> str:
    entry: Entry | None = manifest.tensors.get(name)
    return "not there" if entry is None else f"{list(entry.shape)} {entry.dtype}"


def _tensors(paths: list[Path], both: tuple[Manifest, Manifest], name: str) -> str:
    """How two tensors of the same kind differ; empty: not in a bit."""
    values = []
    for path, manifest in zip(paths, both, strict=True):
        state = {name: load.blank(manifest.tensors[name])}
        load.fill(path, manifest, state)
        values.append(state[name][0])
    bits = [x.contiguous().view(-1).view(torch.uint8) for x in values]
    if torch.equal(*bits):
        return ""
    wide = [x.double() for x in values]
    count = int((wide[0] != wide[1]).sum())
    most = float((wide[0] - wide[1]).abs().max())
    return f"{count} of {wide[0].numel()} elements differ, by at most {most:.3g}"
