"""Shared files: open in a launcher and in its ranks, without a name on any disk.

Ranks get them from the launcher as file handles. Nobody else can open them, and nothing is left of
them when all processes have ended, however they ended.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from multiprocessing import reduction
from typing import Any


class SharedFile:
    """An open file in memory; `multiprocessing` hands it to a process with its arguments."""

    def __init__(self, name: str, fd: int | None = None) -> None:
        self.name = name
        self.fd = _open(name) if fd is None else fd

    def __fspath__(self) -> str:
        """A path under which this process, and no other, can open it."""
        return f"/proc/self/fd/{self.fd}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (self.name, reduction.DupFd(self.fd))

    def __del__(self) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"SharedFile({self.name!r})"

    def size(self) -> int:
        """Bytes that were written."""
        return os.fstat(self.fd).st_size

    def close(self) -> None:
        """Let go of it; others keep it."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


def _open(name: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _receive(name: str, handle: Any) -> SharedFile:
    return SharedFile(name, handle.detach())
