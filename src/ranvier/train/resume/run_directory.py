"""The directory of a run: its lock, its files, and where to resume.

config.toml     the resolved run config
run.json        facts on the run: device, data, groups, phases, status
metrics.jsonl   one JSON object per step
checkpoints/    the checkpoints
report.html     the report with plots
"""

from __future__ import annotations

import dataclasses
import datetime
import fcntl
import io
import itertools
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ranvier.checkpoint.directory import CHECKPOINT_NAME, find_checkpoints, newest_checkpoints
from ranvier.checkpoint.manifest import MANIFEST_NAME, CheckpointManifest, read_manifest
from ranvier.config import run as runs
from ranvier.config.run import RunConfig
from ranvier.cost.optimizer import OptimizerSpec
from ranvier.errors import (
    CheckpointError,
    DamageError,
    PlanError,
    RanvierError,
    UnsafeInputError,
    WriteError,
)
from ranvier.launch import ProcessInfo, is_writable, process_age_seconds
from ranvier.setting import MAX_INTEGER
from ranvier.system import safe_files
from ranvier.train.lora import is_base_checkpoint
from ranvier.train.resume import checkpointing

UNFINISHED = "unfinished"
"""Status of a run until it ends.

It remains if the run is killed with all of its processes; a run that is training holds the lock.
"""


def check_output_dir(run: RunConfig) -> None:
    """Raise if the output directory cannot be created or written, before any work is done."""
    folder = Path(run.train.output_dir or "runs")
    try:
        # The nearest existing ancestor decides whether the directory can be created.
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except (OSError, ValueError) as error:
        raise PlanError(
            f"train.output_dir={str(folder)[:80]!r} cannot be a directory: "
            f"{error.__class__.__name__}. It must be a name that the file system accepts. Choose "
            "another."
        ) from None
    if not there.is_dir():
        raise PlanError(
            f"train.output_dir={str(folder)!r}: {there} is not a directory. A run needs its own "
            "directory. Choose another train.output_dir."
        )
    if not is_writable(there):
        # Master weights of all parameters, and states of the trained ones. 8-bit moments are saved
        # in the dtype of master weights.
        wide = {"fp64": 8}.get(run.train.dtype, 4)
        needed = run.model.num_parameters * wide
        needed += round(run.trainable_parameters * saved_state_bytes(run, wide))
        raise WriteError(
            f"train.output_dir={str(folder)!r}: {there} is not writable. A run writes there, and a "
            f"checkpoint needs about {needed:,} bytes. Make it writable, or choose another "
            "train.output_dir."
        )


def saved_state_bytes(run: RunConfig, wide: int) -> float:
    """Bytes of the states in a checkpoint per trained parameter, without its master weight."""
    optimizer = OptimizerSpec.from_run(run)
    if optimizer.moments == "int8":
        optimizer = dataclasses.replace(optimizer, moments="master")
    rule = optimizer.matrix_rule
    found = optimizer.moment_bytes_per_element(wide)
    if rule is not None and rule.tile_size:
        # The preconditioners of square tiles.
        found += (
            rule.owner_state_elements(rule.tile_size, rule.tile_size) / rule.tile_size**2 * wide
        )
    return found


def lock_dir(folder: Path, seconds: float = 1.0) -> IO[str]:
    """Lock a directory; other runs are refused while the returned handle is open.

    seconds: how long to wait for a run that is just ending.
    """
    file = safe_files.open_to_write(folder / ".lock", append=True)
    handle = io.TextIOWrapper(file, encoding="utf-8", errors="replace")
    limit = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > limit:
                raise _locked_error(folder, handle) from None
            time.sleep(0.05)
        # The file system does not support locks: run without one.
        except OSError:
            break
    # The holder is only for the error message of others; the lock itself belongs to the kernel,
    # which releases it when the process dies.
    handle.truncate(0)
    handle.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    handle.flush()
    return handle


def is_locked(folder: Path) -> bool:
    """Whether a run currently holds the lock of a directory."""
    with suppress(OSError), (folder / ".lock").open() as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def check_unlocked(run: RunConfig) -> None:
    """Raise if another run holds the directory, before any rank is started."""
    if run.train.output_dir and (Path(run.train.output_dir) / ".lock").exists():
        lock_dir(Path(run.train.output_dir)).close()


