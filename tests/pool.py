"""Worker processes for tests: started once, reused by all, any grid of up to 8 ranks.

`Pool.run(function, ranks, *arguments)` calls `function(rank, *arguments)` on the first `ranks`
workers and gives their results. A failing rank's traceback is raised here; a hang is ended with the
stacks of all ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grids import GridKey, grid_key
from ranvier.comm.algorithm_table import AlgorithmTable
from ranvier.comm.algorithms.registry import find_algorithm
from ranvier.comm.algorithms.schedule import AxisShape, Level
from ranvier.config.plan import AXES

if TYPE_CHECKING:
    from ranvier.launch import ProcessInfo

SIZE = 8
PRELOAD = ("pool_preload",)
"""Modules that most tests import."""
PRELOAD_GRID = ("ranvier.comm.collectives", "ranvier.grid", "ranvier.launch.process_group")
"""Modules that tests of collectives import, which take a third of the time."""
LEVELED = ("hierarchical", "nvrar")
"""Algorithms that treat ranks inside and between nodes differently."""


class RankError(AssertionError):
    """A rank that failed or hung."""


class Pool:
    """Processes that have joined one process group and wait for functions to run.

    Over NCCL all of them share the first GPU and use it in a repeatable way. mps: through CUDA's
    multi-process service if it runs, in which a client that is killed may harm others. preload:
    modules that the first pool of a process imports for the workers of all.
    """

    def __init__(
        self,
        size: int = SIZE,
        backend: str = "gloo",
        *,
        mps: bool = True,
        algorithm: str = "auto",
        preload: Sequence[str] = PRELOAD,
    ) -> None:
        self.size, self.backend, self.mps = size, backend, mps
        self.algorithm = algorithm
        """Algorithm of collectives of all grids that do not name one."""
        self.preload = preload
        self.workers: list[tuple[BaseProcess, Connection]] = []
        self.known: list[tuple[tuple[int, ...], str]] = []
        self.grids: set[GridKey] = set()

    def start(self) -> None:
        """Start the workers."""
        self.folder = Path(tempfile.mkdtemp(prefix="ranvier-pool-"))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*self.preload])
        # The server takes its path from the environment alone, and skips in silence what it lacks.
        here = str(Path(__file__).parent)
        os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
        for me in self.process_infos():
            here, there = context.Pipe()
            setup = self.worker_setup(me.rank)
            worker = context.Process(
                target=_serve,
                args=(me, there, self._stacks(me.rank), self.backend, self.mps, setup),
                daemon=True,
            )
            worker.start()
            there.close()
            self.workers.append((worker, here))

    def process_infos(self) -> list[ProcessInfo]:
        """Rank and address of each worker."""
        from ranvier.launch import local_process_infos

        return local_process_infos(self.size)

    def worker_setup(self, rank: int) -> Callable[[], None] | None:
        """What a worker calls before it joins the process group."""
        return None

    def stop(self) -> None:
        """End the workers, if they were started."""
        if not self.workers:
            return
        for _, connection in self.workers:
            connection.close()
        # One that waits for a function ends by itself; killed it might harm others on its GPU.
        deadline = time.monotonic() + 1.0
        for worker, _ in self.workers:
            worker.join(max(deadline - time.monotonic(), 0.0))
        for worker, _ in self.workers:
            worker.kill()
            worker.join()
        self.workers, self.known, self.grids = [], [], set()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(
        self, function: Callable[..., Any], ranks: int, *arguments: Any, timeout: float = 600.0
    ) -> list[Any]:
        """Results of the ranks, in order."""
        if not self.workers:
            self.start()
        self._send(function, ranks, arguments)
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        open_ones = {connection: rank for rank, (_, connection) in enumerate(self.workers[:ranks])}
        failures: dict[int, str] = {}
        while open_ones:
            ready = wait(list(open_ones), timeout=max(deadline - time.monotonic(), 0.0))
            if not ready:
                break
            for connection in ready:
                rank = open_ones.pop(connection)  # type: ignore[arg-type,index]
                try:
                    good, value = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    good, value = False, f"rank {rank} died"
                (results if good else failures)[rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + 2.0)
        if failures or open_ones:
            self._fail(failures, sorted(open_ones.values()))
        return [results[rank] for rank in range(ranks)]

    def _send(self, function: Callable[..., Any], ranks: int, arguments: tuple[Any, ...]) -> None:
        """Ask the first workers to call a function."""
        for rank, (worker, connection) in enumerate(self.workers[:ranks]):
            try:
                connection.send((function, arguments))
            except BrokenPipeError:
                worker.join(1.0)
                self._fail({rank: f"died before this call, exit code {worker.exitcode}"}, [])

    def on_grid(
        self,
        degrees: Mapping[str, int],
        function: Callable[..., Any],
        *arguments: Any,
        rendezvous: bool | None = None,
        order: Sequence[int] | None = None,
        algorithm: str = "",
        ranks_per_node: int = 0,
        message_delay: Any = None,
        **options: Any,
    ) -> list[Any]:
        """Call `function(grid, *arguments)` on every rank of a grid, its ranks in an order."""
        world = math.prod(degrees.values())
        is_algorithm_test = bool(algorithm)
        algorithm = algorithm or self.algorithm
        # Two levels need nodes.
        per_node = ranks_per_node or (2 if algorithm.startswith(LEVELED) else SIZE)
        how: dict[str, Any] = {
            "rendezvous": rendezvous,
            "order": order,
            "algorithms": AlgorithmTable.parse(algorithm),
            "ranks_per_node": per_node,
            "message_delay": message_delay,
            "share_gpu": True,
        }
        if self.backend == "nccl":
            assert world == self.size, (degrees, self.size)
            if len(self.grids) >= GRIDS_AT_MOST and grid_key(degrees) not in self.grids:
                self.stop()
            self.grids.add(grid_key(degrees))
            return self.run(
                _with_own_groups, world, dict(degrees), how, function, arguments, **options
            )
        wanted = [(ranks, channel) for ranks in lines(degrees) for channel in CHANNELS]
        wanted += piped(degrees, RENDEZVOUS if rendezvous else PIPE)
        wanted += [(tuple(range(world)), "orders")]
        if order is not None:
            wanted = [(tuple(order[place] for place in places), one) for places, one in wanted]
        # Groups inside and between nodes. Tests of algorithms use a whole axis; groups of its parts
        # would take longer to make than most of them.
        is_whole = is_algorithm_test and sum(size > 1 for size in degrees.values()) == 1
        lined = [line for line in wanted if not is_whole or len(line[0]) == world]
        wanted += [one for line in lined for one in level_groups(*line, per_node, algorithm)]
        wanted = [(tuple(sorted(ranks)), channel) for ranks, channel in wanted]
        missing = [one for one in dict.fromkeys(wanted) if one not in self.known]
        if missing:
            self.run(_make_groups, self.size, missing)
            self.known += missing
        return self.run(_with_grid, world, dict(degrees), how, function, arguments, **options)

    def _fail(self, failures: dict[int, str], hanging: list[int]) -> None:
        lines = [f"rank {rank} raised:\n{text}" for rank, text in sorted(failures.items())]
        if not failures:
            for rank in range(self.size):
                worker, _ = self.workers[rank]
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid or 0, signal.SIGUSR1)
            time.sleep(1.0)
            lines = [f"ranks {hanging} hang; the stacks of all ranks:"]
            for rank in range(self.size):
                lines.append(f"rank {rank}:\n{self._stacks(rank).read_text()}")
        self.stop()
        raise RankError("\n".join(lines))

    def _stacks(self, rank: int) -> Path:
        return self.folder / f"stacks{rank}"


GROUPS: dict[tuple[tuple[int, ...], str], Any] = {}
"""Process groups of a worker, shared by all its grids: making them takes longer than most tests."""
SEGMENTS: dict[tuple[int, ...], Any] = {}
"""Shared memory of a worker with others, shared by its grids as well."""
VERDICTS: dict[tuple[int, ...], bool] = {}
GROUPS_OF_GRID: dict[GridKey, dict[tuple[tuple[int, ...], str], Any]] = {}
"""The same over NCCL, where each grid makes its own."""
GRIDS_AT_MOST = 8
"""Grids after which workers over NCCL are started anew. Communicators of a grid occupy up to 1 GiB
of a worker's host memory; c10d gives a group the name of one that was destroyed, under which the
store still has the old one's keys."""
POOLS_AT_MOST = 2
"""Pools that are kept: tests of grids of one size may need a single rank as well. The multi-process
service refused clients when four parts of the suite had 60."""
CHANNELS = ("", "gather", "scatter")
PIPE = ("forward", "backward")
"""Channels of the pipe axis alone."""
RENDEZVOUS = (
    *("control", "up", "down", "wrap up", "wrap down"),
    *("rows", "final", "part", "return"),
)
"""The same where stages agree on each transfer."""


