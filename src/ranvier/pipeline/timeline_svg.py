"""Timelines of pipeline steps as SVG, as a trace for Perfetto, and as a table.

Simulated and real steps are drawn in the same way, one above the other on a common time axis: a row
per stage, a box per job, and nothing where a stage waits. The SVG uses only CSS classes, as the
plots of a report do; chunks are shades. A step with very many jobs is drawn in cells of equal time,
each filled by the fraction of time in which the stage worked, so that the file stays small.
"""

from __future__ import annotations

import html
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ranvier.errors import PlanError
from ranvier.pipeline.simulator import Timeline

JOB_NAMES = {"F": "forward", "B": "backward", "W": "weights", "H": "head"}
"""Kinds of jobs; H is this stage's part of the head if the vocabulary is split over pipe."""
WAIT_CAUSES = ("activation", "gradient", "credit", "order", "end", "other")
"""What a stage can wait for; `other` is time of a real run between its jobs."""
RECORDED_CAUSES = ("activation", "gradient", "credit", "order")
"""Waits that a real run records."""
JOB_CLASSES = {"F": "f0", "B": "f2", "W": "f1", "H": "f3"}
"""CSS classes of the jobs."""
MAX_BOXES = 5_000
MAX_CELLS = 12_000
"""Maximum number of boxes with tooltips; maximum number of cells of steps that have more jobs."""
WIDTH = 1000
LEFT = 64
RIGHT = 16
BOTTOM = 40
LIGHTEST_OPACITY = 0.45
"""Opacity of the last of many chunks."""


class TimelineBar(NamedTuple):
    """A job or a wait of a stage, with its times."""

    kind: str
    """F, B, W, or the cause of a wait."""
    micro: int
    chunk: int
    start: float
    stop: float


@dataclass(frozen=True)
class StageLane:
    """The jobs and waits of one stage."""

    jobs: tuple[TimelineBar, ...]
    wait_seconds: Mapping[str, float]
    """Seconds waited, by cause."""
    peak_activations: int
    """Maximum number of activations held, counted per chunk."""
    wait_bars: tuple[TimelineBar, ...] = ()
    """The waits with their times, if known."""

    @property
    def busy_seconds(self) -> float:
        """Seconds of its jobs."""
        return sum(bar.stop - bar.start for bar in self.jobs)


@dataclass(frozen=True)
class TimelineChart:
    """A step to be drawn."""

    name: str
    seconds: float
    micro_batches: int
    chunks: int
    lanes: tuple[StageLane, ...]
    unit: str = "s"
    """Unit of times: s, or the name of the unit time."""

    @property
    def bubble_fraction(self) -> float:
        """Fraction of time without compute."""
        total = self.seconds * len(self.lanes)
        if total:
            return max(0.0, 1 - sum(lane.busy_seconds for lane in self.lanes) / total)
        return 0.0

    @property
    def one_f_one_b_peaks(self) -> tuple[int, ...]:
        """Activations that 1F1B holds: `min(micro_batches, stages - index)`."""
        stages = len(self.lanes)
        return tuple(min(self.micro_batches, stages - s) for s in range(stages))

    @property
    def caption(self) -> str:
        """Name, time and bubble."""
        return (
            f"{self.name}: {format_time(self.seconds, self.unit)}, bubble "
            f"{self.bubble_fraction:.1%}"
        )


def chart_of_simulation(name: str, timeline: Timeline, *, unit: str = "s") -> TimelineChart:
    """Returns the chart of a simulated step."""
    shape = timeline.shape
    bars: list[list[TimelineBar]] = [[] for _ in range(shape.stages)]
    for stage, kind, micro, chunk, start, stop in timeline.spans:
        bars[stage].append(TimelineBar(kind, micro, chunk, start, stop))
    rows = zip(bars, timeline.wait_seconds, timeline.peak_activations, strict=True)
    lanes = tuple(
        StageLane(tuple(row), {str(cause): time for cause, time in waits.items()}, peak)
        for row, waits, peak in rows
    )
    return TimelineChart(name, timeline.seconds, shape.micro_batches, shape.chunks, lanes, unit)


