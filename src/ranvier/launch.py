"""Launch: who am I, who are the others, how ranks start and end. Only this reads the environment.

Ranks come from the variables of torchrun, mpirun or srun, or are started here as local processes. A
rank that fails ends all ranks; its own message is shown first, not the broken connections of the
others. Nothing outlives its parent. Heterogeneous jobs of Slurm are not handled.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import errno
import itertools
import json
import math
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from ranvier.errors import CommunicationError, PlanError, RanvierError

GRACE_SECONDS = 5.0
"""How long the other ranks may take to end by themselves after one has failed."""
STOP_SECONDS = 600.0
"""How long the other ranks may still save after one has stopped because of a signal."""
INTERNAL = 70
"""Exit code of an error that is not the user's."""
CANNOT_WRITE = 73
"""Exit code where a file cannot be written."""
WRITING = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
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
    launcher: str = ""
    """The program that started the ranks; empty: this package."""


@dataclass(frozen=True)
class Launcher:
    """The variables in which a launcher tells a process who it is."""

    name: str
    rank: str
    world: str
    local_rank: str
    local_world: tuple[str, ...]
    """The first that is set counts: a number, or one for each node as in `4(x2),3`."""
    node: str = ""
    """The index of this node."""
    hosts: tuple[str, ...] = ()
    """The first that is set counts: the hosts of all ranks, as in `node[01-04,07],gpu3`."""
    job: tuple[str, ...] = ()
    """What tells one job from another: a port is made of it."""


