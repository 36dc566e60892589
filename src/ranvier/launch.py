"""Launch: who am I, who are the others, how ranks start and end. Only this reads the environment.

Ranks come from `torchrun`-style variables or are started here as local processes. A rank that fails
ends all ranks; its own message is shown first, not the broken connections of the others. Nothing
outlives its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import errno
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from ranvier.errors import CommunicationError, PlanError, RanvierError

GRACE_SECONDS = 5.0
"""How long the other ranks may take to end by themselves after one has failed."""
INTERNAL = 70
"""Exit code of an error that is not the user's."""
CANNOT_WRITE = 73
"""Exit code where a file cannot be written."""
WRITING = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG),
)
"""A full disk and its kin."""


@dataclass(frozen=True)
class Ranks:
    """This process among all processes of a run."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    error_file: str = ""
    """Where to leave the error for the parent that started this rank; empty: print it."""


def ranks(environment: Mapping[str, str] | None = None) -> Ranks | None:
    """What the environment says; None if no launcher has started this process."""
    env = os.environ if environment is None else environment
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return None
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in env]
    if missing:
        raise PlanError(
            f"{', '.join(missing)} not set, but {', '.join(n for n in names if n in env)} is. A "
            "launcher sets all four. Start with --nproc or torchrun, or set the others."
        )
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        default = {"LOCAL_RANK": env["RANK"], "LOCAL_WORLD_SIZE": env["WORLD_SIZE"]}.get(name, "")
        text = env.get(name, default)
        if not text.isdigit():
            raise PlanError(
                f"{name}={text!r} is not a number. A launcher sets it to 0, 1, 2, ... "
                "Unset or mend it."
            )
        numbers[name] = int(text)
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise PlanError(
            f"RANK={numbers['RANK']} is not below WORLD_SIZE={numbers['WORLD_SIZE']}. Ranks count "
            "from 0. Mend one."
        )
    return Ranks(
        rank=numbers["RANK"],
        world=numbers["WORLD_SIZE"],
        local_rank=numbers["LOCAL_RANK"],
        local_world=numbers["LOCAL_WORLD_SIZE"],
        address=env["MASTER_ADDR"],
        port=numbers["MASTER_PORT"],
        error_file=env.get("RANVIER_ERROR_FILE", ""),
    )


def connect(me: Ranks, *, backend: str, timeout_seconds: float = 600.0) -> None:
    """Join the process group of all ranks. Communicates: with all ranks."""
    from torch import distributed

    limit = datetime.timedelta(seconds=timeout_seconds)
    try:
        distributed.init_process_group(
            backend,
            init_method=f"tcp://{me.address}:{me.port}",
            rank=me.rank,
            world_size=me.world,
            timeout=limit,
        )
    except (RuntimeError, ValueError) as error:
        raise CommunicationError(
            f"Rank {me.rank} of {me.world} could not join the others at {me.address}:{me.port}: "
            f"{error}. All ranks must start within {timeout_seconds:.0f} s and reach that address. "
            "Check it and the other ranks."
        ) from error


@contextlib.contextmanager
def joined(me: Ranks, backend: str, timeout_seconds: float) -> Iterator[None]:
    """Be a member of the process group of all ranks inside; one rank alone needs none."""
    if me.world == 1:
        yield
        return
    from torch import distributed

    connect(me, backend=backend, timeout_seconds=timeout_seconds)
    yield  # after an error the process ends; leaving in good order could hang
    distributed.destroy_process_group()


@contextlib.contextmanager
def fake(world: int, rank: int = 0) -> Iterator[None]:
    """Pretend to be one of `world` ranks: collectives return at once with numbers of no meaning."""
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def die_with_parent() -> None:
    """Let the kernel end this process when its parent ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").prctl(1, signal.SIGKILL)


