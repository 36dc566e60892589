"""Joins the process group, and runs a local rank, which never outlives its parent."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.util import get_temp_dir

from ranvier.errors import CommunicationError, PlanError
from ranvier.launch.environment import ProcessInfo, prepare_nccl, prepare_sockets
from ranvier.launch.fake_backend import allow_empty_inputs
from ranvier.launch.heartbeat import DONE, START, Heartbeat
from ranvier.launch.lifetime import end_with_parent, remove_after_end
from ranvier.launch.shared_file import SharedFile
from ranvier.launch.signals import end_with_others, report_errors
from ranvier.launch.store import new_key, open_store
from ranvier.launch.watchdog import register_stack_dump
from ranvier.system import file_handles


def available_backends() -> list[str]:
    """Return the process-group backends that this torch supports."""
    from torch import distributed

    if not distributed.is_available():
        return []
    names = ("gloo", "nccl", "mpi", "ucc", "xccl")
    return [name for name in names if distributed.is_backend_available(name)]


def init_process_group(
    me: ProcessInfo, *, backend: str, timeout_seconds: float = 600.0, share_gpu: bool = False
) -> None:
    """Joins the process group of all ranks. Communicates: with all ranks.

    No collective runs over this group itself: each axis of a grid has its own group, which is
    connected when it is created. share_gpu: see `prepare_nccl`.
    """
    from torch import distributed

    file_handles.raise_limit()
    # Gloo connects each rank to all others.
    file_handles.require_handles(
        me.world_size + 8 if backend == "gloo" else 8, f"Running on {me.world_size} ranks"
    )
    prepare_sockets(me)
    if backend == "nccl":
        prepare_nccl(me, share_gpu=share_gpu)
    limit = datetime.timedelta(seconds=timeout_seconds)
    try:
        distributed.init_process_group(
            backend,
            store=open_store(me, timeout_seconds),
            rank=me.rank,
            world_size=me.world_size,
            timeout=limit,
        )
    except (RuntimeError, ValueError) as error:
        if file_handles.is_shortage(error):
            raise PlanError(file_handles.describe_shortage()) from error
        slurm = "; in an sbatch script, start the ranks with srun" * (me.launcher == "srun")
        if me.store_file is not None:
            where = ""
        else:
            where = f" at {me.address}:{me.port}"
        first = str(error).partition("\n")[0].rstrip(".")
        raise CommunicationError(
            f"Rank {me.rank} of {me.world_size} could not join the process group{where}: {first}. "
            f"All ranks must start within {timeout_seconds:.0f} s and reach that address. Check "
            f"the address and the other ranks{slurm}."
        ) from error


@contextlib.contextmanager
def join_process_group(
    me: ProcessInfo, backend: str, timeout_seconds: float, *, share_gpu: bool = False
) -> Iterator[None]:
    """Context in which the process group of all ranks exists; a single rank does not need one."""
    if me.world_size == 1:
        yield
        return
    from torch import distributed

    init_process_group(me, backend=backend, timeout_seconds=timeout_seconds, share_gpu=share_gpu)
    with end_with_others(me) if backend == "nccl" else contextlib.nullcontext():
        # After an error the process exits (see `report_errors`). It does not use try/finally,
        # because a regular shutdown could hang.
        yield
    distributed.destroy_process_group()


@contextlib.contextmanager
def fake_process_group(world: int, rank: int = 0) -> Iterator[None]:
    """Context that simulates one of `world` ranks: collectives return at once with meaningless
    values."""
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with allow_empty_inputs():
            yield
    finally:
        distributed.destroy_process_group()


def local_process_infos(world: int) -> list[ProcessInfo]:
    """Returns the ranks of one node, each for a separate process. They share a file store.

    They are passed as arguments of processes that `multiprocessing` starts.
    """
    store = SharedFile("store")
    key = new_key()
    return [
        ProcessInfo(
            rank=i,
            world_size=world,
            local_rank=i,
            local_world_size=world,
            store_file=store,
            store_prefix=key,
        )
        for i in range(world)
    ]


def find_free_port() -> int:
    """Return a port that is free now; another process may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends."""
    end_with_parent(os.getppid())


def start_forkserver(preload: Sequence[str]) -> None:
    """Starts a forkserver: a clean process that imports modules once, and forks the ranks.

    It runs in parallel with this process.
    """
    file_handles.raise_limit()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ranvier.launch.ignore_signals", *preload])
    # Otherwise the server would import modules of the working directory first.
    os.environ["PYTHONSAFEPATH"] = "1"
    # The server ends with this process; see `ignore_signals`.
    os.environ["RANVIER_LAUNCHER"] = str(os.getpid())
    # The socket of the server is in this directory.
    remove_after_end(get_temp_dir(), os.getpid())
    # Starting the resource tracker unblocks SIGINT and SIGTERM (Python 3.11). The server and the
    # ranks inherit the mask, with which `ranvier serve` protects its engines from Ctrl-C.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    forkserver.ensure_running()


def run_rank(me: ProcessInfo, task: Callable[[ProcessInfo], int]) -> None:
    """Runs a local rank to its end. Only rank 0 prints, and the ranks share the cores."""
    with report_errors(me):
        pulse = Heartbeat(me.heartbeat_file)
        pulse.begin_section(START)
        register_stack_dump(me.stack_file)
        # In its own session, Ctrl-C in a terminal arrives once, through the parent.
        os.setsid()
        _end_with_launcher()
        import torch

        # By default each rank would use all cores.
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max((os.cpu_count() or 1) // me.local_world_size, 1))
        # The descriptor itself is redirected, because C++ code prints to it as well.
        if me.rank > 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = task(me)
        pulse.begin_section(DONE)
    raise SystemExit(code)


def _end_with_launcher() -> None:
    """Ends with the process that requested this rank; the forkserver in between may live longer."""
    die_with_parent()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
