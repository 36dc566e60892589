"""Simulates a step of a run's pipeline without processes.

The grid and the number of micro-batches come from the plan. Times come from a table or from a real
run; otherwise they are proportional to the work of the layers, in units of the mean forward of a
virtual stage. All policies are simulated with the same random seed.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ranvier import counter_rng
from ranvier.config.arguments import SimulateOptions
from ranvier.config.run import RunConfig
from ranvier.config.sections import suggest_nearest
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.html import page
from ranvier.html.plot import standalone_svg
from ranvier.parallel.parallel_model import ParallelModel
from ranvier.parallel.parallelize import parallelize
from ranvier.pipeline import policy_search, timeline_svg
from ranvier.pipeline.policy import PipelineShape
from ranvier.pipeline.simulator import JobTimes
from ranvier.pipeline.simulator import simulate_step as play
from ranvier.pipeline.stage_profile import TIMELINE_FILE
from ranvier.pipeline.timeline_svg import TimelineChart
from ranvier.system.terminal import print
from ranvier.train.report import pipeline
from ranvier.train.resolve import ResolveContext, resolve_run
from ranvier.train.resume.run_directory import write_text_atomically

TIME_KEYS = ("forward", "backward", "weight", "link", "jitter", "stragglers")
"""Keys that a table of times may have."""
RELATIVE_UNIT = "mean forwards"


@dataclass(frozen=True)
class TimingSource:
    """Times of a step and their origin."""

    times: JobTimes
    words: list[str]
    """Lines of text that describe the origin."""
    unit: str = "s"
    recorded_step: TimelineChart | None = None
    """The step of a run in which the times were measured, if any."""


def simulate_run(run: RunConfig, wanted: SimulateOptions) -> int:
    """Simulates the step of a run with each policy; prints tables and writes drawings."""
    known = math.prod(max(size, 1) for size in run.plan.degrees.values())
    run = resolve_run(run, ResolveContext(world_size=known, reads_adapter=False))
    plan = run.plan.without_measuring
    run = replace(run, plan=plan)
    shape = PipelineShape(plan.pipe, plan.num_micro_batches, plan.virtual_stages)
    names = _policies_to_play(plan.schedule, wanted.policies)
    source = find_times(run, shape, wanted.times)
    times = apply_options(source.times, wanted, shape)
    folder = _make_output_dir(run, wanted.output)
    counts = f"stages: {shape.stages}, chunks per stage: {shape.chunks}"
    print("\n".join([f"{counts}, micro-batches: {shape.micro_batches}", *source.words]))
    # A policy is chosen for the expected jitter, which is plan.stage_time_jitter unless the times
    # or the options set it; the simulated step itself uses only the jitter of the times.
    told = wanted.jitter is not None or times.jitter > 0.0
    if told:
        expected = times
    else:
        expected = replace(times, jitter=plan.stage_time_jitter)
    pictures = dict[str, TimelineChart]()
    refused = dict[str, str]()
    for name in names:
        try:
            splits = not plan.vocab_over_pipe
            policy = policy_search.choose_policy(
                name, shape, expected, limit=plan.max_in_flight, splits=splits
            )
            step = play(shape, policy, times, wanted.seed)
        except PlanError as error:
            # The run itself could not use this policy: that is an error. Any other policy is only
            # listed as not fitting.
            if name == plan.schedule:
                raise
            refused[name] = str(error)
        else:
            pictures[name] = timeline_svg.chart_of_simulation(
                f"simulated, {name}", step, unit=source.unit
            )
    if source.recorded_step:
        tables = [source.recorded_step]
    else:
        tables = []
    tables.append(pictures[plan.schedule])
    for picture in tables:
        print(f"\n{timeline_svg.text_table(picture)}")
    print(f"\n{comparison_table(pictures, refused)}\n")
    drawn = [*tables, *(one for one in pictures.values() if one not in tables)]
    _save_drawings(folder, drawn, tables)
    return 0


def _policies_to_play(own: str, given: Sequence[str]) -> list[str]:
    """Returns the policies to simulate, the plan's first."""
    for name in given:
        if name not in policy_search.POLICY_NAMES:
            raise PlanError(
                f"policy {name!r} is not "
                f"known.{suggest_nearest(name, policy_search.POLICY_NAMES)} Known policies: "
                f"{', '.join(policy_search.POLICY_NAMES)}. Use one of them."
            )
    return list(dict.fromkeys([own, *(given or policy_search.POLICY_NAMES)]))


