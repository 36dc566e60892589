"""The best shape and number of tokens for a budget of FLOPs or device hours.

A parametric law is minimized over a grid of gemstone shapes; each shape spends the whole budget on
tokens. A law of (N, D) does not see the shape, so that it takes shapes with the width / depth of
the hull. Hull laws give N and D directly. Every resample gives a prescription of its own, whose
spread is the interval.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from ranvier.models.config import GEMSTONE_HEAD_DIM
from ranvier.scaling.bootstrap import Interval
from ranvier.scaling.flops import GEMSTONE_SEQ, GEMSTONE_VOCAB, FlopShape, gemstone_parameters
from ranvier.scaling.hull import HullLaw
from ranvier.scaling.laws import FittedHull, FittedLaw, ScalingLaws
from ranvier.scaling.minimize import Array
from ranvier.scaling.parametric import ParametricLaw
from ranvier.scaling.rows import LossTable

MAX_WIDTH = 2**15
MAX_DEPTH = 512
"""Largest width and depth of the shapes that are compared."""
ASPECT_TOLERANCE = 1.3
"""Shapes within this factor of a width / depth count as having it."""


class TokenCost(Protocol):
    """Cost of a token of training by shape."""

    @property
    def unit(self) -> str:
        """What a token costs."""
        ...

    def per_token(self, width: Array, depth: Array) -> Array:
        """Returns the cost per token of shapes."""
        ...


def _linear_in_depth(count: Callable[[int, int], float], width: Array, depth: Array) -> Array:
    """Returns count(width, depth) of shapes, for a count that is linear in the depth."""
    widths, place = np.unique(width, return_inverse=True)
    one, two = (np.array([count(int(w), layers) for w in widths]) for layers in (1, 2))
    found: Array = one[place] + (depth - 1.0) * (two - one)[place]
    return found


@dataclass(frozen=True)
class FlopCost:
    """FLOPs per token."""

    vocab: int = GEMSTONE_VOCAB
    seq: int = GEMSTONE_SEQ
    unit: str = "FLOPs"

    def per_token(self, width: Array, depth: Array) -> Array:
        """Returns the FLOPs per token of shapes."""

        def count(width: int, depth: int) -> float:
            shape = FlopShape.gemstone(width, depth, vocab=self.vocab, seq=self.seq)
            return shape.flops_per_token

        return _linear_in_depth(count, width, depth)


@dataclass(frozen=True)
class MeasuredTimeCost:
    """Device seconds per token as a plane in the logarithms of width and depth, from rows."""

    plane: tuple[float, float, float]
    unit: str = "device seconds"

    @classmethod
    def fit(cls, table: LossTable) -> MeasuredTimeCost:
        """Returns the least-squares plane through the times of a table."""
        width = np.log(table.column("width"))
        depth = np.log(table.column("depth"))
        seconds = np.log(table.column("device_seconds") / table.column("tokens"))
        design = np.stack([np.ones_like(width), width, depth], axis=1)
        found, *_ = np.linalg.lstsq(design, seconds, rcond=None)
        return cls((float(found[0]), float(found[1]), float(found[2])))

    def per_token(self, width: Array, depth: Array) -> Array:
        """Returns the device seconds per token of shapes."""
        first, by_width, by_depth = self.plane
        return np.exp(first + by_width * np.log(width) + by_depth * np.log(depth))


@dataclass(frozen=True)
class ShapeGrid:
    """Gemstone shapes, and what a token costs in each."""

    cost: TokenCost
    vocab: int = GEMSTONE_VOCAB

    @cached_property
    def shapes(self) -> tuple[Array, Array]:
        """Widths and depths of all shapes."""
        widths = _spread_integers(MAX_WIDTH // GEMSTONE_HEAD_DIM) * GEMSTONE_HEAD_DIM
        depths = _spread_integers(MAX_DEPTH)
        across, up = np.meshgrid(widths, depths, indexing="ij")
        return across.ravel().astype(np.float64), up.ravel().astype(np.float64)

    @cached_property
    def parameters(self) -> Array:
        """Number of parameters of all shapes."""

        def count(width: int, depth: int) -> float:
            return float(gemstone_parameters(width, depth, self.vocab))

        return _linear_in_depth(count, *self.shapes)

    @cached_property
    def token_costs(self) -> Array:
        """Cost per token of all shapes."""
        return self.cost.per_token(*self.shapes)

    def columns(self, budget: float) -> dict[str, Array]:
        """Returns the terms of a law for all shapes, each with the tokens that the budget buys."""
        width, depth = self.shapes
        return {
            "width": width,
            "depth": depth,
            "parameters": self.parameters,
            "tokens": budget / self.token_costs,
        }

    def near_aspect_ratio(self, ratio: float) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Returns which shapes have about this width / depth."""
        width, depth = self.shapes
        far = np.abs(np.log(width / depth / ratio))
        # At least the nearest shapes, if none is within the tolerance.
        found: np.ndarray[tuple[int], np.dtype[np.bool_]] = far <= max(
            np.log(ASPECT_TOLERANCE), float(far.min()) * 1.001
        )
        return found


