"""Loader: batches made ahead in a thread, and the rows of a batch that a rank reads.

A rank reads only its own samples. Which they are follows from its coordinates alone, so the thread
never makes a process group.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ranvier.data.batch import Batch
from ranvier.data.window import Window
from ranvier.errors import DataError, HangError
from ranvier.grid import WEEK, Grid

T = TypeVar("T")


class Samples(Protocol):
    """What has numbered samples: a mixture or a stream."""

    @property
    def seq(self) -> int:
        """Tokens of a sample."""

    @property
    def packed(self) -> bool:
        """Whether samples keep their documents apart."""

    def sample(self, number: int) -> Window:
        """The sample of a number."""


LAST_SECONDS = 5.0
"""How long closing waits for what is being made; a thread that hangs is left to its fate."""


class Loader(Generic[T]):
    """make(first), make(first + 1), ..., made by a thread, at most `ahead` before their use.

    patience: seconds after which a batch that does not come is an error.
    """

    def __init__(
        self, make: Callable[[int], T], first: int = 0, ahead: int = 2, *, patience: float = WEEK
    ) -> None:
        assert ahead >= 1, ahead
        self._make, self._ahead, self._patience = make, ahead, patience
        self._number = first
        self._ready: deque[T] = deque()
        self._error: BaseException | None = None
        self._closed = self._hung = False
        self._waited = 0.0
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._work, args=(first,), daemon=True)
        self._thread.start()

    def _work(self, number: int) -> None:
        try:
            while self._room():
                made = self._make(number)
                with self._change:
                    self._ready.append(made)
                    self._change.notify_all()
                number += 1
        except OSError as error:
            text = f"Batch {number} cannot be read: {error}. Corpora stay as they are during a run."
            self._fail(DataError(f"{text} Look at the file and its disk, then go on."))
        except BaseException as error:
            # whatever it is, the consumer must see it instead of waiting
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._change:
            self._error = error
            self._change.notify_all()

    def _room(self) -> bool:
        """Wait until another one may be made; False if the loader is closed."""
        with self._change:
            self._change.wait_for(lambda: self._closed or len(self._ready) < self._ahead)
            return not self._closed

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        start = time.perf_counter()
        with self._change:
            there = self._change.wait_for(
                lambda: self._ready or self._error or self._closed, min(self._patience, WEEK)
            )
            self._waited += time.perf_counter() - start
            if not there:
                self._hung = True
                raise HangError(
                    f"Batch {self._number} has not come for {self._patience:.0f} s. The thread "
                    "that reads the data hangs, perhaps in a file system. Look at the disks of the "
                    "corpora, or use a larger train.timeout."
                )
            if self._closed:
                raise StopIteration
            if self._ready:
                made = self._ready.popleft()
                self._number += 1
                self._change.notify_all()
                return made
            assert self._error is not None
            raise self._error

    def waited(self) -> float:
        """Seconds the consumer stood waiting since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def close(self) -> None:
        """End the thread, after what it is making; nothing more is given."""
        with self._change:
            self._closed = True
            self._ready.clear()
            self._change.notify_all()
        # A launcher gives a rank that fails seconds to say why: none are spent on a hang.
        self._thread.join(0.0 if self._hung else LAST_SECONDS)

    def __enter__(self) -> Loader[T]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()


def rows(batch: int, grid: Grid) -> range:
    """Which samples of a batch this rank reads: a contiguous share over data, expert and depth."""
    size, index = 1, 0
    for axis in ("data", "expert", "depth"):
        size, index = size * grid.degrees[axis], index * grid.degrees[axis] + grid.index[axis]
    share, rest = divmod(batch, size)
    assert rest == 0, (batch, size)
    return range(index * share, (index + 1) * share)


def micro_batches(
    samples: Samples, first: int, batch: int, grid: Grid, size: int, *, pin: bool = False
) -> list[Batch]:
    """The micro-batches of this rank of samples `first` to `first + batch`, `size` at a time."""
    numbers = [first + row for row in rows(batch, grid)]
    windows = [samples.sample(number) for number in numbers]
    return _cut(numbers, windows, size, packed=samples.packed, pin=pin)


def held_out_batches(
    samples: Samples, count: int, batch: int, grid: Grid, size: int, *, pin: bool = False
) -> Iterator[list[Batch]]:
    """The micro-batches of this rank of samples 0 to `count`, batch after batch.

    The last batch is filled up with samples without targets.
    """
    blank = Window.blank(samples.seq)
    for first in range(0, count, batch):
        numbers = [first + row for row in rows(batch, grid)]
        windows = [samples.sample(number) if number < count else blank for number in numbers]
        yield _cut(numbers, windows, size, packed=samples.packed, pin=pin)


def _cut(
    numbers: Sequence[int], windows: Sequence[Window], size: int, *, packed: bool, pin: bool
) -> list[Batch]:
    assert len(windows) % size == 0, (len(windows), size)

    def stacked(name: str) -> Tensor:
        return torch.from_numpy(np.stack([getattr(window, name) for window in windows]))

    mine = Batch(
        stacked("tokens"),
        stacked("targets"),
        stacked("positions") if packed else None,
        stacked("documents") if packed else None,
        torch.tensor(numbers, pin_memory=pin),
    )
    mine = mine.pin() if pin else mine
    return [mine.select(slice(i, i + size)) for i in range(0, len(windows), size)]