# ---- times ----------------------------------------------------------------------------------


def find_times(run: RunConfig, shape: PipelineShape, path: str) -> TimingSource:
    """Returns times from a table or a run; else from the run itself if they fit; else from work."""
    if path and not Path(path).is_dir():
        return TimingSource(times_from_toml(Path(path), shape), [f"times: {path}"])
    folder = Path(path or run.train.output_dir or ".")
    note = list[str]()
    if path or (run.train.output_dir and (folder / TIMELINE_FILE).exists()):
        source = times_from_run(folder)
        size = len(source.times.forward)
        # A given timeline is used unchanged; one found in the run directory must fit the plan.
        if path or size == shape.stages * shape.chunks:
            return source
        note = [f"{folder / TIMELINE_FILE} has {size} virtual stages and is ignored"]
    source = times_from_work(run, shape)
    return replace(source, words=[*note, *source.words])


def times_from_run(folder: Path) -> TimingSource:
    """Returns the mean times of a run's timeline."""
    picture = pipeline.recorded_chart(pipeline.read_timeline(folder))
    times = pipeline.mean_times(picture, halves=True)
    return TimingSource(
        times, [f"times: measured in {folder / TIMELINE_FILE}"], recorded_step=picture
    )


def times_from_work(run: RunConfig, shape: PipelineShape) -> TimingSource:
    """Returns times proportional to the work of the layers; both halves of backward take as long as
    forward.
    """
    if shape.stages == 1:
        ones = (1.0,) * shape.chunks
        return TimingSource(
            JobTimes(ones, ones, ones), ["times: one stage has all the work"], RELATIVE_UNIT
        )
    # Only the costs of the stages are needed, so no memory is allocated for weights.
    with counter_rng.init_empty_weights():
        model = run.model_kind.build_model(run.model, run.lora)
    grid = Grid.from_plan(run.plan)
    plan = replace(run.plan.without_measuring, compile="off")
    parallelize(model, grid, plan, seq_len=run.data.seq_len, materialize=False)
    parallel: Any = model.parallel
    assert isinstance(parallel, ParallelModel)
    stage = parallel.pipeline.executor.stage
    unit = sum(stage.stage_costs) / len(stage.stage_costs)
    forward = tuple(cost / unit for cost in stage.stage_costs)
    what = run.plan.stage_profile or "the work of the layers"
    words = [f"times: proportional to {what}; the mean forward is 1", *stage.describe_stages()]
    return TimingSource(JobTimes(forward, forward, forward), words, RELATIVE_UNIT)


