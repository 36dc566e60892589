"""Side streams: work that runs in parallel to the compute stream; on a CPU it runs immediately.

Consumers of this work wait for an event on the device, not on the host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ranvier.comm.accumulator import Pieces

StreamEvent = torch.cuda.Event | None
"""CUDA event on a stream; None on a CPU, where all work runs immediately."""


class SideStream:
    """A CUDA stream in addition to the compute stream; a no-op on a CPU."""

    def __init__(self, device: torch.device, *, first: bool = False) -> None:
        """first: give it priority over other streams, for short work that others wait for."""
        self.device = device
        # In CUDA a lower number is a higher priority.
        priority = -1 if first else 0
        self.stream = torch.cuda.Stream(device, priority) if device.type == "cuda" else None

    @contextmanager
    def run_after(self, *marks: StreamEvent) -> Iterator[None]:
        """Returns a context that runs work on this stream, after these events."""
        # Without a stream all previous work is already done: run in program order.
        if self.stream is None:
            yield
            return
        for mark in marks:
            if mark is not None:
                self.stream.wait_event(mark)
        with torch.cuda.stream(self.stream):
            yield

    def record_use(self, memory: torch.Tensor) -> None:
        """Prevents the allocator from reusing this memory before this stream is done with it."""
        if self.stream is not None:
            memory.record_stream(self.stream)

    def synchronize(self) -> None:
        """Blocks the host until all work of this stream is done."""
        if self.stream is not None:
            self.stream.synchronize()

    def record_event(self) -> StreamEvent:
        """Records an event after all work queued so far."""
        return None if self.stream is None else self.stream.record_event()


def record_current_event(device: torch.device) -> StreamEvent:
    """Records an event on the current stream after all work queued so far."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def wait_for_event(mark: StreamEvent, device: torch.device) -> None:
    """Makes the current stream wait for an event."""
    if mark is not None:
        torch.cuda.current_stream(device).wait_event(mark)


@dataclass(eq=False)
class PendingUpdate:
    """A weight update in progress; the weights must not be read before it is done."""

    device: torch.device
    grad_pieces: Pieces
    """The gradients that the update reads, kept alive until it is done."""
    event_ready: threading.Event | None = None
    """Set by a thread once `done_event` is recorded; None without a thread."""
    raise_failure: Callable[[], None] | None = None
    """Raises the error of that thread if it failed."""
    done_event: StreamEvent = None

    def wait_for_done_event(self) -> StreamEvent:
        """Returns the event after the update; blocks the host until that event is recorded."""
        # An event that is not recorded counts as complete, so a stream cannot wait for it yet.
        if self.event_ready is not None:
            self.event_ready.wait()
        if self.raise_failure is not None:
            self.raise_failure()
        return self.done_event

    def wait(self) -> None:
        """Makes the current stream wait for the update."""
        wait_for_event(self.wait_for_done_event(), self.device)
