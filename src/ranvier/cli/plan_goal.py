"""Reach: the fewest nodes for a goal, searched and told."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence, Set
from dataclasses import replace

from ranvier.cli import plan, plan_text
from ranvier.cli.plan import Planned
from ranvier.config.sections import ModelConfig
from ranvier.html.number_format import percent, short
from ranvier.planner import goal
from ranvier.planner.goal import Goal, Reached
from ranvier.planner.search import Result, Wish, alike
from ranvier.planner.suggestions import possible
from ranvier.system.terminal import print

NEAREST = 2
"""Numbers of nodes whose best layouts are carried over to others."""


class Clusters:
    """Searches of a run on more or fewer nodes of a machine."""

    def __init__(self, wanted: Planned, given: Set[str]) -> None:
        self.wanted, self.given = wanted, given
        self.node = plan.machine_of(replace(wanted, nodes=1, devices=None)).per_node
        self.known: dict[int, Result] = {}
        """Of all layouts, where some fit."""
        self.looks: dict[int, Result] = {}

    def on(self, nodes: int) -> Planned:
        """What is asked of so many nodes, or of the part of one that was given."""
        part = self.wanted.devices is not None and self.wanted.devices < self.node
        return self.wanted if part else replace(self.wanted, nodes=nodes, devices=None)

    def wish(self, nodes: int) -> Wish:
        """What is searched there."""
        return plan.asked(self.on(nodes), self.given)[0]

    def able(self, nodes: int) -> bool:
        """Whether so many nodes can share the job evenly."""
        return possible(self.wish(nodes))

    def quick(self, nodes: int) -> Result | None:
        """The best layouts of a number that was searched, carried over; a search if none was."""
        if nodes in self.known or not self.known:
            return self.whole(nodes)
        near = sorted(self.known, key=lambda n: (abs(math.log(n / nodes)), n))[:NEAREST]
        self.looks[nodes] = alike(self.wish(nodes), [self.known[n] for n in near])
        return self.looks[nodes] if self.looks[nodes].found else None

    def whole(self, nodes: int) -> Result | None:
        """All layouts, and those of a look: one that was carried over may be the best."""
        if nodes not in self.known:
            result = plan.searched(self.wish(nodes), cache=self.wanted.cache)
            looked = self.looks[nodes].found if nodes in self.looks else ()
            every = {one.layout: one for one in (*looked, *result.found)}
            if not every:
                return None
            found = tuple(sorted(every.values(), key=lambda one: one.key))
            self.known[nodes] = replace(result, found=found)
        return self.known[nodes]


def reach(wanted: Planned, given: Set[str], carried: Sequence[str]) -> int:
    """Search the fewest nodes for the goal, and say what was found."""
    began = time.perf_counter()
    aim = goal.parse(wanted.goal)
    run, words = _meant(wanted, aim)
    machine, searches = plan.machine_of(wanted), Clusters(run, given)
    most = machine.nodes if wanted.nodes or wanted.devices else goal.MOST
    peak = machine.device.peak.get("bf16") or max(machine.device.peak.values())
    first = goal.guess(aim, run.model.parameters, peak * machine.per_node)
    reached = goal.fewest(aim, searches, first=first, most=most, told=_progress)
    if reached is None:
        whole = plan.searched(searches.wish(most), cache=wanted.cache)
        plan_text.refuse(whole, searches.on(most), given)
    spent = time.perf_counter() - began
    _, assumed = plan.asked(searches.on(reached.nodes), given)
    plan_text.say(reached.result, wanted, [*carried, *words], assumed)
    if "-" not in (wanted.json, wanted.html):
        print("", *_told(aim, reached, limited=most < goal.MOST), f"({spent:.1f} s)", sep="\n")
    return 0


def _progress(reached: Reached) -> None:
    """Say on a terminal what was tried."""
    if sys.stderr.isatty():
        days = reached.seconds / goal.DAY
        print(f"{reached.nodes} nodes: {days:.3g} days", file=sys.stderr, flush=True)


def _meant(run: Planned, aim: Goal) -> tuple[Planned, list[str]]:
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


def _told(aim: Goal, reached: Reached, *, limited: bool) -> list[str]:
    """What a goal takes, or how far it is. limited: no more nodes than given were tried."""
    days, wanted = reached.seconds / goal.DAY, aim.seconds / goal.DAY
    devices = reached.result.wish.world
    mfu = percent(reached.result.best.prediction.mfu)
    cost = f"{reached.device_hours:,.0f} device hours, MFU {mfu}"
    what = f"{short(aim.tokens)} tokens in {days:.4g} days"
    nodes = f"{reached.nodes} node{'s' * (reached.nodes > 1)} ({devices} devices)"
    if reached.enough:
        less = ""
        if reached.fewer:
            less = f"; {reached.fewer[0]} take {reached.fewer[1] / goal.DAY:.4g}"
        return [
            f"Goal: {nodes} are the fewest that read {what} (asked: {wanted:.3g}{less}): {cost}."
        ]
    rest = "A larger --plan.batch lets more devices share it."
    if limited:
        rest = "Leave --nodes and --devices out to see how many it takes."
    return [
        f"The goal of {wanted:.3g} days is out of reach with these settings: {nodes} "
        f"are fastest, {what}: {cost}. {rest}"
    ]
