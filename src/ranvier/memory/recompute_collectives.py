"""Which results of collectives are worth their bytes: recomputation does not repeat those.

Pure functions of numbers. A result that is kept saves the seconds in which it would be communicated
again, and costs its bytes from forward to backward. With room for some only, those go first that
save most for a byte:

    value = Σ (latency + bytes / bandwidth of its axis) / bytes kept
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ranvier.comm.bandwidth import DEFAULT_RATE, CollectiveRate
from ranvier.trace import Event

DOUBLE_TRAFFIC_OP = "all_reduce"
"""Moves what a reduce-scatter and an all-gather move."""


@dataclass(frozen=True)
class SavableResult:
    """What a block may keep of a leaf."""

    name: str
    bytes: int
    """More than without it; below 0 where it takes the place of something larger."""
    seconds: float
    """To communicate it again."""

    @property
    def seconds_per_byte(self) -> float:
        """Seconds saved for a byte."""
        if self.bytes > 0:
            return self.seconds / self.bytes
        return math.inf


def communication_seconds(
    events: Iterable[Event], rates: Mapping[tuple[str, ...], CollectiveRate]
) -> float:
    """How long communications take, one after the other; of an axis without a rate the usual."""
    found = 0.0
    for event in events:
        rate = rates.get(event.axis, DEFAULT_RATE)
        found += (
            rate.latency
            + event.bytes * (2 if event.op == DOUBLE_TRAFFIC_OP else 1) / rate.bandwidth
        )
    return found


def choose_results(results: Iterable[SavableResult], room: int) -> frozenset[str]:
    """Names of the results to keep in `room` bytes, the most valuable first.

    One that does not fit leaves its place to the next; equal ones go by name, so that all ranks
    choose alike.
    """
    chosen = set()
    for result in sorted(results, key=lambda one: (-one.seconds_per_byte, one.name)):
        if result.seconds > 0.0 and result.bytes <= room:
            chosen.add(result.name)
            room -= result.bytes
    return frozenset(chosen)
