"""BFGS for many small problems at once.

A fit of a scaling law starts from several points, and a bootstrap repeats it for each resample. All
of them run together, as rows of one array: a step costs a few operations of numpy, however many
there are. The line search is that of Lewis and Overton (2013), which needs the weak Wolfe
conditions only, so that BFGS also works where a gradient jumps: a Huber loss with a narrow
quadratic part is almost an absolute value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
Objective = Callable[[Array, Indices], tuple[Array, Array]]
"""Function (x, problems) -> values, gradients; x: [problems, parameters], values: [problems]."""

ARMIJO = 1e-4
CURVATURE = 0.9
MAX_LINE_STEPS = 20


def minimize(
    objective: Objective, start: Array, *, iterations: int = 200, tolerance: float = 1e-9
) -> tuple[Array, Array]:
    """Returns the minima from each row of `start` [problems, parameters], and their values.

    A problem ends when a step changes its value by less than `tolerance` of it, also from the
    gradient alone. Only the others are computed further.
    """
    x = start.copy()
    active: Indices = np.arange(len(x))
    value, gradient = objective(x, active)
    inverse = np.tile(np.eye(x.shape[1]), (len(x), 1, 1))
    # Whether the inverse Hessian is still the identity, whose scale is arbitrary.
    is_fresh = np.ones(len(x), dtype=bool)
    for _ in range(iterations):
        if not len(active):
            break
        slopes = gradient[active]
        direction = -np.einsum("pij,pj->pi", inverse[active], slopes)
        descent = _dot(direction, slopes)
        # Rounding can spoil the inverse Hessian: begin again with the gradient.
        uphill = ~(descent < 0.0)
        inverse[active[uphill]] = np.eye(x.shape[1])
        is_fresh[active[uphill]] = True
        direction[uphill] = -slopes[uphill]
        descent = _dot(direction, slopes)
        step, new_value, new_gradient = _search_line(
            objective, active, x[active], value[active], slopes, direction, descent
        )
        moved = step[:, None] * direction
        stalled = ~(value[active] - new_value > tolerance * np.abs(new_value))
        inverse[active] = _update_inverse(
            inverse[active], moved, new_gradient - slopes, is_fresh=is_fresh[active]
        )
        x[active] += moved
        value[active] = new_value
        gradient[active] = new_gradient
        ended = stalled & is_fresh[active]
        # A problem that stalls begins again with the gradient before it counts as solved.
        inverse[active[stalled]] = np.eye(x.shape[1])
        is_fresh[active] = stalled
        active = active[~ended]
    return x, value


def _dot(a: Array, b: Array) -> Array:
    """Returns the scalar products of rows."""
    found: Array = np.einsum("pi,pi->p", a, b)
    return found


def _search_line(
    objective: Objective,
    problems: Indices,
    x: Array,
    value: Array,
    gradient: Array,
    direction: Array,
    descent: Array,
) -> tuple[Array, Array, Array]:
    """Returns steps that satisfy the weak Wolfe conditions, with values and gradients there.

    A problem without such a step takes the best one that was tried, or none.
    """
    # A direction from the gradient alone has no scale.
    size = np.abs(direction).max(axis=1)
    step = np.minimum(1.0, 1.0 / np.maximum(size, 1e-300))
    low = np.zeros_like(step)
    high = np.full_like(step, np.inf)
    best_step = np.zeros_like(step)
    best_value = value.copy()
    best_gradient = gradient.copy()
    left: NDArray[Any] = np.arange(len(x))
    for _ in range(MAX_LINE_STEPS):
        here = step[left]
        tried, slopes = objective(x[left] + here[:, None] * direction[left], problems[left])
        better = tried < best_value[left]
        best_step[left[better]] = here[better]
        best_value[left[better]] = tried[better]
        best_gradient[left[better]] = slopes[better]
        # Also true for a value that is not a number.
        too_far = ~(tried <= value[left] + ARMIJO * here * descent[left])
        too_short = ~too_far & ~(_dot(direction[left], slopes) >= CURVATURE * descent[left])
        high[left[too_far]] = here[too_far]
        low[left[too_short]] = here[too_short]
        left = left[too_far | too_short]
        if not len(left):
            break
        doubled = np.isinf(high[left])
        step[left] = np.where(doubled, 2.0 * low[left], 0.5 * (low[left] + high[left]))
    return best_step, best_value, best_gradient


def _update_inverse(
    inverse: Array, moved: Array, change: Array, *, is_fresh: NDArray[np.bool_]
) -> Array:
    """Returns the inverse Hessians after a step: (I - ρ s yᵀ) H (I - ρ y sᵀ) + ρ s sᵀ."""
    curvature = _dot(moved, change)
    usable = curvature > 1e-14 * _dot(moved, moved)
    rho = np.where(usable, 1.0 / np.where(usable, curvature, 1.0), 0.0)
    # The first inverse Hessian gets the scale of the function.
    scale = np.where(usable & is_fresh, curvature / np.maximum(_dot(change, change), 1e-300), 1.0)
    inverse = inverse * scale[:, None, None]
    left = np.eye(moved.shape[1]) - rho[:, None, None] * np.einsum("pi,pj->pij", moved, change)
    outer = rho[:, None, None] * np.einsum("pi,pj->pij", moved, moved)
    updated = left @ inverse @ left.transpose(0, 2, 1) + outer
    return np.where(usable[:, None, None], updated, inverse)
