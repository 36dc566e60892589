"""Plots as inline SVG, in plain Python: line plots over steps, and a stacked bar.

An SVG of this module has CSS classes only. Put `PLOT_STYLE` (light and dark by the reader's
preference) into the page and, for values under the pointer, `READOUT_SCRIPT`; `standalone_svg`
makes a file that renders on its own. Long series are thinned to the smallest and largest value of
each pixel column, so a spike of one step in 100,000 stays visible. Missing or non-finite values are
gaps. Not handled: dates on an axis, negative values on a logarithmic one (they are gaps too).
"""

from __future__ import annotations

import html
import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal

from ranvier.html.number_format import format_number, format_percent

Point = tuple[float, float]

# Margins around the data area, in pixels.
LEFT_MARGIN, RIGHT_MARGIN, BOTTOM_MARGIN = 58, 18, 44
# Differences of larger values could overflow.
LARGEST_VALUE = 1e300
# A "dots" series with more points is drawn as a plain line.
MAX_DOTS = 100

LIGHT_THEME = {
    "ink": "#1f2328",
    "muted": "#5f6670",
    "rule": "#e3e5e8",
    "axis": "#8b929b",
    "paper": "#ffffff",
    "c0": "#0068b5",
    "c1": "#d9480f",
    "c2": "#1d8a3a",
    "c3": "#d6338f",
    "c4": "#a07800",
    "c5": "#0b93a6",
    "c6": "#697079",
    "c7": "#7048c8",
    "c8": "#7d4a23",
}
"""Colours on white with a contrast of at least 3: nine hues with nine names.

Blue, orange, green, pink, ochre, teal, grey, purple, brown.
"""

DARK_THEME = {
    "ink": "#e6e8eb",
    "muted": "#a0a7b0",
    "rule": "#2c3138",
    "axis": "#6c747e",
    "paper": "#16191d",
    "c0": "#5aaef5",
    "c1": "#ff7d45",
    "c2": "#46c46a",
    "c3": "#ff86c8",
    "c4": "#f2c230",
    "c5": "#35d0dd",
    "c6": "#a4abb4",
    "c7": "#a98bff",
    "c8": "#c08f66",
}
"""The same hues, lighter, on a dark background."""

NUM_COLOURS = 9


