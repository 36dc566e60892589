"""Trace: every communication as an Event, and summaries of events.

A layer predicts its communication as Events without times (`events()`), and the trace records
Events with times. Both have the same type, so a prediction can be tested: `diff_events` of
predicted and recorded events is empty. What a collective has sent is tested against the closed form
of its algorithm: `diff_sent_bytes` is empty. Compute that matters for overlap (a block, a dW) is
recorded as well, as Events with the operation `compute`.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ranvier.comm.algorithms.native import SHARED_MEMORY, shared_memory_cost
from ranvier.comm.algorithms.registry import find_algorithm
from ranvier.comm.algorithms.schedule import OPERATIONS, AxisShape, RecordedCost

COMPUTE = "compute"


@dataclass(eq=False, slots=True)
class Event:
    """One communication of this rank; `bytes` is the size of the full (gathered or reduced)
    tensor."""

    op: str
    axis: tuple[str, ...]
    bytes: int
    where: str = ""
    """Layer, block or optimizer part that issued it."""
    algorithm: str = "native"
    """Algorithm of the collective (`comm.algorithms`), which a prediction need not match."""
    sent_bytes: int | None = None
    """Bytes that this rank sent; None if the backend does not report them."""
    num_rounds: int | None = None
    """Rounds of messages that this rank took part in; None as for `sent_bytes`."""
    issue_time: float | None = None
    """Seconds on this rank's clock when it was issued; None in a prediction."""
    wait_time: float | None = None
    """Time when this rank first needed the result."""
    done_time: float | None = None
    """Time when the result was available."""
    resume_time: float | None = None
    """Time when this rank resumed; `resume_time - wait_time` is not hidden behind compute."""
    read_device_times: Callable[[], None] | None = field(default=None, repr=False)
    """Fills in the times once the device has passed them (CUDA events)."""

    @property
    def match_key(self) -> tuple[str, tuple[str, ...], str, int]:
        """The fields that a prediction must match."""
        return (self.op, self.axis, self.where, self.bytes)

    @property
    def description(self) -> str:
        """What it communicates, in words."""
        axis = "·".join(self.axis)
        return f"{self.op} over {axis} of {self.bytes} bytes at {self.where or '?'}"

    @property
    def seconds(self) -> float:
        """Seconds from issue to completion; 0 while it is in flight."""
        if self.issue_time is None or self.done_time is None:
            return 0.0
        return self.done_time - self.issue_time

    @property
    def exposed_seconds(self) -> float:
        """Seconds in which this rank was blocked by it."""
        if self.wait_time is None or self.resume_time is None:
            return 0.0
        return self.resume_time - self.wait_time


