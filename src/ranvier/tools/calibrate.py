"""Calibrate: what a run has taken, folded back into the cluster file that the planner reads.

    compute     (seconds - exposed communication of a step) / what was predicted for it
    collective  time of each operation and group of its trace / what the cluster's rows say, else
                exposed communication / what was predicted to be exposed

Rates are divided by these factors and latencies multiplied: shapes keep their proportions, the
level is that of the run. Of the ranks of a group the one that came last has waited for nobody: its
times count.
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

from ranvier.comm.bandwidth import wire
from ranvier.config import run as runs
from ranvier.config.plan import AXES
from ranvier.config.run import Run
from ranvier.errors import PlanError
from ranvier.planner import cluster, local_cluster
from ranvier.planner.cluster import Cluster, Collective, Link
from ranvier.planner.predict import Prediction
from ranvier.system import safe_files
from ranvier.system.terminal import print
from ranvier.tools.auto_plan import foreseen, machine_of
from ranvier.tools.benchmark_cluster import scaled
from ranvier.train.prediction import WARM

LINKS = ("row", "col", "depth", "data", "pipe")
"""Parts of a prediction that are communication."""
TRACE = 4 << 30
"""Bytes of a trace at most."""
LEAST = 4
"""Steps that a run must have taken."""
MOST = 50.0
"""A factor beyond this says that the run was another one."""


@dataclass(frozen=True)
class Seen:
    """What a run has taken in a step."""

    seconds: float
    exposed: float
    """Of them, in which rank 0 stood still for communication."""
    calls: Mapping[tuple[str, int], list[tuple[int, float]]] = field(default_factory=dict)
    """Bytes and seconds of each call, by operation and size of the group."""


def calibrate(folder: Path, name: str = "") -> int:
    """Fold a run into a cluster file, and print how far off predictions were and are.

    name: a cluster file; empty: what was measured here, or the device's data sheet, kept as if it
    had been measured here.
    """
    run = runs.load(folder / "config.toml", in_run=True)
    seen = read(folder, run)
    device = torch.device(run.train.device if run.train.device != "auto" else "cpu")
    before = cluster.cluster(name) if name else machine_of(device, run.plan.world)
    after = folded(run, seen, before)
    path = Path(name) if name.endswith(".toml") else local_cluster.path(before.device.name)
    print(f"{folder}: a step took {seen.seconds * 1e3:.4g} ms, {seen.exposed * 1e3:.4g} exposed")
    for word, made in (("before", before), ("after", after)):
        said = foreseen(run, made).total
        off = said / seen.seconds - 1.0
        print(f"  predicted {word}: {said * 1e3:.4g} ms ({off:+.1%})")
    cluster.write(replace(after, source=f"{before.source}; calibrated by {folder.name}"), path)
    print(f"Written: {path}")
    return 0


def folded(run: Run, seen: Seen, made: Cluster) -> Cluster:
    """The cluster with the rates of a run: first of its links, then of its devices."""
    if run.plan.world > 1:
        made = _linked(run, seen, made)
    own = {name: x for name, x in foreseen(run, made).parts.items() if name not in LINKS}
    factor = max(seen.seconds - seen.exposed, 0.05 * seen.seconds) / max(sum(own.values()), 1e-9)
    return scaled(made, _sane(factor))


def _linked(run: Run, seen: Seen, made: Cluster) -> Cluster:
    """The cluster with the collectives of a run."""
    usual = 1.0
    said = foreseen(run, made)
    parts = sum(_link_parts(said).values())
    if parts > 0.0 and seen.exposed > 0.0:
        usual = _sane(seen.exposed / parts)
    factors = {key: _sane(_factor(key, calls, made)) for key, calls in seen.calls.items()}
    mean = median(factors.values()) if factors else usual
    rows = tuple(_slower(row, factors.get((row.op, row.size), mean)) for row in made.collectives)
    link, network = (_lame(one, mean) for one in (made.link, made.network))
    return replace(made, collectives=rows, link=link, network=network)


def _link_parts(said: Prediction) -> dict[str, float]:
    return {name: said.parts.get(name, 0.0) for name in LINKS}


def _factor(key: tuple[str, int], calls: list[tuple[int, float]], made: Cluster) -> float:
    """Seconds of calls over what the nearest row of the cluster says of them."""
    op, size = key
    rows = [row for row in made.collectives if row.op == op and row.size == size]
    if not rows:
        return 1.0
    row = rows[-1]
    said = sum(row.latency + wire(op, size, whole) / row.bandwidth for whole, _ in calls)
    return sum(seconds for _, seconds in calls) / max(said, 1e-12)


def _slower(row: Collective, factor: float) -> Collective:
    return replace(row, latency=row.latency * factor, bandwidth=row.bandwidth / factor)


def _lame(link: Link, factor: float) -> Link:
    return replace(link, bandwidth=link.bandwidth / factor, latency=link.latency * factor)


def _sane(factor: float) -> float:
    if not math.isfinite(factor) or not 1.0 / MOST <= factor <= MOST:
        raise PlanError(
            f"The run took {factor:.3g} times as long as predicted. A machine is not that far from "
            "its file. Give the cluster that the run was on, or measure it."
        )
    return factor


# ---- a run's files ----------------------------------------------------------------------


def read(folder: Path, run: Run) -> Seen:
    """The median step of a run, and the calls of its trace if it has one."""
    path = folder / "metrics.jsonl"
    try:
        rows = [json.loads(line) for line in safe_files.read_text(path).splitlines()]
    except (OSError, ValueError) as error:
        raise PlanError(
            f"{path} cannot be read: {error!s:.100}. A run writes its steps there. Give the "
            "directory of a run."
        ) from None
    rows = [row for row in rows if "seconds" in row][WARM:]
    if len(rows) < LEAST - WARM:
        raise PlanError(
            f"{folder} has {len(rows) + WARM} steps. The first {WARM} warm up, and a median needs "
            f"some. Use a run of at least {LEAST} steps."
        )
    seconds = median(float(row["seconds"]) for row in rows)
    exposed = median(float(row.get("exposed_communication_seconds") or 0.0) for row in rows)
    return Seen(seconds, min(exposed, seconds), calls_of(folder, run))


def calls_of(folder: Path, run: Run) -> dict[tuple[str, int], list[tuple[int, float]]]:
    """Calls of a trace by operation and size of the group; of several ranks the shortest each."""
    ranks: list[dict[tuple[str, str], list[tuple[int, float]]]] = []
    for path in sorted(folder.glob("trace-rank*.json")):
        table = json.loads(safe_files.read_text(path, limit=TRACE))
        ranks.append(_calls(table))
    found: dict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
    for axis, op in {key for one in ranks for key in one}:
        size = math.prod(getattr(run.plan, name) for name in axis.split("·") if name in AXES)
        several = [one[axis, op] for one in ranks if (axis, op) in one]
        for together in zip(*several, strict=False):  # the same call as each rank saw it
            found[op, size].append((together[0][0], min(seconds for _, seconds in together)))
    return {key: calls for key, calls in found.items() if key[1] > 1}


def _calls(table: Mapping[str, Any]) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Bytes and seconds of the calls of one rank, by axis and operation, in their order."""
    entries = table.get("traceEvents", [])
    lanes = {e["tid"]: e["args"]["name"] for e in entries if e.get("name") == "thread_name"}
    found: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for entry in entries:
        if entry.get("ph") == "X" and entry["cat"] != "compute":
            row = (int(entry["args"]["bytes"]), float(entry["dur"]) / 1e6)
            found[lanes[entry["tid"]], entry["cat"]].append(row)
    return found
