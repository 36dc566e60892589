"""Command: what `ranvier plan` prints and writes, without torch where the model has a name."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ranvier.errors import PlanError, WriteError
from ranvier.html.plot import percent, short
from ranvier.planner import cluster as clusters
from ranvier.planner import explain, goal, here, nearest, request
from ranvier.planner.cluster import Cluster
from ranvier.planner.goal import Goal, Reached
from ranvier.planner.request import Precision
from ranvier.planner.rivals import Found, family, rivals
from ranvier.planner.search import Result, Wish, alike, search
from ranvier.run import Run
from ranvier.settings import ModelConfig

WORKERS = 2


@dataclass(frozen=True)
class Wanted:
    """What is asked of the planner besides the run."""

    cluster: str = ""
    nodes: int = 0
    devices: int = 0
    top: int = 10
    precision: Precision = ""
    goal: str = ""
    json: str = ""
    html: str = ""


@dataclass(frozen=True)
class Asked:
    """A run and what of it was given by hand."""

    run: Run
    given: Set[str]
    """Dotted names of settings."""
    carried: Sequence[str]
    """Words of the command line that the command to run it repeats."""


def plan(asked: Asked, wanted: Wanted) -> int:
    """Search, and say what was found."""
    if wanted.top < 1 or wanted.nodes < 0 or wanted.devices < 0:
        raise PlanError(
            f"top={wanted.top}, nodes={wanted.nodes}, devices={wanted.devices}. These are "
            "counts. Use 1 or more."
        )
    machine = machine_of(wanted)
    if wanted.goal:
        return _reach(asked, wanted, machine)
    run, assumed = request.assumed(asked.run, machine, asked.given)
    wish = request.wish_of(run, machine, asked.given, precision=wanted.precision)
    result = searched(wish)
    _say(result, wanted, [*asked.carried, *assumed], _heading(wish), assumed)
    return 0


def searched(wish: Wish) -> Result:
    """All layouts, on as many processes as there are for it."""
    return search(wish, workers=min(WORKERS, len(os.sched_getaffinity(0))))


def machine_of(wanted: Wanted) -> Cluster:
    """The cluster that is meant: a name, a file, or this machine as it was measured."""
    if not wanted.cluster:
        found = here.measured()
        if found is None:
            raise PlanError(
                "No cluster is given and this machine was never measured. A plan needs to know "
                f"devices and links. Use --cluster with one of {', '.join(clusters.names())} or a "
                "TOML file, or run `ranvier measure` first."
            )
    else:
        found = clusters.cluster(wanted.cluster)
    if wanted.devices:
        return found.of(devices=wanted.devices)
    return found.of(nodes=wanted.nodes) if wanted.nodes else found


def _heading(wish: Wish) -> str:
    job, machine = wish.job, wish.cluster
    name = job.model.name or "model"
    return (
        f"{name} ({short(job.model.parameters)} parameters) on {machine.nodes} x "
        f"{machine.per_node} {machine.device.name} ({machine.name}), {job.batch} sequences of "
        f"{job.seq} tokens a step, {'fp8' if wish.fp8 else job.dtype}"
    )


def _say(
    result: Result, wanted: Wanted, carried: Sequence[str], heading: str, assumed: Sequence[str]
) -> None:
    """Print and write all that was found."""
    told = explain.command(result.best, result.wish, _without_batch(carried))
    notes = []
    if assumed:
        notes.append(f"Nobody gave {' '.join(assumed)}: assumed, as runs of this size use.")
    if wanted.json:
        _write(wanted.json, json.dumps(facts(result, wanted.top, told), indent=2) + "\n")
    if wanted.html:
        from ranvier.planner.page import page  # a hundredth of a second of every start

        _write(wanted.html, page(result, title=heading, top=wanted.top, command=told, notes=notes))
    if wanted.json == "-" or wanted.html == "-":
        return
    print(heading)
    print(*notes, sep="\n", end="\n" if notes else "")
    print(
        f"{result.count:,} layouts of {result.grids:,} grids in {result.seconds:.1f} s; "
        f"{len(result.found):,} fit; {result.refused:,} grids do not divide\n"
    )
    print(*explain.table(result, wanted.top), "", *explain.compared(result), "", sep="\n")
    print(*explain.why(result), "", told, sep="\n")
    for name in filter(None, (wanted.json, wanted.html)):
        print(f"written: {name}")


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


# ---- goals --------------------------------------------------------------------------------


def _reach(asked: Asked, wanted: Wanted, machine: Cluster) -> int:
    """The fewest nodes for a goal."""
    began = time.perf_counter()
    aim = goal.parse(wanted.goal)
    run, carried = _meant(asked, aim)
    made: dict[int, list[str]] = {}
    whole: dict[int, Result] = {}  # of all layouts

    def searched_on(nodes: int, *, all_of_them: bool = False) -> Result | None:
        there = machine.of(nodes=nodes)
        own, made[nodes] = request.assumed(run, there, asked.given)
        wish = request.wish_of(own, there, asked.given, precision=wanted.precision)
        if whole and not all_of_them:
            result = alike(wish, whole[min(whole, key=lambda n: abs(math.log(n / nodes)))])
            if result.found:
                return result
        if nodes not in whole:
            result = searched(wish)
            if not result.found:
                return None
            whole[nodes] = result
        return whole[nodes]

    fixed = wanted.nodes or (machine.nodes if wanted.devices else 0)
    peak = machine.device.peak.get("bf16") or max(machine.device.peak.values())
    first = goal.guess(aim, run.model.parameters, peak * machine.per_node)
    limit = fixed or goal.MOST
    reached = goal.fewest(aim, searched_on, first=first, most=limit, told=_progress)
    if reached is None:
        largest = machine.of(nodes=fixed or goal.MOST)
        own, _ = request.assumed(run, largest, asked.given)
        wish = request.wish_of(own, largest, asked.given, precision=wanted.precision)
        raise PlanError(nearest.problems(searched(wish)))
    reached = goal.surer(reached, aim, searched_on(reached.nodes, all_of_them=True))
    spent = time.perf_counter() - began
    assumed = made[reached.nodes]
    _say(reached.result, wanted, [*carried, *assumed], _heading(reached.result.wish), assumed)
    if "-" not in (wanted.json, wanted.html):
        print("", *_told(aim, reached), f"({spent:.1f} s)", sep="\n")
    return 0


def _progress(reached: Reached) -> None:
    """Say on a terminal what was tried."""
    if sys.stderr.isatty():
        days = reached.seconds / goal.DAY
        print(f"{reached.nodes} nodes: {days:.3g} days", file=sys.stderr, flush=True)


def _meant(asked: Asked, aim: Goal) -> tuple[Run, list[str]]:
    """The run with the model of a goal, and the words that say so."""
    carried, run = list(asked.carried), asked.run
    if aim.size:
        return replace(run, model=ModelConfig.of(aim.size)), [*carried, f"--model.size {aim.size}"]
    if aim.parameters:
        config = goal.shape(aim.parameters)
        changes = {name: getattr(config, name) for name in goal.SHAPE}
        model = replace(ModelConfig.of("llama3-8b"), **changes)
        words = [f"--model.{name.replace('_', '-')} {value}" for name, value in changes.items()]
        return replace(run, model=model), [*carried, "--model.size llama3-8b", *words]
    return run, carried


def _told(aim: Goal, reached: Reached) -> list[str]:
    """What a goal takes, or how far it is."""
    days, wanted = reached.seconds / goal.DAY, aim.seconds / goal.DAY
    devices = reached.result.wish.world
    mfu = percent(reached.result.best.prediction.mfu)
    cost = f"{reached.device_hours:,.0f} device hours, MFU {mfu}"
    what = f"{short(aim.tokens)} tokens in {days:.3g} days"
    if reached.enough:
        return [
            f"Goal: {reached.nodes} nodes ({devices} devices) are the fewest that read {what} "
            f"(asked: {wanted:.3g}): {cost}."
        ]
    return [
        f"The goal of {wanted:.3g} days is out of reach with these settings: {reached.nodes} nodes "
        f"({devices} devices) are fastest, {what}: {cost}. A larger --plan.batch lets more devices "
        "share it."
    ]