def chart_of_run(name: str, table: Mapping[str, Any]) -> TimelineChart:
    """Returns the chart of a step of a real run, from its timeline.json."""
    # The file may be damaged or edited, so every value is checked.
    try:
        rows = [[TimelineBar(*entry) for entry in stage] for stage in table["stages"]]
        micro_batches = int(table["micro_batches"])
        chunks = int(table["chunks"])
        seconds = float(table["seconds"])
        good = math.isfinite(seconds) and min(micro_batches, chunks, len(rows)) > 0
        good = good and all(_is_valid_bar(bar, chunks) for row in rows for bar in row)
    except (KeyError, TypeError, ValueError, OverflowError):
        good = False
    if not good:
        raise PlanError(
            "The timeline of the run is not valid. It must have micro_batches, chunks, seconds "
            "and, for each stage, lists [kind, micro, chunk, start, stop]. Train again to rewrite "
            "it."
        )
    seconds = max([seconds, *(bar.stop for row in rows for bar in row)])
    lanes = tuple(_recorded_lane(row, seconds) for row in rows)
    return TimelineChart(name, seconds, micro_batches, chunks, lanes)


def _is_valid_bar(bar: TimelineBar, chunks: int) -> bool:
    """Returns whether the values of a bar from a file are valid."""
    whole = type(bar.micro) is int and type(bar.chunk) is int and 0 <= bar.chunk < chunks
    known = bar.kind in JOB_NAMES or bar.kind in RECORDED_CAUSES
    return known and whole and 0.0 <= float(bar.start) <= float(bar.stop) < math.inf


def _recorded_lane(bars: Sequence[TimelineBar], seconds: float) -> StageLane:
    """Returns the lane of a real stage. Activations and waits are derived from its jobs."""
    jobs = tuple(sorted((bar for bar in bars if bar.kind in JOB_NAMES), key=lambda bar: bar.start))
    pauses = tuple(bar for bar in bars if bar.kind not in JOB_NAMES)
    if any(bar.kind == "W" for bar in jobs):
        last = "W"
    else:
        last = "B"
    held = peak = 0
    waits: dict[str, float] = defaultdict(float)
    for bar in jobs:
        held += (bar.kind == "F") - (bar.kind == last)
        peak = max(peak, held)
    for bar in pauses:
        waits[bar.kind] += bar.stop - bar.start
    busy = sum(bar.stop - bar.start for bar in jobs)
    waits["end"] = seconds - max((bar.stop for bar in bars), default=0.0)
    waits["other"] = max(0.0, seconds - busy - sum(waits.values()))
    return StageLane(
        jobs, {cause: wait for cause, wait in waits.items() if wait > 0.0}, peak, pauses
    )


def format_time(value: float, unit: str = "s") -> str:
    """Formats a time with its unit."""
    if unit != "s":
        return f"{value:.4g} {unit}".strip()
    if not value:
        return "0"
    size, name = (1.0, "s") if value >= 1 else (1e-3, "ms") if value >= 1e-3 else (1e-6, "µs")
    number = value / size
    if number < 1000:
        return f"{number:.4g} {name}"
    return f"{number:,.0f} {name}"


# ---- tables ---------------------------------------------------------------------------------


def table_cells(picture: TimelineChart) -> tuple[list[str], list[list[str]]]:
    """Returns header and rows of a table: busy and waiting times and activations of each stage."""
    used = [
        cause for cause in WAIT_CAUSES if any(cause in lane.wait_seconds for lane in picture.lanes)
    ]
    head = ["stage", "busy", *(f"waits: {cause}" for cause in used), "activations", "with 1F1B"]
    rows = []
    for stage, (lane, classic) in enumerate(
        zip(picture.lanes, picture.one_f_one_b_peaks, strict=True)
    ):
        times = [lane.busy_seconds, *(lane.wait_seconds.get(cause, 0.0) for cause in used)]
        shares = [_format_share(time, picture) for time in times]
        rows.append([str(stage), *shares, str(lane.peak_activations), str(classic)])
    return head, rows


def _format_share(time: float, picture: TimelineChart) -> str:
    """Formats a time and its fraction of the step."""
    if not time:
        return "–"
    size = "s" if picture.unit == "s" else ""
    return f"{format_time(time, size)} ({time / picture.seconds:.0%})"


def text_table(picture: TimelineChart) -> str:
    """Returns the table as text: busy time, waits by cause, activations here and with 1F1B."""
    head, rows = table_cells(picture)
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in [head, *rows]
    ]
    return "\n".join([picture.caption, *lines])


# ---- Perfetto -------------------------------------------------------------------------------


