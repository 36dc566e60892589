"""Scatter plots and stacked bars: colours, places of points, and the steps of a front."""

from __future__ import annotations

import re

import pytest

from ranvier.html.scatter import PointGroup, scatter_plot, stacked_bars


def draw(groups: list[PointGroup], **options: object) -> str:
    labels = {"title": "t", "x_label": "GiB", "y_label": "s", "limit_label": "limit"}
    return scatter_plot(groups, limit=10.0, **labels, **options)  # type: ignore[arg-type]


def group(colour: int, x: float, y: float, faint: bool = False) -> PointGroup:
    return PointGroup(f"group {colour}", colour, [x], [y], [f"text {colour}"], faint)


def places(svg: str, kind: str) -> dict[str, tuple[float, float]]:
    """Where the point of each colour is, in pixels."""
    found = re.findall(rf'<path class="{kind} s(\d)"[^>]* d="M([\d.]+),([\d.]+)h0"/>', svg)
    return {colour: (float(x), float(y)) for colour, x, y in found}


def test_a_group_has_its_colour_in_the_plot_and_in_the_legend() -> None:
    svg = draw([group(3, 2.0, 1.0), group(5, 4.0, 2.0), group(7, 12.0, 2.0, faint=True)])
    assert [*places(svg, "dot")] == [*places(svg, "key")] == ["3", "5"]
    assert [*places(svg, "ghost")] == ["7"]
    left, right = places(svg, "dot")["3"], places(svg, "dot")["5"]
    assert left[0] < right[0] and left[1] > right[1], "x to the right, y upwards"


def test_texts_have_the_order_of_the_points() -> None:
    """The script of the page numbers the paths as they are drawn: faint ones first."""
    svg = draw([group(3, 2.0, 1.0), group(7, 12.0, 2.0, faint=True)])
    assert svg.index("ghost s7") < svg.index("dot s3")
    assert '[["text 7"], ["text 3"]]' in svg


def test_a_front_descends_after_it_has_reached_a_point() -> None:
    """Up to the memory of a point, the fastest layout is the one before it."""
    points = [(2.0, 8.0), (4.0, 4.0), (8.0, 1.0)]
    svg = draw(
        [group(i, x, y) for i, (x, y) in enumerate(points)], front=points, front_label="front"
    )
    steps = re.search(r'class="front" d="M([\d.]+),[\d.]+V([\d.]+)((?:H[\d.]+V[\d.]+)*)"', svg)
    assert steps is not None
    rest = re.findall(r"H([\d.]+)V([\d.]+)", steps[3])
    corners = [(float(x), float(y)) for x, y in [(steps[1], steps[2]), *rest]]
    assert corners == [*places(svg, "dot").values()]
    assert "front" not in draw([group(0, 1.0, 1.0)])


def test_the_best_point_is_marked_where_it_is() -> None:
    svg = draw([group(0, 2.0, 8.0), group(1, 4.0, 4.0)], best=(4.0, 4.0), best_label="best")
    diamond = re.search(r'class="best" d="M([\d.]+),([\d.]+)l8,-8l8,8l-8,8z"', svg)
    assert diamond is not None
    x, y = places(svg, "dot")["1"]
    assert (float(diamond[1]) + 8, float(diamond[2])) == pytest.approx((x, y), abs=0.11)


def test_a_part_of_a_bar_has_its_colour_and_its_share() -> None:
    names = ["compute", "row", "depth"]
    svg = stacked_bars([("a", {"compute": 3.0, "depth": 1.0})], title="t", names=names, width=510)
    bars = re.findall(r'<rect class="f(\d)" x="([\d.]+)" y="\d+" width="([\d.]+)"', svg)
    assert bars == [("0", "8.0", "300.0"), ("2", "308.0", "100.0")]
    assert [*places(svg, "key")] == ["0", "2"], "no entry for a part that no bar has"
