"""Crowd: seconds of a step whose ranks share the cores of a host.

Nothing is hidden there: who communicates takes a core as well. What a rank does is added up, each
term at the rate that so many ranks at once were measured at:

    compute   products + attention + bytes between them + operations that Python starts
    talk      Σ calls · (latency + bytes / bandwidth + slice), of all that `moves` says
    step      max(busy, (busy + bubble) / crowd)

crowd: ranks that want each core. Where it is above 1, others compute while a stage waits, and who
communicates waits for those that have no core just now: a slice of the scheduler's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import log2, prod

from ranvier.config.plan import Plan
from ranvier.cost.layers import Flow
from ranvier.planner.cluster import Cluster, Device
from ranvier.planner.comm_volume import Move, Stage, cut, moves, stage_of
from ranvier.planner.frameworks import Runtime
from ranvier.planner.model_spec import Model, Part
from ranvier.planner.time import compute, links
from ranvier.planner.time.compute import BYTES, Setup
from ranvier.planner.time.links import Group

WIDTHS: Mapping[str, float] = {"embed": 86.0, "heads": 39.0, "kv_heads": 27.0, "mlp": 14.0}
"""Numbers that a block reads or writes between products for a token, forward and backward, for each
number of a dim; counted below torch's dispatcher."""
LOGIT, WORD = 24.0, 38.0
"""The same of a logit, and of a number of the residual stream outside of blocks."""
AGAIN = (0.58, 0.3)
"""Share of the operations, and of those numbers, that a block's second forward pass is."""
OPERATIONS, DOCUMENTS, ENDS, UPDATED = 210, 64, 168, 37
"""That Python starts: of a block; for the documents of each sample in it, where samples are packed;
outside of blocks; of the update of each matrix."""
SLICE = 0.75e-3
"""Seconds that Linux leaves a core to one who wants it at least, by 1 + log2 of the cores, up to
8."""
PYTHON = 1.3
"""Time of one of them, with our own code around it, over that of one and its backward."""


def step(
    model: Model, plan: Plan, setup: Setup, cluster: Cluster, runtime: Runtime, *, packed: bool
) -> dict[str, float]:
    """Seconds of a step by part."""
    return _together(stages(model, plan, setup, cluster, runtime, packed=packed), plan, cluster)


def stages(
    model: Model, plan: Plan, setup: Setup, cluster: Cluster, runtime: Runtime, *, packed: bool
) -> list[dict[str, float]]:
    """Seconds of a step on each stage by part, waiting left out."""
    flow = Flow(plan.micro_batch, setup.seq, BYTES[setup.dtype], statistics=4)
    firsts, found = cut(model, plan, setup.seq), []
    for index in range(plan.pipe):
        here = stage_of(model, index, plan.pipe, plan.chunks, firsts, plan.spread)
        parts = _computed(here, plan, setup, cluster, runtime, packed)
        for row in moves(model, plan, flow, stage=index, orders=0).rows:
            name, seconds = _talked(row, plan, cluster)
            parts[name] = parts.get(name, 0.0) + seconds
        parts["update"] = parts.get("update", 0.0) + _updated(here, plan, setup, cluster)
        found.append(parts)
    return found


def _together(stages: list[dict[str, float]], plan: Plan, cluster: Cluster) -> dict[str, float]:
    """The mean stage, and what others wait for it."""
    names = {name for parts in stages for name in parts}
    mean = {name: sum(parts.get(name, 0.0) for parts in stages) / len(stages) for name in names}
    busy, slowest = sum(mean.values()), max(sum(parts.values()) for parts in stages)
    fill = (plan.pipe - 1) / plan.chunks / plan.micro_batches
    bubble = (busy - mean.get("update", 0.0)) * fill + slowest - busy
    crowd = max(plan.world / cluster.cores, 1.0)
    return {**mean, "bubble": max((busy + bubble) / crowd - busy, 0.0)}


def _computed(
    stage: Stage, plan: Plan, setup: Setup, cluster: Cluster, runtime: Runtime, packed: bool
) -> dict[str, float]:
    """What a rank of a stage computes in a step."""
    found = {"compute": 0.0, "attention": 0.0, "again": 0.0}
    for part, count in stage.here:
        own = _part(part, cluster, setup, runtime, packed)
        times = count * plan.micro_batches
        found["compute"] += times * own[0]
        found["attention"] += times * own[1]
        if part.is_block and plan.recompute in ("selective", "full"):
            found["again"] += times * own[2 if plan.recompute == "selective" else 3]
    return found


