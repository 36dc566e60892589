"""Grid of a program that uses the package as a library, with any launcher or without one.

The program only gives the number of ranks on each axis. Rank and addresses come from its launcher,
the device from the local rank. An existing process group is used.
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
"""A plan, or the number of ranks on each axis; `data` is inferred if it is missing."""


def build_grid(
    axes: AxisSizes | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    inner: InnerSplit | None = None,
    device: torch.device | str | None = None,
) -> tuple[Grid, torch.device]:
    """Returns the grid of all ranks, and the device of this one.

    axes: None uses all ranks for data. sizes: units of each dim of the model, which the axes must
    divide. Communicates: with all ranks, unless a process group already exists.
    """
    me = read_process_info() or ProcessInfo()
    if device is not None:
        here = torch.device(device)
    else:
        here = _local_device(me)
    world = _world_size(me)
    # Resolved first, so that an invalid plan fails on every rank before any rank waits.
    plan = resolve_axes(axes, world, sizes or {}, inner=inner)
    connected = _join_process_group(me, here)
    return Grid.from_plan(
        plan, connected=connected, ranks_per_node=max(me.local_world_size, 1)
    ), here


def resolve_axes(
    axes: AxisSizes | None, world: int, sizes: Mapping[str, int], *, inner: InnerSplit | None = None
) -> Plan:
    """Returns the plan of a grid of `world` ranks; raises a PlanError with every problem.

    Its batch size is arbitrary, because the caller decides how samples are split.
    """
    if isinstance(axes, Plan):
        odd = []
    else:
        odd = sorted({*(axes or {})} - {*AXES})
    if odd:
        raise PlanError(
            f"{', '.join(odd)} is not an axis. The axes are {', '.join(AXES)}. Use one of them."
        )
    if isinstance(axes, Plan):
        plan = axes
    else:
        plan = Plan(**dict[str, Any](axes or {}))
    # Use a batch that every grid divides, so that only the axes are checked.
    known = {axis: max(size, 1) for axis, size in plan.degrees.items()}
    plan = replace(
        plan,
        col_splits=inner or plan.col_splits,
        global_batch=math.prod(known.values()) * world * known["col"],
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
    """Return the GPU of the local rank, or the CPU."""
    if torch.cuda.is_available() and me.local_rank < torch.cuda.device_count():
        return torch.device("cuda", me.local_rank)
    return torch.device("cpu")


def _join_process_group(me: ProcessInfo, device: torch.device) -> bool:
    """Join the process group if there are other ranks; return whether there are."""
    if not _has_process_group() and me.world_size > 1:
        from torch import distributed

        cuda = device.type == "cuda"
        # NCCL creates its communicators on the current device.
        if cuda:
            torch.cuda.set_device(device)
        init_process_group(me, backend="nccl" if cuda else "gloo")
        if cuda:
            atexit.register(distributed.destroy_process_group)
    return _world_size(me) > 1
