"""Signals, error messages and exit codes of ranks and launchers."""

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
"""Errors of a file that cannot be written: full disk, missing permission, invalid path."""
OUT_OF_MEMORY_TEXTS = ("out of memory", "DefaultCPUAllocator", "Unable to allocate")
"""Texts by which out-of-memory errors of torch and numpy are recognized."""


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that request a run to stop."""
ECHO_SECONDS = 0.1
"""A signal repeated within this time counts as one, sent to a process and to its group."""
SECOND_SIGNAL_SECONDS = 1.0
"""Time that the interpreter has to react to a second signal before the process is ended."""
FIRST_SIGNAL_SECONDS = 3.0
"""The same for a first signal, if there is nothing to save."""
ABORT_SECONDS = 5.0
"""Time limit for aborting the communicators of a failed rank."""
GRACE_SECONDS = 3.0
"""Time that a rank has to exit after another one has failed."""
FAILED_KEY = "ranvier/failed"
"""Store key under which a rank announces that it has failed."""
NOTHING_SAVED_MESSAGE = "Stopped before the first step. There was nothing to save."


class StopRequested(KeyboardInterrupt):
    """A stop signal arrived while there was nothing to save."""


class GracefulStop:
    """Context that only records the first stop signal, so that the step can finish and be saved.

    A second SIGINT ends the process immediately, and so does a second SIGTERM; a SIGTERM after a
    SIGINT, as torchrun sends it, is ignored. Only the main thread can handle signals.

    patient: ignore further signals, because the parent of this rank handles them.
    """

    def __init__(self, *, quiet: bool = False, patient: bool = False) -> None:
        self.quiet = quiet
        self.patient = patient
        self.signal = 0
        """The first signal; 0 if none has arrived."""
        self.signal_time = 0.0
        """Time at which it arrived."""
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
        """Return a listener that ends the process if the interpreter ignores a second signal."""
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
        """React to the first signal."""
        if not self.quiet:
            _write_stderr(
                "Stopping after this step and saving a checkpoint. Press Ctrl-C again to stop "
                "immediately."
            )

    def on_repeated_signal(self, number: int) -> None:
        """React to a further signal."""
        if not self.patient:
            raise KeyboardInterrupt(number)


def _is_immediate_end(number: int, first: int, when: float) -> bool:
    """Whether a signal after the first one requests to end immediately."""
    again = number == signal.SIGINT or number == first == signal.SIGTERM
    return again and time.monotonic() - when > ECHO_SECONDS


@contextlib.contextmanager
def listen_for_signals(heard: Callable[[int], None]) -> Iterator[None]:
    """Context in which a thread receives each stop signal immediately, even while Python runs C++.

    Python's own handlers run only after C++ has returned, and merge two equal signals into one.
    """
    reader, writer = os.pipe()
    # The interpreter's C handler writes the number of each signal into this pipe (set_wakeup_fd);
    # it must not block.
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
    """Lets stop signals end this process until other handlers are installed; there is nothing to
    save."""

    def end(_: int, __: FrameType | None) -> None:
        _write_stderr(NOTHING_SAVED_MESSAGE)
        os._exit(STOPPED_EXIT_CODE)

    install_handlers(end)


def install_handlers(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Install a handler for all stop signals and return the previous ones."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handler) for number in STOP_SIGNALS}


def restore_handlers(before: dict[int, Any]) -> None:
    """Restore the previous handlers."""
    while before:
        number, handler = before.popitem()
        # None is a handler that was not installed from Python.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def report_errors(me: ProcessInfo, *, quiet: bool = False, trains: bool = True) -> Iterator[None]:
    """Turns an error inside into a message and an exit code.

    quiet: print nothing, because another rank reports the same error. trains: obey stop signals
    even while the interpreter waits for C++, until a `GracefulStop` handles them, and ignore a
    closed pipe; other programs end with SIGPIPE.
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
        # The interpreter has not reacted because it runs C++. There is nothing to save, so exit.
        if trains and not left.wait(FIRST_SIGNAL_SECONDS):
            _write_stderr(NOTHING_SAVED_MESSAGE)
            os._exit(STOPPED_EXIT_CODE)

    try:
        with listen_for_signals(heard) if before else contextlib.nullcontext():
            yield
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, BrokenPipeError) and not trains:
            # Python flushes stdout at exit, which must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(128 + signal.SIGPIPE) from None
        if me.world_size > 1:
            where = f"rank {me.rank}: "
        else:
            where = ""
        message, code = _describe_error(error)
        # The agent reports stops and errors of other ranks itself.
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
    """Announces to the other ranks that this one has failed, and aborts NCCL's communicators.

    A kernel that waits for another rank never ends by itself, and over shared memory the loss of
    the other rank is not noticed. If aborting takes longer than `seconds`, the process exits with
    `code`; SIGALRM ends it if even that fails.
    """
    if "torch" not in sys.modules:
        return
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return
    if distributed.get_backend() != "nccl":
        return
    c10d: Any = distributed.distributed_c10d
    # The store may be gone, and with it all ranks.
    with contextlib.suppress(RuntimeError):
        c10d._get_default_store().set(FAILED_KEY, str(distributed.get_rank()))
    # Only the main thread may set a handler.
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 2.0 * seconds)
    # In a thread, because the abort itself may hang.
    thread = threading.Thread(target=c10d._abort_process_group, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        sys.stderr.flush()
        os._exit(code)
    signal.setitimer(signal.ITIMER_REAL, 0.0)


@contextlib.contextmanager
def end_with_others(me: ProcessInfo) -> Iterator[None]:
    """Context in which this process ends soon after another rank has announced its failure.

    The host may wait for a kernel that waits for that rank, and no exception would reach it.
    """
    from torch import distributed

    c10d: Any = distributed.distributed_c10d
    store = c10d._get_default_store()
    left = threading.Event()

    def look() -> None:
        # An error means that the store has closed and the run is over.
        with contextlib.suppress(RuntimeError):
            while not left.wait(1.0):
                if store.check([FAILED_KEY]):
                    break
            else:
                return
            rank = store.get(FAILED_KEY).decode()
            # Otherwise this rank has noticed the failure by itself.
            if not left.wait(GRACE_SECONDS):
                words = f"rank {me.rank}: rank {rank} has failed. See the message of that rank."
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
    """Writes to stderr without `print`, which a signal handler may have interrupted."""
    with contextlib.suppress(OSError):
        os.write(2, f"{words}\n".encode())


def _ignore_signal(_: int) -> None:
    pass


def _raise_stop_requested(number: int, _: FrameType | None) -> None:
    raise StopRequested(number)


def _raise_interrupt(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


def _describe_error(error: BaseException) -> tuple[str, int]:
    """Return message and exit code of an error; only internal errors show their traceback."""
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
        rule = "A run must be able to write there. Free space or use another train.output_dir."
        return f"{error.filename or 'A file'}: {error.strerror}. {rule}", WriteError.exit_code
    if isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY_TEXTS):
        rule = (
            "Weights, gradients, optimizer states and activations of a rank must fit on its device."
        )
        remedy = (
            "Use memory.auto=True (if it is already set, also set memory.device_limit_gib below "
            "the memory of the device), a smaller plan.micro_batch, or more ranks."
        )
        return (
            f"Out of memory: {str(error).splitlines()[0][:200]}. {rule} {remedy}",
            INTERNAL_EXIT_CODE,
        )
    # Imported here, because most runs do not need it.
    import traceback

    return "".join(traceback.format_exception(error)).rstrip(), INTERNAL_EXIT_CODE


def _leave_report(me: ProcessInfo, message: str, code: int, *, secondary: bool) -> None:
    if not me.error_file:
        print(message, file=sys.stderr, flush=True)
        return
    report = {"message": message, "code": code, "secondary": secondary, "time": time.time()}
    try:
        Path(me.error_file).write_text(json.dumps(report))
    # The disk may be full, which may be the error to report.
    except OSError:
        print(message, file=sys.stderr, flush=True)