@lru_cache(maxsize=50_000)
def _part(
    part: Part, cluster: Cluster, setup: Setup, runtime: Runtime, packed: bool
) -> tuple[float, float, float, float]:
    """A micro-batch of one part: compute, attention; again, selective or full."""
    device, ranks, tokens = cluster.device, setup.ranks, setup.tokens
    cell = tokens / (setup.row * setup.col) * BYTES[setup.dtype]
    between = device.rate("between", ranks=ranks, usual=device.bandwidth)
    start = PYTHON * device.rate("pair", ranks=ranks, usual=4.0 * device.launch)
    if not part.is_block:
        width = max((leaf.shape[-1] for leaf in part.find("embedding", "head")), default=0)
        numbers = WORD / 2 * width + sum(LOGIT * leaf.shape[0] for leaf in part.find("head"))
        products = sum(
            sum(_products(device, tokens, out, into, setup))
            for out, into in compute.linears(part, setup)
        )
        return products + numbers * cell / between + ENDS / 2 * start, 0.0, 0.0, 0.0
    times = compute.block(part, device, setup, runtime)
    forward, back = times.products, times.dx + times.dw
    numbers = sum(WIDTHS.get(dim, 0.0) * size for dim, size in _sizes(part).items())
    inside = setup.samples / (1 if setup.features else setup.col)
    count = OPERATIONS + (DOCUMENTS * inside if packed else 0)
    small, launched = numbers * cell / between, count * start
    core = times.attention + times.attention_back
    light = AGAIN[0] * launched + AGAIN[1] * small
    return forward + back + small + launched, core, light, light + forward + times.attention


def _products(
    device: Device, tokens: int, out: int, into: int, setup: Setup
) -> tuple[float, float, float]:
    """Seconds of a layer's three products."""
    shapes = ((tokens, out, into, "y"), (tokens, into, out, "dx"), (out, into, tokens, "dw"))
    return tuple(  # type: ignore[return-value]
        compute.product(device, m, n, k, setup.dtype, kind, setup.ranks) for m, n, k, kind in shapes
    )


def _sizes(part: Part) -> dict[str, int]:
    """Elements of each dim of a block."""
    found: dict[str, int] = {}
    for leaf in part.leaves:
        for one in leaf.inside or (leaf,):
            for dim, size in zip(one.dims, one.shape, strict=False):
                name = dim if isinstance(dim, str) else dim[1]
                found[name] = max(found.get(name, 0), size)
    return found


def _talked(row: Move, plan: Plan, cluster: Cluster) -> tuple[str, float]:
    """The part that communication belongs to, and its seconds; messages count where they leave."""
    name = row.axis[0] if row.axis else "other"
    size = prod(plan.degrees[axis] for axis in row.axis)
    if row.op == "receive":
        return name, 0.0
    op, size = ("send", 2) if row.op == "send" else (row.op, size)
    op = "all_gather" if op == "broadcast" else op
    wait = SLICE * (1 + log2(min(cluster.cores, 8))) if plan.world > cluster.cores else 0.0
    return name, row.count * (links.seconds(cluster, op, row.bytes, Group(size, size)) + wait)


def _updated(stage: Stage, plan: Plan, setup: Setup, cluster: Cluster) -> float:
    """Seconds of the update of a rank's share."""
    device = cluster.device
    lost = 1 - 1 / plan.expert  # of its experts a rank has a part
    whole = sum(n * (part.parameters - lost * part.expert_parameters) for part, n in stage.here)
    own = whole / (plan.row * plan.col * plan.depth * plan.data)
    matrices = sum(count * _matrices(part) for part, count in stage.here)
    rate = device.rate("update", ranks=setup.ranks, usual=device.bandwidth / 28)
    start = device.rate("launch", ranks=setup.ranks, usual=device.launch)
    return own / rate + UPDATED * matrices * start


def _matrices(part: Part) -> int:
    return sum(len(leaf.inside) or 1 for leaf in part.leaves if leaf.shape or leaf.inside)