TORCHRUN = Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_WORLD_SIZE",))
LAUNCHERS = (
    Launcher(  # before srun, by which mpirun may start its own processes
        name="mpirun",
        rank="OMPI_COMM_WORLD_RANK",
        world="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Launcher(
        name="srun",
        rank="SLURM_PROCID",
        world="SLURM_NTASKS",
        local_rank="SLURM_LOCALID",
        local_world=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
        node="SLURM_NODEID",
        hosts=("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
)


def ranks(environment: Mapping[str, str] | None = None) -> Ranks | None:
    """What the environment says; None if no launcher has started this process, or it alone."""
    env = os.environ if environment is None else environment
    both = TORCHRUN.rank in env and TORCHRUN.world in env
    others = [it for it in LAUNCHERS if it.rank in env and it.world in env and not both]
    if others:
        return _ranks(others[0], env) if env[others[0].world] != "1" else None
    if TORCHRUN.rank not in env and TORCHRUN.world not in env:
        return None
    names = (TORCHRUN.rank, TORCHRUN.world, "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in env]
    if missing:
        raise PlanError(
            f"{', '.join(missing)} not set, but {', '.join(n for n in names if n in env)} is. A "
            "launcher sets all four. Start with --nproc or torchrun, or set the others."
        )
    return _ranks(TORCHRUN, env)


def _ranks(launcher: Launcher, env: Mapping[str, str]) -> Ranks:
    """The ranks of a launcher whose variables are there, checked."""
    rank, world = (_number(name, env[name]) for name in (launcher.rank, launcher.world))
    if rank >= world:
        raise PlanError(
            f"{launcher.rank}={rank} is not below {launcher.world}={world}. Ranks count from 0. "
            "Mend one."
        )
    local_world, known = world, [name for name in launcher.local_world if name in env]
    if known:
        node = _number(launcher.node, env.get(launcher.node, "0"))
        local_world = _number(known[0], _of_node(env[known[0]], node))
    alone = bool(known) and local_world == world
    job = ".".join(env[name] for name in launcher.job if name in env)
    port = 20000 + zlib.crc32(job.encode()) % 20000 if job else 29500
    return Ranks(
        rank=rank,
        world=world,
        local_rank=_number(launcher.local_rank, env.get(launcher.local_rank, str(rank))),
        local_world=local_world,
        address=env.get("MASTER_ADDR") or _address(launcher, env, alone=alone),
        port=_number("MASTER_PORT", env.get("MASTER_PORT", str(port))),
        error_file=env.get("RANVIER_ERROR_FILE", ""),
        launcher=launcher.name,
    )


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise PlanError(
            f"{name}={text!r} is not a number. A launcher sets it to 0, 1, 2, ... Unset or mend it."
        )
    return int(text)


def _of_node(text: str, node: int) -> str:
    """The number of one node in a list such as `4(x2),3`; the text itself if it is none."""
    counts: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return text
        counts += [match[1]] * int(match[2] or 1)
    return counts[node if node < len(counts) else 0] if counts else text


def _address(launcher: Launcher, env: Mapping[str, str], *, alone: bool) -> str:
    """Where rank 0 listens: this node if it is alone, else the first host of the job."""
    names = [name for name in launcher.hosts if env.get(name)]
    every = hosts(env[names[0]]) if names and not alone else []
    if alone or len(every) == 1 or (launcher.hosts and not names):
        return "127.0.0.1"
    if every:
        return every[0]
    raise PlanError(
        f"{launcher.name} has started {env[launcher.world]} ranks on several nodes, but "
        "MASTER_ADDR is not set. All ranks meet at the host of rank 0. Set MASTER_ADDR to its name."
    )


def hosts(text: str) -> list[str]:
    """The hosts in a list of Slurm: `node[01-02,07],gpu3` are node01, node02, node07 and gpu3."""
    names: list[str] = []
    if not re.fullmatch(r"[^\[\]]*(\[\d+(-\d+)?(,\d+(-\d+)?)*\][^\[\]]*)*", text):
        raise PlanError(
            f"{text!r} is not a list of hosts. Slurm writes them as node[01-04,07],gpu3. Set "
            "MASTER_ADDR to the host of rank 0."
        )
    for term in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        pieces = re.split(r"\[([^\]]*)\]", term)  # outside, inside, outside, ...
        choices = [_span(piece) if i % 2 else [piece] for i, piece in enumerate(pieces)]
        names += ["".join(parts) for parts in itertools.product(*choices)]
    return names


def _span(text: str) -> list[str]:
    """The numbers in `01-04,07`, with their leading zeros."""
    numbers: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += [f"{n:0{len(first)}}" for n in range(int(first), int(last or first) + 1)]
    return numbers


def is_follower() -> bool:
    """Whether a launcher has started this process as another rank than 0: rank 0 speaks."""
    with contextlib.suppress(PlanError):
        me = ranks()
        return me is not None and me.rank > 0
    return False


def environment(*names: str) -> dict[str, str]:
    """Those of the variables that are set."""
    return {name: os.environ[name] for name in names if name in os.environ}


def cache() -> Path:
    """A folder for what can be made again: the user's cache, or one in the temporary folder."""
    env = os.environ
    folder = Path(env.get("XDG_CACHE_HOME") or "~/.cache") / "ranvier"
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home
        folder = Path(env.get("RANVIER_CACHE") or folder).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if writable(folder):
            return folder
    folder = Path(tempfile.gettempdir()) / f"ranvier-{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.lstat().st_uid == os.getuid() and not folder.is_symlink():
            folder.chmod(0o700)
            return folder
    return Path(tempfile.mkdtemp(prefix="ranvier-"))  # somebody else owns that name


def writable(folder: Path) -> bool:
    """Whether a file can be written in a folder."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"ranvier")
    except OSError:
        return False
    return True


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
            codes = _wait(children, errors)
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


def _wait(children: Sequence[BaseProcess], errors: Sequence[Path]) -> list[int]:
    """Wait for all; once one has failed or stopped the others get their time, then are ended."""
    limit, ended = math.inf, [False] * len(children)
    while any(child.exitcode is None for child in children):
        for i, child in enumerate(children):
            if child.exitcode and not ended[i]:
                ended[i] = True
                stopped = _stopped(child.exitcode) and not errors[i].exists()
                seconds = STOP_SECONDS if stopped else GRACE_SECONDS
                limit = min(limit, time.monotonic() + seconds)
        if time.monotonic() > limit:
            for child in children:
                child.kill()
        time.sleep(0.02)
    return [child.exitcode or 0 for child in children]


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
    if all(code == 0 or _stopped(code) for code in codes):
        return max(codes)
    rank, code = next((i, c) for i, c in enumerate(codes) if c and not _stopped(c))
    what = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    print(f"Rank {rank} {what} and left no message. The other ranks were ended.", file=sys.stderr)
    return 128 - code if code < 0 else code


class Stop:
    """Inside, the first SIGINT, SIGTERM or SIGUSR1 is only noted: the step can end and be saved.

    A further SIGINT interrupts at once; a further SIGTERM, which torchrun sends after a Ctrl-C,
    does nothing. Only the main thread may handle signals; elsewhere nothing is noted.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.signal = 0
        """The first signal, 0 if none has come."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal == 0 and not self.quiet:
            with contextlib.suppress(OSError):  # not print: it may be at work underneath
                os.write(
                    2, b"Stopping: finishing the step, then saving; Ctrl-C again stops at once.\n"
                )
        self.signal = self.signal or number


@contextlib.contextmanager
def reported(me: Ranks, *, quiet: bool = False) -> Iterator[None]:
    """Turn an error inside into a message (without traceback if mendable) and an exit code.

    quiet: say nothing, as another rank says the same.
    """
    with contextlib.suppress(ValueError):  # only the main thread may
        signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    except BrokenPipeError:  # whoever read what is printed has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None
    except (Exception, KeyboardInterrupt) as error:
        where = f"rank {me.rank}: " if me.world > 1 else ""
        message, code = _told(error)
        if not quiet:
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
