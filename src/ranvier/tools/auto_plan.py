"""Auto: the layout of a run that leaves it open, as the planner chooses, and what came of it.

Open are the degrees of a plan that names none, on several ranks, and with them all of micro-batch,
order, recomputation and so on that has its default value; what was given stays. The machine is what
`ranvier measure` has found here, else that of the device's data sheet, else (on a CPU) what a
moment's measurement tells. After a few steps the prediction is held against them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace

import torch

from ranvier import launch
from ranvier.comm.consensus import told
from ranvier.config.plan import AXES, Plan
from ranvier.config.run import Run
from ranvier.errors import PlanError
from ranvier.grid import HOST, Grid
from ranvier.launch import Ranks
from ranvier.planner import cluster, explain, local_cluster
from ranvier.planner.cluster import Cluster
from ranvier.planner.model_spec import of_run
from ranvier.planner.predict import Job, Layout, Prediction, predict
from ranvier.planner.search import Result, States, Wish, search
from ranvier.planner.time.compute import SCALES
from ranvier.system.terminal import print
from ranvier.tools import benchmark_cluster
from ranvier.train import train
from ranvier.train.health.determinism import compiles_exactly
from ranvier.train.prediction import Foretold

ALIKE = 1.05
"""Predicted times up to so many times the best count as equal."""


def is_open(run: Run, world: int) -> bool:
    """Whether the planner is to choose the degrees of a run."""
    usual = Plan().degrees
    return world > 1 and run.plan.layout == "auto" and run.plan.degrees == usual


def chosen(run: Run, machine: Cluster) -> tuple[Run, Foretold]:
    """The run with the layout that the planner finds best, and what it says of it."""
    known, plan = train.settled(run, train.device_of(run, Ranks())), run.plan
    measured = run.memory.fit == "auto" or plan.recompute == "budget"
    fixed = {f.name for f in fields(Plan) if getattr(plan, f.name) != getattr(Plan(), f.name)}
    fixed -= {*AXES, "batch", "layout"}
    fixed |= {"pipe", "recompute"} if measured else set()  # a fit is measured on whole models
    fixed |= {"policy"} if run.memory.limit else set()  # which bounds what stages hold
    wanted = replace(plan, pipe=1, recompute="selective" if measured else plan.recompute)
    given = _states(run)
    wish = Wish(
        job_of(known),
        machine,
        plan=wanted,
        fixed=frozenset(fixed),
        states=given if measured or given == "host" else None,
        fp8=SCALES[run.train.fp8],
        graphs=launch.triton() and (not run.train.deterministic or compiles_exactly()),
    )
    result = simplest(search(wish))
    best = result.best
    found = replace(best.layout.plan, layout="given")
    if measured:
        found = replace(found, recompute=plan.recompute, micro_batch=plan.micro_batch)
    memory = run.memory
    if best.layout.states == "host" and memory.states == "device":
        memory = replace(memory, states="host")
    foretold = plainly(best.prediction, machine.name, explain.reason(result))
    return replace(run, plan=found, memory=memory), foretold


def _states(run: Run) -> States:
    """Where states rest, as the planner knows it."""
    return "device" if run.memory.states == "device" else "host"


def simplest(result: Result) -> Result:
    """The result with the simplest of the layouts first that are as good as the best.

    Predictions are not so exact that a few percent were worth a pipeline or another axis.
    """
    limit = ALIKE * result.best.prediction.total
    near = [one for one in result.found if one.prediction.total <= limit]
    first = min(near, key=lambda one: (*_burden(one.layout.plan), one.prediction.total))
    return replace(result, found=(first, *(one for one in result.found if one is not first)))


def _burden(plan: Plan) -> tuple[int, ...]:
    """What makes a layout harder to understand, the worst first."""
    axes = sum(size > 1 for size in plan.degrees.values())
    return plan.pipe > 1, axes, plan.chunks, len(plan.order), plan.recompute != "none", -plan.data


def plainly(prediction: Prediction, machine: str, why: str) -> Foretold:
    """A prediction in numbers that JSON holds."""
    low, high = prediction.interval
    parts = {name: float(x) for name, x in prediction.parts.items() if x}
    return Foretold(why, machine, prediction.total, low, high, prediction.memory.allocated, parts)


def planned(run: Run, world: int, *, nodes: int = 1) -> tuple[Run, Foretold | None]:
    """The run with the planner's layout; as it is, where nothing is known of the machine."""
    if _is_wrong(run):  # that is told with all else that is wrong
        return kept(run), None
    try:
        machine = machine_of(train.device_of(run, Ranks()), world)
    except PlanError as error:
        if not launch.is_follower():
            print(f"All ranks lie on data, as no layout was planned: {error}")
        return kept(run), None
    return chosen(run, placed(machine, world, nodes))


def _is_wrong(run: Run) -> bool:
    """Whether values of a run are wrong on any number of ranks."""
    if any(run.problems()):
        return True
    try:
        run.check(1)
    except PlanError:
        return True
    return False


def kept(run: Run) -> Run:
    """The run whose layout nobody changes any more."""
    return replace(run, plan=replace(run.plan, layout="given"))


def agreed(run: Run, said: Foretold, me: Ranks) -> tuple[Run, Foretold]:
    """What rank 0 has chosen, on all ranks: machines may have been measured apart.

    Communicates: a text over all ranks.
    """
    grid = Grid({"data": me.world}, rank=me.rank, connected=me.world > 1)
    text = json.dumps([asdict(run.plan), run.memory.states, asdict(said)])
    words = told(text, grid, "cpu", channel=HOST)  # the grid of the run makes its own groups
    plan, states, facts = json.loads(words)
    lists = {name: tuple(value) for name, value in plan.items() if isinstance(value, list)}
    memory = replace(run.memory, states=states)
    return replace(run, plan=Plan(**{**plan, **lists}), memory=memory), Foretold(**facts)


def job_of(run: Run) -> Job:
    """What a settled run asks of a machine."""
    return Job(
        of_run(run),
        run.data.seq,
        run.plan.batch,
        dtype=run.train.dtype,
        moments=run.optim.moments,
        packed=run.data.packed,
    )


def machine_of(device: torch.device, ranks: int) -> Cluster:
    """What is known of this machine."""
    name = train.device_name(device) if device.type == "cuda" else "cpu"
    found = local_cluster.measured(name)
    if found is not None:
        return found
    if device.type == "cpu":
        return benchmark_cluster.quick(ranks)
    wanted = cluster.device(name).name
    built_in = (cluster.cluster(one) for one in cluster.names())
    return next(one for one in built_in if one.device.name == wanted)


def placed(machine: Cluster, world: int, nodes: int) -> Cluster:
    """The machine with so many ranks on so many nodes; on a CPU they share its memory."""
    count, device = world // nodes, machine.device
    if machine.cores:
        device = replace(device, memory=device.memory / count)
    return replace(machine, device=device, nodes=nodes, per_node=count)


def foreseen(run: Run, machine: Cluster, nodes: int = 1) -> Prediction:
    """What the planner says of a settled run on a machine, whatever its layout."""
    plan = run.plan.unmeasured
    states = _states(run)
    layout = Layout(plan=plan, order=plan.placed, states=states, fp8=SCALES[run.train.fp8])
    return predict(job_of(run), layout, placed(machine, plan.world, nodes))
