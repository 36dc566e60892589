"""Nearest: what to change where no layout is possible, computed, not guessed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ranvier.plan import RUNTIME, nearest_multiple
from ranvier.planner.search import (
    Result,
    Wish,
    allowed,
    degrees,
    factorisations,
    fits,
    plans,
    search,
)
from ranvier.planner.table import GIB

MOST = 4096
"""Nodes up to which more are tried."""
LIKELY = (64, 3, 5, 7)
"""Factors of a batch with which most degrees could share it."""
TRIED = 512
"""Smaller clusters that are tried."""


def problems(result: Result) -> list[str]:
    """Why nothing of a search can run, and the nearest changes that can."""
    if result.tight:
        return [_too_large(result)]
    wish = result.wish
    known = math.prod(wish.degrees.values())
    if wish.world % known == 0 and (len(wish.degrees) < len(wish.axes) or known == wish.world):
        return [_indivisible(wish)]
    sizes: dict[str, Any] = {axis: wish.degrees.get(axis, 1) for axis in RUNTIME}
    alone = replace(wish.plan, **sizes)
    alone = replace(alone, batch=wish.job.batch, micro_batch=wish.job.batch // alone.replicas or 1)
    return list(alone.problems(wish.sizes, wish.world))


def _too_large(result: Result) -> str:
    """Layouts can be divided, but none fits."""
    wish, least = result.wish, result.tight[0].prediction
    device, limit = wish.cluster.device, least.limit
    remedies = [*_more_nodes(wish), *_shorter(wish), *_freer(wish)]
    return (
        f"{wish.job.model.name or 'The model'} with {wish.job.seq} tokens a sample fits "
        f"{wish.world} x {device.name} in no layout: the least is "
        f"{least.memory.total / GIB:.1f} GiB of {limit / GIB:.1f} GiB of a device that may be "
        "used, with everything computed again and states on the host where that is allowed. "
        f"{_offered(remedies)}"
    )


def _offered(remedies: list[str]) -> str:
    if not remedies:
        return f"No change of one number helps up to {MOST} nodes. Use other devices or settings."
    return f"Use {', or '.join(remedies)}."


def _more_nodes(wish: Wish) -> Iterator[str]:
    """The least number of nodes on which something fits, by doubling and then between."""
    if wish.cluster.cores or wish.degrees:
        return
    low, high = wish.cluster.nodes, 2 * wish.cluster.nodes
    while high <= MOST and not fits(_on(wish, high)):
        low, high = high, 2 * high
    if high > MOST:
        return
    while high - low > max(1, high // 8):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(_on(wish, middle)) else (middle, high)
    yield f"nodes={high} ({high * wish.cluster.per_node} devices)"


def _on(wish: Wish, nodes: int) -> Wish:
    return replace(wish, cluster=replace(wish.cluster, nodes=nodes))


def _shorter(wish: Wish) -> Iterator[str]:
    seq = wish.job.seq // 2
    while seq >= 16:
        shorter = replace(wish, job=replace(wish.job, seq=seq))
        if fits(shorter):
            yield f"data.seq={seq}"
            return
        seq //= 2


def _freer(wish: Wish) -> Iterator[str]:
    """What is settled and would have to be left open."""
    settled = sorted(wish.fixed - {"batch"})
    if settled or wish.states:
        free = replace(wish, fixed=frozenset(), states=None)
        if fits(free):
            best = search(free).best
            names = ", ".join(f"plan.{name}" for name in settled) or "memory.states"
            such = " ".join(f"{a}={n}" for a, n in best.plan.degrees.items() if n > 1)
            yield f"other values than the given {names} (such as {such or 'none'})"


def _indivisible(wish: Wish) -> str:
    """No factorisation can be divided: why, and the nearest batch or number of devices."""
    batches = []
    loose = replace(wish, job=replace(wish.job, batch=math.lcm(wish.world, *LIKELY)))
    for sizes in factorisations(wish.world, degrees(loose)):
        for plan in plans(wish, sizes):
            batch = nearest_multiple(plan.batch, plan.replicas * plan.micro_batch)
            if not list(replace(plan, batch=batch).problems(wish.sizes, wish.world)):
                batches.append((abs(batch - plan.batch), batch))
    remedies = [f"plan.batch={batch}" for _, batch in sorted(batches)[:1]]
    remedies += list(_other_devices(wish))
    what = f"{wish.world} devices cannot share this job"
    settled = " ".join(f"{axis}={size}" for axis, size in wish.degrees.items())
    settled = f" with {settled}" if settled else ""
    heads, layers = wish.sizes.get("heads"), wish.sizes["layers"]
    job = f"batch={wish.job.batch}, seq={wish.job.seq}, heads={heads}, layers={layers}"
    return (
        f"{what}{settled}: {job}. Ranks divide samples, tokens, heads and layers "
        f"evenly. {_offered(remedies)}"
    )


def _other_devices(wish: Wish) -> Iterator[str]:
    """The nearest smaller number of nodes, or of devices of one, that can share the job."""
    cluster = wish.cluster
    for nodes in range(cluster.nodes - 1, max(cluster.nodes - TRIED, 0), -1):
        if possible(_on(wish, nodes)):
            yield f"nodes={nodes} ({nodes * cluster.per_node} devices)"
            return
    for devices in range(cluster.per_node - 1, 0, -1):
        if possible(replace(wish, cluster=cluster.of(devices=devices))):
            yield f"devices={devices}"
            return


def possible(wish: Wish) -> bool:
    """Whether any factorisation can be divided."""
    return any(
        allowed(wish, plan)
        for sizes in factorisations(wish.world, degrees(wish))
        for plan in plans(wish, sizes)
    )
