"""Command: `ranvier plan`: what is asked, searched; without torch where the model has a name.

What only tells of a result is imported when there is one: a search begins sooner.
"""

from __future__ import annotations

import os
from collections.abc import Sequence, Set
from dataclasses import dataclass

from ranvier.config.run import Run
from ranvier.errors import PlanError
from ranvier.planner import cluster as clusters
from ranvier.planner import output_files, request
from ranvier.planner.cluster import Cluster
from ranvier.planner.request import Precision
from ranvier.planner.search import Result, Wish, search

WORKERS = 2


@dataclass(frozen=True, kw_only=True)
class Planned(Run):
    """The fastest layouts of a run on a cluster, predicted, and why.

    Settings of the plan that are given (in the file or as options) stay; the others are searched.
    """

    cluster: str = ""
    """A built-in name (such as dgx-h100; an unknown one lists all) or a TOML file as `ranvier
    measure` writes it; empty: this machine, as it was measured."""
    nodes: int | None = None
    """Nodes of the cluster; not given: as its description says."""
    devices: int | None = None
    """Devices in its place, where a node is not used whole."""
    top: int = 10
    """Layouts in the table."""
    precision: Precision = ""
    """What matrix products are computed in; empty: as train.dtype and train.fp8 say."""
    goal: str = ""
    """Tokens within a time, such as "70B, 2T tokens, 30 days" or "100B tokens, 2 weeks": the fewest
    nodes that reach it (up to --nodes, if given)."""
    json: str = ""
    """File to write the result to as JSON; -: print it instead of the table."""
    html: str = ""
    """File of a page with charts of all layouts, which needs nothing else; -: print it."""
    cache: bool = True
    """Whether the answer to a question that was asked before is taken from the user's cache; false:
    search again."""
    calibrate: str = ""
    """In place of a plan: fold what a RUN has measured into the file of the cluster."""


def plan(wanted: Planned, given: Set[str], carried: Sequence[str]) -> int:
    """Search, and say what was found.

    given: dotted names of settings that were given by hand; carried: words of the command line that
    the command to run it repeats.
    """
    counts = {"top": wanted.top, "nodes": wanted.nodes, "devices": wanted.devices}
    odd = [f"{name}={n}" for name, n in counts.items() if n is not None and n < 1]
    wrong = [f"{', '.join(odd)}. These are counts. Use 1 or more."] if odd else []
    wrong += wanted.problems()
    if wrong:
        raise PlanError(wrong)
    output_files.check(wanted.json, wanted.html)
    if wanted.goal or "goal" in given:
        from ranvier.cli import plan_goal

        return plan_goal.reach(wanted, given, carried)
    wish, assumed = asked(wanted, given)
    result = searched(wish, cache=wanted.cache)
    from ranvier.cli import plan_text

    if not result.found:
        plan_text.refuse(result, wanted, given)
    plan_text.say(result, wanted, carried, assumed)
    return 0


def asked(wanted: Planned, given: Set[str]) -> tuple[Wish, list[str]]:
    """What is searched, and words for what nobody gave."""
    machine = machine_of(wanted)
    run, assumed = request.assumed(wanted, machine, given)
    return request.wish_of(run, machine, given, precision=wanted.precision), assumed


def searched(wish: Wish, *, cache: bool = True) -> Result:
    """All layouts, as an earlier search has found them, or on as many processes as there are.

    Who waits for it sees the best so far.
    """
    from ranvier.planner import result_cache  # a process that searches nothing starts sooner
    from ranvier.planner.search_progress import Lines

    known = result_cache.load(wish) if cache else None
    if known is not None:
        return known
    with Lines() as lines:
        workers = min(WORKERS, len(os.sched_getaffinity(0)))
        result = search(wish, workers=workers, report=lines.report)
    result_cache.store(result)
    return result


def machine_of(wanted: Planned) -> Cluster:
    """The cluster that is meant: a name, a file, or this machine as it was measured."""
    if not wanted.cluster:
        from ranvier.planner import local_cluster

        found = local_cluster.measured()
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
