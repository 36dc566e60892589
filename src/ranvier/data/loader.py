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
from ranvier.grid import WEEK_SECONDS, Grid

T = TypeVar("T")


class SampleSource(Protocol):
    """What has numbered samples: a mixture or a stream."""

    @property
    def seq(self) -> int:
        """Tokens of a sample."""

    @property
    def document_mask(self) -> bool:
        """Whether samples keep their documents apart."""

    def read_sample(self, number: int) -> Window:
        """The sample of a number."""


CLOSE_SECONDS = 5.0
"""How long closing waits for what is being made; a thread that hangs is left to its fate."""


class Loader(Generic[T]):
    """make(first), make(first + 1), ..., made by a thread, at most `ahead` before their use.

    patience: seconds after which a batch that does not come is an error.
    """

    def __init__(
        self,
        make: Callable[[int], T],
        first: int = 0,
        ahead: int = 2,
        *,
        patience: float = WEEK_SECONDS,
    ) -> None:
        assert ahead >= 1, ahead
        self._make_item = make
        self._max_ahead = ahead
        self._timeout_seconds = patience
        self._number = first
        self._ready: deque[T] = deque()
        self._error: BaseException | None = None
        self._is_closed = self._has_hung = False
        self._wait_seconds = 0.0
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._make_batches, args=(first,), daemon=True)
        self._thread.start()

    def _make_batches(self, number: int) -> None:
        try:
            while self._wait_for_room():
                made = self._make_item(number)
                with self._condition:
                    self._ready.append(made)
                    self._condition.notify_all()
                number += 1
        except OSError as error:
            text = f"Batch {number} cannot be read: {error}. Corpora stay as they are during a run."
            self._set_error(DataError(f"{text} Look at the file and its disk, then go on."))
        except BaseException as error:
            # whatever it is, the consumer must see it instead of waiting
            self._set_error(error)

    def _set_error(self, error: BaseException) -> None:
        with self._condition:
            self._error = error
            self._condition.notify_all()

    def _wait_for_room(self) -> bool:
        """Wait until another one may be made; False if the loader is closed."""
        with self._condition:
            self._condition.wait_for(lambda: self._is_closed or len(self._ready) < self._max_ahead)
            return not self._is_closed

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        start = time.perf_counter()
        with self._condition:
            there = self._condition.wait_for(
                lambda: self._ready or self._error or self._is_closed,
                min(self._timeout_seconds, WEEK_SECONDS),
            )
            self._wait_seconds += time.perf_counter() - start
            if not there:
                self._has_hung = True
                raise HangError(
                    f"Batch {self._number} has not come for {self._timeout_seconds:.0f} s. The "
                    "thread "
                    "that reads the data hangs, perhaps in a file system. Look at the disks of the "
                    "corpora, or use a larger train.timeout."
                )
            if self._is_closed:
                raise StopIteration
            if self._ready:
                made = self._ready.popleft()
                self._number += 1
                self._condition.notify_all()
                return made
            assert self._error is not None
            raise self._error

    def take_wait_seconds(self) -> float:
        """Seconds the consumer stood waiting since the last call."""
        waited = self._wait_seconds
        self._wait_seconds = 0.0
        return waited

    def close(self) -> None:
        """End the thread, after what it is making; nothing more is given."""
        with self._condition:
            self._is_closed = True
            self._ready.clear()
            self._condition.notify_all()
        # A launcher gives a rank that fails seconds to say why: none are spent on a hang.
        self._thread.join(0.0 if self._has_hung else CLOSE_SECONDS)

    def __enter__(self) -> Loader[T]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()


def rank_rows(batch: int, grid: Grid) -> range:
    """Which samples of a batch this rank reads: a contiguous share over data, expert and depth."""
    size = 1
    index = 0
    for axis in ("data", "expert", "depth"):
        size = size * grid.degrees[axis]
        index = index * grid.degrees[axis] + grid.index[axis]
    share, rest = divmod(batch, size)
    assert rest == 0, (batch, size)
    return range(index * share, (index + 1) * share)


def load_micro_batches(
    samples: SampleSource, first: int, batch: int, grid: Grid, size: int, *, pin: bool = False
) -> list[Batch]:
    """The micro-batches of this rank of samples `first` to `first + batch`, `size` at a time."""
    numbers = [first + row for row in rank_rows(batch, grid)]
    windows = [samples.read_sample(number) for number in numbers]
    return _split_micro_batches(numbers, windows, size, packed=samples.document_mask, pin=pin)


def validation_batches(
    samples: SampleSource, count: int, batch: int, grid: Grid, size: int, *, pin: bool = False
) -> Iterator[list[Batch]]:
    """The micro-batches of this rank of samples 0 to `count`, batch after batch.

    The last batch is filled up with samples without targets.
    """
    blank = Window.without_targets(samples.seq)
    for first in range(0, count, batch):
        numbers = [first + row for row in rank_rows(batch, grid)]
        windows = [samples.read_sample(number) if number < count else blank for number in numbers]
        yield _split_micro_batches(numbers, windows, size, packed=samples.document_mask, pin=pin)


def _split_micro_batches(
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
    mine = mine.pin_memory() if pin else mine
    return [mine.select(slice(i, i + size)) for i in range(0, len(windows), size)]
