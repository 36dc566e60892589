"""The report of a training run as one self-contained HTML file.

`write_report` reads the directory of a run (metrics.jsonl, and config.toml, run.json, checkpoints/
and trace-rank*.json where they exist) and writes report.html next to them. It is readable without
scripts, loads no other resource, and escapes all text of the run. Missing facts are omitted.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from ranvier.errors import DataError
from ranvier.html.number_format import format_number, format_percent
from ranvier.html.page import (
    MAX_LIST_LINES,
    render_details,
    render_document,
    render_list,
    render_section,
    render_table,
    render_text_block,
)
from ranvier.html.plot import Series, escape_html, line_plot, stacked_bar
from ranvier.system import safe_files
from ranvier.train import prediction
from ranvier.train.memory import breakdown
from ranvier.train.report import memorization, moe, needle, pipeline, work
from ranvier.train.resume import run_directory as folders

MFU = {"causal": "mfu", "full": "mfu_noncausal"}
Metrics = dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run directory."""

    folder: Path
    rows: list[Metrics]
    """Metrics of every step, in the order of the file."""
    run_facts: dict[str, Any]
    """The content of run.json; empty if there is none."""
    notes: list[str]
    """Lines on what could not be read."""

    columns: dict[str, list[float | None]] = field(default_factory=dict)
    """Cache of `metric_column`."""

    @property
    def unit(self) -> str:
        """What the run counts, in the plural."""
        return str(self.run_facts.get("unit") or "tokens")

    @property
    def speed_name(self) -> str:
        """Name of the metric of throughput."""
        return f"{self.unit}_per_second"

    def metric_column(self, name: str) -> list[float | None]:
        """A metric of all rows, possibly not finite; None where it is missing."""
        if name not in self.columns:
            self.columns[name] = [to_float(row.get(name)) for row in self.rows]
        return self.columns[name]

    def finite_values(self, name: str) -> list[float]:
        """The finite values of a metric."""
        return [v for v in self.metric_column(name) if v is not None and math.isfinite(v)]

    def latest_rows(self) -> RunRecord:
        """The record with one row per step, in order; of repeated steps the last one counts."""
        rows = {row["step"]: row for row in self.rows}
        if len(rows) == len(self.rows) and list(rows) == sorted(rows):
            return self
        return RunRecord(
            self.folder, [rows[step] for step in sorted(rows)], self.run_facts, self.notes
        )


def to_float(value: object) -> float | None:
    """A JSON number as float, possibly not finite; None for anything else."""
    # The common case first: this runs for every metric of every step.
    if type(value) is float:
        return value
    # bool is a subclass of int.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    # A JSON integer may exceed the range of a float.
    except OverflowError:
        return None


def read_record(folder: Path) -> RunRecord:
    """Read the record of a run; raises DataError if it has no metrics."""
    path = folder / "metrics.jsonl"
    notes = []
    rule = "A report needs the metrics of at least one step."
    try:
        lines = safe_files.read_text(path, errors="replace").split("\n")
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}. {rule} Pass the directory of a run."
        ) from None
    rows, broken = parse_metrics(lines)
    if not rows:
        raise DataError(
            f"{path} has no step in {len(lines)} line(s). {rule} Wait for the first step, or "
            "pass another directory."
        )
    if broken:
        notes.append(f"{broken} line(s) of metrics.jsonl could not be read and were ignored.")
    return RunRecord(folder, rows, read_run_facts(folder / "run.json", notes), notes)


def parse_metrics(lines: Sequence[str]) -> tuple[list[Metrics], int]:
    """The rows of a metrics file and the number of broken lines, except for a cut-off last one."""
    rows: list[Metrics] = []
    broken = 0
    step = -1
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            broken += i < len(lines) - 1
            continue
        known = to_float(row.get("step"))
        if known is not None and math.isfinite(known):
            step = int(known)
        else:
            # Rows without a usable step number are counted on from the previous one.
            step = step + 1
        row["step"] = step
        rows.append(row)
    return rows, broken


