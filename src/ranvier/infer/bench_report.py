"""Statistics of a serving benchmark, as a table, as JSON and as a page with a timeline."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ranvier.errors import PlanError
from ranvier.html import page
from ranvier.html.plot import Series, escape_html, line_plot
from ranvier.infer.bench_client import RequestRecord
from ranvier.system.terminal import escape_controls, print

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2e": "end-to-end latency",
}
STATISTICS = ("mean", "p50", "p90", "p99")
MAX_ROWS = 2000
"""Maximum number of requests in a timeline; of more, evenly spaced ones are drawn."""


def parse_limits(words: Sequence[str]) -> dict[str, float]:
    """Returns limits in seconds by metric, from NAME=MILLISECONDS."""
    limits = {}
    for word in words:
        name, _, text = word.partition("=")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if name not in METRICS or not 0 < value < math.inf:
            raise PlanError(
                f"goodput limit {word!r} is not valid. It must be NAME=MILLISECONDS with a name "
                f"of {', '.join(METRICS)}. Use ttft=200."
            )
        limits[name] = value / 1000
    return limits


def summarize(
    records: Sequence[RequestRecord], seconds: float, limits: Mapping[str, float]
) -> dict[str, Any]:
    """Returns the statistics of requests that were sent within some seconds."""
    done = [record for record in records if not record.error]
    values = {
        "ttft": [record.ttft for record in done],
        "tpot": [tpot for record in done if (tpot := record.tpot) is not None],
        "itl": [gap for record in done for gap in record.gaps],
        "e2e": [record.latency for record in done],
    }
    outputs = sum(record.output_tokens for record in done)
    prompts = sum(record.prompt_tokens for record in done)
    span = max(seconds, 1e-9)
    summary: dict[str, Any] = {
        "seconds": seconds,
        "completed": len(done),
        "failed": len(records) - len(done),
        "failures": dict(Counter(record.error for record in records if record.error)),
        "prompt_tokens": prompts,
        "cached_tokens": sum(record.cached_tokens for record in done),
        "output_tokens": outputs,
        "requests_per_second": len(done) / span,
        "output_tokens_per_second": outputs / span,
        "total_tokens_per_second": (prompts + outputs) / span,
    }
    for name, numbers in values.items():
        summary[f"{name}_ms"] = _statistics(numbers)
    if limits:
        good = sum(_keeps_limits(record, limits) for record in done)
        summary["goodput"] = good / span
        summary["goodput_share"] = good / len(records) if records else 0.0
        summary["goodput_limits_ms"] = {name: value * 1000 for name, value in limits.items()}
    return summary


def _statistics(seconds: Sequence[float]) -> dict[str, float | None]:
    if not seconds:
        return dict.fromkeys(STATISTICS)
    numbers = np.asarray(seconds) * 1000
    points = np.percentile(numbers, (50, 90, 99))
    return dict(zip(STATISTICS, map(float, (numbers.mean(), *points)), strict=True))


def _keeps_limits(record: RequestRecord, limits: Mapping[str, float]) -> bool:
    """Whether a request keeps all limits; of its gaps the largest counts."""
    own = {
        "ttft": record.ttft,
        "tpot": record.tpot or 0.0,
        "itl": max(record.gaps, default=0.0),
        "e2e": record.latency,
    }
    return all(own[name] <= limit for name, limit in limits.items())


def record_rows(records: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    """Returns the requests as JSON objects."""
    return [
        {
            "index": record.index,
            "start": round(record.start, 6),
            "end": round(record.end, 6),
            "token_times": [round(moment, 6) for moment in record.token_times],
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "output_tokens": record.output_tokens,
            "error": record.error or None,
            "message": record.message or None,
        }
        for record in records
    ]


# ---- table ----------------------------------------------------------------------------------


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the totals as names and texts."""
    rows = [
        ("duration", f"{summary['seconds']:.2f} s"),
        ("completed requests", f"{summary['completed']:,}"),
        ("prompt tokens", f"{summary['prompt_tokens']:,} ({summary['cached_tokens']:,} cached)"),
        ("generated tokens", f"{summary['output_tokens']:,}"),
        ("requests per second", f"{summary['requests_per_second']:.2f}"),
        ("generated tokens per second", f"{summary['output_tokens_per_second']:,.1f}"),
        ("all tokens per second", f"{summary['total_tokens_per_second']:,.1f}"),
    ]
    if "goodput" in summary:
        limits = summary["goodput_limits_ms"].items()
        words = ", ".join(f"{name} at most {value:g} ms" for name, value in limits)
        share = f"{summary['goodput_share']:.1%}"
        rows.append(
            ("goodput (requests per second)", f"{summary['goodput']:.2f} ({share} with {words})")
        )
    rows += [(f"failed: {kind}", f"{count:,}") for kind, count in summary["failures"].items()]
    return rows


