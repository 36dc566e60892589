"""Output: what a run prints is for whoever reads it, and no reason to stop when nobody does.

`ranvier train | head -1` closes the pipe, a terminal may be gone, the disk behind a redirection
full. A run then goes on in silence to its end. Programs that only print end as others do (SIGPIPE).
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

CLOSED_ERRNOS = (errno.EPIPE, errno.EIO, errno.EBADF)
"""Errors after which nothing that is written there will ever be read."""


class LastingFile(io.FileIO):
    """A file descriptor to which one can always write: what cannot be written is dropped."""

    def write(self, data: ReadableBuffer, /) -> int:
        """Bytes that were taken; all of them where writing fails."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in CLOSED_ERRNOS:
                with suppress(OSError):  # C++ code writes there, too
                    null = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(null, self.fileno())
                    os.close(null)
            return memoryview(data).nbytes


@contextmanager
def lasting_output() -> Iterator[None]:
    """Inside, printing to stdout and stderr never fails, whatever becomes of their readers."""
    before = sys.stdout, sys.stderr
    sys.stdout = _make_lasting(sys.stdout, sys.__stdout__)
    sys.stderr = _make_lasting(sys.stderr, sys.__stderr__)
    try:
        yield
    finally:
        for stream, old in zip((sys.stdout, sys.stderr), before, strict=True):
            if stream is not old:
                with suppress(OSError, ValueError):
                    stream.flush()
        sys.stdout, sys.stderr = before


def _make_lasting(stream: TextIO | None, original: TextIO | None) -> TextIO:
    """A stream that takes all that is printed; one that a program has put there stays as it is."""
    if stream is None:  # closed before the start, as by >&-
        return open(os.devnull, "w", encoding="utf-8")
    if stream is not original or not isinstance(stream, io.TextIOWrapper):
        return stream
    with suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(LastingFile(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
