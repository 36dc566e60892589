"""Inbox and outbox: messages between stages, received ahead and sent behind by threads.

A message is known by what it is of (a direction and a chunk) and by its number. A listener for each
has the next receive posted while the last message waits to be taken, so what has arrived is a fact
that can be asked for, on Gloo too, where a receive is not done until it is waited for. Sends are
handed to a thread and never block. CUDA tensors pass Gloo through pinned host memory.

Not handled: messages of other shapes than the one that is announced.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from ranvier.errors import CommunicationError
from ranvier.grid import Axis

Key = tuple[str, int]
"""What messages are, as a direction, and of which chunk (or sender)."""
Delay = Callable[[Key, int], float]
"""Seconds that a message is held back, by its key and number; for tests."""


Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of messages."""
TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HEADER = 12
"""Numbers of a header: type, dims, sizes."""


@dataclass(frozen=True)
class Source:
    """Where messages of a key come from."""

    axis: Axis
    index: int
    """Place of the sender on the axis."""
    count: int
    """How many come."""
    device: torch.device
    form: Form | None = None
    """Their shape and type; None: the sender tells before the first."""
    tag: int = 0
    """Tells messages of a sender apart."""
    ahead: int = 0
    """Messages that may wait to be taken; 0: any number."""


class Inbox:
    """Messages that have arrived, in order for each key."""

    def __init__(self, delay: Delay | None = None) -> None:
        self._delay = delay
        self._change = threading.Condition()
        self._ready: dict[Key, deque[Tensor]] = {}
        self._error: tuple[Key, int, BaseException] | None = None
        self.arrived: dict[Key, int] = {}
        """Messages of each key that have come."""
        self.forms: dict[Key, Form] = {}
        """What messages of each key look like."""
        self.log: list[tuple[Key, int, float]] = []
        """When each came."""

    def listen(self, key: Key, source: Source) -> None:
        """Start to receive the messages of a key."""
        self._ready[key], self.arrived[key] = deque(), 0
        threading.Thread(target=self._listen, args=(key, source), daemon=True).start()

    def _listen(self, key: Key, source: Source) -> None:
        number = 0
        try:
            with _stream(source.device) as stream:
                form = source.form or read_header(_received(source, HEADING, stream))
                self.forms[key] = form
                for number in range(source.count):
                    if source.ahead:
                        self._room(key, source.ahead)
                    value = _received(source, form, stream)
                    if self._delay is not None:
                        time.sleep(self._delay(key, number))
                    with self._change:
                        self._ready[key].append(value)
                        self.arrived[key] += 1
                        self.log.append((key, number, time.perf_counter()))
                        self._change.notify_all()
        except BaseException as error:  # whoever waits must see it
            with self._change:
                self._error = self._error or (key, number, error)
                self._change.notify_all()

    def _room(self, key: Key, ahead: int) -> None:
        """Wait until fewer than so many messages wait to be taken."""
        with self._change:
            self._change.wait_for(lambda: len(self._ready[key]) < ahead)

    def wait(self, seen: int, seconds: float) -> bool:
        """Wait until more than `seen` messages have come in all; False if none came in time."""
        with self._change:
            new = self._change.wait_for(lambda: self._error or self.total > seen, timeout=seconds)
            if self._error is not None:
                key, number, error = self._error
                raise LostError(key, number, error)
            return bool(new)

    @property
    def total(self) -> int:
        """Messages that have come in all."""
        return sum(self.arrived.values())

    def take(self, key: Key, device: torch.device) -> Tensor:
        """The next message of a key, which must have come."""
        with self._change:
            value = self._ready[key].popleft()
            self._change.notify_all()
        return value.to(device, non_blocking=True)


class LostError(CommunicationError):
    """A message that will not come."""

    def __init__(self, key: Key, number: int, error: BaseException) -> None:
        super().__init__(str(error))
        self.key, self.number, self.error = key, number, error


@contextmanager
def _stream(device: torch.device) -> Iterator[Any]:
    """A stream of the thread's own."""
    if device.type != "cuda":
        yield None
        return
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield stream


