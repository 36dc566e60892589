"""Group C: disks that are full, slow, read-only or missing."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path

from fault_crashes import NOW
from fault_runs import RUN, SAVED, TRAINER, Ended, Stage, UnableError, case, check, same

from ranvier.checkpoint import directory as folders
from ranvier.cli import checkpoint

WIDE = ["--model.embed=128", "--model.mlp=256"]
"""A model with checkpoints of about 3 MB."""
ON_DISK = ["--train.output-dir=disk/run"]


@contextmanager
def disk(folder: Path, options: str) -> Iterator[Path]:
    """Mounts a small file system in memory."""
    folder.mkdir(parents=True)
    if os.geteuid() or _mounted("-t", "tmpfs", "-o", options, "tmpfs", str(folder)):
        raise UnableError("needs root, to mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def _mounted(*words: str) -> int:
    return subprocess.run(["mount", *words], capture_output=True, check=False).returncode


def again(stage: Stage, run: Path, *words: str) -> str:
    """Checks that committed checkpoints are intact and that the run resumes bit-identically."""
    kept = folders.find_checkpoints(run / "checkpoints")
    for path in kept:
        with Path(os.devnull).open("w") as null, redirect_stdout(null):
            check(checkpoint.verify_checkpoints(path) == 0, f"{path} is damaged")
    name = str(run.relative_to(stage.folder))
    stage.run(*RUN, *SAVED, *words, f"--train.output-dir={name}").expect(0)
    return f"{len(kept)} checkpoint(s) intact, then {same(run, stage.whole(*words))}"


def clean(ended: Ended) -> None:
    """Checks that the message has a remedy and no traceback."""
    check("Traceback" not in ended.errors, ended.errors[-800:])
    check("Free disk space" in ended.errors, ended.errors[-800:])


def full(stage: Stage, background: str) -> str:
    """Runs on a disk on which the third checkpoint does not fit."""
    with disk(stage.folder / "disk", "size=8m") as where:
        words = [*WIDE, f"--checkpoint.async-save={background}"]
        ended = stage.run(*RUN, *SAVED, *words, *ON_DISK)
        ended.expect(73, "No space left on device", "bytes are free", "Warning:")
        clean(ended)
        check(not _mounted("-o", "remount,size=64m", str(where)), "remount failed")
        return f"73, {again(stage, where / 'run', *words)}"


case("C1 behind", "disk full while parts are written in the background", "73, good k intact")(
    partial(full, background="True")
)
case("C1 waiting", "disk full while parts are written, the run waits", "73, good k intact")(
    partial(full, background="False")
)

FAIL = """
from ranvier.checkpoint import checksummed_file as _blocks, directory as _folders
_count = []
def _fails(*arguments, **_):
    path = str(arguments[0]) if arguments else ""
    if {where} and NOW[0] >= 4 and rank() == {who}:
        _count.append(0)
        if len(_count) <= {times}:
            fail(errno.{number})
before({owner}, {name!r}, _fails)
"""


def failing(
    owner: str, name: str, number: str, *, where: str = "True", times: int = 99, who: int = 0
) -> dict[str, str]:
    """Makes calls fail from the save of step 4 on."""
    text = FAIL.format(owner=owner, name=name, number=number, where=where, times=times, who=who)
    return {TRAINER: NOW + text}


PLACES = {
    "manifest": ("_blocks", "write_checksummed", "'manifest.json' in path"),
    "latest": ("_blocks", "write_checksummed", "'.latest' in path"),
    "rename": ("_folders", "rename_finished", "True"),
}


def place(stage: Stage, name: str) -> str:
    """Runs out of space at one point of a commit."""
    owner, call, where = PLACES[name]
    faults = failing(owner, call, "ENOSPC", where=where)
    ended = stage.run(*RUN, *SAVED, faults=faults).expect(73, "No space left on device")
    clean(ended)
    return f"73, {again(stage, stage.folder / 'run')}"


for _name in PLACES:
    case(f"C2 {_name}", f"disk full at: {_name}", "73, resumes bit-equal")(
        partial(place, name=_name)
    )


def error(stage: Stage, number: str) -> str:
    """Injects a system error when a part is written."""
    ended = stage.run(*RUN, *SAVED, faults=failing("os", "pwrite", number, who=1))
    text = os.strerror(getattr(errno, number))
    ended.expect(73, text)
    clean(ended)
    return f"73 '{text}', {again(stage, stage.folder / 'run')}"


for _name in ("EDQUOT", "EACCES", "ENAMETOOLONG", "ESTALE"):
    _id = "C4 ESTALE" if _name == "ESTALE" else f"C3 {_name}"
    case(_id, f"{_name} when rank 1 writes its part", "73, good k intact")(
        partial(error, number=_name)
    )


@case("C3 EFBIG", "files larger than 100 kB are not allowed (ulimit -f)", "73, starts again")
def _large(stage: Stage) -> str:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    stage.whole()  # which fills the cache of corpora
    ended = stage.run(*RUN, *SAVED, begin=limit).expect(73, "File too large")
    clean(ended)
    return f"73, {again(stage, stage.folder / 'run')}"


@case("C3 EROFS", "the disk becomes read-only during the run", "73, good k intact")
def _read_only(stage: Stage) -> str:
    with disk(stage.folder / "run" / "checkpoints", "size=64m") as where:
        code = f"""
