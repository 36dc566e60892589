"""Times algorithms of collectives between nodes, against native Gloo, on one machine.

    python benchmarks/hierarchical_collectives.py
    python benchmarks/hierarchical_collectives.py --scenario 2x4 --algorithms native auto

Nodes are network namespaces with links of 100 Mbit/s (`tests/network_namespaces.py`), slow enough
that links and not cores limit the time. Scenarios:

    4x2, 2x4      nodes x ranks per node, consecutive ranks on one node, 4 MiB
    4x2-round-robin, 2x4-round-robin
                  the same with consecutive ranks on different nodes
    latency       8 nodes of one rank, 8 KiB, 2 ms added to each message by the executor

All algorithms take their calls in turns, in one run. The time of a call is that of its slowest
rank; the table has medians, the ratio to the reference of the scenario, the bytes that left the
busiest node (counted by its interface, in units of the whole tensor), and the algorithm that was
used. Native collectives have no added delay, so `latency` compares with the ring instead, and has
no `auto`, which may be native. Returns 1 if a ratio misses its target. Needs root, iproute2 and
idle cores.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS)]

import torch  # noqa: E402
from script_parser import ScriptParser  # noqa: E402
from torch import Tensor, distributed  # noqa: E402

from network_namespaces import (  # noqa: E402
    INTERFACE,
    JUMBO_FRAME,
    Placement,
    find_limitation,
    place_ranks,
    run_in_namespaces,
)
from pool import PRELOAD_GRID  # noqa: E402
from ranvier.comm import collectives  # noqa: E402
from ranvier.grid import Axis, Grid  # noqa: E402

MIB = 1 << 20
NATIVE = "native"
AUTO = "auto"
HIERARCHICAL = ("hierarchical/ring/shared_memory", "hierarchical/doubling/shared_memory")
AUTO_TO_BEST = 1.05
"""Maximum of the geometric mean of auto's time, relative to the best algorithm."""
AUTO_TO_NATIVE = 1.10
"""Maximum of auto's time in any case, relative to native."""
AXIS = "row"
OPERATIONS: dict[str, Callable[[Tensor, Axis], collectives.PendingTensor]] = {
    "all_gather": lambda x, axis: collectives.all_gather(x, axis),
    "reduce_scatter": lambda x, axis: collectives.reduce_scatter(x, axis),
    "all_reduce": lambda x, axis: collectives.all_reduce(x, axis),
}


@dataclass(frozen=True)
class Scenario:
    """Nodes, sizes, and what is compared."""

    num_nodes: int
    ranks_per_node: int
    placement: Placement
    whole_bytes: int
    """Bytes of the gathered or reduced tensor."""
    algorithms: tuple[str, ...]
    reference: str
    """Algorithm to which the others are compared."""
    candidates: tuple[str, ...]
    """Algorithms of which the fastest must reach the target."""
    target: float
    """Minimum of the reference's time divided by that of the fastest candidate."""
    message_delay_seconds: float = 0.0
    """Time after which the executor makes a message visible to its receiver."""
    mtu: int = JUMBO_FRAME

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.num_nodes * self.ranks_per_node

    def __str__(self) -> str:
        text = f"{self.num_nodes} nodes x {self.ranks_per_node} ranks ({self.placement}), "
        text += f"{self.whole_bytes / 1024:g} KiB"
        if self.message_delay_seconds:
            text += f", {self.message_delay_seconds * 1e3:g} ms added to each message"
        return text


def bandwidth_scenario(
    num_nodes: int, ranks_per_node: int, placement: Placement, target: float
) -> Scenario:
    """Returns a scenario that is limited by the rate of the links."""
    return Scenario(
        num_nodes,
        ranks_per_node,
        placement,
        whole_bytes=4 * MIB,
        algorithms=(NATIVE, "ring", *HIERARCHICAL, AUTO),
        reference=NATIVE,
        candidates=HIERARCHICAL,
        target=target,
    )


SCENARIOS = {
    "4x2": bandwidth_scenario(4, 2, "block", 1.1),
    "2x4": bandwidth_scenario(2, 4, "block", 1.5),
    "4x2-round-robin": bandwidth_scenario(4, 2, "round_robin", 2.0),
    "2x4-round-robin": bandwidth_scenario(2, 4, "round_robin", 2.0),
    "latency": Scenario(
        num_nodes=8,
        ranks_per_node=1,
        placement="block",
        whole_bytes=8 << 10,
        algorithms=("ring", "doubling"),
        reference="ring",
        candidates=("doubling",),
        target=2.0,
        message_delay_seconds=2e-3,
        # Small packets, so that the first ones after a pause are not most of the data.
        mtu=1500,
    ),
}


