"""Worker pool: forked processes that map functions over lists and keep their caches between calls.

The workers are forked, so everything that the functions are bound to exists in them, and caches
keyed by object identity keep working. Only names, items and results are sent over pipes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ranvier.errors import RanvierError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkProcess

WorkerFunction = Callable[[Any], Any]
PoolMap = Callable[[str, Sequence[Any]], list[Any]]
ResultCallback = Callable[[Sequence[Any]], None]
PIECES_PER_WORKER = 16
"""Pieces of a list per worker: large enough that neighbors share cached work, small enough that
no worker waits long for the last piece."""


@contextmanager
def open_worker_pool(
    functions: Mapping[str, WorkerFunction], workers: int, seen: ResultCallback | None = None
) -> Iterator[PoolMap]:
    """Yields a function that maps a named function over a list. Results are in order.

    With one worker, or where processes cannot be forked, none is started. `seen` is called with
    some results at a time as they arrive, in any order.
    """
    told = seen or _ignore_results
    if workers > 1:
        # Imported only if needed, to start small plans sooner.
        import multiprocessing

    if workers < 2 or "fork" not in multiprocessing.get_all_start_methods():
        yield lambda name, items: [_report_result(functions[name](item), told) for item in items]
        return
    fork = multiprocessing.get_context("fork")
    crew = dict["Connection", "ForkProcess"]()
    try:
        for _ in range(workers):
            mine, theirs = fork.Pipe()
            # A worker must close the pipe ends of the others, which it inherits by fork: otherwise
            # they would not see EOF when this process exits.
            other = fork.Process(
                target=_run_worker, args=(functions, theirs, [*crew, mine]), daemon=True
            )
            crew[mine] = other
            other.start()
            theirs.close()
        yield lambda name, items: _WorkQueue(crew, name, items, told).collect_results()
    finally:
        for mine, other in crew.items():
            # Closing the pipe ends an idle worker; a busy one is terminated.
            mine.close()
            if other.pid is not None:
                other.terminate()
                other.join()


def _ignore_results(results: Sequence[Any]) -> None:
    """Does nothing: the default callback."""


def _report_result(result: Any, seen: ResultCallback) -> Any:
    seen([result])
    return result


@dataclass
class _WorkQueue:
    """A list whose pieces are sent to workers as they become idle."""

    workers: Mapping[Connection, ForkProcess]
    function_name: str
    items: Sequence[Any]
    on_results: ResultCallback = _ignore_results
    piece_starts: dict[Connection, int] = field(default_factory=dict)
    """Start of the piece that each busy worker has."""

    def __post_init__(self) -> None:
        self.piece_size = max(-(-len(self.items) // (PIECES_PER_WORKER * len(self.workers))), 1)
        self.next_starts = iter(range(0, len(self.items), self.piece_size))

    def collect_results(self) -> list[Any]:
        """Returns the results of all items, in order."""
        from multiprocessing.connection import wait

        found = dict[int, list[Any]]()
        for pipe in self.workers:
            self.send_piece(pipe)
        while self.piece_starts:
            ready = wait([*self.piece_starts])
            for pipe in [one for one in self.piece_starts if one in ready]:
                start = self.piece_starts.pop(pipe)
                results = self.receive_piece(pipe)
                # Keep the worker busy before the callback runs.
                self.send_piece(pipe)
                found[start] = results
                self.on_results(results)
        return [result for start in sorted(found) for result in found[start]]

    def send_piece(self, pipe: Connection) -> None:
        """Sends the next piece, if there is one."""
        start = next(self.next_starts, None)
        if start is not None:
            pipe.send((self.function_name, self.items[start : start + self.piece_size]))
            self.piece_starts[pipe] = start

    def receive_piece(self, pipe: Connection) -> list[Any]:
        """Receives the results of a piece; raises the worker's error, if any."""
        try:
            results = pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            other = self.workers[pipe]
            other.join(1.0)
            raise RanvierError(
                f"A worker process ended with exit code {other.exitcode} before its work was done. "
                "Workers must run until the end. Check whether memory ran out, and try again."
            ) from error
        if isinstance(results, BaseException):
            raise results
        found: list[Any] = results
        return found


def _run_worker(
    functions: Mapping[str, WorkerFunction], pipe: Connection, others: Sequence[Connection]
) -> None:
    """Processes pieces until the other end of the pipe is closed. The parent handles signals."""
    import signal

    # Undo the parent's handlers: Ctrl-C reaches the whole process group, but only the parent acts
    # on it, and terminates its workers.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for one in others:
        one.close()
    while True:
        try:
            name, items = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            pipe.send([functions[name](item) for item in items])
        except BrokenPipeError:
            return
        except Exception as error:
            _send_error(pipe, error)


def _send_error(pipe: Connection, error: Exception) -> None:
    """Sends an error, unchanged if it can be pickled."""
    try:
        pipe.send(error)
    # Pickling may fail with any exception.
    except Exception:
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
