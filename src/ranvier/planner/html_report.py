"""HTML report of a search: a self-contained page with charts, tables and the command."""

from __future__ import annotations

from collections.abc import Sequence

from ranvier.html import scatter as charts
from ranvier.html.number_format import format_number, format_percent
from ranvier.html.page import render_document, render_section, render_table, render_text_block
from ranvier.html.plot import escape_html
from ranvier.html.scatter import PointGroup, scatter_plot, stacked_bars
from ranvier.planner import explain
from ranvier.planner.baselines import FAMILIES, PredictedCandidate, find_baselines, layout_family
from ranvier.planner.memory.breakdown import GIB
from ranvier.planner.predict import Prediction
from ranvier.planner.search import SearchResult

MAX_TIME_RATIO = 5.0
"""The chart omits layouts that are slower than the best by more than this factor."""
MAX_MEMORY_RATIO = 2.5
"""The chart omits layouts that need more than this factor times the available memory."""
MERGED_PARTS = {"bubble": "pipe", "context": "row", "expert": "row"} | dict.fromkeys(
    ("host", "update", "other"), "other"
)
BAR_PARTS = ("compute", "row", "depth", "col", "data", "attention", "other", "recompute", "pipe")
"""Parts of a step in the order of their colours.

Each has a colour of its own. `pipe` includes the pipeline bubble, `row` the communication of
experts and context, and `other` the optimizer step, transfers to the host and overhead.
"""


def render_report(
    result: SearchResult, *, title: str, top: int, command: str, notes: Sequence[str] = ()
) -> str:
    """Returns the page as HTML."""
    it = result.best.prediction
    low, high = it.interval
    cards = (
        (
            "predicted step time",
            explain.format_seconds(it.step_seconds),
            f"80% interval: {explain.format_seconds(low)} to {explain.format_seconds(high)}",
        ),
        (
            "tokens/s",
            format_number(it.tokens_per_second),
            f"{format_number(it.tokens_per_second / result.request.world_size)} per device",
        ),
        ("MFU", format_percent(it.mfu), ""),
        (
            "memory per device",
            f"{it.memory.total_bytes / GIB:.1f} GiB",
            f"of {it.limit / GIB:.1f} GiB",
        ),
        (
            "layouts searched",
            f"{result.num_candidates:,}",
            f"{len(result.feasible_candidates):,} fit; {result.search_seconds:.1f} s",
        ),
    )
    inner = "".join(
        f"<div><dt>{escape_html(a)}</dt><dd>{escape_html(b)}</dd><dd>{escape_html(c)}</dd></div>"
        for a, b, c in cards
    )
    body = [
        '<p class="kind">ranvier plan</p>',
        f"<h1>{escape_html(title)}</h1>",
        *(f"<p>{escape_html(text)}</p>" for text in explain.explain_choice(result)),
        *(f'<p class="muted">{escape_html(text)}</p>' for text in notes),
        render_text_block(command),
        f'<dl class="cards">{inner}</dl>',
        render_section("All layouts", _render_chart(result)),
        render_section("Where the time goes", _render_bars(result, top)),
        render_section(
            "Best layouts",
            _render_candidates(explain.distinct_candidates(result.feasible_candidates, top)),
        ),
        render_section("Baselines", _render_baselines(result)),
        render_section("Memory of the best layout", _render_memory(it)),
    ]
    whole = f"<style>{charts.SCATTER_STYLE}</style>" + "\n".join(body)
    return render_document(title, whole, script=charts.HOVER_SCRIPT)


def _render_chart(result: SearchResult) -> str:
    """Step time over memory of all layouts, coloured by family, with the Pareto front."""
    it = result.best.prediction
    groups = []
    hidden = 0
    # The few simple layouts are drawn last, on top of the many others.
    for colour, name in reversed([*enumerate(FAMILIES)]):
        for faint, several in (
            (True, result.oversized_candidates),
            (False, result.feasible_candidates),
        ):
            own = [one for one in several if layout_family(one.plan) == name]
            shown = [one for one in own if is_shown(one, result)]
            hidden += len(own) - len(shown)
            if shown:
                groups.append(_point_group(name, colour, shown, faint))
    note = (
        "No layout below and to the left of the Pareto front: every other layout is slower or "
        "needs more memory than one on the front. Faint points do not fit into memory. "
        f"{hidden:,} layouts that are more than {MAX_TIME_RATIO:g} times slower than the best or "
        f"need more than {MAX_MEMORY_RATIO:g} times the available memory are not shown."
    )
    figure = scatter_plot(
        groups,
        title="Step time over memory",
        x_label="memory per device (GiB)",
        y_label="seconds per step (log scale)",
        limit=it.limit / GIB,
        limit_label=f"available: {it.limit / GIB:.1f} GiB",
        front=pareto_front(result.feasible_candidates),
        front_label="Pareto front",
        best=(it.memory.total_bytes / GIB, it.step_seconds),
        best_label="best",
    )
    return f'{figure}<p class="muted">{escape_html(note)}</p>'


