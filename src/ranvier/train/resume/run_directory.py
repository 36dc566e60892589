"""The directory of a run: who may write there, what is in it, where a run goes on.

config.toml     the resolved run
run.json        what is known of it: device, data, groups, phases, status
metrics.jsonl   one object a step
checkpoints/    what it goes on from
report.html     plots
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
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from ranvier.checkpoint.directory import CHECKPOINT_NAME, find_checkpoints, newest_checkpoints
from ranvier.checkpoint.manifest import MANIFEST_NAME, CheckpointManifest, read_manifest
from ranvier.config import run as runs
from ranvier.config.run import RunConfig
from ranvier.config.sections import MAX_INTEGER
from ranvier.errors import CheckpointError, DamageError, PlanError, UnsafeInputError, WriteError
from ranvier.launch import ProcessInfo, is_writable, process_age_seconds
from ranvier.system import safe_files
from ranvier.train.lora import is_base_checkpoint
from ranvier.train.resume import checkpointing

UNFINISHED = "unfinished"
"""Status of a run until it ends: true while it trains, and for good if it is killed with all of its
processes, so that nobody is left to write another. Who trains holds the lock."""


def check_output_dir(run: RunConfig) -> None:
    """Refuse a directory that cannot be made or written in, before any work."""
    folder = Path(run.train.out or "runs")
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except (OSError, ValueError) as error:
        raise PlanError(
            f"train.out={str(folder)[:80]!r} cannot be a directory: {error.__class__.__name__}. "
            "Its name must be one that the file system takes. Choose another."
        ) from None
    if not there.is_dir():
        raise PlanError(
            f"train.out={str(folder)!r}: {there} is no directory. A run needs one of its own. "
            "Choose another train.out."
        )
    if not is_writable(there):
        wide = {"fp64": 8}.get(run.train.dtype, 4)
        moments = 2 * (2 if run.optim.moments == "bf16" else wide)
        needed = run.model.num_parameters * wide + run.trainable_parameters * moments
        raise WriteError(
            f"train.out={str(folder)!r}: {there} cannot be written in. A run writes there, and a "
            f"checkpoint needs about {needed:,} bytes. Make it writable, or choose another "
            "train.out."
        )


def lock_dir(folder: Path, seconds: float = 1.0) -> IO[str]:
    """A handle that keeps other runs out of a directory as long as it is open.

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
        except OSError:  # a file system without locks
            break
    handle.truncate(0)
    handle.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    handle.flush()
    return handle


def is_locked(folder: Path) -> bool:
    """Whether a run is writing into a directory just now."""
    with suppress(OSError), (folder / ".lock").open() as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def check_unlocked(run: RunConfig) -> None:
    """Refuse a directory that another run is writing, before any rank is started."""
    if run.train.out and (Path(run.train.out) / ".lock").exists():
        lock_dir(Path(run.train.out)).close()


def _locked_error(folder: Path, handle: IO[str]) -> UnsafeInputError:
    with handle:
        handle.seek(0)
        holder = handle.read(200).strip() or "another run"
    return UnsafeInputError(
        f"train.out={str(folder)!r} is being written by {holder}. A directory holds one run. Wait "
        "for it, stop it, or choose another directory."
    )


def with_auto_resume(run: RunConfig, began: float) -> RunConfig:
    """The run as it is started again: it goes on from what it has saved itself, if it has.

    began: this launch. One that was to begin anew may have ended before it put the old aside.
    """
    folder = Path(run.train.out)
    own = any(one.get("began") == began for one in read_launches(folder))
    if own and (run.checkpoint.resume == "never" or find_checkpoints(folder / "checkpoints")):
        return replace(run, checkpoint=replace(run.checkpoint, resume="auto"))
    return run


def acquire_dir(run: RunConfig, *, restarted: bool = False) -> tuple[Path, list[Path], list[str]]:
    """The directory of a run, the checkpoints to go on from, best first, and lines on them.

    A directory that was not asked for is a new one, which only one run can claim. restarted: the
    launcher has started the ranks again; they may have taken all steps, but not written the report.
    """
    word = run.checkpoint.resume
    if run.train.out:
        own = Path(run.train.out)
    else:
        own = None
    if own is not None and not (own / "config.toml").exists() and (own / "metrics.jsonl").exists():
        raise PlanError(
            f"train.out={run.train.out!r} holds metrics without a config.toml. A run is only "
            "continued by its own settings. Choose another directory."
        )
    lines: list[str] = []
    candidates: list[Path] = []
    if word not in ("auto", "never"):
        candidates, lines = _resolve_resume_path(Path(word))
    elif word == "auto" and own is not None:
        candidates, lines = newest_checkpoints(own / "checkpoints")
        if not candidates and is_finished(own):
            raise _finished_error(run, "")
    manifest = _first_readable_manifest(candidates)
    if manifest is not None:
        _refuse_base_checkpoint(manifest, run)
        checkpointing.check_same_config(manifest, candidates[0], run)
        if not restarted:
            _refuse_finished(manifest, run)
        if own is None or not (own / "config.toml").exists():  # else `begin` tells them
            changed = checkpointing.setting_differences(
                manifest.facts.get("config", {}), checkpointing.run_to_dict(run)
            )
            lines += [f"changed: {name} from {old!r} to {new!r}" for name, old, new in changed]
    if own is None:
        return make_run_dir(run.model.size), candidates, lines
    own.mkdir(parents=True, exist_ok=True)
    return own, candidates, lines + (_move_aside(own) if word == "never" else [])