def start(nproc: int, task: Callable[[Ranks], int], *, preload: Sequence[str] = ()) -> int:
    """Run `task` as `nproc` local ranks; the exit code of the run.

    preload: modules imported once, before the ranks are forked from a clean process.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*preload])
    # The server would import modules of the user's directory before Python's own.
    os.environ["PYTHONSAFEPATH"] = "1"
    with tempfile.TemporaryDirectory(prefix="ranvier-") as folder:
        errors = [Path(folder) / f"rank{rank}.json" for rank in range(nproc)]
        port = free_port()
        children: list[BaseProcess] = []
        for rank in range(nproc):
            me = Ranks(rank, nproc, rank, nproc, port=port, error_file=str(errors[rank]))
            children.append(context.Process(target=_rank, args=(me, task)))
            children[-1].start()
        with _forwarded(children):
            codes = _wait(children)
        return _verdict(codes, errors)


def _rank(me: Ranks, task: Callable[[Ranks], int]) -> None:
    """The life of a local rank: only rank 0 prints, and all threads together fill the cores."""
    import torch

    os.setsid()  # a terminal's Ctrl-C comes through the parent, once
    die_with_parent()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max((os.cpu_count() or 1) // me.local_world, 1))
    if me.rank > 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    with reported(me):
        code = task(me)
    raise SystemExit(code)


def _wait(children: Sequence[BaseProcess]) -> list[int]:
    """Wait for all; once one has failed the others get a moment, then are ended."""
    failed_at: float | None = None
    while any(child.exitcode is None for child in children):
        if failed_at is None and any(child.exitcode not in (None, 0) for child in children):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > GRACE_SECONDS:
            for child in children:
                child.kill()
        time.sleep(0.02)
    return [child.exitcode or 0 for child in children]


@contextlib.contextmanager
def _forwarded(children: Sequence[BaseProcess]) -> Iterator[None]:
    """Signals to this process go to the ranks, which end in their own way."""

    def forward(number: int, _: FrameType | None) -> None:
        for child in children:
            if child.exitcode is None and child.pid is not None:
                os.kill(child.pid, number)

    caught = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, forward) for number in caught}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _verdict(codes: Sequence[int], errors: Sequence[Path]) -> int:
    """Print the message of the rank that failed first and of its own accord; the exit code."""
    if not any(codes):
        return 0
    reports = []
    for path in errors:
        with contextlib.suppress(OSError, ValueError):
            reports.append(json.loads(path.read_text()))
    reports.sort(key=lambda report: (report["secondary"], report["time"]))
    if reports:
        print(reports[0]["message"], file=sys.stderr)
        return int(reports[0]["code"])
    rank, code = next((i, c) for i, c in enumerate(codes) if c)
    what = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    print(f"Rank {rank} {what} and left no message. The other ranks were ended.", file=sys.stderr)
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def reported(me: Ranks) -> Iterator[None]:
    """Turn an error inside into a message (without traceback if mendable) and an exit code."""
    with contextlib.suppress(ValueError):  # only the main thread may
        signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        where = f"rank {me.rank}: " if me.world > 1 else ""
        message, code = _told(error)
        _leave(me, where + message, code, secondary=isinstance(error, CommunicationError))
        raise SystemExit(code) from None


def _terminated(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


def _told(error: BaseException) -> tuple[str, int]:
    """Message and exit code of an error; only what is nobody's mistake shows its traceback."""
    if isinstance(error, RanvierError):
        return f"{type(error).__name__}: {error}", error.exit_code
    if isinstance(error, KeyboardInterrupt):
        code = 143 if error.args else 130
        return "Interrupted; metrics are written up to the last step.", code
    if isinstance(error, OSError) and error.errno in WRITING:
        rule = "A run must be able to write there. Free space or choose another train.out."
        return f"{error.filename or 'A file'}: {error.strerror}. {rule}", CANNOT_WRITE
    return "".join(traceback.format_exception(error)).rstrip(), INTERNAL


def _leave(me: Ranks, message: str, code: int, *, secondary: bool) -> None:
    if not me.error_file:
        print(message, file=sys.stderr, flush=True)
        return
    report = {"message": message, "code": code, "secondary": secondary, "time": time.time()}
    Path(me.error_file).write_text(json.dumps(report))
