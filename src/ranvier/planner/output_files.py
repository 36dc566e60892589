"""Output files of commands: checks before the work whether they can be written, and writes them."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from ranvier.errors import PlanError, WriteError
from ranvier.system.terminal import print

MIN_FREE_BYTES = 2**16
"""Bytes that a disk must have free: the size of a small result."""


def check_outputs(*names: str) -> None:
    """Raises a WriteError if a file cannot be written. Existing files are not changed.

    names: paths; an empty name is skipped, and "-" is standard output.
    """
    given = [name for name in names if name]
    # Resolve links, so that two names of one file are detected.
    places = [name if name == "-" else os.path.realpath(name) for name in given]
    if len({*places}) < len(places):
        raise PlanError(
            f"{' and '.join(given)} are the same output. Each result needs its own file. Pass "
            "another path for one of them."
        )
    for name in given:
        if name != "-":
            _check_writable(name)


def write_output(name: str, text: str) -> None:
    """Writes a text to a file, or to standard output for "-"."""
    if name == "-":
        print(text, end="")
        return
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise WriteError(
            f"{name} cannot be written: {error.strerror}. Pass another path."
        ) from None


def _check_writable(name: str) -> None:
    path = Path(name)
    try:
        mode = _file_mode(path)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(0, "it is a directory")
        # Opening a pipe or a device could have side effects, so only its permissions are checked.
        if mode and not stat.S_ISREG(mode):
            if not os.access(path, os.W_OK):
                raise PermissionError(0, "Permission denied")
            return
        folder = Path(os.path.realpath(path)).parent
        if not folder.is_dir():
            raise FileNotFoundError(0, f"the directory {folder} does not exist")
        if mode:
            # Opening for append needs write permission but changes nothing.
            with path.open("ab"):
                pass
        # A temporary file in the folder checks free space and the permission to create files.
        if not mode or os.access(folder, os.W_OK):
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(MIN_FREE_BYTES))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WriteError(f"{name!r} cannot be written: {reason}. Give another path.") from None


def _file_mode(path: Path) -> int:
    """Returns the mode of the file at a path; 0 if the file does not exist."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return 0
