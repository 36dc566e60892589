"""Times the algorithms of collectives, from which a run takes the fastest (`comm.algorithm`).

All ranks are divided into groups of each size, which communicate at the same time, as the axes of a
grid do. Each operation is timed with each algorithm that may be the fastest and a few sizes of its
tensor. The algorithms take turns, so that other load of the machine slows down all of them, and the
median of several turns counts.

A time is the wall time from a barrier until the last rank is done, also where ranks share cores.
The rates of collectives (`comm.bandwidth`) use CPU time there, because in a step other ranks
compute while one waits. Here all ranks run the same collective and nothing else: a core is idle
only if all of its ranks sleep, which is a cost of the algorithm, as are wake-ups and the work of
the kernel, which are not in the CPU time of a rank. Timings are only compared with each other.

Small sizes come first, and the time that is left is divided among the rest. What does not fit is
left out: first the algorithms that are slow already, then the largest sizes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from ranvier.comm import bandwidth, collectives
from ranvier.comm.algorithm_table import (
    NATIVE,
    SHARED_MEMORY,
    AlgorithmTable,
    available_algorithms,
)
from ranvier.comm.algorithms.schedule import OPERATIONS, AxisShape
from ranvier.config.plan import divisors
from ranvier.grid import Axis, Grid
from ranvier.launch import ProcessInfo
from ranvier.planner.cluster import CollectiveTiming

TIMED_OPERATIONS = (*OPERATIONS, "all_to_all", "broadcast")
TIMED_BYTES = {
    "cpu": (2**12, 2**15, 2**18, 2**21, 2**24, 2**26),
    "cuda": (2**12, 2**15, 2**18, 2**21, 2**24, 2**28),
}
"""Bytes of the full tensor, by kind of device."""
TIME_LIMIT_SECONDS = 45.0
"""Time for all timings, apart from creating groups."""
MIN_TURNS = 3
MAX_TURNS = 11
"""Turns of each algorithm."""
MAX_CALLS = 16
"""Calls of a turn. With more of them it matters less that ranks do not start together."""
TOLERANCE = 2.0
"""What would take this many times its share of the time is left out."""
LARGE_BYTES = 2**20
SLOW_SECONDS_PER_BYTE = 2e-8
"""Limit of what the times of tensors below LARGE_BYTES say about those of larger ones."""
BARRIER_CHANNEL = "barrier"


@dataclass(frozen=True)
class GroupLayout:
    """A grid whose axis `name` divides all ranks into groups of the same shape."""

    degrees: tuple[tuple[str, int], ...]
    name: str

    @property
    def size(self) -> int:
        """Ranks of a group."""
        return dict(self.degrees)[self.name]


def list_layouts(world_size: int, ranks_per_node: int) -> list[GroupLayout]:
    """Returns groups of neighboring ranks of each size, and groups with one rank of each node."""
    found = [
        GroupLayout((("data", world_size // size), ("row", size)), "row")
        for size in divisors(world_size)
        # All groups must be divided among nodes alike.
        if size > 1 and (size % ranks_per_node == 0 or ranks_per_node % size == 0)
    ]
    nodes = world_size // ranks_per_node
    if nodes > 1 and ranks_per_node > 1 and world_size % ranks_per_node == 0:
        found.append(GroupLayout((("data", nodes), ("row", ranks_per_node)), "data"))
    return found


def list_candidates(op: str, shape: AxisShape, *, on_host: bool) -> list[str]:
    """Returns the algorithms of an operation that may be the fastest for groups of a shape.

    on_host: whether the ranks of a node share memory.
    """
    if op not in OPERATIONS:
        names = [NATIVE, SHARED_MEMORY] if on_host else [NATIVE]
    elif shape.num_nodes == 1:
        # Messages between CPU ranks of one host go through the network stack, so that they cannot
        # be faster than shared memory.
        names = [NATIVE, SHARED_MEMORY] if on_host else [NATIVE, "direct", "one_shot"]
    else:
        names = [
            NATIVE,
            "ring",
            *_logarithmic_algorithms(shape.size),
            *_level_names(shape, on_host),
        ]
    return available_algorithms(names, op, shape, on_host=on_host)


def _logarithmic_algorithms(count: int) -> list[str]:
    """Returns algorithms with log2 rounds; for a power of two they have the same messages."""
    if count & (count - 1) == 0:
        return ["doubling"]
    return ["bruck", "folded"]


def _level_names(shape: AxisShape, on_host: bool) -> list[str]:
    """Returns the algorithms that treat ranks inside and between nodes differently."""
    if not shape.is_even:
        return []
    inside = SHARED_MEMORY if on_host else NATIVE
    # With one rank per node, there is nothing inside nodes, and the others are flat.
    if shape.ranks_per_node == 1:
        return [f"nvrar/{inside}"]
    between = ["ring", _logarithmic_algorithms(shape.num_nodes)[0]]
    return [*(f"hierarchical/{name}/{inside}" for name in between), f"nvrar/{inside}"]


@dataclass
class TimedCollective:
    """An operation of the groups of a layout."""

    op: str
    axes: Mapping[str, Axis]
    """The axis of this rank with each algorithm forced."""
    num_groups: int
    """Concurrent groups inside a node."""
    seconds: dict[str, dict[int, float]] = field(init=False)
    """Times so far, by algorithm and bytes, ascending in bytes."""

    def __post_init__(self) -> None:
        self.seconds = {name: {} for name in self.axes}

    @property
    def shape(self) -> AxisShape:
        """Shape of each group."""
        return self.axes[NATIVE].shape

    @property
    def rows(self) -> list[CollectiveTiming]:
        """The times, one algorithm after the other."""
        size, nodes = self.shape.size, self.shape.num_nodes
        return [
            CollectiveTiming(self.op, name, size, nodes, num_bytes, seconds, self.num_groups)
            for name, by_bytes in self.seconds.items()
            for num_bytes, seconds in by_bytes.items()
        ]

    def predict_seconds(self, algorithm: str, num_bytes: int) -> float:
        """Returns the time by those of the two largest sizes; 0 if nothing is known."""
        known = [*self.seconds[algorithm].items()][-2:]
        if not known:
            return 0.0
        (first, before), (last, after) = known[0], known[-1]
        rate = max(after - before, 0.0) / (last - first) if last > first else 0.0
        # Times of small tensors are mostly latency, and differ by noise.
        if last < LARGE_BYTES:
            rate = min(rate, SLOW_SECONDS_PER_BYTE)
        return after + rate * (num_bytes - last)

    def __str__(self) -> str:
        return f"{self.op} of {self.shape.size}"


@dataclass
class AlgorithmBenchmark:
    """A rank that times algorithms together with all others."""

    me: ProcessInfo
    device: torch.device
    grid: Grid
    """Grid of all ranks, with whose groups and shared memory those of the algorithms are made."""
    report: Callable[[str], None] = lambda text: None
    """Called with the progress."""
    sizes: Sequence[int] = ()
    """Bytes of the full tensors; empty for those of the device."""
    limit_seconds: float = TIME_LIMIT_SECONDS
    left_out: list[str] = field(default_factory=list)
    """What did not fit into the time."""

    def __post_init__(self) -> None:
        self.sizes = self.sizes or TIMED_BYTES[self.device.type]

    def time_algorithms(self) -> list[CollectiveTiming]:
        """Returns the timings, the same on all ranks. Communicates: all collectives."""
        several = self.list_collectives()
        clock = self._make_clock()
        waiting = len(several) * sum(map(_time_weight, self.sizes))
        for num_bytes in sorted(self.sizes):
            self.report(f"algorithms of collectives with {_format_bytes(num_bytes)}")
            for one in several:
                share = clock.seconds_left * _time_weight(num_bytes) / waiting
                names = self._choose_candidates(one, num_bytes, share)
                for name, seconds in self._take_turns(one, names, num_bytes, clock, share).items():
                    one.seconds[name][num_bytes] = seconds
                waiting -= _time_weight(num_bytes)
        return [row for one in several for row in one.rows]

    def list_collectives(self) -> list[TimedCollective]:
        """Returns what is timed. Communicates: with all ranks, to create groups."""
        found = []
        local = self.me.local_world_size
        layouts = list_layouts(self.me.world_size, local)
        axes = {(layout, NATIVE): self._make_axis(layout, NATIVE) for layout in layouts}
        for op in TIMED_OPERATIONS:
            for layout in layouts:
                shape = axes[layout, NATIVE].shape
                names = list_candidates(op, shape, on_host=self._shares_memory)
                # With one algorithm there is nothing to choose.
                if len(names) == 1:
                    continue
                for name in names:
                    if (layout, name) not in axes:
                        axes[layout, name] = self._make_axis(layout, name)
                inside = len(shape.members[shape.nodes[0]])
                num_groups = min(self.me.world_size, local) // inside
                chosen = {name: axes[layout, name] for name in names}
                found.append(TimedCollective(op, chosen, num_groups))
        return found

    @property
    def _shares_memory(self) -> bool:
        """Whether the ranks of this node share memory, after a first axis was made."""
        found = self.grid.segments.values()
        return bool(found) and not any(isinstance(one, str) for one in found)

    def _make_axis(self, layout: GroupLayout, algorithm: str) -> Axis:
        grid = Grid(
            dict(layout.degrees),
            rank=self.me.rank,
            ranks_per_node=self.me.local_world_size,
            connected=True,
            groups=self.grid.groups,
            segments=self.grid.segments,
            share_gpu=self.grid.share_gpu,
            algorithms=AlgorithmTable.parse(algorithm),
        )
        return grid.axis(layout.name)

    def _make_clock(self) -> _SharedClock:
        # With the fastest known algorithm, and a group of its own: messages of an algorithm that is
        # timed must not be mistaken for those of a barrier.
        grid = Grid(
            {"data": self.me.world_size},
            rank=self.me.rank,
            ranks_per_node=self.me.local_world_size,
            connected=True,
            groups=self.grid.groups,
            segments=self.grid.segments,
            share_gpu=self.grid.share_gpu,
        )
        axis = grid.world_axis(channel=BARRIER_CHANNEL)
        return _SharedClock(axis, self.device, self.limit_seconds)

    def _choose_candidates(self, one: TimedCollective, num_bytes: int, share: float) -> list[str]:
        """Returns the algorithms that can be timed in `share` seconds."""
        needed = {name: one.predict_seconds(name, num_bytes) * (MIN_TURNS + 1) for name in one.axes}
        ranked = sorted(one.axes, key=lambda name: needed[name])
        # Without native, there is nothing to compare others with.
        ranked.remove(NATIVE)
        chosen = [NATIVE]
        total = needed[NATIVE]
        for name in ranked:
            total += needed[name]
            # Small sizes are what larger ones are predicted from.
            if num_bytes < LARGE_BYTES or total <= TOLERANCE * share:
                chosen.append(name)
        if len(chosen) == 1:
            chosen = []
        missing = [name for name in one.axes if name not in chosen]
        if missing:
            what = ", ".join(missing) if chosen else "all algorithms"
            self.left_out.append(f"{one} with {_format_bytes(num_bytes)}: {what}")
        return chosen

    def _take_turns(
        self,
        one: TimedCollective,
        names: Sequence[str],
        num_bytes: int,
        clock: _SharedClock,
        share: float,
    ) -> dict[str, float]:
        """Returns the median seconds of a call with each algorithm. Communicates: the calls."""
        if not names:
            return {}
        calls = [
            bandwidth.build_call(one.op, one.axes[name], num_bytes, self.device) for name in names
        ]
        began = clock.elapsed_seconds
        # Warm-up: the first call provides memory and connections.
        first = clock.slowest_seconds([clock.time_calls(call, 1) for call in calls])
        # All algorithms get the same time for a turn.
        each = share / MAX_TURNS / len(names)
        counts = [min(max(int(each / seconds), 1), MAX_CALLS) for seconds in first]
        turns: list[list[float]] = [[] for _ in names]
        for turn in range(MAX_TURNS):
            order = [*range(len(names))]
            # Each turn starts with another algorithm.
            order = order[turn % len(names) :] + order[: turn % len(names)]
            own = [clock.time_calls(calls[i], counts[i]) / counts[i] for i in order]
            for i, seconds in zip(order, clock.slowest_seconds(own), strict=True):
                turns[i].append(seconds)
            # Warm-up and turns so far, and one more.
            spent = (clock.elapsed_seconds - began) * (turn + 3) / (turn + 2)
            if turn + 1 >= MIN_TURNS and spent > share:
                break
        return {name: median(seconds) for name, seconds in zip(names, turns, strict=True)}


class _SharedClock:
    """Times that all ranks agree on, so that they make the same decisions."""

    def __init__(self, axis: Axis, device: torch.device, limit_seconds: float) -> None:
        self.axis = axis
        self.device = device
        self.limit_seconds = limit_seconds
        self._began = time.perf_counter()
        self.elapsed_seconds = 0.0
        """Seconds until ranks last compared their times."""

    @property
    def seconds_left(self) -> float:
        """Seconds until the limit."""
        return max(self.limit_seconds - self.elapsed_seconds, 0.0)

    def time_calls(self, call: Callable[[], object], count: int) -> float:
        """Returns the seconds of some calls of this rank, which start together with all others.

        Communicates: one number over all ranks, and the calls.
        """
        collectives.all_reduce(torch.zeros(1, device=self.device), self.axis).wait()
        self._wait_for_device()
        began = time.perf_counter()
        for _ in range(count):
            call()
        self._wait_for_device()
        return time.perf_counter() - began

    def slowest_seconds(self, seconds: Sequence[float]) -> list[float]:
        """Returns the seconds of the slowest rank, each. Communicates: them over all ranks."""
        own = [*seconds, time.perf_counter() - self._began]
        values = torch.tensor(own, dtype=torch.float64, device=self.device)
        slowest: list[float] = collectives.all_reduce(values, self.axis, "max").wait().tolist()
        self.elapsed_seconds = slowest.pop()
        return slowest

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _time_weight(num_bytes: int) -> float:
    """Returns the share of the time for a size, relative to small ones."""
    return math.sqrt(max(num_bytes / 2**20, 1.0))


def describe_timings(timings: Iterable[CollectiveTiming]) -> list[str]:
    """Returns a line for each operation and group: the fastest algorithm for some sizes."""
    groups: dict[tuple[str, int, int], dict[int, dict[str, float]]] = {}
    for row in timings:
        by_bytes = groups.setdefault((row.op, row.size, row.nodes), {})
        by_bytes.setdefault(row.bytes, {})[row.algorithm] = row.seconds
    lines = []
    for (op, size, nodes), by_bytes in groups.items():
        sizes = sorted(by_bytes)
        # The smallest, one in the middle and the largest.
        shown = dict.fromkeys([sizes[0], sizes[len(sizes) // 2], sizes[-1]])
        texts = [_describe_fastest(num_bytes, by_bytes[num_bytes]) for num_bytes in shown]
        across = f" on {nodes} nodes" if nodes > 1 else ""
        lines.append(f"  fastest {op} of {size}{across}: {', '.join(texts)}")
    return lines


def _describe_fastest(num_bytes: int, seconds: Mapping[str, float]) -> str:
    best = min(seconds, key=lambda name: seconds[name])
    if best == NATIVE:
        return f"{_format_bytes(num_bytes)} {NATIVE}"
    return f"{_format_bytes(num_bytes)} {best} ({seconds[NATIVE] / seconds[best]:.1f} x {NATIVE})"


def _format_bytes(num_bytes: int) -> str:
    if num_bytes >= 2**20:
        return f"{num_bytes / 2**20:g} MiB"
    return f"{num_bytes / 2**10:g} KiB"
