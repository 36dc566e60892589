"""Checks and times collectives over symmetric memory, with all ranks on one GPU.

    python benchmarks/symmetric_memory.py
    python benchmarks/symmetric_memory.py --ranks 4 --calls 1000 --mps off --json times.json

Every collective must return the bits of the plain sum in the order of the ranks, for all dtypes and
for 1 KiB to 64 MiB, also with odd sizes; in 10,000 calls in a row; in a CUDA graph that is replayed
100 times with other inputs; and in parallel with compute. At the end a rank does not join a
collective, which the others must notice. Times are those of back-to-back calls, launched one by one
and in a CUDA graph, together with those of an empty kernel and of NCCL. As all ranks share one
device, no link is involved.

CUDA's Multi-Process Service is used if it can be started (--mps off: never). Without it, ranks take
turns on the device, and a barrier takes milliseconds. Takes about two minutes. Each phase has a
time limit, after which the stacks are printed and all processes are ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
from script_parser import ScriptParser
from torch import Tensor, distributed

from ranvier.comm.transports.symmetric_memory import (
    DTYPES,
    SymmetricMemoryCommunicator,
    availability,
)
from ranvier.grid import Axis, Grid
from ranvier.launch import ProcessInfo, die_with_parent, init_process_group, local_process_infos

DEVICE = torch.device("cuda", 0)
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
COLLECTIVES = ("one_shot_all_reduce", "two_shot_all_reduce", "all_gather", "reduce_scatter")
ALL_REDUCES = COLLECTIVES[:2]
KIB, MIB = 2**10, 2**20
SIZES: tuple[tuple[int, int], ...] = (
    *((KIB, 0), (KIB, 3), (64 * KIB, 0), (MIB, 3), (16 * MIB, 0)),
    *((64 * MIB, -3), (64 * MIB, 0)),
)
"""Bytes, and elements that are added to make a size odd."""
TIMED_BYTES = (KIB, 16 * KIB, 256 * KIB, 4 * MIB, 64 * MIB)
LIMITS = {"setup": 60, "bits": 60, "calls": 150, "graph": 40, "overlap": 30, "times": 80}
"""Seconds after which a phase counts as a hang."""
MISSING_RANK_SECONDS = 4.0
"""Time limit of the barrier that a rank does not join."""


@dataclass(frozen=True)
class Collective:
    """A collective of a communicator."""

    name: str
    call: Callable[..., Any]
    label: str


@dataclass
class Rank:
    """What the phases of one rank share."""

    me: ProcessInfo
    begun: float
    axis: Axis
    host: Axis
    """The same ranks over Gloo."""
    plain: SymmetricMemoryCommunicator
    torch_kernels: SymmetricMemoryCommunicator | None
    """The same with torch's all-reduce kernels, where they return the same bits."""
    has_graphs: bool = True
    """Whether collectives can be captured in a CUDA graph."""
    wrong: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.axis.size

    @property
    def collectives(self) -> list[Collective]:
        """All collectives of both communicators."""
        found = [Collective(name, getattr(self.plain, name), name) for name in COLLECTIVES]
        if self.torch_kernels is not None:
            for name in ALL_REDUCES:
                call = getattr(self.torch_kernels, name)
                found.append(Collective(name, call, f"{name} (torch's kernel)"))
        return found

    def say(self, text: str) -> None:
        if self.me.rank == 0:
            print(f"[{time.time() - self.begun:6.1f} s] {text}", flush=True)

    def gather(self, value: Any) -> list[Any]:
        """Values of all ranks, exchanged by the hosts."""
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value, group=self.host.group)
        return found

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase that ends the process with its stacks if it takes too long."""
        faulthandler.dump_traceback_later(LIMITS[name], exit=True)
        start = time.time()
        before = len(self.wrong)
        self.say(f"{name} ...")
        yield
        torch.cuda.synchronize()
        count = sum(self.gather(len(self.wrong) - before))
        faulthandler.cancel_dump_traceback_later()
        self.say(f"{name}: {count} wrong, {time.time() - start:.1f} s")


def bits_of(x: Tensor) -> Tensor:
    return x.view(INTEGERS[x.element_size()])


def make_input(
    rank: int, case: int, numel: int, dtype: torch.dtype, device: torch.device = DEVICE
) -> Tensor:
    """Values of a rank of very different magnitude, known to all ranks."""
    generator = torch.Generator(device).manual_seed(1000 * case + rank)
    if not dtype.is_floating_point:
        return torch.randint(
            *(-(2**20), 2**20, (numel,)), generator=generator, device=device, dtype=dtype
        )
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = torch.randn(numel, generator=generator, device=device, dtype=wide)
    values *= 2.0 ** torch.randint(-12, 13, (numel,), generator=generator, device=device)
    # A small value is lost if it is added to a large one before that has been cancelled.
    values[1::3] = (2.0**15, -(2.0**15), 2.0**-12)[rank % 3]
    values[:1] = -0.0
    values[2:3] = 1e-40
    values[4:5] = torch.inf if rank == 0 else 1.0
    return values.to(dtype)


def plain_sum(inputs: Sequence[Tensor]) -> Tensor:
    """The sum from left to right, in fp32 for 16-bit dtypes, rounded once."""
    wide = torch.float32 if inputs[0].element_size() == 2 else inputs[0].dtype
    total = inputs[0].to(wide)
    for x in inputs[1:]:
        total = total + x.to(wide)
    return total.to(inputs[0].dtype)


def expected(name: str, inputs: Sequence[Tensor], index: int) -> Tensor:
    if name == "all_gather":
        return torch.cat(list(inputs))
    total = plain_sum(inputs)
    return total.chunk(len(inputs))[index].clone() if name == "reduce_scatter" else total


def output_like(name: str, x: Tensor, ranks: int) -> Tensor:
    """An output of a collective."""
    counts = {"all_gather": x.numel() * ranks, "reduce_scatter": x.numel() // ranks}
    return torch.empty(counts.get(name, x.numel()), dtype=x.dtype, device=x.device)


def check_references(ranks: int) -> int:
    """Computes the plain sums of a few sizes on the CPU; returns 1 if a result has another size."""
    wrong = 0
    for dtype in DTYPES:
        inputs = [make_input(rank, 0, 96, dtype, torch.device("cpu")) for rank in range(ranks)]
        for name in ("all_gather", "reduce_scatter", "all_reduce"):
            want = expected(name, inputs, index=ranks - 1)
            have = output_like(name, inputs[0], ranks)
            wrong += (want.shape, want.dtype) != (have.shape, have.dtype)
        print(f"{dtype}: 3 references")
    return int(wrong > 0)


def check_bits(rank: Rank) -> None:
    """Compares all collectives, dtypes and sizes with the plain sum, and ranks with each other."""
    case = 0
    for dtype in DTYPES:
        for num_bytes, odd in SIZES:
            case += 1
            part = num_bytes // dtype.itemsize + odd
            for one in rank.collectives:
                if one.name == "reduce_scatter":
                    numel = part // rank.size * rank.size
                else:
                    numel = part
                where = f"{one.label}, {num_bytes} bytes {odd:+d} of {dtype}"
                check_case(rank, one, case, numel, dtype, where)
        rank.say(f"  {dtype}: {len(rank.collectives) * len(SIZES)} cases")


def check_case(
    rank: Rank, one: Collective, case: int, numel: int, dtype: torch.dtype, where: str
) -> None:
    """Compares a collective with the plain sum, and ranks with each other."""
    inputs = [make_input(i, case, numel, dtype) for i in range(rank.size)]
    want = expected(one.name, inputs, rank.axis.index)
    have = output_like(one.name, inputs[0], rank.size)
    x = inputs[rank.axis.index]
    bits_of(have).fill_(-1)
    one.call(have, x, async_op=case % 2 == 0).wait()
    if not torch.equal(bits_of(have), bits_of(want)):
        count = int((bits_of(have) != bits_of(want)).sum())
        rank.wrong.append(f"{where}: {count} of {have.numel()} differ from the plain sum")
    digest = int(bits_of(have).sum(dtype=torch.int64))
    if one.name != "reduce_scatter" and len({*rank.gather(digest)}) > 1:
        rank.wrong.append(f"{where}: ranks have different bits")
    if one.name in ALL_REDUCES and x.numel() * x.element_size() <= 2 * MIB:
        one.call(x, x).wait()
        if not torch.equal(bits_of(x), bits_of(want)):
            rank.wrong.append(f"{where}: different in place")


@dataclass
class CountedCalls:
    """Calls of a collective with known results, which are checked on the device."""

    collective: Collective
    x: Tensor
    output: Tensor
    want: Tensor
    """The result of inputs that are the ranks."""
    step: float
    """How the result grows if all inputs grow by one."""
    wrong: Tensor

    @classmethod
    def create(cls, rank: Rank, collective: Collective, part: int) -> CountedCalls:
        """part: elements of an input, divided by the number of ranks."""
        x = torch.zeros(rank.size * part, device=DEVICE)
        output = output_like(collective.name, x, rank.size)
        if collective.name == "all_gather":
            want = torch.arange(rank.size, device=DEVICE).repeat_interleave(x.numel()).float()
            step = 1.0
        else:
            want = torch.full_like(output, rank.size * (rank.size - 1) / 2)
            step = float(rank.size)
        return cls(collective, x, output, want, step, torch.zeros((), device=DEVICE))

    def call(self, async_op: bool) -> Any:
        return self.collective.call(self.output, self.x, async_op=async_op)

    def check(self, value: int) -> None:
        """Compares the result of inputs that are `value` plus the rank."""
        self.wrong += (self.output != self.want + self.step * value).sum()

    def report(self, rank: Rank, where: str) -> None:
        count = int(self.wrong)
        if count:
            rank.wrong.append(f"{self.collective.label}: {count} wrong elements {where}")


def call_many(rank: Rank, calls: int) -> None:
    """Runs many calls in a row, of all collectives and several sizes."""
    counted = [
        CountedCalls.create(rank, one, part)
        for part in (128, 1371, 32768)
        for one in rank.collectives
    ]
    start = time.time()
    for i in range(calls):
        one = counted[i % len(counted)]
        value = i % 1000
        one.x.fill_(float(value + rank.axis.index))
        one.call(async_op=i % 3 == 0).wait()
        one.check(value)
        if (i + 1) % 1000 == 0:
            torch.cuda.synchronize()
            rank.say(f"  {i + 1} calls, {1e6 * (time.time() - start) / (i + 1):.0f} us per call")
    for one in counted:
        one.report(rank, "in a row")


def replay_graph(rank: Rank, replays: int = 100) -> None:
    """Captures all collectives in one graph and replays it with other inputs."""
    counted = [CountedCalls.create(rank, one, 4096) for one in rank.collectives]
    graph = torch.cuda.CUDAGraph()
    problem = ""
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            works = [one.call(async_op=i % 2 == 0) for i, one in enumerate(counted)]
            for work in works:
                work.wait()
    except RuntimeError as error:
        problem = str(error).partition("\n")[0]
    # If it has failed on one rank, the others must not replay it.
    problems = [text for text in rank.gather(problem) if text]
    if problems:
        rank.has_graphs = False
        rank.wrong.append(f"cannot be captured: {problems[0]}")
        return
    rank.say(f"  captured {len(counted)} calls in a graph")
    for value in range(replays):
        for one in counted:
            one.x.fill_(float(value + rank.axis.index))
        graph.replay()
        for one in counted:
            one.check(value)
        # A call outside of the graph uses the same buffers.
        extra = counted[value % len(counted)]
        extra.call(async_op=True).wait()
        extra.check(value)
    for one in counted:
        one.report(rank, "in a graph")


def milliseconds(run: Callable[[], Any], times: int = 1) -> float:
    """Time per call on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / times


