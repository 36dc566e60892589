"""Scatter plots of groups of points, and stacked bars, as inline SVG in plain Python.

A group of points is one path, so that ten thousand of them are a small file; the texts shown under
the pointer are stored next to the plot as JSON, in the same order, and `HOVER_SCRIPT` reads both.
Colours are those of `plot`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ranvier.html.number_format import format_number, format_percent
from ranvier.html.plot import (
    BOTTOM_MARGIN,
    LEFT_MARGIN,
    NUM_COLOURS,
    RIGHT_MARGIN,
    AxisScale,
    escape_html,
    linear_ticks,
    log_ticks,
    tick_labels,
)


@dataclass(frozen=True)
class PointGroup:
    """Points of one colour; `faint` ones are drawn behind the others."""

    name: str
    colour: int
    x: Sequence[float]
    y: Sequence[float]
    text: Sequence[str]
    """The text shown under the pointer, per point."""
    faint: bool = False


HOVER_SCRIPT = """
for (const figure of document.querySelectorAll("figure.points")) {
  const svg = figure.querySelector("svg"), box = figure.querySelector(".hover");
  const texts = JSON.parse(figure.querySelector("script").textContent);
  const points = [...svg.querySelectorAll("path[data-group]")].flatMap((path, group) =>
    path.getAttribute("d").split(/[Mh]/).map(p => p.split(",").map(Number))
      .filter(p => p.length === 2).map((p, i) => ({x: p[0], y: p[1], text: texts[group][i]})));
  const ring = document.createElementNS(svg.namespaceURI, "circle");
  ring.setAttribute("class", "ring");
  ring.setAttribute("r", 6);
  svg.dataset.points = points.length;
  svg.addEventListener("pointermove", event => {
    const area = svg.getBoundingClientRect(), wide = svg.viewBox.baseVal.width / area.width;
    const x = (event.clientX - area.left) * wide, y = (event.clientY - area.top) * wide;
    const far = p => (p.x - x) ** 2 + (p.y - y) ** 2;
    const near = points.reduce((a, b) => far(b) < far(a) ? b : a, points[0]);
    if (!near || far(near) > 900) return;
    ring.setAttribute("cx", near.x);
    ring.setAttribute("cy", near.y);
    svg.appendChild(ring);
    box.textContent = near.text;
  });
}
"""
"""Shows the text of the point nearest to the pointer below the plot."""

SCATTER_STYLE = """
.plot .ring{fill:none;stroke:var(--ink);stroke-width:1.5}
.plot .dot{fill:none;stroke-width:4.5;stroke-linecap:round;stroke-opacity:.8}
.plot .ghost{fill:none;stroke-width:3;stroke-linecap:round;stroke-opacity:.28}
.plot .key{fill:none;stroke-width:11;stroke-linecap:round}
.plot .front{fill:none;stroke:var(--ink);stroke-width:1.5;stroke-linejoin:round}
.plot .best{fill:var(--paper);stroke:var(--ink);stroke-width:2}
.plot .strong{fill:var(--ink);font-weight:600}
.plot .limit{stroke:var(--c1);stroke-width:1.5;stroke-dasharray:5 4}
.hover{min-height:3.2em;font-variant-numeric:tabular-nums;white-space:pre-wrap}
"""


def scatter_plot(
    groups: Sequence[PointGroup],
    *,
    title: str,
    x_label: str,
    y_label: str,
    limit: float,
    limit_label: str,
    front: Sequence[tuple[float, float]] = (),
    front_label: str = "",
    best: tuple[float, float] | None = None,
    best_label: str = "",
    width: int = 960,
    height: int = 520,
) -> str:
    """A figure of points over linear x and logarithmic y, with a vertical line at a limit.

    front: points that no other point beats in both x and y, by increasing x; drawn as steps.
    best: a point that is marked and labelled.
    """
    xs = [x for one in groups for x in one.x] or [0.0]
    ys = [y for one in groups for y in one.y] or [1.0]
    across_ticks = linear_ticks(0.0, max(*xs, limit) if len(xs) > 1 else max(xs[0], limit), count=8)
    low = min(ys)
    high = max(ys)
    # A log axis needs a range: a single value gets 20 % above it.
    up_ticks = log_ticks(low, high if high > low * 1.01 else low * 1.2)
    top = _draw_legend(groups, width)[1][-1] + 36
    across = AxisScale(across_ticks[0], across_ticks[-1], LEFT_MARGIN, width - RIGHT_MARGIN)
    up = AxisScale(up_ticks[0], up_ticks[-1], height - BOTTOM_MARGIN, top, log=True)
    out = [
        f'<svg class="plot" role="img" viewBox="0 0 {width} {height}">',
        f"<title>{escape_html(title)}</title>",
        f'<text class="title" x="8" y="20">{escape_html(title)}</text>',
        *_draw_legend(groups, width)[0],
        *_draw_axes(across, up, across_ticks, up_ticks),
        f'<text x="8" y="{top - 8}">{escape_html(y_label)}</text>',
        f'<text class="end" x="{width - RIGHT_MARGIN}" '
        f'y="{height - 6}">{escape_html(x_label)}</text>',
    ]
    # Faint groups are drawn first, so that they are behind. The texts below have the same order.
    for i, one in enumerate(sorted(groups, key=lambda group: not group.faint)):
        kind = "ghost" if one.faint else "dot"
        places = "".join(
            f"M{across(x):.1f},{up(y):.1f}h0" for x, y in zip(one.x, one.y, strict=True)
        )
        out.append(
            f'<path class="{kind} s{one.colour % NUM_COLOURS}" data-group="{i}" d="{places}"/>'
        )
    x = across(limit)
    out.append(f'<path class="limit" d="M{x:.1f},{top}V{up.start:g}"/>')
    out.append(
        f'<text class="ink" x="{x + 6:.1f}" y="{top + 14}">{escape_html(limit_label)}</text>'
    )
    out += _draw_front(front, front_label, across, up)
    if best is not None:
        out += _draw_best(best, best_label, across, up)
    texts = [list(one.text) for one in sorted(groups, key=lambda group: not group.faint)]
    # An escaped "<" keeps a text from closing the script element.
    stored = json.dumps(texts, ensure_ascii=True).replace("<", "\\u003c")
    return (
        f'<figure class="points wide">{"".join([*out, "</svg>"])}'
        '<p class="hover muted">Move the pointer over a layout to see its settings.</p>'
        f'<script type="application/json">{stored}</script></figure>'
    )


def _draw_front(
    front: Sequence[tuple[float, float]], label: str, across: AxisScale, up: AxisScale
) -> list[str]:
    """The steps of a Pareto front with its label at the top of the first step."""
    if not front:
        return []
    x, y = front[0]
    steps = f"M{across(x):.1f},{up.end:.1f}V{up(y):.1f}"
    steps += "".join(f"H{across(x):.1f}V{up(y):.1f}" for x, y in front[1:])
    place = f'x="{across(x) + 6:.1f}" y="{up.end + 14:.1f}"'
    return [
        f'<path class="front" d="{steps}"/>',
        f'<text class="ink" {place}>{escape_html(label)}</text>',
    ]


def _draw_best(
    best: tuple[float, float], label: str, across: AxisScale, up: AxisScale
) -> list[str]:
    """A diamond at a point, with its label."""
    x = across(best[0])
    y = up(best[1])
    diamond = f"M{x - 8:.1f},{y:.1f}l8,-8l8,8l-8,8z"
    return [
        f'<path class="best" d="{diamond}"/>',
        f'<text class="strong end" x="{x - 12:.1f}" y="{y + 18:.1f}">{escape_html(label)}</text>',
    ]


def _draw_axes(
    across: AxisScale, up: AxisScale, across_ticks: Sequence[float], up_ticks: Sequence[float]
) -> list[str]:
    out = []
    for value, text in zip(up_ticks, tick_labels(up_ticks), strict=True):
        y = up(value)
        if value == up_ticks[0]:
            kind = "axis"
        else:
            kind = "rule"
        out.append(f'<path class="{kind}" d="M{across.start:g},{y:.1f}H{across.end:g}"/>')
        out.append(f'<text class="end" x="{across.start - 8:g}" y="{y + 4:.1f}">{text}</text>')
    for value, text in zip(across_ticks, tick_labels(across_ticks), strict=True):
        x = across(value)
        out.append(f'<path class="axis" d="M{x:.1f},{up.start:g}v5"/>')
        out.append(f'<text class="middle" x="{x:.1f}" y="{up.start + 19:g}">{text}</text>')
    return out


def _draw_legend(groups: Sequence[PointGroup], width: int) -> tuple[list[str], list[int]]:
    """Legend entries in rows, and the y of each row; faint groups have no entry."""
    out = []
    x = 8.0
    rows = [42]
    for one in groups:
        if one.faint:
            continue
        room = 30 + 8.5 * len(one.name)
        if x > 8 and x + room > width - RIGHT_MARGIN:
            x = 8.0
            rows = [*rows, rows[-1] + 20]
        y = rows[-1]
        out.append(f'<path class="key s{one.colour % NUM_COLOURS}" d="M{x + 6:g},{y - 4}h0"/>')
        out.append(f'<text class="ink" x="{x + 18:g}" y="{y}">{escape_html(one.name)}</text>')
        x += room
    return out, rows


def stacked_bars(
    rows: Sequence[tuple[str, Mapping[str, float]]],
    *,
    title: str,
    names: Sequence[str],
    unit: str = "s",
    width: int = 960,
) -> str:
    """Rows of stacked parts on one scale as SVG. names: all parts, in the order of colours."""
    # Common scale of all rows; 1 if all are empty, to avoid a division by zero.
    most = max((sum(parts.values()) for _, parts in rows), default=1.0) or 1.0
    used = [name for name in names if any(parts.get(name, 0.0) > 0.0 for _, parts in rows)]
    groups = [PointGroup(name, names.index(name), (), (), ()) for name in used]
    legend, heights = _draw_legend(groups, width)
    y = heights[-1] + 18
    thick = 18
    left = 8
    out = [f'<text class="title" x="8" y="20">{escape_html(title)}</text>', *legend]
    for name_of_row, parts in rows:
        total = sum(parts.values())
        x = float(left)
        out.append(f'<text class="ink" x="{left}" y="{y + 12}">{escape_html(name_of_row)}</text>')
        y += 19
        for name in used:
            value = parts.get(name, 0.0)
            # 110 pixels are left for the total behind the bar.
            size = value / most * (width - 110)
            if size <= 0.0:
                continue
            label = f"{name}: {format_number(value)} {unit} ({format_percent(value / total)})"
            out.append(
                f'<rect class="f{names.index(name) % NUM_COLOURS}" x="{x:.1f}" y="{y}" '
                f'width="{size:.1f}" height="{thick}"><title>{escape_html(label)}</title></rect>'
            )
            x += size
        out.append(
            f'<text class="ink" x="{x + 8:.1f}" y="{y + 14}">{format_number(total)} {unit}</text>'
        )
        y += thick + 10
    head = f'<svg class="plot" role="img" viewBox="0 0 {width} {y + 8}">'
    return "\n".join([head, f"<title>{escape_html(title)}</title>", *out, "</svg>"])
