"""Which results of collectives are worth saving, so that recomputation does not repeat them.

Pure functions of numbers. A saved result avoids the seconds of communicating it again, and costs
its bytes from forward to backward. If only some fit, those that save most per byte come first:

    value = Σ (latency + bytes / bandwidth of its axis) / bytes saved
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ranvier.comm.bandwidth import DEFAULT_RATE, CollectiveRate
from ranvier.trace import Event

DOUBLE_TRAFFIC_OP = "all_reduce"
"""Moves as many bytes as a reduce-scatter and an all-gather together."""


@dataclass(frozen=True)
class SavableResult:
    """Results of a layer's collectives that a block may save."""

    name: str
    bytes: int
    """Extra bytes; negative if it replaces something larger."""
    seconds: float
    """Seconds to communicate it again."""

    @property
    def seconds_per_byte(self) -> float:
        """Seconds saved per byte; infinite if it costs no memory."""
        if self.bytes > 0:
            return self.seconds / self.bytes
        return math.inf


def communication_seconds(
    events: Iterable[Event], rates: Mapping[tuple[str, ...], CollectiveRate]
) -> float:
    """Return the time of communications, one after the other; unknown axes get `DEFAULT_RATE`."""
    found = 0.0
    for event in events:
        rate = rates.get(event.axis, DEFAULT_RATE)
        found += (
            rate.latency
            + event.bytes * (2 if event.op == DOUBLE_TRAFFIC_OP else 1) / rate.bandwidth
        )
    return found


def choose_results(results: Iterable[SavableResult], room: int) -> frozenset[str]:
    """Return the names of the results to save in `room` bytes, most valuable first (greedy).

    One that does not fit is skipped; ties are broken by name, so that all ranks choose alike.
    """
    chosen = set()
    # Results that cost no memory come first, as their value is infinite.
    for result in sorted(results, key=lambda one: (-one.seconds_per_byte, one.name)):
        if result.seconds > 0.0 and result.bytes <= room:
            chosen.add(result.name)
            room -= result.bytes
    return frozenset(chosen)