def overlap_compute(rank: Rank) -> None:
    """Runs collectives in parallel with matrix products, and with a kernel that only spins."""
    matrix = torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16)
    product = torch.empty_like(matrix)
    one_shot, two_shot = rank.collectives[:2]
    large = CountedCalls.create(rank, two_shot, 4 * MIB // rank.size)
    large.x.fill_(float(rank.axis.index))

    def compute() -> None:
        for _ in range(20):
            torch.mm(matrix, matrix, out=product)

    def communicate() -> None:
        for work in [large.call(async_op=True) for _ in range(4)]:
            work.wait()

    def both() -> None:
        works = [large.call(async_op=True) for _ in range(4)]
        compute()
        for work in works:
            work.wait()

    times = []
    for run in (compute, communicate, both):
        run()
        rank.gather(0)
        times.append(statistics.median(milliseconds(run) for _ in range(5)))
        if run is not compute:
            large.check(0)
    rank.say(
        f"  20 products of 4096 x 4096: {times[0]:.2f} ms; 4 two-shot all-reduces of 16 MiB: "
        f"{times[1]:.2f} ms; both at once: {times[2]:.2f} ms"
    )
    small = CountedCalls.create(rank, one_shot, 1024 // rank.size)
    other = torch.cuda.Stream()
    begin, done, ended = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    rank.gather(0)
    for value in range(20):
        small.x.fill_(float(value + rank.axis.index))
        begin.record()
        work = small.call(async_op=True)
        torch.cuda._sleep(50_000_000)
        ended.record()
        with torch.cuda.stream(other):
            work.wait()
            done.record()
        work.wait()
        small.check(value)
    torch.cuda.synchronize()
    rank.say(
        f"  a one-shot all-reduce of 4 KiB was done after {begin.elapsed_time(done):.3f} ms, a "
        f"kernel that runs on the compute stream after {begin.elapsed_time(ended):.3f} ms"
    )
    for one in (large, small):
        one.report(rank, "in parallel with compute")


def time_call(rank: Rank, call: Callable[[], Any], *, graph: bool) -> tuple[float, float]:
    """Microseconds per call, launched one by one and in a CUDA graph (nan without)."""
    for _ in range(3):
        call()
    # All ranks must make the same number of calls.
    once = max(rank.gather(milliseconds(call)))
    count = int(min(max(30.0 / once, 2.0), 200.0))

    def measure(run: Callable[[], Any], times: int) -> float:
        found = []
        for _ in range(3 if once > 20.0 else 7):
            rank.gather(0)
            found.append(milliseconds(run, times))
        return 1e3 * statistics.median(found)

    eager = measure(call, count)
    if not graph or not rank.has_graphs:
        return eager, math.nan
    captured = torch.cuda.CUDAGraph()
    inside = min(count, 20)
    with torch.cuda.graph(captured, capture_error_mode="thread_local"):
        for _ in range(inside):
            call()
    captured.replay()
    return eager, measure(captured.replay, max(count // inside, 1)) / inside


def time_all(rank: Rank) -> None:
    """Times all collectives, NCCL's, and an empty kernel."""
    group = rank.axis.group
    # torch 2.13 renamed these two.
    gather_into = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
    scatter_into = getattr(distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor)
    empty = partial(torch.cuda._sleep, 0)
    row(rank, "an empty kernel", 0, *time_call(rank, empty, graph=True))
    for num_bytes in TIMED_BYTES:
        numel = num_bytes // 4 // rank.size * rank.size
        whole = torch.ones(numel, device=DEVICE)
        part = torch.ones(numel // rank.size, device=DEVICE)
        for one in rank.collectives:
            x = part if one.name == "all_gather" else whole
            output = output_like(one.name, x, rank.size)
            call = partial(one.call, output, x)
            row(rank, one.label, num_bytes, *time_call(rank, call, graph=True))
        native = {
            "all_reduce": partial(distributed.all_reduce, whole, group=group),
            "all_gather": partial(gather_into, whole, part, group=group),
            "reduce_scatter": partial(scatter_into, part, whole, group=group),
        }
        for name, run in native.items():
            label = f"{name} (NCCL over sockets)"
            row(rank, label, num_bytes, *time_call(rank, run, graph=False))


def row(rank: Rank, name: str, num_bytes: int, eager: float, in_graph: float) -> None:
    """Keeps a line of the table, and prints it."""
    has_graph = not math.isnan(in_graph)
    rank.rows.append(
        {
            "name": name,
            "bytes": num_bytes,
            "eager_us": round(eager, 1),
            "graph_us": round(in_graph, 1) if has_graph else None,
        }
    )
    if rank.me.rank == 0:
        graph = f"{in_graph:10.1f}" if has_graph else " " * 10
        print(f"| {name:38} | {num_bytes:9} | {eager:10.1f} | {graph} |", flush=True)


def set_up(me: ProcessInfo, begun: float) -> Rank:
    """Joins the group of all ranks and creates the communicators, as a grid does."""
    torch.cuda.set_device(DEVICE)
    init_process_group(me, backend="nccl", timeout_seconds=50.0, share_gpu=True)
    grid = Grid({"row": me.world_size}, connected=True, timeout_seconds=50.0)
    axis, host = grid.axis("row"), grid.axis("row", channel="host")
    assert axis.group is not None
    reason = availability(axis.group, DEVICE, share_gpu=True)
    if reason:
        raise RuntimeError(f"Symmetric memory is not available: {reason}.")
    options: dict[str, Any] = {"order": axis.order, "timeout_seconds": 30.0}
    plain = SymmetricMemoryCommunicator(axis.group, DEVICE, **options)
    by_torch = None
    try:
        by_torch = SymmetricMemoryCommunicator(
            axis.group, DEVICE, use_torch_kernels=True, **options
        )
    except Exception as error:
        print(f"rank {me.rank}: torch's kernels cannot be used: {error}", flush=True)
    return Rank(me, begun, axis, host, plain, by_torch)


def run_rank(me: ProcessInfo, begun: float, calls: int, path: str, ready: Event) -> None:
    """All phases of one rank. ready: set after the communicators have been created."""
    die_with_parent()
    faulthandler.dump_traceback_later(LIMITS["setup"], exit=True)
    try:
        rank = set_up(me, begun)
    except Exception as error:
        print(f"rank {me.rank}: setup failed: {type(error).__name__}: {error}", flush=True)
        os._exit(1)
    faulthandler.cancel_dump_traceback_later()
    ready.set()
    name = torch.cuda.get_device_name(DEVICE)
    rank.say(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {name}, {rank.size} ranks")
    try:
        with rank.phase("bits"):
            check_bits(rank)
        with rank.phase("calls"):
            call_many(rank, calls)
        with rank.phase("overlap"):
            overlap_compute(rank)
        with rank.phase("graph"):
            replay_graph(rank)
        if me.rank == 0:
            print(f"\n| {'collective':38} | {'bytes':>9} | {'us, eager':>10} | {'us, graph':>10} |")
            print(f"| {'-' * 38} | {'-' * 9} | {'-' * 10} | {'-' * 10} |", flush=True)
        with rank.phase("times"):
            time_all(rank)
        rank.say("All ranks share one device: no link was involved in any of these times.")
    except Exception as error:
        print(f"rank {me.rank}: {type(error).__name__}: {error}", flush=True)
        raise
    for text in rank.wrong[:20]:
        print(f"rank {me.rank}: WRONG {text}", flush=True)
    if path and me.rank == 0:
        record = {"torch": torch.__version__, "device": name, "ranks": rank.size, "rows": rank.rows}
        Path(path).write_text(json.dumps(record, indent=1) + "\n")
    # The others may still use the group.
    rank.gather(0)
    os._exit(1 if rank.wrong else 0)


def run_without_peer(me: ProcessInfo, begun: float, *_: Any) -> None:
    """Rank 0 calls a collective that no other rank joins."""
    die_with_parent()
    faulthandler.dump_traceback_later(LIMITS["setup"], exit=True)
    torch.cuda.set_device(DEVICE)
    init_process_group(me, backend="nccl", timeout_seconds=50.0, share_gpu=True)
    axis = Grid({"row": me.world_size}, connected=True, timeout_seconds=50.0).axis("row")
    assert axis.group is not None
    memory = SymmetricMemoryCommunicator(
        axis.group, DEVICE, capacity=MIB, timeout_seconds=MISSING_RANK_SECONDS
    )
    if me.rank:
        time.sleep(4.0 * MISSING_RANK_SECONDS)
        os._exit(0)
    x = torch.ones(4, device=DEVICE)
    start = time.time()
    try:
        memory.one_shot_all_reduce(x, x).wait()
        torch.cuda.synchronize()
    except RuntimeError as error:
        taken = time.time() - start
        first = str(error).partition("\n")[0]
        print(f"[{time.time() - begun:6.1f} s] ended after {taken:.1f} s: {first}", flush=True)
        os._exit(0 if taken < MISSING_RANK_SECONDS + 5.0 else 1)
    print("WRONG: a collective with a missing rank has returned", flush=True)
    os._exit(1)


def run_processes(
    function: Callable[..., None], ranks: int, deadline: float, *arguments: Any
) -> int:
    """Runs a function on all ranks and returns 1 if one of them fails, else 0.

    All processes are ended at the deadline, or a few seconds after a failure.
    """
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    code = 0
    try:
        for me in local_process_infos(ranks):
            process: BaseProcess = context.Process(
                target=function, args=(me, *arguments), daemon=True
            )
            process.start()
            processes.append(process)
        while any(process.is_alive() for process in processes) and time.time() < deadline:
            time.sleep(0.1)
            if code == 0 and any(process.exitcode for process in processes):
                code = 1
                # The others may report their own errors.
                deadline = min(deadline, time.time() + 8.0)
        if code == 0 and any(process.is_alive() for process in processes):
            print("WRONG: the time limit of the benchmark is over", flush=True)
        return int(any(process.exitcode != 0 for process in processes))
    finally:
        for process in processes:
            process.kill()
            process.join()


@contextlib.contextmanager
def multi_process_service(mode: str) -> Iterator[bool]:
    """Runs CUDA's Multi-Process Service; yields whether it could be started."""
    control = shutil.which("nvidia-cuda-mps-control")
    if mode == "off" or control is None or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield "CUDA_MPS_PIPE_DIRECTORY" in os.environ
        return
    names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
    folder = tempfile.mkdtemp(prefix="ranvier-mps-")
    os.environ.update(dict.fromkeys(names, folder))
    try:
        started = subprocess.run([control, "-d"], check=False, timeout=30.0).returncode == 0
        if not started:
            for name in names:
                os.environ.pop(name, None)
        yield started
        if started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run([control], input="quit\n", text=True, check=False, timeout=20.0)
    finally:
        end_service(Path(folder))
        for name in names:
            os.environ.pop(name, None)
        shutil.rmtree(folder, ignore_errors=True)


def end_service(folder: Path) -> None:
    """Ends the service's daemon if it is still running."""
    with contextlib.suppress(OSError, ValueError):
        pid = int((folder / "nvidia-cuda-mps-control.pid").read_text())
        if "mps" in Path(f"/proc/{pid}/comm").read_text():
            os.kill(pid, signal.SIGKILL)


def main() -> int:
    """Runs all phases and returns an exit code."""
    parser = ScriptParser(
        __doc__,
        smoke="--ranks 2",
        skipped="the collectives, which need a GPU; their references are computed",
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--mps", choices=("auto", "off"), default="auto")
    parser.add_argument("--seconds", type=float, default=225.0, help="time limit of everything")
    parser.add_argument("--json", default="", help="file for the times")
    options = parser.parse_args()
    if options.smoke:
        return check_references(options.ranks)
    begun = time.time()
    deadline = begun + options.seconds
    ready = multiprocessing.get_context("spawn").Event()
    arguments = (begun, options.calls, options.json, ready)
    with multi_process_service(options.mps) as shared:
        print(f"Multi-Process Service: {'on' if shared else 'off'}", flush=True)
        code = run_processes(run_rank, options.ranks, deadline, *arguments)
    if shared and code and not ready.is_set():
        print("Again without the Multi-Process Service.", flush=True)
        code = run_processes(run_rank, options.ranks, deadline, *arguments)
    if time.time() < deadline:
        print("a missing rank ...", flush=True)
        code = max(code, run_processes(run_without_peer, options.ranks, deadline, begun))
    print(f"{'PASSED' if code == 0 else 'FAILED'} after {time.time() - begun:.0f} s", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