@dataclass
class Trace:
    """The events of one rank. By default nothing is recorded or timed."""

    enabled: bool = False
    check_collectives: bool = False
    """Debug mode, which first compares every collective and every model input between ranks."""
    time_waits: bool = False
    """Time every wait even if `enabled` is False; the caller must clear `waited_events`."""
    waited_events: list[Event] = field(default_factory=list)
    """Communications that this rank waited for while `time_waits` was set."""
    events: list[Event] = field(default_factory=list)
    where: str = ""
    outer_scopes: list[str] = field(default_factory=list)
    """Enclosing scopes of the scope in which a graph is being traced."""
    recent_events: deque[Event] = field(default_factory=lambda: deque(maxlen=8))
    """The last few operations issued, recorded even if `enabled` is False, for hang reports."""
    num_issued: int = 0
    """Operations issued so far."""
    on_issue: Callable[[int, str], None] | None = None
    """Called with the number and the description of each operation."""
    saved_results: Any = None
    """Results that the running block saves for its recomputation (`memory.saved_results`)."""

    @property
    def recent_ops(self) -> list[str]:
        """Descriptions of `recent_events`."""
        return [event.description for event in self.recent_events]

    def record_event(self, op: str, axis: tuple[str, ...], num_bytes: int) -> Event:
        """Return a new event, issued now; it is stored if the trace is enabled."""
        event = Event(op, axis, num_bytes, self.where, issue_time=time.perf_counter())
        self.recent_events.append(event)
        self.num_issued += 1
        # Called before the operation is issued, so that its description is known if it hangs.
        if self.on_issue is not None:
            self.on_issue(self.num_issued, event.description)
        if self.enabled:
            self.events.append(event)
        return event

    def report_wait(self, words: str) -> None:
        """Report what this rank waits for, for hang reports."""
        if self.on_issue is not None:
            self.on_issue(self.num_issued, words)

    def record_graph_event(self, op: str, axis: tuple[str, ...], num_bytes: int) -> int:
        """Records what a graph will communicate; the compiler runs this while tracing."""
        self.record_event(op, axis, num_bytes).issue_time = None
        return 0

    def enter_graph_scope(self, where: str) -> int:
        """Enter a scope while a graph is traced; not part of the graph."""
        self.outer_scopes.append(self.where)
        self.where = where
        return 0

    def leave_graph_scope(self) -> int:
        """Return to the enclosing scope while a graph is traced; not part of the graph."""
        self.where = self.outer_scopes.pop()
        return 0

    # As torch.compiler.assume_constant_result does, without its import time of a second.
    record_graph_event._dynamo_marked_constant = True  # type: ignore[attr-defined]
    enter_graph_scope._dynamo_marked_constant = True  # type: ignore[attr-defined]
    leave_graph_scope._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @contextmanager
    def graph_named_scope(self, where: str) -> Iterator[None]:
        """Like `named_scope`, while a graph is traced, which must not have side effects."""
        self.enter_graph_scope(where)
        yield
        self.leave_graph_scope()

    @contextmanager
    def named_scope(self, where: str) -> Iterator[None]:
        """Record events inside as issued by `where`."""
        before = self.where
        self.where = where
        try:
            yield
        finally:
            self.where = before

    @contextmanager
    def outside_block(self) -> Iterator[None]:
        """Context of code that is not part of the running block, so its results are not saved."""
        before = self.saved_results
        self.saved_results = None
        try:
            yield
        finally:
            self.saved_results = before

    @contextmanager
    def record_compute(self, where: str) -> Iterator[None]:
        """Records the time inside as compute (host time; on CUDA the time to enqueue it)."""
        if not self.enabled:
            yield
            return
        event = Event(COMPUTE, (), 0, where, issue_time=time.perf_counter())
        self.events.append(event)
        yield
        event.wait_time = event.done_time = event.resume_time = time.perf_counter()

    @contextmanager
    def record_events(self) -> Iterator[list[Event]]:
        """Enable the trace inside and yield the list that will hold its events."""
        before = (self.enabled, self.events)
        self.enabled = True
        self.events = []
        events = self.events
        try:
            yield events
        finally:
            self.enabled, self.events = before
            # CUDA times are known only after the device has passed the events.
            resolve_times(events)


def exposed_seconds(events: Iterable[Event]) -> float:
    """Return the seconds in which this rank was blocked by these communications."""
    events = list(events)
    resolve_times(events)
    return sum(event.exposed_seconds for event in events)


def resolve_times(events: Iterable[Event]) -> None:
    """Fill in the times that CUDA events measure; waits for the device."""
    for event in events:
        if event.read_device_times is not None:
            event.read_device_times()
            event.read_device_times = None


def communication_events(events: Iterable[Event]) -> list[Event]:
    """Return the events that are not compute."""
    return [event for event in events if event.op != COMPUTE]


def diff_events(
    predicted: Iterable[Event], recorded: Iterable[Event], ragged: Collection[str] = ()
) -> list[str]:
    """Return one line per event that was predicted but not recorded, or vice versa.

    ragged: scopes whose bytes depend on data and are not compared.
    """

    def known(event: Event) -> tuple[str, tuple[str, ...], str, int]:
        op, axis, where, num_bytes = event.match_key
        return op, axis, where, 0 if where in ragged else num_bytes

    # Compared as multisets, because the order of events is not predicted.
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


