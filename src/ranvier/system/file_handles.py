"""Limits on open files and sockets of this process, and an early error where they are too low.

C++ libraries abort, or raise errors without a cause, when no file descriptor is left. So code that
opens many checks here first.
"""

from __future__ import annotations

import contextlib
import errno
import os

from ranvier.errors import PlanError

MAX_HANDLES = 1 << 20
"""The limit is not raised beyond this: some programs iterate over all descriptors."""
RESERVED_HANDLES = 12
"""Descriptors reserved for files: samples, checkpoints, logs."""


def raise_limit() -> None:
    """Raise the soft limit of open files to the hard limit."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        # Not available on Windows, hence the suppressed ImportError.
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard == resource.RLIM_INFINITY:
            wanted = MAX_HANDLES
        else:
            wanted = min(hard, MAX_HANDLES)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def require_handles(count: int, purpose: str) -> None:
    """Refuse what needs more descriptors than are left; purpose: subject of the message."""
    limit = _handle_limit()
    opened = _open_count()
    if opened + count + RESERVED_HANDLES > limit:
        raise PlanError(
            f"This process has {opened} files open and may open {limit}. {purpose} needs {count}, "
            f"and {RESERVED_HANDLES} are kept for files. "
            f"{_suggest_limit(opened + count + RESERVED_HANDLES)}"
        )


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that no file descriptor is left."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return True
    # C++ libraries wrap the error of the system into exceptions of their own.
    return os.strerror(errno.EMFILE) in str(error)


def describe_shortage() -> str:
    """The message for such an error: value, rule and remedy."""
    limit = _handle_limit()
    return (
        f"No more files can be opened: this process may open {limit}. Each rank needs some for "
        f"its files and for its connections to others. {_suggest_limit(4 * limit)}"
    )


def _suggest_limit(count: int) -> str:
    enough = max(4096, 1 << count.bit_length())
    return (
        f"Raise the limit before the start (ulimit -n {enough}; in a container docker run --ulimit "
        f"nofile={enough}; under Slurm ask for it in the job script), or use fewer ranks."
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
    """Number of open files; 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/fd"))
    return 0
