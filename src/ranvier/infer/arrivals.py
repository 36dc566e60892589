"""Requests of a simulation: from a trace, or from a generator.

A trace is a JSONL file:

    {"arrival": 0.25, "input_tokens": 512, "output_tokens": 128}
    {"arrival": 0.31, "input_tokens": 900, "output_tokens": 64, "prefix_group": "a",
     "prefix_tokens": 800}

Requests of a prefix group begin with the same tokens: the first `prefix_tokens` of a text that is
the same for the group, by default all of the prompt.

The generator draws the time between two requests from a gamma distribution with mean 1/rate and a
coefficient of variation of 1/sqrt(burstiness): 1 is a Poisson process, less is more bursty. A rate
of infinity lets all arrive at once.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ranvier.config.sections import suggest_nearest
from ranvier.errors import DataError, PlanError

TRACE_KEYS = ("arrival", "input_tokens", "output_tokens", "prefix_group", "prefix_tokens")
MAX_TOKENS = 2**31


@dataclass(frozen=True)
class SimulatedRequest:
    """When a request arrives, and how many tokens it has."""

    arrival: float
    """In seconds."""
    input_tokens: int
    output_tokens: int
    prefix_group: str = ""
    """Requests of the same group begin with the same tokens; empty for no group."""
    prefix_tokens: int = 0
    """Number of these tokens."""


def scale_arrivals(requests: Sequence[SimulatedRequest], factor: float) -> list[SimulatedRequest]:
    """Returns the requests with all arrival times multiplied by a factor."""
    return [replace(request, arrival=request.arrival * factor) for request in requests]


# ---- traces ---------------------------------------------------------------------------------


def read_trace(path: Path) -> list[SimulatedRequest]:
    """Returns the requests of a JSONL file, in the order of arrival."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise DataError(
            f"{path} cannot be read: {reason}. A trace is a JSONL file. Pass the path of one."
        ) from None
    requests = [
        _parse_request(line, f"{path}:{i + 1}") for i, line in enumerate(lines) if line.strip()
    ]
    if not requests:
        raise DataError(f"{path} has no requests. A trace needs at least one. Add a line.")
    return sorted(requests, key=lambda request: request.arrival)


def _parse_request(line: str, where: str) -> SimulatedRequest:
    """Returns the request of a line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise DataError(
            f"{where} is not a JSON object. Every line of a trace is one. Write for example "
            '{"arrival": 0.5, "input_tokens": 512, "output_tokens": 128}.'
        )
    for key in row:
        if key not in TRACE_KEYS:
            raise DataError(
                f"{where}: {str(key)[:80]} is not a known key.{suggest_nearest(key, TRACE_KEYS)} "
                f"Known keys: {', '.join(TRACE_KEYS)}."
            )
    arrival = row.get("arrival", 0.0)
    if not _is_number(arrival) or not 0.0 <= arrival < math.inf:
        raise DataError(
            f"{where}: arrival={str(arrival)[:80]} is not a time. It must be a number of seconds "
            "of at least 0. Write for example 0.5."
        )
    group = row.get("prefix_group", "")
    if not isinstance(group, str):
        raise DataError(
            f"{where}: prefix_group={str(group)[:80]} is not text. It names requests with the same "
            'prefix. Write for example "a".'
        )
    input_tokens = _parse_count(row.get("input_tokens"), f"{where}: input_tokens", 1)
    output_tokens = _parse_count(row.get("output_tokens"), f"{where}: output_tokens", 1)
    shared = row.get("prefix_tokens", input_tokens if group else 0)
    prefix_tokens = _parse_count(shared, f"{where}: prefix_tokens", 0)
    return SimulatedRequest(
        float(arrival), input_tokens, output_tokens, group, min(prefix_tokens, input_tokens)
    )


def _is_number(value: Any) -> bool:
    """Returns whether a value of JSON is a number."""
    # A bool is an int in Python.
    return isinstance(value, int | float) and not isinstance(value, bool)


def _parse_count(value: Any, what: str, least: int) -> int:
    """Returns a number of tokens."""
    if not _is_number(value) or value != value or not least <= value < MAX_TOKENS:
        raise DataError(
            f"{what}={str(value)[:80]} is not a number of tokens. It must be a whole number of at "
            f"least {least}. Write for example 512."
        )
    return int(value)


# ---- generator ------------------------------------------------------------------------------

LengthSampler = Callable[[random.Random], float]
LENGTHS = {
    "fixed": "fixed:512",
    "uniform": "uniform:100:1024",
    "gamma": "gamma:512 or gamma:512:2 (mean and shape)",
    "exponential": "exponential:128",
}
"""Distributions of lengths, with an example of each."""


def parse_lengths(text: str, name: str) -> LengthSampler:
    """Returns the sampler of a distribution such as `gamma:512`. name: of the setting."""
    kind, *words = text.split(":")
    problem = PlanError(
        f"{name}={text[:80]!r} is not a distribution of lengths. It must be one of "
        f"{', '.join(LENGTHS.values())}. Use 'fixed:512'."
    )
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        raise problem from None
    if not all(1e-3 <= number < MAX_TOKENS for number in numbers):
        raise problem
    match kind, numbers:
        case "fixed", [length]:
            return lambda chance: length
        case "uniform", [low, high] if low <= high:
            return lambda chance: chance.randint(int(low), int(high))
        case "gamma", [mean]:
            return lambda chance: chance.gammavariate(2.0, mean / 2.0)
        case "gamma", [mean, shape]:
            return lambda chance: chance.gammavariate(shape, mean / shape)
        case "exponential", [mean]:
            return lambda chance: chance.expovariate(1.0 / mean)
    raise problem


@dataclass(frozen=True, kw_only=True)
class RequestGenerator:
    """Random requests; the same for the same seed."""

    num_requests: int = 600
    input_tokens: str = "gamma:512"
    output_tokens: str = "exponential:128"
    burstiness: float = 1.0
    prefix_groups: int = 0
    """Number of groups of requests that begin with the same tokens; 0 for no groups."""
    prefix_tokens: int = 0
    """Number of these tokens, in addition to those of `input_tokens`."""
    seed: int = 0

    def generate(self, rate: float) -> list[SimulatedRequest]:
        """Returns the requests. rate: requests per second; infinity for all at once.

        Lengths do not depend on the rate.
        """
        chance = random.Random(self.seed)
        draw_input = parse_lengths(self.input_tokens, "input_tokens")
        draw_output = parse_lengths(self.output_tokens, "output_tokens")
        now = 0.0
        requests = []
        for _ in range(self.num_requests):
            if self.burstiness == 1.0:
                gap = chance.expovariate(1.0)
            else:
                gap = chance.gammavariate(self.burstiness, 1.0 / self.burstiness)
            now += gap / rate
            own = max(1, int(draw_input(chance)))
            output = max(1, int(draw_output(chance)))
            group = ""
            shared = 0
            if self.prefix_groups:
                group = str(chance.randrange(self.prefix_groups))
                shared = self.prefix_tokens
            requests.append(SimulatedRequest(now, own + shared, output, group, shared))
        return requests
