"""Seconds of a serving step, interpolated between measured steps.

A file of measured steps has one JSON object per line, or a JSON list of them:

    {"decode_tokens": 48, "mean_context": 612.0, "prompt_tokens": 0, "seconds": 0.0071}

where seconds is the time from the end of the previous step to the end of this one, while there was
work. Similar steps are averaged. A linear model of the tokens and the context with positive
coefficients is their trend. Near measured steps it is scaled by the ratio of their seconds to the
trend, so that steps outside of the table follow the trend.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from ranvier.errors import DataError, PlanError
from ranvier.infer.policy import WorkItem
from ranvier.planner.time.serving_step import StepLoad

COMPUTE_BOUNDS = (64, 128, 256, 512)
"""Numbers of tokens above which the trend may be steeper."""
FIT_SWEEPS = 500
"""Sweeps of coordinate descent over the coefficients of the trend."""


class StepLog:
    """Writes the steps of an engine to a file, as `ranvier simulate serving --steps` reads them."""

    def __init__(self, path: str) -> None:
        try:
            self._file: TextIO | None = open(path, "a", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise PlanError(
                f"engine.step_log={path!r} cannot be written: {error.strerror}. It must be a file "
                "in an existing directory. Use another path."
            ) from None

    def write(self, items: Sequence[WorkItem], seconds: float) -> None:
        """Appends a step. If the disk is full, nothing more is written."""
        if self._file is None:
            return
        contexts = [item.start + 1 for item in items if item.num_tokens == 1]
        record = StepRecord(
            len(contexts),
            sum(contexts) / max(len(contexts), 1),
            sum(item.num_tokens for item in items) - len(contexts),
            seconds,
        )
        try:
            self._file.write(json.dumps(record._asdict()) + "\n")
        except OSError:
            self.close()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None


class StepRecord(NamedTuple):
    """A measured step."""

    decode_tokens: float
    mean_context: float
    prompt_tokens: float
    seconds: float

    @property
    def features(self) -> tuple[float, ...]:
        """Terms of the trend: a constant, decodes, their context, prompt tokens, and tokens above
        some numbers, because steps with many tokens are limited by compute.
        """
        tokens = self.decode_tokens + self.prompt_tokens
        return (
            1.0,
            self.decode_tokens,
            self.decode_tokens * self.mean_context,
            self.prompt_tokens,
            *(max(0.0, tokens - bound) for bound in COMPUTE_BOUNDS),
        )

    @property
    def place(self) -> tuple[float, float, float]:
        """Position for distances between steps, in doublings."""
        context = self.mean_context if self.decode_tokens else 0.0
        return (
            math.log2(1.0 + self.decode_tokens),
            # Twice the context changes a step much less than twice the tokens.
            0.5 * math.log2(1.0 + context),
            math.log2(1.0 + self.prompt_tokens),
        )


class StepTable:
    """A table of measured steps; a `StepCost`."""

    def __init__(self, records: Iterable[StepRecord]) -> None:
        cells: dict[tuple[int, ...], list[StepRecord]] = {}
        for record in records:
            # Four cells per doubling.
            cell = tuple(round(4 * value) for value in record.place)
            cells.setdefault(cell, []).append(record)
        assert cells, "A table needs at least one step."
        self.records = [_mean_record(cell) for cell in cells.values()]
        self.coefficients = _fit_trend(self.records, [len(cell) for cell in cells.values()])
        self._least_seconds = 0.01 * min(record.seconds for record in self.records)
        self._known = [
            (record.place, math.log(record.seconds / self._trend(record)))
            for record in self.records
        ]
        self._cache: dict[tuple[float, ...], float] = {}

    def seconds(self, loads: Sequence[StepLoad]) -> float:
        """Returns the seconds of a step; the tokens of all homes count together."""
        decodes = sum(load.decode_tokens for load in loads)
        prompts = sum(load.prompt_tokens for load in loads)
        context = 0.0
        if decodes:
            context = sum(load.decode_tokens * load.mean_context for load in loads) / decodes
        # Rounding the context to 3 % lets most steps be found in the cache.
        if context > 0.0:
            context = math.exp(round(math.log(context) * 32) / 32)
        key = (decodes, context, prompts)
        if key not in self._cache:
            self._cache[key] = self._interpolate(StepRecord(*key, seconds=0.0))
        return self._cache[key]

    def _interpolate(self, step: StepRecord) -> float:
        """Returns the trend times the inverse-distance weighted ratio of the measured steps."""
        total = 0.0
        weights = 0.0
        x, y, z = step.place
        for (a, b, c), ratio in self._known:
            # The offset keeps an exact match finite.
            weight = ((x - a) ** 2 + (y - b) ** 2 + (z - c) ** 2 + 0.01) ** -2
            total += weight * ratio
            weights += weight
        return self._trend(step) * math.exp(total / weights)

    def _trend(self, step: StepRecord) -> float:
        """Returns the seconds of the linear model, which may be 0 for some steps, or a minimum."""
        linear = sum(a * b for a, b in zip(self.coefficients, step.features, strict=True))
        return max(linear, self._least_seconds)


def _mean_record(cell: Sequence[StepRecord]) -> StepRecord:
    """Returns the mean of similar steps."""
    return StepRecord(*(sum(values) / len(cell) for values in zip(*cell, strict=True)))


def _fit_trend(records: Sequence[StepRecord], counts: Sequence[int]) -> tuple[float, ...]:
    """Returns the non-negative coefficients with the least squared relative error.

    counts: number of measured steps that each record stands for.
    """
    size = len(records[0].features)
    # Rows are divided by the seconds, so that errors are relative. The square root keeps frequent
    # steps from outweighing all others.
    gram = [[0.0] * size for _ in range(size)]
    right = [0.0] * size
    for record, count in zip(records, counts, strict=True):
        row = [value / record.seconds for value in record.features]
        weight = math.sqrt(count)
        for i, value in enumerate(row):
            right[i] += weight * value
            for j, other in enumerate(row):
                gram[i][j] += weight * value * other
    # A constant alone is the start; it also keeps the trend positive.
    found = [right[0] / gram[0][0]] + [0.0] * (size - 1)
    for _ in range(FIT_SWEEPS):
        for i in range(size):
            if gram[i][i] > 0.0:
                others = sum(gram[i][j] * found[j] for j in range(size) if j != i)
                found[i] = max(0.0, (right[i] - others) / gram[i][i])
    return tuple(found)


def load_step_table(path: Path) -> StepTable:
    """Returns the table in a JSON or JSONL file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise DataError(
            f"{path} cannot be read: {reason}. A step table is a JSON or JSONL file. Pass the path "
            "of one."
        ) from None
    records = [_parse_record(row, f"{path}: step {i + 1}") for i, row in enumerate(_rows(text))]
    num_decodes = sum(record.decode_tokens > 0 for record in records)
    num_prompts = sum(record.prompt_tokens > 0 for record in records)
    if not num_decodes or not num_prompts:
        raise DataError(
            f"{path} has {num_decodes} steps with decoding tokens and {num_prompts} with prompt "
            "tokens. Both kinds are needed. Measure the steps of a run that serves requests."
        )
    return StepTable(records)


def _rows(text: str) -> list[Any]:
    """Returns the objects of a JSON list, or of JSON lines; None for what cannot be parsed."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return [_parse_line(line) for line in text.splitlines() if line.strip()]
    return whole if isinstance(whole, list) else [whole]


def _parse_line(line: str) -> Any:
    """Returns the value of a line of JSON; None if it is not valid."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _parse_record(row: Any, where: str) -> StepRecord:
    """Returns a step of a file."""
    values = []
    for name in StepRecord._fields:
        value: Any = row.get(name) if isinstance(row, dict) else None
        # A bool is an int in Python.
        right = isinstance(value, int | float) and not isinstance(value, bool)
        if not right or not 0.0 <= value < math.inf or (name == "seconds" and value == 0.0):
            raise DataError(
                f"{where} has {name}={str(value)[:80]}. It must be a number of at least 0, and "
                f"seconds above 0. Write objects with {', '.join(StepRecord._fields)}."
            )
        values.append(float(value))
    return StepRecord(*values)