import subprocess
def _remount(self, *_, **__):
    if self.grid.rank == 0 and self.state.step == 6 and first():
        subprocess.run(["mount", "-o", "remount,ro", {str(where)!r}], check=True)
before(Trainer, "save_checkpoint", _remount)
"""
        faults = {TRAINER: code}
        words = ["--checkpoint.async-save=False"]
        ended = stage.run(*RUN, *SAVED, *words, faults=faults).expect(73, "Read-only file system")
        clean(ended)
        check(not _mounted("-o", "remount,rw", str(where)), "remount failed")
        return f"73, {again(stage, stage.folder / 'run', *words)}"


@case("C4 removed", "the checkpoint directory is removed during the run", "73, reported")
def _removed(stage: Stage) -> str:
    code = """
import shutil
before(Trainer, "issue_step", at(3, 0, lambda: shutil.rmtree("run/checkpoints")))
"""
    words = [*SAVED, "--checkpoint.async-save=False"]
    ended = stage.run(*RUN, *words, faults={TRAINER: code}).expect(73, "No such file or directory")
    clean(ended)
    return "73"


def odd(stage: Stage, what: str) -> str:
    """Puts another kind of file where the run writes."""
    run = stage.folder / "run"
    if what == "file":
        stage.folder.mkdir()
        run.write_text("")
        stage.run(*RUN).expect(64, "is not a directory")
        return "64 before any rank starts"
    run.mkdir(parents=True)
    if what == "checkpoints":
        (run / "checkpoints").write_text("")
    else:
        (run / "checkpoints").symlink_to(stage.folder / "nowhere")
    ended = stage.run(*RUN).expect(73)
    clean(ended)
    return "73 before the first step"


for _name in ("file", "checkpoints", "link"):
    case(
        f"C4 {_name}",
        {
            "file": "train.output_dir is a file",
            "checkpoints": "train.output_dir/checkpoints is a file",
            "link": "train.output_dir/checkpoints is a dangling link",
        }[_name],
        "refused",
    )(partial(odd, what=_name))


@case("C5", "EIO at the first write, not at the second", "one retry, bit-equal")
def _stumbles(stage: Stage) -> str:
    ended = stage.run(*RUN, *SAVED, faults=failing("os", "pwrite", "EIO", times=1)).expect(0)
    check(ended.errors.count("writing again") == 1, ended.errors)
    return f"reported once, {same(stage.folder / 'run', stage.whole())}"


@case("C6", "fsync fails with EIO", "73, that save is not committed")
def _not_synced(stage: Stage) -> str:
    ended = stage.run(*RUN, *SAVED, faults=failing("os", "fsync", "EIO")).expect(73, "error")
    names = [path.name for path in folders.find_checkpoints(stage.folder / "run" / "checkpoints")]
    check(names == ["step-00000002"], str(names))
    clean(ended)
    return f"73, {again(stage, stage.folder / 'run')}"


@case("C7", "a disk slower than the interval of saves", "saves skipped with a warning")
def _slow(stage: Stage) -> str:
    code = """
