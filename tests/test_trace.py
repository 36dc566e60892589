"""Events: what is kept, what is read from many, and that prediction and record can differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ranvier.trace import (
    COMPUTE,
    Event,
    Trace,
    chrome,
    communication,
    difference,
    rows,
    table,
    write_chrome,
)

EVENTS = [
    Event("all_gather", ("row",), 100, "a", issued=1.0, waited=2.0, done=3.0, resumed=3.0),
    Event("all_gather", ("row",), 300, "b", issued=4.0, waited=7.0, done=6.0, resumed=7.0),
    Event("reduce_scatter", ("row", "col"), 50, "a", issued=8.0, waited=8.0, done=9.5, resumed=9.5),
    Event(COMPUTE, (), 0, "dW a", issued=5.0, waited=6.5, done=6.5, resumed=6.5),
]


def test_nothing_is_kept_when_off() -> None:
    trace = Trace()
    event = trace.record("all_gather", ("row",), 8)
    with trace.compute("block"):
        pass
    assert (event.op, event.axis, event.bytes, event.where) == ("all_gather", ("row",), 8, "")
    assert event.issued is not None
    assert trace.events == []


def test_last_operations_are_kept_when_off() -> None:
    trace = Trace()
    for size in range(20):
        trace.record("all_reduce", ("row", "col"), size)
    with trace.at("norm"):
        trace.record("all_gather", ("data",), 99)
    assert len(trace.last) == 8
    assert trace.last[-2:] == [
        "all_reduce over row·col of 19 bytes at ?",
        "all_gather over data of 99 bytes at norm",
    ]


def test_places_nest_and_are_restored_after_an_error() -> None:
    trace = Trace(on=True)
    with trace.at("block"):
        with pytest.raises(ValueError, match="stop"), trace.at("leaf"):
            trace.record("send", ("pipe",), 1)
            raise ValueError("stop")
        trace.record("send", ("pipe",), 2)
    trace.record("send", ("pipe",), 3)
    assert [event.where for event in trace.events] == ["leaf", "block", ""]


def test_recording_restores_what_was_before() -> None:
    trace = Trace(on=True)
    trace.record("all_gather", ("row",), 1)
    before = trace.events
    with pytest.raises(ValueError, match="stop"), trace.recording() as outer:
        trace.record("all_gather", ("row",), 2)
        with trace.recording() as inner:
            trace.record("all_gather", ("row",), 3)
        trace.record("all_gather", ("row",), 4)
        raise ValueError("stop")
    assert [event.bytes for event in outer] == [2, 4]
    assert [event.bytes for event in inner] == [3]
    assert trace.on
    assert trace.events is before
    assert [event.bytes for event in before] == [1]
    off = Trace()
    with off.recording() as events:
        off.record("all_gather", ("row",), 1)
    off.record("all_gather", ("row",), 2)
    assert len(events) == 1
    assert not off.on
    assert off.events == []


def test_recording_asks_the_device_for_times() -> None:
    trace = Trace()
    asked = []
    with trace.recording() as events:
        event = trace.record("all_gather", ("row",), 1)
        event.clocks = lambda: asked.append(event)
        assert asked == []
    assert asked == events == [event]
    assert event.clocks is None


def test_compute_is_timed_and_is_no_communication() -> None:
    trace = Trace(on=True)
    with trace.compute("block 0"):
        trace.record("all_gather", ("row",), 1)
    compute, gather = trace.events
    assert (compute.op, compute.where) == (COMPUTE, "block 0")
    assert compute.issued is not None and gather.issued is not None and compute.done is not None
    assert compute.issued <= gather.issued <= compute.done
    assert compute.exposed == 0.0
    assert communication(trace.events) == [gather]


def test_rows_add_up() -> None:
    gather, scatter = rows(EVENTS)
    assert (gather.axis, gather.op, gather.calls, gather.bytes) == ("row", "all_gather", 2, 400)
    assert (gather.seconds, gather.exposed, gather.hidden) == (4.0, 1.0, 0.75)
    assert (scatter.axis, scatter.bytes, scatter.hidden) == ("row·col", 50, 0.0)


def test_events_under_way_and_predictions_take_no_time() -> None:
    under_way = Event("send", ("pipe",), 8, issued=100.0)
    assert (under_way.seconds, under_way.exposed) == (0.0, 0.0)
    (row,) = rows([under_way, Event("send", ("pipe",), 8)])
    assert (row.seconds, row.exposed, row.hidden) == (0.0, 0.0, 1.0)


def test_table_is_text() -> None:
    lines = table(EVENTS).splitlines()
    assert lines[0].split() == ["axis", "operation", "calls", "MB", "seconds", "exposed", "hidden"]
    assert lines[1].split() == ["row", "all_gather", "2", "0.000", "4.0000", "1.0000", "75%"]
    assert lines[2].split()[:2] == ["row·col", "reduce_scatter"]
    assert len({len(line) for line in lines}) == 1
    assert len(lines) == 3


def test_chrome_trace_can_be_opened(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json"
    write_chrome(path, {0: EVENTS, 3: EVENTS[:1]})
    loaded = json.loads(path.read_text())
    assert loaded == chrome({0: EVENTS, 3: EVENTS[:1]})
    entries = loaded["traceEvents"]
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in entries if e["ph"] == "M"}
    assert names == {
        (0, None): "rank 0",
        (0, 0): "compute",
        (0, 1): "row",
        (0, 2): "row·col",
        (3, None): "rank 3",
        (3, 0): "row",
    }
    bars = [e for e in entries if e["ph"] == "X"]
    assert len(bars) == 5
    assert bars[0] == {
        "ph": "X",
        "name": "all_gather a",
        "cat": "all_gather",
        "pid": 0,
        "tid": 1,
        "ts": 1e6,
        "dur": 2e6,
        "args": {"bytes": 100, "exposed_us": 1e6},
    }
    assert (bars[3]["name"], bars[3]["cat"], bars[3]["dur"]) == ("dW a", "compute", 1.5e6)


def test_chrome_trace_of_an_event_under_way() -> None:
    bar = chrome({0: [Event("send", ("pipe",), 8, issued=100.0)]})["traceEvents"][-1]
    assert (bar["ts"], bar["dur"], bar["args"]["exposed_us"]) == (1e8, 0.0, 0.0)


def predicted() -> list[Event]:
    return [Event(e.op, e.axis, e.bytes, e.where) for e in communication(EVENTS)]


def test_equal_events_have_no_difference_in_any_order() -> None:
    assert difference(predicted(), EVENTS) == []
    assert difference(predicted()[::-1], EVENTS) == []
    assert difference([], []) == []


def test_difference_finds_what_is_missing_extra_or_wrong() -> None:
    missing = difference(predicted(), EVENTS[1:])
    assert missing == ["all_gather over row of 100 bytes at a: predicted 1, recorded 0"]
    extra = difference(predicted(), [*EVENTS, EVENTS[0]])
    assert extra == ["all_gather over row of 100 bytes at a: predicted 1, recorded 2"]
    changes: list[dict[str, object]] = [
        {"bytes": 101},
        {"op": "all_reduce"},
        {"axis": ("col",)},
        {"where": "c"},
    ]
    for change in changes:
        wrong = predicted()
        for name, value in change.items():
            setattr(wrong[0], name, value)
        assert len(difference(wrong, EVENTS)) == 2, change
