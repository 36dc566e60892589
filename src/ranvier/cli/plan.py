"""`ranvier plan`: searches the fastest layouts; needs torch only for models without a built-in
name.

Modules that only present a result are imported when there is one, so that a search starts sooner.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from ranvier.config.run import RunConfig
from ranvier.errors import PlanError
from ranvier.planner import cluster as clusters
from ranvier.planner import document_lengths, output_files, request
from ranvier.planner.cluster import Cluster
from ranvier.planner.request import Precision
from ranvier.planner.search import SearchRequest, SearchResult, search_layouts

MAX_WORKERS = 2


@dataclass(frozen=True, kw_only=True)
class PlanOptions(RunConfig):
    """Predict the fastest layouts of a run on a cluster, and explain the choice.

    Settings of the plan that are given (in the file or as options) are fixed; the others are
    searched.
    """

    cluster: str = ""
    """Name of a built-in cluster (such as dgx-h100), or a TOML file from `ranvier measure`. If
    empty, this machine as measured. An unknown name prints all built-in names."""
    nodes: int | None = None
    """Number of nodes. The default is the number in the description of the cluster."""
    devices: int | None = None
    """Number of devices, instead of nodes, to use a part of a node."""
    top: int = 10
    """Number of layouts in the table."""
    precision: Precision = ""
    """Data type of the matrix products. If empty, derived from train.dtype and train.float8."""
    lengths: str = ""
    """Lengths of the documents that samples are packed with, which attention and context depend on:
    corpus (those of data.sources), or a text file with a length per line, optionally followed by
    the number of such documents. If empty, each sample is one document."""
    goal: str = ""
    """Number of tokens and a time limit, such as "70B, 2T tokens, 30 days" or "100B tokens, 2
    weeks". The planner finds the fewest nodes that reach it (at most --nodes, if given)."""
    json: str = ""
    """JSON file to write the result to. - prints it instead of the table."""
    html: str = ""
    """HTML file to write a self-contained page with charts of all layouts to. - prints it."""
    cache: bool = True
    """Use the cached result of an earlier identical search. false searches again."""
    calibrate: str = ""
    """Instead of planning, update the cluster file with the measurements of this RUN."""


def run_plan_command(wanted: PlanOptions, given: Set[str], carried: Sequence[str]) -> int:
    """Searches layouts and prints the result.

    given: dotted names of settings that the user gave; carried: options that the printed train
    command repeats.
    """
    counts = {"top": wanted.top, "nodes": wanted.nodes, "devices": wanted.devices}
    # All problems are collected, so that one error lists them together.
    odd = [f"{name}={n}" for name, n in counts.items() if n is not None and n < 1]
    if odd:
        wrong = [f"{', '.join(odd)} is out of range. Counts must be at least 1. Use 1 or more."]
    else:
        wrong = []
    wrong += wanted.find_problems()
    if wrong:
        raise PlanError(wrong)
    # A search can take long, so check first that its result can be written.
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
    """Returns the search request, and options for settings that the user did not give."""
    machine = resolve_cluster(wanted)
    run, assumed = request.assume_batch_and_seq(wanted, machine, given)
    lengths = read_document_lengths(wanted)
    wish = request.build_request(run, machine, given, precision=wanted.precision, lengths=lengths)
    return wish, assumed


def read_document_lengths(wanted: PlanOptions) -> Mapping[int, int] | None:
    """Returns the number of documents of each length, if they are asked for."""
    if not wanted.lengths:
        return None
    if not wanted.data.document_mask:
        raise PlanError(
            f"--lengths {wanted.lengths} with data.document_mask=False. Attention sees whole "
            "samples then. Use data.document_mask=True, or omit --lengths."
        )
    if wanted.lengths != "corpus":
        return document_lengths.read_histogram(wanted.lengths)
    # Reading a corpus takes longer than a search.
    from ranvier.data.corpus import count_document_lengths
    from ranvier.train.prepare_data import tokenize_corpora

    return count_document_lengths(tokenize_corpora(wanted))


def search_with_cache(wish: SearchRequest, *, cache: bool = True) -> SearchResult:
    """Returns all layouts, from the cache of an earlier search or searched on several processes.

    Shows the best layout so far during the search.
    """
    # Imported here, so that a process that does not search starts sooner.
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
    """Returns the requested cluster: by name, from a file, or this machine as measured."""
    if not wanted.cluster:
        from ranvier.planner import cluster

        found = cluster.load_measured_cluster()
        if found is None:
            raise PlanError(
                "No cluster is given, and this machine has not been measured. The planner needs "
                "the speed of devices and links. Use --cluster with one of "
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
