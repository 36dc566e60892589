"""Progress of a search: the best layout so far, printed to standard error.

A terminal shows one line that is redrawn. A file or a pipe gets a line for the first layout and
then at most one every LINE_INTERVAL seconds, so that a log stays short. The progress is not part of
the result.
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
"""Minimum seconds between lines that do not go to a terminal."""
REDRAW_INTERVAL = 0.1
"""Minimum seconds between redraws of the line on a terminal."""


class SearchProgressPrinter:
    """Prints the progress of a search."""

    def __init__(self) -> None:
        self.start_time = time.perf_counter()
        self.last_shown = -LINE_INTERVAL
        self.shown_candidate: Candidate | None = None
        self.is_terminal = sys.stderr.isatty()
        self.shown_columns = 0
        """Number of columns of the line that the terminal shows."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.shown_columns:
            self._write_text(f"\r{' ' * self.shown_columns}\r")

    def report_best(self, found: PredictedCandidate, count: int) -> None:
        """Shows the best layout so far if it has changed; a terminal also shows the count."""
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
            f"{explain.describe_candidate(found)}, micro-batch {plan.micro_batch}, "
            f"recompute={plan.recompute} ({spent:.1f} s, {count:,} layouts)"
        )
        if not self.is_terminal:
            self._write_text(f"{text}\n")
            return
        # Stay on one line, and overwrite all of the previous text.
        text = text[: shutil.get_terminal_size().columns - 1]
        self._write_text(f"\r{text:<{self.shown_columns}}")
        self.shown_columns = len(text)

    def _write_text(self, text: str) -> None:
        try:
            write_raw(text, sys.stderr)
        # The reader is gone: continue the search without output.
        except (OSError, ValueError):
            self.last_shown = float("inf")