def diff_sent_bytes(
    recorded: Iterable[Event],
    shapes: Mapping[tuple[str, ...], AxisShape],
    ragged: Collection[str] = (),
) -> list[str]:
    """Return one line per kind of event whose bytes or rounds differ from the closed form of its
    algorithm.

    recorded: events of all ranks, because the closed form is that of the busiest one. shapes: of
    each axis. ragged: scopes with parts of unequal size, which are not compared. Events of the
    backend are not compared either, as it does not report what it sends.
    """
    kinds: dict[tuple[Any, ...], list[Event]] = {}
    for event in communication_events(recorded):
        if event.sent_bytes is not None and event.where not in ragged:
            key = (event.op, event.axis, event.bytes, event.algorithm)
            kinds.setdefault(key, []).append(event)
    lines = []
    for (op, axis, num_bytes, algorithm), events in kinds.items():
        shape = shapes[axis]
        cost = _recorded_cost(algorithm, op, shape)
        sent = max(event.sent_bytes or 0 for event in events)
        rounds = {event.num_rounds for event in events}
        # The blocks of an all-reduce differ by up to one element of 8 bytes.
        slack = 8.0 * cost.sent_bytes * shape.size if op == "all_reduce" else 0.0
        if (
            rounds != {cost.rounds}
            or abs(sent - cost.sent_bytes * num_bytes) > slack + 1e-6 * num_bytes
        ):
            counts = ", ".join(map(str, sorted(rounds, key=str)))
            lines.append(
                f"{op} over {'·'.join(axis)} of {num_bytes} bytes by {algorithm}: closed form "
                f"{cost.sent_bytes * num_bytes:g} bytes in {cost.rounds} rounds, recorded {sent} "
                f"in {counts}"
            )
    return lines


def _recorded_cost(algorithm: str, op: str, shape: AxisShape) -> RecordedCost:
    if algorithm == SHARED_MEMORY.name:
        return shared_memory_cost(op, shape.size)
    for operation in OPERATIONS:
        if operation == op:
            return find_algorithm(algorithm).recorded_cost(operation, shape)
    raise ValueError(f"{algorithm} has no {op}")


@dataclass(frozen=True)
class OpTotals:
    """Totals of one operation over one axis with one algorithm."""

    axis: str
    op: str
    algorithm: str
    calls: int
    bytes: int
    seconds: float
    exposed_seconds: float

    @property
    def hidden_fraction(self) -> float:
        """Fraction of the communication time hidden behind compute."""
        if self.seconds:
            return 1.0 - min(self.exposed_seconds / self.seconds, 1.0)
        return 1.0


def summarize_events(events: Iterable[Event]) -> list[OpTotals]:
    """Return calls, bytes and seconds per axis, operation and algorithm, most bytes first."""
    groups: dict[tuple[str, str, str], list[Event]] = {}
    for event in communication_events(events):
        key = ("·".join(event.axis), event.op, event.algorithm)
        groups.setdefault(key, []).append(event)
    table = [
        OpTotals(
            axis=axis,
            op=op,
            algorithm=algorithm,
            calls=len(group),
            bytes=sum(event.bytes for event in group),
            seconds=sum(event.seconds for event in group),
            exposed_seconds=sum(event.exposed_seconds for event in group),
        )
        for (axis, op, algorithm), group in groups.items()
    ]
    return sorted(table, key=lambda row: -row.bytes)


def format_table(events: Iterable[Event]) -> str:
    """Format `summarize_events` as a text table."""
    rows = summarize_events(events)
    width = 2 + max(len("algorithm"), *(len(row.algorithm) for row in rows), 0)
    lines = [
        f"{'axis':<16}{'operation':<16}{'algorithm':<{width}}{'calls':>6}{'MB':>10}"
        f"{'seconds':>10}{'exposed':>10}{'hidden':>8}"
    ]
    lines += [
        f"{row.axis:<16}{row.op:<16}{row.algorithm:<{width}}{row.calls:>6}{row.bytes / 1e6:>10.3f}"
        f"{row.seconds:>10.4f}{row.exposed_seconds:>10.4f}{row.hidden_fraction:>8.0%}"
        for row in rows
    ]
    return "\n".join(lines)


def chrome_trace(events_of_rank: dict[int, list[Event]]) -> dict[str, Any]:
    """Return events as a Chrome trace (Perfetto), with a process per rank and a thread per axis."""
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
                    # Times of the format are microseconds.
                    "ts": start * 1e6,
                    "dur": max((event.done_time or start) - start, 0.0) * 1e6,
                    "args": _chrome_arguments(event),
                }
            )
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def _chrome_arguments(event: Event) -> dict[str, Any]:
    found = {"bytes": event.bytes, "exposed_us": event.exposed_seconds * 1e6}
    if event.op == COMPUTE:
        return found
    sent = {"sent_bytes": event.sent_bytes, "rounds": event.num_rounds}
    known = {name: value for name, value in sent.items() if value is not None}
    return {**found, "algorithm": event.algorithm, **known}


def write_chrome_trace(path: Path, events_of_rank: dict[int, list[Event]]) -> None:
    """Write a Chrome trace file, which Perfetto opens."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(chrome_trace(events_of_rank)))
