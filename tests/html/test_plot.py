"""Plots: ticks, gaps, thinning, escaping, and files that stand alone."""

from __future__ import annotations

import itertools
import math
import re
from xml.etree import ElementTree

import pytest

from ranvier.html import plot as plots
from ranvier.html.number_format import format_number
from ranvier.html.plot import Series, line_plot, log_ticks, stacked_bar, standalone_svg, tick_labels
from ranvier.html.plot import linear_ticks as round_ticks

SPACE = "{http://www.w3.org/2000/svg}"


def drawn(svg: str, name: str) -> list[list[tuple[float, float]]]:
    """The points of a line in pixels, split at its gaps."""
    path = re.search(rf'data-name="{name}" d="([^"]*)"', svg)
    assert path is not None, name
    runs = path[1].split("M")[1:]
    return [[tuple(map(float, p.split(","))) for p in run.split()] for run in runs]  # type: ignore[misc]


def plot(*series: Series, log: bool = False, zero: bool = False) -> str:
    return line_plot(series, title="A plot", x_label="step", y_label="m/s", log=log, zero=zero)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (2.61, 11.8, [2, 4, 6, 8, 10, 12]),
        (0, 3e-4, [0, 1e-4, 2e-4, 3e-4]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert round_ticks(low, high) == pytest.approx(expected, abs=1e-15)


def test_steps_have_whole_ticks() -> None:
    assert round_ticks(0, 2, whole=True) == [0, 1, 2]


@pytest.mark.parametrize(("low", "high"), [(0.3, 0.4), (0.01, 70), (1e-9, 1e9), (1, 1.0001)])
def test_log_ticks_enclose_the_values(low: float, high: float) -> None:
    found = log_ticks(low, high)
    assert found[0] <= low < high <= found[-1] and 2 <= len(found) <= 12


def test_numbers_are_short() -> None:
    values = [0, 0.5, 3e-4, 2.5e-5, 42, 1234, 12_300, 999_999, 1.5e9, -20_000]
    assert [format_number(v) for v in values] == (
        ["0", "0.5", "3e-4", "2.5e-5", "42", "1234", "12.3k", "1M", "1.5B", "-20k"]
    )
    assert tick_labels([100_000, 100_100]) == ["100k", "100.1k"]


def test_missing_and_not_finite_values_are_gaps() -> None:
    y = [1.0, 2.0, math.nan, 3.0, None, 4.0, 5.0, math.inf]
    runs = drawn(plot(Series("a", range(8), y)), "a")
    assert [len(run) for run in runs] == [2, 2, 2]
    assert runs[1][0] == runs[1][1]  # a lone point is a dot
    left, right = runs[0][0][0], runs[2][1][0]
    assert left == 58 and right == pytest.approx(58 + 644 * 6 / 7, abs=0.1)


def test_a_log_axis_leaves_out_what_has_no_logarithm() -> None:
    svg = plot(Series("a", range(4), [1.0, 0.0, -1.0, 100.0]), log=True)
    (first, _), (last, _) = drawn(svg, "a")
    assert first[1] == 236 and last[1] == 57  # the decades at the ends of the axis
    assert "m/s, log scale" in svg


def test_a_linear_axis_puts_values_in_place() -> None:
    svg = plot(Series("a", [0, 10], [0.0, 10.0]), Series("b", [0, 10], [5.0, 5.0]))
    (a,), (b,) = drawn(svg, "a"), drawn(svg, "b")
    assert a[0] == (58, 236) and a[1][0] == 702
    assert b[0][1] == pytest.approx((a[0][1] + a[1][1]) / 2, abs=0.1)


@pytest.mark.parametrize("where", [0, 31_234, 99_999])
def test_a_spike_survives_thinning(where: int) -> None:
    y = [1.0 + 0.01 * (i % 7) for i in range(100_000)]
    y[where] = 9.0
    y[50_000] = 0.0
    svg = plot(Series("a", range(100_000), y))
    heights = [p[1] for run in drawn(svg, "a") for p in run]
    assert len(heights) <= 2 * 645 and len(svg) < 30_000
    assert max(heights) - min(heights) > 140  # of 183 pixels


def test_a_stretch_without_values_survives_thinning() -> None:
    y = [math.nan if 40_000 <= i < 60_000 else 1.0 + i % 2 for i in range(100_000)]
    before, after = drawn(plot(Series("a", range(100_000), y)), "a")
    assert after[0][0] - before[-1][0] == pytest.approx(644 * 0.2, abs=2)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "y",
    [
        [],
        [None],
        [math.nan, math.inf, -math.inf],
        [0.0],
        [5.0],
        [-3.0, -3.0],
        [1e308, -1e308],
        [5e-324, 0.0],
        [1e16, 1e16 + 2],
        [7.0, 7.0 + 1e-15],
        [1e-200, 1e200],
    ],
)
def test_any_values_give_a_well_formed_plot(y: list[float | None], log: bool) -> None:
    svg = plot(Series("a", range(len(y)), y), log=log)
    ElementTree.fromstring(svg)
    assert not re.search(r"\b(nan|inf)\b", svg)


