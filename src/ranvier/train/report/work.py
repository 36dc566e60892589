"""Work of the ranks of a run, as metrics of steps and as a report section.

attention_imbalance           attention work of the rank with the most, relative to the mean
token_imbalance               tokens without padding of the rank with the most, likewise
keys_fetched                  keys fetched over context, as a fraction of those of other ranks
efficiency_lost_to_imbalance  fraction of the compute that ranks wait for others
rank_attention                attention work of each rank, relative to the mean
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ranvier.data.step_work import Counts, StepWork
from ranvier.html.page import render_details, render_section, render_table
from ranvier.html.plot import Series, line_plot

RANKS_KEY = "rank_attention"
MAX_LISTED_RANKS = 64
"""Ranks up to which the work of each is part of a metrics row."""
METRIC_LABELS = {
    "attention_imbalance": "attention work of the busiest rank, relative to the mean",
    "token_imbalance": "tokens of the rank with the most, relative to the mean",
    "keys_fetched": "fraction of the keys of other ranks that is fetched",
    "efficiency_lost_to_imbalance": "fraction of the compute that ranks wait for others",
}


def work_metrics(work: StepWork | None) -> dict[str, Any]:
    """The work of a step as part of a metrics row; empty if it is not counted."""
    if work is None:
        return {}
    row: dict[str, Any] = {
        "attention_imbalance": _imbalance(work.attention),
        "token_imbalance": _imbalance(work.tokens),
        "keys_fetched": None if work.keys_fetched is None else round(work.keys_fetched, 5),
        "efficiency_lost_to_imbalance": round(1.0 - work.efficiency, 5),
    }
    if work.attention.size <= MAX_LISTED_RANKS:
        relative = work.attention / work.attention.mean()
        row[RANKS_KEY] = [round(x, 4) for x in relative.ravel().tolist()]
    return row


def _imbalance(counts: Counts) -> float:
    # A step of padding alone has no tokens.
    return round(float(counts.max() / max(counts.mean(), 1e-9)), 5)


def work_section(rows: Sequence[Mapping[str, Any]]) -> str:
    """The report section on the work of ranks; empty if all have the same."""
    counted = [row for row in rows if _to_float(row.get("attention_imbalance"))]
    if not counted:
        return ""
    steps = [float(row["step"]) for row in counted]
    names = {"attention": "attention_imbalance", "tokens": "token_imbalance"}
    series = [
        Series(
            name,
            steps,
            [_to_float(row.get(key)) for row in counted],
            "line" if len(steps) > 19 else "dots",
        )
        for name, key in names.items()
    ]
    svg = line_plot(
        series,
        title="Work of the rank with the most",
        x_label="step",
        y_label="relative to the mean",
        width=600,
    )
    last = counted[-1].get(RANKS_KEY)
    each = list[list[str]]()
    if isinstance(last, list):
        each = [[str(i), f"{x:.3f}"] for i, x in enumerate(map(_to_float, last)) if x]
    columns = ["rank of data, expert, depth, col, context", "attention work, relative to the mean"]
    table = render_details("Each rank in the last step", render_table(columns, each))
    return render_section(
        "Work of ranks",
        f"<p>{_describe_work(counted)}</p>",
        f"<figure>{svg}</figure>",
        table if each else "",
    )


def _describe_work(rows: Sequence[Mapping[str, Any]]) -> str:
    """A sentence on the work of the ranks, in the mean of all steps."""
    means: dict[str, float | None] = {}
    for key in METRIC_LABELS:
        values = [x for row in rows if (x := _to_float(row.get(key))) is not None]
        means[key] = sum(values) / len(values) if values else None
    words = f"The busiest rank has {means['attention_imbalance'] or 1.0:.3f} times the mean "
    words += f"attention work and {means['token_imbalance'] or 1.0:.3f} times the mean tokens"
    lost = means["efficiency_lost_to_imbalance"]
    if lost is not None:
        words += f"; waiting for it takes {lost:.1%} of the compute, as predicted from FLOPs"
    fetched = means["keys_fetched"]
    if fetched is not None:
        words += f". Over context, {fetched:.1%} of the keys of other ranks are fetched"
    return f"{words}."


def _to_float(value: object) -> float | None:
    """A finite number of a metrics row; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    # A JSON integer may exceed the range of a float.
    if abs(value) < sys.float_info.max:
        return float(value)
    return None
