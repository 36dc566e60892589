"""Predict: seconds and bytes of a step of a job in a layout on a cluster, under a runtime.

    micro-batch   Σ blocks (compute + what of row, col, depth and context nothing hides) + ends
    pipeline      m · slowest stage + (p-1)/v · mean stage
    step          pipeline + what of the reduction over data nothing hides + update

Communication that runs beside compute slows it down by `SLOW` of its time. A step on many nodes
waits for the slowest: `Cluster.straggle` a doubling. Terms are cached by what they depend on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Literal, cast

from ranvier.config.plan import AXES, Plan
from ranvier.cost.layers import Flow
from ranvier.planner import comm_volume, communicators
from ranvier.planner.cluster import Cluster, Reach
from ranvier.planner.comm_volume import Stage
from ranvier.planner.frameworks import OURS, Foreign, Runtime
from ranvier.planner.memory import total as space
from ranvier.planner.memory.breakdown import Table
from ranvier.planner.memory.model_states import Moments
from ranvier.planner.model_spec import Model, Part
from ranvier.planner.time import communication, compute, links, offload, shared_cores
from ranvier.planner.time.communication import Places, Spoken
from ranvier.planner.time.compute import Scales, Setup, Times
from ranvier.planner.time.links import Group

SLOW = 0.15
"""Share of the time of hidden communication that compute loses to it (Galvatron: 1.1 to 1.3)."""
ASIDE = 0.7
"""Share of the last backward pass that hides the reduction over data."""
INTERVAL = (0.93, 1.22)
"""Measured over predicted: 80 % of published runs lie between, each with its whole framework left
out of the fit (benchmarks/published.py --leave framework)."""
UNKNOWN_CHIP = (0.9, 1.28)
"""The same with the chip left out: no run on it was fitted, nothing was measured (--leave chip)."""
NAMES = (
    "compute",
    "attention",
    "again",
    "row",
    "col",
    "expert",
    "context",
    "depth",
    "data",
    "pipe",
    "bubble",
    "update",
    "host",
    "other",
)


@dataclass(frozen=True)
class Job:
    """What is to be trained."""

    model: Model
    seq: int
    batch: int
    dtype: str = "bf16"
    moments: str = "master"
    packed: bool = False


@dataclass(frozen=True)
class Layout:
    """How it is laid out."""

    plan: Plan
    order: tuple[str, ...] = AXES
    """Axes as they lie on the machine, outermost first."""
    states: Literal["device", "host"] = "device"
    fp8: Scales = ""


@dataclass(frozen=True)
class Prediction:
    """Seconds by part, bytes by category, and what follows."""

    parts: Mapping[str, float]
    memory: Table
    tokens: int
    """Of a step."""
    flops: float
    """Of a step, as a model needs them: nothing is computed again."""
    devices: int
    peak: float
    """FLOPs a second of a device."""
    limit: float
    """Bytes that a device has for a run."""
    factors: tuple[float, float] = INTERVAL
    """Measured over predicted, between which 80 % of such steps lie."""
    spread: float = 1.0
    """The longest over the shortest time, where it is a prediction for several layouts."""

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.total

    @property
    def mfu(self) -> float:
        """Share of the peak that does the model's own work."""
        return self.flops / (self.total * self.devices * self.peak)

    @property
    def fits(self) -> bool:
        """Whether the device has room for it."""
        return self.memory.total <= self.limit

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds between which 80 % of such steps lie."""
        half = math.log(self.spread) / 2
        low, high = (math.copysign(math.hypot(math.log(x), half), x - 1) for x in self.factors)
        return self.total * math.exp(low), self.total * math.exp(high)


def merged(several: Sequence[Prediction]) -> Prediction:
    """One prediction for layouts of which one runs: the middle of their times, on logarithms, and
    the most of their memory."""
    order = sorted(several, key=lambda one: one.total)
    shortest, longest = order[0].total, order[-1].total
    total = math.sqrt(shortest * longest)
    near = min(order, key=lambda one: abs(math.log(one.total / total)))
    parts = {name: spent * total / near.total for name, spent in near.parts.items()}
    most = max(order, key=lambda one: one.memory.total)
    return replace(
        near, parts=parts, memory=most.memory, limit=most.limit, spread=longest / shortest
    )


def predict(
    job: Job, layout: Layout, cluster: Cluster, runtime: Runtime = OURS, *, played: bool = True
) -> Prediction:
    """The prediction for one layout; played: as of `memory`."""
    plan, device = layout.plan, cluster.device
    setup = _setup(job, layout, cluster, runtime)
    parts = seconds(job, layout, cluster, runtime)
    name = "fp8" if layout.fp8 and "fp8" in device.peak else job.dtype
    table = memory(job, layout, cluster, runtime, compiled=setup.compiled, played=played)
    spare = runtime.returned * table.device.get("fragmentation", 0)
    return Prediction(
        parts,
        table,
        tokens=job.batch * job.seq,
        flops=model_flops(job.model, job.seq) * job.batch * job.seq,
        devices=plan.world,
        peak=device.peak.get(name) or device.best(name),
        limit=device.memory * (1 - runtime.margin) - runtime.context + spare,
        factors=_factors(cluster),
    )


def _factors(cluster: Cluster) -> tuple[float, float]:
    """How far from their prediction such steps are."""
    device = cluster.device
    return UNKNOWN_CHIP if device.reach == Reach() and not device.products else INTERVAL


@lru_cache(maxsize=4)  # who compares ways of a layout asks for the best of them again
def seconds(
    job: Job, layout: Layout, cluster: Cluster, runtime: Runtime = OURS
) -> Mapping[str, float]:
    """Seconds of a step by part."""
    setup = _setup(job, layout, cluster, runtime)
    if not cluster.cores:
        return _Step.of(job, layout, cluster, runtime, setup).parts()
    shared = shared_cores.step(job.model, layout.plan, setup, cluster, runtime, packed=job.packed)
    return dict.fromkeys(NAMES, 0.0) | shared


def stage_seconds(job: Job, layout: Layout, cluster: Cluster) -> list[float]:
    """Seconds of a micro-batch on each stage of a layout of ours."""
    plan, setup = layout.plan, _setup(job, layout, cluster, OURS)
    if cluster.cores:
        busy = shared_cores.stages(job.model, plan, setup, cluster, OURS, packed=job.packed)
        return [
            sum(spent for name, spent in parts.items() if name != "update") / plan.micro_batches
            for parts in busy
        ]
    step = _Step.of(job, layout, cluster, OURS, setup)
    spent = {name: _whole(times, waits) for name, (_, times, waits) in step.laps_of_all().items()}
    every = comm_volume.stages(job.model, plan, job.seq)
    return [step.in_stage(stage, spent) for stage in every]


def computed(job: Job, layout: Layout, cluster: Cluster) -> float:
    """Seconds of a step in which blocks compute, whatever else it waits for."""
    plan, setup = layout.plan, _setup(job, layout, cluster, OURS)
    blocks = [part for part in job.model.parts if part.is_block]
    times = (compute.block(part, cluster.device, setup, OURS) for part in blocks)
    each = (one.forward + one.backward for one in times)
    whole = sum(part.count * spent for part, spent in zip(blocks, each, strict=True))
    return plan.micro_batches / plan.pipe * whole


def usual_order(chunks: int) -> Literal["1f1b", "interleaved"]:
    """The order of a pipeline whose time and memory have closed forms."""
    return "1f1b" if chunks == 1 else "interleaved"


def memory(
    job: Job,
    layout: Layout,
    cluster: Cluster,
    runtime: Runtime,
    *,
    compiled: bool,
    played: bool = True,
) -> Table:
    """Bytes of a rank by category: ours by `space`, those of others by their formulas.

    played: under the policy `message` stages hold what its choice permits, which takes a simulation
    of a second or so; else what the usual order keeps.
    """
    if isinstance(runtime, Foreign):
        return runtime.memory(job, layout)
    plan, size = layout.plan, compute.BYTES[job.dtype]
    other = plan.policy != usual_order(plan.chunks) and (played or plan.policy != "message")
    found = space.space(
        job.model,
        layout.plan,
        Flow(layout.plan.micro_batch, job.seq, itemsize=size, statistics=max(size, 4)),
        states=layout.states,
        moments=cast(Moments, job.moments),
        compiled=compiled,
        fp8=layout.fp8,
        simulated=plan.pipe > 1 and other,
    )
    resting = ("weights", "master", "moments")
    moving = sum(size for name, size in found.device.items() if name not in resting)
    more = {"fragmentation": round(runtime.reserve * moving)}
    if not cluster.cores:  # ranks of a CPU communicate over Gloo
        more["communicators"] = communicators.worst_stage_bytes(job.model, plan)
    return replace(found, device={**found.device, **more})


def _setup(job: Job, layout: Layout, cluster: Cluster, runtime: Runtime) -> Setup:
    plan = layout.plan
    alone = plan.depth == plan.row == plan.col == 1
    compiled = plan.compile == "on" or (plan.compile == "auto" and alone and not cluster.cores)
    compiled &= plan.expert == 1 or plan.recompute == "none"  # else blocks run by operations
    return Setup(
        samples=plan.micro_batch,
        seq=job.seq,
        row=plan.row,
        col=plan.col,
        context=plan.context,
        features=plan.inner == "features",
        dtype=job.dtype,
        fp8=layout.fp8,
        ranks=min(plan.world, cluster.per_node) if cluster.cores else 1,
        compiled=compiled,
        serial=runtime.blocking or bool(cluster.cores),
    )


@lru_cache(maxsize=1000)
def model_flops(model: Model, seq: int) -> float:
    """FLOPs of a token, forward and backward: 6 a weight, and attention's half square."""
    setup = Setup(samples=1, seq=seq)
    total = 0.0
    for part in model.parts:
        total += part.count * sum(6.0 * out * into for out, into in compute.linears(part, setup))
        for leaf in part.find("attention"):
            heads = compute.heads(part, leaf, setup)
            seen = min(leaf.window or seq, seq)
            total += part.count * 12.0 * heads * leaf.head_dim * seen * (1 - seen / seq / 2)
    return total


