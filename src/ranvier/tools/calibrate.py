"""Calibrate: applies the measurements of a run to the cluster file that the planner reads.

    compute     (seconds - exposed communication of a step) / its prediction
    collective  time of each operation and group in its trace / the time by the cluster's rows;
                without a trace: exposed communication / predicted exposed communication

Rates are divided by these factors and latencies multiplied: shapes keep their proportions, and the
run determines the level. Of the ranks of a group, the one that arrived last did not wait for
another rank, so its times are used.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ranvier.comm.algorithm_table import NATIVE
from ranvier.comm.bandwidth import wire_bytes
from ranvier.config import run as runs
from ranvier.config.plan import AXES
from ranvier.config.run import RunConfig
from ranvier.errors import PlanError
from ranvier.planner import cluster
from ranvier.planner.algorithm_choice import restrict_algorithms
from ranvier.planner.cluster import Cluster, Link, MeasuredCollective
from ranvier.planner.predict import Prediction
from ranvier.planner.time.links import RankGroup, algorithm_time_ratio
from ranvier.system import safe_files
from ranvier.system.terminal import print
from ranvier.tools.benchmark_cluster import scale_cluster
from ranvier.tools.local_cluster import detect_cluster, predict_run
from ranvier.train.prediction import WARMUP_STEPS

COMM_PARTS = ("row", "col", "depth", "data", "pipe")
"""Parts of a prediction that are communication."""
MAX_TRACE_BYTES = 4 << 30
"""Maximum size of a trace in bytes."""
MIN_STEPS = 4
"""Minimum number of steps of the run."""
MAX_FACTOR = 50.0
"""A larger factor means that the run was not on this cluster."""


@dataclass(frozen=True)
class RunTiming:
    """Measured times of a run, per step."""

    seconds: float
    exposed_seconds: float
    """Part of `seconds` in which rank 0 waited for communication."""
    calls: Mapping[tuple[str, int], list[tuple[int, float]]] = field(default_factory=dict)
    """Bytes and seconds of each call, by operation and group size."""


def calibrate_cluster(folder: Path, name: str = "") -> int:
    """Applies a run to a cluster file, and prints the error of the prediction before and after.

    name: a cluster file; empty for the measurement of this machine, or the data sheet of its
    device, which is then stored like a measurement.
    """
    run = runs.load_run_config(folder / "config.toml", in_run=True)
    seen = read_run_timing(folder, run)
    device = torch.device(run.train.device if run.train.device != "auto" else "cpu")
    if name:
        before = cluster.load_cluster(name)
    else:
        before = detect_cluster(device, run.plan.world_size)
    after = fit_cluster_to_run(run, seen, before)
    if name.endswith(".toml"):
        path = Path(name)
    else:
        path = cluster.measured_cluster_path(before.device.name)
    print(
        f"{folder}: {seen.seconds * 1e3:.4g} ms per step, of which "
        f"{seen.exposed_seconds * 1e3:.4g} ms is exposed communication"
    )
    for word, made in (("before", before), ("after", after)):
        predicted = predict_run(run, made).step_seconds
        off = predicted / seen.seconds - 1.0
        print(f"  predicted {word} calibration: {predicted * 1e3:.4g} ms ({off:+.1%})")
    cluster.write_cluster(
        replace(after, source=f"{before.source}; calibrated by {folder.name}"), path
    )
    print(f"Written: {path}")
    return 0


def fit_cluster_to_run(run: RunConfig, seen: RunTiming, made: Cluster) -> Cluster:
    """Returns the cluster with the rates of a run: first for links, then for devices."""
    if run.plan.world_size > 1:
        made = _fit_collectives(run, seen, made)
    own = {
        name: x
        for name, x in predict_run(run, made).seconds_by_part.items()
        if name not in COMM_PARTS
    }
    # At least 5% of the step counts as compute, so that noise in the exposed time cannot make the
    # factor zero or negative.
    factor = max(seen.seconds - seen.exposed_seconds, 0.05 * seen.seconds) / max(
        sum(own.values()), 1e-9
    )
    return scale_cluster(made, _check_factor(factor))


def _fit_collectives(run: RunConfig, seen: RunTiming, made: Cluster) -> Cluster:
    """Returns the cluster with the collectives of a run."""
    # Without a trace, the exposed time gives one factor for all collectives. With one, each
    # operation and group size has its own, and the median applies to those that the run did not
    # use.
    usual = 1.0
    said = predict_run(run, made)
    parts = sum(_comm_seconds(said).values())
    if parts > 0.0 and seen.exposed_seconds > 0.0:
        usual = _check_factor(seen.exposed_seconds / parts)
    priced = restrict_algorithms(made, run.comm.algorithm)
    factors = {
        key: _check_factor(_slowdown_factor(key, calls, priced))
        for key, calls in seen.calls.items()
    }
    if factors:
        mean = median(factors.values())
    else:
        mean = usual
    rows = tuple(
        _scale_collective(row, factors.get((row.op, row.size), mean)) for row in made.collectives
    )
    link, network = (_scale_link(one, mean) for one in (made.link, made.network))
    return replace(made, collectives=rows, link=link, network=network)


def _comm_seconds(said: Prediction) -> dict[str, float]:
    return {name: said.seconds_by_part.get(name, 0.0) for name in COMM_PARTS}


def _slowdown_factor(key: tuple[str, int], calls: list[tuple[int, float]], made: Cluster) -> float:
    """Returns the seconds of calls, relative to the time by the matching row of the cluster."""
    op, size = key
    rows = [
        row for row in made.collectives if (row.op, row.size, row.algorithm) == (op, size, NATIVE)
    ]
    if not rows:
        return 1.0
    row = rows[-1]
    ranks = RankGroup(size, max(size // row.nodes, 1))
    # The run took the algorithms that the planner prices. All rows and links are scaled alike, so
    # that their ratios, which the timings determine, stay the same.
    said = sum(
        (row.latency + wire_bytes(op, size, whole) / row.bandwidth)
        * algorithm_time_ratio(made, op, whole, ranks)
        for whole, _ in calls
    )
    return sum(seconds for _, seconds in calls) / max(said, 1e-12)


def _scale_collective(row: MeasuredCollective, factor: float) -> MeasuredCollective:
    return replace(row, latency=row.latency * factor, bandwidth=row.bandwidth / factor)


def _scale_link(link: Link, factor: float) -> Link:
    return replace(link, bandwidth=link.bandwidth / factor, latency=link.latency * factor)


def _check_factor(factor: float) -> float:
    if not math.isfinite(factor) or not 1.0 / MAX_FACTOR <= factor <= MAX_FACTOR:
        raise PlanError(
            f"The run took {factor:.3g} times as long as predicted, so it was not on this cluster. "
            "Pass the cluster on which it ran, or measure that cluster."
        )
    return factor


# ---- a run's files ----------------------------------------------------------------------


def read_run_timing(folder: Path, run: RunConfig) -> RunTiming:
    """Returns the median step of a run, and the calls of its trace if it has one."""
    path = folder / "metrics.jsonl"
    try:
        rows = [json.loads(line) for line in safe_files.read_text(path).splitlines()]
    except (OSError, ValueError) as error:
        raise PlanError(
            f"{path} cannot be read: {error!s:.100}. A run writes its steps to this file. Pass a "
            "run directory."
        ) from None
    rows = [row for row in rows if "step_seconds" in row][WARMUP_STEPS:]
    if len(rows) < MIN_STEPS - WARMUP_STEPS:
        raise PlanError(
            f"{folder} has {len(rows) + WARMUP_STEPS} steps. The first {WARMUP_STEPS} steps are "
            f"warm-up, and the others give the median. Use a run of at least {MIN_STEPS} steps."
        )
    seconds = median(float(row["step_seconds"]) for row in rows)
    exposed = median(float(row.get("exposed_communication_seconds") or 0.0) for row in rows)
    return RunTiming(seconds, min(exposed, seconds), read_collective_calls(folder, run))


def read_collective_calls(
    folder: Path, run: RunConfig
) -> dict[tuple[str, int], list[tuple[int, float]]]:
    """Returns calls of a trace by operation and group size, with the shortest time over ranks."""
    ranks: list[dict[tuple[str, str], list[tuple[int, float]]]] = []
    for path in sorted(folder.glob("trace-rank*.json")):
        table = json.loads(safe_files.read_text(path, limit=MAX_TRACE_BYTES))
        ranks.append(_parse_calls(table))
    found: dict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
    for axis, op in {key for one in ranks for key in one}:
        size = math.prod(getattr(run.plan, name) for name in axis.split("·") if name in AXES)
        several = [one[axis, op] for one in ranks if (axis, op) in one]
        # The same call as seen by each rank; traces may end at different calls.
        for together in zip(*several, strict=False):
            found[op, size].append((together[0][0], min(seconds for _, seconds in together)))
    return {key: calls for key, calls in found.items() if key[1] > 1}


def _parse_calls(table: Mapping[str, Any]) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Returns the bytes and seconds of the calls of one rank, by axis and operation, in order."""
    entries = table.get("traceEvents", [])
    # Each axis is a thread of the Chrome trace, whose name is in a metadata event.
    lanes = {e["tid"]: e["args"]["name"] for e in entries if e.get("name") == "thread_name"}
    found: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for entry in entries:
        if entry.get("ph") == "X" and entry["cat"] != "compute":
            row = (int(entry["args"]["bytes"]), float(entry["dur"]) / 1e6)
            found[lanes[entry["tid"]], entry["cat"]].append(row)
    return found
