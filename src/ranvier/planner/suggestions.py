"""Nearest: what to change where no layout is possible, computed, not guessed.

Each change that is offered was tried: with it a layout can be divided, or fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from ranvier.config.plan import AXES, divisors, nearest_multiple
from ranvier.planner.memory.breakdown import GIB
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

MOST = 4096
"""Nodes up to which more are tried."""
LIKELY = (64, 3, 5, 7)
"""Factors of a batch with which most degrees could share it."""
TRIED = 64
"""Numbers of nodes right below that are tried; further ones by halves."""
BATCHES = 20
"""Batches that are tried, at most."""

Again = Callable[[str, int], Wish]
"""The wish with one setting, by its name, at another value, as if that had been given."""


def problems(result: Result, again: Again | None = None) -> list[str]:
    """Why nothing of a search can run, and the nearest changes that can."""
    wish = result.wish
    again = again or partial(changed, wish)
    if result.tight:
        return [_too_large(result, again)]
    reasons = list(_reasons(wish)) or [_indivisible(wish)]
    remedies = [*_settings(wish, again), *_batches(wish, again), *_devices(wish, again)]
    if not remedies and wish.fixed and possible(replace(wish, fixed=frozenset(), plan=_free(wish))):
        remedies = [f"other values than the given {_names(wish)}, or leave them out"]
    if remedies:  # what the rules offer alone may not be enough
        reasons = [text.partition(" Use ")[0] for text in reasons]
    elif " Use " in reasons[-1]:
        return reasons
    return [*reasons[:-1], f"{reasons[-1]} {_offered(remedies)}"]


def changed(wish: Wish, name: str, value: int) -> Wish:
    """The wish with one setting at another value, all else as it was."""
    change: dict[str, Any] = {name.rpartition(".")[2]: value}
    if name in ("nodes", "devices"):
        return replace(wish, cluster=wish.cluster.of(**change))
    if name in ("data.seq", "plan.batch"):
        return replace(wish, job=replace(wish.job, **change))
    return replace(wish, plan=replace(wish.plan, **change), fixed=wish.fixed | {*change})


def _offered(remedies: list[str]) -> str:
    if not remedies:
        return f"No change of one number helps up to {MOST} nodes. Use other devices or settings."
    return f"Use {', or '.join(remedies)}."


def _names(wish: Wish) -> str:
    return ", ".join(f"plan.{name}" for name in sorted(wish.fixed - {"batch"}))


def _free(wish: Wish) -> Any:
    """The plan with all degrees open."""
    return replace(wish.plan, **dict[str, Any](dict.fromkeys(AXES, 1)))


# ---- what does not fit --------------------------------------------------------------------


def _too_large(result: Result, again: Again) -> str:
    """Layouts can be divided, but none fits."""
    wish, least = result.wish, result.tight[0].prediction
    device, limit = wish.cluster.device, least.limit
    remedies = [*_larger(wish, again), *_shorter(wish, again), *_freer(wish)]
    return (
        f"{wish.job.model.name or 'The model'} with {wish.job.seq} tokens a sample fits "
        f"{wish.world} x {device.name} in no layout: the least is "
        f"{least.memory.total / GIB:.1f} GiB of {limit / GIB:.1f} GiB of a device that may be "
        "used, with everything computed again and states on the host where they find room. "
        f"{_offered(remedies)}"
    )


def _larger(wish: Wish, again: Again) -> Iterator[str]:
    """More devices of a node, or more nodes, on which something fits; one less does not."""
    if wish.cluster.cores:
        return
    node, known = again("nodes", 1).cluster.per_node, math.prod(wish.degrees.values())
    sizes = [("devices", n) for n in range(wish.world + 1, node) if n % known == 0]
    first = wish.world // node + 1
    sizes += [("nodes", n) for n in range(first, MOST + 1) if n * node % known == 0]
    low, high = -1, 0
    while high < len(sizes) and not fits(again(*sizes[high])):
        low, high = high, 2 * high + 1
    if high >= len(sizes):
        return
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(again(*sizes[middle])) else (middle, high)
    yield _sized(*sizes[high], node)


def _sized(name: str, number: int, node: int) -> str:
    more = f" ({number * node} devices)" if name == "nodes" else ""
    return f"{name}={number}{more}"


def _shorter(wish: Wish, again: Again) -> Iterator[str]:
    seq = wish.job.seq // 2
    while seq >= 16:
        if fits(again("data.seq", seq)):
            yield f"data.seq={seq}"
            return
        seq //= 2


def _freer(wish: Wish) -> Iterator[str]:
    """What is settled and would have to be left open."""
    if wish.fixed - {"batch"} or wish.states:
        free = replace(wish, fixed=frozenset(), states=None)
        if fits(free):
            best = search(free).best
            names = _names(wish) or "memory.states"
            such = " ".join(f"{a}={n}" for a, n in best.plan.degrees.items() if n > 1)
            yield f"other values than the given {names} (such as {such or 'none'})"


# ---- what cannot be divided ---------------------------------------------------------------


def _reasons(wish: Wish) -> Iterator[str]:
    """Rules that what is settled breaks whatever the rest is."""
    settled = {axis: getattr(wish.plan, axis) for axis in AXES if axis in wish.fixed}
    settled = {axis: size for axis, size in settled.items() if size != -1}
    for axis, size in settled.items():
        if size < 1:
            yield f"{axis}={size} is not a number of ranks. A degree is at least 1."
    settled = {axis: max(size, 1) for axis, size in settled.items()}
    known = math.prod(settled.values())
    if wish.world % known or (known != wish.world and settled.keys() >= {*wish.axes}):
        shape = " · ".join(f"{axis}={size}" for axis, size in settled.items() if size > 1)
        yield (
            f"{shape or 'All degrees 1'} on {wish.world} devices. Degrees multiply to the number "
            "of devices."
        )
    alone = replace(_free(wish), **dict[str, Any](settled), batch=wish.job.batch)
    if "micro_batch" not in wish.fixed or alone.micro_batch < 1:
        alone = replace(alone, micro_batch=max(alone.batch // alone.replicas, 1))
    yield from alone.problems(wish.sizes)


def _indivisible(wish: Wish) -> str:
    """No factorisation can be divided."""
    settled = " ".join(f"{axis}={size}" for axis, size in wish.degrees.items())
    settled = f" with {settled}" if settled else ""
    heads, layers = wish.sizes.get("heads"), wish.sizes["layers"]
    return (
        f"{wish.world} devices cannot share this job{settled}: batch={wish.job.batch}, "
        f"seq={wish.job.seq}, heads={heads}, layers={layers}. Ranks divide samples, tokens, heads "
        "and layers evenly."
    )


def _settings(wish: Wish, again: Again) -> Iterator[str]:
    """The nearest value of each number of the plan that is settled, with which it is possible."""
    for name in (*AXES, "micro_batch", "chunks"):
        if name not in wish.fixed:
            continue
        given = getattr(wish.plan, name)
        values = divisors(wish.world) if name in AXES else divisors(wish.job.batch)
        values.sort(key=lambda size: abs(math.log(size / max(given, 1))))
        for value in values:
            if value != given and possible(again(f"plan.{name}", value)):
                yield f"plan.{name.replace('_', '-')}={value}"
                break


def _batches(wish: Wish, again: Again) -> Iterator[str]:
    """The nearest batch."""
    near = set()
    loose = replace(wish, job=replace(wish.job, batch=math.lcm(wish.world, *LIKELY)))
    for sizes in factorisations(wish.world, degrees(loose)):
        for plan in plans(wish, sizes):
            near.add(nearest_multiple(plan.batch, plan.replicas * max(plan.micro_batch, 1)))
    for batch in sorted(near, key=lambda one: (abs(one - wish.job.batch), one))[:BATCHES]:
        if batch != wish.job.batch and possible(again("plan.batch", batch)):
            yield f"plan.batch={batch}"
            return


def _devices(wish: Wish, again: Again) -> Iterator[str]:
    """The nearest smaller number of nodes, or of devices of one, and what degrees multiply to."""
    node = again("nodes", 1).cluster.per_node

    def able(nodes: int) -> bool:
        return possible(again("nodes", nodes))

    whole = math.lcm(math.prod(size for size in wish.degrees.values() if size > 0), node) // node
    if whole * node > wish.world and whole <= MOST and able(whole):
        yield _sized("nodes", whole, node)
    fewer = _fewer(wish.world // node, able) if wish.world % node == 0 else 0
    if fewer:
        yield _sized("nodes", fewer, node)
        return
    for devices in range(min(wish.world, node) - 1, 0, -1):
        if possible(again("devices", devices)):
            yield f"devices={devices}"
            return


def _fewer(nodes: int, able: Callable[[int], bool]) -> int:
    """The largest smaller number that is able, 0 if none is seen."""
    for near in range(nodes - 1, max(nodes - 1 - TRIED, 0), -1):
        if able(near):
            return near
    half = nodes // 2
    while half and not able(half):
        half //= 2
    above = range(min(2 * half, nodes) - 1, half, -max(half // TRIED, 1))
    return next(filter(able, above), half)


def possible(wish: Wish) -> bool:
    """Whether any factorisation can be divided."""
    return any(
        allowed(wish, plan)
        for sizes in factorisations(wish.world, degrees(wish))
        for plan in plans(wish, sizes)
    )
