"""Events: what is kept, what is read from many, and that prediction and record can differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ranvier.comm.algorithms.schedule import AxisShape
from ranvier.trace import (
    COMPUTE,
    Event,
    Trace,
    chrome_trace,
    communication_events,
    diff_events,
    diff_sent_bytes,
    format_table,
    summarize_events,
    write_chrome_trace,
)

EVENTS = [
    Event(
        "all_gather",
        ("row",),
        100,
        "a",
        issue_time=1.0,
        wait_time=2.0,
        done_time=3.0,
        resume_time=3.0,
    ),
    Event(
        "all_gather",
        ("row",),
        300,
        "b",
        issue_time=4.0,
        wait_time=7.0,
        done_time=6.0,
        resume_time=7.0,
    ),
    Event(
        "reduce_scatter",
        ("row", "col"),
        50,
        "a",
        issue_time=8.0,
        wait_time=8.0,
        done_time=9.5,
        resume_time=9.5,
    ),
    Event(COMPUTE, (), 0, "dW a", issue_time=5.0, wait_time=6.5, done_time=6.5, resume_time=6.5),
]


def test_nothing_is_kept_when_off() -> None:
    trace = Trace()
    event = trace.record_event("all_gather", ("row",), 8)
    with trace.record_compute("block"):
        pass
    assert (event.op, event.axis, event.bytes, event.where) == ("all_gather", ("row",), 8, "")
    assert event.issue_time is not None
    assert trace.events == []


def test_last_operations_are_kept_when_off() -> None:
    trace = Trace()
    for size in range(20):
        trace.record_event("all_reduce", ("row", "col"), size)
    with trace.named_scope("norm"):
        trace.record_event("all_gather", ("data",), 99)
    assert len(trace.recent_ops) == 8
    assert trace.recent_ops[-2:] == [
        "all_reduce over row·col of 19 bytes at ?",
        "all_gather over data of 99 bytes at norm",
    ]


def test_places_nest_and_are_restored_after_an_error() -> None:
    trace = Trace(enabled=True)
    with trace.named_scope("block"):
        with pytest.raises(ValueError, match="stop"), trace.named_scope("leaf"):
            trace.record_event("send", ("pipe",), 1)
            raise ValueError("stop")
        trace.record_event("send", ("pipe",), 2)
    trace.record_event("send", ("pipe",), 3)
    assert [event.where for event in trace.events] == ["leaf", "block", ""]


def test_recording_restores_what_was_before() -> None:
    trace = Trace(enabled=True)
    trace.record_event("all_gather", ("row",), 1)
    before = trace.events
    with pytest.raises(ValueError, match="stop"), trace.record_events() as outer:
        trace.record_event("all_gather", ("row",), 2)
        with trace.record_events() as inner:
            trace.record_event("all_gather", ("row",), 3)
        trace.record_event("all_gather", ("row",), 4)
        raise ValueError("stop")
    assert [event.bytes for event in outer] == [2, 4]
    assert [event.bytes for event in inner] == [3]
    assert trace.enabled
    assert trace.events is before
    assert [event.bytes for event in before] == [1]
    off = Trace()
    with off.record_events() as events:
        off.record_event("all_gather", ("row",), 1)
    off.record_event("all_gather", ("row",), 2)
    assert len(events) == 1
    assert not off.enabled
    assert off.events == []


def test_recording_asks_the_device_for_times() -> None:
    trace = Trace()
    asked = []
    with trace.record_events() as events:
        event = trace.record_event("all_gather", ("row",), 1)
        event.read_device_times = lambda: asked.append(event)
        assert asked == []
    assert asked == events == [event]
    assert event.read_device_times is None


def test_compute_is_timed_and_is_no_communication() -> None:
    trace = Trace(enabled=True)
    with trace.record_compute("block 0"):
        trace.record_event("all_gather", ("row",), 1)
    compute, gather = trace.events
    assert (compute.op, compute.where) == (COMPUTE, "block 0")
    assert (
        compute.issue_time is not None
        and gather.issue_time is not None
        and compute.done_time is not None
    )
    assert compute.issue_time <= gather.issue_time <= compute.done_time
    assert compute.exposed_seconds == 0.0
    assert communication_events(trace.events) == [gather]


def test_rows_add_up() -> None:
    gather, scatter = summarize_events(EVENTS)
    assert (gather.axis, gather.op, gather.calls, gather.bytes) == ("row", "all_gather", 2, 400)
    assert (gather.seconds, gather.exposed_seconds, gather.hidden_fraction) == (4.0, 1.0, 0.75)
    assert (scatter.axis, scatter.bytes, scatter.hidden_fraction) == ("row·col", 50, 0.0)


def test_algorithms_have_rows_and_arguments_of_their_own() -> None:
    ring = Event("all_gather", ("row",), 8, algorithm="ring", sent_bytes=4, num_rounds=1)
    first, second = summarize_events([ring, Event("all_gather", ("row",), 4), ring])
    assert (first.algorithm, first.calls, first.bytes) == ("ring", 2, 16)
    assert (second.algorithm, second.calls) == ("native", 1)
    assert [line.split()[2] for line in format_table([ring]).splitlines()] == ["algorithm", "ring"]
    (bar,) = [e for e in chrome_trace({0: [ring]})["traceEvents"] if e["ph"] == "X"]
    assert bar["args"] == {
        "bytes": 8,
        "exposed_us": 0.0,
        "algorithm": "ring",
        "sent_bytes": 4,
        "rounds": 1,
    }


def test_what_is_sent_is_compared_with_the_closed_form() -> None:
    shapes = {("row",): AxisShape.of_nodes([0, 0, 0, 0])}

    def event(sent: int | None, rounds: int = 3, op: str = "all_gather") -> Event:
        return Event(op, ("row",), 400, "x", "ring", sent_bytes=sent, num_rounds=rounds)

    assert diff_sent_bytes([event(300), event(300), event(None)], shapes) == []
    # The closed form is that of the busiest rank.
    assert diff_sent_bytes([event(200), event(300)], shapes) == []
    (line,) = diff_sent_bytes([event(200)], shapes)
    assert "all_gather over row of 400 bytes by ring: closed form 300 bytes in 3 rounds" in line
    assert "recorded 200 in 3" in line
    assert len(diff_sent_bytes([event(300), event(300, rounds=2)], shapes)) == 1
    assert diff_sent_bytes([event(200)], shapes, ragged=["x"]) == []
    # Blocks of an all-reduce may differ by an element.
    assert diff_sent_bytes([event(608, 6, "all_reduce")], shapes) == []
    assert len(diff_sent_bytes([event(700, 6, "all_reduce")], shapes)) == 1
    with pytest.raises(ValueError, match="ring has no broadcast"):
        diff_sent_bytes([event(1, op="broadcast")], shapes)


def test_events_under_way_and_predictions_take_no_time() -> None:
    under_way = Event("send", ("pipe",), 8, issue_time=100.0)
    assert (under_way.seconds, under_way.exposed_seconds) == (0.0, 0.0)
    (row,) = summarize_events([under_way, Event("send", ("pipe",), 8)])
    assert (row.seconds, row.exposed_seconds, row.hidden_fraction) == (0.0, 0.0, 1.0)


def test_table_is_text() -> None:
    lines = format_table(EVENTS).splitlines()
    heading = "axis operation algorithm calls MB seconds exposed hidden"
    assert lines[0].split() == heading.split()
    first = "row all_gather native 2 0.000 4.0000 1.0000 75%"
    assert lines[1].split() == first.split()
    assert lines[2].split()[:2] == ["row·col", "reduce_scatter"]
    assert len({len(line) for line in lines}) == 1
    assert len(lines) == 3


def test_chrome_trace_can_be_opened(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json"
    write_chrome_trace(path, {0: EVENTS, 3: EVENTS[:1]})
    loaded = json.loads(path.read_text())
    assert loaded == chrome_trace({0: EVENTS, 3: EVENTS[:1]})
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
        "args": {"bytes": 100, "exposed_us": 1e6, "algorithm": "native"},
    }
    assert (bars[3]["name"], bars[3]["cat"], bars[3]["dur"]) == ("dW a", "compute", 1.5e6)


def test_chrome_trace_of_an_event_under_way() -> None:
    bar = chrome_trace({0: [Event("send", ("pipe",), 8, issue_time=100.0)]})["traceEvents"][-1]
    assert (bar["ts"], bar["dur"], bar["args"]["exposed_us"]) == (1e8, 0.0, 0.0)


def predicted() -> list[Event]:
    return [Event(e.op, e.axis, e.bytes, e.where) for e in communication_events(EVENTS)]


def test_equal_events_have_no_difference_in_any_order() -> None:
    assert diff_events(predicted(), EVENTS) == []
    assert diff_events(predicted()[::-1], EVENTS) == []
    assert diff_events([], []) == []


def test_difference_finds_what_is_missing_extra_or_wrong() -> None:
    missing = diff_events(predicted(), EVENTS[1:])
    assert missing == ["all_gather over row of 100 bytes at a: predicted 1, recorded 0"]
    extra = diff_events(predicted(), [*EVENTS, EVENTS[0]])
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
        assert len(diff_events(wrong, EVENTS)) == 2, change