def chrome_trace(pictures: Sequence[TimelineChart]) -> dict[str, Any]:
    """Returns a trace for Perfetto or Chrome: a process per step, a thread per stage."""
    events: list[dict[str, Any]] = []
    for number, picture in enumerate(pictures):
        events.append(_metadata_event("process_name", number, 0, picture.caption))
        for stage, lane in enumerate(picture.lanes):
            events.append(_metadata_event("thread_name", number, stage, f"stage {stage}"))
            for bar in (*lane.jobs, *lane.wait_bars):
                if bar.kind in JOB_NAMES:
                    name = f"{bar.kind}{bar.micro}"
                else:
                    name = f"wait for {bar.kind}"
                events.append(
                    {
                        "name": name,
                        "cat": JOB_NAMES.get(bar.kind, "wait"),
                        "ph": "X",
                        "pid": number,
                        "tid": stage,
                        # Times of the format are microseconds.
                        "ts": round(bar.start * 1e6, 3),
                        "dur": round((bar.stop - bar.start) * 1e6, 3),
                        "args": {"micro": bar.micro, "chunk": bar.chunk},
                    }
                )
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _metadata_event(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


# ---- SVG ------------------------------------------------------------------------------------


def timeline_svg(pictures: Sequence[TimelineChart], *, title: str = "Pipeline") -> str:
    """Draws steps one above the other on a common time axis."""
    rows = sum(len(picture.lanes) for picture in pictures)
    jobs = sum(len(lane.jobs) for picture in pictures for lane in picture.lanes)
    high = min(22.0, max(5.0, 600 / max(rows, 1)))
    longest = max((picture.seconds for picture in pictures), default=0.0) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / longest
    # 0 means one box per job; otherwise the number of cells per row, at most one per pixel.
    if jobs <= MAX_BOXES:
        count = 0
    else:
        count = max(1, min(WIDTH - LEFT - RIGHT, MAX_CELLS // rows))
    out = _draw_legend(pictures, merged=count > 0)
    y = 56.0
    for picture in pictures:
        out.append(
            f'<text class="ink" x="8" y="{y + 14:.0f}">{_escape_xml(picture.caption)}</text>'
        )
        y += 22
        out += _stage_labels(len(picture.lanes), y, high)
        if count:
            out += _draw_cells(picture, y, high, scale, longest / count)
        else:
            out += _draw_boxes(picture, y, high, scale)
        y += high * len(picture.lanes) + 12
    out += _draw_time_axis(y, scale, longest, pictures[0].unit if pictures else "s")
    words = " ".join(f"{picture.caption}, {len(picture.lanes)} stages." for picture in pictures)
    head = [
        f'<svg class="plot" role="img" viewBox="0 0 {WIDTH} {y + BOTTOM:.0f}">',
        f"<title>{_escape_xml(title)}</title><desc>{_escape_xml(words or 'nothing')}</desc>",
        f'<text class="title" x="8" y="20">{_escape_xml(title)}</text>',
    ]
    return "\n".join([*head, *out, "</svg>"])


def _escape_xml(text: str) -> str:
    """Escapes text for XML; control characters, which XML forbids, are replaced."""
    return html.escape("".join(c if c.isprintable() else "\ufffd" for c in text))


def _draw_legend(pictures: Sequence[TimelineChart], *, merged: bool) -> list[str]:
    """Draws the legend: the color of each kind of job."""
    used = {bar.kind for picture in pictures for lane in picture.lanes for bar in lane.jobs}
    out = []
    x = 8.0
    for kind, name in JOB_NAMES.items():
        if kind in used:
            out.append(
                f'<rect class="{JOB_CLASSES[kind]}" x="{x:g}" y="33" width="12" height="12"/>'
            )
            out.append(f'<text x="{x + 18:g}" y="43">{name}</text>')
            x += 100
    if merged:
        notes = ["very many jobs: each cell is filled by the fraction of busy time"]
    else:
        notes = []
    if not merged and any(picture.chunks > 1 for picture in pictures):
        notes = ["later chunks are lighter"]
    out.append(f'<text x="{x + 18:g}" y="43">{"; ".join(notes)}</text>' if notes else "")
    return list(filter(None, out))


def _stage_labels(stages: int, y: float, high: float) -> Iterator[str]:
    """Draws the numbers of the stages, as many as fit, and a line below each."""
    stride = math.ceil(14 / high)
    for stage in range(stages):
        low = y + (stage + 1) * high
        if stage % stride == 0:
            text = f"stage {stage}"
            yield f'<text class="end" x="{LEFT - 6}" y="{low - high / 2 + 4:.1f}">{text}</text>'
        if high > 8 or stage == stages - 1:
            yield f'<path class="rule" d="M{LEFT},{low:.1f}H{WIDTH - RIGHT}"/>'


def _chunk_opacity(chunk: int, chunks: int) -> float:
    """Returns the opacity of a chunk: later ones are lighter."""
    return 1 - (1 - LIGHTEST_OPACITY) * chunk / max(chunks - 1, 2)


def _draw_boxes(picture: TimelineChart, y: float, high: float, scale: float) -> Iterator[str]:
    """Draws a box per job, with the number of its micro-batch where it fits."""
    # Boxes of a kind and chunk share one group with class and opacity.
    groups: dict[tuple[str, int], list[str]] = defaultdict(list)
    texts: dict[str, list[str]] = defaultdict(list)
    for stage, lane in enumerate(picture.lanes):
        top = y + stage * high
        for bar in lane.jobs:
            x = LEFT + bar.start * scale
            width = (bar.stop - bar.start) * scale
            words = _describe_job(bar, stage, picture)
            gap = 0.8 if width > 3 else 0.0
            groups[bar.kind, bar.chunk].append(
                f'<rect x="{x:.1f}" y="{top + 1:.1f}" width="{max(width - gap, 0.2):.1f}" '
                f'height="{high - 2:.1f}"><title>{words}</title></rect>'
            )
            if high >= 14 and width > 8 * len(str(bar.micro)) + 3:
                light = _chunk_opacity(bar.chunk, picture.chunks) < 0.8
                texts["ink" if light else "paper"].append(
                    f'<text class="{"ink" if light else "paper"}" x="{x + width / 2:.1f}" '
                    f'y="{top + high / 2 + 4:.1f}">{bar.micro}</text>'
                )
    for (kind, chunk), rects in groups.items():
        shade = _chunk_opacity(chunk, picture.chunks)
        yield f'<g class="{JOB_CLASSES[kind]}" fill-opacity="{shade:.2g}">{"".join(rects)}</g>'
    # Numbers come after all boxes, so that no box covers them.
    for texts_of in texts.values():
        yield f'<g class="middle" pointer-events="none">{"".join(texts_of)}</g>'


def _describe_job(bar: TimelineBar, stage: int, picture: TimelineChart) -> str:
    """Returns the tooltip of a job."""
    unit = "s" if picture.unit == "s" else ""
    if picture.chunks > 1:
        chunk = f", chunk {bar.chunk}"
    else:
        chunk = ""
    when = format_time(bar.start, unit)
    long = format_time(bar.stop - bar.start, unit)
    return (
        f"{JOB_NAMES[bar.kind]} {bar.micro}{chunk}, stage {stage}: starts at {when}, takes {long}"
    )


def _draw_cells(
    picture: TimelineChart, y: float, high: float, scale: float, cell: float
) -> Iterator[str]:
    """Draws a row of cells of equal time per stage, filled by the fraction of each kind of job."""
    wide = cell * scale
    for stage, lane in enumerate(picture.lanes):
        shares: dict[str, dict[int, float]] = {kind: defaultdict(float) for kind in JOB_NAMES}
        # Distribute the time of each job over the cells that it overlaps.
        for bar in lane.jobs:
            place = int(bar.start / cell)
            while place * cell < bar.stop:
                inside = min(bar.stop, (place + 1) * cell) - max(bar.start, place * cell)
                shares[bar.kind][place] += max(inside, 0.0) / cell
                place += 1
        bottom = y + (stage + 1) * high - 0.5
        filled = dict[int, float]()
        # Stack the kinds in each cell from the bottom.
        for kind, row in shares.items():
            path = []
            for place, share in sorted(row.items()):
                low = filled.get(place, 0.0)
                size = share * (high - 1)
                filled[place] = low + size
                if size > 0.05:
                    x = LEFT + place * wide
                    path.append(f"M{x:.1f} {bottom - low:.1f}v{-size:.1f}h{wide:.1f}v{size:.1f}")
            if path:
                words = f"<title>{JOB_NAMES[kind]}, stage {stage}</title>"
                yield f'<path class="{JOB_CLASSES[kind]}" d="{"".join(path)}">{words}</path>'


def _draw_time_axis(y: float, scale: float, longest: float, unit: str) -> Iterator[str]:
    """Draws the time axis with about five round times."""
    # The smallest of 1, 2, 5 or 10 times a power of ten that gives at most five intervals.
    power = 10.0 ** math.floor(math.log10(longest / 5))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= longest / 5 * (1 - 1e-9))
    yield f'<path class="axis" d="M{LEFT},{y:.1f}H{WIDTH - RIGHT}"/>'
    for i in range(int(longest / step + 1e-9) + 1):
        x = LEFT + i * step * scale
        text = format_time(i * step, "s" if unit == "s" else "")
        yield f'<path class="axis" d="M{x:.1f},{y:.1f}v5"/>'
        yield f'<text class="middle" x="{x:.1f}" y="{y + 19:.1f}">{text}</text>'
    if unit == "s":
        name = "time"
    else:
        name = f"time in {unit}"
    yield f'<text class="end" x="{WIDTH - RIGHT}" y="{y + 35:.1f}">{_escape_xml(name)}</text>'
