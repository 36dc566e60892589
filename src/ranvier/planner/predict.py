"""Predict: seconds and bytes of a step of a job in a layout on a cluster, under a runtime.

    micro-batch   Σ blocks (compute + what of row, col, depth and context nothing hides) + ends
    pipeline      m · slowest stage + (p-1)/v · mean stage
    step          pipeline + what of the reduction over data nothing hides + update

Communication that runs beside compute slows it down by `SLOW` of its time. A step on many nodes
waits for the slowest: `Cluster.straggle` a doubling. Terms are cached by what they depend on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Literal

from ranvier.plan import AXES, Plan
from ranvier.planner import cost, elsewhere, links, roofline, talk
from ranvier.planner.cluster import Cluster
from ranvier.planner.leaves import Model, Part
from ranvier.planner.links import Group
from ranvier.planner.roofline import Setup, Times
from ranvier.planner.runtime import OURS, Runtime
from ranvier.planner.table import Table

SLOW = 0.15
"""Share of the time of hidden communication that compute loses to it (Galvatron: 1.1 to 1.3)."""
ASIDE = 0.7
"""Share of the last backward pass that hides the reduction over data."""
INTERVAL = (0.88, 1.14)
"""Measured over predicted: 80 % of the published runs lie between (benchmarks/published.py)."""
NAMES = (
    "compute",
    "attention",
    "again",
    "row",
    "col",
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
    fp8: bool = False
    scales: Literal["tensor", "row"] = "tensor"
    """Of 8-bit products."""


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
    idle: float = 0.0
    extra: Mapping[str, float] = field(default_factory=dict)

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
        low, high = INTERVAL
        return self.total * low, self.total * high


def predict(job: Job, layout: Layout, cluster: Cluster, runtime: Runtime = OURS) -> Prediction:
    """The prediction for one layout."""
    plan = layout.plan
    setup = _setup(job, layout, cluster)
    groups = _groups(tuple(plan.degrees.items()), layout.order, cluster.per_node)
    parts = _step(job, layout, cluster, runtime, setup, groups)
    memory = elsewhere.memory(job, layout, runtime)
    device = cluster.device
    name = "fp8" if layout.fp8 and "fp8" in device.peak else job.dtype
    peak = device.peak.get(name) or device.best(name)
    limit = device.memory * (1 - runtime.margin) - runtime.context
    flops = model_flops(job.model, job.seq) * job.batch * job.seq
    return Prediction(parts, memory, job.batch * job.seq, flops, plan.world, peak, limit)


def _setup(job: Job, layout: Layout, cluster: Cluster) -> Setup:
    plan = layout.plan
    alone = plan.depth == plan.row == plan.col == 1
    compiled = plan.compile == "on" or (plan.compile == "auto" and alone and not cluster.cores)
    return Setup(
        samples=plan.micro_batch,
        seq=job.seq,
        row=plan.row,
        col=plan.col,
        context=plan.context,
        features=plan.inner == "features",
        dtype=job.dtype,
        fp8=layout.scales if layout.fp8 else "",
        ranks=min(plan.world, cluster.per_node) if cluster.cores else 1,
        compiled=compiled,
    )


@lru_cache(maxsize=50_000)
def _groups(
    degrees: tuple[tuple[str, int], ...], order: tuple[str, ...], per_node: int
) -> Mapping[str, Group]:
    """The ranks of each axis as they lie; `states`: those that split states."""
    sizes = dict(degrees)
    found = {axis: links.group((axis,), sizes, order, per_node) for axis in AXES}
    found["shards"] = links.group(("context", "depth"), sizes, order, per_node)
    found["copies"] = links.group(("data", "expert", "context"), sizes, order, per_node)
    return found


@lru_cache(maxsize=1000)
def model_flops(model: Model, seq: int) -> float:
    """FLOPs of a token, forward and backward: 6 a weight, and attention's half square."""
    setup = Setup(samples=1, seq=seq)
    total = 0.0
    for part in model.parts:
        total += part.count * sum(6.0 * out * into for out, into in roofline.linears(part, setup))
        for leaf in part.find("attention"):
            heads = roofline.heads(part, leaf, setup)
            seen = min(leaf.window or seq, seq)
            total += part.count * 12.0 * heads * leaf.head_dim * seen * (1 - seen / seq / 2)
    return total