def _refuse_base_checkpoint(manifest: CheckpointManifest, run: RunConfig) -> None:
    """Refuse to go on with adapters from a checkpoint that has none."""
    if is_base_checkpoint(manifest, run) and not manifest.facts.get("weights"):
        word = run.checkpoint.resume
        if word == "auto":
            where = run.train.out
        else:
            where = word
        raise PlanError(
            f"lora.rank={run.lora.rank}, but {where!r} is of a run without adapters. A run that "
            f"trains adapters begins with weights and goes on by itself. Use train.start={where!r} "
            "and another train.out."
        )


def _refuse_finished(manifest: CheckpointManifest, run: RunConfig) -> None:
    """Refuse a checkpoint after which nothing is left to do."""
    word = run.checkpoint.resume
    auto = run.checkpoint.resume == "auto"
    if manifest.step >= run.train.steps and not auto:
        raise PlanError(
            f"train.steps={run.train.steps}, but checkpoint.resume={word!r} has taken "
            f"{manifest.step} steps. There is nothing left to do. Use train.steps above "
            f"{manifest.step}."
        )
    if manifest.step >= run.train.steps:
        raise _finished_error(run, f", or train.steps above {manifest.step}")


def is_finished(folder: Path) -> bool:
    """Whether the run of a directory has ended well."""
    return (folder / "config.toml").exists() and read_run_json(folder).get("status") == "finished"


def _finished_error(run: RunConfig, other: str) -> PlanError:
    return PlanError(
        f"train.out={run.train.out!r} holds a run that has taken its steps. A finished run is not "
        f"repeated. Use another directory{other}."
    )


def _resolve_resume_path(path: Path) -> tuple[list[Path], list[str]]:
    """The checkpoint that a path is, or those of the run that it is."""
    if (path / MANIFEST_NAME).exists() or CHECKPOINT_NAME.fullmatch(path.name):
        candidates = [path] if path.is_dir() else []
        lines = list[str]()
    else:
        candidates, lines = newest_checkpoints(
            path / "checkpoints" if (path / "checkpoints").is_dir() else path
        )
    if not candidates:
        raise CheckpointError(
            f"checkpoint.resume={str(path)!r} has no checkpoint. It must be the directory of one "
            "(step-00000100) or of a run. Mend the path, or use auto."
        )
    return candidates, lines


def _first_readable_manifest(candidates: list[Path]) -> CheckpointManifest | None:
    """The first manifest that can be read; that of none is a matter for the loading."""
    for path in candidates:
        with suppress(DamageError):
            return read_manifest(path)
    return None


def _move_aside(folder: Path) -> list[str]:
    """Rename what an earlier run has left in a directory, so that one begins anew beside it."""
    names = [name for name in ("checkpoints", "metrics.jsonl") if (folder / name).exists()]
    if not names:
        return []
    number = next(n for n in itertools.count(1) if not [*folder.glob(f"before-{n}-*")])
    for name in names:
        os.replace(folder / name, folder / f"before-{number}-{name}")
    return [f"checkpoint.resume=never: the run before is now {folder}/before-{number}-*"]


def make_run_dir(name: str) -> Path:
    """A directory for a run that asked for none, which only one run can make."""
    for number in itertools.count(1):
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    return folder


def write_header(folder: Path, run: RunConfig, step: int, origin: Path | None = None) -> list[str]:
    """Write the config and keep the metrics before `step`; what has changed since, as lines.

    origin: the run it goes on from, if that is another one.
    """
    lines = []
    config = folder / "config.toml"
    if config.exists() and step == 0 and not find_checkpoints(folder / "checkpoints"):
        lines = ["no committed checkpoint in the directory of the run: it begins again"]
    elif config.exists():
        changed = checkpointing.setting_differences(
            checkpointing.run_to_dict(runs.load_run_config(config, in_run=True)),
            checkpointing.run_to_dict(run),
        )
        lines = [f"changed: {name} from {old!r} to {new!r}" for name, old, new in changed]
    write_text_atomically(config, runs.to_toml(run))
    rows = _rows_before((origin or folder) / "metrics.jsonl", step)
    write_text_atomically(folder / "metrics.jsonl", "".join(rows))
    return lines


