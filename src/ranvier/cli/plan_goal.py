"""`ranvier plan --goal`: finds the fewest nodes that reach a goal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence, Set
from dataclasses import replace

from ranvier.cli import plan, plan_text
from ranvier.cli.plan import PlanOptions
from ranvier.config.kinds import named_model
from ranvier.html.number_format import format_number, format_percent
from ranvier.planner import goal
from ranvier.planner.goal import Goal, GoalResult
from ranvier.planner.search import SearchRequest, SearchResult, carry_over_layouts
from ranvier.planner.suggestions import is_divisible
from ranvier.system.terminal import print

CARRIED_NODE_COUNTS = 2
"""Number of node counts whose best layouts are carried over to another node count."""


class ClusterNodeSearch:
    """Searches a run on different numbers of nodes of a cluster."""

    def __init__(self, wanted: PlanOptions, given: Set[str]) -> None:
        self.options = wanted
        self.given_settings = given
        self.devices_per_node = plan.resolve_cluster(
            replace(wanted, nodes=1, devices=None)
        ).per_node
        self.full_results: dict[int, SearchResult] = {}
        """Results of full searches in which some layout fits."""
        self.quick_results: dict[int, SearchResult] = {}

    def options_for_nodes(self, nodes: int) -> PlanOptions:
        """Returns the options for `nodes` nodes, or for the given part of a node."""
        part = self.options.devices is not None and self.options.devices < self.devices_per_node
        if part:
            return self.options
        return replace(self.options, nodes=nodes, devices=None)

    def request_for_nodes(self, nodes: int) -> SearchRequest:
        """Returns the search request for `nodes` nodes."""
        return plan.request_from_options(self.options_for_nodes(nodes), self.given_settings)[0]

    def can_share_evenly(self, nodes: int) -> bool:
        """Whether `nodes` nodes can divide the job evenly."""
        return is_divisible(self.request_for_nodes(nodes))

    def quick_search(self, nodes: int) -> SearchResult | None:
        """Carries over the best layouts of searched node counts; searches fully if there is
        none."""
        if nodes in self.full_results or not self.full_results:
            return self.full_search(nodes)
        # Nearest by ratio, because layouts scale with the number of nodes.
        near = sorted(self.full_results, key=lambda n: (abs(math.log(n / nodes)), n))[
            :CARRIED_NODE_COUNTS
        ]
        self.quick_results[nodes] = carry_over_layouts(
            self.request_for_nodes(nodes), [self.full_results[n] for n in near]
        )
        if self.quick_results[nodes].feasible_candidates:
            return self.quick_results[nodes]
        return None

    def full_search(self, nodes: int) -> SearchResult | None:
        """Returns all layouts, including those of a quick search."""
        if nodes not in self.full_results:
            result = plan.search_with_cache(self.request_for_nodes(nodes), cache=self.options.cache)
            # A layout that was carried over may not be among those of the full search.
            if nodes in self.quick_results:
                looked = self.quick_results[nodes].feasible_candidates
            else:
                looked = ()
            every = {one.candidate: one for one in (*looked, *result.feasible_candidates)}
            if not every:
                return None
            found = tuple(sorted(every.values(), key=lambda one: one.sort_key))
            self.full_results[nodes] = replace(result, feasible_candidates=found)
        return self.full_results[nodes]


def plan_for_goal(wanted: PlanOptions, given: Set[str], carried: Sequence[str]) -> int:
    """Searches the fewest nodes for the goal, and prints the result."""
    began = time.perf_counter()
    aim = goal.parse_goal(wanted.goal)
    run, words = _apply_goal_model(wanted, aim)
    machine = plan.resolve_cluster(wanted)
    searches = ClusterNodeSearch(run, given)
    # A given size of the cluster is an upper bound.
    if wanted.nodes or wanted.devices:
        most = machine.nodes
    else:
        most = goal.MAX_NODES
    peak = machine.device.peak.get("bf16") or max(machine.device.peak.values())
    # An estimate from the FLOPs of the goal starts the search near the answer.
    first = goal.guess_nodes(aim, run.model.num_parameters, peak * machine.per_node)
    reached = goal.find_fewest_nodes(aim, searches, first=first, most=most, told=_print_progress)
    if reached is None:
        whole = plan.search_with_cache(searches.request_for_nodes(most), cache=wanted.cache)
        plan_text.raise_infeasible(whole, searches.options_for_nodes(most), given)
    spent = time.perf_counter() - began
    _, assumed = plan.request_from_options(searches.options_for_nodes(reached.nodes), given)
    plan_text.report_result(reached.result, wanted, [*carried, *words], assumed)
    if "-" not in (wanted.json, wanted.html):
        print(
            "",
            *_describe_goal(aim, reached, limited=most < goal.MAX_NODES),
            f"({spent:.1f} s)",
            sep="\n",
        )
    return 0


def _print_progress(reached: GoalResult) -> None:
    """Prints each attempt, only on a terminal."""
    if sys.stderr.isatty():
        days = reached.seconds / goal.SECONDS_PER_DAY
        print(f"{reached.nodes} nodes: {days:.3g} days", file=sys.stderr, flush=True)


def _apply_goal_model(run: PlanOptions, aim: Goal) -> tuple[PlanOptions, list[str]]:
    """Returns the run with the model of a goal, and the options that set it."""
    if aim.size:
        return replace(run, model=named_model(aim.size)), [f"--model.size {aim.size}"]
    if aim.parameters:
        config = goal.llama_like_config(aim.parameters)
        # Everything but the shape is taken from Llama 3 8B.
        changes = {name: getattr(config, name) for name in goal.SHAPE_FIELDS}
        model = replace(named_model("llama3-8b"), **changes)
        words = [f"--model.{name.replace('_', '-')} {value}" for name, value in changes.items()]
        return replace(run, model=model), ["--model.size llama3-8b", *words]
    return run, []


def _describe_goal(aim: Goal, reached: GoalResult, *, limited: bool) -> list[str]:
    """Describes what a goal takes, or by how much it is missed.

    limited: whether the user limited the number of nodes.
    """
    days = reached.seconds / goal.SECONDS_PER_DAY
    wanted = aim.seconds / goal.SECONDS_PER_DAY
    devices = reached.result.request.world_size
    mfu = format_percent(reached.result.best.prediction.mfu)
    cost = f"{reached.device_hours:,.0f} device hours, MFU {mfu}"
    what = f"{format_number(aim.tokens)} tokens in {days:.4g} days"
    nodes = f"{reached.nodes} node{'s' * (reached.nodes > 1)} ({devices} devices)"
    if reached.meets_goal:
        less = ""
        if reached.next_fewer:
            less = (
                f"; {reached.next_fewer[0]} would take "
                f"{reached.next_fewer[1] / goal.SECONDS_PER_DAY:.4g}"
            )
        return [
            f"Goal: {nodes}, the fewest possible, process {what} (limit {wanted:.3g}{less}), "
            f"{cost}."
        ]
    rest = "A larger --plan.global-batch lets more devices take part."
    if limited:
        rest = "Remove --nodes and --devices to see how many nodes it takes."
    return [
        f"The goal of {wanted:.3g} days cannot be reached with these settings. The fastest is "
        f"{nodes} with {what}, {cost}. {rest}"
    ]
