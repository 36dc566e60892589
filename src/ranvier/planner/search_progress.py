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
from ranvier.planner.baselines import Found
from ranvier.planner.predict import Layout
from ranvier.system.terminal import draw

PAUSE = 1.0
"""Seconds between lines that are not of a terminal."""
BLINK = 0.1
"""The same of the line of a terminal."""


class Lines:
    """What is shown of a search."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.last = -PAUSE
        self.layout: Layout | None = None
        self.terminal = sys.stderr.isatty()
        self.shown = 0
        """Columns of the line that a terminal shows now."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.shown:
            self._write(f"\r{' ' * self.shown}\r")

    def report(self, found: Found, count: int) -> None:
        """Show the best layout so far, if it is another one or a terminal counts."""
        spent = time.perf_counter() - self.began
        if spent - self.last < (BLINK if self.terminal else PAUSE):
            return
        if found.layout == self.layout and not self.terminal:
            return
        self.last, self.layout = spent, found.layout
        plan = found.plan
        text = (
            f"best so far: {explain.seconds(found.prediction.total)} per step with "
            f"{explain.layout(found)}, micro-batch {plan.micro_batch}, recompute {plan.recompute} "
            f"({spent:.1f} s, {count:,} layouts)"
        )
        if not self.terminal:
            self._write(f"{text}\n")
            return
        text = text[: shutil.get_terminal_size().columns - 1]
        self._write(f"\r{text:<{self.shown}}")
        self.shown = len(text)

    def _write(self, text: str) -> None:
        try:
            draw(text, sys.stderr)
        except (OSError, ValueError):  # nobody reads it any more: search on
            self.last = float("inf")