def _rows_before(path: Path, step: int) -> Iterator[str]:
    """Lines of the steps that are not taken again."""
    if step <= 0 or not safe_files.path_exists(path):
        return
    for line in safe_files.read_text(path, errors="replace").splitlines():
        with suppress(ValueError, KeyError, TypeError, RecursionError):  # the last may be cut off
            if json.loads(line)["step"] < step:
                yield line + "\n"


def write_text_atomically(path: Path, text: str) -> None:
    """Replace a file at once: a reader sees the old one or the new one."""
    writing = path.with_name(f".{path.name}.writing")
    try:
        with safe_files.open_to_write(writing) as file:
            file.write(text.encode())
        os.replace(writing, path)
    except BaseException:
        writing.unlink(missing_ok=True)
        raise


def read_run_json(folder: Path) -> dict[str, Any]:
    """What run.json says; nothing if it is not there or broken."""
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
    """How a run stands, by its run.json and by whether somebody holds its lock; empty: unknown."""
    status = str(about.get("status") or "")
    if status not in (UNFINISHED, "running"):  # of earlier versions
        return status
    if is_locked(folder):
        return "running"
    return f"{UNFINISHED}: it was killed, or its machine lost"


def record_failure(folder: Path, began: float, code: int, message: str) -> None:
    """Write down how a run ended whose first rank could not do so.

    began: when its launcher began; a run that has taken the directory since is left alone.
    """
    known = read_run_json(folder)
    mine = read_launches(folder)[-1:]
    theirs = not mine or float(mine[0].get("began", 0.0)) < began
    if not code or known.get("status") != UNFINISHED or theirs or is_locked(folder):
        return
    words = message.strip().splitlines()[:1] or [f"it ended with exit code {code}"]
    if not message and code > 128:
        words = [f"it was ended at once by signal {code - 128}"]
    finished = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    with suppress(OSError):  # the directory may be gone, or its disk full
        update_run_json(folder, status=f"failed: {words[0]}", finished=finished)


def record_launch(folder: Path, me: ProcessInfo) -> None:
    """Add to run.json when this launch began and why its ranks were started again."""
    began = me.start_time or time.time() - process_age_seconds()
    before = [one for one in read_launches(folder) if one.get("began") != began]
    failures = [dataclasses.asdict(failure) for failure in me.failures]
    update_run_json(
        folder, launches=[*before, {"began": began, "seconds": 0.0, "failures": failures}]
    )


def read_launches(folder: Path) -> list[dict[str, Any]]:
    """The launches in run.json, oldest first."""
    known = read_run_json(folder).get("launches")
    return _dicts_in(known)


def compute_goodput(folder: Path) -> dict[str, Any]:
    """The launches with the time that the last one has taken, and the goodput.

    That is the share of the time of all launches that went to steps which counted.
    """
    known = read_launches(folder)
    if not known:
        return {}
    known[-1]["seconds"] = max(time.time() - float(known[-1]["began"]), 0.0)
    whole = sum(float(one.get("seconds", 0.0)) for one in known)
    rows = _rows_before(folder / "metrics.jsonl", MAX_INTEGER)
    counted = sum(float(json.loads(row).get("seconds", 0.0)) for row in rows)
    return {"launches": known, "goodput": min(counted / whole, 1.0) if whole else 0.0}


def with_dir(run: RunConfig, folder: Path) -> RunConfig:
    """The run in its directory."""
    return replace(run, train=replace(run.train, out=str(folder)))


def restart_lines(about: Mapping[str, Any]) -> list[str]:
    """How often ranks were started again, why last, and the goodput, as a line."""
    reasons = [
        one.get("why")
        for some in _dicts_in(about.get("launches"))
        for one in _dicts_in(some.get("failures"))
    ]
    if not reasons:
        return []
    goodput = about.get("goodput")
    if isinstance(goodput, float):
        share = f" {goodput:.0%} of the time went to steps that counted."
    else:
        share = ""
    return [f"Ranks were started again {len(reasons)} time(s), last: {reasons[-1]}{share}"]


def _dicts_in(value: Any) -> list[dict[str, Any]]:
    """The tables of a list; of what is none nothing."""
    if isinstance(value, list):
        return [one for one in value if isinstance(one, dict)]
    return []
