"""Fitted laws and prescriptions as lines of text and as JSON types."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ranvier.html.number_format import format_number
from ranvier.scaling.bootstrap import Interval
from ranvier.scaling.laws import FittedHull, FittedLaw, ScalingLaws
from ranvier.scaling.prescription import MAX_DEPTH, MAX_WIDTH, Prescription

COST_NAMES = {"flops": "C", "device_seconds": "t"}
SIZE_NAMES = {"parameters": "N", "tokens": "D", "width": "width", "depth": "depth"}


def format_interval(bounds: Interval, form: str = ".3f") -> str:
    """An interval as text."""
    return f"[{bounds.low:{form}}, {bounds.high:{form}}]"


def format_count(value: float) -> str:
    """A number of parameters, tokens or FLOPs."""
    if value >= 1e15:
        return f"{value:.3g}"
    return format_number(value)


def hull_lines(hull: FittedHull) -> list[str]:
    """Exponents of all sizes against the cost, with intervals."""
    cost = COST_NAMES[hull.law.cost]
    unit = {"flops": "FLOPs", "device_seconds": "device time"}[hull.law.cost]
    lines = [
        f"  hull by {unit}: {len(hull.law.rows)} losses, width/depth {hull.law.aspect_ratio:.0f}"
    ]
    for name, law in hull.law.laws.items():
        interval = format_interval(hull.exponent_interval(name))
        lines.append(f"    {SIZE_NAMES[name]:<6} ~ {cost}^{law.exponent:.4f}  {interval}")
    return lines


def law_lines(fitted: FittedLaw) -> list[str]:
    """Parameters of a law, with intervals."""
    law = fitted.law
    lines = [f"  law of {fitted.form.name}: objective {law.objective:.4g}"]
    for i, name in enumerate(fitted.form.terms):
        interval = format_interval(fitted.exponent_interval(i))
        factor = math.exp(law.coefficients[i])
        term = f"{factor:.4g} · {SIZE_NAMES[name]}^{-law.exponents[i]:.4f}"
        lines.append(f"    {term:<28} exponent {interval}")
    constant = format_interval(fitted.constant_interval)
    lines.append(f"    {law.irreducible_loss:<28.4g} irreducible loss {constant}")
    if not math.isnan(law.compute_exponent):
        interval = format_interval(fitted.compute_exponent_interval)
        lines.append(f"    N ~ C^{law.compute_exponent:.4f} {interval}")
    return lines


def prescription_lines(found: Sequence[Prescription]) -> list[str]:
    """A table of prescriptions."""
    head = ("law", "model", "parameters", "tokens", "loss")
    rows = [head, *(prescription_cells(one) for one in found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    at_limit = dict.fromkeys(one.size for one in found if one.is_at_limit)
    if at_limit:
        lines.append(
            f"  {', '.join(at_limit)}: a larger shape may be better. Only widths up to "
            f"{MAX_WIDTH:,} and depths up to {MAX_DEPTH} are compared. Use a smaller budget."
        )
    return lines


def prescription_cells(one: Prescription) -> tuple[str, str, str, str, str]:
    """The cells of a row of a table of prescriptions."""

    def with_interval(value: float, bounds: Interval) -> str:
        return f"{format_count(value)} [{format_count(bounds.low)}, {format_count(bounds.high)}]"

    loss = ""
    if one.loss is not None and one.loss_interval is not None:
        loss = f"{one.loss:.3f} {format_interval(one.loss_interval)}"
    return (
        one.law,
        one.size,
        with_interval(one.parameters, one.parameters_interval),
        with_interval(one.tokens, one.tokens_interval),
        loss,
    )


def text_lines(name: str, laws: ScalingLaws) -> list[str]:
    """Everything that was fitted to a table, as text."""
    runs = len({*laws.table.run_index.tolist()})
    lines = [f"{name} losses: {len(laws.table)} of {runs} runs; intervals cover 90 %"]
    for hull in laws.hulls.values():
        lines += hull_lines(hull)
    for fitted in laws.laws:
        lines += law_lines(fitted)
    lines += [f"  {law}: not fitted, {why}" for law, why in laws.refused.items()]
    return lines


# ---- JSON ---------------------------------------------------------------------------------


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _bounds(bounds: Interval) -> list[float | None]:
    return [_number(bounds.low), _number(bounds.high)]


def laws_to_dict(laws: ScalingLaws) -> dict[str, Any]:
    """Returns fitted laws as JSON types."""
    return {
        "losses": len(laws.table),
        "runs": sorted({laws.table.runs[i] for i in laws.table.run_index.tolist()}),
        "hulls": {cost: _hull_to_dict(one) for cost, one in laws.hulls.items()},
        "laws": [_law_to_dict(one) for one in laws.laws],
        "not_fitted": dict(laws.refused),
    }


def _hull_to_dict(hull: FittedHull) -> dict[str, Any]:
    return {
        "rows": list(hull.law.rows),
        "aspect_ratio": hull.law.aspect_ratio,
        "exponents": {name: _number(law.exponent) for name, law in hull.law.laws.items()},
        "intercepts": {name: _number(law.intercept) for name, law in hull.law.laws.items()},
        "exponent_intervals": {
            name: _bounds(hull.exponent_interval(name)) for name in hull.law.laws
        },
    }


def _law_to_dict(fitted: FittedLaw) -> dict[str, Any]:
    law = fitted.law
    terms = fitted.form.terms
    return {
        "terms": list(terms),
        "huber": fitted.form.huber,
        "objective": law.objective,
        "exponents": dict(zip(terms, law.exponents, strict=True)),
        "exponent_intervals": {
            name: _bounds(fitted.exponent_interval(i)) for i, name in enumerate(terms)
        },
        "log_coefficients": dict(zip(terms, law.coefficients, strict=True)),
        "irreducible_loss": law.irreducible_loss,
        "irreducible_loss_interval": _bounds(fitted.constant_interval),
        "compute_exponent": _number(law.compute_exponent),
        "compute_exponent_interval": _bounds(fitted.compute_exponent_interval),
    }


def prescription_to_dict(one: Prescription) -> dict[str, Any]:
    """Returns a prescription as JSON types."""
    loss = None if one.loss_interval is None else _bounds(one.loss_interval)
    return {
        "law": one.law,
        "budget": one.budget,
        "unit": one.unit,
        "size": one.size,
        "width": one.width,
        "depth": one.depth,
        "is_at_limit": one.is_at_limit,
        "parameters": one.parameters,
        "parameters_interval": _bounds(one.parameters_interval),
        "tokens": one.tokens,
        "tokens_interval": _bounds(one.tokens_interval),
        "loss": one.loss,
        "loss_interval": loss,
    }