def _again(times: Times, recompute: str, runtime: Runtime) -> float:
    """What a block computes again."""
    if recompute == "full":
        return times.forward - times.unneeded
    if recompute != "selective":
        return 0.0
    if runtime.selective == "half":
        return times.products / 2 + times.between
    if runtime.selective == "small":
        return times.between
    return times.attention


@lru_cache(maxsize=50_000)
def _cut(pipe: int, chunks: int, blocks: int, cut: str, entry: float, head: float) -> float:
    """Work of the slowest stage, in blocks; entry and head: theirs, in blocks."""
    if cut == "balanced":
        least = max(blocks // pipe - math.ceil(head) - 1, 0)
        return min(
            max(last + head, math.ceil((blocks - last) / (pipe - 1)) + entry)
            for last in range(least, blocks // pipe + 1)
        )
    if blocks % (pipe * chunks) == 0:
        return blocks // pipe + max(entry, head)
    each = math.ceil((blocks + 2) / pipe)
    return max(each, each - 1 + max(entry, head))


Laps = Mapping[str, tuple[Part, Times, dict[str, float]]]
"""Times of every part in a micro-batch, and what it waits for, by its name."""


@dataclass(frozen=True)
class _Step:
    """A step on its way to seconds."""

    job: Job
    layout: Layout
    cluster: Cluster
    runtime: Runtime
    setup: Setup
    places: Places
    spoken: Spoken

    @classmethod
    def of(
        cls, job: Job, layout: Layout, cluster: Cluster, runtime: Runtime, setup: Setup
    ) -> _Step:
        """The step of a layout, with what it communicates."""
        plan = layout.plan
        places = Places(plan, layout.order, cluster.per_node)
        if isinstance(runtime, Foreign):
            spoken = runtime.spoken(job.model, plan, setup, cluster, places)
        else:
            spoken = communication.ours(job.model, plan, setup, cluster, places)
        return cls(job, layout, cluster, runtime, setup, places, spoken)

    @property
    def overlaps(self) -> tuple[str, ...]:
        """What runs beside compute here; a graph of ours hides what comes after it only, and
        experts on several ranks are in none."""
        graph = self.setup.compiled and not self.runtime.graphs
        words = ("dw", "tokens") if graph else self.layout.plan.overlap
        return tuple(word for word in self.layout.plan.overlap if word in words)

    def hidden(self, spent: float, behind: float) -> float:
        """What is left of communication that runs beside compute."""
        gone = min(spent, behind)
        return spent - gone + SLOW * gone

    def laps(self) -> list[tuple[Part, Times, dict[str, float]]]:
        """Times of each kind of block in a micro-batch, and what it waits for by part."""
        plan, runtime, overlaps = self.layout.plan, self.runtime, self.overlaps
        found = []
        for part in self.job.model.parts:
            if not part.is_block:
                continue
            times, spoken = self.times(part), self.spoken.of(part)
            again = _again(times, plan.recompute, runtime)
            waits = {"again": again}
            under = sum(spoken.under.values())
            left = 1.0
            if under and "dx" in overlaps and runtime.hidden_dx:
                left = self.hidden(under, times.dw) / under
            for axis in communication.INSIDE:
                spent = spoken.plain[axis] + left * spoken.under[axis]
                waits[axis] = spent * (1 - runtime.hidden_row)
            if "tokens" in overlaps:
                beside = compute.shared(part, self.cluster.device, self.setup)
                waits["expert"] = self.hidden(waits["expert"], beside)
            behind = times.forward + times.backward + again
            able = behind if "gather" in overlaps else 0.0
            waits["depth"] = self.hidden(spoken.depth, able)
            near = self.places["context",]
            ring = communication.ring(part, self.cluster, self.setup, near, plan.recompute)
            waits["context"] = self.hidden(ring, times.attention + times.attention_back)
            found.append((part, times, waits))
        return found

    def times(self, part: Part) -> Times:
        """Times of a block, with adding up its gradient where there are several micro-batches."""
        device, runtime = self.cluster.device, self.runtime
        times = compute.block(part, device, self.setup, runtime)
        if self.layout.plan.micro_batches == 1:
            return times
        weights = sum(out * into for out, into in compute.linears(part, self.setup))
        size = weights * (2 * runtime.gradient + (0 if runtime.fused_gradient else 2))
        more = compute.traffic(device, size, self.setup.ranks, runtime.stream)
        return Times(**{**vars(times), "between_back": times.between_back + more})

    def ends(self) -> tuple[Times, Times]:
        """What embedding and head compute in a micro-batch, forward and backward."""
        model, device = self.job.model, self.cluster.device
        entry = compute.entry(model.parts[0], device, self.setup)
        head = compute.head(model.parts[-1], device, self.setup, self.runtime)
        return _outside(*entry), _outside(*head)

    def waits_of_ends(self) -> tuple[dict[str, float], dict[str, float]]:
        """What embedding and head wait for in a micro-batch, by part: nothing hides it."""
        plan, parts = self.layout.plan, self.job.model.parts
        found = []
        for part in (parts[0], parts[-1]):
            own = self.spoken.of(part)
            waits = {axis: own.plain[axis] + own.under[axis] for axis in communication.INSIDE}
            waits["depth"] = own.depth
            # stages that share the vocabulary compute a part of it each, but all communicate
            often = plan.pipe if plan.spread else 1
            found.append({name: spent * often for name, spent in waits.items()})
        return found[0], found[1]

    def laps_of_all(self) -> dict[str, tuple[Part, Times, dict[str, float]]]:
        """Times of every part in a micro-batch, and what it waits for, by its name."""
        parts = self.job.model.parts
        ends = zip((parts[0], parts[-1]), self.ends(), self.waits_of_ends(), strict=True)
        return {part.name: (part, times, waits) for part, times, waits in (*self.laps(), *ends)}

    def parts(self) -> dict[str, float]:
        """Seconds of a step by part."""
        plan, laps = self.layout.plan, self.laps_of_all()
        micro = plan.micro_batches
        slowest, mean = self.stages(laps)
        found, share = dict.fromkeys(NAMES, 0.0), micro / plan.pipe
        for part, times, waits in laps.values():
            core, n = times.attention + times.attention_back, share * part.count
            found["attention"] += n * core
            found["compute"] += n * (times.forward + times.backward - core)
            for name, spent in waits.items():
                found[name] += n * spent
        pipe = self.messages()
        found["pipe"] += micro * pipe
        for name, spent in self.last(laps, slowest / 3).items():
            found[name] += spent
        bubble = (plan.pipe - 1) / plan.chunks * (mean + pipe / plan.chunks)
        found["bubble"] = bubble + micro * (slowest - mean)
        nodes = plan.world / self.cluster.per_node
        lost = self.cluster.straggle * math.log2(max(nodes, 1.0))
        found["other"] += lost * sum(found.values())
        return found

    def last(self, laps: Laps, forward: float) -> dict[str, float]:
        """What follows the last backward pass, by part: of the stage on which it takes longest.

        forward: seconds of a forward pass, behind which states on the host are updated.
        """
        plan, model, spoken = self.layout.plan, self.job.model, self.spoken
        if not spoken.stages:
            back = sum(part.count * t.backward for part, t, _ in laps.values() if part.is_block)
            data = self.reduction(spoken.data + spoken.after, ASIDE * back / plan.pipe)
            return {"data": data, **self.update(communication.numbers(model, plan), forward)}
        found, backward = [], {name: times.backward for name, (_, times, _) in laps.items()}
        for one in spoken.stages:
            numbers = communication.numbers_of(model, one.stage, plan.row * plan.col, plan.expert)
            spent, back = self.update(numbers, forward), self.in_stage(one.stage, backward)
            spent["data"] = self.reduction(one.data + one.after, ASIDE * back)
            spent["expert"], spent["other"] = one.shared, one.other
            found.append(spent)
        return max(found, key=lambda spent: sum(spent.values()))

    def in_stage(self, stage: Stage, spent: Mapping[str, float]) -> float:
        """Seconds of a stage in a micro-batch. spent: of each part, by its name."""
        if not self.layout.plan.spread:
            return sum([count * spent[part.name] for part, count in stage.here])
        share = 1 / stage.seat.count  # of the vocabulary
        return sum(n * spent[p.name] * (1 if p.is_block else share) for p, n in stage.here)

    def stages(self, laps: Laps) -> tuple[float, float]:
        """Seconds of a micro-batch on the slowest stage and on a mean one."""
        plan, model = self.layout.plan, self.job.model
        spent = {name: _whole(times, waits) for name, (_, times, waits) in laps.items()}
        mean = sum(part.count * spent[part.name] for part in model.parts) / plan.pipe
        if plan.pipe == 1:
            return mean, mean
        if self.spoken.stages:
            slowest = max(self.in_stage(one.stage, spent) for one in self.spoken.stages)
            return max(slowest, mean), mean
        entry, head = spent[model.parts[0].name], spent[model.parts[-1].name]
        lap = (mean * plan.pipe - entry - head) / model.layers
        if plan.spread:
            return mean, mean
        blocks, cut = model.layers, self.runtime.cut
        most = _cut(plan.pipe, plan.chunks, blocks, cut, entry / lap, head / lap)
        return max(most * lap, mean), mean

    def messages(self) -> float:
        """What of the messages of a micro-batch between stages nothing hides."""
        plan, runtime = self.layout.plan, self.runtime
        if plan.pipe == 1:
            return 0.0
        width = self.job.model.units["embed"] / plan.col
        size = self.setup.tokens * width * compute.BYTES[self.job.dtype]
        if runtime.scatter or runtime.sequence:
            size /= plan.row
        # a stage's neighbour is in another node unless all stages fit into one
        pair = Group(2, 2 if self.places["pipe",].nodes == 1 else 1)
        one = links.seconds(self.cluster, "send", size, pair)
        return 2 * plan.chunks * one * (1 - runtime.hidden_pipe)

    def reduction(self, spent: float, behind: float) -> float:
        """What of a reduction over data nothing hides. behind: what may hide it."""
        if not self.runtime.hidden_data or "dw" not in self.overlaps:
            return spent
        return self.hidden(spent, behind)

    def update(self, numbers: float, forward: float) -> dict[str, float]:
        """Seconds of the update: 2 · states + gradient + weight are read and written.

        numbers: weights of a rank, gathered over depth.
        """
        plan, runtime, cluster = self.layout.plan, self.runtime, self.cluster
        shards = plan.depth * (plan.data * plan.context if runtime.sharded else 1)
        own, ranks = numbers / shards, self.setup.ranks
        if self.layout.states == "host":
            away = offload.Moved(0, 0, round(own * runtime.states), round(own), 0, 0, 0)
            whole = offload.streamed(away, _host(cluster), cpu=False)
            blocks = max(self.job.model.layers // plan.pipe, 1)
            return {"host": max(whole / blocks, whole - forward + forward / blocks)}
        size = own * (2 * runtime.states + runtime.gradient + 2)
        rate = cluster.device.rate("update", ranks=ranks)
        spent = compute.traffic(cluster.device, size, ranks, runtime.stream)
        return {"update": own / rate if rate else spent}


def _whole(times: Times, waits: Mapping[str, float]) -> float:
    """Seconds of a part in a micro-batch."""
    return times.forward + times.backward + sum(waits.values())


def _outside(forward: float, backward: float) -> Times:
    """The times of an entry or exit."""
    return Times(forward, 0.0, 0.0, backward, 0.0, 0.0, 0.0, 0.0)


def _host(cluster: Cluster) -> Any:
    host = cluster.host
    return SimpleNamespace(to_device=host.to_device, to_host=host.to_host, adam=host.adam)
