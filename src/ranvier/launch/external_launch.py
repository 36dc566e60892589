"""Laid out: the grid of a program that somebody else wrote, under any launcher or alone.

A program that uses the package as a library says how many ranks lie on each axis and nothing else:
who this process is and where the others are comes from its launcher, the device from its place on
the node. A process group that is there already is used as it is.
"""

from __future__ import annotations

import atexit
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ranvier.config.plan import AXES, InnerSplit, Plan
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.launch.environment import ProcessInfo, read_process_info
from ranvier.launch.process_group import init_process_group

AxisSizes = Plan | Mapping[str, int]
"""A plan, or the ranks on each axis; data is inferred where it is left out."""


def build_grid(
    axes: AxisSizes | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    inner: InnerSplit | None = None,
    device: torch.device | str | None = None,
) -> tuple[Grid, torch.device]:
    """The grid of all ranks that were started, and the device of this one.

    axes: None: all on data. sizes: units of each dim of the model, which the axes must divide.
    Communicates: with all ranks, unless they are a process group already.
    """
    me = read_process_info() or ProcessInfo()
    if device is not None:
        here = torch.device(device)
    else:
        here = _local_device(me)
    world = _world_size(me)
    plan = resolve_axes(axes, world, sizes or {}, inner=inner)  # before anybody waits for anybody
    connected = _join_process_group(me, here)
    return Grid.from_plan(
        plan, connected=connected, ranks_per_node=max(me.local_world_size, 1)
    ), here


def resolve_axes(
    axes: AxisSizes | None, world: int, sizes: Mapping[str, int], *, inner: InnerSplit | None = None
) -> Plan:
    """The plan of a grid of `world` ranks, or a PlanError with every problem.

    Its batch says nothing: how samples are cut is a matter of whoever brings them.
    """
    if isinstance(axes, Plan):
        odd = []
    else:
        odd = sorted({*(axes or {})} - {*AXES})
    if odd:
        raise PlanError(
            f"{', '.join(odd)}: no axis. The axes are {', '.join(AXES)}. Use one of these."
        )
    if isinstance(axes, Plan):
        plan = axes
    else:
        plan = Plan(**dict[str, Any](axes or {}))
    known = {axis: max(size, 1) for axis, size in plan.degrees.items()}
    plan = replace(
        plan,
        inner=inner or plan.inner,
        batch=math.prod(known.values()) * world * known["col"],
        micro_batch=known["col"],
        recompute="none",
    )
    return plan.check_and_resolve(sizes, world)


def _world_size(me: ProcessInfo) -> int:
    from torch import distributed

    if _has_process_group():
        return distributed.get_world_size()
    return me.world_size


def _has_process_group() -> bool:
    from torch import distributed

    return distributed.is_available() and distributed.is_initialized()


def _local_device(me: ProcessInfo) -> torch.device:
    """The device of this place on its node, or the CPU."""
    if torch.cuda.is_available() and me.local_rank < torch.cuda.device_count():
        return torch.device("cuda", me.local_rank)
    return torch.device("cpu")


def _join_process_group(me: ProcessInfo, device: torch.device) -> bool:
    """Join the others if there are any; whether there is a process group of several."""
    if not _has_process_group() and me.world_size > 1:
        from torch import distributed

        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.set_device(device)
        init_process_group(me, backend="nccl" if cuda else "gloo")
        if cuda:
            atexit.register(distributed.destroy_process_group)
    return _world_size(me) > 1
