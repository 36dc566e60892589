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
    issue_time: float | None = None
    """Seconds on this rank's clock when it was issued; None in a prediction."""
    wait_time: float | None = None
    """When this rank first needed the result."""
    done_time: float | None = None
    """When the result was there."""
    resume_time: float | None = None
    """When this rank went on; `resumed - waited` is the time not hidden behind compute."""
    read_device_times: Callable[[], None] | None = field(default=None, repr=False)
    """Fills in the times once the device has passed them (CUDA events)."""

    @property
    def match_key(self) -> tuple[str, tuple[str, ...], str, int]:
        """What a prediction must match."""
        return (self.op, self.axis, self.where, self.bytes)

    @property
    def seconds(self) -> float:
        """From issue to completion; 0 while it is under way."""
        if self.issue_time is None or self.done_time is None:
            return 0.0
        return self.done_time - self.issue_time

    @property
    def exposed_seconds(self) -> float:
        """Seconds in which this rank stood still for it."""
        if self.wait_time is None or self.resume_time is None:
            return 0.0
        return self.resume_time - self.wait_time


@dataclass
class Trace:
    """The events of one rank. Off by default: then nothing is kept and nothing is measured."""

    enabled: bool = False
    check_collectives: bool = False
    """Debug mode: every collective, and every input of a model, is compared between ranks first."""
    time_waits: bool = False
    """Time every wait, also when off; whoever turns it on empties `awaited`."""
    waited_events: list[Event] = field(default_factory=list)
    """Communications that were waited for while the meter ran."""
    events: list[Event] = field(default_factory=list)
    where: str = ""
    outer_scopes: list[str] = field(default_factory=list)
    """Places around the one a graph is traced at."""
    recent_ops: list[str] = field(default_factory=list)
    """The last few operations issued, kept also when off, for reports of a hang."""
    num_issued: int = 0
    """Operations issued so far."""
    on_issue: Callable[[int, str], None] | None = None
    """Is told the number of each operation and what it is."""
    saved_results: Any = None
    """What the block now running keeps for its second run, or has kept (`comm.results`)."""

    def record_event(self, op: str, axis: tuple[str, ...], num_bytes: int) -> Event:
        """A new event, issued now; kept if the trace is on."""
        event = Event(op, axis, num_bytes, self.where, issue_time=time.perf_counter())
        self.recent_ops = [
            *self.recent_ops[-7:],
            f"{op} over {'·'.join(axis)} of {num_bytes} bytes at {self.where or '?'}",
        ]
        self.num_issued += 1
        if self.on_issue is not None:
            self.on_issue(self.num_issued, self.recent_ops[-1])
        if self.enabled:
            self.events.append(event)
        return event

    def report_wait(self, words: str) -> None:
        """Say what this rank waits for, for reports of a hang."""
        if self.on_issue is not None:
            self.on_issue(self.num_issued, words)

    def record_graph_event(self, op: str, axis: tuple[str, ...], num_bytes: int) -> int:
        """Record what a graph will communicate; the compiler runs this while it traces."""
        self.record_event(op, axis, num_bytes).issue_time = None
        return 0

    def enter_graph_scope(self, where: str) -> int:
        """What follows in a graph is issued by `where`; likewise: no part of the graph."""
        self.outer_scopes.append(self.where)
        self.where = where
        return 0

    def leave_graph_scope(self) -> int:
        """What follows in a graph is issued by who issued it before."""
        self.where = self.outer_scopes.pop()
        return 0

    # What torch.compiler.assume_constant_result does, without the second that its import takes.
    record_graph_event._dynamo_marked_constant = True  # type: ignore[attr-defined]
    enter_graph_scope._dynamo_marked_constant = True  # type: ignore[attr-defined]
    leave_graph_scope._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @contextmanager
    def graph_named_scope(self, where: str) -> Iterator[None]:
        """As `at`, while a graph is traced, which may change nothing outside of it."""
        self.enter_graph_scope(where)
        yield
        self.leave_graph_scope()

    @contextmanager
    def named_scope(self, where: str) -> Iterator[None]:
        """Events inside are recorded as issued by `where`."""
        before = self.where
        self.where = where
        try:
            yield
        finally:
            self.where = before

    @contextmanager
    def outside_block(self) -> Iterator[None]:
        """What happens inside is no part of the block now running."""
        before = self.saved_results
        self.saved_results = None
        try:
            yield
        finally:
            self.saved_results = before

    @contextmanager
    def record_compute(self, where: str) -> Iterator[None]:
        """The time inside is recorded as compute (host time; on CUDA when it was enqueued)."""
        if not self.enabled:
            yield
            return
        event = Event(COMPUTE, (), 0, where, issue_time=time.perf_counter())
        self.events.append(event)
        yield
        event.wait_time = event.done_time = event.resume_time = time.perf_counter()

    @contextmanager
    def record_events(self) -> Iterator[list[Event]]:
        """Turn the trace on inside and give the list that will hold its events."""
        before = (self.enabled, self.events)
        self.enabled = True
        self.events = []
        events = self.events
        try:
            yield events
        finally:
            self.enabled, self.events = before
            resolve_times(events)


