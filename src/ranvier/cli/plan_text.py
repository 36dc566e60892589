"""Output of `ranvier plan`: tables, JSON and HTML."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any, NoReturn

from ranvier.cli import plan
from ranvier.cli.plan import PlanOptions
from ranvier.config import run as runs
from ranvier.errors import PlanError
from ranvier.html.number_format import format_number
from ranvier.planner import explain
from ranvier.planner.baselines import PredictedCandidate, find_baselines, layout_family
from ranvier.planner.output_files import write_output
from ranvier.planner.request import default_batch
from ranvier.planner.search import SearchRequest, SearchResult
from ranvier.system.terminal import print


def search_title(wish: SearchRequest) -> str:
    """Returns the title of a search: model, cluster and batch."""
    job = wish.workload
    machine = wish.cluster
    name = job.model.name or "model"
    return (
        f"{name} ({format_number(job.model.num_parameters)} parameters) on {machine.nodes} x "
        f"{machine.per_node} {machine.device.name} ({machine.name}), {job.batch} sequences of "
        f"{job.seq} tokens per step, {'fp8' if wish.fp8 else job.dtype}"
    )


def report_result(
    result: SearchResult, wanted: PlanOptions, carried: Sequence[str], assumed: Sequence[str]
) -> None:
    """Prints and writes all results. assumed: options for settings that the user did not give."""
    told = explain.train_command(
        result.best, result.request, _drop_batch_option([*carried, *assumed])
    )
    title = search_title(result.request)
    notes = []
    if assumed:
        notes.append(_describe_assumptions(result.request, assumed))
    if wanted.json:
        write_output(
            wanted.json, json.dumps(result_to_dict(result, wanted.top, told), indent=2) + "\n"
        )
    if wanted.html:
        # Imported here: it takes 10 ms, which other outputs can avoid.
        from ranvier.planner.html_report import render_report

        write_output(
            wanted.html,
            render_report(result, title=title, top=wanted.top, command=told, notes=notes),
        )
    # stdout contains only the document.
    if wanted.json == "-" or wanted.html == "-":
        return
    print(title)
    print(*notes, sep="\n", end="\n" if notes else "")
    if result.num_rejected_grids:
        rejected = (
            f"; {result.num_rejected_grids:,} grids were left out because their degrees do not "
            "divide the model or the batch"
        )
    else:
        rejected = ""
    print(
        f"{result.num_candidates:,} layouts of {result.num_grids:,} grids in "
        f"{result.search_seconds:.1f} s"
        f"{' (cached; --cache false searches again)' if result.from_cache else ''}; "
        f"{len(result.feasible_candidates):,} fit{rejected}\n"
    )
    print(
        *explain.candidate_table(result, wanted.top),
        "",
        *explain.baseline_table(result),
        "",
        sep="\n",
    )
    print(*explain.explain_choice(result), "", told, sep="\n")
    for name in filter(None, (wanted.json, wanted.html)):
        print(f"written: {name}")


def _describe_assumptions(wish: SearchRequest, words: Sequence[str]) -> str:
    """Describes settings that the user did not give, and why they are assumed."""
    job = wish.workload
    reason = "typical for runs of this size"
    if any(word.startswith("--plan.global-batch") for word in words):
        _, reason = default_batch(job.model.num_parameters, job.seq, wish.world_size)
    return f"Assumed {' '.join(words)} ({reason})."


def raise_infeasible(result: SearchResult, wanted: PlanOptions, given: Set[str]) -> NoReturn:
    """Raises an error with the reason why no layout fits, and with remedies."""
    # Needed on this path only.
    from ranvier.planner import suggestions

    # Builds the same request with one setting changed. A name without a section is a size of the
    # cluster.
    def again(name: str, value: int) -> SearchRequest:
        section, _, key = name.rpartition(".")
        if section:
            other = wanted
        else:
            other = replace(wanted, nodes=None, devices=None)
        change = {section: {key: value}} if section else {key: value}
        return plan.request_from_options(runs.apply_overrides(other, change), {*given, name})[0]

    problems = suggestions.explain_infeasible(result, again)
    if wanted.json:
        write_output(wanted.json, json.dumps({"problems": problems}, indent=2) + "\n")
    raise PlanError(problems)


def _drop_batch_option(words: Sequence[str]) -> list[str]:
    """Returns the words without the batch, which is part of the settings of every layout."""
    return [word for word in words if not word.startswith("--plan.global-batch")]


def result_to_dict(result: SearchResult, top: int, told: str) -> dict[str, Any]:
    """Returns a search as JSON types."""
    wish = result.request
    others = find_baselines(result.feasible_candidates, result.request.cluster.per_node)
    job = {"model": wish.workload.model.name, "parameters": wish.workload.model.num_parameters}
    job |= {"seq": wish.workload.seq, "batch": wish.workload.batch, "dtype": wish.workload.dtype}
    return {
        "job": job,
        "cluster": {
            "name": wish.cluster.name,
            "device": wish.cluster.device.name,
            "nodes": wish.cluster.nodes,
            "devices": wish.cluster.num_devices,
        },
        "layouts": result.num_candidates,
        "fit": len(result.feasible_candidates),
        "seconds": round(result.search_seconds, 3),
        "cached": result.from_cache,
        "why": explain.explain_choice(result),
        "command": told,
        "best": _candidate_to_dict(result.best, wish),
        "top": [
            _candidate_to_dict(one, wish)
            for one in explain.distinct_candidates(result.feasible_candidates, top)
        ],
        "baselines": {name: _candidate_to_dict(one, wish) for name, one in others.items()},
    }


def _candidate_to_dict(found: PredictedCandidate, wish: SearchRequest) -> dict[str, Any]:
    it = found.prediction
    return {
        "settings": {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in explain.candidate_settings(found, wish).items()
        },
        "family": layout_family(found.plan),
        "seconds": it.step_seconds,
        "interval": list(it.interval),
        "tokens_per_second": it.tokens_per_second,
        "mfu": it.mfu,
        "parts": dict(it.seconds_by_part),
        "memory": it.memory.to_dict(),
        "memory_bytes": it.memory.total_bytes,
        "limit_bytes": it.limit,
    }
