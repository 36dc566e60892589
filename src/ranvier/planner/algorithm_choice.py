"""Choice of the algorithm of a collective, learned from measured timings.

For each operation and algorithm, log time is a Gaussian process over log2 ranks, log2 nodes and
log2 bytes (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, equations 2.25
and 5.12):

    log seconds(x) = mean + k(x)ᵀ (K + noise · I)⁻¹ (log seconds - mean)

The kernel is a Matérn kernel of order 3/2 plus a linear one, so that predictions follow the
measurements where there are some and a power law between and outside of them. Its constants are
fixed: with the timings published with PCCL (benchmarks/algorithm_choice.py), fitting them for each
algorithm gave worse choices. Groups inside a node and groups of several nodes are learned
separately.

Some backends are erratic: neighbouring sizes differ by a factor of 100. Algorithms are compared by
log time plus a fraction of the error of their own leave-one-out predictions, so that among almost
equal ones the predictable one is chosen.

`choose_algorithms` makes the choice for a group of a cluster, once for both the planner, which
prices what a run will take, and the run (`comm.algorithm_table`). Written in plain Python, because
planning imports neither numpy nor torch; a curve of 50 timings is fitted in about 20 ms.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import mul

from ranvier.comm.algorithm_table import (
    GRID_BYTES,
    NATIVE,
    TABLE_OPERATIONS,
    AlgorithmTable,
    AxisRules,
    MeasuredRule,
    Thresholds,
    available_algorithms,
    choose_by_bytes,
    is_algorithm,
)
from ranvier.comm.algorithms.schedule import AxisShape
from ranvier.planner.cluster import Cluster, CollectiveTiming

MARGIN = 0.05
"""An algorithm is chosen only if it takes at least this share less time than `native`."""
RANKS_SCALE = 2.0
"""Distance in log2 ranks, and in log2 nodes, over which times are similar."""
BYTES_SCALE = 3.0
"""Distance in log2 bytes over which times are similar."""
NOISE = 0.1
"""Variance of a timing, relative to that of the curve."""
CAUTION = 0.15
"""Share of the leave-one-out error that is added to log time in comparisons."""

Point = tuple[float, float, float]
"""log2 of ranks, nodes and bytes, divided by their scales."""


def _scaled_point(size: int, nodes: int, num_bytes: float) -> Point:
    return (
        math.log2(size) / RANKS_SCALE,
        math.log2(nodes) / RANKS_SCALE,
        math.log2(max(num_bytes, 1.0)) / BYTES_SCALE,
    )


@dataclass(frozen=True)
class TimingCurve:
    """Time of one algorithm of one operation."""

    points: tuple[Point, ...]
    center: Point
    level: float
    """log seconds of the linear part at the center."""
    slope: Point
    weights: tuple[float, ...]
    smallest: float
    """Bytes of the smallest and of the largest tensor, as the third number of a point."""
    largest: float
    error: float
    """Root mean square of the leave-one-out errors of log seconds."""

    @classmethod
    def fit(cls, points: Sequence[Point], log_seconds: Sequence[float]) -> TimingCurve:
        """Fits a curve to at least one timing."""
        count = len(points)
        mean = sum(log_seconds) / count
        center = _combine_points(points, [1.0 / count] * count)
        shifted = [(x - center[0], y - center[1], z - center[2]) for x, y, z in points]
        covariance = [
            [1.0 + sum(map(mul, p, q)) + _matern(math.dist(p, q)) for q in shifted] for p in shifted
        ]
        for i in range(count):
            covariance[i][i] += NOISE
        columns = _inverse_cholesky_factor(covariance)
        # K⁻¹ = L⁻ᵀ L⁻¹, applied to the residuals from right to left.
        half = [0.0] * count
        for column, value in zip(columns, log_seconds, strict=True):
            half = [x + (value - mean) * y for x, y in zip(half, column, strict=True)]
        weights = tuple(sum(map(mul, column, half)) for column in columns)
        # Leave-one-out errors: weights divided by the diagonal of K⁻¹.
        errors = [w / sum(map(mul, c, c)) for w, c in zip(weights, columns, strict=True)]
        return cls(
            points=tuple(points),
            center=center,
            level=mean + sum(weights),
            slope=_combine_points(shifted, weights),
            weights=weights,
            smallest=min(point[2] for point in points),
            largest=max(point[2] for point in points),
            error=math.sqrt(sum(map(mul, errors, errors)) / count),
        )

    def log_seconds(self, point: Point) -> float:
        """Returns the predicted logarithm of the time."""
        # Fewer bytes than measured take as long, and more bytes take longer in proportion.
        size = min(max(point[2], self.smallest), self.largest)
        found = self.level + max(point[2] - size, 0.0) * BYTES_SCALE * math.log(2.0)
        inside = (point[0], point[1], size)
        for slope, x, center in zip(self.slope, inside, self.center, strict=True):
            found += slope * (x - center)
        for one, weight in zip(self.points, self.weights, strict=True):
            found += weight * _matern(math.dist(inside, one))
        return found


def _matern(distance: float) -> float:
    """Returns the Matérn covariance of order 3/2: (1 + √3 d) exp(-√3 d)."""
    x = math.sqrt(3.0) * distance
    return (1.0 + x) * math.exp(-x)


def _combine_points(points: Sequence[Point], weights: Sequence[float]) -> Point:
    """Returns the weighted sum of points."""
    x, y, z = (sum(map(mul, column, weights)) for column in zip(*points, strict=True))
    return x, y, z


def _inverse_cholesky_factor(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    """Returns the columns of L⁻¹ of a positive definite matrix L Lᵀ."""
    count = len(matrix)
    lower: list[list[float]] = []
    for i in range(count):
        row: list[float] = []
        for j in range(i):
            row.append((matrix[i][j] - sum(map(mul, row, lower[j]))) / lower[j][j])
        row.append(math.sqrt(matrix[i][i] - sum(map(mul, row, row))))
        lower.append(row)
    columns = []
    for j in range(count):
        column = [0.0] * j + [1.0 / lower[j][j]]
        for i in range(j + 1, count):
            column.append(-sum(map(mul, lower[i], column)) / lower[i][i])
        columns.append(column)
    return columns


CurveKey = tuple[str, str, bool]
"""Operation, algorithm, and whether the group covers several nodes."""


@dataclass(frozen=True, eq=False)
class TimingModel:
    """Times of collectives by operation, algorithm, group and bytes."""

    rows: Mapping[CurveKey, Sequence[CollectiveTiming]]
    speedups: Mapping[CurveKey, Sequence[tuple[Point, float]]]
    """Time of `native` over that of the algorithm, wherever both were measured."""
    curves: dict[CurveKey, TimingCurve] = field(default_factory=dict)
    """Curves that were used so far."""

    @classmethod
    def fit(cls, timings: Iterable[CollectiveTiming]) -> TimingModel:
        """Returns the model of some timings. Curves are fitted when they are first used."""
        rows = defaultdict(list)
        for row in _with_most_groups(timings):
            rows[row.op, row.algorithm, row.nodes > 1].append(row)
        speedups = {
            key: _measured_speedups(rows.get((key[0], NATIVE, key[2]), []), several)
            for key, several in rows.items()
        }
        return cls(rows, speedups)

    def algorithms(self, op: str, nodes: int) -> list[str]:
        """Returns the algorithms with timings for an operation of groups that cover `nodes`."""
        return [name for one, name, across in self.rows if (one, across) == (op, nodes > 1)]

    def seconds(
        self, op: str, algorithm: str, *, size: int, nodes: int, num_bytes: float
    ) -> float | None:
        """Returns the predicted time of a collective; None if there are no timings for it."""
        curve = self._find_curve(op, algorithm, nodes)
        if curve is None:
            return None
        return math.exp(curve.log_seconds(_scaled_point(size, nodes, num_bytes)))

    def rank_algorithms(
        self, op: str, *, size: int, nodes: int, num_bytes: float, candidates: Iterable[str]
    ) -> dict[str, float]:
        """Returns the candidates that were measured with their predicted seconds, best first."""
        point = _scaled_point(size, nodes, num_bytes)
        found = []
        for name in candidates:
            curve = self._find_curve(op, name, nodes)
            if curve is not None:
                log_seconds = curve.log_seconds(point)
                found.append((log_seconds + CAUTION * curve.error, name, log_seconds))
        return {name: math.exp(log_seconds) for _, name, log_seconds in sorted(found)}

    def choose(
        self,
        op: str,
        *,
        size: int,
        nodes: int,
        num_bytes: float,
        candidates: Iterable[str],
        margin: float = MARGIN,
    ) -> str:
        """Returns the algorithm to use: `native` unless another one is faster by `margin`.

        It must be predicted to be, and must have been at the nearest point at which it and `native`
        were measured.
        """
        ranked = self.rank_algorithms(
            op, size=size, nodes=nodes, num_bytes=num_bytes, candidates={NATIVE, *candidates}
        )
        if NATIVE not in ranked:
            return NATIVE
        point = _scaled_point(size, nodes, num_bytes)
        for name, seconds in ranked.items():
            if name == NATIVE:
                break
            measured = self._nearest_speedup((op, name, nodes > 1), point)
            if min(ranked[NATIVE] / seconds, measured) >= 1.0 + margin:
                return name
        return NATIVE

    def _find_curve(self, op: str, algorithm: str, nodes: int) -> TimingCurve | None:
        key = (op, algorithm, nodes > 1)
        if key not in self.rows:
            return None
        if key not in self.curves:
            points = [_scaled_point(row.size, row.nodes, row.bytes) for row in self.rows[key]]
            self.curves[key] = TimingCurve.fit(
                points, [math.log(row.seconds) for row in self.rows[key]]
            )
        return self.curves[key]

    def _nearest_speedup(self, key: CurveKey, point: Point) -> float:
        # Between two equally near points the smaller speedup counts.
        return min(
            ((round(math.dist(point, one), 9), speedup) for one, speedup in self.speedups[key]),
            default=(0.0, math.inf),
        )[1]


def _with_most_groups(timings: Iterable[CollectiveTiming]) -> list[CollectiveTiming]:
    """Returns the timings with the most concurrent groups, as all groups of a run communicate."""
    rows = [*timings]
    most: dict[tuple[str, str, int, int, int], int] = {}
    for row in rows:
        key = (row.op, row.algorithm, row.size, row.nodes, row.bytes)
        most[key] = max(most.get(key, 0), row.groups)
    return [
        row
        for row in rows
        if row.groups == most[row.op, row.algorithm, row.size, row.nodes, row.bytes]
    ]


def _measured_speedups(
    native: Sequence[CollectiveTiming], rows: Sequence[CollectiveTiming]
) -> list[tuple[Point, float]]:
    """Returns the points at which both were measured, and the ratios of their times."""
    reference = {(row.size, row.nodes, row.bytes): row.seconds for row in native}
    return [
        (
            _scaled_point(row.size, row.nodes, row.bytes),
            reference[row.size, row.nodes, row.bytes] / row.seconds,
        )
        for row in rows
        if (row.size, row.nodes, row.bytes) in reference
    ]


# ---- choices on a cluster ---------------------------------------------------------------


@lru_cache(maxsize=64)
def fit_timing_model(cluster: Cluster) -> TimingModel:
    """Returns the model of the timings of a cluster."""
    return TimingModel.fit(cluster.timings)


@lru_cache(maxsize=10_000)
def choose_algorithms(cluster: Cluster, op: str, size: int, nodes: int) -> Thresholds:
    """Returns the algorithms that a run takes for an operation of a group, by bytes.

    Empty if nothing but `native` was measured for such groups.
    """
    model = fit_timing_model(cluster)
    # Files may have algorithms of another version of the package.
    names = [name for name in model.algorithms(op, nodes) if is_algorithm(name)]
    if {*names} <= {NATIVE} or NATIVE not in names:
        return ()
    shape = AxisShape.of_nodes([rank * nodes // size for rank in range(size)])
    usable = available_algorithms(names, op, shape, on_host=bool(cluster.cores))
    return choose_by_bytes(
        lambda num_bytes: model.choose(
            op, size=size, nodes=nodes, num_bytes=num_bytes, candidates=usable
        )
    )


def predict_speedup(
    cluster: Cluster, op: str, *, size: int, nodes: int, num_bytes: float
) -> tuple[str, float]:
    """Returns the algorithm that a run takes, and the time of `native` over its own."""
    rows = _list_speedups(cluster, op, size, nodes)
    if not rows:
        return NATIVE, 1.0
    # Linear in log time between the sizes at which the choice is made.
    place = math.log2(num_bytes / GRID_BYTES[0]) if num_bytes > GRID_BYTES[0] else 0.0
    index = min(int(place), len(rows) - 1)
    name, start, end = rows[index]
    return name, math.exp(start + (end - start) * min(place - index, 1.0))


@lru_cache(maxsize=10_000)
def _list_speedups(
    cluster: Cluster, op: str, size: int, nodes: int
) -> tuple[tuple[str, float, float], ...]:
    """Returns the algorithm for each of GRID_BYTES, and its log speedups there and at the next."""
    thresholds = choose_algorithms(cluster, op, size, nodes)
    if not thresholds:
        return ()
    model = fit_timing_model(cluster)
    rules = AxisRules({op: thresholds})
    found = []
    for num_bytes in GRID_BYTES:
        name = rules.algorithm(op, num_bytes)
        ends = [
            model.rank_algorithms(
                op, size=size, nodes=nodes, num_bytes=each, candidates=[NATIVE, name]
            )
            for each in (num_bytes, 2 * num_bytes)
        ]
        start, end = (math.log(times[NATIVE] / times[name]) for times in ends)
        found.append((name, start, end))
    return tuple(found)


def restrict_algorithms(cluster: Cluster, setting: str) -> Cluster:
    """Returns the cluster with the algorithms that a run with this `comm.algorithm` may take.

    The planner prices each collective with the fastest of them, whatever its axis, so algorithms
    that the setting forces are priced as native where they are slower than that.
    """
    table = AlgorithmTable.parse(setting)
    if table.uses_auto:
        return cluster
    names = {NATIVE, table.default, *(name for _, name in table.axes)}
    return replace(
        cluster,
        collectives=tuple(row for row in cluster.collectives if row.algorithm in names),
        timings=tuple(row for row in cluster.timings if row.algorithm in names),
    )


def add_measured_rules(
    table: AlgorithmTable,
    cluster: Cluster | None,
    groups: Iterable[tuple[int, int]],
    *,
    host: str = "",
) -> AlgorithmTable:
    """Returns the table with what `auto` takes by the timings of a cluster, and why if it cannot.

    groups: ranks and nodes of the axes of a run. host: name of this host, which must be that of the
    cluster; empty if the user has named the cluster.
    """
    if cluster is None:
        return table.with_measured([], source="default; `ranvier measure` finds the fastest")
    if host and cluster.name != host:
        reason = f"default; the timings are of {cluster.name}, not of {host}"
        return table.with_measured([], source=reason)
    rules = [
        MeasuredRule(op, size, nodes, choose_algorithms(cluster, op, size, nodes))
        for size, nodes in sorted({*groups})
        for op in TABLE_OPERATIONS
        if size > 1 and choose_algorithms(cluster, op, size, nodes)
    ]
    if rules:
        return table.with_measured(rules, source=f"measured on {cluster.name}")
    reason = f"default; {cluster.name} has no timings, `ranvier measure` adds them"
    return table.with_measured([], source=reason)


def list_groups(world_size: int, ranks_per_node: int) -> list[tuple[int, int]]:
    """Returns ranks and nodes of the axes that a grid may have, equally many per node."""
    most_nodes = -(-world_size // ranks_per_node)
    return [
        (size, nodes)
        for size in range(2, world_size + 1)
        if world_size % size == 0
        for nodes in range(1, min(size, most_nodes) + 1)
        if size % nodes == 0 and size // nodes <= ranks_per_node
    ]
