"""Reach: the fewest nodes for a goal, searched and told."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence, Set
from dataclasses import replace

from ranvier.errors import PlanError
from ranvier.html.figures import percent, short
from ranvier.planner import goal, nearest, request, told
from ranvier.planner.cluster import Cluster
from ranvier.planner.command import Planned, searched
from ranvier.planner.goal import Goal, Reached
from ranvier.planner.search import Result, alike
from ranvier.run import Run
from ranvier.settings import ModelConfig


def reach(wanted: Planned, machine: Cluster, given: Set[str], carried: Sequence[str]) -> int:
    """Search the fewest nodes for the goal, and say what was found."""
    began = time.perf_counter()
    aim = goal.parse(wanted.goal)
    run, words = _meant(wanted, aim)
    made: dict[int, list[str]] = {}
    whole: dict[int, Result] = {}  # of all layouts

    def searched_on(nodes: int, *, all_of_them: bool = False) -> Result | None:
        there = machine.of(nodes=nodes)
        own, made[nodes] = request.assumed(run, there, given)
        wish = request.wish_of(own, there, given, precision=wanted.precision)
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
        own, _ = request.assumed(run, largest, given)
        wish = request.wish_of(own, largest, given, precision=wanted.precision)
        raise PlanError(nearest.problems(searched(wish)))
    reached = goal.surer(reached, aim, searched_on(reached.nodes, all_of_them=True))
    spent = time.perf_counter() - began
    assumed = made[reached.nodes]
    told.say(reached.result, wanted, [*carried, *words], assumed)
    if "-" not in (wanted.json, wanted.html):
        print("", *_told(aim, reached), f"({spent:.1f} s)", sep="\n")
    return 0


def _progress(reached: Reached) -> None:
    """Say on a terminal what was tried."""
    if sys.stderr.isatty():
        days = reached.seconds / goal.DAY
        print(f"{reached.nodes} nodes: {days:.3g} days", file=sys.stderr, flush=True)


def _meant(run: Run, aim: Goal) -> tuple[Run, list[str]]:
    """The run with the model of a goal, and the words that say so."""
    if aim.size:
        return replace(run, model=ModelConfig.of(aim.size)), [f"--model.size {aim.size}"]
    if aim.parameters:
        config = goal.shape(aim.parameters)
        changes = {name: getattr(config, name) for name in goal.SHAPE}
        model = replace(ModelConfig.of("llama3-8b"), **changes)
        words = [f"--model.{name.replace('_', '-')} {value}" for name, value in changes.items()]
        return replace(run, model=model), ["--model.size llama3-8b", *words]
    return run, []


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