def _locked_error(folder: Path, handle: IO[str]) -> UnsafeInputError:
    with handle:
        handle.seek(0)
        holder = handle.read(200).strip() or "another run"
    return UnsafeInputError(
        f"train.output_dir={str(folder)!r} is in use by {holder}. A directory can have only one "
        "run at a time. Wait for it, stop it, or choose another directory."
    )


def has_own_checkpoints(run: RunConfig, me: ProcessInfo) -> bool:
    """Whether the launcher has restarted a run that may resume from its own checkpoints.

    A run with `resume=never` may have failed before it moved the checkpoints of an earlier launch
    aside; these are not its own.
    """
    if me.attempt == 0 or not run.train.output_dir:
        return False
    folder = Path(run.train.output_dir)
    own = any(one.get("began") == me.start_time for one in read_launches(folder))
    return own and (
        run.checkpoint.resume == "never" or bool(find_checkpoints(folder / "checkpoints"))
    )


def acquire_dir(run: RunConfig, *, restarted: bool = False) -> tuple[Path, list[Path], list[str]]:
    """The directory of a run, the checkpoints to resume from (best first), and notes on them.

    Without `train.output_dir` a new directory is created, which only one run can claim. restarted:
    the launcher has restarted the ranks; all steps may be done, but the report may be missing.
    """
    word = run.checkpoint.resume
    if run.train.output_dir:
        own = Path(run.train.output_dir)
    else:
        own = None
    if own is not None and not (own / "config.toml").exists() and (own / "metrics.jsonl").exists():
        raise PlanError(
            f"train.output_dir={run.train.output_dir!r} has metrics but no config.toml. A run can "
            "only be resumed with its own settings. Choose another directory."
        )
    lines: list[str] = []
    candidates: list[Path] = []
    if word not in ("auto", "never"):
        candidates, lines = _resolve_resume_path(Path(word))
    elif word == "auto" and own is not None:
        candidates, lines = newest_checkpoints(own / "checkpoints")
        if not candidates and is_finished(own):
            raise _finished_error(run, "")
    # Refuse conflicts now, before the model is built.
    manifest = _first_readable_manifest(candidates)
    if manifest is not None:
        _refuse_base_checkpoint(manifest, run)
        checkpointing.check_same_config(manifest, candidates[0], run)
        if not restarted:
            _refuse_finished(manifest, run)
        # Otherwise `write_header` reports the changes.
        if own is None or not (own / "config.toml").exists():
            changed = checkpointing.setting_differences(
                checkpointing.stored_settings(manifest, candidates[0]),
                checkpointing.run_to_dict(run),
            )
            lines += [f"changed: {name} from {old!r} to {new!r}" for name, old, new in changed]
    if own is None:
        return make_run_dir(run.model.size), candidates, lines
    own.mkdir(parents=True, exist_ok=True)
    return own, candidates, lines + (_move_aside(own) if word == "never" else [])


def find_stored_settings(run: RunConfig) -> dict[str, Any] | None:
    """The settings in the checkpoint that a run resumes from; None if it starts at its first step.

    Problems of the checkpoint are reported when it is loaded.
    """
    word = run.checkpoint.resume
    candidates: list[Path] = []
    with suppress(RanvierError, OSError):
        if word not in ("auto", "never"):
            candidates, _ = _resolve_resume_path(Path(word))
        elif word == "auto" and run.train.output_dir:
            candidates, _ = newest_checkpoints(Path(run.train.output_dir) / "checkpoints")
        manifest = _first_readable_manifest(candidates)
        if manifest is not None:
            return checkpointing.stored_settings(manifest, candidates[0])
    return None


def _refuse_base_checkpoint(manifest: CheckpointManifest, run: RunConfig) -> None:
    """Raise if a run with adapters would resume from a checkpoint without any."""
    if is_base_checkpoint(manifest, run) and not manifest.facts.get("weights"):
        word = run.checkpoint.resume
        if word == "auto":
            where = run.train.output_dir
        else:
            where = word
        raise PlanError(
            f"lora.rank={run.lora.rank}, but {where!r} is a checkpoint without adapters. A run "
            "with adapters starts from weights and resumes from its own checkpoints only. Use "
            f"train.init_from={where!r} and another train.output_dir."
        )


