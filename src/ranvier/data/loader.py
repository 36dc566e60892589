"""Loader: prefetches batches in a thread, and selects the samples of a batch that a rank reads.

A rank reads only its own samples. They follow from its coordinates alone, so that the thread never
creates a process group.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ranvier.config.plan import ContextOrder
from ranvier.data.batch import BatchT, PackedSamples, SampleSource
from ranvier.data.window_assignment import WindowCost, assign_windows
from ranvier.errors import DataError, HangError
from ranvier.grid import WEEK_SECONDS, Grid
from ranvier.sharding import REPLICA_AXES, count_parts, local_range

T = TypeVar("T")


CLOSE_SECONDS = 5.0
"""Seconds that close() waits for the batch in progress; a thread that hangs is abandoned."""


class Loader(Generic[T]):
    """Yields make(first), make(first + 1), ..., prefetched by a thread, at most `ahead` of them.

    patience: timeout in seconds for a single batch.
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
        # A daemon, since a read that hangs must not keep the process from exiting.
        self._thread = threading.Thread(target=self._make_batches, args=(first,), daemon=True)
        self._thread.start()

    def _make_batches(self, number: int) -> None:
        try:
            while self._wait_for_room():
                # Outside of the lock: the consumer takes finished batches meanwhile.
                made = self._make_item(number)
                with self._condition:
                    self._ready.append(made)
                    self._condition.notify_all()
                number += 1
        except OSError as error:
            text = f"Batch {number} cannot be read: {error}. Corpora must not change during a run."
            self._set_error(DataError(f"{text} Check the file and its disk, then resume the run."))
        except BaseException as error:
            # The consumer must raise any error instead of waiting.
            self._set_error(error)

    def _set_error(self, error: BaseException) -> None:
        with self._condition:
            self._error = error
            self._condition.notify_all()

    def _wait_for_room(self) -> bool:
        """Wait until another batch may be made; False if the loader is closed."""
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
                    f"Batch {self._number} has not arrived for {self._timeout_seconds:.0f} s. The "
                    "thread that reads the data hangs, possibly in the file system. Check the "
                    "disks of the corpora, or use a larger train.comm_timeout_seconds."
                )
            if self._is_closed:
                raise StopIteration
            # Batches made before an error are still delivered; the error comes after them.
            if self._ready:
                made = self._ready.popleft()
                self._number += 1
                self._condition.notify_all()
                return made
            assert self._error is not None
            raise self._error

    def take_wait_seconds(self) -> float:
        """Seconds the consumer has waited since the last call."""
        waited = self._wait_seconds
        self._wait_seconds = 0.0
        return waited

    def close(self) -> None:
        """Stop the thread after the batch in progress; no further batch is delivered."""
        with self._condition:
            self._is_closed = True
            self._ready.clear()
            self._condition.notify_all()
        # The launcher gives a failing rank a few seconds to report its error: do not spend them on
        # a thread that hangs.
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
    """Samples of a batch that this rank reads: a contiguous share over data, expert and depth."""
    return local_range(batch, REPLICA_AXES, grid.degrees, grid.index)


def assign_samples(
    lengths: Sequence[Sequence[int]], num_replicas: int, size: int, cost: WindowCost | None
) -> NDArray[np.int64]:
    """Returns which samples of a batch each replica computes in each micro-batch, `[replicas,
    micro-batches, size]`: by cost, or without it in their order.

    lengths: of the documents of each sample.
    """
    micro_batches = len(lengths) // (num_replicas * size)
    # A single replica does not wait for others.
    if cost is None or num_replicas == 1:
        return np.arange(len(lengths)).reshape(num_replicas, micro_batches, size)
    costs = [cost.of_documents(some) for some in lengths]
    return assign_windows(costs, num_replicas, micro_batches, size)


def load_micro_batches(
    samples: SampleSource[BatchT],
    first: int,
    batch: int,
    grid: Grid,
    size: int,
    *,
    order: ContextOrder = "balanced",
    cost: WindowCost | None = None,
    pin: bool = False,
) -> list[BatchT]:
    """This rank's micro-batches of samples `first` to `first + batch`, `size` samples each.

    order: which tokens of a sample the ranks of context get. cost: if given, samples are assigned
    to ranks and micro-batches by it; otherwise in their order.
    """
    rows: Sequence[int] = rank_rows(batch, grid)
    if cost is not None and isinstance(samples, PackedSamples):
        lengths = [samples.document_lengths(first + i) for i in range(batch)]
        assigned = assign_samples(lengths, count_parts(REPLICA_AXES, grid.degrees), size, cost)
        rows = assigned[grid.axis_without_group(*REPLICA_AXES).index].ravel().tolist()
    mine = samples.read_batch([first + row for row in rows])
    return _split_micro_batches(mine.shard_over_context(grid, order), size, pin=pin)


def validation_batches(
    samples: SampleSource[BatchT],
    count: int,
    batch: int,
    grid: Grid,
    size: int,
    *,
    order: ContextOrder = "balanced",
    pin: bool = False,
) -> Iterator[list[BatchT]]:
    """This rank's micro-batches of samples 0 to `count`, batch after batch.

    The last batch is padded with samples without targets.
    """
    for first in range(0, count, batch):
        # All ranks must take part in each batch; blank samples add nothing to the loss.
        mine = samples.read_batch([first + row for row in rank_rows(batch, grid)], end=count)
        yield _split_micro_batches(mine.shard_over_context(grid, order), size, pin=pin)


def _split_micro_batches(mine: BatchT, size: int, *, pin: bool) -> list[BatchT]:
    count = mine.num_samples
    assert count % size == 0, (count, size)
    mine = mine.pin_memory() if pin else mine
    return [mine.select(slice(i, i + size)) for i in range(0, count, size)]