def read_run_facts(path: Path, notes: list[str]) -> dict[str, Any]:
    """The facts of run.json; a problem with the file is added to the notes."""
    if not safe_files.path_exists(path):
        return {}
    try:
        facts = json.loads(safe_files.read_text(path, errors="replace"))
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"run.json could not be read ({error}); its facts are missing here.")
        return {}
    if not isinstance(facts, dict):
        notes.append("run.json does not hold a JSON object; its facts are missing here.")
        return {}
    return facts


def median_or_none(values: Sequence[float]) -> float | None:
    """The median, or None if there are no values."""
    if values:
        return statistics.median(values)
    return None


def wall_seconds(facts: Mapping[str, Any]) -> float | None:
    """Seconds from start to finish; None if either is unknown."""
    try:
        start = datetime.fromisoformat(str(facts.get("started")))
        return (datetime.fromisoformat(str(facts.get("finished"))) - start).total_seconds()
    except (ValueError, TypeError):
        return None


def phase_seconds(record: RunRecord) -> dict[str, float]:
    """Seconds per phase of a run, from run.json or else from the metrics; and the remainder."""
    given = record.run_facts.get("phases")
    if isinstance(given, dict):
        known = {str(k): to_float(v) for k, v in given.items()}
    else:
        known = {}
    parts = {name: v for name, v in known.items() if v is not None and 0.0 < v < math.inf}
    if not parts:
        split = {k: sum(filter(math.isfinite, v)) for k, v in step_seconds(record).items()}
        parts = {name: value for name, value in split.items() if value > 0.0}
    # A remainder of less than 1 % is not shown.
    rest = (wall_seconds(record.run_facts) or 0.0) - sum(parts.values())
    # Wall time of a resumed run includes the time between launches, so it has no remainder.
    if parts and not restart_steps(record) and rest > 0.01 * sum(parts.values()):
        parts["not accounted for"] = rest
    return parts


def restart_steps(record: RunRecord) -> list[float]:
    """The steps at which the run was resumed."""
    steps = record.run_facts.get("restarts")
    if isinstance(steps, list):
        known = [to_float(step) for step in steps]
    else:
        known = []
    return [step for step in known if step is not None and math.isfinite(step)]


def step_seconds(record: RunRecord) -> dict[str, list[float]]:
    """Seconds of each step by compute, exposed communication and data; nan if unknown."""
    keys = ("exposed_communication_seconds", "data_seconds")
    wait, data = (
        [v if v is not None and math.isfinite(v) else 0.0 for v in record.metric_column(key)]
        for key in keys
    )
    compute = [
        math.nan if whole is None else max(whole - a - b, 0.0)
        for whole, a, b in zip(record.metric_column("step_seconds"), wait, data, strict=True)
    ]
    return {"compute": compute, "exposed communication": wait, "data": data}


def key_facts(record: RunRecord) -> dict[str, Any]:
    """The key facts of a record; see `summarize_run`."""
    latest = record.latest_rows()
    facts = record.run_facts
    held = latest.finite_values("val_loss")
    # The loss of the last step may be non-finite, which is reported as such below.
    losses = [v for v in latest.metric_column("loss") if v is not None]
    bad = [
        row["step"]
        for row, loss in zip(latest.rows, latest.metric_column("loss"), strict=True)
        if loss is not None and not math.isfinite(loss)
    ]
    # All rows, also of steps that were repeated after a restart: they took time.
    busy = sum(record.finite_values("step_seconds"))
    parameters = to_float(facts.get("parameters"))
    phases = phase_seconds(record)
    return {
        "title": str(facts.get("title") or facts.get("model") or record.folder.resolve().name),
        "status": folders.run_status(record.folder, facts) or None,
        "steps": len(latest.rows),
        "last_step": latest.rows[-1]["step"],
        "unit": latest.unit,
        "tokens": max(latest.finite_values(latest.unit), default=None),
        "final_loss": losses[-1] if losses and math.isfinite(losses[-1]) else None,
        "losses_not_finite": len(bad),
        "first_loss_not_finite": bad[0] if bad else None,
        "skipped_total": sum(row.get("skipped") is True for row in record.rows),
        "val_loss": held[-1] if held else None,
        "best_val_loss": min(held, default=None),
        "tokens_per_second": median_or_none(latest.finite_values(latest.speed_name)),
        "mfu": median_or_none(latest.finite_values("mfu")),
        "mfu_noncausal": median_or_none(latest.finite_values("mfu_noncausal")),
        "flops_per_second": flops_per_second(latest),
        "peak_memory_bytes": max(latest.finite_values("peak_memory_bytes"), default=None),
        "seconds": max(wall_seconds(facts) or 0.0, busy, sum(phases.values())) or None,
        "has_wall_time": wall_seconds(facts) is not None,
        "resumed": bool(restart_steps(record)),
        "parameters": parameters,
        "phases": phases,
    }


