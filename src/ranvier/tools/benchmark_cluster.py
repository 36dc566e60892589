"""Measures this machine and writes its cluster file: devices, memory and links.

On CPUs ranks share cores, so the speed of a rank is measured with 1, 2, 4, ... concurrent ranks.
Each collective is measured in groups of each size, all groups at once, as the axes of a grid do;
then its algorithms are compared (`tools.benchmark_algorithms`).

The host time of an eager block is measured with a model so small that its device is idle. It runs
forward and backward with few blocks and with more; the difference is Python, autograd and kernel
launches, which do not depend on the size:

    block = (seconds of MORE blocks - seconds of FEW blocks) / (MORE - FEW) / 3

This is the forward pass; the backward pass takes twice as long.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any, TypeVar

import torch

from ranvier.comm import bandwidth as wires
from ranvier.comm import collectives
from ranvier.comm.algorithm_table import NATIVE, SHARED_MEMORY, AlgorithmTable
from ranvier.config import run as runs
from ranvier.config.plan import divisors
from ranvier.cost.layers import ActivationShape
from ranvier.data.batch import Batch
from ranvier.errors import PlanError
from ranvier.grid import Axis, Grid
from ranvier.launch import ProcessInfo, join_process_group
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.planner import cluster, device_rates
from ranvier.planner.cluster import (
    AttentionRate,
    Cluster,
    CollectiveTiming,
    Device,
    HostSpec,
    Link,
    MatmulRate,
    MeasuredCollective,
    MeasuredRate,
)
from ranvier.planner.microbenchmarks import (
    BenchmarkShapes,
    MeasuredRow,
    Microbenchmark,
    ranks_per_core,
)
from ranvier.system.terminal import print
from ranvier.tools.benchmark_algorithms import AlgorithmBenchmark, describe_timings
from ranvier.train.build_model import build_model
from ranvier.train.model_converters import choose_arithmetic
from ranvier.train.resolve import ResolveContext, resolve_run
from ranvier.train.step import forward_backward

FEW_BLOCKS = 2
MORE_BLOCKS = 8
"""Numbers of blocks of the two models."""
BLOCK_SEQ = 32
BLOCK_WIDTH = 64
BLOCK_REPEATS = 10


def measure_block_rates(device: torch.device, *, fp8: bool) -> list[MeasuredRate]:
    """Returns the host seconds of the forward pass of a block: `block`, and in 8 bits `block8`."""
    found = [MeasuredRate("block", _block_seconds(device, "off"))]
    if fp8:
        return [*found, MeasuredRate("block8", _block_seconds(device, "tensorwise"))]
    return found


def _block_seconds(device: torch.device, fp8: str) -> float:
    few, more = (_passes_seconds(device, blocks, fp8) for blocks in (FEW_BLOCKS, MORE_BLOCKS))
    return max(more - few, 0.0) / (MORE_BLOCKS - FEW_BLOCKS) / 3.0


def _passes_seconds(device: torch.device, blocks: int, fp8: str) -> float:
    """Returns the seconds of both passes of a model with `blocks` blocks."""
    sizes = {
        "layers": blocks,
        "embed": BLOCK_WIDTH,
        "heads": 4,
        "kv_heads": 4,
        "mlp": 2 * BLOCK_WIDTH,
    }
    tables = {
        "model": {**sizes, "head_dim": BLOCK_WIDTH // 4, "vocab": 256, "max_seq": BLOCK_SEQ},
        "data": {"seq_len": BLOCK_SEQ, "document_mask": False},
        "plan": {"global_batch": 1, "micro_batch": 1, "compile": "off", "recompute": "none"},
        "train": {"device": device.type, "dtype": "bf16", "float8": fp8},
    }
    run = resolve_run(runs.run_from_tables(tables), ResolveContext(world_size=1, device=device))
    grid = Grid({})
    model = build_model(run, grid, device, local_ranks=1)
    choose_arithmetic(
        run, model, grid, device, ActivationShape(1, BLOCK_SEQ, itemsize=2, statistics_itemsize=4)
    )
    ids = torch.zeros(1, BLOCK_SEQ, dtype=torch.int64, device=device)
    batches = Batch(ids, ids).split_micro_batches(grid, 1)
    taken = []
    for _ in range(BLOCK_REPEATS):
        _synchronize_device(device)
        begun = time.perf_counter()
        forward_backward(model, batches)
        _synchronize_device(device)
        taken.append(time.perf_counter() - begun)
        get_parallel_model(model).bucket_scheduler.begin_step("")
        # No step collects these events here, so they would accumulate.
        grid.trace.waited_events = []
    # The first pass warms up; the median ignores passes in which the host was busy with other work.
    return statistics.median(taken[1:])


def _synchronize_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


R = TypeVar("R", bound=MeasuredRow)
M = TypeVar("M", MatmulRate, AttentionRate, MeasuredRate, MeasuredCollective)
DEFAULT_CPU_RANKS = 8
"""Number of ranks on a CPU."""
LARGE_TENSOR_BYTES = {"cpu": 2**20, "cuda": 2**26}
"""Bytes of a tensor whose transfer takes longer than its latency."""
TIMED_CALLS = {"cpu": 8, "cuda": 20}
ROUNDS = {"cpu": 2, "cuda": 1}
"""Number of rounds in which everything is measured: the speed of CPUs varies from minute to minute
with the other load of a machine."""
ETHERNET = Link(bandwidth=25e9, latency=1e-5)
"""Link between nodes without a measurement and a data sheet: 200 Gbit/s."""


def count_local_ranks(nproc: int) -> int:
    """Returns the number of measuring ranks: one per CUDA device, or `DEFAULT_CPU_RANKS` on a
    CPU.
    """
    if nproc < 0:
        raise PlanError(
            f"nproc={nproc} is too small. At least one rank measures. Use nproc=1 or more."
        )
    return nproc or (torch.cuda.device_count() if torch.cuda.is_available() else DEFAULT_CPU_RANKS)


def measure_as_rank(output: str, me: ProcessInfo) -> int:
    """Measures as one rank; the first one writes the file. Communicates: all collectives."""
    cuda = torch.cuda.is_available()
    if cuda:
        device = torch.device("cuda", me.local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    began = time.perf_counter()
    with join_process_group(me, "nccl" if cuda else "gloo", 600.0):
        made = ClusterBenchmark(me, device).measure_cluster()
        if me.rank == 0:
            if output:
                path = Path(output)
            else:
                path = cluster.measured_cluster_path(made.device.name)
            cluster.write_cluster(made, path)
            print(*describe_cluster(made), sep="\n")
            print(f"Measured in {time.perf_counter() - began:.0f} s: {path}")
    return 0


@dataclass
class ClusterBenchmark:
    """A rank that measures together with the others."""

    me: ProcessInfo
    device: torch.device

    def __post_init__(self) -> None:
        world = self.me.world_size
        # Rates are those of the backend; other algorithms are timed in comparison with it.
        self.grid = Grid(
            {"data": world},
            rank=self.me.rank,
            ranks_per_node=self.me.local_world_size,
            connected=world > 1,
            algorithms=AlgorithmTable(NATIVE),
        )
        sizes = divisors(world)
        self.axes = {n: self.grid.axis(share={"data": n}) for n in sizes}
        """Groups of neighboring ranks by size; all ranks create all groups, in the same order."""

    def measure_cluster(self) -> Cluster:
        """Returns the cluster of this machine. Communicates: all collectives."""
        rounds = [self.measure_round() for _ in range(ROUNDS[self.device.type])]
        # Transpose: from rounds of rows to rows of rounds, which are then averaged.
        rows, links = ([*zip(*parts, strict=True)] for parts in zip(*rounds, strict=True))
        made = build_cluster(
            self.device, self.me, [*map(_average_rounds, rows)], [*map(_average_rounds, links)]
        )
        return replace(made, timings=tuple(self.time_algorithms()))

    def time_algorithms(self) -> list[CollectiveTiming]:
        """Times the algorithms of collectives. Communicates: all collectives."""
        world = self.me.world_size
        if world == 1:
            return []
        one = AlgorithmBenchmark(
            self.me,
            self.device,
            self.grid,
            report=lambda what: self.print_once(f"  {world} ranks: {what}"),
        )
        rows = one.time_algorithms()
        for text in one.left_out:
            self.print_once(f"  left out, as it would take too long: {text}")
        return rows

    def measure_round(self) -> tuple[list[MeasuredRow], list[MeasuredCollective]]:
        """Measures all rows once. Communicates: all collectives."""
        # Ranks do not share GPUs, so one rank is enough to measure compute.
        alone = self.device.type == "cuda"
        rows: list[MeasuredRow] = []
        links: list[MeasuredCollective] = []
        for ranks, axis in self.axes.items():
            if self.me.rank < ranks and (ranks == 1 or not alone):
                rows += self.measure_compute(ranks, axis)
            if self.me.rank < ranks:
                links += self.measure_collectives(ranks)
            # Ranks that do not take part wait here, so that they do not disturb the others.
            self.barrier(self.axes[self.me.world_size])
        return rows, links

    def measure_compute(self, ranks: int, axis: Axis) -> list[MeasuredRow]:
        """Measures the compute rates of a rank while `ranks` work at once."""
        before = torch.get_num_threads()
        if self.device.type == "cpu":
            # Ranks share the cores as they do in a run.
            torch.set_num_threads(max((os.cpu_count() or 1) // ranks, 1))
        plural = "rank" if ranks == 1 else "ranks"
        gauge = Microbenchmark.for_device(
            self.device,
            ranks=ranks,
            barrier=lambda: self.barrier(axis),
            on_progress=lambda what: self.print_once(f"  {ranks} {plural}: {what}"),
        )
        rows = gauge.run_all()
        # Only for GPUs: on a CPU launches and work take turns on the same cores (see
        # `shared_cores`).
        if self.device.type == "cuda":
            gauge.on_progress("eager blocks")
            rows += measure_block_rates(self.device, fp8="fp8" in gauge.dtypes)
        torch.set_num_threads(before)
        return [_average_ranks(row, axis) for row in rows]

    def measure_collectives(self, ranks: int) -> list[MeasuredCollective]:
        """Measures collectives in groups of each size, while `ranks` work at once."""
        found = []
        kind = self.device.type
        if kind == "cpu":
            many = ranks_per_core(ranks)
        else:
            many = 0.0
        for size, axis in self.axes.items():
            if 1 < size <= ranks and ranks % size == 0:
                self.print_once(f"  {ranks} ranks: collectives of groups of {size}")
                # The last operation, send, is point to point: a pair of ranks is enough.
                for op in wires.MEASURED_OPS if size == 2 else wires.MEASURED_OPS[:-1]:
                    self.barrier(self.axes[ranks])
                    one = wires.measure_collective(
                        op,
                        axis,
                        self.device,
                        large=LARGE_TENSOR_BYTES[kind],
                        calls=TIMED_CALLS[kind],
                        crowd=many,
                    )
                    # Nodes that a group spans, and groups that share the links of a node.
                    nodes = max(size // self.me.local_world_size, 1)
                    groups = min(ranks, self.me.local_world_size) // min(
                        size, self.me.local_world_size
                    )
                    found.append(
                        MeasuredCollective(op, size, one.latency, one.bandwidth, groups, nodes)
                    )
        return found

    def barrier(self, axis: Axis) -> None:
        """Waits for the other ranks of an axis. Communicates: one number."""
        collectives.all_reduce(torch.zeros(1, device=self.device), axis).wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def print_once(self, text: str) -> None:
        """Prints on rank 0 only."""
        if self.me.rank == 0:
            print(text, flush=True)


AVERAGED_FIELDS = ("rate", "value", "forward", "backward", "latency", "bandwidth")


def _average_rounds(same: Sequence[M]) -> M:
    """Returns the row averaged over rounds: geometric means."""
    if len(same) == 1:
        return same[0]
    names = [name for name in AVERAGED_FIELDS if hasattr(same[0], name)]
    changes: dict[str, Any] = {
        name: geometric_mean(getattr(one, name) for one in same) for name in names
    }
    return replace(same[0], **changes)


def _average_ranks(row: MeasuredRow, axis: Axis) -> MeasuredRow:
    """Returns the row averaged over ranks. Communicates: its numbers over the axis."""
    names = [name for name in AVERAGED_FIELDS if hasattr(row, name)]
    mine = torch.tensor([getattr(row, name) for name in names], dtype=torch.float64)
    if axis.size > 1 and torch.cuda.is_available():
        device = "cuda"
    else:
        device = "cpu"
    total = collectives.all_reduce(mine.to(device), axis).wait() / axis.size
    return replace(row, **dict(zip(names, total.tolist(), strict=True)))


# ---- quick estimate ----------------------------------------------------------------------

QUICK_SHAPES = BenchmarkShapes(
    matmuls=((384, 192, 192), (384, 768, 192)),
    attention=((4, 96, 4, 4, 32),),
    copy_bytes=2**19,
    update_parameters=2**18,
    min_seconds=0.005,
)
LOOPBACK = Link(bandwidth=1e9, latency=2e-4)
"""Link between two ranks of one host through Gloo, each with its own core."""
SHARED_MEMORY_LINK = Link(bandwidth=2e9, latency=6e-5)
"""The same through shared memory: on two cores all-gathers of 1 to 16 MiB reach 2 to 3 GB/s,
reduce-scatters 1.2 to 3.4 and all-reduces 1.2 to 1.7, after 60 to 140 µs."""


def estimate_cluster(ranks: int) -> Cluster:
    """Returns a quick estimate of this host by one rank, assuming that all ranks are alike.

    Ranks that share cores are slower in proportion.
    """
    cores = os.cpu_count() or 1
    many = ranks_per_core(ranks)
    before = torch.get_num_threads()
    torch.set_num_threads(max(cores // ranks, 1))
    rows = [
        replace(_scale_row(row, many), ranks=ranks)
        for row in Microbenchmark(torch.device("cpu"), shapes=QUICK_SHAPES).run_all()
    ]
    torch.set_num_threads(before)
    # Estimated, not measured. Runs without timings take shared memory unless it is set otherwise.
    links = [
        *_estimate_links(ranks, NATIVE, LOOPBACK),
        *_estimate_links(ranks, SHARED_MEMORY, SHARED_MEMORY_LINK),
    ]
    made = build_cluster(
        torch.device("cpu"), ProcessInfo(world_size=ranks, local_world_size=ranks), rows, links
    )
    return replace(made, source=f"{made.source}, quickly; links are estimated")


def _estimate_links(ranks: int, algorithm: str, link: Link) -> list[MeasuredCollective]:
    """Returns rows for groups of each size of ranks that share the cores of this host."""
    many = ranks_per_core(ranks)
    # Latency grows as in a tree, and shared cores slow down both terms.
    return [
        MeasuredCollective(
            op,
            size,
            link.latency * many * math.log2(size),
            link.bandwidth / many,
            ranks // size,
            algorithm=algorithm,
        )
        for size in divisors(ranks)[1:]
        for op in wires.MEASURED_OPS
    ]


# ---- from rows to a cluster -------------------------------------------------------------


def build_cluster(
    device: torch.device,
    me: ProcessInfo,
    rows: Sequence[MeasuredRow],
    links: Sequence[MeasuredCollective],
) -> Cluster:
    """Builds the cluster from measured rows; other values come from a data sheet."""
    own = build_device(device, rows)
    like = next((one for one in _built_in_clusters() if one.device.name == own.name), None)
    if device.type == "cuda":
        narrow = torch.bfloat16
    else:
        narrow = torch.float32
    side = device_rates.measure_rates(device, narrow)
    # Host memory is divided among the ranks of the node below.
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    inside = _link_from_rows([one for one in links if one.nodes == 1])
    between = _link_from_rows([one for one in links if one.nodes > 1])
    return Cluster(
        name=platform.node() or "here",
        device=own,
        per_node=me.local_world_size,
        link=inside or (like.link if like else ETHERNET),
        network=between or (like.network if like else ETHERNET),
        host=HostSpec(memory / me.local_world_size, side.to_device, side.to_host, side.adam),
        collectives=tuple(links),
        cores=0 if device.type == "cuda" else os.cpu_count() or 1,
        source=f"measured with torch {torch.__version__}",
    )


def build_device(device: torch.device, rows: Sequence[MeasuredRow]) -> Device:
    """Builds the device with all its measured rates."""
    products = tuple(row for row in rows if isinstance(row, MatmulRate))
    best: dict[str, float] = {}
    for row in products:
        best[row.dtype] = max(best.get(row.dtype, 0.0), row.rate)
    numbers = tuple(row for row in rows if isinstance(row, MeasuredRate))
    # Reversed: the first row of a kind, measured with the fewest concurrent ranks, takes
    # precedence.
    alone = {row.kind: row.value for row in reversed(numbers)}
    more: dict[str, Any] = {
        "measured": best,
        "launch": alone["launch"],
        "products": products,
        "attention": tuple(row for row in rows if isinstance(row, AttentionRate)),
        "rates": numbers,
    }
    if device.type == "cpu":
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Device("cpu", float(pages), alone["memory"], best, cores=1, **more)
    facts = torch.cuda.get_device_properties(device)
    try:
        return replace(cluster.find_device(facts.name), memory=float(facts.total_memory), **more)
    # Without a data sheet, use the best measured rates as peaks.
    except PlanError:
        peak = best
        count = facts.multi_processor_count
        return Device(
            facts.name, float(facts.total_memory), alone["memory"], peak, cores=count, **more
        )


def scale_cluster(made: Cluster, factor: float) -> Cluster:
    """Returns the cluster whose devices take `factor` times as long for everything."""
    own = made.device
    reach = replace(own.reach, matmul=own.reach.matmul / factor, memory=own.reach.memory / factor)
    device = replace(
        own,
        launch=own.launch * factor,
        reach=reach,
        products=tuple(_scale_row(row, factor) for row in own.products),
        attention=tuple(_scale_row(row, factor) for row in own.attention),
        rates=tuple(_scale_row(row, factor) for row in own.rates),
    )
    return replace(made, device=device)


def _scale_row(row: R, factor: float) -> R:
    """Returns a row scaled by a slowdown factor: seconds grow, rates fall."""
    seconds = isinstance(row, MeasuredRate) and row.kind in ("launch", "pair", "block", "block8")
    names = [name for name in AVERAGED_FIELDS if hasattr(row, name)]
    times = factor if seconds else 1.0 / factor
    return replace(row, **{name: getattr(row, name) * times for name in names})


def _built_in_clusters() -> list[Cluster]:
    return [cluster.load_cluster(name) for name in cluster.cluster_names()]


def _link_from_rows(rows: Sequence[MeasuredCollective]) -> Link | None:
    """Returns the link as seen by the largest group, with the fewest other groups active."""
    alone = [row for row in rows if (row.op, row.algorithm) == ("all_gather", NATIVE)]
    if not alone:
        return None
    row = max(alone, key=lambda row: (row.size, -row.groups))
    # An all-gather over a ring has size - 1 steps, each with the latency of the link.
    return Link(row.bandwidth, row.latency / max(row.size - 1, 1))


def describe_cluster(made: Cluster) -> list[str]:
    """Returns a few lines of text about the cluster."""
    device = made.device
    lines = [f"{made.name}: {made.per_node} x {device.name}"]
    lines += [
        f"  matmuls in {kind}: up to {rate / 1e12:.3g} TFLOP/s"
        for kind, rate in device.measured.items()
    ]
    for row in device.rates:
        if row.kind in ("memory", "update", "launch") and row.ranks in (1, made.per_node):
            lines.append(f"  {row.kind} with {row.ranks} concurrent: {row.value:.3g}")
    lines += [
        f"  {one.op} of {one.size}: {one.latency * 1e6:.0f} µs and {one.bandwidth / 1e9:.3g} GB/s"
        for one in made.collectives
        if one.groups == 1
    ]
    return lines + describe_timings(made.timings)
