"""The output directory of a run, held open until the run ends.

A path is only a name: while a run trains, its directory may be deleted, renamed or replaced by
another. A checkpoint saved under that name could then not be resumed, and might be mixed with the
files of another run. An open file descriptor keeps the identity of the directory, so that the two
can be compared at any time.
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
"""Minimum seconds between two checks of the directory, in addition to the checks at saves."""
MISSING_PATH_ERRORS = (FileNotFoundError, NotADirectoryError)
"""Errors of a path that does not exist; others may be transient, as on a network file system."""


class OpenDirectory:
    """Open directories of a run; checks whether their paths still refer to them."""

    def __init__(self, *paths: Path) -> None:
        self._descriptors = {path: os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in paths}
        self._last_check = time.monotonic()

    def close(self) -> None:
        """Close the descriptors."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def find_missing(self) -> Path | None:
        """The first path that no longer refers to its directory; None if all do."""
        for path, number in self._descriptors.items():
            try:
                # The same device and inode: a directory recreated under the old name is another
                # one.
                if not os.path.samestat(os.stat(path), os.fstat(number)):
                    return path
            except MISSING_PATH_ERRORS:
                return path
            except OSError:
                continue
        return None

    def check_present(self) -> None:
        """Raise if one of the directories is gone or replaced."""
        path = self.find_missing()
        if path is not None:
            raise WriteError(
                f"{path} is no longer the directory that this run started in: it was deleted, "
                "renamed or replaced. A run only saves there, because checkpoints elsewhere could "
                "not be resumed. Restore the directory and resume the run from its latest "
                "checkpoint, or choose another train.output_dir."
            )

    def exit_code(self) -> int:
        """The exit code if a directory is gone, else 0; checks at most once per second."""
        now = time.monotonic()
        if now - self._last_check < CHECK_INTERVAL_SECONDS:
            return 0
        self._last_check = now
        if self.find_missing() is None:
            return 0
        return WriteError.exit_code


@contextmanager
def hold_open(*paths: Path) -> Iterator[OpenDirectory]:
    """Hold directories open inside."""
    with contextlib.closing(OpenDirectory(*paths)) as directory:
        yield directory
