"""Laws from the lower convex hull of losses (approach 1 of Hoffmann et al. 2022, as in Gemstones).

In the plane of log cost and log loss, the rows on the lower left hull are the best that a cost can
buy. Straight lines through their sizes give power laws such as N ~ C^x. The cost is FLOPs, or
device time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ranvier.scaling.minimize import Array
from ranvier.scaling.rows import LossTable

SIZES = ("parameters", "tokens", "width", "depth")
"""Columns that laws are fitted to."""


@dataclass(frozen=True)
class PowerLaw:
    """y = exp(intercept) · x^exponent."""

    exponent: float
    intercept: float

    def __call__(self, x: float) -> float:
        """Returns y; infinite if it is too large for a number."""
        try:
            return math.exp(self.intercept + self.exponent * math.log(x))
        except OverflowError:
            return math.inf

    @classmethod
    def fit(cls, x: Array, y: Array) -> PowerLaw:
        """Returns the least-squares line through the logarithms."""
        across = np.log(x)
        up = np.log(y)
        centred = across - across.mean()
        spread = float(centred @ centred)
        if spread <= 0.0:
            return cls(math.nan, math.nan)
        exponent = float(centred @ up) / spread
        return cls(exponent, float(up.mean()) - exponent * float(across.mean()))


@dataclass(frozen=True)
class HullLaw:
    """The rows on the hull, and the laws through them."""

    cost: str
    """Column of the cost: flops or device_seconds."""
    rows: tuple[int, ...]
    laws: dict[str, PowerLaw]
    """By size: parameters, tokens, width, depth."""
    aspect_ratio: float
    """Median of width / depth on the hull."""


def lower_hull(cost: Sequence[float], loss: Sequence[float]) -> list[int]:
    """Returns the rows on the lower left convex hull of (log cost, log loss), loss falling."""
    x = [math.log(value) for value in cost]
    y = [math.log(value) for value in loss]
    found: list[int] = []
    for i in sorted(range(len(x)), key=lambda k: (x[k], y[k])):
        # The last point stays if it is below the line from the one before it to this one.
        while len(found) > 1 and _turn(x, y, found[-2], found[-1], i) <= 0.0:
            found.pop()
        found.append(i)
    falling: list[int] = []
    for i in found:
        if not falling or y[i] < y[falling[-1]]:
            falling.append(i)
    return falling


def _turn(x: Sequence[float], y: Sequence[float], a: int, b: int, c: int) -> float:
    """Cross product of ab and ac: positive for a left turn."""
    return (x[b] - x[a]) * (y[c] - y[a]) - (y[b] - y[a]) * (x[c] - x[a])


def fit_hull(table: LossTable, cost: str = "flops") -> HullLaw:
    """Returns the laws of the rows on the hull."""
    spent = table.column(cost)
    rows = lower_hull(spent.tolist(), table.loss.tolist())
    laws = {name: PowerLaw.fit(spent[rows], table.column(name)[rows]) for name in SIZES}
    ratio = table.column("width")[rows] / table.column("depth")[rows]
    return HullLaw(cost, tuple(rows), laws, float(np.median(ratio)))
