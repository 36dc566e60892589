"""MoE router statistics of a run, as metrics of steps and as a report section.

expert_load     tokens of the busiest expert of any layer, relative to the mean of its layer
expert_idle     fraction of experts without any token
expert_drops    fraction of choices dropped by the capacity limit
expert_entropy  entropy of the router scores of a token, in nats, mean over tokens and layers
expert_loss     auxiliary losses of all layers, per token
expert_loads    fraction of all choices per expert, mean over layers
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ranvier.html.page import render_section as page_section
from ranvier.html.page import render_table
from ranvier.html.plot import Series, line_plot
from ranvier.nn.moe.load_balancing import LoadBalancer, load_metrics

LOADS_KEY = "expert_loads"


def router_statistics(balance: LoadBalancer | None) -> list[Tensor]:
    """Router statistics of the last step, as scalars on the device; empty without MoE layers."""
    if balance is None or balance.last_stats is None:
        return []
    loads = balance.last_stats[:, : balance.num_experts]
    # [layers, experts] -> [experts]: layers have equal weight; a layer without tokens counts as 0.
    shares = (loads / loads.sum(1, keepdim=True).clamp(min=1.0)).mean(0)
    return [*load_metrics(balance.last_stats, balance.num_experts).values(), *shares.unbind()]


def router_metrics(values: Sequence[float]) -> dict[str, Any]:
    """The values of `router_statistics` as part of a metrics row; empty if there are none."""
    if not values:
        return {}
    # The values are the single statistics, then one share per expert.
    single = {f"expert_{name}": value for name, value in zip(STATISTIC_NAMES, values, strict=False)}
    return {**single, LOADS_KEY: [round(share, 5) for share in values[len(STATISTIC_NAMES) :]]}


STATISTIC_NAMES = ("load", "idle", "drops", "entropy", "loss")
METRIC_LABELS = {
    "expert_load": "load of the busiest expert, relative to the mean of its layer",
    "expert_idle": "fraction of idle experts",
    "expert_drops": "fraction of dropped choices",
    "expert_entropy": "entropy of the router scores (nats)",
    "expert_loss": "auxiliary loss per token",
}


def experts_section(rows: Sequence[Mapping[str, Any]]) -> str:
    """The report section on experts; empty if there are none."""
    routed = [row for row in rows if isinstance(row.get(LOADS_KEY), list)]
    if not routed:
        return ""
    first = routed[0]
    last = routed[-1]
    cells = [
        [words, _format_value(first.get(key)), _format_value(last.get(key))]
        for key, words in METRIC_LABELS.items()
    ]
    steps = [float(row["step"]) for row in routed]
    loads = [_to_float(row.get("expert_load")) for row in routed]
    svg = line_plot(
        [Series("busiest expert", steps, loads, "line" if len(steps) > 19 else "dots")],
        title="Load of the busiest expert",
        x_label="step",
        y_label="relative to the mean",
        width=600,
    )
    shares = [_to_float(share) or 0.0 for share in last[LOADS_KEY]]
    mean = sum(shares) / max(len(shares), 1) or 1.0
    each = [[str(e), f"{share:.2%}", f"{share / mean:.2f}"] for e, share in enumerate(shares)]
    return page_section(
        "Experts",
        render_table(["", "first step", "last step"], cells),
        f"<figure>{svg}</figure>",
        render_table(["expert", "fraction of choices", "relative to the mean"], each),
    )


def _to_float(value: object) -> float | None:
    good = isinstance(value, (int, float)) and math.isfinite(value)
    return float(value) if good else None  # type: ignore[arg-type]


def _format_value(value: object) -> str:
    number = _to_float(value)
    if number is None:
        return "·"
    return f"{number:.4g}"
