"""Told: what `ranvier plan` prints and writes of a search."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from ranvier.cli import plan
from ranvier.cli.plan import Planned
from ranvier.config import run as runs
from ranvier.errors import PlanError, WriteError
from ranvier.html.number_format import short
from ranvier.planner import explain
from ranvier.planner.baselines import Found, family, rivals
from ranvier.planner.request import usual_batch
from ranvier.planner.search import Result, Wish
from ranvier.system.terminal import print


def heading(wish: Wish) -> str:
    job, machine = wish.job, wish.cluster
    name = job.model.name or "model"
    return (
        f"{name} ({short(job.model.parameters)} parameters) on {machine.nodes} x "
        f"{machine.per_node} {machine.device.name} ({machine.name}), {job.batch} sequences of "
        f"{job.seq} tokens a step, {'fp8' if wish.fp8 else job.dtype}"
    )


def say(result: Result, wanted: Planned, carried: Sequence[str], assumed: Sequence[str]) -> None:
    """Print and write all that was found. assumed: words for what nobody gave."""
    told = explain.command(result.best, result.wish, _without_batch([*carried, *assumed]))
    title = heading(result.wish)
    notes = []
    if assumed:
        notes.append(_assumed(result.wish, assumed))
    if wanted.json:
        _write(wanted.json, json.dumps(facts(result, wanted.top, told), indent=2) + "\n")
    if wanted.html:
        from ranvier.planner.html_report import page  # a hundredth of a second of every start

        _write(wanted.html, page(result, title=title, top=wanted.top, command=told, notes=notes))
    if wanted.json == "-" or wanted.html == "-":
        return
    print(title)
    print(*notes, sep="\n", end="\n" if notes else "")
    print(
        f"{result.count:,} layouts of {result.grids:,} grids in {result.seconds:.1f} s"
        f"{' (searched earlier; --cache false searches again)' if result.cached else ''}; "
        f"{len(result.found):,} fit; {result.refused:,} grids do not divide\n"
    )
    print(*explain.table(result, wanted.top), "", *explain.compared(result), "", sep="\n")
    print(*explain.why(result), "", told, sep="\n")
    for name in filter(None, (wanted.json, wanted.html)):
        print(f"written: {name}")


def _assumed(wish: Wish, words: Sequence[str]) -> str:
    """What nobody gave, and why it is taken."""
    job, reason = wish.job, "as runs of this size use"
    if any(word.startswith("--plan.batch") for word in words):
        _, reason = usual_batch(job.model.parameters, job.seq, wish.world)
    return f"Nobody gave {' '.join(words)}: assumed ({reason})."


def refuse(result: Result, wanted: Planned, given: Set[str]) -> NoReturn:
    """Say why nothing can run, and what could."""
    from ranvier.planner import suggestions  # only for this

    def again(name: str, value: int) -> Wish:
        section, _, key = name.rpartition(".")
        other = wanted if section else replace(wanted, nodes=None, devices=None)
        change = {section: {key: value}} if section else {key: value}
        return plan.asked(runs.changed(other, change), {*given, name})[0]

    problems = suggestions.problems(result, again)
    if wanted.json:
        _write(wanted.json, json.dumps({"problems": problems}, indent=2) + "\n")
    raise PlanError(problems)


def _without_batch(words: Sequence[str]) -> list[str]:
    """The batch is among the settings of every layout."""
    return [word for word in words if not word.startswith("--plan.batch")]


def _write(name: str, text: str) -> None:
    if name == "-":
        print(text, end="")
        return
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise WriteError(
            f"{name} cannot be written: {error.strerror}. Give another path."
        ) from None


def facts(result: Result, top: int, told: str) -> dict[str, Any]:
    """A search as JSON holds it."""
    wish, others = result.wish, rivals(result.found, result.wish.cluster.per_node)
    job = {"model": wish.job.model.name, "parameters": wish.job.model.parameters}
    job |= {"seq": wish.job.seq, "batch": wish.job.batch, "dtype": wish.job.dtype}
    return {
        "job": job,
        "cluster": {
            "name": wish.cluster.name,
            "device": wish.cluster.device.name,
            "nodes": wish.cluster.nodes,
            "devices": wish.cluster.devices,
        },
        "layouts": result.count,
        "fit": len(result.found),
        "seconds": round(result.seconds, 3),
        "cached": result.cached,
        "why": explain.why(result),
        "command": told,
        "best": _facts(result.best, wish),
        "top": [_facts(one, wish) for one in explain.distinct(result.found, top)],
        "rivals": {name: _facts(one, wish) for name, one in others.items()},
    }


def _facts(found: Found, wish: Wish) -> dict[str, Any]:
    it = found.prediction
    return {
        "settings": {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in explain.settings(found, wish).items()
        },
        "family": family(found.plan),
        "seconds": it.total,
        "interval": list(it.interval),
        "tokens_per_second": it.rate,
        "mfu": it.mfu,
        "parts": dict(it.parts),
        "memory": it.memory.facts(),
        "memory_bytes": it.memory.total,
        "limit_bytes": it.limit,
    }
