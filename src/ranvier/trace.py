"""Trace: every communication as an Event, and what can be read from many of them.

A leaf predicts its communication as Events without times (`events()`), the tracer records them
with times. Both are the same type, so a prediction is tested like code: the `difference` of
predicted and recorded events is empty. Compute that matters for overlap (a block, a dW) is recorded
too, as Events with the operation `compute`.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMPUTE = "compute"


@dataclass(eq=False)
class Event:
    """One communication of this rank; `bytes`: size of the whole (gathered or reduced) tensor."""

    op: str
    axis: tuple[str, ...]
    bytes: int
    where: str = ""
    """Leaf, block or optimizer part that issued it."""
    issued: float | None = None
    """Seconds on this rank's clock when it was issued; None in a prediction."""
    waited: float | None = None
    """When this rank first needed the result."""
    done: float | None = None
    """When the result was there."""
    resumed: float | None = None
    """When this rank went on; `resumed - waited` is the time not hidden behind compute."""
    clocks: Callable[[], None] | None = field(default=None, repr=False)
    """Fills in the times once the device has passed them (CUDA events)."""

    @property
    def key(self) -> tuple[str, tuple[str, ...], str, int]:
        """What a prediction must match."""
        return (self.op, self.axis, self.where, self.bytes)

    @property
    def seconds(self) -> float:
        """From issue to completion; 0 while it is under way."""
        return 0.0 if self.issued is None or self.done is None else self.done - self.issued

    @property
    def exposed(self) -> float:
        """Seconds in which this rank stood still for it."""
        return 0.0 if self.waited is None or self.resumed is None else self.resumed - self.waited