def lines(degrees: Mapping[str, int]) -> list[tuple[int, ...]]:
    """All sets of ranks that can form an axis of the grid, fused and partial ones included."""
    sizes = [p for axis in AXES for p in _primes(degrees.get(axis, 1))]
    ranks = np.arange(math.prod(sizes)).reshape(sizes)
    found: dict[tuple[int, ...], None] = {}
    for count in range(1, len(sizes) + 1):
        for kept in itertools.combinations(range(len(sizes)), count):
            rest = [i for i in range(len(sizes)) if i not in kept]
            together = math.prod(sizes[i] for i in kept)
            for row in ranks.transpose(*rest, *kept).reshape(-1, together):
                found[tuple(sorted(row.tolist()))] = None
    return list(found)


def _primes(number: int) -> list[int]:
    for p in range(2, number + 1):
        if number % p == 0:
            return [p, *_primes(number // p)]
    return []


def piped(degrees: Mapping[str, int], channels: Sequence[str]) -> list[tuple[tuple[int, ...], str]]:
    """Groups of the pipe axis, and of its first and last rank, which may share a weight."""
    stages = degrees.get("pipe", 1)
    if stages == 1:
        return []
    whole = np.arange(math.prod(degrees.values())).reshape(stages, -1).T
    found: list[tuple[tuple[int, ...], str]] = []
    for line in whole.tolist():
        found += [(tuple(line), channel) for channel in channels]
        found += [((line[0], line[-1]), "")]
    return found


def level_groups(
    ranks: tuple[int, ...], channel: str, ranks_per_node: int, algorithm: str
) -> list[tuple[tuple[int, ...], str]]:
    """Groups inside and between the nodes of a line of ranks that an algorithm needs."""
    found: list[tuple[tuple[int, ...], str]] = []
    shape = AxisShape.of_nodes([rank // ranks_per_node for rank in ranks])
    levels: tuple[Level, ...] = ("intra", "inter")
    for level in levels:
        if not algorithm.startswith(LEVELED) or not find_algorithm(algorithm).needs_group(level):
            continue
        groups: list[tuple[int, ...]] = [(rank,) for rank in ranks]
        if shape.is_even:
            lines = shape.members.values() if level == "intra" else shape.positions
            groups = [tuple(ranks[index] for index in line) for line in lines]
        found += [(some, f"{[*ranks]} {channel}/{level}") for some in groups]
    return found


def _make_groups(rank: int, wanted: list[tuple[tuple[int, ...], str]]) -> None:
    """Make groups on all workers in one order: c10d names groups by how many a process has."""
    from torch import distributed

    for ranks, channel in wanted:
        group = distributed.new_group(list(ranks))
        if rank in ranks:
            GROUPS[ranks, channel] = group


def _with_grid(
    rank: int,
    degrees: dict[str, int],
    how: dict[str, Any],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> Any:
    from ranvier.grid import Grid

    shared = {"groups": GROUPS, "segments": SEGMENTS, "memory_verdicts": VERDICTS}
    return function(Grid(degrees, rank=rank, connected=True, **shared, **how), *arguments)


def _with_own_groups(
    rank: int,
    degrees: dict[str, int],
    how: dict[str, Any],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> Any:
    """As `_with_grid`, but groups are made by the grid itself, as in a run."""
    from ranvier.grid import Grid

    groups = GROUPS_OF_GRID.setdefault(grid_key(degrees), {})
    return function(Grid(degrees, rank=rank, connected=True, groups=groups, **how), *arguments)


class NcclPools:
    """A pool of each size over NCCL, started when it is needed; the last few are kept.

    Where CUDA's multi-process service can be started they use it: kernels of several processes then
    run at the same time, and a collective takes a hundredth of a second less.
    """

    def __init__(self, *, algorithm: str = "auto") -> None:
        self.pools: dict[int, Pool] = {}
        self.algorithm = algorithm
        self.service = ""
        control = shutil.which("nvidia-cuda-mps-control")
        if control is not None and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ:
            folder = tempfile.mkdtemp(prefix="ranvier-mps-")
            os.environ["CUDA_MPS_PIPE_DIRECTORY"] = os.environ["CUDA_MPS_LOG_DIRECTORY"] = folder
            if subprocess.run([control, "-d"], check=False).returncode == 0:
                self.service = control
            else:
                del os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.environ["CUDA_MPS_LOG_DIRECTORY"]

    def pool(self, size: int) -> Pool:
        """The pool of a size."""
        pool = self.pools.pop(size, None) or Pool(size, "nccl", algorithm=self.algorithm)
        while len(self.pools) >= POOLS_AT_MOST:
            self.pools.pop(next(iter(self.pools))).stop()
        self.pools[size] = pool
        return pool

    def run(self, function: Callable[..., Any], ranks: int, *arguments: Any, **how: Any) -> Any:
        """As Pool.run."""
        return self.pool(ranks).run(function, ranks, *arguments, **how)

    def on_grid(self, degrees: Mapping[str, int], *arguments: Any, **how: Any) -> list[Any]:
        """As Pool.on_grid."""
        return self.pool(math.prod(degrees.values())).on_grid(degrees, *arguments, **how)

    def stop(self) -> None:
        """End all workers."""
        for pool in self.pools.values():
            pool.stop()
        if self.service:
            subprocess.run([self.service], input="quit\n", text=True, check=False, timeout=30.0)


def device_of(grid: Any) -> str:
    """Where tensors of a test lie."""
    return "cuda" if grid.backend == "nccl" else "cpu"


def _use_gpu() -> None:
    """Have this worker compute on the first GPU, the same bits each time."""
    import torch

    from ranvier.launch import use_deterministic_cublas

    use_deterministic_cublas()
    torch.cuda.set_device(0)
    torch.use_deterministic_algorithms(True)


def _serve(
    me: ProcessInfo,
    connection: Connection,
    stacks: Path,
    backend: str,
    mps: bool,
    setup: Callable[[], None] | None,
) -> None:
    """The life of a worker."""
    import torch

    from ranvier.launch import die_with_parent, init_process_group
    from ranvier.launch.signals import end_with_others

    die_with_parent()
    if setup is not None:
        setup()
    torch.set_num_threads(1)
    if not mps:
        os.environ.pop("CUDA_MPS_PIPE_DIRECTORY", None)
    if backend == "nccl":
        _use_gpu()
    with stacks.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        init_process_group(me, backend=backend, timeout_seconds=300.0, share_gpu=True)
        with end_with_others(me) if backend == "nccl" else contextlib.nullcontext():
            _work(me.rank, connection)


def _work(rank: int, connection: Connection) -> None:
    """Run functions until nobody is there to send them."""
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            os._exit(0)  # others may be gone already: nobody leaves in good order
        try:
            connection.send((True, function(rank, *arguments)))
        except BaseException:  # the driver shows it, whatever it is
            connection.send((False, traceback.format_exc()))
