"""All laws of a table of losses, each with its resamples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ranvier.scaling.bootstrap import Interval, draw_runs, resample_hull, resample_law
from ranvier.scaling.hull import HullLaw, fit_hull
from ranvier.scaling.minimize import Array
from ranvier.scaling.parametric import LAW_FORMS, LawFitter, LawForm, ParametricLaw
from ranvier.scaling.rows import LossTable


@dataclass(frozen=True)
class FittedHull:
    """Hull laws and their resamples."""

    law: HullLaw
    resamples: tuple[HullLaw, ...]

    def exponent_interval(self, size: str) -> Interval:
        """Returns the interval of the exponent of a size against the cost."""
        return Interval.of(one.laws[size].exponent for one in self.resamples)

    def size_interval(self, size: str, cost: float) -> Interval:
        """Returns the interval of a size at a cost."""
        return Interval.of(one.laws[size](cost) for one in self.resamples if len(one.rows) > 1)


@dataclass(frozen=True)
class FittedLaw:
    """A parametric law and its resamples."""

    law: ParametricLaw
    resamples: tuple[ParametricLaw, ...]
    residuals: Array
    """log of measured over fitted loss of each row."""

    @property
    def form(self) -> LawForm:
        """The terms of the law."""
        return self.law.form

    def exponent_interval(self, term: int) -> Interval:
        """Returns the interval of the exponent of a term."""
        return Interval.of(one.exponents[term] for one in self.resamples)

    @property
    def constant_interval(self) -> Interval:
        """The interval of the irreducible loss."""
        return Interval.of(one.irreducible_loss for one in self.resamples)

    @property
    def compute_exponent_interval(self) -> Interval:
        """The interval of x in N ~ C^x."""
        return Interval.of(one.compute_exponent for one in self.resamples)


@dataclass(frozen=True)
class ScalingLaws:
    """Everything that is fitted to one table."""

    table: LossTable
    hulls: dict[str, FittedHull]
    """By cost: flops and, if all times are known, device_seconds."""
    laws: tuple[FittedLaw, ...]
    refused: dict[str, str]
    """Laws that the losses do not determine, and why."""


def fit_laws(table: LossTable, *, resamples: int = 200, seed: int = 0) -> ScalingLaws:
    """Returns all laws that a table determines."""
    draws = draw_runs(table, resamples, seed)
    costs = ("flops", "device_seconds") if table.has_seconds else ("flops",)
    hulls = {}
    refused = {}
    for cost in costs:
        hull = fit_hull(table, cost)
        if len(hull.rows) < 2:
            refused[f"hull by {cost}"] = "only one loss is on the hull"
        else:
            hulls[cost] = FittedHull(hull, tuple(resample_hull(table, cost, draws)))
    laws = []
    for form in LAW_FORMS:
        problem = form.find_problem(table)
        if problem:
            refused[form.name] = problem
            continue
        law = LawFitter(form, table).fit(seed=seed)
        again = resample_law(table, law, draws)
        residuals = np.log(table.loss / law.predict(dict(table.values)))
        laws.append(FittedLaw(law, tuple(again), residuals))
    return ScalingLaws(table, hulls, tuple(laws), refused)
