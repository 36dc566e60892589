"""Processes: joining the others, and starting local ranks.

A rank that fails ends all ranks; its own message is shown first, not the broken connections of the
others. Nothing outlives its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import math
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from ranvier.errors import CommunicationError
from ranvier.launch.ends import reported
from ranvier.launch.environment import Ranks

GRACE_SECONDS = 5.0
"""How long the other ranks may take to end by themselves after one has failed."""
STOP_SECONDS = 600.0
"""How long the other ranks may still save after one has stopped because of a signal."""


def backends() -> list[str]:
    """The backends of process groups that this torch has."""
    from torch import distributed

    if not distributed.is_available():
        return []
    names = ("gloo", "nccl", "mpi", "ucc", "xccl")
    return [name for name in names if distributed.is_backend_available(name)]


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
        slurm = "; inside an sbatch script start the ranks with srun" * (me.launcher == "srun")
        raise CommunicationError(
            f"Rank {me.rank} of {me.world} could not join the others at {me.address}:{me.port}: "
            f"{error}. All ranks must start within {timeout_seconds:.0f} s and reach that address. "
            f"Check it and the other ranks{slurm}."
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


def warm(preload: Sequence[str]) -> None:
    """Have a clean process import modules once, from which ranks are then forked.

    It works while this process does other things.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ranvier.launch.deaf", *preload])
    # The server would import modules of the user's directory before Python's own.
    os.environ["PYTHONSAFEPATH"] = "1"
    forkserver.ensure_running()


def start(nproc: int, task: Callable[[Ranks], int], *, preload: Sequence[str] = ()) -> int:
    """Run `task` as `nproc` local ranks; the exit code of the run. preload: see `warm`."""
    context = multiprocessing.get_context("forkserver")
    warm(preload)
    with tempfile.TemporaryDirectory(prefix="ranvier-") as folder:
        errors = [Path(folder) / f"rank{rank}.json" for rank in range(nproc)]
        port = free_port()
        children: list[BaseProcess] = []
        with _forwarded(children):
            for rank in range(nproc):
                me = Ranks(rank, nproc, rank, nproc, port=port, error_file=str(errors[rank]))
                children.append(context.Process(target=_rank, args=(me, task), daemon=True))
                children[-1].start()
            codes, slain = _wait(children, errors)
        if any(codes) and sys.stdout.isatty():
            print("\x1b[?25h")  # a progress display that was killed has hidden the cursor
        return _verdict(codes, errors, slain)


def _rank(me: Ranks, task: Callable[[Ranks], int]) -> None:
    """The life of a local rank: only rank 0 prints, and all threads together fill the cores."""
    with reported(me):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the server was deaf to it
        os.setsid()  # a terminal's Ctrl-C comes through the parent, once
        _end_with_parent()
        import torch

        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max((os.cpu_count() or 1) // me.local_world, 1))
        if me.rank > 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = task(me)
    raise SystemExit(code)


def _end_with_parent() -> None:
    """End when the process that asked for this rank ends; the server between may live longer."""
    die_with_parent()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _wait(children: Sequence[BaseProcess], errors: Sequence[Path]) -> tuple[list[int], list[int]]:
    """Wait for all; once one has failed or stopped the others get their time, then are ended.

    Exit codes, and the ranks that were ended here.
    """
    limit, ended = math.inf, [False] * len(children)
    slain: list[int] = []
    while any(child.exitcode is None for child in children):
        for i, child in enumerate(children):
            if child.exitcode and not ended[i]:
                ended[i] = True
                stopped = _stopped(child.exitcode) and not errors[i].exists()
                seconds = STOP_SECONDS if stopped else GRACE_SECONDS
                limit = min(limit, time.monotonic() + seconds)
        if time.monotonic() > limit:
            slain = slain or [i for i, child in enumerate(children) if child.exitcode is None]
            for child in children:
                child.kill()
        time.sleep(0.02)
    return [child.exitcode or 0 for child in children], slain


def _stopped(code: int) -> bool:
    """Whether a rank that left no report has ended well, but before its time, after a signal."""
    return code > 128


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


def _verdict(codes: Sequence[int], errors: Sequence[Path], slain: Sequence[int] = ()) -> int:
    """Print the message of the rank that failed first and of its own accord; the exit code.

    A rank that something else has killed comes before those that only lost it.
    """
    if not any(codes):
        return 0
    killed = [i for i, code in enumerate(codes) if code < 0 and i not in slain]
    reports = []
    for path in errors:
        with contextlib.suppress(OSError, ValueError):
            reports.append(json.loads(path.read_text()))
    reports.sort(key=lambda report: (report["secondary"], report["time"]))
    if reports and not (killed and reports[0]["secondary"]):
        print(reports[0]["message"], file=sys.stderr)
        return int(reports[0]["code"])
    if not killed and all(code == 0 or _stopped(code) for code in codes):
        return max(codes)
    failed = killed or [i for i, code in enumerate(codes) if code and not _stopped(code)]
    rank, code = failed[0], codes[failed[0]]
    what = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    why = " Memory may have run out." if code == -signal.SIGKILL else ""
    print(f"Rank {rank} {what} and left no message. All ranks were ended.{why}", file=sys.stderr)
    return 128 - code if code < 0 else code
