"""Drawings of steps: simulated and recorded alike, whole XML, small files, right numbers."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

import pytest

from ranvier.errors import PlanError
from ranvier.pipeline import schedules, timeline_svg
from ranvier.pipeline.policy import FixedSchedule, PipelineShape
from ranvier.pipeline.simulator import Timeline, even_times, simulate_step
from ranvier.pipeline.timeline_svg import TimelineChart

SPACE = "{http://www.w3.org/2000/svg}"


def played(order: FixedSchedule, shape: PipelineShape, *, weight: float = 0.0) -> Timeline:
    return simulate_step(shape, order, even_times(shape, 1.0, 2.0 - weight, weight))


def picture(shape: PipelineShape) -> TimelineChart:
    return timeline_svg.chart_of_simulation(
        "1f1b", played(schedules.interleaved_schedule(shape), shape)
    )


def record(shape: PipelineShape) -> dict[str, Any]:
    """What a run that goes as the simulator plays it writes."""
    timeline = played(schedules.interleaved_schedule(shape), shape)
    stages: list[list[list[Any]]] = [[] for _ in range(shape.stages)]
    for stage, *job in timeline.spans:
        stages[stage].append(job)
    return {
        "policy": "1f1b",
        "step": 9,
        "micro_batches": shape.micro_batches,
        "chunks": shape.chunks,
        "seconds": timeline.seconds,
        "stages": stages,
    }


def boxes(svg: str) -> list[ElementTree.Element]:
    """Boxes of jobs: those that say what they are."""
    found = ElementTree.fromstring(svg).iter("rect")
    return [box for box in found if box.find("title") is not None]


def test_a_box_for_each_job_says_what_it_is() -> None:
    svg = timeline_svg.timeline_svg([picture(PipelineShape(2, 3))])
    titles = [box.findtext("title") for box in boxes(svg)]
    assert len(titles) == 2 * 2 * 3
    assert "forward 0, stage 0: starts at 0, takes 1 s" in titles
    assert "backward 2, stage 0: starts at 10 s, takes 2 s" in titles
    assert ElementTree.fromstring(svg).get("role") == "img"
    assert "1f1b: 12 s, bubble 25.0%" in svg


def test_boxes_lie_where_and_as_long_as_their_jobs() -> None:
    svg = timeline_svg.timeline_svg([picture(PipelineShape(2, 3))])
    scale = (timeline_svg.WIDTH - timeline_svg.LEFT - timeline_svg.RIGHT) / 12
    box = next(b for b in boxes(svg) if "backward 2, stage 0" in str(b.findtext("title")))
    assert float(box.attrib["x"]) == pytest.approx(timeline_svg.LEFT + 10 * scale, abs=0.1)
    assert float(box.attrib["width"]) == pytest.approx(2 * scale, abs=1)


def test_kinds_have_colours_and_chunks_shades() -> None:
    shape = PipelineShape(2, 4, 2)
    order = schedules.zero_bubble_schedule(shape)
    root = ElementTree.fromstring(
        timeline_svg.timeline_svg(
            [timeline_svg.chart_of_simulation("z", played(order, shape, weight=0.5))]
        )
    )
    groups = [group for group in root.iter("g") if group.get("fill-opacity")]
    assert {group.get("class") for group in groups} == {
        timeline_svg.JOB_CLASSES[kind] for kind in "FBW"
    }
    assert len(set(timeline_svg.JOB_CLASSES.values())) == len(timeline_svg.JOB_NAMES)
    assert len({group.get("fill-opacity") for group in groups}) == 2
    assert {"forward", "backward", "weights"} <= {text.text for text in root.iter("text")}


def test_numbers_stand_only_where_they_fit() -> None:
    few, many = (
        timeline_svg.timeline_svg([picture(PipelineShape(2, 3))]),
        timeline_svg.timeline_svg([picture(PipelineShape(2, 300))]),
    )
    assert few.count('class="paper"') == 12
    assert many.count('class="paper"') == 0


def test_steps_share_an_axis() -> None:
    short, long = picture(PipelineShape(2, 3)), picture(PipelineShape(2, 9))
    last = [
        max(float(b.attrib["x"]) for b in boxes(timeline_svg.timeline_svg(one)))
        for one in ([short], [long])
    ]
    both = boxes(timeline_svg.timeline_svg([short, long]))
    assert max(float(b.attrib["x"]) for b in both[:12]) < last[0]
    assert max(float(b.attrib["x"]) for b in both[12:]) == pytest.approx(last[1])
    assert float(both[0].attrib["y"]) < float(both[-1].attrib["y"])


def test_a_large_step_stays_small_and_keeps_its_areas() -> None:
    shape = PipelineShape(64, 512)
    large = picture(shape)
    svg = timeline_svg.timeline_svg([large])
    assert len(svg) < 1_000_000
    root = ElementTree.fromstring(svg)
    paths = [path for path in root.iter("path") if path.find("title") is not None]
    area = 0.0
    for path in paths:
        for piece in path.attrib["d"].split("M")[1:]:
            size, wide = piece.split("v-")[1].split("v")[0].split("h")
            area += float(size) * float(wide)
    whole = 600 / 64 - 1
    busy = area / (whole * (timeline_svg.WIDTH - timeline_svg.LEFT - timeline_svg.RIGHT) * 64)
    assert busy == pytest.approx(1 - large.bubble_fraction, rel=0.03)


def test_nothing_is_drawn_of_nothing() -> None:
    ElementTree.fromstring(timeline_svg.timeline_svg([]))
    empty = TimelineChart("<none> & \x00", 0.0, 1, 1, (timeline_svg.StageLane((), {}, 0),))
    ElementTree.fromstring(timeline_svg.timeline_svg([empty]))
    assert "0%" in timeline_svg.text_table(empty)


def test_a_record_tells_what_the_simulator_does() -> None:
    shape = PipelineShape(4, 6)
    real, played = timeline_svg.chart_of_run("run", record(shape)), picture(shape)
    assert real.seconds == played.seconds and real.bubble_fraction == pytest.approx(
        played.bubble_fraction
    )
    for one, other in zip(real.lanes, played.lanes, strict=True):
        assert one.jobs == other.jobs and one.peak_activations == other.peak_activations
        # waits that were not recorded are of unknown cause, but as long
        assert sum(one.wait_seconds.values()) == pytest.approx(sum(other.wait_seconds.values()))
    assert (
        [lane.peak_activations for lane in real.lanes]
        == [4, 3, 2, 1]
        == list(real.one_f_one_b_peaks)
    )


def test_recorded_waits_are_counted_by_cause() -> None:
    stage = [["F", 0, 0, 0.0, 1.0], ["gradient", 0, 0, 1.0, 3.0], ["B", 0, 0, 3.5, 5.0]]
    table = {"micro_batches": 1, "chunks": 1, "seconds": 6.0, "stages": [stage]}
    (lane,) = timeline_svg.chart_of_run("run", table).lanes
    assert lane.busy_seconds == 2.5
    assert lane.wait_seconds == {"gradient": 2.0, "end": 1.0, "other": 0.5}
    head, rows = timeline_svg.table_cells(timeline_svg.chart_of_run("run", table))
    assert [word.removeprefix("waits: ") for word in head[2:-2]] == ["gradient", "end", "other"]
    assert rows == [["0", "2.5 s (42%)", "2 s (33%)", "1 s (17%)", "500 ms (8%)", "1", "1"]]


@pytest.mark.parametrize(
    "change",
    [
        {"stages": None},
        {"stages": []},
        {"stages": [[["F", 0, 0, 0.0]]]},
        {"stages": [[["F", 0, 7, 0.0, 1.0]]]},
        {"stages": [[["X", 0, 0, 0.0, 1.0]]]},
        {"stages": [[["F", 0, 0, 1.0, 0.5]]]},
        {"stages": [[["F", 0, 0, 0.0, float("nan")]]]},
        {"stages": [[["F", "<b>", 0, 0.0, 1.0]]]},
        {"seconds": "long"},
        {"micro_batches": 0},
    ],
)
def test_a_broken_record_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="timeline of the run is not valid"):
        timeline_svg.chart_of_run("run", {**record(PipelineShape(2, 2)), **change})


def test_perfetto_has_a_process_for_each_step_and_a_thread_for_each_stage() -> None:
    shape = PipelineShape(2, 3)
    trace = timeline_svg.chrome_trace(
        [picture(shape), timeline_svg.chart_of_run("run", record(shape))]
    )
    events = json.loads(json.dumps(trace))["traceEvents"]
    jobs = [event for event in events if event["ph"] == "X"]
    assert {(event["pid"], event["tid"]) for event in jobs} == {
        (p, t) for p in (0, 1) for t in (0, 1)
    }
    assert len(jobs) == 2 * 12
    last = max(jobs, key=lambda event: float(event["ts"]))
    assert last["name"] == "B2" and last["ts"] == 10e6 and last["dur"] == 2e6
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["1f1b: 12 s, bubble 25.0%", "run: 12 s, bubble 25.0%"]


def test_a_table_has_waits_and_activations_beside_those_of_1f1b() -> None:
    lines = timeline_svg.text_table(picture(PipelineShape(4, 8))).splitlines()
    assert lines[0].startswith("1f1b: 33 s, bubble 27.3%")
    assert len(lines) == 2 + 4 and len({len(line) for line in lines[1:]}) == 1
    assert [line.split()[-2:] for line in lines[2:]] == [[n, n] for n in "4321"]


def test_times_are_readable() -> None:
    values = (0.0, 2e-6, 0.0123456, 1.5, 12345.0)
    assert [timeline_svg.format_time(v) for v in values] == [
        "0",
        "2 µs",
        "12.35 ms",
        "1.5 s",
        "12,345 s",
    ]
    assert timeline_svg.format_time(3.25, "mean forwards") == "3.25 mean forwards"