def times_from_toml(path: Path, shape: PipelineShape) -> JobTimes:
    """Returns the times in a TOML table; a single number applies to all virtual stages."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(
            f"{path} cannot be read: {error.strerror}. Times are in a TOML file or in a run "
            "directory. Pass the path of one."
        ) from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path} is not valid TOML: {str(error)[:200]}. Fix that line.") from None
    for key in table:
        if key not in TIME_KEYS:
            raise PlanError(
                f"{path}: {key} is not a known key.{suggest_nearest(key, TIME_KEYS)} Known keys: "
                f"{', '.join(TIME_KEYS)}."
            )
    size = shape.stages * shape.chunks
    forward, backward, weight = (
        _parse_numbers(table.get(key), size, f"{path}: {key}")
        for key in ("forward", "backward", "weight")
    )
    if not forward:
        raise PlanError(
            f"{path} has no forward. A table of times must have at least the forward times. "
            f"Write forward = [...] with {size} numbers, in seconds."
        )
    link = table.get("link", 0.0)
    slow = table.get("stragglers", {})
    if not isinstance(slow, Mapping):
        raise PlanError(f"{path}: stragglers={slow!r} is not a table. Write [stragglers] 3 = 1.3.")
    factors = _parse_stragglers([f"{stage}={factor}" for stage, factor in slow.items()], shape)
    (jitter,) = _parse_numbers(table.get("jitter", 0.0), 1, f"{path}: jitter")
    return JobTimes(
        forward=forward,
        # Backward computes two matmuls for each one of forward.
        backward=backward or tuple(2 * time for time in forward),
        weight=weight,
        link=_parse_numbers(link, size - 1, f"{path}: link") if size > 1 else 0.0,
        jitter=jitter,
        stragglers=factors,
    )


def _parse_numbers(value: Any, count: int, what: str) -> tuple[float, ...]:
    """Returns a list of numbers; a single number is repeated `count` times."""
    if value is None:
        return ()
    if isinstance(value, list):
        values = value
    else:
        values = [value] * count
    # A bool is an int in Python.
    if any(isinstance(one, bool) or not isinstance(one, int | float) for one in values):
        raise PlanError(
            f"{what}={value!r} is not a list of numbers. Write for example [0.01, 0.02]."
        )
    return tuple(map(float, values))


def _parse_stragglers(words: Sequence[str], shape: PipelineShape) -> dict[int, float]:
    """Returns the slowdown factors of stages, from STAGE=FACTOR."""
    factors = {}
    for word in words:
        stage, _, factor = word.partition("=")
        try:
            number = int(stage)
            slow = float(factor)
        except ValueError:
            number = -1
            slow = math.nan
        if not 0 <= number < shape.stages or not 0 < slow < math.inf:
            raise PlanError(
                f"straggler {word!r} is not valid. It must be STAGE=FACTOR with a stage below "
                f"{shape.stages} and a factor above 0. Write for example 0=1.3."
            )
        factors[number] = slow
    return factors


def apply_options(times: JobTimes, wanted: SimulateOptions, shape: PipelineShape) -> JobTimes:
    """Returns the times with the jitter, link and stragglers of the options."""
    times = replace(
        times,
        link=times.link if wanted.link is None else wanted.link,
        jitter=times.jitter if wanted.jitter is None else wanted.jitter,
        stragglers={**times.stragglers, **_parse_stragglers(wanted.straggler, shape)},
    )
    problems = times.problems(shape)
    if not 0.0 <= times.jitter <= 2.0:
        problems.append(
            f"jitter={times.jitter} is out of range. It must be between 0 and 2. Use 0.1."
        )
    if not isinstance(times.link, tuple) and not 0.0 <= times.link < math.inf:
        problems.append(f"link={times.link} is not a valid time. It must be at least 0. Use 0.001.")
    if problems:
        raise PlanError(problems)
    return times


# ---- results --------------------------------------------------------------------------------


def comparison_table(pictures: Mapping[str, TimelineChart], refused: Mapping[str, str]) -> str:
    """Returns a line for each policy: time, bubble, peak activations, ratio to the fastest."""
    best = min((one.seconds for one in pictures.values()), default=0.0)
    lines = [f"{'policy':<14} {'step':>24} {'bubble':>8} {'activations':>12} {'to best':>8}"]
    for name, one in pictures.items():
        step = timeline_svg.format_time(one.seconds, one.unit)
        ratio = one.seconds / best if best else 1.0
        keeps = max(lane.peak_activations for lane in one.lanes)
        lines.append(f"{name:<14} {step:>24} {one.bubble_fraction:>8.1%} {keeps:>12} {ratio:>8.3f}")
    lines += [f"{name:<14} does not fit: {why}" for name, why in refused.items()]
    return "\n".join(lines)


def _make_output_dir(run: RunConfig, out: str) -> Path:
    """Returns the directory for drawings: the given one, else the run's, else the current one."""
    own = Path(run.train.output_dir)
    if out:
        folder = Path(out)
    elif (own / "config.toml").exists():
        folder = own
    else:
        folder = Path(".")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise PlanError(
            f"output={str(folder)[:80]!r} cannot be used as a directory: "
            f"{error.__class__.__name__}. Drawings need a writable directory. Pass another one."
        ) from None
    return folder


def _save_drawings(
    folder: Path, pictures: Sequence[TimelineChart], tables: Sequence[TimelineChart]
) -> None:
    """Writes the drawing as SVG and HTML, and the Chrome trace."""
    drawing = timeline_svg.timeline_svg(pictures, title="Pipeline step")
    body = [f"<h1>Pipeline step</h1><figure>{drawing}</figure>"]
    for one in tables:
        body.append(
            page.render_section(one.caption, page.render_table(*timeline_svg.table_cells(one)))
        )
    texts = {
        "timeline.svg": standalone_svg(drawing),
        "timeline.html": page.render_document("Pipeline step", "\n".join(body)),
        "timeline-trace.json": json.dumps(
            timeline_svg.chrome_trace(pictures), separators=(",", ":")
        ),
    }
    for name, text in texts.items():
        write_text_atomically(folder / name, text)
    print(f"written: {folder / 'timeline.svg'}, timeline.html, timeline-trace.json (for Perfetto)")
