"""Dry run: the real code of one rank of any number, without data, devices or other ranks.

Model, step and optimizer are those of a run. Tensors are on the meta device, where they have shapes
and no values, and the process group is torch's fake one, whose collectives return at once. So what
a rank would hold and say is counted, not predicted: shards, calls of the process group (below
`comm`, by axis), and the bytes of all tensors that live at once, as on a device that runs layers
one by one, with an attention kernel that keeps no scores.

Not handled: compiled blocks, documents inside of samples, what lies on the host.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ranvier import launch
from ranvier.buckets.scheduler import Deferred
from ranvier.config.plan import AXES
from ranvier.config.run import Run
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.models import Decoder
from ranvier.nn.attention import Core
from ranvier.nn.attention_backends import flash
from ranvier.nn.moe.layer import Experts
from ranvier.parallel.parallelize import parallel_of
from ranvier.pipeline.memory_replay import late
from ranvier.planner.memory import breakdown
from ranvier.planner.memory.breakdown import Table
from ranvier.system.terminal import print
from ranvier.train.build_model import DTYPES, built
from ranvier.train.memory.breakdown import tensors_of
from ranvier.train.memory.probe import OnHost, blank, gradients
from ranvier.train.memory.resolve import optimizer_of
from ranvier.train.step import Watch, train_step

META = torch.device("meta")
RULE = "A dry run counts what lies on the device of one rank that runs layers one by one."


@dataclass(frozen=True)
class Row:
    """Calls of a process group in a step: equal in operation and axis."""

    op: str
    axis: tuple[str, ...]
    calls: int
    bytes: int
    """Of whole (gathered or reduced) tensors."""


@dataclass(frozen=True)
class Dry:
    """What a rank holds and says in a step."""

    rank: int
    world: int
    index: dict[str, int]
    """Its coordinates."""
    shards: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    """Shape of the part, padding included, and of the whole, of each weight."""
    rows: tuple[Row, ...]
    table: Table
    """Most bytes at once."""
    load: float | None
    """Assumed: rows of its experts, in means of all ranks of expert; None: there is one."""
    seconds: float
    """That the dry run took."""

    def bytes(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """Bytes by operation and axis."""
        return {(row.op, row.axis): row.bytes for row in self.rows}

    def facts(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "rank": self.rank,
            "world": self.world,
            "index": self.index,
            "shards": {n: {"part": a, "whole": b} for n, (a, b) in self.shards.items()},
            "collectives": [vars(row) | {"axis": list(row.axis)} for row in self.rows],
            "memory": self.table.facts(),
            "load": self.load,
            "seconds": self.seconds,
        }


def checked(run: Run, *, world: int, rank: int, load: float = 1.0) -> Run:
    """The run as one rank of `world` can be played, or all that is wrong with it."""
    if world < 1 or not 0 <= rank < world:
        raise PlanError(
            f"rank={rank} of world={world}. Ranks count from 0 to world - 1, and there is one at "
            f"least. Use --rank {max(min(rank, world - 1), 0)}"
            + (" or a larger --world." if world > 0 else " --world 1.")
        )
    run = run.check(world)
    problems = [] if 1.0 <= load <= run.plan.expert else [_overload(run, load)]
    problems += [
        f"memory.{name}={getattr(run.memory, name)!r}: that lies on the host. {RULE} "
        f"Leave memory.{name} out."
        for name, usual in (("states", "device"), ("weights", "device"), ("activations", 0.0))
        if getattr(run.memory, name) != usual
    ]
    if run.prune.on:
        problems.append(f"Masks of a pruned run are values. {RULE} Leave prune out.")
    if run.train.fp8 != "off":
        problems.append(f"train.fp8={run.train.fp8!r} asks a device. {RULE} Use train.fp8=off.")
    if problems:
        raise PlanError(problems)
    dtype = "bf16" if run.train.dtype == "auto" else run.train.dtype
    plan = replace(run.plan.unmeasured, compile="off", graph=False)
    packed = replace(run.data, packed=False)
    return replace(run, plan=plan, data=packed, train=replace(run.train, dtype=dtype))


def _overload(run: Run, load: float) -> str:
    """Why a load cannot be."""
    most = run.plan.expert
    return (
        f"load={load:g} with plan.expert={most}. The busiest rank of expert has at least the mean "
        f"of all and at most all rows. Use --load {min(max(load, 1.0), most):g}."
    )


def dry(run: Run, *, world: int, rank: int, load: float = 1.0, watched: bool = True) -> Dry:
    """Play one rank: two steps, of which the second, when all orders are known, is counted.

    load: rows of its experts, in means of all ranks of expert. watched: bytes of tensors as well,
    which takes longer than the steps themselves.
    """
    begun, run = time.perf_counter(), checked(run, world=world, rank=rank, load=load)
    with launch.fake(world, rank):
        grid = Grid.of(run.plan, rank=rank, connected=True)
        model = built(run, grid, META, local_ranks=1)
        parallel = parallel_of(model)
        _prepare(run, model, load)
        optimizer = optimizer_of(run, model, META, local_ranks=1)
        batches = [blank(run, run.plan.micro_batch, META) for _ in range(run.plan.micro_batches)]
        watch = Watch.of(META)
        train_step(model, optimizer, batches, run.lr, watch)
        tensors = tensors_of(optimizer)
        seen = _Seen([tensors, [batch.inputs() for batch in batches]], parallel.queue)
        with launch.counted() as calls, seen if watched else nullcontext():
            train_step(model, optimizer, batches, run.lr, watch)
        rows = _rows(calls, grid)
    held = {name: sum(x.nbytes for x in some) for name, some in tensors.items()}
    held["gradients"] = seen.gradients
    device = {**held, "activations": max(seen.most - seen.gradients, 0)}
    return Dry(
        rank=rank,
        world=world,
        index=dict(grid.index),
        shards={n: (w.sharding.local, w.sharding.shape) for n, w in parallel.weights.items()},
        rows=rows,
        load=load if parallel.ragged else None,
        table=Table(
            {name: size for name, size in device.items() if size},
            where=seen.words if watched else "",
        ),
        seconds=time.perf_counter() - begun,
    )


def _prepare(run: Run, model: Decoder, load: float) -> None:
    """What a fake world cannot find out: the form of messages, orders; and the attention kernel."""
    parallel, plan = parallel_of(model), run.plan
    for leaf in parallel.leaves.values():
        if isinstance(leaf, Core):
            leaf.serial.attend = flash  # type: ignore[assignment]
            leaf.serial.window = 0  # type: ignore[assignment]  # its kernel keeps as much, no scores
        if isinstance(leaf, Experts):
            leaf.load = load
    shape = (plan.micro_batch, run.data.seq // (plan.row * plan.context))
    form = ((*shape, run.model.embed // plan.col), DTYPES[run.train.dtype])
    pipeline, runtime, micros = parallel.pipeline, parallel.pipeline.runtime, plan.micro_batches
    if plan.pipe > 1:
        policy = pipeline.policy(micros)
        jobs = replace(pipeline.shape(micros), split=policy.split)
        pipeline.chosen[micros] = late(policy, jobs, runtime.stage.index)
    runtime.form = form
    runtime.leads = True  # nobody else would


class _Seen(OnHost):
    """Bytes of all tensors, and those of gradients when there are most."""

    everywhere = True

    def __init__(self, before: Any, queue: Deferred) -> None:
        super().__init__(before, lambda: gradients(queue))
        self.queue, self.gradients, self.where = queue, 0, ""

    @property
    def words(self) -> str:
        """When there are most: in a layer, or (an activation, a norm's end) between two."""
        return f"in {self.where}" if self.where else "between layers"

    def grown(self) -> None:
        """Look at the gradients there are, and at what runs."""
        found, self.where = dict[int, int](), self.queue.grid.trace.where
        for bucket in self.queue.buckets:
            for some in (bucket.grad, bucket.finished):
                for x in [] if some is None else some.parts.values():
                    found[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        self.gradients = sum(found.values())


def _rows(calls: Sequence[launch.Call], grid: Grid) -> tuple[Row, ...]:
    """Calls by operation and axis."""
    counts, sizes = Counter[tuple[str, tuple[str, ...]]](), Counter[tuple[str, tuple[str, ...]]]()
    axes: dict[tuple[int, ...], tuple[str, ...]] = {}
    for call in calls:
        if call.ranks not in axes:
            axes[call.ranks] = _axis(call.ranks, grid)
        counts[call.op, axes[call.ranks]] += 1
        sizes[call.op, axes[call.ranks]] += call.bytes
    return tuple(Row(*key, counts[key], size) for key, size in sizes.most_common())


def _axis(ranks: Sequence[int], grid: Grid) -> tuple[str, ...]:
    """The axes along which ranks differ."""
    flat = grid.ranks.reshape(-1).tolist()
    place = {rank: i for i, rank in enumerate(flat)}
    steps, size = dict[str, int](), 1
    for axis in reversed(AXES):
        steps[axis] = size
        size *= grid.degrees[axis]
    return tuple(
        axis
        for axis in AXES
        if len({place[rank] // steps[axis] % grid.degrees[axis] for rank in ranks}) > 1
    )


# ---- words ------------------------------------------------------------------------------


def show(run: Run, *, world: int, rank: int, load: float = 1.0, out: str = "") -> int:
    """Print what a rank holds and says, beside what the planner predicts; write JSON if asked."""
    found = dry(run, world=world, rank=rank, load=load)
    if out:
        Path(out).write_text(json.dumps(found.facts(), indent=1))
    for line in lines(found):
        print(line)
    return 0


def lines(found: Dry) -> list[str]:
    """A dry run as text."""
    place = " ".join(f"{axis}={i}" for axis, i in found.index.items() if i) or "all 0"
    out = [f"rank {found.rank} of {found.world} ({place}), {found.seconds:.1f} s"]
    if found.load is not None:
        out.append(assumed(found.load))
    out += ["", "shards"]
    width = max((len(name) for name in _kinds(found)), default=0)
    for name, (part, whole, count) in _kinds(found).items():
        times = f"  x {count}" if count > 1 else ""
        out.append(f"  {name:<{width}}  {_shape(part)} of {_shape(whole)}{times}")
    out += ["", f"{'axis':<24}{'operation':<16}{'calls':>8}{'MB':>14}"]
    for row in found.rows:
        name = "·".join(row.axis)
        out.append(f"{name:<24}{row.op:<16}{row.calls:>8}{row.bytes / 1e6:>14.3f}")
    nobody = [] if found.rows else ["none: one rank talks to nobody"]
    return [*out, *nobody, "", *breakdown.lines(found.table)]


def assumed(load: float) -> str:
    """What is assumed of experts, in words."""
    if load == 1.0:
        return "assumed: balanced experts (load 1: every rank of expert gets as many rows)"
    return f"assumed: load {load:g} (this rank's experts get {load:g} times the mean of their rows)"


def _kinds(found: Dry) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Shards by name, equal ones of blocks together."""
    kinds: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {}
    for name, (part, whole) in found.shards.items():
        general = ".".join("*" if word.isdigit() else word for word in name.split("."))
        before = kinds.get(general, (part, whole, 0))
        kinds[general] = (part, whole, before[2] + 1)
    return kinds


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