def flops_per_second(record: RunRecord) -> float | None:
    """The model FLOP/s per device in the median step, attention counted causally."""
    flops = to_float(record.run_facts.get("flops_per_step"))
    seconds = median_or_none(record.finite_values("step_seconds"))
    if flops is None or not seconds:
        return None
    return flops / seconds


def summarize_run(folder: Path) -> dict[str, Any]:
    """The key facts of a run, None where unknown; medians over steps, in bytes and seconds."""
    return key_facts(read_record(folder))


def format_bytes(value: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            if value < 999.5:
                return f"{value:.3g} {unit}"
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def format_duration(seconds: float) -> str:
    """Seconds as a readable duration."""
    if seconds < 59.95:
        if seconds >= 1:
            return f"{seconds:.1f} s"
        return f"{seconds * 1e3:.3g} ms"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s"


def running_median(values: Sequence[float | None]) -> tuple[list[int], list[float | None]]:
    """A centred running median, robust to spikes, at up to 2,000 positions of a run."""
    count = len(values)
    half = min(max(count // 100, 3), 200)
    clean = [v if v is not None and math.isfinite(v) else None for v in values]
    places = sorted({*range(0, count, max(count // 1000, 1)), count - 1})
    out: list[float | None] = []
    for i in places:
        # The window stays symmetric near the ends, so that the curve does not lag.
        reach = max(min(half, i, count - 1 - i), 2)
        window = sorted(v for v in clean[max(i - reach, 0) : i + reach + 1] if v is not None)
        out.append(None if clean[i] is None else window[len(window) // 2])
    return places, out


def fact_cards(facts: Mapping[str, Any]) -> str:
    """The key facts as HTML cards."""
    loss = facts["final_loss"]
    bad = facts["losses_not_finite"]
    rows: list[tuple[str, str | None, str]] = [
        ("Final loss", "not finite" if loss is None and bad else format_value(loss, ".4f"), ""),
        (
            "Validation loss",
            format_value(facts["val_loss"], ".4f"),
            f"best {format_value(facts['best_val_loss'], '.4f')}",
        ),
        (
            "Throughput",
            format_value(facts["tokens_per_second"], format_number),
            f"{facts['unit']}/s, median",
        ),
        ("MFU", format_value(facts["mfu"], format_percent), _describe_mfu(facts)),
        (
            "Model FLOP/s",
            format_value(facts["flops_per_second"], format_flops),
            "per device, median" if facts["mfu"] is not None else "per device; its peak is unknown",
        ),
        ("Peak memory", format_value(facts["peak_memory_bytes"], format_bytes), "per device"),
        (
            facts["unit"].capitalize(),
            format_value(facts["tokens"], format_number),
            f"in {facts['steps']:,} steps",
        ),
        ("Wall time", format_value(facts["seconds"], format_duration), _describe_wall_time(facts)),
        ("Parameters", format_value(facts["parameters"], format_number), ""),
    ]
    out = []
    for name, value, more in rows:
        if value is not None:
            if more:
                extra = f"<dd>{escape_html(more)}</dd>"
            else:
                extra = ""
            out.append(f"<div><dt>{name}</dt><dd>{escape_html(value)}</dd>{extra}</div>")
    return f'<dl class="cards">{"".join(out)}</dl>'


def _describe_mfu(facts: Mapping[str, Any]) -> str:
    full = format_value(facts["mfu_noncausal"], format_percent)
    return "causal attention, median" + (f"; {full} if counted as non-causal" if full else "")


def _describe_wall_time(facts: Mapping[str, Any]) -> str:
    """Returns what the wall time contains."""
    if not facts["has_wall_time"]:
        return "sum of the steps"
    if facts["resumed"]:
        return "from the first start to the end, with the time between launches"
    return "start-up of the trainer, steps, evaluation and checkpoints"


def format_flops(value: float) -> str:
    """FLOP/s with a decimal unit."""
    for unit in ("", "k", "M", "G", "T"):
        if value < 1000.0:
            return f"{value:.3g} {unit}FLOP/s"
        value /= 1000.0
    return f"{value:.3g} PFLOP/s"


def format_value(value: float | None, form: Any) -> str | None:
    """A value as text, by a format string or a function; None stays None."""
    if value is None:
        return None
    if isinstance(form, str):
        return format(value, form)
    return str(form(value))


def metric_series(record: RunRecord, name: str, label: str, *, scale: float = 1.0) -> list[Series]:
    """A metric per step and smoothed; only per step for runs of fewer than 20 steps."""
    steps = [row["step"] for row in record.rows]
    values = record.metric_column(name)
    if scale != 1.0:
        values = [None if v is None else v * scale for v in values]
    # Too few steps to smooth.
    if len(values) < 20:
        return [Series(label, steps, values, "dots")]
    places, means = running_median(values)
    smoothed = Series(f"{label}, smoothed", [steps[i] for i in places], means)
    return [Series(label, steps, values, "faint"), smoothed]


def loss_series(record: RunRecord) -> list[Series]:
    """Training and validation loss; the latter is joined across steps without an evaluation."""
    held = [(row["step"], to_float(row.get("val_loss"))) for row in record.rows]
    # Without gaps between evaluations, so that the dots are joined.
    held = [(step, loss) for step, loss in held if loss is not None]
    out = metric_series(record, "loss", "train")
    if held:
        out.append(Series("validation", [x for x, _ in held], [y for _, y in held], "dots"))
    return [
        *out,
        *marker_series(record, "skipped", "skipped"),
        *marker_series(record, "spike", "spike"),
    ]


def marker_series(record: RunRecord, name: str, label: str) -> list[Series]:
    """Dots at the steps with a flag, at their loss or at the last finite one."""
    steps = list[float]()
    values = list[float | None]()
    last = None
    for row, loss in zip(record.rows, record.metric_column("loss"), strict=True):
        if loss is not None and math.isfinite(loss):
            last = loss
        if row.get(name) is True and last is not None:
            # The None is a gap, so that the dots are not joined by a line.
            steps = [*steps, row["step"], row["step"]]
            values = [*values, last, None]
    if steps:
        return [Series(label, steps, values, "dots")]
    return []


def has_spikes(values: Sequence[float]) -> bool:
    """Returns whether spikes would flatten the curve on a linear axis."""
    return bool(values) and min(values) > 0.0 and max(values) > 10 * statistics.median(values)


def draw_plots(record: RunRecord) -> Iterator[str]:
    """The plots over steps, for a record with one row per step."""
    steps = [row["step"] for row in record.rows]
    marks = restart_steps(record)

    def plot(
        series: Sequence[Series], title: str, unit: str, axis: Literal["log", "zero", "near"]
    ) -> str:
        svg = line_plot(
            series,
            title=title,
            x_label="step",
            y_label=unit,
            log=axis == "log",
            zero=axis == "zero",
            marks=marks,
            width=600,
        )
        return f"<figure>{svg}</figure>"

    # A log axis if spikes would flatten the curve.
    wide = has_spikes(record.finite_values("loss"))
    each = f"mean per {record.unit.removesuffix('s')}"
    yield plot(loss_series(record), "Loss", each, "log" if wide else "near")
    speed = metric_series(record, record.speed_name, "each step")
    yield plot(speed, "Throughput", f"{record.unit}/s", "zero")
    yield plot([Series("lr", steps, record.metric_column("lr"))], "Learning rate", "", "zero")
    norms = metric_series(record, "grad_norm", "each step")
    yield plot(norms, "Gradient norm", "before clipping", "log")
    peak = max(record.finite_values("peak_memory_bytes"), default=None)
    if peak is not None:
        size, unit = (2.0**30, "GiB") if peak >= 2**30 else (2.0**20, "MiB")
        memory = metric_series(record, "peak_memory_bytes", "memory", scale=1 / size)[:1]
        yield plot([replace(memory[0], style="line")], "Memory", f"{unit} per device", "zero")
    shares = {word: key for word, key in MFU.items() if record.finite_values(key)}
    if shares:
        used = [metric_series(record, key, word, scale=100.0)[-1] for word, key in shares.items()]
        yield plot(used, "Model FLOP utilization (MFU)", "% of the device's peak FLOP/s", "zero")
    split = {k: v for k, v in step_seconds(record).items() if any(t > 0.0 for t in v)}
    if split:
        slow = record.finite_values("step_seconds")
        parts = [Series(name, steps, values) for name, values in split.items()]
        yield plot(parts, "Time per step", "seconds", "log" if has_spikes(slow) else "zero")
    if record.finite_values("loss_scale"):
        scale = Series("loss scale", steps, record.metric_column("loss_scale"))
        yield plot([scale], "Loss scale", "factor of the loss", "log")


def steps_table(record: RunRecord) -> str:
    """A table of twelve evenly spaced steps."""
    count = len(record.rows)
    # A set, as short runs would repeat steps.
    places = sorted({round(i * (count - 1) / 11) for i in range(12)})
    form = (
        format_number,
        "{:.4f}".format,
        "{:.4f}".format,
        format_number,
        format_number,
        format_number,
    )
    names = (record.unit, "loss", "val_loss", "lr", "grad_norm", record.speed_name)
    rows: list[list[str]] = []
    for row in (record.rows[i] for i in places):
        values = [to_float(row.get(name)) for name in names]
        cells = ["–" if v is None else f(v) for v, f in zip(values, form, strict=True)]
        rows.append([f"{row['step']:,}", *cells])
    return render_table(["step", *(name.replace("_", " ") for name in names)], rows)


def time_table(parts: Mapping[str, float], steps: int) -> str:
    """The time by phase, as a bar and as a table."""
    whole = sum(parts.values())
    if not whole:
        return ""
    bar = stacked_bar(parts, title="Share of the time", width=600)
    rows = [
        (name, f"{v:,.2f}", format_percent(v / whole), format_duration(v / steps))
        for name, v in parts.items()
    ]
    rows.append(("all", f"{whole:,.2f}", format_percent(1.0), format_duration(whole / steps)))
    return f'<figure class="bar">{bar}</figure>' + render_table(
        ["part", "seconds", "share", "per step"], rows
    )


def page_header(record: RunRecord, facts: Mapping[str, Any]) -> str:
    """Title, status, model and device, and warnings."""
    known = record.run_facts
    status = facts["status"]
    notes = list(record.notes)
    words = [f"{key} {known[key]}" for key in ("model", "grid", "device") if known.get(key)]
    words += [f"{known['world']} rank(s)"] if known.get("world") else []
    words += [f"{key} {known[key]}" for key in ("started", "finished") if known.get(key)]
    if facts["losses_not_finite"]:
        notes.append(
            f"The loss is not finite on {facts['losses_not_finite']:,} step(s), "
            f"first on step {facts['first_loss_not_finite']:,}."
        )
    if facts["skipped_total"]:
        notes.append(f"{facts['skipped_total']:,} step(s) were skipped (dots in the loss plot).")
    if resumed := restart_steps(record):
        shown_steps = ", ".join(f"{step:,.0f}" for step in resumed[:MAX_LIST_LINES])
        notes.append(f"The run was resumed at step {shown_steps} (dotted lines).")
    notes += folders.restart_lines(known)
    bad = "" if status == "finished" else " bad"
    if status:
        badge = f'<p><span class="status{bad}">{escape_html(status)}</span></p>'
    else:
        badge = ""
    return "\n".join(
        [
            '<header><p class="kind">Ranvier training '
            f"run</p><h1>{escape_html(facts['title'])}</h1>",
            f'{badge}<p class="muted">{escape_html(" · ".join(words))}</p>',
            *(f'<p class="note">{escape_html(note)}</p>' for note in notes),
            f"{fact_cards(facts)}</header>",
        ]
    )


def file_listing(folder: Path) -> str:
    """Lists of the checkpoints and traces in the directory."""
    steps = sorted(p.name for p in folder.glob("checkpoints/step-*") if p.is_dir())
    steps = [name for name in steps if re.fullmatch(r"step-\d+", name)]
    traces = sorted(p.name for p in folder.glob("trace-rank*.json"))
    if steps:
        out = [f"<p>{len(steps)} checkpoint(s):</p>{render_list(steps)}"]
    else:
        out = []
    if traces:
        how = "Open them at ui.perfetto.dev (Open trace file); the files stay on your machine."
        out.append(f"<p>{len(traces)} trace(s). {how}</p>{render_list(traces)}")
    return "".join(out)


def page_body(record: RunRecord, facts: Mapping[str, Any]) -> str:
    """The HTML body of the report."""
    known = record.run_facts
    latest = record.latest_rows()
    sample = known.get("sample")
    versions = known.get("versions")
    if not isinstance(sample, dict):
        sample = {}
    if isinstance(versions, dict):
        pairs = [(k, str(v)) for k, v in versions.items()]
    else:
        pairs = []
    mark = known.get("fingerprint")
    command = known.get("command")
    config = record.folder / "config.toml"
    if safe_files.path_exists(config):
        toml = safe_files.read_text(config, errors="replace")
    else:
        toml = ""
    prompt = f'<p class="muted">Prompt</p>{render_text_block(sample.get("prompt") or "")}'
    return "\n".join(
        [
            page_header(record, facts),
            render_section("Curves", f'<div class="plots">{"".join(draw_plots(latest))}</div>'),
            render_section("Where the time went", time_table(facts["phases"], len(record.rows))),
            pipeline.pipeline_section(record.folder),
            prediction.prediction_section(known.get("prediction")),
            work.work_section(record.rows),
            moe.experts_section(record.rows),
            memorization.memorization_section(latest.rows),
            needle.render_needle_section(record.folder),
            breakdown.memory_section(known.get("memory")),
            render_section("Steps in numbers", steps_table(latest)),
            render_section(
                "Generated text",
                prompt if sample.get("prompt") else "",
                f'<p class="muted">Text</p>{render_text_block(sample["text"])}'
                if sample.get("text")
                else "",
            ),
            render_section(
                "Data",
                render_list(known.get("corpora")),
                f"<p>Fingerprint <code>{escape_html(mark)}</code></p>" if mark else "",
            ),
            render_section("Parameter groups", render_list(known.get("groups"))),
            render_section("Files", file_listing(record.folder)),
            render_section(
                "Configuration",
                render_text_block(command) if command else "",
                render_details("config.toml", render_text_block(toml)),
                render_details(
                    "Versions", render_table(["name", "version"], pairs) if pairs else ""
                ),
            ),
        ]
    )


def write_report(folder: Path) -> Path:
    """Write report.html into the directory of a run; returns its path."""
    record = read_record(folder)
    facts = key_facts(record)
    page = render_document(facts["title"], page_body(record, facts))
    path = folder / "report.html"
    # Renamed at the end, so that a browser never sees half a page.
    temporary = folder / f".report.html.{os.getpid()}"
    temporary.write_text(page, encoding="utf-8")
    os.replace(temporary, path)
    return path
