"""Several: processes that call functions for items of a list, and keep what they have computed.

They are forked, so all that the functions are bound to is there as it is in this process: results
that are kept by the identity of an object are found again. Only names, items and results travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

Function = Callable[[Any], Any]
Mapped = Callable[[str, Sequence[Any]], list[Any]]
PIECES = 16
"""Pieces of a list for each process: neighbours share much, and none should wait for the last."""


@contextmanager
def several(functions: Mapping[str, Function], workers: int) -> Iterator[Mapped]:
    """Calls a function, by its name, for each item of a list; results are in order.

    With one worker no process is started.
    """
    if workers < 2:
        yield lambda name, items: [functions[name](item) for item in items]
        return
    import multiprocessing  # a fiftieth of a second, of every start

    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe() for _ in range(workers)]
    others = [
        fork.Process(target=_serve, args=(functions, theirs), daemon=True) for _, theirs in pipes
    ]
    for one in others:
        one.start()
    for _, theirs in pipes:
        theirs.close()
    try:
        yield lambda name, items: _shared([mine for mine, _ in pipes], name, items)
    finally:
        for one in others:
            one.terminate()
        for one in others:
            one.join()


def _shared(pipes: Sequence[Connection], name: str, items: Sequence[Any]) -> list[Any]:
    """Give pieces of a list to whoever is free."""
    from multiprocessing.connection import wait

    size = max(-(-len(items) // (PIECES * len(pipes))), 1)
    starts, found = iter(range(0, len(items), size)), dict[int, list[Any]]()
    busy: dict[Connection, int] = {}
    for pipe in pipes:
        _give(pipe, name, items, size, starts, busy)
    while busy:
        for pipe in [one for one in busy if one in wait([*busy])]:
            results = pipe.recv()
            if isinstance(results, BaseException):
                raise results
            found[busy.pop(pipe)] = results
            _give(pipe, name, items, size, starts, busy)
    return [result for start in sorted(found) for result in found[start]]


def _give(
    pipe: Connection,
    name: str,
    items: Sequence[Any],
    size: int,
    starts: Iterator[int],
    busy: dict[Connection, int],
) -> None:
    start = next(starts, None)
    if start is not None:
        pipe.send((name, items[start : start + size]))
        busy[pipe] = start


def _serve(functions: Mapping[str, Function], pipe: Connection) -> None:
    """Work on pieces until the other end is gone."""
    try:
        while True:
            name, items = pipe.recv()
            try:
                pipe.send([functions[name](item) for item in items])
            except Exception as error:
                pipe.send(error)
    except (EOFError, KeyboardInterrupt, BrokenPipeError):
        return
