"""Intervals by resampling runs.

Losses along one run share its noise and its errors of the law, so whole runs are drawn, with
replacement, and not rows. Refits of a law start at the fitted optimum.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ranvier.scaling.hull import HullLaw, fit_hull
from ranvier.scaling.minimize import Array
from ranvier.scaling.parametric import LawFitter, ParametricLaw
from ranvier.scaling.rows import LossTable

COVERAGE = 0.9
"""Share of resamples inside an interval."""


@dataclass(frozen=True)
class Interval:
    """Bounds that contain `COVERAGE` of the resamples."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Interval:
        """Returns the interval of values; those that are not finite are left out."""
        known = np.array([value for value in values if np.isfinite(value)])
        if not len(known):
            return cls(float("nan"), float("nan"))
        tail = 50.0 * (1.0 - COVERAGE)
        low, high = np.percentile(known, [tail, 100.0 - tail])
        return cls(float(low), float(high))

    @property
    def width(self) -> float:
        """Difference of the bounds."""
        return self.high - self.low

    def contains(self, value: float) -> bool:
        """Whether a value is inside."""
        return self.low <= value <= self.high


def draw_runs(table: LossTable, resamples: int, seed: int = 0) -> Array:
    """Returns how often each run is drawn, [resamples, runs]; each has at least two runs."""
    generator = np.random.default_rng(seed)
    present = np.unique(table.run_index)
    counts = np.zeros((resamples, len(table.runs)))
    for row in counts:
        drawn = generator.choice(present, len(present))
        # One run alone determines no law.
        while len(np.unique(drawn)) < 2:
            drawn = generator.choice(present, len(present))
        np.add.at(row, drawn, 1.0)
    return counts


def resample_law(table: LossTable, law: ParametricLaw, draws: Array) -> list[ParametricLaw]:
    """Returns the law fitted to each resample."""
    return LawFitter(law.form, table).refit(law, draws[:, table.run_index])


def resample_hull(table: LossTable, cost: str, draws: Array) -> list[HullLaw]:
    """Returns the hull laws of each resample; a run that is drawn twice counts once."""
    found = []
    for row in draws:
        inside = np.flatnonzero(row[table.run_index] > 0.0)
        found.append(fit_hull(table.select(inside), cost))
    return found