def _css_variables(colours: Mapping[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


PLOT_RULES = """
.plot{display:block;width:100%;height:auto;font:13px system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;font-variant-numeric:tabular-nums}
.plot text{fill:var(--muted)}
.plot .title{fill:var(--ink);font-size:15px;font-weight:600}
.plot .ink{fill:var(--ink)}
.plot .paper{fill:var(--paper);font-weight:600}
.plot .middle{text-anchor:middle}
.plot .end{text-anchor:end}
.plot .rule{stroke:var(--rule);stroke-width:1}
.plot .axis{stroke:var(--axis);stroke-width:1}
.plot .mark{stroke:var(--axis);stroke-width:1;stroke-dasharray:2 4}
.plot .line,.plot .faint,.plot .point{fill:none;stroke-width:1.8;stroke-linejoin:round;
stroke-linecap:round}
.plot .faint{stroke-width:1.2;stroke-opacity:.55}
.plot .point{stroke-width:6}
""" + "".join(
    f".plot .s{i}{{stroke:var(--c{i})}}.plot .f{i}{{fill:var(--c{i})}}\n"
    for i in range(NUM_COLOURS)
)

PLOT_STYLE = (
    f":root{{color-scheme:light dark;{_css_variables(LIGHT_THEME)}}}\n"
    f"@media (prefers-color-scheme:dark){{:root{{{_css_variables(DARK_THEME)}}}}}\n{PLOT_RULES}"
    "@media (max-width:640px){.plot{font-size:16px}.plot .title{font-size:19px}"
    ".wide{overflow-x:auto}.wide .plot{min-width:46rem;font-size:14px}}\n"
    "@media print{.plot .readout{display:none}}\n"
)
"""The CSS of all plots in a page; needed once."""

READOUT_SCRIPT = """
for (const svg of document.querySelectorAll("svg.plot[data-box]")) {
  const [left, right, top, bottom, x0, x1, y0, y1, log] = svg.dataset.box.split(" ").map(Number);
  const name = svg.querySelector("title");  // as a label it is read, but shows no tooltip
  svg.setAttribute("aria-label", name.textContent);
  name.remove();
  const lines = [...svg.querySelectorAll("path[data-name]")].map(path => ({
    name: path.dataset.name,
    points: path.getAttribute("d").split(/[M ]+/).slice(1).map(p => p.split(",").map(Number)),
  }));
  const make = (tag, kind) => {
    const node = document.createElementNS(svg.namespaceURI, tag);
    node.setAttribute("class", kind);
    return svg.appendChild(node);
  };
  const cursor = make("path", "axis readout"), text = make("text", "ink end readout");
  text.setAttribute("x", right);
  text.setAttribute("y", 20);
  const digits = v => Number(v.toPrecision(3)).toLocaleString("en", {maximumSignificantDigits: 3});
  const value = y => {
    const share = (bottom - y) / (bottom - top);
    return log ? y0 * (y1 / y0) ** share : y0 + share * (y1 - y0);
  };
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    if (x < left || x > right) return;
    const near = lines.map(line => [line.name, line.points.reduce((a, b) =>
      Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a)]);
    const at = near.reduce((a, b) => Math.abs(b[1][0] - x) < Math.abs(a[1][0] - x) ? b : a)[1][0];
    const place = x0 + (at - left) / (right - left) * (x1 - x0);
    cursor.setAttribute("d", `M${at},${top}V${bottom}`);
    text.textContent = [svg.dataset.x + " " + Math.round(place).toLocaleString("en"),
      ...near.map(([n, p]) => n + " " + digits(value(p[1])))].join("  ·  ");
  });
  svg.addEventListener("pointerleave", () => {
    cursor.removeAttribute("d");
    text.textContent = "";
  });
}
"""
"""Shows values under the pointer; it reads the drawn paths, so no number is stored twice."""


@dataclass(frozen=True)
class Series:
    """A named line; `x` must not decrease."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    style: Literal["line", "faint", "dots"] = "line"


@dataclass(frozen=True)
class AxisScale:
    """Maps the values of an axis to pixels, linearly or logarithmically."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        if self.log:
            low = math.log(self.low)
            share = (math.log(value) - low) / (math.log(self.high) - low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def escape_html(text: object) -> str:
    """Escape text for HTML and XML, including attributes."""
    # Remove lone surrogates, which cannot be encoded.
    whole = str(text).encode("utf-8", "replace").decode()
    # Control characters are not valid in XML, even if they are escaped.
    whole = re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffe\uffff]", "\ufffd", whole)
    return html.escape(whole)


def linear_ticks(low: float, high: float, *, count: int = 5, whole: bool = False) -> list[float]:
    """Round values (1, 2, 5 times a power of ten) from at most `low` to at least `high`."""
    step = _round_step((high - low) / count)
    step = max(step, 1.0) if whole else step
    # The tolerance keeps a bound that is a multiple of the step from getting another tick.
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    # Rounding removes the error of i * step, as in 0.30000000000000004.
    power = -math.floor(math.log10(step))
    return [round(i * step, power) if 0 < power < 300 else i * step for i in range(first, last + 1)]


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(m * power for m in (1, 2, 5, 10, 20) if m * power >= least * (1 - 1e-9))


def log_ticks(low: float, high: float) -> list[float]:
    """Round values for a logarithmic axis from at most `low` to at least `high`."""
    first = math.floor(math.log10(low))
    last = math.ceil(math.log10(high))
    decades = last - first
    # Over many decades only powers of ten fit, at most about seven.
    if decades > 3:
        stride = math.ceil(decades / 6)
        return [10.0**p for p in range(first, last + stride, stride)]
    fine = [m * 10.0**p for p in range(first, last + 1) for m in (1, 2, 5)]
    below = [v for v in fine if v <= low * (1 + 1e-9)]
    above = [v for v in fine if v >= high * (1 - 1e-9)]
    return [v for v in fine if below[-1] <= v <= above[0]]


def tick_labels(values: Sequence[float]) -> list[str]:
    """The labels of ticks, with enough digits to be distinct."""
    for digits in range(3, 9):
        texts = [format_number(value, digits) for value in values]
        if len(set(texts)) == len(texts):
            break
    return texts


def _finite_points(series: Series, log: bool) -> list[Point]:
    """The points of a series, with nan where nothing can be drawn."""
    if log:
        least = 1 / LARGEST_VALUE
    else:
        least = -LARGEST_VALUE
    return [
        (x, y if y is not None and least < y < LARGEST_VALUE else math.nan)
        for x, y in zip(series.x, series.y, strict=True)
    ]


def _value_range(values: Iterable[float], *, zero: bool = False) -> Point:
    """The smallest and largest value, widened if they are (almost) equal."""
    # nan != nan, so this drops the gaps.
    known = [value for value in values if value == value]
    low = min(known, default=0.0)
    high = max(known, default=1.0)
    if zero:
        low = min(low, 0.0)
        high = max(high, 0.0)
    if high - low > max(abs(low), abs(high)) * 1e-6 and high - low > 1 / LARGEST_VALUE:
        return low, high
    if abs(high) < 1 / LARGEST_VALUE:
        return 0.0, 1.0
    return low - abs(low) * 0.05, high + abs(high) * 0.05


def contiguous_runs(points: Sequence[Point], columns: int, across: AxisScale) -> list[list[Point]]:
    """Split points at gaps; of many points, keep the smallest and largest of each pixel column."""
    runs: list[list[Point]] = [[]]
    # Few enough points: nothing is thinned.
    if len(points) <= 2 * columns:
        for point in points:
            if not math.isnan(point[1]):
                runs[-1].append(point)
            elif runs[-1]:
                runs.append([])
        return [run for run in runs if run]
    pixel = (across.high - across.low) / columns
    start = 0
    for column in range(columns):
        if column == columns - 1:
            edge = math.inf
        else:
            edge = across.low + (column + 1) * pixel
        end = bisect_left(points, edge, lo=start, key=itemgetter(0))
        group = points[start:end]
        start = end
        if not group:
            continue
        known = [point for point in group if point[1] == point[1]]
        # A gap at the start of a column separates it from the previous run, any other one from the
        # next; the order inside of a column is not visible.
        late = math.isnan(group[0][1])
        if late and runs[-1]:
            runs.append([])
        if known:
            runs[-1] += sorted({min(known, key=itemgetter(1)), max(known, key=itemgetter(1))})
        if len(known) < len(group) and (not late or math.isnan(group[-1][1])) and runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _svg_path(runs: Iterable[Sequence[Point]], across: AxisScale, up: AxisScale) -> str:
    """The `d` of a path; a single point is a line to itself, which round caps make a dot."""
    parts = []
    for run in runs:
        whole = [*run, run[0]] if len(run) == 1 else run
        parts.append("M" + " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in whole))
    return "".join(parts)


def _draw_axes(across: AxisScale, up: AxisScale, bounds: Sequence[float]) -> list[str]:
    """Grid lines, ticks and their labels; `bounds` are the ticks of the y axis."""
    out = []
    for value, text in zip(bounds, tick_labels(bounds), strict=True):
        y = up(value)
        if value == bounds[0]:
            kind = "axis"
        else:
            kind = "rule"
        out.append(f'<path class="{kind}" d="M{across.start:g},{y:.1f}H{across.end:g}"/>')
        out.append(f'<text class="end" x="{across.start - 8:g}" y="{y + 4:.1f}">{text}</text>')
    whole = float(across.low).is_integer() and float(across.high).is_integer()
    steps = [
        value
        for value in linear_ticks(across.low, across.high, count=6, whole=whole)
        if across.low <= value <= across.high
    ]
    for value, text in zip(steps, tick_labels(steps), strict=True):
        x = across(value)
        out.append(f'<path class="axis" d="M{x:.1f},{up.start:g}v5"/>')
        out.append(f'<text class="middle" x="{x:.1f}" y="{up.start + 19:g}">{text}</text>')
    return out


def _draw_legend(series: Sequence[Series], width: int, top: int) -> tuple[list[str], int]:
    """The rows of a legend, and the y of the last one; none for a single series."""
    out: list[str] = []
    if len(series) < 2:
        return out, top
    x = float(LEFT_MARGIN)
    y = top + 18
    for i, one in enumerate(series):
        # An estimate of the text width, as the font is not known.
        room = 34 + 8.5 * len(one.name)
        if x > LEFT_MARGIN and x + room > width - RIGHT_MARGIN:
            x = LEFT_MARGIN
            y = y + 20
        kind = f"{'faint' if one.style == 'faint' else 'line'} s{i % NUM_COLOURS}"
        out.append(f'<path class="{kind}" d="M{x:g},{y - 4}h18"/>')
        if one.style == "dots":
            out.append(f'<path class="point s{i % NUM_COLOURS}" d="M{x + 9:g},{y - 4}h0"/>')
        out.append(f'<text class="ink" x="{x + 24:g}" y="{y}">{escape_html(one.name)}</text>')
        x += room + 12
    return out, y


def _describe_series(
    series: Sequence[Series], drawn: Sequence[list[list[Point]]], x_label: str
) -> str:
    """A description of a plot in words, for screen readers."""
    parts = []
    for one, runs in zip(series, drawn, strict=True):
        if not runs:
            parts.append(f"{one.name}: no values.")
            continue
        (x0, y0), (x1, y1) = runs[0][0], runs[-1][-1]
        low, high = (f(y for run in runs for _, y in run) for f in (min, max))
        parts.append(
            f"{one.name}: {format_number(y0)} at {x_label} {x0:.9g}, {format_number(y1)} at "
            f"{x_label} {x1:.9g}, smallest {format_number(low)}, largest {format_number(high)}."
        )
    return escape_html(" ".join(parts))


def open_svg(title: str, description: str, size: tuple[int, int], data: str = "") -> list[str]:
    """The start of a plot: its element with its size, and its title; `description` is escaped."""
    return [
        f'<svg class="plot" role="img" viewBox="0 0 {size[0]} {size[1]}"{data}>',
        f"<title>{escape_html(title)}</title><desc>{description}</desc>",
        f'<text class="title" x="8" y="20">{escape_html(title)}</text>',
    ]


def line_plot(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log: bool = False,
    zero: bool = False,
    marks: Sequence[float] = (),
    width: int = 720,
    height: int = 280,
) -> str:
    """Lines over a common x axis as SVG; `zero` includes 0, `marks` are vertical lines."""
    # x does not decrease, so the ends are enough.
    first, last = _value_range(x for one in series for x in [*one.x[:1], *one.x[-1:]])
    across = AxisScale(first, last, LEFT_MARGIN, width - RIGHT_MARGIN)
    drawn = [
        contiguous_runs(_finite_points(one, log), width - RIGHT_MARGIN - LEFT_MARGIN, across)
        for one in series
    ]
    values = [y for runs in drawn for run in runs for _, y in run]
    low, high = _value_range(values, zero=zero and not log)
    # Without any positive value a logarithmic axis is not possible.
    log = log and low > 0.0
    if log:
        bounds = log_ticks(low, high)
    else:
        bounds = linear_ticks(low, high)
    legend, top = _draw_legend(series, width, 24)
    top += 33
    up = AxisScale(bounds[0], bounds[-1], height - BOTTOM_MARGIN, top, log)
    # The read-out script inverts this map from pixels to values.
    box = (across.start, across.end, top, up.start, first, last, up.low, up.high, float(log))
    data = f' data-box="{" ".join(f"{v:.9g}" for v in box)}" data-x="{escape_html(x_label)}"'
    out = open_svg(title, _describe_series(series, drawn, x_label), (width, height), data)
    out += legend
    if log:
        unit = f"{y_label}, log scale"
    else:
        unit = y_label
    if unit:
        out.append(f'<text x="8" y="{top - 12}">{escape_html(unit)}</text>')
    out.append(
        f'<text class="end" x="{width - RIGHT_MARGIN}" '
        f'y="{height - 6}">{escape_html(x_label)}</text>'
    )
    out += _draw_axes(across, up, bounds)
    for mark in marks:
        if first <= mark <= last:
            out.append(f'<path class="mark" d="M{across(mark):.1f},{top}V{up.start:g}"/>')
    for i, (one, runs) in enumerate(zip(series, drawn, strict=True)):
        out += _draw_series(one, i % NUM_COLOURS, runs, across, up)
    if not values:
        middle = f'x="{(LEFT_MARGIN + width - RIGHT_MARGIN) / 2:g}" y="{(top + up.start) / 2:g}"'
        out.append(f'<text class="middle" {middle}>no finite values</text>')
    return "\n".join([*out, "</svg>"])


def _draw_series(
    one: Series, colour: int, runs: Sequence[Sequence[Point]], across: AxisScale, up: AxisScale
) -> list[str]:
    """The path of a series and its dots."""
    if not runs:
        return []
    if one.style == "faint":
        kind = "faint"
    else:
        kind = "line"
    name = escape_html(one.name)
    out = [f'<path class="{kind} s{colour}" data-name="{name}" d="{_svg_path(runs, across, up)}"/>']
    points = [[point] for run in runs for point in run]
    if one.style == "dots" and len(points) <= MAX_DOTS:
        out.append(f'<path class="point s{colour}" d="{_svg_path(points, across, up)}"/>')
    return out


def stacked_bar(
    parts: Mapping[str, float], *, title: str, unit: str = "s", width: int = 720
) -> str:
    """Parts of a whole as one horizontal bar, with amounts and percentages below."""
    known = {name: value for name, value in parts.items() if 0.0 < value < LARGEST_VALUE}
    total = sum(known.values())
    top = 34
    thick = 34
    inner = width - 16
    out = []
    x = 8.0
    row = top + thick + 26
    words = []
    left = 8.0
    for i, (name, value) in enumerate(known.items()):
        share = value / total
        colour = i % NUM_COLOURS
        size = share * inner
        text = f"{name} {format_number(value)} {unit} ({format_percent(share)})"
        words.append(text)
        out.append(
            f'<rect class="f{colour}" x="{x:.1f}" y="{top}" width="{max(size - 1, 0.5):.1f}" '
            f'height="{thick}"><title>{escape_html(text)}</title></rect>'
        )
        # A label fits only into a wide part; the legend has all of them.
        if size > 64:
            place = f'x="{x + size / 2:.1f}" y="{top + thick / 2 + 5:g}"'
            out.append(f'<text class="paper middle" {place}>{format_percent(share)}</text>')
        x += size
        room = 30 + 8.5 * len(text)
        if left > 8 and left + room > width:
            left = 8.0
            row = row + 22
        out.append(
            f'<rect class="f{colour}" x="{left:g}" y="{row - 11}" width="12" height="12" rx="2"/>'
        )
        out.append(f'<text class="ink" x="{left + 19:g}" y="{row}">{escape_html(text)}</text>')
        left += room
    if not known:
        out.append(f'<text x="8" y="{top + 20}">no time was recorded</text>')
    head = open_svg(title, escape_html("; ".join(words) or "nothing"), (width, row + 12))
    return "\n".join([*head, *out, "</svg>"])


def standalone_svg(svg: str) -> str:
    """A plot as an .svg file with its styles, on white, for renderers without CSS variables."""
    style = re.sub(r"var\(--(\w+)\)", lambda m: LIGHT_THEME[m[1]], PLOT_RULES)
    size = re.search(r'viewBox="0 0 (\d+) (\d+)"', svg)
    assert size is not None, f"no viewBox in {svg[:80]!r}"
    head, _, body = svg.partition("</desc>")
    space = f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[1]}" height="{size[2]}" '
    head = head.replace("<svg ", space, 1)
    paper = f'<rect width="{size[1]}" height="{size[2]}" fill="#ffffff"/>'
    return f"{head}</desc>\n<style>{style}</style>\n{paper}{body}\n"
