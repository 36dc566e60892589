"""Shared files: open in a launcher and in its ranks, without a name on disk.

Ranks inherit them from the launcher as file descriptors. No other process can open them, and they
vanish when all processes have ended, however they ended. On systems without memfd (macOS) they are
temporary files, which the launcher removes.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import Any


class SharedFile:
    """An open memory file; `multiprocessing` can pass it to a process as an argument."""

    def __init__(self, name: str, fd: int | None = None, path: str = "") -> None:
        self.name = name
        self.is_owner = fd is None
        self.fd, self.path = _open_memory_file(name) if fd is None else (fd, path)

    def __fspath__(self) -> str:
        """Return a path by which this process can open it; no other can, if it is in memory."""
        return self.path or f"/proc/self/fd/{self.fd}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Imported here: commands that start no ranks do not need it.
        from multiprocessing import reduction

        return _rebuild_shared_file, (self.name, reduction.DupFd(self.fd), self.path)

    def __del__(self) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"SharedFile({self.name!r})"

    def size(self) -> int:
        """Return the size in bytes."""
        return os.fstat(self.fd).st_size

    def close(self) -> None:
        """Close this process's descriptor; those of other processes stay open."""
        fd = self.fd
        self.fd = -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)
            if self.is_owner and self.path:
                with contextlib.suppress(OSError):
                    os.unlink(self.path)


def _open_memory_file(name: str) -> tuple[int, str]:
    """Return a descriptor, and a path if the file has one."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name), ""
    return tempfile.mkstemp(prefix=f"ranvier-{name}-")


def _rebuild_shared_file(name: str, handle: Any, path: str) -> SharedFile:
    return SharedFile(name, handle.detach(), path)
