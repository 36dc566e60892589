"""Kills a process at every step of saving a checkpoint; the remaining files must load completely.

Usage: python benchmarks/kills.py [--trials 300] [--seed 0] [--control]

A forked child saves checkpoint k + 1 after checkpoint k and is killed (SIGKILL) directly before or
in the middle of its n-th call that changes the disk, for every n: files created, written and
synced, directories created, renamed and removed, by the writing thread and by the committing one.
After each kill the latest readable checkpoint is k or k + 1 in all its tensors, and `verify` finds
no damage. Prints the number of trials and the calls at which they were killed.
"""

from __future__ import annotations

import collections
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from script_parser import ScriptParser

from ranvier.checkpoint import async_saver, load
from ranvier.checkpoint import directory as folders
from ranvier.checkpoint.directory import RetentionPolicy
from ranvier.cli import checkpoint
from ranvier.errors import CheckpointError
from ranvier.grid import Grid
from ranvier.sharding import Shard, ShardedStateDict

CALLS = ("open", "pwrite", "write", "fsync", "replace", "rename", "mkdir", "unlink", "rmdir")
"""Functions of `os` that change the content of a disk."""


@dataclass(frozen=True)
class Kind:
    """A way of saving, tried at every call."""

    name: str
    ranks: int = 1
    keep: RetentionPolicy | None = None
    same: bool = False
    """Whether the same step is saved again."""
    left: bool = False
    """Whether files of a killed save are left."""


KINDS = (
    Kind("first of two ranks", ranks=2),
    Kind("prune to one", keep=RetentionPolicy(keep_latest=1)),
    Kind("two ranks, prune to one", ranks=2, keep=RetentionPolicy(keep_latest=1)),
    Kind("four ranks, keep the best", ranks=4, keep=RetentionPolicy(keep_latest=1, keep_best=True)),
    Kind("the same step again", same=True, keep=RetentionPolicy(keep_latest=1)),
    Kind("after a killed save", left=True, ranks=2),
)


def state(rank: int, ranks: int, value: float) -> ShardedStateDict:
    """Returns a shard of two tensors, one of which is large enough for several blocks."""
    rows, width = 4, 70_000
    large = Shard((rows * ranks, width), (rows * rank, 0), (rows, width), (rows, width))
    small = Shard((ranks, 3), (rank, 0), (1, 3), (1, 3))
    return {
        "a.master": (torch.full((rows, width), value), large),
        "b.master": (torch.full((1, 3), value, dtype=torch.float64), small),
    }


def saved(folder: Path, step: int, value: float, kind: Kind, nonce: str) -> None:
    """Saves in one process as all ranks of a kind do."""
    with (
        mock.patch.object(async_saver, "broadcast_text", lambda *_: nonce),
        mock.patch.object(async_saver, "run_and_raise_together", lambda work, *_: work()),
    ):
        grids = [Grid({"row": kind.ranks}, rank=rank) for rank in range(kind.ranks)]
        savers = [
            async_saver.AsyncSaver(folder, grid, torch.device("cpu"), kind.keep) for grid in grids
        ]
    facts = {"held_out_loss": float(step), "value": value}
    for rank, one in enumerate(savers):
        one.save(step, state(rank, kind.ranks, value), facts)
    while any(one._phase for one in savers):
        for one in savers:
            if one._thread is not None:
                one._thread.join()
        for error in (one._error for one in savers):
            if error is not None:  # the cause, not that another rank has one
                raise error
        left, failed = (
            max(numbers) for numbers in zip(*(o.report_progress() for o in savers), strict=True)
        )
        for one in savers:
            one.handle_reports(left, failed)