def _refuse_finished(manifest: CheckpointManifest, run: RunConfig) -> None:
    """Raise if a checkpoint has all steps of the run already."""
    word = run.checkpoint.resume
    auto = run.checkpoint.resume == "auto"
    if manifest.step >= run.train.steps and not auto:
        raise PlanError(
            f"train.steps={run.train.steps}, but checkpoint.resume={word!r} is at step "
            f"{manifest.step} already. There is nothing left to do. Use train.steps above "
            f"{manifest.step}."
        )
    if manifest.step >= run.train.steps:
        raise _finished_error(run, f", or train.steps above {manifest.step}")


def is_finished(folder: Path) -> bool:
    """Whether the run of a directory has finished."""
    return (folder / "config.toml").exists() and read_run_json(folder).get("status") == "finished"


def _finished_error(run: RunConfig, other: str) -> PlanError:
    return PlanError(
        f"train.output_dir={run.train.output_dir!r} has a finished run. A finished run is not "
        f"repeated. Use another directory{other}."
    )


def _resolve_resume_path(path: Path) -> tuple[list[Path], list[str]]:
    """The checkpoint at a path, or the checkpoints of the run at a path."""
    if (path / MANIFEST_NAME).exists() or CHECKPOINT_NAME.fullmatch(path.name):
        candidates = [path] if path.is_dir() else []
        lines = list[str]()
    else:
        candidates, lines = newest_checkpoints(
            path / "checkpoints" if (path / "checkpoints").is_dir() else path
        )
    if not candidates:
        raise CheckpointError(
            f"checkpoint.resume={str(path)!r} has no checkpoint. It must be the directory of a "
            "checkpoint (step-00000100) or of a run. Check the path, or use auto."
        )
    return candidates, lines


def _first_readable_manifest(candidates: list[Path]) -> CheckpointManifest | None:
    """The first readable manifest; None if there is none, which is reported when loading."""
    for path in candidates:
        with suppress(DamageError):
            return read_manifest(path)
    return None


def _move_aside(folder: Path) -> list[str]:
    """Rename the files of an earlier run in a directory, so that a new run can start there."""
    names = [name for name in ("checkpoints", "metrics.jsonl") if (folder / name).exists()]
    if not names:
        return []
    number = next(n for n in itertools.count(1) if not [*folder.glob(f"before-{n}-*")])
    for name in names:
        os.replace(folder / name, folder / f"before-{number}-{name}")
    return [f"checkpoint.resume=never: the previous run is now {folder}/before-{number}-*"]


def make_run_dir(name: str) -> Path:
    """Create a new directory runs/NAME, runs/NAME-2, ... for a run without `train.output_dir`."""
    for number in itertools.count(1):
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        # mkdir is atomic: of two runs that start together only one gets the name.
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    return folder


def write_header(folder: Path, run: RunConfig, step: int, origin: Path | None = None) -> list[str]:
    """Write the config and truncate the metrics to steps before `step`; returns changed settings.

    origin: the directory of the run it resumes from, if that is another one.
    """
    lines = []
    config = folder / "config.toml"
    if config.exists() and step == 0 and not find_checkpoints(folder / "checkpoints"):
        lines = ["no complete checkpoint in the directory of the run: it starts from the beginning"]
    elif config.exists():
        changed = checkpointing.setting_differences(
            checkpointing.run_to_dict(runs.load_run_config(config, in_run=True)),
            checkpointing.run_to_dict(run),
        )
        lines = [f"changed: {name} from {old!r} to {new!r}" for name, old, new in changed]
    write_text_atomically(config, runs.to_toml(run))
    # Steps after the checkpoint will be repeated; their old metrics are dropped.
    rows = _rows_before((origin or folder) / "metrics.jsonl", step)
    write_text_atomically(folder / "metrics.jsonl", "".join(rows))
    return lines


def _rows_before(path: Path, step: int) -> Iterator[str]:
    """Lines of metrics of the steps before `step`."""
    if step <= 0 or not safe_files.path_exists(path):
        return
    for line in safe_files.read_text(path, errors="replace").splitlines():
        # The last line may be cut off if the run was killed.
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            if json.loads(line)["step"] < step:
                yield line + "\n"


def read_last_count(folder: Path, step: int, name: str) -> int:
    """A count in the metrics of the last step before `step`; 0 if it is not there."""
    count = 0
    for row in _rows_before(folder / "metrics.jsonl", step):
        value = json.loads(row).get(name)
        if type(value) is int:
            count = value
    return count


