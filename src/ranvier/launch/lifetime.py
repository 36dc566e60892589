"""Lifetime: no process outlives its launcher, and no temporary directory outlives its process.

The kernel kills the forkserver of local ranks with the launcher, and the ranks with the forkserver.
It does so immediately, even during an import, a collective or other C code.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal

CLEANUP_SCRIPT = 'trap "" HUP INT QUIT TERM USR1 USR2; cd /; read -r _; rm -rf -- "$1"'
"""Shell script that waits for the end of standard input, then removes a directory."""


def end_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends; kills it now if the parent has
    ended."""
    # PR_SET_PDEATHSIG
    die = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(die, signal.SIGKILL)
    # The parent may have ended before the call took effect.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def end_children_with_me() -> None:
    """Does the same for all processes that are forked from this one, from their start."""
    # The child empties the list, so that grandchildren are not affected.
    parents = [os.getpid()]
    os.register_at_fork(after_in_child=lambda: end_with_parent(parents.pop()) if parents else None)


@functools.cache
def remove_after_end(folder: str, pid: int) -> None:
    """Removes a directory when this process (pid) has ended for any reason.

    A shell in its own session waits for the end of a pipe that only this process can write to.
    """
    # The writer is never closed here; the kernel closes it when the process ends.
    reader, _writer = os.pipe()
    quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)]
    # Without a shell, or if a spawned process cannot have its own session (macOS), the directory
    # remains until the system clears its temporary files. That is not a reason to fail.
    with contextlib.suppress(OSError, NotImplementedError):
        os.posix_spawn(
            "/bin/sh",
            ["sh", "-c", CLEANUP_SCRIPT, "sh", folder],
            {"PATH": os.environ.get("PATH", os.defpath)},
            file_actions=[(os.POSIX_SPAWN_DUP2, reader, 0), *quiet],
            setsid=True,
        )
    os.close(reader)