def killed_at(number: int, half: bool) -> Callable[[str, Any], Any]:
    """Returns a wrapper of calls that ends the process at the n-th call, perhaps half-way through a
    write.
    """
    counter = itertools.count(1)

    def wrap(name: str, call: Any) -> Any:
        def called(*arguments: Any, **options: Any) -> Any:
            writes = name != "open" or (len(arguments) > 1 and arguments[1] & os.O_CREAT)
            if writes and next(counter) == number:
                if half and name == "pwrite":
                    call(arguments[0], arguments[1][: len(arguments[1]) // 2], *arguments[2:])
                os.write(2, name.encode())
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return called

    return wrap


def trial(folder: Path, kind: Kind, number: int, half: bool) -> str:
    """Saves k, then k + 1 in a child killed at a call; returns that call, or empty if it
    finished.
    """
    shutil.rmtree(folder, ignore_errors=True)
    before = Kind(kind.name, kind.ranks)
    saved(folder, 1, 1.0, before, "aaaa")
    if kind.left:
        hidden = folders.temporary_path(folder, 2, "dead")
        hidden.mkdir()
        (hidden / "rank-00000.safetensors").write_bytes(b"half")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writer, 2)
        torch.set_num_threads(1)  # renews the pool of threads, which two savers at once cannot
        wrap = killed_at(number, half)
        for name in CALLS:
            setattr(os, name, wrap(name, getattr(os, name)))
        saved(folder, 1 if kind.same else 2, 2.0, kind, "bbbb")
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return said
    assert status == 0, (kind, number, said)
    return ""


def check(folder: Path, kind: Kind) -> int:
    """Returns the value of the remaining checkpoint; raises if it is not a complete k or k + 1."""
    paths, _ = folders.newest_checkpoints(folder)
    for path in paths:
        try:
            whole = load.load_full_tensors(path)
        except CheckpointError:
            continue
        values = {float(x) for tensor in whole.values() for x in tensor.unique()}
        assert len(values) == 1 and values <= {1.0, 2.0}, (path, values)
        value = int(values.pop())
        assert kind.same or folders.step_of(path) == value, (path, value)
        with open(os.devnull, "w") as null, redirect_stdout(null):
            assert checkpoint.verify_checkpoints(path) == 0, path
        return value
    raise AssertionError(f"{kind.name}: nothing can be loaded from {sorted(os.listdir(folder))}")


def trials(
    folder: Path, kinds: Sequence[Kind] = KINDS, count: int | None = None, seed: int = 0
) -> Iterator[tuple[Kind, int, str, int]]:
    """Yields kinds, calls, their names and the values left: all of them, or `count` at random."""
    if count is None:
        for kind in kinds:
            for half in (False, True):
                for number in itertools.count(1):
                    name = trial(folder, kind, number, half)
                    if not name:
                        break
                    yield kind, number, name, check(folder, kind)
        return
    draw = random.Random(seed)
    lengths: dict[str, int] = {}
    while count > 0:
        kind = draw.choice(kinds)
        number = draw.randint(1, lengths.get(kind.name, 60))
        name = trial(folder, kind, number, draw.random() < 0.5)
        if not name:  # there are fewer calls
            lengths[kind.name] = number - 1
            continue
        count -= 1
        yield kind, number, name, check(folder, kind)


def removed(folder: Path, step: int) -> Path:
    """The negative control: makes room for a checkpoint by removing the previous one."""
    path = folder / f"step-{step:08d}"
    shutil.rmtree(path, ignore_errors=True)
    return path


def main() -> int:
    parser = ScriptParser(__doc__, smoke="--trials 4")
    parser.add_argument("--trials", type=int, default=0, help="random trials; 0: every call")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--control", action="store_true", help="remove a step before it is saved")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a child has no other
    kinds = KINDS
    if options.control:
        kinds, folders._unused_path = tuple(kind for kind in KINDS if kind.same), removed
    calls: collections.Counter[str] = collections.Counter()
    values: collections.Counter[int] = collections.Counter()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        for kind, number, name, value in trials(
            Path(folder) / "checkpoints", kinds, options.trials or None, options.seed
        ):
            calls[name] += 1
            values[value] += 1
            if sys.stdout.isatty():
                print(f"\r{sum(calls.values())}: {kind.name}, call {number} ", end="", flush=True)
    print(f"{sum(calls.values())} trials, all loadable: {values[1]} as k, {values[2]} as k + 1")
    print("killed at: " + ", ".join(f"{name} {n}" for name, n in calls.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
