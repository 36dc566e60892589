"""Chooses the layout of a run that leaves it open, with the planner.

If a plan on several ranks sets no degrees, the planner chooses them together with every other
setting of the plan (micro-batch, rank order, recomputation, ...) that has its default value; other
settings stay as they are. After a few steps the prediction is compared with the measured steps.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace

from ranvier import launch
from ranvier.comm.consensus import broadcast_text
from ranvier.config.plan import AXES, Plan
from ranvier.config.resolved_run import ResolvedRun, StepPrediction
from ranvier.config.run import RunConfig
from ranvier.cost.optimizer import OptimizerSpec
from ranvier.grid import HOST_CHANNEL, Grid
from ranvier.launch import ProcessInfo
from ranvier.planner import explain
from ranvier.planner.algorithm_choice import restrict_algorithms
from ranvier.planner.cluster import Cluster
from ranvier.planner.model_spec import resolve_model_spec
from ranvier.planner.predict import Prediction, Workload
from ranvier.planner.request import can_split_context
from ranvier.planner.search import DeviceOrHost, SearchRequest, SearchResult, search_layouts
from ranvier.planner.time.compute import FP8_SCALING
from ranvier.train.health.determinism import compiles_deterministically

SIMILAR_TIME_RATIO = 1.05
"""Predicted times up to this multiple of the best count as equal."""


def needs_planning(run: RunConfig, world: int) -> bool:
    """Whether the planner has to choose the degrees of a run."""
    usual = Plan().degrees
    return world > 1 and run.plan.auto and run.plan.degrees == usual


def choose_layout(
    run: RunConfig, workload: Workload, machine: Cluster
) -> tuple[RunConfig, StepPrediction]:
    """The run with the layout that the planner finds best, and the prediction for it.

    workload: the workload of the run, with its dtype resolved.
    """
    plan = run.plan
    machine = restrict_algorithms(machine, run.comm.algorithm)
    measured = run.memory.auto or plan.recompute == "memory_budget"
    # A setting that differs from its default was given: the search must keep it.
    fixed = {f.name for f in fields(Plan) if getattr(plan, f.name) != getattr(Plan(), f.name)}
    fixed -= {*AXES, "global_batch", "auto"}
    # A limitation: with open memory settings only layouts without a pipeline are searched. These
    # settings are chosen after the layout, so the search assumes selective recomputation.
    fixed |= {"pipe", "recompute"} if measured else set()
    fixed |= set() if can_split_context(run) else {"context"}
    # With a memory limit the schedule is not searched: the limit bounds what stages may hold.
    fixed |= {"schedule"} if run.memory.device_limit_gib else set()
    wanted = replace(plan, pipe=1, recompute="selective" if measured else plan.recompute)
    given = states_location(run)
    wish = SearchRequest(
        workload,
        machine,
        plan=wanted,
        fixed_fields=frozenset(fixed),
        states=given if measured or given == "host" else None,
        fp8=FP8_SCALING[run.train.float8],
        allows_compile=launch.has_triton()
        and (not run.train.deterministic or compiles_deterministically()),
    )
    result = prefer_simplest(search_layouts(wish))
    best = result.best
    # auto=False, so that restarts and resumed runs keep this layout.
    found = replace(best.candidate.plan, auto=False)
    if measured:
        # The search only assumed values for these two; `train.memory.choose` chooses them later.
        found = replace(found, recompute=plan.recompute, micro_batch=plan.micro_batch)
    memory = run.memory
    if best.candidate.states == "host" and memory.optimizer_states == "device":
        memory = replace(memory, optimizer_states="host")
    predicted = to_record(best.prediction, machine.name, explain.summarize_choice(result))
    return replace(run, plan=found, memory=memory), predicted


def states_location(run: RunConfig) -> DeviceOrHost:
    """Where optimizer states are stored, as the planner distinguishes it."""
    if run.memory.optimizer_states == "device":
        return "device"
    return "host"


def prefer_simplest(result: SearchResult) -> SearchResult:
    """The result with the simplest layout first, among layouts about as fast as the best.

    Predictions are not exact enough to justify a pipeline or another axis for a few percent.
    """
    limit = SIMILAR_TIME_RATIO * result.best.prediction.step_seconds
    near = [one for one in result.feasible_candidates if one.prediction.step_seconds <= limit]
    first = min(
        near, key=lambda one: (*_plan_complexity(one.candidate.plan), one.prediction.step_seconds)
    )
    return replace(
        result,
        feasible_candidates=(
            first,
            *(one for one in result.feasible_candidates if one is not first),
        ),
    )


def _plan_complexity(plan: Plan) -> tuple[int, ...]:
    """Sort key of what makes a layout harder to understand, most important first."""
    axes = sum(size > 1 for size in plan.degrees.values())
    return (
        plan.pipe > 1,
        plan.context > 1,
        axes,
        plan.virtual_stages,
        len(plan.rank_order),
        plan.recompute != "none",
        -plan.data,
    )


def to_record(prediction: Prediction, machine: str, why: str) -> StepPrediction:
    """A prediction as a record of JSON types."""
    low, high = prediction.interval
    parts = {name: float(x) for name, x in prediction.seconds_by_part.items() if x}
    return StepPrediction(
        why, machine, prediction.step_seconds, low, high, prediction.memory.allocated_bytes, parts
    )


def build_workload(run: RunConfig) -> Workload:
    """The workload of a resolved run."""
    return Workload(
        resolve_model_spec(run),
        run.data.seq_len,
        run.plan.global_batch,
        dtype=run.train.dtype,
        optimizer=OptimizerSpec.from_run(run),
        packs_documents=run.data.document_mask,
    )


def broadcast_layout(run: ResolvedRun, me: ProcessInfo) -> ResolvedRun:
    """The run with the layout that rank 0 has chosen; machines may have been measured separately.

    Communicates: a text over all ranks.
    """
    if run.prediction is None:
        return run
    grid = Grid({"data": me.world_size}, rank=me.rank, connected=me.world_size > 1)
    text = json.dumps([asdict(run.plan), run.memory.optimizer_states, asdict(run.prediction)])
    # Over a host channel of a temporary grid: the grid of the run creates its own groups later.
    words = broadcast_text(text, grid, "cpu", channel=HOST_CHANNEL)
    plan, states, facts = json.loads(words)
    # JSON has no tuples, and Plan compares its fields as tuples.
    lists = {name: tuple(value) for name, value in plan.items() if isinstance(value, list)}
    theirs = replace(
        run,
        plan=Plan(**{**plan, **lists}),
        memory=replace(run.memory, optimizer_states=states),
    )
    agreed = run.adopt("layout", theirs, {"": "chosen by rank 0 for all ranks"})
    return replace(agreed, prediction=StepPrediction(**facts))