# ---- a block ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Lap:
    """Seconds of one block in one micro-batch, on the way of a rank."""

    times: Times
    again: float
    row: float
    col: float
    context: float
    depth: float
    weights: int
    """Numbers of its matrices on a rank, gathered."""

    @property
    def compute(self) -> float:
        """Forward, backward and what is computed again."""
        return self.times.forward + self.times.backward + self.again

    @property
    def total(self) -> float:
        """All of it."""
        return self.compute + self.row + self.col + self.context + self.depth


@lru_cache(maxsize=50_000)
def _lap(
    part: Part,
    cluster: Cluster,
    runtime: Runtime,
    setup: Setup,
    recompute: str,
    overlap: tuple[str, ...],
    groups: tuple[Group, ...],
    depth: tuple[float, float, float],
    accumulates: bool,
) -> Lap:
    """A block's times; depth: gathers and reductions a micro-batch, bytes of a gradient."""
    times = roofline.block(part, cluster.device, setup, runtime)
    row, col, context, shards = groups
    again = _again(times, recompute, runtime)
    near = {"row": row, "col": col}
    exposed = {"row": 0.0, "col": 0.0}
    open_ = runtime.graphs or not setup.compiled
    hides = times.dw if "dx" in overlap and runtime.hidden_dx and open_ else 0.0
    for said in talk.block(part, setup, runtime):
        spent = links.seconds(cluster, said.op, said.bytes, near[said.axis])
        if not said.back and recompute in ("full", "reentrant"):
            spent *= 2
        if said.under:
            hidden = min(spent, hides)
            hides -= hidden
            spent += (SLOW - 1) * hidden
        exposed[said.axis] += spent * (1 - runtime.hidden_row)
    weights = sum(out * into for out, into in roofline.linears(part, setup))
    if accumulates:
        size = weights * (2 * runtime.gradient + (0 if runtime.fused_gradient else 2))
        more = roofline.traffic(cluster.device, size, setup.ranks)
        times = _slower(times, more)
    ring = _ring(part, cluster, setup, context, recompute, times)
    inside = times.forward + times.backward + again
    spent = depth[0] * links.seconds(
        cluster, "all_gather", 2 * weights, shards, rails=runtime.rails
    ) + depth[1] * links.seconds(
        cluster, "reduce_scatter", depth[2] * weights, shards, rails=runtime.rails
    )
    hidden = min(spent, inside) if "gather" in overlap and open_ else 0.0
    return Lap(
        times=times,
        again=again,
        row=exposed["row"],
        col=exposed["col"],
        context=ring,
        depth=spent - hidden + SLOW * hidden,
        weights=weights,
    )


def _slower(times: Times, more: float) -> Times:
    return Times(**{**vars(times), "between_back": times.between_back + more})


def _again(times: Times, recompute: str, runtime: Runtime) -> float:
    """What a block computes again."""
    if recompute in ("full", "reentrant"):
        return times.forward
    if recompute != "selective":
        return 0.0
    if runtime.selective == "half":
        return times.products / 2 + times.between
    if runtime.selective == "small":
        return times.between
    return times.attention if runtime.attention == "scores" else times.between


def _ring(
    part: Part, cluster: Cluster, setup: Setup, ranks: Group, recompute: str, times: Times
) -> float:
    """What of keys and values going round the context axis nothing hides."""
    if ranks.size == 1:
        return 0.0
    narrow = 0
    for leaf in part.find("siblings"):
        kept = [one for one in leaf.inside if one.dims[:1] == ("kv_heads",)]
        narrow += sum(roofline.local("kv_heads", one.shape[0], setup) for one in kept)
    rounds = 4 if recompute == "full" else 3
    size = 2 * setup.tokens * narrow * ranks.size
    spent = rounds * links.seconds(cluster, "all_gather", size, ranks)
    hidden = min(spent, times.attention + times.attention_back)
    return spent - hidden + SLOW * hidden


