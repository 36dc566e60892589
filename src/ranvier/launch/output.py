"""Output that cannot fail: a training run does not stop because its output is no longer read.

`ranvier train | head -1` closes the pipe, a terminal may be closed, or the disk of a redirection
may be full. The run then continues silently to its end. Programs that only print end with SIGPIPE
as usual.
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
"""Errors after which the output is never read again."""


class LastingFile(io.FileIO):
    """A file descriptor whose writes never fail; data that cannot be written is dropped."""

    def write(self, data: ReadableBuffer, /) -> int:
        """Writes and returns the number of bytes written; all of them if writing fails."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in CLOSED_ERRNOS:
                # C++ code writes to the same descriptor, so redirect it.
                with suppress(OSError):
                    null = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(null, self.fileno())
                    os.close(null)
            return memoryview(data).nbytes


@contextmanager
def lasting_output() -> Iterator[None]:
    """Context in which printing to stdout and stderr never fails."""
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
    """Returns a stream that never fails; a stream installed by a program is returned unchanged."""
    # Closed before the start, for example by `>&-`.
    if stream is None:
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
