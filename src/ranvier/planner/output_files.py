"""Outputs: files of `ranvier plan`, refused before the search if they cannot be written."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from ranvier.errors import PlanError, WriteError

MIN_FREE_BYTES = 2**16
"""Bytes for which a disk must have room: a small result."""


def check_outputs(*names: str) -> None:
    """Raise a WriteError for a file that cannot be written; what is there stays as it is.

    names: paths; empty: none, -: the standard output.
    """
    given = [name for name in names if name]
    places = [name if name == "-" else os.path.realpath(name) for name in given]
    if len({*places}) < len(places):
        raise PlanError(
            f"{' and '.join(given)} are the same output. Each result needs its own. Give one of "
            "them another path."
        )
    for name in given:
        if name != "-":
            _check_writable(name)


def _check_writable(name: str) -> None:
    path = Path(name)
    try:
        mode = _file_mode(path)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(0, "it is a directory")
        if mode and not stat.S_ISREG(mode):  # a pipe or device: opening it could be noticed
            if not os.access(path, os.W_OK):
                raise PermissionError(0, "Permission denied")
            return
        folder = Path(os.path.realpath(path)).parent
        if not folder.is_dir():
            raise FileNotFoundError(0, f"there is no directory {folder}")
        if mode:
            with path.open("ab"):  # nothing is appended
                pass
        if not mode or os.access(folder, os.W_OK):
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(MIN_FREE_BYTES))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WriteError(f"{name!r} cannot be written: {reason}. Give another path.") from None


def _file_mode(path: Path) -> int:
    """The kind of what is at a path; 0: nothing is."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return 0
