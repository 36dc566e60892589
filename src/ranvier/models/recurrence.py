"""Numbers of iterations of a recurrent core: drawn for a step, and expected; without torch.

p ~ Poisson(LogNormal(log(mean) - σ²/2, σ)) + 1 iterations, σ = 1/2 (Geiping et al. 2025): the last
min(p, backprop_depth) have gradients, the others do not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

LOG_NORMAL_SIGMA = 0.5
"""Standard deviation of the logarithm of the rate of iterations."""
QUADRATURE_POINTS = 401
"""Points at which the distribution of the rate is evaluated for expected numbers."""


@dataclass(frozen=True)
class LayerCalls:
    """Calls of a layer in one pass, without and with gradients; their means for a run."""

    without_grad: float = 0
    with_grad: float = 1

    @property
    def total(self) -> float:
        """Number of all calls."""
        return self.without_grad + self.with_grad


ONE_CALL = LayerCalls()
"""The calls of a layer that is not recurrent."""


@dataclass(frozen=True)
class Recurrence:
    """Iterations of the core in a pass: first those without gradients, then those with."""

    without_grad: int
    with_grad: int

    @classmethod
    def split(cls, iterations: int, backprop_depth: int) -> Recurrence:
        """Returns so many iterations, of which the last `backprop_depth` have gradients."""
        with_grad = min(iterations, backprop_depth)
        return cls(iterations - with_grad, with_grad)

    @property
    def iterations(self) -> int:
        """Number of all iterations."""
        return self.without_grad + self.with_grad

    @property
    def calls(self) -> LayerCalls:
        """Calls of each layer of the core."""
        return LayerCalls(self.without_grad, self.with_grad)


@cache
def expected_calls(mean_recurrence: int, backprop_depth: int) -> LayerCalls:
    """Returns the mean calls of each layer of the core in training steps."""
    # E min(p, k) is the sum of the probabilities of p > 0, ..., p > k - 1.
    with_grad = 0.0
    weights = 0.0
    for i in range(QUADRATURE_POINTS):
        z = -8.0 + 16.0 * i / (QUADRATURE_POINTS - 1)
        weight = math.exp(-z * z / 2.0)
        log_rate = math.log(mean_recurrence) - LOG_NORMAL_SIGMA**2 / 2.0 + LOG_NORMAL_SIGMA * z
        with_grad += weight * _expected_minimum(log_rate, backprop_depth)
        weights += weight
    # Rounded, as stored lists of layers must not depend on the last bit of a math library.
    with_grad = round(with_grad / weights, 6)
    return LayerCalls(mean_recurrence + 1 - with_grad, with_grad)


def _expected_minimum(log_rate: float, limit: int) -> float:
    """Returns E min(Poisson(rate) + 1, limit)."""
    rate = math.exp(log_rate)
    found = float(limit)
    # P(Poisson = j) lacks limit - 1 - j iterations.
    for j in range(limit - 1):
        found -= (limit - 1 - j) * math.exp(j * log_rate - rate - math.lgamma(j + 1))
    return found
