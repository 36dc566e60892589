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
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Self

from ranvier.errors import (
    INTERNAL_EXIT_CODE,
    STOPPED_EXIT_CODE,
    CommunicationError,
    OtherRankError,
    PlanError,
    RanvierError,
    WriteError,
)
from ranvier.launch.environment import ProcessInfo
from ranvier.launch.output import lasting_output
from ranvier.system import file_handles
from ranvier.system.terminal import print

WRITE_ERRNOS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG),
)
"""A full disk and its kin."""
OUT_OF_MEMORY_TEXTS = ("out of memory", "DefaultCPUAllocator", "Unable to allocate")
"""How torch and numpy say that memory is too small."""


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask a run to stop."""
ECHO_SECONDS = 0.1
"""A signal that comes so soon again is the same one, sent to a process and to its group."""
SECOND_SIGNAL_SECONDS = 1.0
"""How long a second signal may wait for the interpreter."""
FIRST_SIGNAL_SECONDS = 3.0
"""The same for a first signal, when there is nothing to save."""
ABORT_SECONDS = 5.0
"""How long the communicators of a rank that failed may take to end."""
GRACE_SECONDS = 3.0
"""How long a rank may take to end by itself after another one has failed."""
FAILED_KEY = "ranvier/failed"
"""Key of the store under which a rank says that it has failed."""
NOTHING_SAVED_MESSAGE = "Stopped before a step was taken. There was nothing to save."


class StopRequested(KeyboardInterrupt):
    """A signal to stop came while there was nothing to save."""


class GracefulStop:
    """Inside, the first signal to stop is only noted: the step can end and be saved.

    A further SIGINT ends at once, and so does a second SIGTERM; a SIGTERM after a SIGINT, as
    torchrun sends it, does nothing. Only the main thread may handle signals.

    patient: further signals do nothing, as the parent of this rank sees to them.
    """

    def __init__(self, *, quiet: bool = False, patient: bool = False) -> None:
        self.quiet = quiet
        self.patient = patient
        self.signal = 0
        """The first signal, 0 if none has come."""
        self.signal_time = 0.0
        """When it came."""
        self._previous_handlers: dict[int, Any] = {}
        self._listener = contextlib.ExitStack()
        self._is_over = threading.Event()

    def __enter__(self) -> Self:
        self._previous_handlers = install_handlers(self._handle_signal)
        if self._previous_handlers:
            self._listener.enter_context(
                listen_for_signals(
                    _ignore_signal if self.patient else self._second_signal_handler()
                )
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._listener.close()
        restore_handlers(self._previous_handlers)

    def _handle_signal(self, number: int, _: FrameType | None) -> None:
        if self.signal == 0:
            self.signal, self.signal_time = number, time.monotonic()
            self.on_first_signal(number)
        elif _is_immediate_end(number, self.signal, self.signal_time):
            self.on_repeated_signal(number)

    def _second_signal_handler(self) -> Callable[[int], None]:
        """Ends the process by a second signal that the interpreter has no time for."""
        first: list[tuple[int, float]] = []

        def heard(number: int) -> None:
            if not first:
                first.append((number, time.monotonic()))
            elif _is_immediate_end(number, *first[0]) and not self._is_over.wait(
                SECOND_SIGNAL_SECONDS
            ):
                _write_stderr("Interrupted.")
                os._exit(128 + number)

        return heard

    def on_first_signal(self, number: int) -> None:
        """What is done when the first signal comes."""
        if not self.quiet:
            _write_stderr("Stopping: finishing the step, then saving; Ctrl-C again stops at once.")

    def on_repeated_signal(self, number: int) -> None:
        """What is done when another one comes."""
        if not self.patient:
            raise KeyboardInterrupt(number)


def _is_immediate_end(number: int, first: int, when: float) -> bool:
    """Whether a signal after the first one asks for an end at once."""
    again = number == signal.SIGINT or number == first == signal.SIGTERM
    return again and time.monotonic() - when > ECHO_SECONDS


@contextlib.contextmanager
def listen_for_signals(heard: Callable[[int], None]) -> Iterator[None]:
    """Inside, a thread hears each signal to stop at once, also while the interpreter is in C++.

    Handlers of Python run only when that has returned, and two equal signals are one to them.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def listen() -> None:
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            while byte := pipe.read(1):
                if byte[0] in STOP_SIGNALS:
                    heard(byte[0])

    threading.Thread(target=listen, daemon=True).start()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)


def exit_on_stop_signals() -> None:
    """Until something else is said, signals to stop end this process: it has done nothing yet."""

    def end(_: int, __: FrameType | None) -> None:
        _write_stderr(NOTHING_SAVED_MESSAGE)
        os._exit(STOPPED_EXIT_CODE)

    install_handlers(end)


