"""Lanes: work in order beside what the device computes; on a CPU it is done at once.

A lane is a stream of its own. Who needs what it did waits for a mark, on the device, not the host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ranvier.comm.accumulator import Pieces

StreamEvent = torch.cuda.Event | None
"""A point in the order of a stream; None where everything is done at once."""


class SideStream:
    """A stream of its own."""

    def __init__(self, device: torch.device, *, first: bool = False) -> None:
        """first: before what other streams have waiting; for short work that others wait for."""
        self.device = device
        priority = -1 if first else 0
        self.stream = torch.cuda.Stream(device, priority) if device.type == "cuda" else None

    @contextmanager
    def run_after(self, *marks: StreamEvent) -> Iterator[None]:
        """Work inside runs here, after these marks."""
        if self.stream is None:
            yield
            return
        for mark in marks:
            if mark is not None:
                self.stream.wait_event(mark)
        with torch.cuda.stream(self.stream):
            yield

    def record_use(self, memory: torch.Tensor) -> None:
        """Nobody else gets this memory before it is done here."""
        if self.stream is not None:
            memory.record_stream(self.stream)

    def synchronize(self) -> None:
        """Have the host wait for all that was given to it."""
        if self.stream is not None:
            self.stream.synchronize()

    def record_event(self) -> StreamEvent:
        """The end of what was given to it so far."""
        return None if self.stream is None else self.stream.record_event()


def record_current_event(device: torch.device) -> StreamEvent:
    """The end of what the current stream was given so far."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def wait_for_event(mark: StreamEvent, device: torch.device) -> None:
    """Have the current stream wait."""
    if mark is not None:
        torch.cuda.current_stream(device).wait_event(mark)


@dataclass(eq=False)
class PendingUpdate:
    """An update of weights that is under way: they must not be read before it is done."""

    device: torch.device
    grad_pieces: Pieces
    """Gradients, which are read until then."""
    event_ready: threading.Event | None = None
    """Set by a thread once it has given the mark; None if there is no thread."""
    raise_failure: Callable[[], None] | None = None
    """Raises what that thread has failed with."""
    done_event: StreamEvent = None

    def wait_for_done_event(self) -> StreamEvent:
        """When it is done; a host waits until that is known."""
        if self.event_ready is not None:
            self.event_ready.wait()
        if self.raise_failure is not None:
            self.raise_failure()
        return self.done_event

    def wait(self) -> None:
        """Have the current stream wait."""
        wait_for_event(self.wait_for_done_event(), self.device)