@dataclass
class Trace:
    """The events of one rank. Off by default: then nothing is kept and nothing is measured."""

    on: bool = False
    check: bool = False
    """Debug mode: every collective, and every input of a model, is compared between ranks first."""
    meter: bool = False
    """Time every wait, also when off; whoever turns it on empties `awaited`."""
    awaited: list[Event] = field(default_factory=list)
    """Communications that were waited for while the meter ran."""
    events: list[Event] = field(default_factory=list)
    where: str = ""
    outer: list[str] = field(default_factory=list)
    """Places around the one a graph is traced at."""
    last: list[str] = field(default_factory=list)
    """The last few operations issued, kept also when off, for reports of a hang."""
    begun: int = 0
    """Operations issued so far."""
    heard: Callable[[int, str], None] | None = None
    """Is told the number of each operation and what it is."""
    results: Any = None
    """What the block now running keeps for its second run, or has kept (`comm.results`)."""

    def record(self, op: str, axis: tuple[str, ...], num_bytes: int) -> Event:
        """A new event, issued now; kept if the trace is on."""
        event = Event(op, axis, num_bytes, self.where, issued=time.perf_counter())
        self.last = [
            *self.last[-7:],
            f"{op} over {'·'.join(axis)} of {num_bytes} bytes at {self.where or '?'}",
        ]
        self.begun += 1
        if self.heard is not None:
            self.heard(self.begun, self.last[-1])
        if self.on:
            self.events.append(event)
        return event

    def wait_for(self, words: str) -> None:
        """Say what this rank waits for, for reports of a hang."""
        if self.heard is not None:
            self.heard(self.begun, words)

    def note(self, op: str, axis: tuple[str, ...], num_bytes: int) -> int:
        """Record what a graph will communicate; the compiler runs this while it traces."""
        self.record(op, axis, num_bytes).issued = None
        return 0

    def enter(self, where: str) -> int:
        """What follows in a graph is issued by `where`; likewise: no part of the graph."""
        self.outer.append(self.where)
        self.where = where
        return 0

    def leave(self) -> int:
        """What follows in a graph is issued by who issued it before."""
        self.where = self.outer.pop()
        return 0

    # What torch.compiler.assume_constant_result does, without the second that its import takes.
    note._dynamo_marked_constant = True  # type: ignore[attr-defined]
    enter._dynamo_marked_constant = True  # type: ignore[attr-defined]
    leave._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @contextmanager
    def marked(self, where: str) -> Iterator[None]:
        """As `at`, while a graph is traced, which may change nothing outside of it."""
        self.enter(where)
        yield
        self.leave()

    @contextmanager
    def at(self, where: str) -> Iterator[None]:
        """Events inside are recorded as issued by `where`."""
        before, self.where = self.where, where
        try:
            yield
        finally:
            self.where = before

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What happens inside is no part of the block now running."""
        before, self.results = self.results, None
        try:
            yield
        finally:
            self.results = before

    @contextmanager
    def compute(self, where: str) -> Iterator[None]:
        """The time inside is recorded as compute (host time; on CUDA when it was enqueued)."""
        if not self.on:
            yield
            return
        event = Event(COMPUTE, (), 0, where, issued=time.perf_counter())
        self.events.append(event)
        yield
        event.waited = event.done = event.resumed = time.perf_counter()

    @contextmanager
    def recording(self) -> Iterator[list[Event]]:
        """Turn the trace on inside and give the list that will hold its events."""
        before, self.on, self.events = (self.on, self.events), True, []
        events = self.events
        try:
            yield events
        finally:
            self.on, self.events = before
            finish(events)


def exposed(events: Iterable[Event]) -> float:
    """Seconds in which this rank stood still for these communications."""
    events = list(events)
    finish(events)
    return sum(event.exposed for event in events)


def finish(events: Iterable[Event]) -> None:
    """Fill in the times that a device has to give."""
    for event in events:
        if event.clocks is not None:
            event.clocks()
            event.clocks = None


def communication(events: Iterable[Event]) -> list[Event]:
    """The events that are no compute."""
    return [event for event in events if event.op != COMPUTE]


def difference(
    predicted: Iterable[Event], recorded: Iterable[Event], ragged: Collection[str] = ()
) -> list[str]:
    """One line for each event that was predicted but not recorded, or the other way.

    ragged: places where bytes depend on data, and are not compared.
    """

    def known(event: Event) -> tuple[str, tuple[str, ...], str, int]:
        op, axis, where, num_bytes = event.key
        return op, axis, where, 0 if where in ragged else num_bytes

    want = Counter(known(event) for event in predicted)
    have = Counter(known(event) for event in communication(recorded))
    lines = []
    for key in sorted(set(want) | set(have)):
        if want[key] != have[key]:
            op, axis, where, num_bytes = key
            lines.append(
                f"{op} over {'·'.join(axis)} of {num_bytes} bytes at {where or '?'}: "
                f"predicted {want[key]}, recorded {have[key]}"
            )
    return lines


@dataclass(frozen=True)
class Row:
    """Totals of one operation over one axis."""

    axis: str
    op: str
    calls: int
    bytes: int
    seconds: float
    exposed: float

    @property
    def hidden(self) -> float:
        """Share of the communication time hidden behind compute."""
        return 1.0 - min(self.exposed / self.seconds, 1.0) if self.seconds else 1.0


def rows(events: Iterable[Event]) -> list[Row]:
    """Bytes and seconds per axis and operation, largest first."""
    groups: dict[tuple[str, str], list[Event]] = {}
    for event in communication(events):
        groups.setdefault(("·".join(event.axis), event.op), []).append(event)
    table = [
        Row(
            axis=axis,
            op=op,
            calls=len(group),
            bytes=sum(event.bytes for event in group),
            seconds=sum(event.seconds for event in group),
            exposed=sum(event.exposed for event in group),
        )
        for (axis, op), group in groups.items()
    ]
    return sorted(table, key=lambda row: -row.bytes)


def table(events: Iterable[Event]) -> str:
    """The rows as text."""
    lines = [
        f"{'axis':<16}{'operation':<16}{'calls':>6}{'MB':>10}"
        f"{'seconds':>10}{'exposed':>10}{'hidden':>8}"
    ]
    lines += [
        f"{row.axis:<16}{row.op:<16}{row.calls:>6}{row.bytes / 1e6:>10.3f}{row.seconds:>10.4f}"
        f"{row.exposed:>10.4f}{row.hidden:>8.0%}"
        for row in rows(events)
    ]
    return "\n".join(lines)


def chrome(events_of_rank: dict[int, list[Event]]) -> dict[str, Any]:
    """The events in the Chrome trace format (Perfetto): a process a rank, a line an axis."""
    entries: list[dict[str, Any]] = []
    for rank, events in events_of_rank.items():
        entries.append(
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        )
        lanes = sorted({"·".join(event.axis) or COMPUTE for event in events})
        for lane, name in enumerate(lanes):
            entries.append(
                {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": name}}
            )
        for event in events:
            start = event.issued or 0.0
            entries.append(
                {
                    "ph": "X",
                    "name": event.where if event.op == COMPUTE else f"{event.op} {event.where}",
                    "cat": event.op,
                    "pid": rank,
                    "tid": lanes.index("·".join(event.axis) or COMPUTE),
                    "ts": start * 1e6,
                    "dur": max((event.done or start) - start, 0.0) * 1e6,
                    "args": {"bytes": event.bytes, "exposed_us": event.exposed * 1e6},
                }
            )
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def write_chrome(path: Path, events_of_rank: dict[int, list[Event]]) -> None:
    """Write the trace where a browser's Perfetto can open it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(chrome(events_of_rank)))