def make_grid(scenario: Scenario, algorithm: str) -> Grid:
    """Returns a connected grid of one axis over all ranks, with an algorithm for its collectives.

    The only place that passes an algorithm, the nodes and the added delay to the package.
    """
    from ranvier.comm.algorithm_table import AlgorithmTable

    options: dict[str, Any] = {}
    if scenario.placement == "round_robin":
        options["node_of_rank"] = place_ranks(
            scenario.num_nodes, scenario.ranks_per_node, scenario.placement
        )
    if scenario.message_delay_seconds:
        options["message_delay"] = lambda source, target: scenario.message_delay_seconds
    return Grid(
        {AXIS: scenario.world_size},
        connected=True,
        ranks_per_node=scenario.ranks_per_node,
        algorithms=AlgorithmTable.parse(algorithm),
        **options,
    )


@dataclass(frozen=True)
class Call:
    """One collective, measured on one rank."""

    operation: str
    algorithm: str
    used: str
    """The algorithm that ran; differs from `algorithm` for auto."""
    seconds: float
    bytes_out: int
    """Bytes that left the node meanwhile."""


def measure(rank: int, scenario: Scenario, algorithms: Sequence[str], calls: int) -> list[Call]:
    """Times all operations with all algorithms on this rank. Communicates: over all ranks."""
    grids = {algorithm: make_grid(scenario, algorithm) for algorithm in algorithms}
    found = []
    for operation in OPERATIONS:
        x, expected = make_tensors(operation, rank, scenario)
        used = {}
        for algorithm, grid in grids.items():
            with grid.trace.record_events() as events:
                y = OPERATIONS[operation](x, grid.axis(AXIS)).wait()
            assert torch.equal(y, expected), (operation, algorithm, rank)
            used[algorithm] = str(getattr(events[-1], "algorithm", NATIVE))
            assert algorithm in (used[algorithm], AUTO), (operation, algorithm, used[algorithm])
        for number in range(calls):
            # Each call starts with another algorithm, so that none always follows the same one.
            shift = number % len(algorithms)
            for algorithm in [*algorithms[shift:], *algorithms[:shift]]:
                axis = grids[algorithm].axis(AXIS)
                distributed.barrier()
                before = count_bytes_out()
                start = time.perf_counter()
                OPERATIONS[operation](x, axis).wait()
                seconds = time.perf_counter() - start
                distributed.barrier()
                bytes_out = count_bytes_out() - before
                found.append(Call(operation, algorithm, used[algorithm], seconds, bytes_out))
    return found


def make_tensors(operation: str, rank: int, scenario: Scenario) -> tuple[Tensor, Tensor]:
    """Returns the input and the result of a rank, integers in fp32, so that sums are exact."""
    world = scenario.world_size
    count = scenario.whole_bytes // 4
    whole = torch.arange(count, dtype=torch.float32) % 251
    part = whole.chunk(world)[rank]
    total = whole * world + sum(range(world))
    if operation == "all_gather":
        return part, whole
    if operation == "reduce_scatter":
        return whole + rank, total.chunk(world)[rank]
    return whole + rank, total


def count_bytes_out() -> int:
    """Returns the bytes that have left this node."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            # Eight numbers of received data precede those of sent data.
            return int(numbers.split()[8])
    raise AssertionError(f"This process has no interface {INTERFACE}")


@dataclass(frozen=True)
class Row:
    """Times of an operation with an algorithm."""

    scenario: str
    operation: str
    algorithm: str
    used: str
    seconds: float
    """Median of the slowest rank's."""
    leaving_node: float
    """Bytes that left the busiest node, divided by those of the whole tensor; median."""
    ratio: float = math.nan
    """Time of the reference divided by this one."""


def summarize(name: str, scenario: Scenario, ranks: Sequence[Sequence[Call]]) -> list[Row]:
    """Returns the rows of a scenario from the calls of all its ranks."""
    calls: dict[tuple[str, str], list[tuple[Call, ...]]] = {}
    for same in zip(*ranks, strict=True):
        calls.setdefault((same[0].operation, same[0].algorithm), []).append(same)
    rows = {}
    for (operation, algorithm), each in calls.items():
        rows[operation, algorithm] = Row(
            name,
            operation,
            algorithm,
            each[0][0].used,
            median(max(call.seconds for call in same) for same in each),
            median(max(call.bytes_out for call in same) for same in each) / scenario.whole_bytes,
        )
    result = []
    for (operation, _), row in rows.items():
        reference = rows.get((operation, scenario.reference))
        ratio = reference.seconds / row.seconds if reference is not None else math.nan
        result.append(Row(**(asdict(row) | {"ratio": ratio})))
    return result


