"""Progress display of long operations: a bar on a terminal, otherwise a few lines."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ranvier.system.terminal import escape_controls, print

ProgressCallback = Callable[[int, int, str], None]
"""Called with the amount done, the total, and a text."""


@contextmanager
def show_progress(what: str, *, least: int = 0) -> Iterator[ProgressCallback]:
    """A progress bar on a terminal, otherwise a line at the start, in the middle and at the end.

    least: totals below this are not shown.
    """
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        yield _line_printer(what, least)
        return
    from rich import progress as rich

    _, *others = rich.Progress.get_default_columns()
    # A file name may look like rich markup.
    plain = rich.TextColumn("{task.description}", markup=False)
    with rich.Progress(plain, *others, rich.TimeElapsedColumn()) as bar:
        task = bar.add_task(what, total=None, visible=False)

        def show_bar(done: int, total: int, words: str) -> None:
            if total >= least:
                description = f"{what}: {words}" if words else what
                description = escape_controls(description)
                bar.update(task, completed=done, total=total, description=description, visible=True)

        yield show_bar


def _line_printer(what: str, least: int) -> ProgressCallback:
    """Print a line at 0%, 50% and 100%."""
    last_tenth = -1

    def show_line(done: int, total: int, words: str) -> None:
        nonlocal last_tenth
        tenth = 10 * done // max(total, 1)
        if total >= least and (tenth // 5 > last_tenth // 5 or last_tenth < 0):
            print(f"{what}: {tenth * 10}%{', ' * bool(words)}{words}", flush=True)
            last_tenth = tenth

    return show_line
