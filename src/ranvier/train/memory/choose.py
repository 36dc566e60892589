"""Chooses the open memory settings of a run in closed form, without a model.

The open settings are `plan.recompute = memory_budget`, `memory.activation_offload_fraction = -1`,
`memory.optimizer_states = split` without `optimizer_states_on_device_gib`, and
`memory.optimizer_step_on = auto` with offloaded states. With `memory.auto` also all settings of
recomputation, micro-batch, states, weights, activations and update are open that have their default
value. Any other value is the user's decision and is kept. The choice depends only on the run, the
layers of its model, limits and rates, so all ranks with the same inputs choose alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ranvier.config.plan import Plan, divisors
from ranvier.config.run import RunConfig
from ranvier.config.sections import MemoryConfig
from ranvier.cost.optimizer import OptimizerSpec
from ranvier.errors import PlanError
from ranvier.memory.recompute_budget import RecomputeMode
from ranvier.optim.state_store import NUM_SLOTS
from ranvier.pipeline.balance import partition_by_cost
from ranvier.pipeline.stage_profile import load_stage_times
from ranvier.planner import offload_search
from ranvier.planner.communicators import worst_stage_bytes
from ranvier.planner.device_rates import DeviceRates
from ranvier.planner.memory.breakdown import GIB
from ranvier.planner.memory.chunks import MemoryOptions
from ranvier.planner.memory.rank_memory import RankMemory
from ranvier.planner.model_spec import ModelSpec
from ranvier.planner.offload_search import FitProblem, Placement
from ranvier.planner.predict import default_schedule
from ranvier.planner.time.compute import FP8_SCALING
from ranvier.train.build_model import DTYPES
from ranvier.train.memory.breakdown import MemoryTracker
from ranvier.train.memory.usage import candidate_micro_batches

TILE_FRACTION = 0.02
STATE_BYTES = 12
MIN_TILE_BITS = 20
"""Fraction of the device memory for tiles of optimizer states; bytes of states per element; and
log2 of the elements of the smallest tile, as smaller transfers would not saturate the link."""
RATE_DEPENDENT = frozenset(
    {"optimizer_states", "parameters", "activation_offload_fraction", "optimizer_step_on"}
)
"""Settings whose choice depends on transfer and compute rates."""
EQUAL_RATES = DeviceRates(1e12, 1e12, 1e12, 1e12, 1e12)
"""Used if only recomputation and micro-batch are open: the choice does not depend on rates."""


@dataclass(frozen=True)
class MemoryLimits:
    """Bytes that a rank may use, for the rank with the least memory."""

    device_bytes: int
    host_bytes: int
    library_bytes: int = 0
    """Bytes of the device that libraries use in any case."""
    uses_nccl: bool = False
    """Whether communicators take device memory in addition."""


@dataclass(frozen=True)
class MemoryChoice:
    """A run without open memory settings, the placement of its tensors, and why it was chosen."""

    run: RunConfig
    placement: Placement
    reasons: list[str]
    tracker: MemoryTracker


def open_settings(run: RunConfig) -> frozenset[str]:
    """Names of the settings that a run leaves open, as used by `planner.offload_search`."""
    plan = run.plan
    memory = run.memory
    usual = MemoryConfig()
    auto = memory.auto
    found = set[str]()
    if plan.recompute == "memory_budget" or (auto and plan.recompute == Plan().recompute):
        found.add("recompute")
    if plan.micro_batch == -1:
        found.add("micro_batch")
    if memory.activation_offload_fraction < 0.0:
        found.add("activation_offload_fraction")
    if memory.optimizer_states == "split" and memory.optimizer_states_on_device_gib == 0.0:
        found.add("optimizer_states_on_device_gib")
    if memory.optimizer_states != "device" and memory.optimizer_step_on == "auto":
        found.add("optimizer_step_on")
    if auto:
        # A value other than the default is the user's decision.
        found |= {name for name in RATE_DEPENDENT if getattr(memory, name) == getattr(usual, name)}
    return frozenset(found)


def choose_memory(
    run: RunConfig,
    spec: ModelSpec,
    limits: MemoryLimits,
    rates: DeviceRates,
    *,
    free: frozenset[str] | None = None,
    stage: int = 0,
) -> MemoryChoice:
    """Choose the fastest values of the open settings that fit, or raise a PlanError.

    free: the settings to choose; None for all open ones. stage: whose memory is tracked.
    """
    if free is None:
        free = open_settings(run)
    case = build_fit_problem(run, spec, limits, rates, free)
    every = [*offload_search.enumerate_fits(case)]
    found = offload_search.fastest_fit(every)
    if found is None:
        raise PlanError(_refusal_text(run, case))
    return MemoryChoice(
        apply_placement(run, found.placement),
        found.placement,
        offload_search.explain_fit(case, found, every),
        MemoryTracker(case, found.placement, stage=stage),
    )


def build_fit_problem(
    run: RunConfig,
    spec: ModelSpec,
    limits: MemoryLimits,
    rates: DeviceRates,
    free: frozenset[str],
) -> FitProblem:
    """The inputs of the placement search.

    For a run without an open micro-batch the candidates include smaller ones, so that suggestions
    include them too.
    """
    memory = run.memory
    plan = run.plan
    stages = rank_memories(run, spec)
    micros = candidate_micro_batches(plan, run.data.seq_len)
    given = Placement(
        micros[0],
        (usual_recompute_mode(plan),) * spec.num_layers,
        memory.optimizer_states,
        int(memory.optimizer_states_on_device_gib * GIB),
        memory.optimizer_step_on,
        memory.parameters,
        max(memory.activation_offload_fraction, 0.0),
    )
    if not free:
        share = plan.global_batch // plan.num_replicas
        own = plan.micro_batch
        micros = [n for n in reversed(divisors(share)) if n <= own and own % n == 0]
    return FitProblem(
        stages,
        tuple(micros),
        rates,
        limits.device_bytes,
        limits.host_bytes,
        given,
        free,
        limits.library_bytes,
        worst_stage_bytes(spec, plan, stages[0].optimizer) if limits.uses_nccl else 0,
    )


def rank_memories(run: RunConfig, spec: ModelSpec) -> tuple[RankMemory, ...]:
    """The closed form of the memory of a rank of each stage."""
    memory = run.memory
    plan = _with_measured_stages(run.plan)
    # With a limit, `choose_saved_collectives` uses the memory that is left.
    saves = memory.recompute_collectives == "save" or (
        memory.recompute_collectives == "auto" and memory.device_limit_gib == 0.0
    )
    options = MemoryOptions(
        saves_collectives=saves,
        compiled=plan.compile == "on",
        fp8=FP8_SCALING[run.train.float8],
        # The default schedules have a closed form.
        simulates_schedule=plan.pipe > 1 and plan.schedule != default_schedule(plan.virtual_stages),
    )
    # The density of masks from a file is unknown, and a growing sparsity starts with all weights.
    density = run.prune.initial_density or 1.0
    return tuple(
        RankMemory(
            spec,
            plan,
            run.data.seq_len,
            DTYPES[run.train.dtype].itemsize,
            stage,
            options,
            OptimizerSpec.from_run(run),
            density,
            memory.offload_tile,
        )
        for stage in range(plan.pipe)
    )


def _with_measured_stages(plan: Plan) -> Plan:
    """The plan with stages cut by the measured times of their parts."""
    if not plan.stage_profile or plan.stage_starts or plan.pipe == 1:
        return plan
    costs = load_stage_times(Path(plan.stage_profile))
    starts = partition_by_cost(costs, plan.pipe * plan.virtual_stages)
    return replace(plan, stage_starts=starts[1:])


def usual_recompute_mode(plan: Plan) -> RecomputeMode:
    """The mode of all blocks before one is chosen; a memory budget starts with `none`."""
    if plan.recompute == "memory_budget":
        return "none"
    return plan.recompute


def apply_placement(run: RunConfig, choice: Placement) -> RunConfig:
    """Return the run with the settings of a placement."""
    memory = replace(
        run.memory,
        optimizer_states=choice.optimizer_states,
        optimizer_states_on_device_gib=choice.optimizer_state_bytes_on_device / GIB
        if choice.optimizer_states == "split"
        else 0.0,
        optimizer_step_on=run.memory.optimizer_step_on
        if choice.optimizer_states == "device"
        else choice.optimizer_step_on,
        parameters=choice.parameters,
        activation_offload_fraction=choice.activation_offload_fraction,
    )
    return replace(run, plan=replace(run.plan, micro_batch=choice.micro_batch), memory=memory)


def choose_tile(run: RunConfig, device_bytes: int) -> RunConfig:
    """With `memory.auto`: limit the size of state tiles to a small fraction of the device memory.

    The update is elementwise, so no result depends on the tile size.
    """
    memory = run.memory
    if not memory.auto or memory.offload_tile != MemoryConfig().offload_tile:
        return run
    most = TILE_FRACTION * device_bytes / (NUM_SLOTS * STATE_BYTES)
    # Round down to a power of two, but never above the configured tile.
    tile = min(1 << max(int(most).bit_length() - 1, MIN_TILE_BITS), memory.offload_tile)
    return replace(run, memory=replace(memory, offload_tile=tile))


def _refusal_text(run: RunConfig, case: FitProblem) -> str:
    if run.memory.auto:
        word = "memory.auto=True"
    else:
        word = "plan.recompute='memory_budget'"
    short = offload_search.min_device_bytes(case)
    if short:
        least = f"at least {short / GIB:.3g} GiB"
    else:
        least = "more than its device has"
    if run.plan.micro_batch > 1:
        remedy = "a smaller plan.micro_batch, "
    else:
        remedy = ""
    remedy += "a larger memory.device_limit_gib, " if run.memory.device_limit_gib > 0.0 else ""
    remedy += "" if run.memory.auto else "memory.auto=True, "
    return (
        f"{word}: a rank needs {least}, but may use {case.device_limit / GIB:.3g} GiB (and "
        f"{case.host_limit / GIB:.3g} GiB on the host). Weights, gradients, optimizer states and "
        f"the recomputed activations of a block must fit. Use {remedy}a smaller data.seq_len or "
        "model.size, or more ranks on depth, row or col."
    )