def test_text_is_escaped() -> None:
    name = "<script>&\"'\x00\ud800"
    svg = line_plot([Series(name, [0], [1.0])] * 2, title=name, x_label=name, y_label=name)
    ElementTree.fromstring(standalone_svg(svg))
    ElementTree.fromstring(stacked_bar({name: 1.0}, title=name))
    assert "<script" not in svg
    svg.encode()


def test_a_plot_is_accessible() -> None:
    root = ElementTree.fromstring(plot(Series("a", [0, 9], [4.0, 2.0])))
    assert root.get("role") == "img" and root.findtext("title") == "A plot"
    assert root.findtext("desc") == "a: 4 at step 0, 2 at step 9, smallest 2, largest 4."
    texts = [node.text for node in root.iter("text")]
    assert "step" in texts and "m/s" in texts


def test_a_legend_names_two_series_and_wraps() -> None:
    names = [f"a rather long name {i}" for i in range(5)]
    root = ElementTree.fromstring(plot(*(Series(name, [0, 1], [1.0, 2.0]) for name in names)))
    places = {node.text: node for node in root.iter("text") if node.text in names}
    assert list(places) == names and len({node.get("y") for node in places.values()}) == 2
    assert all(float(node.get("x", "nan")) < 720 for node in places.values())


def test_a_bar_shows_shares() -> None:
    parts = {"step": 90.0, "data": 10.0, "none": 0.0, "bad": math.nan}
    svg = stacked_bar(parts, title="Time", width=416)
    bars = re.findall(r'x="([\d.]+)" y="34" width="([\d.]+)"', svg)
    assert bars == [("8.0", "359.0"), ("368.0", "39.0")]
    assert "step 90 s (90 %)" in svg and "data 10 s (10 %)" in svg and "bad" not in svg
    assert "no time" in stacked_bar({}, title="Time")


def test_a_file_stands_alone() -> None:
    root = ElementTree.fromstring(standalone_svg(plot(Series("a", [0, 1], [1.0, 2.0]))))
    assert root.tag == f"{SPACE}svg" and root.get("width") == "720" and root.get("height") == "280"
    style = root.findtext(f"{SPACE}style") or ""
    assert plots.LIGHT_THEME["c0"] in style and "var(" not in style
    paper = root.find(f"{SPACE}rect")
    assert paper is not None and paper.get("fill") == "#ffffff"
    assert not list(root.iter(f"{SPACE}script"))


THEMES = [plots.LIGHT_THEME, plots.DARK_THEME]


def _linear(colour: str) -> list[float]:
    """Red, green and blue of an sRGB colour as intensities from 0 to 1."""
    return [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (int(colour[i : i + 2], 16) / 255.0 for i in (1, 3, 5))
    ]


def _luminance(colour: str) -> float:
    r, g, b = _linear(colour)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def _lab(colour: str) -> tuple[float, float, float]:
    """A colour in CIE L*a*b*, where a distance of about 2 is just noticeable."""
    r, g, b = _linear(colour)
    x = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505
    y = _luminance(colour)
    z = (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089
    fx, fy, fz = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("theme", THEMES, ids=["light", "dark"])
def test_every_two_colours_of_a_chart_are_distinct(theme: dict[str, str]) -> None:
    colours = [_lab(theme[f"c{i}"]) for i in range(plots.NUM_COLOURS)]
    distances = [math.dist(a, b) for a, b in itertools.combinations(colours, 2)]
    assert min(distances) > 25.0


@pytest.mark.parametrize("theme", THEMES, ids=["light", "dark"])
def test_every_colour_of_a_chart_stands_out_from_the_paper(theme: dict[str, str]) -> None:
    """The contrast of WCAG: the luminances plus 0.05, the larger one by the smaller one."""
    paper = _luminance(theme["paper"]) + 0.05
    for i in range(plots.NUM_COLOURS):
        colour = _luminance(theme[f"c{i}"]) + 0.05
        assert max(paper / colour, colour / paper) > 3.0, i


@pytest.mark.parametrize(("kind", "property_"), [("s", "stroke"), ("f", "fill")])
def test_every_class_of_a_chart_has_its_own_colour(kind: str, property_: str) -> None:
    rules = re.findall(rf"\.plot \.{kind}(\d){{{property_}:var\(--c(\d)\)}}", plots.PLOT_STYLE)
    assert rules == [(str(i), str(i)) for i in range(plots.NUM_COLOURS)]
