"""Smaller grids on which a run may continue when ranks are lost for good.

The global batch stays the same, so that the loss curve continues as it would have; each rank
processes more samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ranvier.config.plan import AXES, Plan
from ranvier.config.sections import suggest_nearest
from ranvier.errors import PlanError


def format_grid(degrees: Mapping[str, int]) -> str:
    """A grid in the notation of `launch.fallback_grids`."""
    return ",".join(f"{axis}={size}" for axis, size in degrees.items() if size > 1) or "data=1"


def parse_grid(text: str) -> dict[str, int]:
    """Parse the axis sizes of a text such as data=2,row=2; unnamed axes have size 1."""
    degrees = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        axis, _, size = (word.strip() for word in part.partition("="))
        if axis not in AXES:
            raise PlanError(
                f"launch.fallback_grids={text!r}: {axis!r} is not an "
                f"axis.{suggest_nearest(axis, AXES)} Axes are {', '.join(AXES)}. Write a grid as "
                "data=2,row=2."
            )
        if not size.isdecimal() or not 0 < int(size) <= 10**6:
            raise PlanError(
                f"launch.fallback_grids={text!r}: {axis}={size} is not a valid size. It must be an "
                f"integer from 1 to 1000000. Use {axis}=2 or another one."
            )
        degrees[axis] = int(size)
    return degrees


def change_grid(plan: Plan, degrees: Mapping[str, int]) -> Plan:
    """A plan with other degrees, and without the settings that only fit its old stages."""
    changed = replace(plan, **dict[str, Any](degrees))
    if changed.pipe != plan.pipe:
        # Explicit stage boundaries are valid only for the number of stages they were given for.
        changed = replace(changed, stage_starts=())
    if changed.pipe == 1:
        changed = replace(changed, virtual_stages=1, vocab_over_pipe=False)
    return changed
