"""Metrics of programs: the expected best of k out of N samples of a task.

With values in ascending order v₁ ≤ … ≤ v_N, the expected best of k drawn without replacement is

    best@k = Σ_j C(j-1, k-1) / C(N, k) · v_j

because v_j is the best of C(j-1, k-1) of the C(N, k) choices. pass@k and build@k have values 0 and
1. speedup_n@k has the time of the best sequential program divided by the time of the sample on n
processes (0 for a sample that failed), speedup_max@k has the best over n, and efficiency_n@k is
speedup_n@k / n. Several tasks are averaged. (ParEval, Nichols et al. 2024. Its published code sorts
in the opposite order, which is correct only for k = 1.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranvier.errors import DataError, PlanError
from ranvier.eval.jsonl import read_json_lines


@dataclass(frozen=True, kw_only=True)
class CodeSample:
    """A program that was built and run."""

    task: str
    built: bool
    passed: bool
    seconds: float = 0.0
    baseline: float | None = None
    """Seconds of the best sequential program; None if unknown."""
    processes: int = 1
    sample: int = -1
    """Index among the programs of the task; -1 means the next one."""

    @property
    def speedup(self) -> float | None:
        """Baseline divided by seconds; 0 if it failed, None without a baseline."""
        if self.baseline is None:
            return None
        if self.passed:
            return self.baseline / self.seconds
        return 0.0


def best_at_k(values: Sequence[float], k: int) -> float:
    """Returns the expected maximum of k of the values: the mean for k = 1, the maximum for k =
    N."""
    count = len(values)
    assert 1 <= k <= count, (k, count)
    # Binomials would overflow. Weights are computed relative to the weight of the largest value,
    # k / N; the next smaller follows from C(j-2, k-1) / C(j-1, k-1) = (j - k) / (j - 1).
    terms = []
    weight = 1.0
    for rank, value in zip(range(count, k - 1, -1), sorted(values, reverse=True), strict=False):
        terms.append(weight * value)
        weight *= (rank - k) / (rank - 1) if rank > 1 else 0.0
    return math.fsum(terms) / (count / k)


def pass_at_k(count: int, good: int, k: int) -> float:
    """Returns the probability that k of `count` samples contain a good one.

    1 - C(n - c, k) / C(n, k)
    """
    assert 0 <= good <= count and 1 <= k <= count, (count, good, k)
    if count - good < k:
        return 1.0
    if k == 1:
        return good / count
    # The ratio of binomials is Π (1 - k / i). A sum of logarithms neither overflows nor cancels.
    return -math.expm1(math.fsum(math.log1p(-k / i) for i in range(count - good + 1, count + 1)))


def compute_metrics(
    samples: Iterable[CodeSample], ks: Sequence[int]
) -> dict[str, dict[str, float]]:
    """Returns each metric by name and k, averaged over tasks; speedups only of tasks with a
    baseline."""
    tasks = _group_samples(samples)
    found: dict[str, dict[str, float]] = {}
    counts = sorted({n for runs in tasks.values() for n in runs})
    for n in counts:
        here = {task: list(runs[n].values()) for task, runs in tasks.items() if n in runs}
        _check_k(here, ks)
        # The number of processes is part of the name only if there are parallel samples.
        label = "" if counts == [1] else f"_{n}"
        for k in ks:
            key = str(k)
            wholes = here.values()
            row = {
                f"build{label}": [pass_at_k(len(s), sum(x.built for x in s), k) for s in wholes],
                f"pass{label}": [pass_at_k(len(s), sum(x.passed for x in s), k) for s in wholes],
                f"speedup_{n}": [best_at_k(v, k) for s in wholes if (v := _task_speedups(s))],
            }
            row[f"efficiency_{n}"] = [value / n for value in row[f"speedup_{n}"]]
            _add_means(found, row, key)
    for k in ks if len(counts) > 1 else ():
        best = [v for runs in tasks.values() if (v := _best_speedups(runs)) and len(v) >= k]
        _add_means(found, {"speedup_max": [best_at_k(v, k) for v in best]}, str(k))
    return found


def _add_means(
    found: dict[str, dict[str, float]], row: Mapping[str, Sequence[float]], key: str
) -> None:
    for name, values in row.items():
        if values:
            found.setdefault(name, {})[key] = math.fsum(values) / len(values)


def _group_samples(samples: Iterable[CodeSample]) -> dict[str, dict[int, dict[int, CodeSample]]]:
    """Returns samples by task, processes and index."""
    found: dict[str, dict[int, dict[int, CodeSample]]] = {}
    for one in samples:
        runs = found.setdefault(one.task, {}).setdefault(one.processes, {})
        if one.sample < 0:
            number = len(runs)
        else:
            number = one.sample
        if number in runs:
            raise DataError(
                f"Sample {number} of task {one.task!r} on {one.processes} processes occurs twice. "
                "Each sample may occur once. Remove one."
            )
        runs[number] = one
    return found


def _task_speedups(samples: Sequence[CodeSample]) -> list[float]:
    """Returns the speedups of all samples of a task; empty if one has no baseline."""
    found = [one.speedup for one in samples]
    if None not in found:
        return [value for value in found if value is not None]
    return []


def _best_speedups(runs: Mapping[int, Mapping[int, CodeSample]]) -> list[float]:
    """Returns the best speedup of each program over the numbers of processes."""
    numbers = sorted({number for some in runs.values() for number in some})
    found = []
    for number in numbers:
        values = [some[number].speedup for some in runs.values() if number in some]
        if None in values:
            return []
        found.append(max(value for value in values if value is not None))
    return found


def _check_k(tasks: Mapping[str, Sequence[CodeSample]], ks: Sequence[int]) -> None:
    least = min((len(some), task) for task, some in tasks.items())
    bad = [k for k in ks if not 1 <= k <= least[0]]
    if bad:
        raise PlanError(
            f"k={bad[0]}, but task {least[1]!r} has {least[0]} samples. k cannot exceed the "
            f"number of samples. Use k from 1 to {least[0]}."
        )


def read_samples(path: Path) -> list[CodeSample]:
    """Returns the samples of a JSONL file."""
    found = list(_parse_samples(path))
    if not found:
        raise DataError(f"{path} has no samples. Each line of JSON is one sample. Add samples.")
    return found


def _parse_samples(path: Path) -> Iterator[CodeSample]:
    for number, line, row in read_json_lines(path, "Samples"):
        found = _parse_sample(row)
        if isinstance(found, str):
            raise DataError(
                f"{path}:{number}: {line[:80]!r} is not a valid sample: {found}. It has task, "
                "built, passed (true only if built), seconds (positive if it passed and has a "
                "baseline), and optionally baseline (seconds), processes and sample. Fix the line."
            )
        yield found


def _parse_sample(row: Any) -> CodeSample | str:
    """Returns the sample of a line, or why it is invalid."""
    kinds = {"task": str, "built": bool, "passed": bool}
    if not isinstance(row, dict):
        return "it is not a JSON object"
    wrong = [f"{n}={row.get(n)!r}" for n, kind in kinds.items() if type(row.get(n)) is not kind]
    if wrong:
        return wrong[0]
    try:
        seconds = float(row.get("seconds") or 0.0)
        given = row.get("baseline")
        if given is None:
            baseline = None
        else:
            baseline = float(given)
        processes, sample = (int(row.get(n, d)) for n, d in (("processes", 1), ("sample", -1)))
    except (ValueError, TypeError, OverflowError):
        return "seconds, baseline, processes and sample must be numbers"
    if row["passed"] and not row["built"]:
        return "passed=true with built=false"
    if row["passed"] and not (0.0 <= seconds < math.inf and (seconds or baseline is None)):
        return f"seconds={seconds:g}"
    if baseline is not None and not 0.0 < baseline < math.inf:
        return f"baseline={baseline:g}"
    if processes < 1:
        return f"processes={processes}"
    return CodeSample(
        task=row["task"],
        built=row["built"],
        passed=row["passed"],
        seconds=seconds,
        baseline=baseline,
        processes=processes,
        sample=sample,
    )
