"""Elastic: the smaller grids that a run may go on with when ranks are lost for good.

The batch of a step stays what it is, so that the losses go on as they would have; each rank takes
more of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ranvier.config.plan import AXES
from ranvier.config.run import Run
from ranvier.config.sections import nearest
from ranvier.errors import PlanError


def named(degrees: Mapping[str, int]) -> str:
    """A grid as `launch.grids` writes it."""
    return ",".join(f"{axis}={size}" for axis, size in degrees.items() if size > 1) or "data=1"


def parsed(text: str) -> dict[str, int]:
    """The degrees in a text such as data=2,row=2; axes that are not named have one rank."""
    degrees = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        axis, _, size = (word.strip() for word in part.partition("="))
        if axis not in AXES:
            raise PlanError(
                f"launch.grids={text!r}: {axis!r} is no axis.{nearest(axis, AXES)} A grid is "
                "written as data=2,row=2."
            )
        if not size.isdecimal() or not 0 < int(size) <= 10**6:
            raise PlanError(
                f"launch.grids={text!r}: {axis}={size} is not a number of ranks. A degree is at "
                f"least 1. Write {axis}=2."
            )
        degrees[axis] = int(size)
    return degrees


def regridded(run: Run, degrees: Mapping[str, int]) -> Run:
    """A checked run on another grid: the same batch, the same micro-batch if it still divides."""
    world = math.prod(degrees.values())
    plan = dataclasses.replace(run.plan, **dict[str, Any](degrees))
    if plan.pipe != run.plan.pipe:
        plan = dataclasses.replace(plan, stages=())
    if plan.pipe == 1:
        plan = dataclasses.replace(plan, chunks=1, spread=False)
    return fitted(dataclasses.replace(run, plan=plan), world)


def fitted(run: Run, world: int) -> Run:
    """A checked run, with another micro-batch if that alone is what does not fit so many ranks."""
    try:
        return run.check(world)
    except PlanError as error:
        try:
            plan = dataclasses.replace(run.plan, micro_batch=-1)
            return dataclasses.replace(run, plan=plan).check(world)
        except PlanError:
            raise error from None


def smaller(run: Run) -> list[Run]:
    """A checked run on each grid of `launch.grids`, or every problem at once."""
    runs, problems = [], []
    for text in run.launch.grids:
        try:
            degrees = parsed(text)
            if math.prod(degrees.values()) >= run.plan.world:
                raise PlanError(
                    f"launch.grids={text!r} has {math.prod(degrees.values())} ranks, the plan "
                    f"{run.plan.world}. It is for when ranks are lost. Name smaller grids."
                )
            runs.append(regridded(run, degrees))
        except PlanError as error:
            named_in = f"launch.grids={text!r}"
            problems += [p if named_in in p else f"{named_in}: {p}" for p in error.problems]
    if problems:
        raise PlanError(problems)
    return runs