def _staged(axis: Axis, device: torch.device) -> bool:
    return device.type == "cuda" and distributed.get_backend(axis.group) == "gloo"


HEADING: Form = ((HEADER,), torch.int64)


def header(form: Form, device: torch.device) -> Tensor:
    """What is sent before the first message: `[type, dims, sizes ...]`."""
    shape, dtype = form
    numbers = [TYPES.index(dtype), len(shape), *shape]
    return torch.tensor(numbers + [0] * (HEADER - len(numbers)), device=device)


def read_header(numbers: Tensor) -> Form:
    """What a header says."""
    kind, dims, *sizes = numbers.tolist()
    return tuple(sizes[:dims]), TYPES[kind]


def _received(source: Source, form: Form, stream: Any) -> Tensor:
    """The next message, complete when this returns."""
    axis, (shape, dtype) = source.axis, form
    if _staged(axis, source.device):
        value = torch.empty(shape, dtype=dtype, pin_memory=True)
    else:
        value = torch.empty(shape, dtype=dtype, device=source.device)
    work = distributed.irecv(value, axis.ranks[source.index], group=axis.group, tag=source.tag)
    assert work is not None
    work.wait()
    if stream is not None:
        stream.synchronize()
    return value


@dataclass
class _Letter:
    """A message on its way out."""

    value: Tensor
    axis: Axis
    to: int
    tag: int
    made: Any = None
    """The moment of the device at which the value is there."""
    work: Any = None
    """What it is waited for by, once it is sent."""

    def send(self) -> None:
        """Start to send it."""
        to, group = self.axis.ranks[self.to], self.axis.group
        self.work = distributed.isend(self.value, to, group=group, tag=self.tag)
        assert self.work is not None


class Outbox:
    """Messages on their way out in one direction, in order."""

    def __init__(self, device: torch.device, ahead: int = 0) -> None:
        """ahead: messages on their way after which `send` waits; 0: never."""
        self.device = device
        self._room = threading.Semaphore(ahead) if ahead else None
        self._letters: queue.SimpleQueue[_Letter | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def send(
        self, value: Tensor, axis: Axis, to: int, tag: int, seconds: float | None = None
    ) -> None:
        """Hand a message over; it must not be changed any more. seconds: to wait for room."""
        if self._room is not None and not self._room.acquire(timeout=seconds):
            raise CommunicationError(f"it was not taken within {seconds:g} s")
        self._check()
        letter = _Letter(value.contiguous(), axis, to, tag)
        if self.device.type == "cuda":  # whose thread waits for the device first
            letter.made = torch.cuda.Event()
            letter.made.record()
        else:
            try:
                letter.send()
            except RuntimeError as error:
                self._error = error
                self._check()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()
        self._letters.put(letter)

    def _work(self) -> None:
        """See letters off."""
        try:
            with _stream(self.device) as stream:
                while (letter := self._letters.get()) is not None:
                    if letter.work is None:
                        _leave(letter, stream)
                    letter.work.wait()
                    if stream is not None:
                        stream.synchronize()
                    if self._room is not None:
                        self._room.release()
        except BaseException as error:  # seen by the next send, or at the end
            self._error = error
            if self._room is not None:
                self._room.release()

    def close(self, seconds: float) -> None:
        """Wait until all is sent."""
        if self._thread is not None:
            self._letters.put(None)
            self._thread.join(seconds)
            if self._thread.is_alive():
                raise CommunicationError(f"it was not taken within {seconds:g} s")
            self._thread = None
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise CommunicationError(str(self._error)) from self._error


def _leave(letter: _Letter, stream: Any) -> None:
    """Send what lies on a device, once it is there; through the host where Gloo sends it."""
    stream.wait_event(letter.made)
    if _staged(letter.axis, letter.value.device):
        there = letter.value
        letter.value = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
        letter.value.copy_(there, non_blocking=True)
        stream.synchronize()
    letter.send()