def print_rows(scenario: Scenario, bits_per_second: int, rows: Sequence[Row]) -> None:
    """Prints the table of a scenario."""
    seconds = scenario.whole_bytes * 8 / bits_per_second
    print(f"\n{scenario}; one link carries the whole tensor in {seconds * 1e3:.2f} ms")
    header = f"x {scenario.reference}"
    print(f"{'operation':<15} {'algorithm':<36} {'ms':>9} {header:>9} {'leaving':>8}  used")
    for row in rows:
        print(
            f"{row.operation:<15} {row.algorithm:<36} {row.seconds * 1e3:>9.2f} "
            f"{row.ratio:>9.2f} {row.leaving_node:>8.2f}  {row.used}",
            flush=True,
        )


def check_targets(scenario: Scenario, rows: Sequence[Row]) -> int:
    """Prints whether the best candidate reaches the target; returns how many operations do not."""
    bad = 0
    for operation in OPERATIONS:
        ratios = [
            row.ratio
            for row in rows
            if row.operation == operation and row.algorithm in scenario.candidates
        ]
        if not ratios or math.isnan(max(ratios)):
            continue
        good = max(ratios) >= scenario.target
        bad += not good
        print(
            f"{'PASS' if good else 'FAIL'}: {operation}: {max(ratios):.2f} x "
            f"{scenario.reference}, target {scenario.target:g}"
        )
    return bad


def check_auto(rows: Sequence[Row]) -> int:
    """Compares auto with the best algorithm and with native; returns how many limits it exceeds."""
    seconds: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        seconds.setdefault((row.scenario, row.operation), {})[row.algorithm] = row.seconds
    to_best = []
    to_native = []
    for times in seconds.values():
        others = [time for algorithm, time in times.items() if algorithm != AUTO]
        if AUTO in times and others:
            to_best.append(times[AUTO] / min(others))
        if AUTO in times and NATIVE in times:
            to_native.append(times[AUTO] / times[NATIVE])
    if not to_best:
        return 0
    mean = math.exp(sum(map(math.log, to_best)) / len(to_best))
    worst = max(to_native, default=math.nan)
    bad = (mean > AUTO_TO_BEST) + (worst > AUTO_TO_NATIVE)
    print(
        f"\n{'FAIL' if bad else 'PASS'}: auto takes {mean:.3f} x the best algorithm (geometric "
        f"mean, limit {AUTO_TO_BEST:g}), at most {worst:.3f} x native (limit {AUTO_TO_NATIVE:g})"
    )
    return bad


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = ScriptParser(
        __doc__,
        smoke="--scenario 2x4 --ranks-per-node 2 --calls 1 --bits-per-second 1000000000 "
        "--json {folder}/rows.json",
    )
    parser.add_argument(
        "--scenario", action="append", choices=[*SCENARIOS], help="default: all of them"
    )
    parser.add_argument("--algorithms", nargs="+", help="default: those of the scenario")
    parser.add_argument("--ranks-per-node", type=int, help="default: those of the scenario")
    parser.add_argument("--calls", type=int, default=7, help="calls per algorithm")
    parser.add_argument("--bits-per-second", type=int, default=100_000_000)
    parser.add_argument("--json", type=Path, help="file for the rows")
    return parser.parse_args()


def main() -> int:
    """Runs the scenarios and prints their tables."""
    asked = parse_arguments()
    limitation = find_limitation()
    if limitation:
        print(limitation)
        return int(not asked.smoke)
    every: list[Row] = []
    bad = 0
    for name in asked.scenario or SCENARIOS:
        scenario = SCENARIOS[name]
        if asked.ranks_per_node is not None:
            scenario = replace(scenario, ranks_per_node=asked.ranks_per_node)
        ranks = run_in_namespaces(
            measure,
            scenario.num_nodes,
            scenario.ranks_per_node,
            scenario,
            asked.algorithms or scenario.algorithms,
            asked.calls,
            bits_per_second=asked.bits_per_second,
            mtu=scenario.mtu,
            placement=scenario.placement,
            preload=PRELOAD_GRID,
        )
        rows = summarize(name, scenario, ranks)
        print_rows(scenario, asked.bits_per_second, rows)
        bad += check_targets(scenario, rows)
        every += rows
    bad += check_auto(every)
    if asked.json is not None:
        asked.json.write_text(json.dumps([asdict(row) for row in every], indent=1))
    return int(bad > 0 and not asked.smoke)


if __name__ == "__main__":
    sys.exit(main())
