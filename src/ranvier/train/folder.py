"""The directory of a run: who may write there, what is in it, where a run goes on.

config.toml     the resolved run
run.json        what is known of it: device, data, groups, phases, status
metrics.jsonl   one object a step
checkpoints/    what it goes on from
report.html     plots
"""

from __future__ import annotations

import dataclasses
import fcntl
import itertools
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from ranvier import run as runs
from ranvier.checkpoint import files
from ranvier.errors import PlanError
from ranvier.launch import writable
from ranvier.plan import AXES
from ranvier.run import Run

FIXED = (
    *("model", "data.seq", "data.packed", "data.held_out", "train.seed", "train.dtype"),
    *(f"plan.{axis}" for axis in AXES),
)
"""Settings that a run keeps for its whole life; the corpora are compared by fingerprint."""


def check_out(run: Run) -> None:
    """Refuse a directory that cannot be made or written in, before any work."""
    folder = Path(run.train.out or "runs")
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except (OSError, ValueError) as error:
        raise PlanError(
            f"train.out={str(folder)[:80]!r} cannot be a directory: {error.__class__.__name__}. "
            "Its name must be one that the file system takes. Choose another."
        ) from None
    if not there.is_dir() or not writable(there):
        what = "cannot be written in" if there.is_dir() else "is no directory"
        raise PlanError(
            f"train.out={str(folder)!r}: {there} {what}. A run needs a directory of its own that "
            "it can write in. Choose another train.out."
        )


def lock(folder: Path) -> IO[str]:
    """A handle that keeps other runs out of a directory as long as it is open."""
    handle = (folder / ".lock").open("a")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise PlanError(
            f"train.out={str(folder)!r} is being written by another run. A directory holds one "
            "run. Wait for it, stop it, or choose another directory."
        ) from None
    except OSError:  # a file system without locks
        pass
    return handle


def claim(run: Run) -> tuple[Path, Path | None]:
    """The directory of a run, and the checkpoint to go on from if it holds one.

    A directory that was not asked for is a new one, which only one run can claim.
    """
    if not run.train.out:
        return _new(run.model.size), None
    folder = Path(run.train.out)
    if not (folder / "config.toml").exists():
        if (folder / "metrics.jsonl").exists():
            raise PlanError(
                f"train.out={run.train.out!r} holds metrics without a config.toml. A run is only "
                "continued by its own settings. Choose another directory."
            )
        folder.mkdir(parents=True, exist_ok=True)
        return folder, None
    _refuse_changes(folder, run)
    checkpoints = files.found(folder / "checkpoints")
    done = int(files.facts(checkpoints[-1])["step"]) if checkpoints else 0
    if done >= run.train.steps or (not checkpoints and facts(folder).get("status") == "finished"):
        raise PlanError(
            f"train.out={run.train.out!r} holds a run that has taken its steps. A finished run is "
            "not repeated. Use another directory"
            + (f", or train.steps above {done}." if checkpoints else ".")
        )
    return folder, checkpoints[-1] if checkpoints else None


def _new(name: str) -> Path:
    for number in itertools.count(1):
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    return folder


def differences(old: Run, new: Run) -> Iterator[tuple[str, Any, Any]]:
    """Dotted name, old and new value of each setting that differs."""
    for section in dataclasses.fields(Run):
        before, after = (dataclasses.asdict(getattr(run, section.name)) for run in (old, new))
        for key, value in before.items():
            if value != after[key]:
                yield f"{section.name}.{key}", value, after[key]


def _refuse_changes(folder: Path, run: Run) -> None:
    """A run goes on with the settings that its weights and its data order depend on."""
    changed = differences(runs.load(folder / "config.toml"), run)
    fatal = [
        f"{name}={new!r}, but the run in {folder} has {old!r}. It was begun with that. "
        f"Use {old!r}, or another train.out."
        for name, old, new in changed
        if name in FIXED or name.partition(".")[0] in FIXED
    ]
    if fatal:
        raise PlanError(fatal)


def begin(folder: Path, run: Run, step: int) -> list[str]:
    """Write the config and keep the metrics before `step`; what has changed since, as lines."""
    lines = []
    config = folder / "config.toml"
    if config.exists() and step == 0:
        lines = ["the directory holds a run without a checkpoint, which begins again"]
    elif config.exists():
        changed = differences(runs.load(config), run)
        lines = [f"changed: {name} from {old!r} to {new!r}" for name, old, new in changed]
    write(config, runs.to_toml(run))
    write(folder / "metrics.jsonl", "".join(_rows_before(folder / "metrics.jsonl", step)))
    return lines


def _rows_before(path: Path, step: int) -> Iterator[str]:
    """Lines of the steps that are not taken again."""
    for line in path.read_text(errors="replace").splitlines() if path.exists() and step > 0 else []:
        with suppress(ValueError, KeyError, TypeError):  # the last line may be cut off
            if json.loads(line)["step"] < step:
                yield line + "\n"


def write(path: Path, text: str) -> None:
    """Replace a file at once: a reader sees the old one or the new one."""
    writing = path.with_name(f".{path.name}.writing")
    try:
        writing.write_text(text, encoding="utf-8")
        os.replace(writing, path)
    except BaseException:
        writing.unlink(missing_ok=True)
        raise


def facts(folder: Path) -> dict[str, Any]:
    """What run.json says; nothing if it is not there or broken."""
    with suppress(OSError, ValueError):
        table = json.loads((folder / "run.json").read_text())
        return table if isinstance(table, dict) else {}
    return {}


def record(folder: Path, **more: Any) -> None:
    """Add facts to run.json."""
    write(folder / "run.json", json.dumps({**facts(folder), **more}, indent=1) + "\n")


def placed(run: Run, folder: Path) -> Run:
    """The run in its directory."""
    return replace(run, train=replace(run.train, out=str(folder)))
