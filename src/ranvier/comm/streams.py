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

Mark = torch.cuda.Event | None
"""A point in the order of a stream; None where everything is done at once."""


class Lane:
    """A stream of its own."""

    def __init__(self, device: torch.device, *, first: bool = False) -> None:
        """first: before what other streams have waiting; for short work that others wait for."""
        self.device, priority = device, -1 if first else 0
        self.stream = torch.cuda.Stream(device, priority) if device.type == "cuda" else None

    @contextmanager
    def after(self, *marks: Mark) -> Iterator[None]:
        """Work inside runs here, after these marks."""
        if self.stream is None:
            yield
            return
        for mark in marks:
            if mark is not None:
                self.stream.wait_event(mark)
        with torch.cuda.stream(self.stream):
            yield

    def uses(self, memory: torch.Tensor) -> None:
        """Nobody else gets this memory before it is done here."""
        if self.stream is not None:
            memory.record_stream(self.stream)

    def synchronize(self) -> None:
        """Have the host wait for all that was given to it."""
        if self.stream is not None:
            self.stream.synchronize()

    def mark(self) -> Mark:
        """The end of what was given to it so far."""
        return None if self.stream is None else self.stream.record_event()


def here(device: torch.device) -> Mark:
    """The end of what the current stream was given so far."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def await_mark(mark: Mark, device: torch.device) -> None:
    """Have the current stream wait."""
    if mark is not None:
        torch.cuda.current_stream(device).wait_event(mark)


@dataclass(eq=False)
class Updating:
    """An update of weights that is under way: they must not be read before it is done."""

    device: torch.device
    pieces: Pieces
    """Gradients, which are read until then."""
    known: threading.Event | None = None
    """Set by a thread once it has given the mark; None if there is no thread."""
    check: Callable[[], None] | None = None
    """Raises what that thread has failed with."""
    mark: Mark = None

    def known_mark(self) -> Mark:
        """When it is done; a host waits until that is known."""
        if self.known is not None:
            self.known.wait()
        if self.check is not None:
            self.check()
        return self.mark

    def wait(self) -> None:
        """Have the current stream wait."""
        await_mark(self.known_mark(), self.device)