def install_handlers(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Have all signals to stop go to a handler; those that were there before."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handler) for number in STOP_SIGNALS}


def restore_handlers(before: dict[int, Any]) -> None:
    """Have the handlers that were there before."""
    while before:
        number, handler = before.popitem()
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def report_errors(me: ProcessInfo, *, quiet: bool = False, trains: bool = True) -> Iterator[None]:
    """Turn an error inside into a message (without traceback if mendable) and an exit code.

    quiet: say nothing, as another rank says the same; trains: signals ask a run to stop, which it
    does also while the interpreter waits for C++, until somebody else sees to them (`Stop`), and
    nobody has to read what is printed. Other programs end when their reader has seen enough.
    """
    with (
        lasting_output() if trains else contextlib.nullcontext(),
        _exit_with_message(me, quiet=quiet, trains=trains),
    ):
        yield


@contextlib.contextmanager
def _exit_with_message(me: ProcessInfo, *, quiet: bool, trains: bool) -> Iterator[None]:
    before = install_handlers(_raise_stop_requested if trains else _raise_interrupt)
    left = threading.Event()

    def heard(_: int) -> None:
        if trains and not left.wait(FIRST_SIGNAL_SECONDS):
            _write_stderr(NOTHING_SAVED_MESSAGE)
            os._exit(STOPPED_EXIT_CODE)

    try:
        with listen_for_signals(heard) if before else contextlib.nullcontext():
            yield
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, BrokenPipeError) and not trains:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(128 + signal.SIGPIPE) from None
        if me.world_size > 1:
            where = f"rank {me.rank}: "
        else:
            where = ""
        message, code = _describe_error(error)
        # A supervisor tells of stops and of other ranks' errors by itself.
        quiet = quiet or isinstance(error, StopRequested if me.error_file else OtherRankError)
        if not quiet:
            _leave_report(
                me, where + message, code, secondary=isinstance(error, CommunicationError)
            )
        abort_communicators(code=code)
        raise SystemExit(code) from None
    finally:
        left.set()
        restore_handlers(before)


def abort_communicators(seconds: float = ABORT_SECONDS, code: int = INTERNAL_EXIT_CODE) -> None:
    """Tell the other ranks that this one has failed, and end what NCCL has under way.

    A kernel that waits for another rank never ends by itself, and over shared memory nobody notices
    that the other one is gone. If aborting takes longer than `seconds`, the process ends with
    `code`; SIGALRM ends it if even that cannot be done.
    """
    if "torch" not in sys.modules:
        return
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return
    if distributed.get_backend() != "nccl":
        return
    c10d: Any = distributed.distributed_c10d
    with contextlib.suppress(RuntimeError):  # the store may be gone, and with it all ranks
        c10d._get_default_store().set(FAILED_KEY, str(distributed.get_rank()))
    with contextlib.suppress(ValueError):  # only the main thread may set a handler
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 2.0 * seconds)
    thread = threading.Thread(target=c10d._abort_process_group, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        sys.stderr.flush()
        os._exit(code)
    signal.setitimer(signal.ITIMER_REAL, 0.0)


@contextlib.contextmanager
def end_with_others(me: ProcessInfo) -> Iterator[None]:
    """Inside, this process ends soon after another rank has said that it failed.

    The host may wait for a kernel that waits for that rank; no exception would reach it.
    """
    from torch import distributed

    c10d: Any = distributed.distributed_c10d
    store = c10d._get_default_store()
    left = threading.Event()

    def look() -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone: the run is over
            while not left.wait(1.0):
                if store.check([FAILED_KEY]):
                    break
            else:
                return
            rank = store.get(FAILED_KEY).decode()
            if not left.wait(GRACE_SECONDS):  # else it has met the error itself
                words = f"rank {me.rank}: rank {rank} has failed. Its own message says why."
                _leave_report(me, words, CommunicationError.exit_code, secondary=True)
                os._exit(CommunicationError.exit_code)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join(2.0)


def _write_stderr(words: str) -> None:
    """Write to stderr, if somebody reads it; not print, which may be at work underneath."""
    with contextlib.suppress(OSError):
        os.write(2, f"{words}\n".encode())


def _ignore_signal(_: int) -> None:
    pass


def _raise_stop_requested(number: int, _: FrameType | None) -> None:
    raise StopRequested(number)


def _raise_interrupt(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


def _describe_error(error: BaseException) -> tuple[str, int]:
    """Message and exit code of an error; only what is nobody's mistake shows its traceback."""
    if file_handles.is_shortage(error):
        return file_handles.describe_shortage(), PlanError.exit_code
    if isinstance(error, RanvierError):
        return f"{type(error).__name__}: {error}", error.exit_code
    if isinstance(error, StopRequested):
        return NOTHING_SAVED_MESSAGE, STOPPED_EXIT_CODE
    if isinstance(error, KeyboardInterrupt):
        if error.args:
            number = error.args[0]
        else:
            number = signal.SIGINT
        return "Interrupted.", 128 + int(number)
    if isinstance(error, OSError) and error.errno in WRITE_ERRNOS:
        rule = "A run must be able to write there. Free space or choose another train.out."
        return f"{error.filename or 'A file'}: {error.strerror}. {rule}", WriteError.exit_code
    if isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY_TEXTS):
        rule = "Weights, gradients, moments and activations of a rank must fit on its device."
        remedy = (
            "Use memory.fit=auto (if it is on, a memory.limit below what the device has), a "
            "smaller plan.micro_batch, or more ranks."
        )
        return (
            f"Out of memory: {str(error).splitlines()[0][:200]}. {rule} {remedy}",
            INTERNAL_EXIT_CODE,
        )
    import traceback  # most runs have none to tell

    return "".join(traceback.format_exception(error)).rstrip(), INTERNAL_EXIT_CODE


def _leave_report(me: ProcessInfo, message: str, code: int, *, secondary: bool) -> None:
    if not me.error_file:
        print(message, file=sys.stderr, flush=True)
        return
    report = {"message": message, "code": code, "secondary": secondary, "time": time.time()}
    try:
        Path(me.error_file).write_text(json.dumps(report))
    except OSError:  # the disk may be full: that may be the very error
        print(message, file=sys.stderr, flush=True)