from ranvier.train.resume import checkpointer
substitute(checkpointer, "SAVE_WAIT_SECONDS", 0.3)
_fsync = os.fsync
def fsync(handle):
    time.sleep(1.0)
    _fsync(handle)
substitute(os, "fsync", fsync)
before(Trainer, "issue_step", lambda *_, **__: time.sleep(0.05))
"""
    ended = stage.run(*RUN, *SAVED, faults={TRAINER: code})
    ended.expect(0, "is still being written")
    count = ended.errors.count("is still being written")
    return f"{count} skipped, {same(stage.folder / 'run', stage.whole())}"


@case("C8", "no inodes left", "73, good k intact")
def _inodes(stage: Stage) -> str:
    with disk(stage.folder / "disk", "size=64m,nr_inodes=24") as where:
        ended = stage.run(*RUN, *SAVED, *ON_DISK).expect(73, "No space left on device")
        clean(ended)
        check(not _mounted("-o", "remount,nr_inodes=1000", str(where)), "remount failed")
        return f"73, {again(stage, where / 'run')}"


@case("C9", "newer checkpoints have older times", "the latest by step is used, bit-equal")
def _clock(stage: Stage) -> str:
    stage.folder.mkdir()
    stage.run(*RUN, *SAVED).expect(0)
    run = stage.folder / "run"
    *_, old, last = folders.find_checkpoints(run / "checkpoints")
    shutil.rmtree(last)
    (run / "checkpoints" / "latest").unlink()
    for path in (old, *old.iterdir()):
        os.utime(path, (0, 0))
    stage.run(*RUN, *SAVED).expect(0, "Resuming after step 6", "latest is missing")
    return f"resumed at step 6, {same(run, stage.whole())}"


@case("C10", "the disk of the metrics is full", "one warning, the run continues to its end")
def _no_metrics(stage: Stage) -> str:
    with disk(stage.folder / "disk", "size=2m") as where:
        code = """
def _fill():
    with open("disk/filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(512))
        except OSError:
            pass
before(Trainer, "issue_step", at(3, 0, _fill))
"""
        words = ["--checkpoint.interval=-1", "--train.steps=20", *ON_DISK]  # rows of several pages
        ended = stage.run(*RUN, *words, faults={TRAINER: code})
        count = ended.errors.count("cannot be written")
        done = "20/20" in ended.out
        check(done and count == 1, f"{count} warnings, {ended.out[-300:]}")
        ended.expect(0)
        (where / "filler").unlink()
        stage.run("report", "disk/run", ranks=0).expect(0)
        kept = len((where / "run" / "metrics.jsonl").read_text().splitlines())
        return f"exit code 0, {count} warning, {kept} of 20 rows; the report uses them"


@case("C11", "1.05 times a checkpoint is free", "a warning, then saved; the next save is 73")
def _short(stage: Stage) -> str:
    with disk(stage.folder / "disk", "size=16m") as where:
        code = """
import shutil
def _fill(self, *_, **__):
    if self.grid.rank == 0 and self.state.step == 3 and first():
        folder = "disk/run/checkpoints/step-00000002/"
        size = sum(os.path.getsize(folder + name) for name in os.listdir(folder))
        while shutil.disk_usage("disk").free > 1.05 * size:
            with open("disk/filler", "ab") as file:
                file.write(bytes(4096))
before(Trainer, "issue_step", _fill)
"""
        words = [*WIDE, "--checkpoint.async-save=False"]
        ended = stage.run(*RUN, *SAVED, *words, *ON_DISK, faults={TRAINER: code})
        ended.expect(73, "No space left on device")
        check("bytes free, but the checkpoint of step" in ended.errors, ended.errors)
        early, _, later = ended.errors.partition("bytes free, but the checkpoint of step 4")
        check("No space" not in early and "step 6" in later, ended.errors)
        names = [path.name for path in folders.find_checkpoints(where / "run" / "checkpoints")]
        check(names == ["step-00000002", "step-00000004"], str(names))
        return "warning before step 4, which was saved, and before step 6, which was not: 73"
