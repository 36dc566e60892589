"""The directory that a run has begun in, held open until it ends.

A path is only a name: while a run trains, its directory may be deleted, renamed or replaced by
another. What is saved under the name then could not be continued, and might lie among the files of
another run. An open directory keeps its identity, so that the two can be compared at any time.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ranvier.errors import WriteError

CHECK_INTERVAL_SECONDS = 1.0
"""How often a run looks at its directory between saves, at most."""
MISSING_PATH_ERRORS = (FileNotFoundError, NotADirectoryError)
"""Errors that say that a path leads nowhere; others may pass, as on a network."""


class OpenDirectory:
    """Directories of a run, and whether their paths still lead to them."""

    def __init__(self, *paths: Path) -> None:
        self._descriptors = {path: os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in paths}
        self._last_check = time.monotonic()

    def close(self) -> None:
        """Let them go."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def find_missing(self) -> Path | None:
        """The first path that no longer leads to the directory that it led to; None: all do."""
        for path, number in self._descriptors.items():
            try:
                if not os.path.samestat(os.stat(path), os.fstat(number)):
                    return path
            except MISSING_PATH_ERRORS:
                return path
            except OSError:
                continue
        return None

    def check_present(self) -> None:
        """Refuse to go on without them."""
        path = self.find_missing()
        if path is not None:
            raise WriteError(
                f"{path} is not the directory any more that this run began in: it was deleted, "
                "renamed or replaced. A run saves only there, as nobody could continue what it "
                "saves elsewhere. Restore it and start the run again from its newest checkpoint, "
                "or choose another train.out."
            )

    def exit_code(self) -> int:
        """The exit code of a run without them, 0 if they are there or were a moment ago."""
        now = time.monotonic()
        if now - self._last_check < CHECK_INTERVAL_SECONDS:
            return 0
        self._last_check = now
        if self.find_missing() is None:
            return 0
        return WriteError.exit_code


@contextmanager
def hold_open(*paths: Path) -> Iterator[OpenDirectory]:
    """Directories that stay open inside."""
    with contextlib.closing(OpenDirectory(*paths)) as directory:
        yield directory