# ---- a step -----------------------------------------------------------------------------


def _step(
    job: Job,
    layout: Layout,
    cluster: Cluster,
    runtime: Runtime,
    setup: Setup,
    groups: Mapping[str, Group],
) -> dict[str, float]:
    """Seconds of a step by part."""
    plan, device, model = layout.plan, cluster.device, job.model
    micro = plan.micro_batches
    laps = _laps(job, layout, cluster, runtime, setup, groups)
    head = sum(roofline.head(model.parts[-1], device, setup))
    entry = sum(roofline.entry(model.parts[0], device, setup))
    blocks = model.layers
    mean_lap = sum(part.count * lap.total for part, lap in laps) / blocks
    slowest, mean = _stages(plan, runtime, blocks, mean_lap, entry, head)
    pipe = _messages(job, layout, cluster, runtime, setup, groups["pipe"])
    bubble = (plan.pipe - 1) / plan.chunks * (mean + pipe / plan.chunks)
    found = dict.fromkeys(NAMES, 0.0)
    share = micro / plan.pipe
    for part, lap in laps:
        times, n = lap.times, share * part.count
        core = times.attention + times.attention_back
        found["attention"] += n * core
        found["compute"] += n * (times.forward + times.backward - core)
        for name in ("again", "row", "col", "context", "depth"):
            found[name] += n * getattr(lap, name)
    found["compute"] += share * (head + entry)
    found["pipe"] = micro * pipe
    found["bubble"] = bubble + micro * (slowest - mean)
    numbers = _numbers(model, plan, laps)
    last = sum(part.count * (lap.times.backward + lap.again) for part, lap in laps) / plan.pipe
    found["data"] = _reduction(plan, cluster, runtime, groups, numbers, ASIDE * last)
    _updates(job, layout, cluster, runtime, numbers, slowest / 3, found)
    nodes = plan.world / cluster.per_node
    found["other"] = cluster.straggle * math.log2(max(nodes, 1.0)) * sum(found.values())
    return found


def _laps(
    job: Job,
    layout: Layout,
    cluster: Cluster,
    runtime: Runtime,
    setup: Setup,
    groups: Mapping[str, Group],
) -> list[tuple[Part, Lap]]:
    """The lap of each kind of block."""
    plan = layout.plan
    keep = plan.gathered == "keep" or runtime.gathers == "keep"
    gathers = 1.0 / plan.micro_batches if keep else 2.0
    if plan.recompute == "full" and runtime.rails == "one":
        gathers = 3.0  # its gathers are part of what is computed again
    reductions = 1.0 / plan.micro_batches if keep and runtime is not OURS else 1.0
    near = (groups["row"], groups["col"], groups["context"], groups["shards"])
    depth = (gathers, reductions, float(runtime.gradient)) if near[3].size > 1 else (0.0, 0.0, 0.0)
    if plan.depth == 1 and not runtime.fsdp:
        depth = (0.0, 0.0, 0.0)
    several = plan.micro_batches > 1
    return [
        (
            part,
            _lap(part, cluster, runtime, setup, plan.recompute, plan.overlap, near, depth, several),
        )
        for part in job.model.parts
        if part.is_block
    ]


