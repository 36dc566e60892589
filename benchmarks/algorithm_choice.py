"""Scores the choice of algorithms of collectives from timings published with PCCL.

Usage: python benchmarks/algorithm_choice.py GIVEN.csv [--score KEPT.csv] [--folds 5] [--seeds 10]

Both files have the columns machine, set, op, method, gpus, mebibytes, milliseconds. Each (machine,
set, op) has its own model, fitted to GIVEN. Its choices are scored on the cells (gpus, mebibytes)
of KEPT that have times of all methods; without KEPT, on cells of GIVEN that are left out, `folds`
times for each of `seeds` random divisions. Regret is the time of the chosen method over that of the
fastest: geometric mean, and maximum. `margin` is the choice of a run, which uses the vendor's
library (`nccl`) unless another method is 5% faster.

The timings are in github.com/axonn-ai/sc2025-pccl-reproducer, branch experimental.
"""

from __future__ import annotations

import csv
import math
import random
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from script_parser import ScriptParser

from ranvier.planner.algorithm_choice import NATIVE, TimingModel
from ranvier.planner.cluster import CollectiveTiming

VENDOR = "nccl"
CHOICES = ("model", "margin", "vendor", "best single")
LIMITS = (1.04, 3.0)
"""Largest geometric mean and largest maximum of the regret of the model."""

SetName = tuple[str, str, str]
"""Machine, set, operation."""
Cell = tuple[int, float]
"""GPUs and MiB."""
Cells = Mapping[Cell, Mapping[str, float]]
"""Seconds by method."""