def latency_rows(summary: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Returns the statistics of each latency in milliseconds."""
    rows = []
    for name, title in METRICS.items():
        values = summary[f"{name}_ms"]
        cells = ("-" if values[key] is None else f"{values[key]:,.2f}" for key in STATISTICS)
        rows.append((f"{title} ({name.upper()}), ms", *cells))
    return rows


def print_summary(title: str, summary: Mapping[str, Any]) -> None:
    """Prints two tables, framed on a terminal."""
    print(title)
    totals = summary_rows(summary)
    latencies = latency_rows(summary)
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        console = Console()
        for heads, rows in ((("", ""), totals), (("latency", *STATISTICS), latencies)):
            table = Table(*heads, show_header=bool(heads[0]))
            for row in rows:
                # Text, not str: rich would interpret brackets as markup.
                table.add_row(*(Text(escape_controls(word)) for word in row))
            console.print(table)
        return
    for name, text in totals:
        print(f"  {name:<32} {text}")
    print(f"  {'latency':<36}" + "".join(f"{name:>12}" for name in STATISTICS))
    for name, *cells in latencies:
        print(f"  {name:<36}" + "".join(f"{cell:>12}" for cell in cells))


# ---- page -----------------------------------------------------------------------------------


def render_page(
    title: str, summary: Mapping[str, Any], records: Sequence[RequestRecord], seconds: float
) -> str:
    """Returns a self-contained HTML page."""
    failures = [(record.index, record.error, record.message) for record in records if record.error]
    body = [
        f"<h1>{escape_html(title)}</h1>",
        page.render_section(
            "Results",
            page.render_table(("", ""), summary_rows(summary), text_columns=(1,)),
            page.render_table(("latency", *STATISTICS), latency_rows(summary)),
        ),
        page.render_section("Timeline", f"<figure>{timeline_svg(records, seconds)}</figure>"),
        page.render_section("Load", f'<div class="plots">{_load_plots(records, seconds)}</div>'),
    ]
    if failures:
        rows = [(str(i), kind, message) for i, kind, message in failures[:200]]
        body.append(
            page.render_section(
                "Failures",
                page.render_table(("request", "kind", "message"), rows, text_columns=(1, 2)),
            )
        )
    return page.render_document(title, "\n".join(body))


def timeline_svg(records: Sequence[RequestRecord], seconds: float) -> str:
    """Returns a line for each request: until its first token, and until its end."""
    width = 960
    left = 8
    step = -(-len(records) // MAX_ROWS) or 1
    shown = list(records)[::step]
    height = max(2.0, min(14.0, 600 / max(1, len(shown))))
    scale = (width - 2 * left) / max(seconds, 1e-9)
    out = []
    for row, record in enumerate(shown):
        y = 48 + row * height
        first = record.token_times[0] if record.token_times else record.end
        colour = 1 if record.error else 0
        text = f"request {record.index}: {record.error or f'{record.output_tokens} tokens'}"
        for kind, start, end in ((6, record.start, first), (colour, first, record.end)):
            size = max(0.3, (end - start) * scale)
            if end > start or (record.error and kind == colour):
                out.append(
                    f'<rect class="f{kind}" x="{left + start * scale:.1f}" y="{y:.1f}" '
                    f'width="{size:.1f}" height="{height * 0.8:.1f}">'
                    f"<title>{escape_html(text)}</title></rect>"
                )
    total = 48 + len(shown) * height + 24
    note = f"{len(shown)} of {len(records)} requests, {seconds:.2f} s"
    legend = "grey: until the first token; blue: until the end; orange: failed"
    head = (
        f'<svg class="plot" role="img" viewBox="0 0 {width} {total:.0f}">'
        f"<title>Timeline</title><desc>{escape_html(note)}</desc>"
        f'<text class="title" x="8" y="20">{escape_html(note)}</text>'
        f'<text x="8" y="38">{legend}</text>'
    )
    foot = f'<text class="end" x="{width - left}" y="{total - 6:.0f}">{seconds:.2f} s</text></svg>'
    return "\n".join([head, *out, foot])


def _load_plots(records: Sequence[RequestRecord], seconds: float) -> str:
    """Returns plots of the running requests and of the pieces of text per second."""
    edges = np.linspace(0, max(seconds, 1e-9), 121)
    starts = np.sort([record.start for record in records])
    ends = np.sort([record.end for record in records])
    running = np.searchsorted(starts, edges, "right") - np.searchsorted(ends, edges, "right")
    moments = [moment for record in records for moment in record.token_times]
    counts, _ = np.histogram(moments, bins=edges)
    rates = counts / np.diff(edges)
    x = [float(edge) for edge in edges]
    plots = [
        line_plot(
            [Series("requests", x, [float(value) for value in running])],
            title="Requests at a time",
            x_label="s",
            y_label="requests",
            zero=True,
        ),
        line_plot(
            [Series("tokens", x[1:], [float(value) for value in rates])],
            title="Pieces of text per second",
            x_label="s",
            y_label="1/s",
            zero=True,
        ),
    ]
    return "".join(f"<figure>{plot}</figure>" for plot in plots)
