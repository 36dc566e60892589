"""What `ranvier serve` and `ranvier generate` share: their checks, and the plan of their engine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ranvier.config.arguments import InferenceOptions
from ranvier.config.plan import Plan
from ranvier.errors import PlanError
from ranvier.launch import ProcessInfo
from ranvier.setting import setting_info
from ranvier.sharding import ShardingTable

if TYPE_CHECKING:
    from ranvier.infer.model_source import ModelSource
    from ranvier.models import DecoderConfig


RECURRENCE_OPTIONS = ("--recurrence", "--exit", "--kv-share")
"""Options of the engine that may be given without its prefix."""


def with_engine_prefix(words: Sequence[str]) -> list[str]:
    """Returns the words with `--recurrence 32` as `--engine.recurrence 32`, and others likewise."""
    found = []
    for word in words:
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in RECURRENCE_OPTIONS:
            word = f"--engine.{name.removeprefix('--')}{equals}{value}"
        found.append(word)
    return found


def find_option_problems(options: InferenceOptions) -> list[str]:
    """Returns options that are out of range or not supported, with value, rule and remedy."""
    problems = []
    for section in ("", "engine"):
        values: Any = getattr(options, section) if section else options
        for one in dataclasses.fields(values):
            value = getattr(values, one.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                name = f"{section}.{one.name}" if section else one.name
                problem = setting_info(one).find_problem(name, value)
                problems += [problem] if problem is not None else []
    return problems


def resolve_inference_plan(
    options: InferenceOptions, model: DecoderConfig, me: ProcessInfo | None
) -> Plan:
    """Returns the plan with all degrees; raises if the model cannot be split like that.

    me: this process, if a launcher has started it.
    """
    wanted = options.plan
    if me is not None:
        if options.nproc not in (0, me.world_size):
            raise PlanError(
                f"--nproc {options.nproc}, but {me.launcher} has already started {me.world_size} "
                "ranks. --nproc only applies without a launcher. Remove it."
            )
        world = me.world_size
    else:
        world = options.nproc or math.prod(max(size, 1) for size in wanted.degrees.values())
    # Settings that only training needs keep their defaults.
    plan = Plan(
        col_splits=wanted.col_splits,
        row_splits=wanted.row_splits,
        virtual_stages=wanted.virtual_stages,
        stage_starts=wanted.stage_starts,
        rank_order=wanted.rank_order,
        shard_weights_over=wanted.shard_weights_over,
        stage_time_jitter=0.0,
    ).with_degrees(wanted.resolve(world).degrees)
    # The smallest batch that the grid divides; the engine has its own.
    micro = ShardingTable.from_plan(plan).batch_multiple(plan.degrees)
    plan = dataclasses.replace(plan, global_batch=plan.num_replicas * micro, micro_batch=micro)
    options.engine.check_recurrence(model.mean_recurrence)
    problems = [*plan.find_problems({**model.dim_units, "layers": model.layers}, world)]
    if plan.pipe > 1 and model.is_recurrent:
        problems.append(
            f"plan.pipe={plan.pipe} with a model with recurrent depth. Its core cannot be split "
            "into stages. Use plan.pipe=1."
        )
    if plan.context > 1 and model.streams > 1:
        problems.append(
            f"plan.context={plan.context} is not supported for generation with "
            f"model.parscale_streams={model.parscale_streams}. The prefix of a stream would be "
            "counted on each rank of context. Use plan.context=1."
        )
    if problems:
        raise PlanError(problems)
    return plan


def engine_arguments(source: ModelSource, plan: Plan, options: InferenceOptions) -> dict[str, Any]:
    """Returns the fields of `EngineOptions`."""
    same = ("engine", "device", "dtype", "algorithm", "share_gpu", "timeout_seconds")
    return {"source": source, "plan": plan} | {name: getattr(options, name) for name in same}
