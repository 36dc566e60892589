"""A self-contained page of scaling laws: losses, hull, sizes against FLOPs, residuals, shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ranvier.html.page import render_document, render_section, render_table
from ranvier.html.plot import Series, escape_html, line_plot
from ranvier.scaling.bootstrap import Interval
from ranvier.scaling.laws import FittedHull, FittedLaw, ScalingLaws
from ranvier.scaling.minimize import Array
from ranvier.scaling.prescription import (
    FlopCost,
    MeasuredTimeCost,
    Prescription,
    ShapeGrid,
    TokenCost,
    aspect_ratio,
    best_shape,
    loss_by_aspect_ratio,
)
from ranvier.scaling.summary import format_interval, prescription_cells

MAX_RUN_LINES = 30
"""Runs with a line of their own in the plot of losses."""
BAND_POINTS = 12
BAND_RESAMPLES = 60
"""Resamples that a band is drawn from."""
ASPECT_BOUNDS = np.geomspace(2.0, 512.0, 17)
MIDDLES = np.sqrt(ASPECT_BOUNDS[:-1] * ASPECT_BOUNDS[1:])


def render_page(
    tables: Sequence[tuple[str, ScalingLaws]],
    prescriptions: Sequence[tuple[str, Sequence[Prescription]]],
    *,
    cost: FlopCost,
    notes: Sequence[str] = (),
) -> str:
    """Returns the page as HTML. tables: laws of hot and of cooled losses."""
    body = ['<p class="kind">ranvier scaling-laws</p>', "<h1>Scaling laws</h1>"]
    body += [f'<p class="muted">{escape_html(note)}</p>' for note in notes]
    for title, several in prescriptions:
        head = ("law", "model", "parameters", "tokens", "loss")
        rows = [prescription_cells(one) for one in several]
        body.append(render_section(title, render_table(head, rows, text_columns=range(1, 5))))
    for name, laws in tables:
        plots = [
            _plot_losses(laws),
            *_plot_sizes(laws, cost),
            *(_plot_residuals(one, laws) for one in laws.laws),
            _plot_shapes(laws, cost),
        ]
        figures = "".join(f"<figure>{plot}</figure>" for plot in plots if plot)
        body.append(
            render_section(
                f"{name} losses",
                _exponent_table(laws),
                *(
                    f'<p class="muted">{escape_html(f"{law}: not fitted, {why}.")}</p>'
                    for law, why in laws.refused.items()
                ),
                f'<div class="plots">{figures}</div>',
            )
        )
    return render_document("Scaling laws", "\n".join(filter(None, body)))


def _exponent_table(laws: ScalingLaws) -> str:
    rows: list[tuple[str, str, str, str]] = []
    for cost, hull in laws.hulls.items():
        for size, law in hull.law.laws.items():
            bounds = format_interval(hull.exponent_interval(size))
            rows.append((f"hull by {cost}", size, f"{law.exponent:.4f}", bounds))
    for fitted in laws.laws:
        for i, term in enumerate(fitted.form.terms):
            bounds = format_interval(fitted.exponent_interval(i))
            rows.append(
                (f"law of {fitted.form.name}", term, f"{-fitted.law.exponents[i]:.4f}", bounds)
            )
    return render_table(("law", "size", "exponent", "90 % interval"), rows, text_columns=(1,))


def _plot_losses(laws: ScalingLaws) -> str:
    """Loss of each run against FLOPs, and the hull."""
    table = laws.table
    flops = np.log10(table.column("flops"))
    present = np.unique(table.run_index)
    series = []
    hull = laws.hulls.get("flops")
    if hull is not None:
        on_hull = list(hull.law.rows)
        series.append(Series("hull", flops[on_hull].tolist(), table.loss[on_hull].tolist(), "dots"))
    if len(present) > MAX_RUN_LINES:
        order = np.argsort(flops)
        name = f"{len(present)} runs"
        series.append(Series(name, flops[order].tolist(), table.loss[order].tolist(), "faint"))
        present = present[:0]
    for run in present:
        rows = np.flatnonzero(table.run_index == run)
        rows = rows[np.argsort(flops[rows])]
        name = table.runs[int(run)]
        series.append(Series(name, flops[rows].tolist(), table.loss[rows].tolist(), "faint"))
    return line_plot(
        series,
        title="Loss against FLOPs",
        x_label="log10 of FLOPs",
        y_label="held-out loss",
        log=True,
        height=420,
    )


def _plot_sizes(laws: ScalingLaws, cost: FlopCost) -> list[str]:
    """N and D against C: of the hull and of the law of (N, D), with their bands."""
    flops = laws.table.column("flops")
    budgets = np.geomspace(float(flops.min()), 100.0 * float(flops.max()), BAND_POINTS)
    x = np.log10(budgets).tolist()
    plots = []
    curves: dict[str, list[Series]] = {"parameters": [], "tokens": []}
    hull = laws.hulls.get("flops")
    if hull is not None:
        for size, several in curves.items():
            several += _hull_band(hull, size, budgets)
    grid = ShapeGrid(cost, cost.vocab)
    for fitted in laws.laws:
        if fitted.form.terms == ("parameters", "tokens"):
            for size, several in _law_bands(fitted, grid, budgets, aspect_ratio(laws)).items():
                curves[size] += several
    if hull is not None:
        rows = list(hull.law.rows)
        for size, several in curves.items():
            points = laws.table.column(size)[rows].tolist()
            several.append(
                Series("losses on the hull", np.log10(flops[rows]).tolist(), points, "dots")
            )
    for size, title in (("parameters", "Parameters"), ("tokens", "Tokens")):
        if curves[size]:
            plots.append(
                line_plot(
                    curves[size],
                    title=f"{title} against FLOPs, with 90 % intervals",
                    x_label="log10 of FLOPs",
                    y_label=size,
                    log=True,
                    height=340,
                )
            )
    return [plot for plot in plots if x]


def _hull_band(hull: FittedHull, size: str, budgets: Array) -> list[Series]:
    x = np.log10(budgets).tolist()
    bounds = [hull.size_interval(size, float(budget)) for budget in budgets]
    return [
        Series("hull law", x, [hull.law.laws[size](float(budget)) for budget in budgets]),
        Series("hull law, 5 %", x, [one.low for one in bounds], "faint"),
        Series("hull law, 95 %", x, [one.high for one in bounds], "faint"),
    ]


def _law_bands(
    fitted: FittedLaw, grid: ShapeGrid, budgets: Array, ratio: float
) -> dict[str, list[Series]]:
    x = np.log10(budgets).tolist()
    middle: dict[str, list[float]] = {"parameters": [], "tokens": []}
    bounds: dict[str, list[Interval]] = {"parameters": [], "tokens": []}
    for budget in budgets:
        columns = grid.columns(float(budget))
        best = best_shape(fitted.law, grid, float(budget), ratio)
        others = [
            best_shape(one, grid, float(budget), ratio) for one in fitted.resamples[:BAND_RESAMPLES]
        ]
        for size in middle:
            middle[size].append(float(columns[size][best]))
            bounds[size].append(Interval.of(float(columns[size][i]) for i in others))
    return {
        size: [
            Series("law of (N, D)", x, middle[size]),
            Series("law of (N, D), 5 %", x, [one.low for one in bounds[size]], "faint"),
            Series("law of (N, D), 95 %", x, [one.high for one in bounds[size]], "faint"),
        ]
        for size in middle
    }


def _plot_residuals(fitted: FittedLaw, laws: ScalingLaws) -> str:
    """Relative difference of measured and fitted losses against FLOPs."""
    flops = np.log10(laws.table.column("flops"))
    series = []
    present = np.unique(laws.table.run_index)[:MAX_RUN_LINES]
    for run in present:
        rows = np.flatnonzero(laws.table.run_index == run)
        rows = rows[np.argsort(flops[rows])]
        values = (100.0 * np.expm1(fitted.residuals[rows])).tolist()
        series.append(Series(laws.table.runs[int(run)], flops[rows].tolist(), values, "faint"))
    return line_plot(
        series,
        title=f"Residuals of the law of {fitted.form.name}",
        x_label="log10 of FLOPs",
        y_label="measured minus fitted loss, %",
        zero=True,
        height=420,
    )


def _plot_shapes(laws: ScalingLaws, cost: FlopCost) -> str:
    """Loss over width / depth by the law of width, depth and tokens, by FLOPs and by time."""
    fitted = next((one for one in laws.laws if len(one.form.terms) == 3), None)
    if fitted is None:
        return ""
    table = laws.table
    costs: list[tuple[str, TokenCost, float]] = [
        ("equal FLOPs", cost, float(table.column("flops").max()))
    ]
    if table.has_seconds:
        spent = float(table.column("device_seconds").max())
        costs.append(("equal device time", MeasuredTimeCost.fit(table), spent))
    series = []
    for name, one, budget in costs:
        grid = ShapeGrid(one, cost.vocab)
        losses = loss_by_aspect_ratio(fitted.law, grid, budget, ASPECT_BOUNDS.tolist())
        known = [loss if math.isfinite(loss) else None for loss in losses]
        series.append(Series(name, np.log10(MIDDLES).tolist(), known, "dots"))
    return line_plot(
        series,
        title="Best loss by width / depth, at the largest cost of the runs",
        x_label="log10 of width / depth",
        y_label="predicted loss",
        height=340,
    )
