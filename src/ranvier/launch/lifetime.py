"""Lifetime: no process outlives the one that it works for, and no folder its process.

The kernel ends the server of local ranks with the launcher, and the ranks with that server: at once
and whatever they do, also in the middle of an import, a collective or other C code.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal

CLEANUP_SCRIPT = 'trap "" HUP INT QUIT TERM USR1 USR2; cd /; read -r _; rm -rf -- "$1"'
"""A shell's program: wait for the end of standard input, then remove a folder."""


def end_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent does, or end it if that has happened."""
    die = 1  # PR_SET_PDEATHSIG
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(die, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def end_children_with_me() -> None:
    """The same for all processes that are forked from this one, from their first moment."""
    parents = [os.getpid()]
    os.register_at_fork(after_in_child=lambda: end_with_parent(parents.pop()) if parents else None)


@functools.cache
def remove_after_end(folder: str, pid: int) -> None:
    """Remove a folder when this process (pid) has ended, however it ended.

    A shell in a session of its own waits for the end of a pipe that only this process can write to.
    """
    reader, _writer = os.pipe()  # the writer stays open until the kernel closes it
    quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)]
    # Without a shell, or where a spawned process gets no session of its own (macOS), the folder
    # stays until the system clears its temporary files: no reason to end a run.
    with contextlib.suppress(OSError, NotImplementedError):
        os.posix_spawn(
            "/bin/sh",
            ["sh", "-c", CLEANUP_SCRIPT, "sh", folder],
            {"PATH": os.environ.get("PATH", os.defpath)},
            file_actions=[(os.POSIX_SPAWN_DUP2, reader, 0), *quiet],
            setsid=True,
        )
    os.close(reader)
