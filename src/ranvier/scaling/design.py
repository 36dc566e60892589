"""Designs a set of runs whose losses determine a scaling law well.

A run is a gemstone shape with a number of tokens; the losses along it are all used. The variance of
the exponent x in N ~ C^x is that of least squares at laws that were published (the delta method),

    var x = gᵀ (Σ_rows J Jᵀ)⁻¹ g        J = d log L / d parameters, g = d x / d parameters,

and the design minimizes the mean of its logarithm by exchanging one shape or moving a part of the
budget at a time. A second term, the determinant for the law of width, depth and tokens, makes
shapes differ in width / depth too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from ranvier.models.config import GEMSTONE_HEAD_DIM
from ranvier.scaling.flops import GEMSTONE_SEQ, GEMSTONE_VOCAB, FlopShape, gemstone_parameters
from ranvier.scaling.minimize import Array
from ranvier.scaling.parametric import LAW_FORMS, ParametricLaw

CHINCHILLA = ParametricLaw(
    LAW_FORMS[0], (0.34, 0.28), (math.log(406.4), math.log(410.7)), math.log(1.69)
)
"""Hoffmann et al. 2022."""
CHINCHILLA_REFITTED = ParametricLaw(
    LAW_FORMS[0], (0.348, 0.366), (math.log(482.0), math.log(2085.4)), math.log(1.817)
)
"""The same data, fitted by Besiroglu et al. 2024."""
PRIOR_LAWS = (CHINCHILLA, CHINCHILLA_REFITTED)
PRIOR_SHAPE_LAW = ParametricLaw(LAW_FORMS[1], (0.301, 0.115, 0.544), (2.161, 0.780, 11.53), -2.119)
"""The law of width, depth and tokens of Gemstones."""
SHAPE_WEIGHT = 0.3
"""Weight of the law of width, depth and tokens against the exponent of N."""
EVALUATIONS = 20
"""Held-out losses along a run."""
DECAY_RATIO = 0.1
"""Share of the steps with a decaying learning rate, at the end."""
HOT_SHARES = np.arange(3, 18) / EVALUATIONS
"""Shares of the tokens of a run at which losses are used: after warm-up, before the cooldown."""
MIN_STEPS = 200
MAX_TOKENS_PER_PARAMETER = 2000.0
MIN_TOKENS_PER_PARAMETER = 1.0
MIN_ASPECT_RATIO = 4.0
MAX_ASPECT_RATIO = 256.0
"""Bounds of width / depth; models beyond them train badly."""
MIN_RUN_SHARE = 0.01
"""Smallest share of the budget of a run."""
WIDTHS = tuple(GEMSTONE_HEAD_DIM * k for k in (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24))
DEPTHS = (2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64)


@dataclass(frozen=True)
class DesignedRun:
    """A shape and its number of tokens."""

    width: int
    depth: int
    flops: float
    vocab: int = GEMSTONE_VOCAB
    seq: int = GEMSTONE_SEQ

    @property
    def size(self) -> str:
        """Name of the model."""
        return f"gemstone-{self.width}x{self.depth}"

    @cached_property
    def parameters(self) -> int:
        """Number of parameters."""
        return gemstone_parameters(self.width, self.depth, self.vocab)

    @cached_property
    def flops_per_token(self) -> float:
        """Training FLOPs per token."""
        shape = FlopShape.gemstone(self.width, self.depth, vocab=self.vocab, seq=self.seq)
        return shape.flops_per_token

    @property
    def tokens(self) -> float:
        """Tokens that its FLOPs buy."""
        return self.flops / self.flops_per_token

    def columns(self) -> dict[str, Array]:
        """Returns the terms of laws at the losses that a fit uses."""
        tokens = HOT_SHARES * self.tokens
        ones = np.ones_like(tokens)
        return {
            "width": self.width * ones,
            "depth": self.depth * ones,
            "parameters": self.parameters * ones,
            "tokens": tokens,
        }


def information(law: ParametricLaw, runs: Sequence[DesignedRun]) -> Array:
    """Returns Σ J Jᵀ over all losses, [parameters, parameters]."""
    total: Array = np.sum([_run_information(law, run) for run in runs], axis=0)
    return total


# An exchange changes one or two runs, and asks for the others again.
@lru_cache(maxsize=2**14)
def _run_information(law: ParametricLaw, run: DesignedRun) -> Array:
    columns = run.columns()
    logs = [np.log(columns[name]) for name in law.form.terms]
    parts = [
        np.exp(factor - power * x)
        for factor, power, x in zip(law.coefficients, law.exponents, logs, strict=True)
    ]
    loss = law.predict(columns)
    rows = [-part / loss * x for part, x in zip(parts, logs, strict=True)]
    rows += [part / loss for part in parts]
    rows.append(law.irreducible_loss / loss)
    slopes = np.stack(rows)
    found: Array = slopes @ slopes.T
    return found


def exponent_variance(law: ParametricLaw, runs: Sequence[DesignedRun]) -> float:
    """Returns the variance of x in N ~ C^x for losses with a relative error of 1."""
    alpha, beta = law.exponents
    slope = np.zeros(law.form.num_parameters)
    slope[0] = -beta / (alpha + beta) ** 2
    slope[1] = alpha / (alpha + beta) ** 2
    # Scaled to a unit diagonal, which keeps the inverse accurate.
    matrix = information(law, runs)
    scale = np.sqrt(np.maximum(np.diag(matrix), 1e-300))
    matrix = matrix / np.outer(scale, scale)
    if np.linalg.cond(matrix) > 1e12:
        return math.inf
    return float(slope / scale @ np.linalg.solve(matrix, slope / scale))


def design_loss(runs: Sequence[DesignedRun]) -> float:
    """Returns what a design minimizes."""
    found = 0.0
    for law in PRIOR_LAWS:
        variance = exponent_variance(law, runs)
        if not 0.0 < variance < math.inf:
            return math.inf
        found += 0.5 * math.log(variance) / len(PRIOR_LAWS)
    # With a small ridge, so that few runs, which cannot determine this law, still compare.
    matrix = information(PRIOR_SHAPE_LAW, runs) + 1e-6 * np.eye(PRIOR_SHAPE_LAW.form.num_parameters)
    _, logarithm = np.linalg.slogdet(matrix)
    return found - SHAPE_WEIGHT * float(logarithm) / len(matrix)


def candidate_shapes(
    largest: float, *, vocab: int, seq: int, fits: Callable[[int, int], bool]
) -> list[DesignedRun]:
    """Returns shapes of which a run with `largest` FLOPs is neither too short nor too long."""
    found = []
    for width, depth in itertools.product(WIDTHS, DEPTHS):
        run = DesignedRun(width, depth, largest, vocab, seq)
        ratio = run.tokens / run.parameters
        sensible = MIN_ASPECT_RATIO <= width / depth <= MAX_ASPECT_RATIO
        if sensible and ratio >= MIN_TOKENS_PER_PARAMETER and fits(width, depth):
            found.append(run)
    return found


def design_runs(
    count: int,
    budget: float,
    *,
    vocab: int = GEMSTONE_VOCAB,
    seq: int = GEMSTONE_SEQ,
    fits: Callable[[int, int], bool] = lambda width, depth: True,
) -> list[DesignedRun]:
    """Returns `count` runs that together take `budget` FLOPs, smallest first.

    fits: whether a shape can be trained. Empty if there are not enough shapes.
    """
    # A run gets at most half of the budget.
    shapes = candidate_shapes(0.5 * budget, vocab=vocab, seq=seq, fits=fits)
    shapes.sort(key=lambda run: run.parameters)
    # Begin with equal shares of the budget; the exchange then also reaches larger shapes.
    equal = [replace(shape, flops=budget / count) for shape in shapes]
    usual = [run for run in equal if _is_sensible(run)]
    if len(usual) < count:
        return []
    places = np.linspace(0, len(usual) - 1, count).round().astype(int)
    runs = [usual[i] for i in places]
    best = design_loss(runs)
    for _ in range(12):
        before = best
        for i in range(count):
            runs, best = _exchange_shape(runs, i, shapes, best)
        for i, j in itertools.permutations(range(count), 2):
            runs, best = _move_budget(runs, i, j, budget, best)
        if before - best < 1e-3:
            break
    return sorted(runs, key=lambda run: run.parameters)


def _is_sensible(run: DesignedRun) -> bool:
    ratio = run.tokens / run.parameters
    return MIN_TOKENS_PER_PARAMETER <= ratio <= MAX_TOKENS_PER_PARAMETER


def _exchange_shape(
    runs: list[DesignedRun], i: int, shapes: Sequence[DesignedRun], best: float
) -> tuple[list[DesignedRun], float]:
    """Tries all shapes for a run, at its FLOPs."""
    taken = {run.size for j, run in enumerate(runs) if j != i}
    found = runs
    for shape in shapes:
        other = replace(shape, flops=runs[i].flops)
        if shape.size in taken or not _is_sensible(other):
            continue
        tried = [*runs[:i], other, *runs[i + 1 :]]
        loss = design_loss(tried)
        if loss < best:
            best = loss
            found = tried
    return found, best


def _move_budget(
    runs: list[DesignedRun], i: int, j: int, budget: float, best: float
) -> tuple[list[DesignedRun], float]:
    """Tries to move a part of the FLOPs of run i to run j."""
    found = runs
    for share in (0.1, 0.3, 0.6):
        amount = share * runs[i].flops
        tried = list(runs)
        tried[i] = replace(runs[i], flops=runs[i].flops - amount)
        tried[j] = replace(runs[j], flops=runs[j].flops + amount)
        if tried[i].flops < MIN_RUN_SHARE * budget:
            continue
        if not (_is_sensible(tried[i]) and _is_sensible(tried[j])):
            continue
        loss = design_loss(tried)
        if loss < best:
            best = loss
            found = tried
    return found, best


def equally_spaced_runs(runs: Sequence[DesignedRun], budget: float) -> list[DesignedRun]:
    """Returns as many runs with equal FLOPs and equally spaced log N between those of a design.

    Their shapes have the width / depth of the suite's hull, 36, as far as depths allow; this is
    what one would train without a design.
    """
    low, high = (math.log(f(run.parameters for run in runs)) for f in (min, max))
    first = runs[0]
    shapes = [
        DesignedRun(width, depth, budget / len(runs), first.vocab, first.seq)
        for width, depth in itertools.product(WIDTHS, DEPTHS)
        if 12.0 <= width / depth <= 108.0
    ]
    found: list[DesignedRun] = []
    for wanted in np.linspace(low, high, len(runs)):
        taken = {run.size for run in found}
        found.append(
            min(
                (shape for shape in shapes if shape.size not in taken),
                key=lambda shape: abs(math.log(shape.parameters) - float(wanted)),
            )
        )
    return found
