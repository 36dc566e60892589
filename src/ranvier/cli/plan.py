"""`ranvier plan`: search the fastest layouts; without torch where the model has a built-in name.

What only presents a result is imported when there is one, so that a search begins sooner.
"""

from __future__ import annotations

import os
from collections.abc import Sequence, Set
from dataclasses import dataclass

from ranvier.config.run import RunConfig
from ranvier.errors import PlanError
from ranvier.planner import cluster as clusters
from ranvier.planner import output_files, request
from ranvier.planner.cluster import Cluster
from ranvier.planner.request import Precision
from ranvier.planner.search import SearchRequest, SearchResult, search_layouts

MAX_WORKERS = 2


@dataclass(frozen=True, kw_only=True)
class PlanOptions(RunConfig):
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
    """What matrix products are computed in; empty: as train.dtype and train.float8 say."""
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


def run_plan_command(wanted: PlanOptions, given: Set[str], carried: Sequence[str]) -> int:
    """Search, and print the result.

    given: dotted names of settings that the user gave; carried: words of the command line that the
    printed train command repeats.
    """
    counts = {"top": wanted.top, "nodes": wanted.nodes, "devices": wanted.devices}
    # All problems are collected, so that one error lists them together.
    odd = [f"{name}={n}" for name, n in counts.items() if n is not None and n < 1]
    if odd:
        wrong = [f"{', '.join(odd)}. These are counts. Use 1 or more."]
    else:
        wrong = []
    wrong += wanted.find_problems()
    if wrong:
        raise PlanError(wrong)
    # A search can take long: fail before it if its result cannot be written.
    output_files.check_outputs(wanted.json, wanted.html)
    if wanted.goal or "goal" in given:
        from ranvier.cli import plan_goal

        return plan_goal.plan_for_goal(wanted, given, carried)
    wish, assumed = request_from_options(wanted, given)
    result = search_with_cache(wish, cache=wanted.cache)
    from ranvier.cli import plan_text

    if not result.feasible_candidates:
        plan_text.raise_infeasible(result, wanted, given)
    plan_text.report_result(result, wanted, carried, assumed)
    return 0


def request_from_options(wanted: PlanOptions, given: Set[str]) -> tuple[SearchRequest, list[str]]:
    """The search request, and options for settings that the user did not give."""
    machine = resolve_cluster(wanted)
    run, assumed = request.assume_batch_and_seq(wanted, machine, given)
    return request.build_request(run, machine, given, precision=wanted.precision), assumed


def search_with_cache(wish: SearchRequest, *, cache: bool = True) -> SearchResult:
    """All layouts, from the cache of an earlier search or searched on several processes.

    The best layout so far is shown meanwhile.
    """
    # Imported here: a process that searches nothing starts sooner.
    from ranvier.planner import result_cache
    from ranvier.planner.search_progress import SearchProgressPrinter

    if cache:
        known = result_cache.load_result(wish)
    else:
        known = None
    if known is not None:
        return known
    with SearchProgressPrinter() as lines:
        workers = min(MAX_WORKERS, len(os.sched_getaffinity(0)))
        result = search_layouts(wish, workers=workers, report=lines.report_best)
    result_cache.store_result(result)
    return result


def resolve_cluster(wanted: PlanOptions) -> Cluster:
    """The cluster that is meant: by name, from a file, or this machine as it was measured."""
    if not wanted.cluster:
        from ranvier.planner import cluster

        found = cluster.load_measured_cluster()
        if found is None:
            raise PlanError(
                "No cluster is given and this machine was never measured. A plan needs to know "
                "devices and links. Use --cluster with one of "
                f"{', '.join(clusters.cluster_names())} or a TOML file, or run `ranvier measure` "
                "first."
            )
    else:
        found = clusters.load_cluster(wanted.cluster)
    if wanted.devices:
        return found.with_size(devices=wanted.devices)
    if wanted.nodes:
        return found.with_size(nodes=wanted.nodes)
    return found
