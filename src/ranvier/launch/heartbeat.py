"""Heartbeat: what a rank is doing, readable from outside.

A rank writes its section and step into a few bytes of shared memory, a memory-mapped file. That
costs a microsecond, needs no lock, and can be read while the rank is stopped or stuck.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ranvier.launch.shared_file import SharedFile

RECORD_LAYOUT = struct.Struct("@ddqq32s192s")
"""Time, slowest step, step, collectives, section, last collective.

With native alignment a number is written at once, so readers never see half of it.
"""
# Parts of the record that are written separately, and their offsets in bytes.
CLOCK = struct.Struct("@d")
SLOWEST = struct.Struct("@dd")
STEP_AT = 16
BEGUN_AT = 24
SECTION_AT = 32
LAST_AT = 64
NUMBER = struct.Struct("@q")
RECENT_STEPS = 100
"""Number of recent steps of which the slowest is recorded."""
START = "start"
STEP = "step"
END = "end"
DONE = "done"


@dataclass(frozen=True)
class HeartbeatState:
    """The content of a heartbeat."""

    begin_time: float = 0.0
    """When the section or step began, by the monotonic clock that all processes share."""
    slowest_step_seconds: float = 0.0
    """Seconds of the slowest recent step; 0 before the first."""
    step: int = -1
    """Number of completed steps; -1 if unknown."""
    num_collectives: int = 0
    """Number of collectives issued."""
    section: str = START
    """start, step, evaluation, checkpoint, end or done."""
    last_collective: str = ""
    """The last collective issued."""


class Heartbeat:
    """Heartbeat of a rank, in a file that others map, or without a path in private memory."""

    def __init__(self, path: str | SharedFile = "") -> None:
        self._data: bytearray | mmap.mmap = bytearray(RECORD_LAYOUT.size)
        self._step_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._step_begin: float | None = None
        if path:
            with open(path, "r+b") as file:
                self._data = mmap.mmap(file.fileno(), RECORD_LAYOUT.size)
        else:
            # A mapped file was initialized by `create_file`.
            NUMBER.pack_into(self._data, STEP_AT, -1)
            self.begin_section(START)

    @staticmethod
    def create_file(path: str | SharedFile) -> None:
        """Create the file of a rank that is about to start."""
        section = START.encode()
        Path(path).write_bytes(RECORD_LAYOUT.pack(time.monotonic(), 0.0, -1, 0, section, b""))

    def begin_section(self, section: str, step: int | None = None) -> None:
        """Begin a section, or a step if `step` (the number of steps done) is given."""
        now = time.monotonic()
        # Only the time from one step to the next counts, so other sections reset it.
        if step is None:
            self._step_begin = None
        else:
            if self._step_begin is not None:
                self._step_seconds.append(now - self._step_begin)
                SLOWEST.pack_into(self._data, 0, now, max(self._step_seconds))
            self._step_begin = now
            NUMBER.pack_into(self._data, STEP_AT, step)
        CLOCK.pack_into(self._data, 0, now)
        self._data[SECTION_AT:LAST_AT] = section.encode()[:32].ljust(32, b"\0")

    @contextmanager
    def inside_section(self, section: str) -> Iterator[None]:
        """Context of a section; the previous section resumes after it."""
        before = self.read_state().section
        self.begin_section(section)
        yield
        self.begin_section(before)

    def record_collective(self, number: int, words: str) -> None:
        """Record that a collective was issued."""
        NUMBER.pack_into(self._data, BEGUN_AT, number)
        self._data[LAST_AT : RECORD_LAYOUT.size] = words.encode()[:192].ljust(192, b"\0")

    def read_state(self) -> HeartbeatState:
        """Return the current content."""
        when, slowest, step, begun, section, last = RECORD_LAYOUT.unpack_from(self._data)
        words = (text.rstrip(b"\0").decode(errors="replace") for text in (section, last))
        return HeartbeatState(when, slowest, step, begun, *words)