@lru_cache(maxsize=50_000)
def _cut(pipe: int, chunks: int, blocks: int, cut: str, entry: float, head: float) -> float:
    """Work of the slowest stage, in blocks; entry and head: theirs, in blocks."""
    if cut == "balanced":
        return min(
            max(last + head, math.ceil((blocks - last) / (pipe - 1)) + entry)
            for last in range(max(blocks // pipe - math.ceil(head) - 1, 0), blocks // pipe + 1)
        )
    if blocks % (pipe * chunks) == 0:
        return blocks // pipe + max(entry, head)
    each = math.ceil((blocks + 2) / pipe)
    return max(each, each - 1 + max(entry, head))


def _stages(
    plan: Plan, runtime: Runtime, blocks: int, lap: float, entry: float, head: float
) -> tuple[float, float]:
    """Seconds of a micro-batch on the slowest stage and on a mean one."""
    mean = (blocks * lap + entry + head) / plan.pipe
    if plan.pipe == 1 or plan.spread:
        return mean, mean
    slowest = _cut(plan.pipe, plan.chunks, blocks, runtime.cut, entry / lap, head / lap) * lap
    return max(slowest, mean), mean


def _messages(
    job: Job, layout: Layout, cluster: Cluster, runtime: Runtime, setup: Setup, ranks: Group
) -> float:
    """What of the messages of a micro-batch between stages nothing hides."""
    plan = layout.plan
    if plan.pipe == 1:
        return 0.0
    width = job.model.units["embed"] / plan.col
    size = setup.tokens * width * roofline.BYTES[job.dtype]
    if runtime.scatter or runtime.sequence:
        size /= plan.row
    # a stage's neighbour is in another node unless all stages fit into one
    one = links.seconds(cluster, "send", size, Group(2, 2 if ranks.nodes == 1 else 1))
    return 2 * plan.chunks * one * (1 - runtime.hidden_pipe)


def _numbers(model: Model, plan: Plan, laps: list[tuple[Part, Lap]]) -> float:
    """Weights of a rank, gathered over depth: a stage's blocks and its end."""
    blocks = sum(part.count * lap.weights for part, lap in laps) / plan.pipe
    ends = model.parts[0].parameters + (0 if model.tied else model.parts[-1].parameters)
    count = 1 if plan.pipe == 1 or model.tied else 2
    return blocks + ends / count / (plan.row * plan.col)


def _reduction(
    plan: Plan,
    cluster: Cluster,
    runtime: Runtime,
    groups: Mapping[str, Group],
    numbers: float,
    behind: float,
) -> float:
    """What of the reduction over data nothing hides. behind: what may hide it."""
    whole = plan.depth == 1 and not runtime.fsdp
    copies = groups["copies"] if whole else groups["data"]
    if copies.size == 1:
        return 0.0
    held = numbers / plan.depth
    gradients, weights = held * runtime.gradient, held * 2
    if runtime.reduce == "scatter":
        spent = links.seconds(cluster, "reduce_scatter", gradients, copies)
    else:
        spent = links.seconds(cluster, "all_reduce", gradients, copies)
    after = 0.0
    if runtime.reduce != "all_reduce":
        after = links.seconds(cluster, "all_gather", weights, copies)
    if not runtime.hidden_data or "dw" not in plan.overlap:
        return spent + after
    spent += after
    hidden = min(spent, behind)
    return spent - hidden + SLOW * hidden


def _updates(
    job: Job,
    layout: Layout,
    cluster: Cluster,
    runtime: Runtime,
    numbers: float,
    forward: float,
    found: dict[str, float],
) -> None:
    """Seconds of the update: 2 · states + gradient + weight are read and written."""
    plan = layout.plan
    shards = plan.depth * (plan.data * plan.context if runtime.sharded else 1)
    own = numbers / shards
    setup_ranks = min(plan.world, cluster.per_node) if cluster.cores else 1
    each = 2 * runtime.states + runtime.gradient + 2
    rate = cluster.device.rate("update", ranks=setup_ranks)
    found["update"] = (
        own / rate if rate else roofline.traffic(cluster.device, own * each, setup_ranks)
    )
    if layout.states == "host":
        found["update"] = 0.0
        whole = cost.streamed(_moved(own, runtime), _host(cluster), cpu=False)
        blocks = max(job.model.layers // plan.pipe, 1)
        found["host"] = max(whole / blocks, whole - forward + forward / blocks)


def _moved(own: float, runtime: Runtime) -> cost.Moved:
    away = round(own * runtime.states)
    return cost.Moved(0, 0, away, round(own), 0, 0, 0)


def _host(cluster: Cluster) -> Any:
    host = cluster.host
    return SimpleNamespace(to_device=host.to_device, to_host=host.to_host, adam=host.adam)
