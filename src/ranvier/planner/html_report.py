"""Page: a search as one HTML file that needs nothing else: chart, bars, tables, the command."""

from __future__ import annotations

from collections.abc import Sequence

from ranvier.html import scatter as charts
from ranvier.html.number_format import percent, short
from ranvier.html.page import document, section, table, text_block
from ranvier.html.plot import escaped
from ranvier.html.scatter import Group, bars, scatter
from ranvier.planner import explain
from ranvier.planner.baselines import FAMILIES, Found, family, rivals
from ranvier.planner.memory.breakdown import GIB
from ranvier.planner.predict import Prediction
from ranvier.planner.search import Result

SLOWEST = 5.0
"""Layouts that take so many times as long as the best are left out of the chart."""
LARGEST = 2.5
"""Those that need so many times the memory there is, too."""
MERGED = {"bubble": "pipe", "context": "row", "expert": "row"} | dict.fromkeys(
    ("host", "update", "other"), "rest"
)
PARTS = ("compute", "row", "depth", "col", "data", "attention", "again", "pipe", "rest")
"""Parts of a step by their colours; pipe: messages and stages that wait; rest: update, host."""


def page(result: Result, *, title: str, top: int, command: str, notes: Sequence[str] = ()) -> str:
    """The whole page."""
    it = result.best.prediction
    low, high = it.interval
    cards = (
        ("step", explain.seconds(it.total), f"{explain.seconds(low)} to {explain.seconds(high)}"),
        ("tokens/s", short(it.rate), f"{short(it.rate / result.wish.world)} a device"),
        ("MFU", percent(it.mfu), ""),
        ("memory", f"{it.memory.total / GIB:.1f} GiB", f"of {it.limit / GIB:.1f} GiB"),
        ("layouts", f"{result.count:,}", f"{result.seconds:.1f} s, {len(result.found):,} fit"),
    )
    inner = "".join(
        f"<div><dt>{escaped(a)}</dt><dd>{escaped(b)}</dd><dd>{escaped(c)}</dd></div>"
        for a, b, c in cards
    )
    body = [
        '<p class="kind">ranvier plan</p>',
        f"<h1>{escaped(title)}</h1>",
        *(f"<p>{escaped(text)}</p>" for text in explain.why(result)),
        *(f'<p class="muted">{escaped(text)}</p>' for text in notes),
        text_block(command),
        f'<dl class="cards">{inner}</dl>',
        section("All layouts", _chart(result)),
        section("Where the time goes", _bars(result, top)),
        section("The best layouts", _table(explain.distinct(result.found, top))),
        section("Rivals", _rivals(result)),
        section("Memory of the best", _memory(it)),
    ]
    whole = f"<style>{charts.STYLE}</style>" + "\n".join(body)
    return document(title, whole, script=charts.HOVER)


def _chart(result: Result) -> str:
    """Time against memory of all layouts, coloured by family."""
    it = result.best.prediction
    groups, left = [], 0
    for colour, name in reversed([*enumerate(FAMILIES)]):  # few simple ones lie above many others
        for faint, several in ((True, result.tight), (False, result.found)):
            own = [one for one in several if family(one.plan) == name]
            shown = [one for one in own if is_shown(one, result)]
            left += len(own) - len(shown)
            if shown:
                groups.append(_group(name, colour, shown, faint))
    said = (
        f"Faint: needs more memory than there is. {left:,} that take more than {SLOWEST:g} times "
        f"as long or need more than {LARGEST:g} times the memory are not drawn."
    )
    figure = scatter(
        groups,
        title="Step time against memory of a device",
        x_label="memory of a device, GiB",
        y_label="seconds a step, log scale",
        limit=it.limit / GIB,
        limit_label=f"limit {it.limit / GIB:.1f} GiB",
    )
    return f'{figure}<p class="muted">{escaped(said)}</p>'


def is_shown(one: Found, result: Result) -> bool:
    """Whether the chart has a layout."""
    it, best = one.prediction, result.best.prediction
    return it.total <= SLOWEST * best.total and it.memory.total <= LARGEST * best.limit


def _group(name: str, colour: int, several: Sequence[Found], faint: bool) -> Group:
    return Group(
        name,
        colour,
        [one.prediction.memory.total / GIB for one in several],
        [one.prediction.total for one in several],
        [_told(one) for one in several],
        faint,
    )


def _told(one: Found) -> str:
    cells = dict(zip(explain.HEAD, explain.row(one), strict=True))
    return (
        f"{cells['layout']}, micro-batch {cells['micro']}, recompute {cells['again']}\n"
        f"{cells['step']} a step, {cells['tok/s']} tok/s, MFU {cells['MFU']}, {cells['GiB']} GiB; "
        f"{cells['where the time goes']}"
    )


def parts(prediction: Prediction) -> dict[str, float]:
    """The parts of a step as the bars show them."""
    out: dict[str, float] = {}
    for name, value in prediction.parts.items():
        name = MERGED.get(name, name)
        out[name] = out.get(name, 0.0) + value
    return out


def _bars(result: Result, top: int) -> str:
    best = explain.distinct(result.found, top)
    rows = [(f"{i}  {explain.layout(one)}", parts(one.prediction)) for i, one in enumerate(best, 1)]
    others = rivals(result.found, result.wish.cluster.per_node)
    rows += [
        (f"best {name}: {explain.layout(one)}", parts(one.prediction))
        for name, one in others.items()
        if one not in best
    ]
    return f"<figure>{bars(rows, title='Seconds of a step', names=PARTS)}</figure>"


def _table(several: Sequence[Found]) -> str:
    rows = [(i, *explain.row(one)) for i, one in enumerate(several, 1)]
    return table(("", *explain.HEAD), rows)


def _rivals(result: Result) -> str:
    best = rivals(result.found, result.wish.cluster.per_node)
    ours = result.best.prediction.total
    rows = [
        (name, *explain.row(one)[:7], f"{one.prediction.total / ours:.2f}")
        for name, one in best.items()
    ]
    return table(("best of", *explain.HEAD[:7], "times ours"), rows)


def _memory(prediction: Prediction) -> str:
    it = prediction.memory
    names = [name for name in it.device if it.device[name] or it.host.get(name)]
    names += [name for name in it.host if name not in names]
    rows = [
        (name, f"{it.device.get(name, 0) / GIB:.2f}", f"{it.host.get(name, 0) / GIB:.2f}")
        for name in names
    ]
    return table(("GiB", "device", "host"), rows)
