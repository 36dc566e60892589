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
from ranvier.planner.nearest import possible
from ranvier.planner.search import Result, Wish, alike
from ranvier.run import Run
from ranvier.settings import ModelConfig


class Clusters:
    """Searches of a run on more or fewer nodes of a machine."""

    def __init__(self, wanted: Planned, run: Run, machine: Cluster, given: Set[str]) -> None:
        self.wanted, self.run, self.machine, self.given = wanted, run, machine, given
        self.known: dict[int, Result] = {}
        """Of all layouts, where some fit."""

    def assumed(self, nodes: int) -> tuple[Run, list[str]]:
        """The run there, and words for what nobody gave."""
        return request.assumed(self.run, self.machine.of(nodes=nodes), self.given)

    def wish(self, nodes: int) -> Wish:
        """What is searched there."""
        run, there = self.assumed(nodes)[0], self.machine.of(nodes=nodes)
        return request.wish_of(run, there, self.given, precision=self.wanted.precision)

    def able(self, nodes: int) -> bool:
        """Whether so many nodes can share the job evenly."""
        return possible(self.wish(nodes))

    def quick(self, nodes: int) -> Result | None:
        """The best layouts of a number that was searched, carried over; else a search."""
        if nodes in self.known or not self.known:
            return self.whole(nodes)
        near = min(self.known, key=lambda n: (abs(math.log(n / nodes)), n))
        result = alike(self.wish(nodes), self.known[near])
        return result if result.found else self.whole(nodes)

    def whole(self, nodes: int) -> Result | None:
        """All layouts."""
        if nodes not in self.known:
            result = searched(self.wish(nodes))
            if not result.found:
                return None
            self.known[nodes] = result
        return self.known[nodes]


def reach(wanted: Planned, machine: Cluster, given: Set[str], carried: Sequence[str]) -> int:
    """Search the fewest nodes for the goal, and say what was found."""
    began = time.perf_counter()
    aim = goal.parse(wanted.goal)
    run, words = _meant(wanted, aim)
    on = Clusters(wanted, run, machine, given)
    most = wanted.nodes or (machine.nodes if wanted.devices else goal.MOST)
    peak = machine.device.peak.get("bf16") or max(machine.device.peak.values())
    first = goal.guess(aim, run.model.parameters, peak * machine.per_node)
    reached = goal.fewest(aim, on, first=first, most=most, told=_progress)
    if reached is None:
        raise PlanError(nearest.problems(searched(on.wish(most))))
    spent = time.perf_counter() - began
    told.say(reached.result, wanted, [*carried, *words], on.assumed(reached.nodes)[1])
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