def write_text_atomically(path: Path, text: str) -> None:
    """Replace a file atomically: a reader sees the old content or the new one."""
    writing = path.with_name(f".{path.name}.writing")
    try:
        with safe_files.open_to_write(writing) as file:
            file.write(text.encode())
        os.replace(writing, path)
    except BaseException:
        writing.unlink(missing_ok=True)
        raise


def read_run_json(folder: Path) -> dict[str, Any]:
    """The content of run.json; empty if it is missing or broken."""
    with suppress(OSError, ValueError, RecursionError):
        table = json.loads(safe_files.read_text(folder / "run.json"))
        if isinstance(table, dict):
            return table
        return {}
    return {}


def update_run_json(folder: Path, **more: Any) -> None:
    """Add facts to run.json."""
    write_text_atomically(
        folder / "run.json", json.dumps({**read_run_json(folder), **more}, indent=1) + "\n"
    )


def run_status(folder: Path, about: Mapping[str, Any]) -> str:
    """The status of a run, by its run.json and its lock; empty if unknown."""
    status = str(about.get("status") or "")
    # Earlier versions wrote "running".
    if status not in (UNFINISHED, "running"):
        return status
    if is_locked(folder):
        return "running"
    return f"{UNFINISHED}: it was killed, or its machine was lost"


def record_failure(folder: Path, began: float, code: int, message: str) -> None:
    """Record the failure of a run whose rank 0 could not do so.

    began: start time of its launcher; a run that has taken the directory since is left alone.
    """
    known = read_run_json(folder)
    mine = read_launches(folder)[-1:]
    # The directory belongs to another launch if its newest record is older than this launcher.
    theirs = not mine or float(mine[0].get("began", 0.0)) < began
    if not code or known.get("status") != UNFINISHED or theirs or is_locked(folder):
        return
    words = message.strip().splitlines()[:1] or [f"it ended with exit code {code}"]
    if not message and code > 128:
        # By convention a process killed by signal N exits with 128 + N.
        words = [f"it was killed by signal {code - 128}"]
    finished = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    # The directory may be gone, or its disk full.
    with suppress(OSError):
        update_run_json(folder, status=f"failed: {words[0]}", finished=finished)


def record_launch(folder: Path, me: ProcessInfo) -> None:
    """Add to run.json when this launch began and why its ranks were restarted."""
    began = me.start_time or time.time() - process_age_seconds()
    # A restart by the same launcher replaces its own record.
    before = [one for one in read_launches(folder) if one.get("began") != began]
    failures = [dataclasses.asdict(failure) for failure in me.failures]
    update_run_json(
        folder, launches=[*before, {"began": began, "seconds": 0.0, "failures": failures}]
    )


def read_launches(folder: Path) -> list[dict[str, Any]]:
    """The launches recorded in run.json, oldest first."""
    known = read_run_json(folder).get("launches")
    return _dicts_in(known)


def compute_goodput(folder: Path) -> dict[str, Any]:
    """The launches, with the duration of the last one, and the goodput.

    goodput = seconds of steps that counted / seconds of all launches.
    """
    known = read_launches(folder)
    if not known:
        return {}
    known[-1]["seconds"] = max(time.time() - float(known[-1]["began"]), 0.0)
    whole = sum(float(one.get("seconds", 0.0)) for one in known)
    rows = _rows_before(folder / "metrics.jsonl", MAX_INTEGER)
    counted = sum(float(json.loads(row).get("step_seconds", 0.0)) for row in rows)
    return {"launches": known, "goodput": min(counted / whole, 1.0) if whole else 0.0}


def restart_lines(about: Mapping[str, Any]) -> list[str]:
    """A line on the number of restarts, the last reason, and the goodput; none without restarts."""
    reasons = [
        one.get("why")
        for some in _dicts_in(about.get("launches"))
        for one in _dicts_in(some.get("failures"))
    ]
    if not reasons:
        return []
    goodput = about.get("goodput")
    if isinstance(goodput, float):
        share = f" {goodput:.0%} of the time was spent on steps that counted."
    else:
        share = ""
    return [f"Ranks were restarted {len(reasons)} time(s); last reason: {reasons[-1]}{share}"]


def _dicts_in(value: Any) -> list[dict[str, Any]]:
    """The dicts in a list; empty if it is not a list."""
    if isinstance(value, list):
        return [one for one in value if isinstance(one, dict)]
    return []
