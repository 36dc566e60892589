"""Memorization of canaries over the steps of a run, as a section of its report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ranvier.html.page import render_section, render_table
from ranvier.html.plot import Series, line_plot

MATCH_KEY = "canary_match"
LOSS_KEY = "canary_loss"
"""Names of the metrics of a step, each a number by bucket."""
MAX_BUCKETS = 9
"""Buckets in a plot, which has as many colors."""


def memorization_section(rows: Sequence[Mapping[str, Any]]) -> str:
    """The plot of exact matches by bucket, and the last numbers; empty without canaries."""
    measured = [row for row in rows if isinstance(row.get(MATCH_KEY), dict) and row[MATCH_KEY]]
    if not measured:
        return ""
    steps = [float(row["step"]) for row in measured]
    last = measured[-1]
    series = []
    for bucket in list(last[MATCH_KEY])[:MAX_BUCKETS]:
        shares = [_read_value(row, MATCH_KEY, bucket) for row in measured]
        series.append(Series(f"bucket {bucket}", steps, shares, "dots"))
    svg = line_plot(
        series,
        title="Memorized canaries",
        x_label="step",
        y_label="fraction with an exact match",
        zero=True,
        width=600,
    )
    cells = [
        [str(bucket), *(_format(_read_value(last, key, bucket)) for key in (MATCH_KEY, LOSS_KEY))]
        for bucket in last[MATCH_KEY]
    ]
    table = render_table(["bucket", "exact match", "loss"], cells)
    return render_section("Memorization", f"<figure>{svg}</figure>", table)


def _read_value(row: Mapping[str, Any], key: str, bucket: str) -> float | None:
    """A metric of a bucket; None if it is missing, as files may be edited."""
    values = row.get(key)
    value = values.get(bucket) if isinstance(values, dict) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def _format(value: float | None) -> str:
    return "·" if value is None else f"{value:.4f}"
