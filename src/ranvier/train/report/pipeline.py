"""The recorded pipeline timeline of a run, in its report.

A run with several stages writes timeline.json: jobs and waits of each stage in one step. The report
draws it above a simulation of the same step with the mean time of each job, so that differences
show what the simulator does not model (links, jitter, work between jobs).
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from ranvier.errors import PlanError
from ranvier.html import page
from ranvier.html.plot import escape_html
from ranvier.pipeline import timeline_svg
from ranvier.pipeline.policy import PipelineShape
from ranvier.pipeline.policy_search import choose_policy
from ranvier.pipeline.policy_search import policy_from_text as read_policy
from ranvier.pipeline.simulator import JobTimes, simulate_step
from ranvier.pipeline.stage_profile import TIMELINE_FILE
from ranvier.pipeline.timeline_svg import TimelineChart
from ranvier.system import safe_files


def read_timeline(folder: Path) -> dict[str, Any]:
    """Read the timeline.json of a run."""
    path = folder / TIMELINE_FILE
    try:
        table = json.loads(safe_files.read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, OSError):
            why = error.strerror
        else:
            why = "it is not valid JSON"
        raise PlanError(
            f"{path} cannot be read: {why}. A run with pipeline stages writes it. Pass "
            "the directory of such a run."
        ) from None
    if isinstance(table, dict):
        return table
    return {}


def recorded_chart(table: dict[str, Any]) -> TimelineChart:
    """The chart of the recorded step."""
    return timeline_svg.chart_of_run(f"run, step {table.get('step')}, {table.get('policy')}", table)


def mean_times(picture: TimelineChart, *, halves: bool = False) -> JobTimes:
    """The mean time of each kind of job on each virtual stage.

    halves: if weight gradients were not separate jobs, count them as half of backward.
    """
    stages = len(picture.lanes)
    size = len(picture.lanes) * picture.chunks
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for stage, lane in enumerate(picture.lanes):
        for bar in lane.jobs:
            # Virtual stage = chunk * stages + stage, as in interleaved schedules.
            found[bar.kind, bar.chunk * stages + stage].append(bar.stop - bar.start)
    missing = [v for v in range(size) for kind in "FB" if (kind, v) not in found]
    if missing:
        raise PlanError(
            f"The timeline of the run lacks the forward or backward of virtual stage {missing[0]}. "
            f"Each of the {size} virtual stages has both. Train again to rewrite it."
        )
    forward, backward, weight = (
        tuple(fmean(found.get((kind, v), [0.0])) for v in range(size)) for kind in "FBW"
    )
    if halves and not any(weight):
        weight = backward = tuple(time / 2 for time in backward)
    return JobTimes(forward, backward, weight)


def simulated_chart(table: dict[str, Any], picture: TimelineChart) -> TimelineChart:
    """The chart of the same step in the simulator."""
    name = str(table.get("policy"))
    limit = table.get("credits")
    shape = PipelineShape(len(picture.lanes), picture.micro_batches, picture.chunks)
    times = mean_times(picture)
    known = table.get("chosen")
    # Prefer the policy that the run itself used; older timelines have only its name.
    if isinstance(known, str):
        policy = read_policy(known, shape)
    else:
        policy = choose_policy(name, shape, times, limit=limit if isinstance(limit, int) else 0)
    return timeline_svg.chart_of_simulation(
        f"simulated, {name}", simulate_step(shape, policy, times)
    )


def pipeline_section(folder: Path) -> str:
    """The report section on the pipeline; empty for a run without a timeline."""
    if not (folder / TIMELINE_FILE).exists():
        return ""
    notes: list[str] = []
    pictures: list[TimelineChart] = []
    try:
        table = read_timeline(folder)
        pictures.append(recorded_chart(table))
        pictures.append(simulated_chart(table, pictures[0]))
    except PlanError as error:
        notes.append(str(error))
    parts = [f'<p class="note">{escape_html(note)}</p>' for note in notes]
    if pictures:
        drawing = timeline_svg.timeline_svg(pictures, title="One pipeline step")
        parts.append(f'<figure class="wide">{drawing}</figure>')
    if len(pictures) > 1:
        parts.append(
            '<p class="muted">Top: the run. Bottom: the simulator with the mean time of each job, '
            "without link times and jitter.</p>"
        )
    for picture in pictures:
        parts.append(
            f"<p>{escape_html(picture.caption)}</p>{page.render_table(*timeline_svg.table_cells(picture))}"
        )
    return page.render_section("Pipeline", *parts)
