"""Smaller grids on which a run may continue when ranks are lost for good.

The global batch stays the same, so that the loss curve continues as it would have; each rank
processes more samples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ranvier.config.plan import AXES
from ranvier.config.run import RunConfig
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
                f"launch.fallback_grids={text!r}: {axis!r} is no "
                f"axis.{suggest_nearest(axis, AXES)} A grid is written as data=2,row=2."
            )
        if not size.isdecimal() or not 0 < int(size) <= 10**6:
            raise PlanError(
                f"launch.fallback_grids={text!r}: {axis}={size} is not a number of ranks. A degree "
                f"is at least 1. Write {axis}=2."
            )
        degrees[axis] = int(size)
    return degrees


def change_grid(run: RunConfig, degrees: Mapping[str, int]) -> RunConfig:
    """A validated run on another grid, with the same batch, and the same micro-batch if it fits."""
    world = math.prod(degrees.values())
    plan = dataclasses.replace(run.plan, **dict[str, Any](degrees))
    if plan.pipe != run.plan.pipe:
        # Explicit stage boundaries are valid only for the number of stages they were given for.
        plan = dataclasses.replace(plan, stage_starts=())
    if plan.pipe == 1:
        plan = dataclasses.replace(plan, virtual_stages=1, vocab_over_pipe=False)
    return fit_micro_batch(dataclasses.replace(run, plan=plan), world)


def fit_micro_batch(run: RunConfig, world: int) -> RunConfig:
    """A validated run for `world` ranks, with another micro-batch if only that does not fit."""
    try:
        return run.check_and_resolve(world)
    except PlanError as error:
        try:
            plan = dataclasses.replace(run.plan, micro_batch=-1)
            return dataclasses.replace(run, plan=plan).check_and_resolve(world)
        except PlanError:
            # Another micro-batch does not help: report the problem of the given settings.
            raise error from None


def fallback_runs(run: RunConfig) -> list[RunConfig]:
    """A validated run for each of `launch.fallback_grids`; raises with all problems at once."""
    runs = []
    problems = []
    for text in run.launch.fallback_grids:
        try:
            degrees = parse_grid(text)
            # A fallback grid is for fewer ranks than the plan.
            if math.prod(degrees.values()) >= run.plan.world_size:
                raise PlanError(
                    f"launch.fallback_grids={text!r} has {math.prod(degrees.values())} ranks, the "
                    f"plan {run.plan.world_size}. It is for when ranks are lost. Name smaller "
                    "grids."
                )
            runs.append(change_grid(run, degrees))
        except PlanError as error:
            named_in = f"launch.fallback_grids={text!r}"
            problems += [p if named_in in p else f"{named_in}: {p}" for p in error.problems]
    if problems:
        raise PlanError(problems)
    return runs
