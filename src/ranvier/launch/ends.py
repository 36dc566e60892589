"""Ends: signals, messages and exit codes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from ranvier.errors import (
    INTERNAL,
    CommunicationError,
    ElsewhereError,
    RanvierError,
    WriteError,
)
from ranvier.launch.environment import Ranks

WRITING = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG),
)
"""A full disk and its kin."""
MEMORY = ("out of memory", "DefaultCPUAllocator", "Unable to allocate")
"""How torch and numpy say that memory is too small."""


class Stop:
    """Inside, the first SIGINT, SIGTERM or SIGUSR1 is only noted: the step can end and be saved.

    A further SIGINT interrupts at once; a further SIGTERM, which torchrun sends after a Ctrl-C,
    does nothing. Only the main thread may handle signals; elsewhere nothing is noted.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.signal = 0
        """The first signal, 0 if none has come."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal == 0 and not self.quiet:
            with contextlib.suppress(OSError):  # not print: it may be at work underneath
                os.write(
                    2, b"Stopping: finishing the step, then saving; Ctrl-C again stops at once.\n"
                )
        self.signal = self.signal or number


@contextlib.contextmanager
def reported(me: Ranks, *, quiet: bool = False) -> Iterator[None]:
    """Turn an error inside into a message (without traceback if mendable) and an exit code.

    quiet: say nothing, as another rank says the same.
    """
    with contextlib.suppress(ValueError):  # only the main thread may
        signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    except BrokenPipeError:  # whoever read what is printed has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None
    except (Exception, KeyboardInterrupt) as error:
        where = f"rank {me.rank}: " if me.world > 1 else ""
        message, code = _told(error)
        if not quiet and (me.error_file or not isinstance(error, ElsewhereError)):
            _leave(me, where + message, code, secondary=isinstance(error, CommunicationError))
        raise SystemExit(code) from None


def _terminated(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


def _told(error: BaseException) -> tuple[str, int]:
    """Message and exit code of an error; only what is nobody's mistake shows its traceback."""
    if isinstance(error, RanvierError):
        return f"{type(error).__name__}: {error}", error.exit_code
    if isinstance(error, KeyboardInterrupt):
        code = 143 if error.args else 130
        return "Interrupted.", code
    if isinstance(error, OSError) and error.errno in WRITING:
        rule = "A run must be able to write there. Free space or choose another train.out."
        return f"{error.filename or 'A file'}: {error.strerror}. {rule}", WriteError.exit_code
    if isinstance(error, MemoryError) or any(words in str(error) for words in MEMORY):
        rule = "Weights, gradients, moments and activations of a rank must fit on its device."
        remedy = (
            "Use plan.recompute=budget (if it is on, a plan.memory below what the device has), a "
            "smaller plan.micro_batch, or more ranks."
        )
        return f"Out of memory: {str(error).splitlines()[0][:200]}. {rule} {remedy}", INTERNAL
    return "".join(traceback.format_exception(error)).rstrip(), INTERNAL


def _leave(me: Ranks, message: str, code: int, *, secondary: bool) -> None:
    if not me.error_file:
        print(message, file=sys.stderr, flush=True)
        return
    report = {"message": message, "code": code, "secondary": secondary, "time": time.time()}
    try:
        Path(me.error_file).write_text(json.dumps(report))
    except OSError:  # the disk may be full: that may be the very error
        print(message, file=sys.stderr, flush=True)
