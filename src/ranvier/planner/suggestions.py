"""Suggests the smallest changes that make a layout possible if none is.

Each suggestion was tested: with it, at least one layout is valid or fits into memory.
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
    SearchRequest,
    SearchResult,
    degree_choices,
    enumerate_degrees,
    has_fitting_layout,
    is_allowed,
    plans_of_degrees,
    search_layouts,
)

MAX_NODES = 4096
"""Maximum number of nodes of the larger clusters that are tried."""
COMMON_BATCH_FACTORS = (64, 3, 5, 7)
"""Factors of a batch that make it divisible by most degrees."""
NEAR_NODE_COUNTS = 64
"""Number of next smaller node counts that are all tried; below them, the count is halved."""
MAX_TRIED_BATCHES = 20
"""Maximum number of batch sizes that are tried."""

RequestChanger = Callable[[str, int], SearchRequest]
"""Returns the request in which the user has set the named setting to the value."""


def explain_infeasible(result: SearchResult, again: RequestChanger | None = None) -> list[str]:
    """Returns why no layout can run, and the smallest changes that make one possible."""
    wish = result.request
    again = again or partial(change_setting, wish)
    if result.oversized_candidates:
        return [_explain_out_of_memory(result, again)]
    reasons = list(_broken_rules(wish)) or [_explain_indivisible(wish)]
    remedies = [
        *_suggest_settings(wish, again),
        *_suggest_batch(wish, again),
        *_suggest_fewer_devices(wish, again),
    ]
    if (
        not remedies
        and wish.fixed_fields
        and is_divisible(replace(wish, fixed_fields=frozenset(), plan=_unconstrained_plan(wish)))
    ):
        remedies = [f"other values of {_fixed_setting_names(wish)}, or leave them out"]
    # The remedy of a single rule may not be enough: replace it by tested ones.
    if remedies:
        reasons = [text.partition(" Use ")[0] for text in reasons]
    elif " Use " in reasons[-1]:
        return reasons
    return [*reasons[:-1], f"{reasons[-1]} {_format_remedies(remedies)}"]


def change_setting(wish: SearchRequest, name: str, value: int) -> SearchRequest:
    """Returns the request with one setting changed."""
    if name == "data.seq_len":
        return replace(wish, workload=replace(wish.workload, seq=value))
    if name == "plan.global_batch":
        return replace(wish, workload=replace(wish.workload, batch=value))
    change: dict[str, Any] = {name.rpartition(".")[2]: value}
    if name in ("nodes", "devices"):
        return replace(wish, cluster=wish.cluster.with_size(**change))
    return replace(
        wish, plan=replace(wish.plan, **change), fixed_fields=wish.fixed_fields | {*change}
    )


def _format_remedies(remedies: list[str]) -> str:
    if not remedies:
        return (
            f"No change of a single number helps up to {MAX_NODES} nodes. Use other devices or "
            "settings."
        )
    return f"Use {', or '.join(remedies)}."


def _fixed_setting_names(wish: SearchRequest) -> str:
    return ", ".join(f"plan.{name}" for name in sorted(wish.fixed_fields - {"global_batch"}))


def _unconstrained_plan(wish: SearchRequest) -> Any:
    """Returns the plan without fixed degrees."""
    return replace(wish.plan, **dict[str, Any](dict.fromkeys(AXES, 1)))


# ---- what does not fit --------------------------------------------------------------------


def _explain_out_of_memory(result: SearchResult, again: RequestChanger) -> str:
    """Returns the message if valid layouts exist, but none fits into memory."""
    wish = result.request
    least = result.oversized_candidates[0].prediction
    device = wish.cluster.device
    limit = least.limit
    remedies = [
        *_suggest_more_devices(wish, again),
        *_suggest_shorter_seq(wish, again),
        *_suggest_free_settings(wish),
    ]
    return (
        f"{wish.workload.model.name or 'The model'} with {wish.workload.seq} tokens per sample "
        f"does not fit on {wish.world_size} x {device.name} in any layout. The smallest layout "
        f"needs {least.memory.total_bytes / GIB:.1f} GiB, but only {limit / GIB:.1f} GiB per "
        "device are usable, even with full recomputation and optimizer states on the host where "
        "they fit. "
        f"{_format_remedies(remedies)}"
    )


def _suggest_more_devices(wish: SearchRequest, again: RequestChanger) -> Iterator[str]:
    """Yields the smallest larger number of devices or nodes on which a layout fits."""
    if wish.cluster.cores:
        return
    node = again("nodes", 1).cluster.per_node
    known = math.prod(wish.fixed_degrees.values())
    # First more devices per node, then more nodes; only numbers that the fixed degrees divide.
    sizes = [("devices", n) for n in range(wish.world_size + 1, node) if n % known == 0]
    first = wish.world_size // node + 1
    sizes += [("nodes", n) for n in range(first, MAX_NODES + 1) if n * node % known == 0]
    low = -1
    high = 0
    # Exponential search for an upper bound, then bisection.
    while high < len(sizes) and not has_fitting_layout(again(*sizes[high])):
        low = high
        high = 2 * high + 1
    if high >= len(sizes):
        return
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if has_fitting_layout(again(*sizes[middle])) else (middle, high)
    yield _format_cluster_size(*sizes[high], node)


def _format_cluster_size(name: str, number: int, node: int) -> str:
    if name == "nodes":
        more = f" ({number * node} devices)"
    else:
        more = ""
    return f"{name}={number}{more}"


def _suggest_shorter_seq(wish: SearchRequest, again: RequestChanger) -> Iterator[str]:
    seq = wish.workload.seq // 2
    while seq >= 16:
        if has_fitting_layout(again("data.seq_len", seq)):
            yield f"data.seq_len={seq}"
            return
        seq //= 2


def _suggest_free_settings(wish: SearchRequest) -> Iterator[str]:
    """Yields the fixed settings that must be left open for a layout to fit."""
    if wish.fixed_fields - {"global_batch"} or wish.states:
        free = replace(wish, fixed_fields=frozenset(), states=None)
        if has_fitting_layout(free):
            best = search_layouts(free).best
            names = _fixed_setting_names(wish) or "memory.optimizer_states"
            such = " ".join(f"{a}={n}" for a, n in best.plan.degrees.items() if n > 1)
            yield f"other values of {names} (e.g. {such or 'none'})"


# ---- what cannot be divided ---------------------------------------------------------------


def _broken_rules(wish: SearchRequest) -> Iterator[str]:
    """Yields the rules that the fixed settings break, whatever the other settings are."""
    settled = {axis: getattr(wish.plan, axis) for axis in AXES if axis in wish.fixed_fields}
    settled = {axis: size for axis, size in settled.items() if size != -1}
    for axis, size in settled.items():
        if size < 1:
            yield f"{axis}={size} is not a number of ranks. A degree is at least 1."
    settled = {axis: max(size, 1) for axis, size in settled.items()}
    known = math.prod(settled.values())
    if wish.world_size % known or (
        known != wish.world_size and settled.keys() >= {*wish.searched_axes}
    ):
        shape = " · ".join(f"{axis}={size}" for axis, size in settled.items() if size > 1)
        yield (
            f"{shape or 'All degrees 1'} on {wish.world_size} devices is not possible. The product "
            "of the degrees must equal the number of devices."
        )
    # All other degrees are 1 here, so a broken rule is due to the fixed ones.
    alone = replace(
        _unconstrained_plan(wish), **dict[str, Any](settled), global_batch=wish.workload.batch
    )
    if "micro_batch" not in wish.fixed_fields or alone.micro_batch < 1:
        alone = replace(alone, micro_batch=max(alone.global_batch // alone.num_replicas, 1))
    yield from alone.find_problems(wish.dim_sizes)


def _explain_indivisible(wish: SearchRequest) -> str:
    """Returns the message if no factorization of the devices is valid."""
    settled = " ".join(f"{axis}={size}" for axis, size in wish.fixed_degrees.items())
    if settled:
        settled = f" with {settled}"
    else:
        settled = ""
    heads = wish.dim_sizes.get("heads")
    layers = wish.dim_sizes["layers"]
    return (
        f"{wish.world_size} devices cannot share this job{settled}: "
        f"global_batch={wish.workload.batch}, seq_len={wish.workload.seq}, heads={heads}, "
        f"layers={layers}. The degrees must divide samples, tokens, heads and layers."
    )


def _suggest_settings(wish: SearchRequest, again: RequestChanger) -> Iterator[str]:
    """Yields the nearest valid value of each fixed number of the plan."""
    for name in (*AXES, "micro_batch", "virtual_stages"):
        if name not in wish.fixed_fields:
            continue
        given = getattr(wish.plan, name)
        if name in AXES:
            values = divisors(wish.world_size)
        else:
            values = divisors(wish.workload.batch)
        values.sort(key=lambda size: abs(math.log(size / max(given, 1))))
        for value in values:
            if value != given and is_divisible(again(f"plan.{name}", value)):
                yield f"plan.{name.replace('_', '-')}={value}"
                break


def _suggest_batch(wish: SearchRequest, again: RequestChanger) -> Iterator[str]:
    """Yields the nearest valid global batch."""
    near = set()
    # With a batch that has many divisors, the batch excludes no degree.
    loose = replace(
        wish,
        workload=replace(wish.workload, batch=math.lcm(wish.world_size, *COMMON_BATCH_FACTORS)),
    )
    for sizes in enumerate_degrees(wish.world_size, degree_choices(loose)):
        for plan in plans_of_degrees(wish, sizes):
            near.add(
                nearest_multiple(plan.global_batch, plan.num_replicas * max(plan.micro_batch, 1))
            )
    for batch in sorted(near, key=lambda one: (abs(one - wish.workload.batch), one))[
        :MAX_TRIED_BATCHES
    ]:
        if batch != wish.workload.batch and is_divisible(again("plan.global_batch", batch)):
            yield f"plan.global_batch={batch}"
            return


def _suggest_fewer_devices(wish: SearchRequest, again: RequestChanger) -> Iterator[str]:
    """Yields the nearest smaller number of nodes or devices, and the number that the fixed
    degrees need.
    """
    node = again("nodes", 1).cluster.per_node

    def able(nodes: int) -> bool:
        return is_divisible(again("nodes", nodes))

    # Fixed degrees may need more nodes than the cluster has.
    whole = (
        math.lcm(math.prod(size for size in wish.fixed_degrees.values() if size > 0), node) // node
    )
    if whole * node > wish.world_size and whole <= MAX_NODES and able(whole):
        yield _format_cluster_size("nodes", whole, node)
    if wish.world_size % node == 0:
        fewer = _largest_smaller(wish.world_size // node, able)
    else:
        fewer = 0
    if fewer:
        yield _format_cluster_size("nodes", fewer, node)
        return
    for devices in range(min(wish.world_size, node) - 1, 0, -1):
        if is_divisible(again("devices", devices)):
            yield f"devices={devices}"
            return


def _largest_smaller(nodes: int, able: Callable[[int], bool]) -> int:
    """Returns the largest valid smaller number; 0 if none was found."""
    for near in range(nodes - 1, max(nodes - 1 - NEAR_NODE_COUNTS, 0), -1):
        if able(near):
            return near
    half = nodes // 2
    while half and not able(half):
        half //= 2
    # Refine between the valid half and the next larger power of two, in a bounded number of steps.
    above = range(min(2 * half, nodes) - 1, half, -max(half // NEAR_NODE_COUNTS, 1))
    return next(filter(able, above), half)


def is_divisible(wish: SearchRequest) -> bool:
    """Returns whether any factorization of the devices is valid."""
    return any(
        is_allowed(wish, plan)
        for sizes in enumerate_degrees(wish.world_size, degree_choices(wish))
        for plan in plans_of_degrees(wish, sizes)
    )
