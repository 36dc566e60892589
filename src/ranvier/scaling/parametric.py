"""Parametric scaling laws: the loss as a sum of powers, one for each term, and a constant.

    L = Σ_k exp(a_k) · x_k^(-α_k) + exp(e)

with x = (N, D) as in Chinchilla, (width, depth, D) or (width, depth, N, D) as in Gemstones. The fit
minimizes the Huber loss of log L (Hoffmann et al. 2022). It begins with a wide Huber loss and
narrows it: from a random point, the narrow one alone is almost flat. Logarithms of the x are
centred, so that a coefficient and its exponent are not strongly correlated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ranvier.scaling.minimize import Array, Indices, minimize
from ranvier.scaling.rows import LossTable

HUBER_WIDTHS = (1.0, 1e-2)
"""Widths of the Huber loss before the one of the fit."""
MAX_ELEMENTS = 2**20
"""Numbers per array of a group of refits, which limits their memory."""


@dataclass(frozen=True)
class LawForm:
    """Which powers a law has, and the width of the Huber loss that fits it."""

    name: str
    terms: tuple[str, ...]
    """Columns of `LossTable`."""
    huber: float

    @property
    def num_parameters(self) -> int:
        """An exponent and a coefficient for each term, and the constant."""
        return 2 * len(self.terms) + 1

    def find_problem(self, table: LossTable) -> str:
        """Returns why a table cannot determine the law; empty if it can."""
        if len(table) < self.num_parameters:
            return f"{len(table)} losses for {self.num_parameters} parameters"
        shapes = [name for name in self.terms if name != "tokens"]
        design = np.log(np.stack([table.column(name) for name in self.terms], axis=1))
        # Every term must vary on its own: shapes must not be on one line.
        centred = design - design.mean(axis=0)
        if np.linalg.matrix_rank(centred, tol=1e-6 * max(np.abs(centred).max(), 1e-300)) < len(
            self.terms
        ):
            return f"{' and '.join(shapes)} of the runs do not vary independently"
        return ""


LAW_FORMS = (
    LawForm("parameters, tokens", ("parameters", "tokens"), 1e-4),
    LawForm("width, depth, tokens", ("width", "depth", "tokens"), 1e-4),
    LawForm("width, depth, parameters, tokens", ("width", "depth", "parameters", "tokens"), 1e-3),
)
"""The laws with 2, 3 and 4 terms."""


@dataclass(frozen=True)
class ParametricLaw:
    """A fitted law."""

    form: LawForm
    exponents: tuple[float, ...]
    """α of each term."""
    coefficients: tuple[float, ...]
    """Logarithm a of the factor of each term."""
    constant: float
    """Logarithm e of the irreducible loss."""
    objective: float = math.nan
    """Sum of the Huber losses of all rows."""

    @property
    def irreducible_loss(self) -> float:
        """The loss with infinitely many parameters and tokens."""
        return math.exp(self.constant)

    @property
    def vector(self) -> Array:
        """Exponents, coefficients and constant, one after the other."""
        return np.array([*self.exponents, *self.coefficients, self.constant])

    @classmethod
    def from_vector(cls, form: LawForm, vector: Array, objective: float) -> ParametricLaw:
        """Returns the law with these parameters."""
        count = len(form.terms)
        values = [float(x) for x in vector]
        return cls(
            form,
            tuple(values[:count]),
            tuple(values[count : 2 * count]),
            values[-1],
            float(objective),
        )

    def predict(self, columns: dict[str, Array]) -> Array:
        """Returns the loss for arrays of all terms."""
        total: Array = np.asarray(math.exp(self.constant))
        for name, power, factor in zip(
            self.form.terms, self.exponents, self.coefficients, strict=True
        ):
            total = total + np.exp(factor - power * np.log(columns[name]))
        return total

    @property
    def compute_exponent(self) -> float:
        """x in N ~ C^x for C = 6 N D: β / (α + β); nan if the law has other terms."""
        if self.form.terms != ("parameters", "tokens"):
            return math.nan
        alpha, beta = self.exponents
        return beta / (alpha + beta)


@dataclass(frozen=True)
class LawFitter:
    """Fits a law to the rows of a table, or to several weightings of them at once."""

    form: LawForm
    table: LossTable

    @property
    def _logarithms(self) -> Array:
        """log x of the terms, [terms, rows]."""
        return np.log(np.stack([self.table.column(name) for name in self.form.terms]))

    def fit(self, *, starts: int = 24, seed: int = 0) -> ParametricLaw:
        """Returns the best law from several random starting points."""
        found, values = self._minimize(self._random_starts(starts, seed), np.ones(len(self.table)))
        best = int(np.argmin(values))
        return ParametricLaw.from_vector(self.form, found[best], values[best])

    def refit(self, law: ParametricLaw, weights: Array) -> list[ParametricLaw]:
        """Returns the law for each row of weights, from the optimum of the unweighted fit.

        weights: [resamples, rows], how often each row counts.
        """
        centre = self._logarithms.mean(axis=1)
        start = self._centre(law.vector, centre)
        laws = []
        count = max(MAX_ELEMENTS // (len(self.table) * (len(self.form.terms) + 1)), 1)
        for first in range(0, len(weights), count):
            part = weights[first : first + count]
            found, values = self._minimize(np.tile(start, (len(part), 1)), part, wide=False)
            laws += [
                ParametricLaw.from_vector(self.form, x, value)
                for x, value in zip(found, values, strict=True)
            ]
        return laws

    def _random_starts(self, count: int, seed: int) -> Array:
        """Exponents, terms and constant at the mean of the data, [starts, parameters]."""
        generator = np.random.default_rng(seed)
        terms = len(self.form.terms)
        # At the mean of the data the terms together make up the loss.
        level = math.log(float(np.mean(self.table.loss)))
        exponents = generator.uniform(0.05, 1.2, (count, terms))
        sizes = level + generator.uniform(-4.0, 0.0, (count, terms + 1))
        return np.concatenate([exponents, sizes], axis=1)

    def _centre(self, vector: Array, centre: Array) -> Array:
        """Parameters with coefficients of centred logarithms: a' = a - α · mean."""
        terms = len(self.form.terms)
        moved = vector.copy()
        moved[..., terms : 2 * terms] -= vector[..., :terms] * centre
        return moved

    def _minimize(self, start: Array, weights: Array, *, wide: bool = True) -> tuple[Array, Array]:
        """Returns parameters and objective of each start; weights: [rows] or [starts, rows]."""
        data = self._logarithms
        centre = data.mean(axis=1)
        data = data - centre[:, None]
        target = np.log(self.table.loss)
        weights = np.broadcast_to(weights, (len(start), len(target)))
        widths = [*(HUBER_WIDTHS if wide else HUBER_WIDTHS[-1:]), self.form.huber]
        x = start
        value = np.zeros(len(x))
        for width in widths:

            def objective(x: Array, rows: Indices, width: float = width) -> tuple[Array, Array]:
                return huber_objective(x, data, target, weights[rows], width)

            # Second derivatives differ between widths, so that each begins with the gradient.
            x, value = minimize(objective, x)
        return self._centre(x, -centre), value


def huber_objective(
    x: Array, data: Array, target: Array, weights: Array, width: float
) -> tuple[Array, Array]:
    """Returns Σ_rows w · Huber(target - logsumexp(a - α · data, e)) and its gradient.

    x: [problems, 2 · terms + 1], data: [terms, rows], target: [rows], weights: [rows] or
    [problems, rows].
    """
    terms = len(data)
    powers = np.empty((len(x), terms + 1, data.shape[1]))
    powers[:, :terms] = x[:, terms : 2 * terms, None] - x[:, :terms, None] * data
    powers[:, terms] = x[:, -1:]
    top = powers.max(axis=1)
    parts = np.exp(powers - top[:, None])
    total = parts.sum(axis=1)
    residual = target - top - np.log(total)
    # The derivative of the Huber loss.
    clipped = np.clip(residual, -width, width)
    value = (weights * clipped * (residual - 0.5 * clipped)).sum(axis=1)
    # d value / d power, of each term.
    parts *= (-weights * clipped / total)[:, None]
    gradient = np.concatenate(
        [-np.einsum("ptr,tr->pt", parts[:, :terms], data), parts.sum(axis=2)], axis=1
    )
    return value, gradient
