"""Limits on open files and sockets of this process, with an early error if they are too low.

C++ libraries abort, or raise unclear errors, when no file descriptor is left. Code that opens many
files checks here first.
"""

from __future__ import annotations

import contextlib
import errno
import os

from ranvier.errors import PlanError

MAX_HANDLES = 1 << 20
"""The limit is not raised beyond this: some programs iterate over all descriptors."""
RESERVED_HANDLES = 12
"""Descriptors reserved for samples, checkpoints and logs."""


def raise_limit() -> None:
    """Raise the soft limit of open files to the hard limit."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        # ImportError is suppressed because Windows does not have this module.
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard == resource.RLIM_INFINITY:
            wanted = MAX_HANDLES
        else:
            wanted = min(hard, MAX_HANDLES)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def require_handles(count: int, purpose: str) -> None:
    """Raises if fewer descriptors are left than needed; purpose: subject of the message."""
    limit = _handle_limit()
    opened = _open_count()
    if opened + count + RESERVED_HANDLES > limit:
        raise PlanError(
            f"This process has {opened} open files, and its limit is {limit}. {purpose} needs "
            f"{count} more, and {RESERVED_HANDLES} are reserved. "
            f"{_suggest_limit(opened + count + RESERVED_HANDLES)}"
        )


def is_shortage(error: BaseException) -> bool:
    """Whether an error means that no file descriptor is left."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return True
    # C++ libraries wrap the system error in their own exceptions.
    return os.strerror(errno.EMFILE) in str(error)


def describe_shortage() -> str:
    """Returns the message for such an error: value, rule and remedy."""
    limit = _handle_limit()
    return (
        f"Too many open files: the limit of this process is {limit}. Each rank needs descriptors "
        f"for its files and its connections. {_suggest_limit(4 * limit)}"
    )


def _suggest_limit(count: int) -> str:
    enough = max(4096, 1 << count.bit_length())
    return (
        f"Raise the limit before the start (ulimit -n {enough}; in a container, docker run "
        f"--ulimit nofile={enough}; with Slurm, in the job script), or use fewer ranks."
    )


def _handle_limit() -> int:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if soft == resource.RLIM_INFINITY:
            return MAX_HANDLES
        return soft
    return MAX_HANDLES


def _open_count() -> int:
    """Returns the number of open files; 0 if unknown."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/fd"))
    return 0
