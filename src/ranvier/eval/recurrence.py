"""Scores of a model with recurrent depth against the number of iterations of its core."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ranvier.config.arguments import EvalOptions
from ranvier.config.engine import RecurrenceOptions
from ranvier.errors import PlanError
from ranvier.eval.model_server import ModelServer
from ranvier.html.page import render_document, render_section
from ranvier.html.plot import Series, line_plot

Results = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Results by kind of evaluation, name and metric."""
MEAN_ITERATIONS = "mean_iterations"
"""Metric of evaluations with early exits."""
MAX_RECURRENCE = 4096
UNPLOTTED = ("documents", "tokens", "bytes", "samples", "version")
"""Metrics that do not depend on the model."""


def parse_recurrences(wanted: EvalOptions) -> tuple[int, ...]:
    """Returns the numbers of iterations of --recurrence, in ascending order."""
    try:
        found = sorted({int(word) for word in wanted.recurrence.split(",") if wanted.recurrence})
    except ValueError:
        found = [0]
    if found and not 1 <= found[0] <= found[-1] <= MAX_RECURRENCE:
        raise PlanError(
            f"recurrence={wanted.recurrence!r} is invalid. It must be integers from 1 to "
            f"{MAX_RECURRENCE}, separated by commas. Use e.g. 1,4,8,16,32."
        )
    return tuple(found)


def check_options(wanted: EvalOptions, mean_recurrence: int) -> None:
    """Raises if the options of the recurrence do not fit a model or the evaluation."""
    counts = parse_recurrences(wanted)
    recurrence_options(wanted, counts[0] if counts else -1).check_recurrence(mean_recurrence)
    if len(counts) > 1 and not (wanted.tasks or wanted.corpus):
        raise PlanError(
            f"recurrence={wanted.recurrence!r} has several numbers. Only --tasks and --corpus "
            "compare them. Use one number."
        )


def recurrence_options(wanted: EvalOptions, recurrence: int) -> RecurrenceOptions:
    """Returns the options of the engine for one number of iterations."""
    return RecurrenceOptions(recurrence=recurrence, exit=wanted.exit, kv_share=wanted.kv_share)


def evaluate_recurrences(
    served: ModelServer,
    wanted: EvalOptions,
    mean_recurrence: int,
    evaluate: Callable[[], Results],
) -> dict[int, Results]:
    """Returns the results of an evaluation with each number of iterations.

    With early exits they have the mean number of iterations as another metric.
    Communicates: the options to all ranks, then as the evaluations.
    """
    found: dict[int, Results] = {}
    for count in parse_recurrences(wanted) or (-1,):
        options = recurrence_options(wanted, count)
        served.set_recurrence(options)
        results = evaluate()
        if served.num_iterated_tokens:
            mean = served.num_iterations / served.num_iterated_tokens
            results = {
                kind: {name: {**row, MEAN_ITERATIONS: mean} for name, row in rows.items()}
                for kind, rows in results.items()
            }
        found[options.num_iterations(mean_recurrence)] = results
    return found


def tabulate_recurrences(
    found: Mapping[int, Results],
) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns a table for each evaluated name: a row for each number of iterations."""
    tables: dict[str, dict[str, dict[str, Any]]] = {}
    for count, results in found.items():
        for rows in results.values():
            for name, row in rows.items():
                tables.setdefault(name, {})[str(count)] = dict(row)
    return tables


def render_page(title: str, tables: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Returns an HTML page with a plot of each metric against the number of iterations."""
    sections = []
    for name, rows in tables.items():
        metrics = dict.fromkeys(metric for row in rows.values() for metric in row)
        counts = [float(count) for count in rows]
        plots = []
        for metric in metrics:
            values = [row.get(metric) for row in rows.values()]
            numbers = [value if isinstance(value, (int, float)) else None for value in values]
            if metric not in UNPLOTTED and any(number is not None for number in numbers):
                series = [Series(metric, counts, numbers, style="dots")]
                plots.append(line_plot(series, title=metric, x_label="iterations", y_label=metric))
        sections.append(render_section(name, *plots))
    return render_document(title, "".join(sections))
