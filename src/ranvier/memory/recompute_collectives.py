"""Chooses the results of collectives to save, so that recomputation does not repeat them.

Pure functions of numbers. A saved result avoids the time to communicate it again, and needs memory
from forward to backward. If not all fit, the results that save the most time per byte are chosen:

    value = Σ (latency + bytes / bandwidth of its axis) / bytes saved
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ranvier.comm.bandwidth import DEFAULT_RATE, CollectiveRate
from ranvier.trace import Event

DOUBLE_TRAFFIC_OP = "all_reduce"
"""The operation that moves the bytes of a reduce-scatter and an all-gather."""


@dataclass(frozen=True)
class SavableResult:
    """Results of the collectives of a layer that a block may save."""

    name: str
    bytes: int
    """Additional bytes; negative if it replaces a larger saved result."""
    seconds: float
    """Seconds to communicate it again."""

    @property
    def seconds_per_byte(self) -> float:
        """Seconds saved per byte; infinite if it needs no memory."""
        if self.bytes > 0:
            return self.seconds / self.bytes
        return math.inf


def communication_seconds(
    events: Iterable[Event], rates: Mapping[tuple[str, ...], CollectiveRate]
) -> float:
    """Returns the total time of communications; unknown axes have `DEFAULT_RATE`."""
    found = 0.0
    for event in events:
        rate = rates.get(event.axis, DEFAULT_RATE)
        found += (
            rate.latency
            + event.bytes * (2 if event.op == DOUBLE_TRAFFIC_OP else 1) / rate.bandwidth
        )
    return found


def choose_results(results: Iterable[SavableResult], room: int) -> frozenset[str]:
    """Returns the names of the results to save in `room` bytes, the most valuable first (greedy).

    A result that does not fit is skipped. Equal values are ordered by name, so that all ranks make
    the same choice.
    """
    chosen = set()
    # Results that need no memory come first, as their value is infinite.
    for result in sorted(results, key=lambda one: (-one.seconds_per_byte, one.name)):
        if result.seconds > 0.0 and result.bytes <= room:
            chosen.add(result.name)
            room -= result.bytes
    return frozenset(chosen)
