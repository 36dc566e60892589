"""`ranvier checkpoint`: list checkpoints, verify them, and compare two."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ranvier.checkpoint import directory as folders
from ranvier.checkpoint import load
from ranvier.checkpoint import manifest as manifests
from ranvier.checkpoint.manifest import MANIFEST_NAME, CheckpointManifest, TensorEntry
from ranvier.errors import CheckpointError, RanvierError
from ranvier.system.terminal import escape_controls, print, write_raw

TABLE_HEADER = ("checkpoint", "step", "size", "grid", "samples", "val loss", "state")
MAX_SHOWN_TENSORS = 20
"""Maximum number of tensors that a comparison lists."""


def resolve_checkpoints(path: Path) -> list[Path]:
    """Returns the checkpoints of a run or a directory, or the single checkpoint at a path."""
    # A directory named like a checkpoint but without a manifest is a damaged checkpoint, not a run.
    if (path / MANIFEST_NAME).exists() or _has_checkpoint_name(path):
        return [path]
    inside = path / "checkpoints"
    found = folders.find_checkpoints(inside if inside.is_dir() else path)
    if not found:
        raise CheckpointError(
            f"{path} has no checkpoint. Pass a run, its checkpoints/ directory, or a checkpoint "
            "(step-00000100)."
        )
    return found


def _has_checkpoint_name(path: Path) -> bool:
    return bool(folders.CHECKPOINT_NAME.fullmatch(path.name)) and path.is_dir()


def list_checkpoints(path: Path) -> int:
    """Prints a line per checkpoint without reading its tensors; returns the exit code."""
    paths = resolve_checkpoints(path)
    pointed, _ = folders.read_latest_pointer(paths[0].parent)
    rows: list[tuple[str, ...]] = [
        ("checkpoint", "step", "size", "grid", "samples", "val loss", "state")
    ]
    bad = 0
    for one in paths:
        try:
            manifest = manifests.read_manifest(one)
            state = _find_size_problem(one, manifest)
        except RanvierError as error:
            # List a damaged checkpoint with its error, and continue with the others.
            rows.append((one.name, *[""] * 5, str(error)))
            bad += 1
            continue
        facts = manifest.facts
        grid = _format_grid(manifest.degrees)
        loss = facts.get("held_out_loss")
        rows.append(
            (
                one.name,
                str(manifest.step),
                format_bytes(manifest.total_bytes),
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
    if bad:
        return CheckpointError.exit_code
    return 0


def _find_size_problem(checkpoint: Path, manifest: CheckpointManifest) -> str:
    """Returns the first file that is missing or has the wrong size as text; empty if none is."""
    for name, sums in manifest.files.items():
        path = checkpoint / name
        if path.is_file():
            there = path.lstat().st_size
        else:
            there = -1
        if there != sums.size:
            if there >= 0:
                return f"damaged: {name} has {there} bytes, not {sums.size}"
            return f"damaged: {name} is missing"
    return ""


def _format_grid(degrees: Mapping[str, int]) -> str:
    return " ".join(f"{axis}={n}" for axis, n in degrees.items() if n > 1) or "one rank"


def format_bytes(count: int) -> str:
    """Formats a number of bytes with a binary unit."""
    value = float(count)
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value = value / 1024
        units = units[1:]
    if units[0] == "B":
        return f"{value:.0f} B"
    return f"{value:.1f} {units[0]}"


def verify_checkpoints(path: Path) -> int:
    """Reads every byte of checkpoints and compares checksums; returns the exit code."""
    worst = 0
    for one in resolve_checkpoints(path):
        problems = []
        try:
            manifest = manifests.read_manifest(one)
            _check_name(one, manifest)
            problems = list(_find_problems(one, manifest))
        except CheckpointError as error:
            problems = [str(error)]
        for problem in problems:
            print(problem)
        if problems:
            worst = CheckpointError.exit_code
            print(f"{one}: damaged, {len(problems)} problem(s)")
        else:
            print(
                f"{one}: valid, {len(manifest.tensors)} tensors, "
                f"{format_bytes(manifest.total_bytes)}"
            )
    return worst


def _check_name(checkpoint: Path, manifest: CheckpointManifest) -> None:
    match = folders.CHECKPOINT_NAME.fullmatch(checkpoint.name)
    if match and int(match[1]) != manifest.step:
        raise CheckpointError(
            f"{checkpoint} contains step {manifest.step}, which does not match its name. The "
            f"manifest or the name was changed. Restore the name, or use another checkpoint."
        )


def _find_problems(checkpoint: Path, manifest: CheckpointManifest) -> Iterator[str]:
    done = 0
    shown = -1
    tty = sys.stderr.isatty()
    for problem, count in load.find_damage(checkpoint, manifest):
        done += count
        share = 100 * done // max(manifest.total_bytes, 1)
        # Rewrites one line of the terminal, at most once per percent.
        if tty and share > shown:
            shown = share
            write_raw(f"\r{escape_controls(checkpoint.name)}: {share} %", sys.stderr)
        if problem:
            yield problem
    if tty:
        write_raw("\r\x1b[K", sys.stderr)


def diff_checkpoints(one: Path, other: Path) -> int:
    """Prints how two checkpoints differ; returns 0 if they are equal, else 1."""
    # For a run, its latest checkpoint is compared.
    paths = [resolve_checkpoints(path)[-1] for path in (one, other)]
    first, second = map(manifests.read_manifest, paths)
    print(f"{paths[0]} (step {first.step}) and {paths[1]} (step {second.step})")
    lines = list(_diff_facts("", _manifest_facts(first), _manifest_facts(second)))
    odd = load.differing_tensors(first.tensors, second.tensors)
    lines += [
        f"tensor {name}: {_describe_tensor(first, name)} | {_describe_tensor(second, name)}"
        for name in odd
    ]
    same = 0
    differ = []
    for name in sorted(set(first.tensors) & set(second.tensors) - set(odd)):
        line = _diff_tensors(paths, (first, second), name)
        if line:
            differ.append(f"tensor {name}: {line}")
        else:
            same += 1
    lines += differ[:MAX_SHOWN_TENSORS]
    if len(differ) > MAX_SHOWN_TENSORS:
        lines.append(f"... and {len(differ) - MAX_SHOWN_TENSORS} more tensors")
    for line in lines:
        print(f"  {line}")
    print(f"  {same} tensors are bit-identical, {len(differ) + len(odd)} differ")
    if lines:
        return 1
    return 0


def _manifest_facts(manifest: CheckpointManifest) -> dict[str, Any]:
    return {"step": manifest.step, "grid": _format_grid(manifest.degrees), **manifest.facts}


def _diff_facts(path: str, one: Any, other: Any) -> Iterator[str]:
    """Yields a line for each fact that differs."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            yield from _diff_facts(f"{path}.{key}".lstrip("."), one.get(key), other.get(key))
    elif one != other:
        yield f"{path}: {one!r:.80} | {other!r:.80}"


def _describe_tensor(manifest: CheckpointManifest, name: str) -> str:
    entry: TensorEntry | None = manifest.tensors.get(name)
    if entry is None:
        return "missing"
    return f"{list(entry.shape)} {entry.dtype}"


def _diff_tensors(
    paths: list[Path], both: tuple[CheckpointManifest, CheckpointManifest], name: str
) -> str:
    """Returns how two tensors of the same shape and dtype differ; empty if they are
    bit-identical."""
    values = []
    for path, manifest in zip(paths, both, strict=True):
        # One tensor at a time, so that large checkpoints can be compared with little memory.
        state = {name: load.empty_shard(manifest.tensors[name])}
        load.fill_tensors(path, manifest, state)
        values.append(state[name][0])
    # Compare bits first: equal NaNs count as equal, and -0.0 differs from 0.0.
    bits = [x.contiguous().view(-1).view(torch.uint8) for x in values]
    if torch.equal(*bits):
        return ""
    wide = [x.double() for x in values]
    count = int((wide[0] != wide[1]).sum())
    most = float((wide[0] - wide[1]).abs().max())
    return f"{count} of {wide[0].numel()} elements differ, by at most {most:.3g}"