def _spread_integers(largest: int) -> Array:
    """Integers from 1 to `largest` that grow by about 6 %."""
    return np.unique(np.round(np.geomspace(1, largest, 110))).astype(np.float64)


@dataclass(frozen=True)
class Prescription:
    """What to train with a budget, by one law."""

    law: str
    budget: float
    unit: str
    width: int
    depth: int
    parameters: float
    tokens: float
    loss: float | None
    parameters_interval: Interval
    tokens_interval: Interval
    loss_interval: Interval | None

    @property
    def size(self) -> str:
        """Name of the model."""
        return f"gemstone-{self.width}x{self.depth}"

    @property
    def is_at_limit(self) -> bool:
        """Whether a larger shape, which is not compared, may be better."""
        return self.width >= MAX_WIDTH or self.depth >= MAX_DEPTH


def prescribe(laws: ScalingLaws, grid: ShapeGrid, budget: float) -> list[Prescription]:
    """Returns the prescription of each law for a budget in the unit of the grid's cost."""
    found = []
    column = {"FLOPs": "flops", "device seconds": "device_seconds"}.get(grid.cost.unit, "")
    hull = laws.hulls.get(column)
    # Costs of the hull that are almost equal give lines too steep to follow.
    if hull is not None and all(0.0 < law(budget) < math.inf for law in hull.law.laws.values()):
        found.append(prescribe_by_hull(hull, grid, budget))
    ratio = aspect_ratio(laws)
    found += [prescribe_by_law(one, grid, budget, ratio) for one in laws.laws]
    return found


def aspect_ratio(laws: ScalingLaws) -> float:
    """Returns the width / depth for laws that do not see it: that of the hull by FLOPs."""
    if "flops" in laws.hulls:
        return laws.hulls["flops"].law.aspect_ratio
    return float(np.median(laws.table.column("width") / laws.table.column("depth")))


def best_shape(law: ParametricLaw, grid: ShapeGrid, budget: float, ratio: float) -> int:
    """Returns the index of the shape with the smallest loss."""
    loss = law.predict(grid.columns(budget))
    if "width" not in law.form.terms:
        loss = np.where(grid.near_aspect_ratio(ratio), loss, np.inf)
    return int(np.argmin(loss))


def prescribe_by_law(
    fitted: FittedLaw, grid: ShapeGrid, budget: float, ratio: float
) -> Prescription:
    """Returns the best shape of a parametric law."""
    columns = grid.columns(budget)
    best = best_shape(fitted.law, grid, budget, ratio)
    others = [best_shape(one, grid, budget, ratio) for one in fitted.resamples]
    losses = [
        float(one.predict({name: column[i] for name, column in columns.items()}))
        for one, i in zip(fitted.resamples, others, strict=True)
    ]
    return Prescription(
        law=f"law of {fitted.form.name}",
        budget=budget,
        unit=grid.cost.unit,
        width=int(columns["width"][best]),
        depth=int(columns["depth"][best]),
        parameters=float(columns["parameters"][best]),
        tokens=float(columns["tokens"][best]),
        loss=float(fitted.law.predict({name: column[best] for name, column in columns.items()})),
        parameters_interval=Interval.of(float(columns["parameters"][i]) for i in others),
        tokens_interval=Interval.of(float(columns["tokens"][i]) for i in others),
        loss_interval=Interval.of(losses),
    )


def prescribe_by_hull(fitted: FittedHull, grid: ShapeGrid, budget: float) -> Prescription:
    """Returns the shape nearest to the sizes of the hull laws."""
    laws = fitted.law.laws
    index = _nearest_shape(fitted.law, grid, budget)
    width, depth = grid.shapes
    return Prescription(
        law="hull",
        budget=budget,
        unit=grid.cost.unit,
        width=int(width[index]),
        depth=int(depth[index]),
        parameters=laws["parameters"](budget),
        tokens=laws["tokens"](budget),
        loss=None,
        parameters_interval=fitted.size_interval("parameters", budget),
        tokens_interval=fitted.size_interval("tokens", budget),
        loss_interval=None,
    )


def _nearest_shape(law: HullLaw, grid: ShapeGrid, budget: float) -> int:
    """The shape with about the parameters of the law, and the width / depth nearest to it."""
    width, depth = grid.shapes
    wanted = law.laws["width"](budget) / law.laws["depth"](budget)
    far = 4.0 * np.log(grid.parameters / law.laws["parameters"](budget)) ** 2
    far += np.log(width / depth / wanted) ** 2
    return int(np.argmin(far))


def loss_by_aspect_ratio(
    law: ParametricLaw, grid: ShapeGrid, budget: float, ratios: Sequence[float]
) -> list[float]:
    """Returns the smallest loss of shapes with each width / depth.

    ratios: bounds of bins.
    """
    width, depth = grid.shapes
    loss = law.predict(grid.columns(budget))
    found = []
    for low, high in itertools.pairwise(ratios):
        inside = (width / depth >= low) & (width / depth < high)
        found.append(float(loss[inside].min()) if inside.any() else float("nan"))
    return found