def read_cells(path: Path) -> dict[SetName, Cells]:
    """Returns the times of each set of a file."""
    found: dict[SetName, dict[Cell, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            cells = found[row["machine"], row["set"], row["op"]]
            cell = (int(row["gpus"]), float(row["mebibytes"]))
            cells[cell][row["method"]] = float(row["milliseconds"]) * 1e-3
    return dict(found)


def list_methods(cells: Cells) -> list[str]:
    """Returns all methods of a set."""
    return sorted({method for times in cells.values() for method in times})


def fit_model(cells: Cells) -> TimingModel:
    """Fits the model of a set. The number of nodes is not in the file."""
    return TimingModel.fit(
        CollectiveTiming("", _algorithm(method), gpus, 1, round(mebibytes * 2**20), seconds)
        for (gpus, mebibytes), times in cells.items()
        for method, seconds in times.items()
    )


def _algorithm(method: str) -> str:
    return NATIVE if method == VENDOR else method


def choose_methods(given: Cells, cells: Iterable[Cell]) -> Iterator[dict[str, str]]:
    """Yields the algorithm that each of CHOICES takes for each cell, from the given times."""
    model = fit_model(given)
    algorithms = [_algorithm(method) for method in list_methods(given)]
    complete = [times for times in given.values() if len(times) == len(algorithms)]
    single = min(
        algorithms,
        key=lambda name: fmean(
            math.log(seconds)
            for times in complete
            for method, seconds in times.items()
            if _algorithm(method) == name
        ),
    )
    for gpus, mebibytes in cells:
        num_bytes = mebibytes * 2**20
        ranked = model.rank_algorithms(
            "", size=gpus, nodes=1, num_bytes=num_bytes, candidates=algorithms
        )
        taken = model.choose("", size=gpus, nodes=1, num_bytes=num_bytes, candidates=algorithms)
        yield dict(zip(CHOICES, (next(iter(ranked)), taken, NATIVE, single), strict=True))


def score_choices(given: Cells, kept: Cells, methods: Sequence[str]) -> dict[str, list[float]]:
    """Returns the regrets of each of CHOICES on the kept cells with times of all methods."""
    complete = {cell: times for cell, times in kept.items() if len(times) == len(methods)}
    regrets: dict[str, list[float]] = {name: [] for name in CHOICES}
    for times, chosen in zip(complete.values(), choose_methods(given, complete), strict=True):
        seconds = {_algorithm(method): x for method, x in times.items()}
        for name, algorithm in chosen.items():
            regrets[name].append(seconds[algorithm] / min(seconds.values()))
    return regrets


def divide_cells(cells: Cells, folds: int, seed: int) -> Iterator[tuple[Cells, Cells]]:
    """Yields `folds` divisions of the cells into those given and those kept."""
    names = sorted(cells)
    random.Random(seed).shuffle(names)
    for fold in range(folds):
        kept = set(names[fold::folds])
        yield (
            {cell: times for cell, times in cells.items() if cell not in kept},
            {cell: times for cell, times in cells.items() if cell in kept},
        )


def score_files(
    given: Mapping[SetName, Cells], kept: Mapping[SetName, Cells]
) -> dict[SetName, dict[str, list[float]]]:
    """Returns the regrets on the kept cells of each set that has several methods."""
    found = {}
    for name, cells in given.items():
        methods = list_methods({**kept.get(name, {}), **cells})
        if VENDOR in methods and len(methods) > 1 and name in kept:
            found[name] = score_choices(cells, kept[name], methods)
    return found


def cross_validate(
    given: Mapping[SetName, Cells], folds: int, seed: int
) -> dict[SetName, dict[str, list[float]]]:
    """Returns the regrets on cells that are left out of the given ones."""
    found: dict[SetName, dict[str, list[float]]] = {}
    for name, cells in given.items():
        methods = list_methods(cells)
        if VENDOR not in methods or len(methods) < 2:
            continue
        found[name] = {choice: [] for choice in CHOICES}
        for some, rest in divide_cells(cells, folds, seed):
            for choice, regrets in score_choices(some, rest, methods).items():
                found[name][choice] += regrets
    return found


def merge_regrets(several: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Returns the regrets of several sets as one."""
    merged: dict[str, list[float]] = {name: [] for name in CHOICES}
    for regrets in several:
        for name in CHOICES:
            merged[name] += regrets[name]
    return merged


def geometric_mean(regrets: Sequence[float]) -> float:
    """Returns the geometric mean."""
    return math.exp(fmean(map(math.log, regrets)))


def format_regrets(name: str, regrets: Mapping[str, Sequence[float]]) -> str:
    """Formats the regrets of a set as a line of the table."""
    cells = [f"{geometric_mean(regrets[one]):7.3f} ({max(regrets[one]):6.2f})" for one in CHOICES]
    return f"{name:44s}{len(regrets['model']):6d}  " + "  ".join(cells)


def write_toy_timings(path: Path) -> None:
    """Writes times of two methods: one starts faster, the other one has more bandwidth."""
    rows = [
        ("toy", "toy", op, method, gpus, mebibytes, start * gpus + mebibytes / bandwidth)
        for op in ("all-gather", "reduce-scatter")
        for method, start, bandwidth in ((VENDOR, 0.02, 40.0), ("ring", 0.05, 80.0))
        for gpus in (4, 8, 16, 32)
        for mebibytes in (1.0, 4.0, 16.0, 64.0, 256.0)
    ]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("machine", "set", "op", "method", "gpus", "mebibytes", "milliseconds"))
        writer.writerows(rows)


def main(arguments: Sequence[str]) -> int:
    """Prints the table; returns 1 if the regret of the model is above LIMITS."""
    parser = ScriptParser(__doc__, smoke="{folder}/timings.csv --folds 2 --seeds 1")
    parser.add_argument("given", type=Path)
    parser.add_argument("--score", type=Path)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=10)
    options = parser.parse_args(arguments)
    if options.smoke:
        write_toy_timings(options.given)
    given = read_cells(options.given)
    if options.score:
        rounds = [score_files(given, read_cells(options.score))]
    else:
        rounds = [cross_validate(given, options.folds, seed) for seed in range(options.seeds)]
    print(
        f"{'regret: geometric mean (maximum)':44s} cells  "
        + "  ".join(f"{x:>16s}" for x in CHOICES)
    )
    for name in rounds[0]:
        print(format_regrets(" ".join(name), merge_regrets(one[name] for one in rounds)))
    print(format_regrets("all", merge_regrets(x for one in rounds for x in one.values())))
    totals = [merge_regrets(one.values())["model"] for one in rounds]
    means = [*map(geometric_mean, totals)]
    most = max(map(max, totals))
    if len(totals) > 1:
        print(f"model, by seed: mean {min(means):.4f} to {max(means):.4f}, maximum {most:.2f}")
    passed = geometric_mean(means) <= LIMITS[0] and most <= LIMITS[1]
    print(f"{'PASS' if passed else 'FAIL'}: limits {LIMITS[0]} and {LIMITS[1]}")
    return int(not passed and not options.smoke)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