def exposed_seconds(events: Iterable[Event]) -> float:
    """Seconds in which this rank stood still for these communications."""
    events = list(events)
    resolve_times(events)
    return sum(event.exposed_seconds for event in events)


def resolve_times(events: Iterable[Event]) -> None:
    """Fill in the times that a device has to give."""
    for event in events:
        if event.read_device_times is not None:
            event.read_device_times()
            event.read_device_times = None


def communication_events(events: Iterable[Event]) -> list[Event]:
    """The events that are no compute."""
    return [event for event in events if event.op != COMPUTE]


def diff_events(
    predicted: Iterable[Event], recorded: Iterable[Event], ragged: Collection[str] = ()
) -> list[str]:
    """One line for each event that was predicted but not recorded, or the other way.

    ragged: places where bytes depend on data, and are not compared.
    """

    def known(event: Event) -> tuple[str, tuple[str, ...], str, int]:
        op, axis, where, num_bytes = event.match_key
        return op, axis, where, 0 if where in ragged else num_bytes

    want = Counter(known(event) for event in predicted)
    have = Counter(known(event) for event in communication_events(recorded))
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
class OpTotals:
    """Totals of one operation over one axis."""

    axis: str
    op: str
    calls: int
    bytes: int
    seconds: float
    exposed_seconds: float

    @property
    def hidden_fraction(self) -> float:
        """Share of the communication time hidden behind compute."""
        if self.seconds:
            return 1.0 - min(self.exposed_seconds / self.seconds, 1.0)
        return 1.0


def summarize_events(events: Iterable[Event]) -> list[OpTotals]:
    """Bytes and seconds per axis and operation, largest first."""
    groups: dict[tuple[str, str], list[Event]] = {}
    for event in communication_events(events):
        groups.setdefault(("·".join(event.axis), event.op), []).append(event)
    table = [
        OpTotals(
            axis=axis,
            op=op,
            calls=len(group),
            bytes=sum(event.bytes for event in group),
            seconds=sum(event.seconds for event in group),
            exposed_seconds=sum(event.exposed_seconds for event in group),
        )
        for (axis, op), group in groups.items()
    ]
    return sorted(table, key=lambda row: -row.bytes)


def format_table(events: Iterable[Event]) -> str:
    """The rows as text."""
    lines = [
        f"{'axis':<16}{'operation':<16}{'calls':>6}{'MB':>10}"
        f"{'seconds':>10}{'exposed':>10}{'hidden':>8}"
    ]
    lines += [
        f"{row.axis:<16}{row.op:<16}{row.calls:>6}{row.bytes / 1e6:>10.3f}{row.seconds:>10.4f}"
        f"{row.exposed_seconds:>10.4f}{row.hidden_fraction:>8.0%}"
        for row in summarize_events(events)
    ]
    return "\n".join(lines)


def chrome_trace(events_of_rank: dict[int, list[Event]]) -> dict[str, Any]:
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
            start = event.issue_time or 0.0
            entries.append(
                {
                    "ph": "X",
                    "name": event.where if event.op == COMPUTE else f"{event.op} {event.where}",
                    "cat": event.op,
                    "pid": rank,
                    "tid": lanes.index("·".join(event.axis) or COMPUTE),
                    "ts": start * 1e6,
                    "dur": max((event.done_time or start) - start, 0.0) * 1e6,
                    "args": {"bytes": event.bytes, "exposed_us": event.exposed_seconds * 1e6},
                }
            )
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def write_chrome_trace(path: Path, events_of_rank: dict[int, list[Event]]) -> None:
    """Write the trace where a browser's Perfetto can open it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(chrome_trace(events_of_rank)))