def pareto_front(several: Sequence[PredictedCandidate]) -> list[tuple[float, float]]:
    """Memory in GiB and step time of the layouts that no other one beats in both."""
    points = sorted(
        (one.prediction.memory.total_bytes / GIB, one.prediction.step_seconds) for one in several
    )
    front: list[tuple[float, float]] = []
    for memory, seconds in points:
        if not front or seconds < front[-1][1]:
            front.append((memory, seconds))
    return front


def is_shown(one: PredictedCandidate, result: SearchResult) -> bool:
    """Returns whether the chart shows a layout."""
    it = one.prediction
    best = result.best.prediction
    return (
        it.step_seconds <= MAX_TIME_RATIO * best.step_seconds
        and it.memory.total_bytes <= MAX_MEMORY_RATIO * best.limit
    )


def _point_group(
    name: str, colour: int, several: Sequence[PredictedCandidate], faint: bool
) -> PointGroup:
    return PointGroup(
        name,
        colour,
        [one.prediction.memory.total_bytes / GIB for one in several],
        [one.prediction.step_seconds for one in several],
        [_hover_text(one) for one in several],
        faint,
    )


def _hover_text(one: PredictedCandidate) -> str:
    cells = dict(zip(explain.TABLE_HEADER, explain.table_row(one), strict=True))
    return (
        f"{cells['layout']}, micro-batch {cells['micro']}, recompute {cells['recompute']}\n"
        f"{cells['step']} per step, {cells['tok/s']} tok/s, MFU {cells['MFU']}, "
        f"{cells['GiB']} GiB; {cells['where the time goes']}"
    )


def merge_parts(prediction: Prediction) -> dict[str, float]:
    """Returns the parts of a step as the bars show them."""
    out: dict[str, float] = {}
    for name, value in prediction.seconds_by_part.items():
        name = MERGED_PARTS.get(name, name)
        out[name] = out.get(name, 0.0) + value
    return out


def _render_bars(result: SearchResult, top: int) -> str:
    best = explain.distinct_candidates(result.feasible_candidates, top)
    rows = [
        (f"{i}  {explain.describe_candidate(one)}", merge_parts(one.prediction))
        for i, one in enumerate(best, 1)
    ]
    others = find_baselines(result.feasible_candidates, result.request.cluster.per_node)
    rows += [
        (f"best {name}: {explain.describe_candidate(one)}", merge_parts(one.prediction))
        for name, one in others.items()
        if one not in best
    ]
    bars = stacked_bars(rows, title="Seconds per step", names=BAR_PARTS)
    return f'<figure class="wide">{bars}</figure>'


def _render_candidates(several: Sequence[PredictedCandidate]) -> str:
    rows = [(i, *explain.table_row(one)) for i, one in enumerate(several, 1)]
    return render_table(("", *explain.TABLE_HEADER), rows, text_columns=(1, 3, 8))


def _render_baselines(result: SearchResult) -> str:
    best = find_baselines(result.feasible_candidates, result.request.cluster.per_node)
    ours = result.best.prediction.step_seconds
    rows = [
        (name, *explain.table_row(one)[:7], f"{one.prediction.step_seconds / ours:.2f}x")
        for name, one in best.items()
    ]
    header = ("best of", *explain.TABLE_HEADER[:7], "relative step time")
    return render_table(header, rows, text_columns=(1, 3))


def _render_memory(prediction: Prediction) -> str:
    it = prediction.memory
    # Rows of the device first, then those that only the host has.
    names = [name for name in it.device if it.device[name] or it.host.get(name)]
    names += [name for name in it.host if name not in names]
    rows = [
        (name, f"{it.device.get(name, 0) / GIB:.2f}", f"{it.host.get(name, 0) / GIB:.2f}")
        for name in names
    ]
    return render_table(("GiB", "device", "host"), rows)
