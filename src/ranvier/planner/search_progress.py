"""Progress: the best layout so far, told on the standard error while a search runs.

A terminal has one line that changes; a file or a pipe gets a line for the first layout and then at
most one each PAUSE seconds, so that a log stays short. Nothing of it is part of the answer.
"""

from __future__ import annotations

import shutil
import sys
import time
from typing import Self

from ranvier.planner import explain
from ranvier.planner.baselines import PredictedCandidate
from ranvier.planner.predict import Candidate
from ranvier.system.terminal import write_raw

LINE_INTERVAL = 1.0
"""Seconds between lines that are not of a terminal."""
REDRAW_INTERVAL = 0.1
"""The same of the line of a terminal."""


class SearchProgressPrinter:
    """What is shown of a search."""

    def __init__(self) -> None:
        self.start_time = time.perf_counter()
        self.last_shown = -LINE_INTERVAL
        self.shown_candidate: Candidate | None = None
        self.is_terminal = sys.stderr.isatty()
        self.shown_columns = 0
        """Columns of the line that a terminal shows now."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.shown_columns:
            self._write_text(f"\r{' ' * self.shown_columns}\r")

    def report_best(self, found: PredictedCandidate, count: int) -> None:
        """Show the best layout so far, if it is another one or a terminal counts."""
        spent = time.perf_counter() - self.start_time
        if spent - self.last_shown < (REDRAW_INTERVAL if self.is_terminal else LINE_INTERVAL):
            return
        if found.candidate == self.shown_candidate and not self.is_terminal:
            return
        self.last_shown = spent
        self.shown_candidate = found.candidate
        plan = found.plan
        text = (
            f"best so far: {explain.format_seconds(found.prediction.step_seconds)} per step with "
            f"{explain.describe_candidate(found)}, micro-batch {plan.micro_batch}, recompute "
            f"{plan.recompute} "
            f"({spent:.1f} s, {count:,} layouts)"
        )
        if not self.is_terminal:
            self._write_text(f"{text}\n")
            return
        text = text[: shutil.get_terminal_size().columns - 1]
        self._write_text(f"\r{text:<{self.shown_columns}}")
        self.shown_columns = len(text)

    def _write_text(self, text: str) -> None:
        try:
            write_raw(text, sys.stderr)
        except (OSError, ValueError):  # nobody reads it any more: search on
            self.last_shown = float("inf")
