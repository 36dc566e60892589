"""Resolves the open memory settings of a run before its first step: chosen, then verified.

`train.memory.choose` chooses in closed form; trial steps, which change no weights, verify that the
choice fits. If it does not, the limit is lowered and another choice is made.
"""

from __future__ import annotations

import gc
import re
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import nn

from ranvier.buckets.spec import ParamGroup
from ranvier.comm.consensus import broadcast_text, max_each, max_over_ranks
from ranvier.config.run import RunConfig
from ranvier.cost.optimizer import OptimizerSpec
from ranvier.errors import PlanError
from ranvier.memory.host import host_bytes_per_rank
from ranvier.memory.recompute_budget import RecomputeMode
from ranvier.optim.grad_scaler import GradScaler
from ranvier.optim.optimizer import Optimizer
from ranvier.optim.rules import Jorge, Muon, Rule, Sgd
from ranvier.parallel.parallel_model import ParallelModel, get_parallel_model
from ranvier.pipeline.policy_search import policy_from_text, policy_to_text
from ranvier.planner import device_rates, offload_search
from ranvier.planner.communicators import pipe_peers
from ranvier.planner.device_rates import DeviceRates
from ranvier.planner.memory.breakdown import GIB
from ranvier.planner.model_spec import resolve_model_spec
from ranvier.planner.time.offload import StepTraffic, offloaded_update_seconds
from ranvier.train.build_model import DTYPES
from ranvier.train.memory import choose, placement
from ranvier.train.memory.breakdown import (
    TYPICAL_RATES,
    MemoryTracker,
    is_out_of_memory,
    tensors_by_category,
)
from ranvier.train.memory.choose import MemoryChoice, MemoryLimits
from ranvier.train.memory.usage import available_bytes, blank_batch, drop_gradients
from ranvier.train.step import forward_backward

TRIAL_PASSES = 3
"""Micro-batches of a trial step without a pipeline: from the third on all need the same memory."""
MAX_TRIES = 3
"""Number of choices to try before the run fails."""
NO_LIMIT = 2**31
"""Number of micro-batches in flight that stands for no limit."""
LIMIT_REDUCTION = 0.05
"""Minimum fraction by which the limit is lowered when a trial step does not fit."""


@dataclass
class ResolvedMemory:
    """A run without open memory settings, its optimizer, and the reasons for the choice."""

    run: RunConfig
    optimizer: Optimizer
    memory_tracker: MemoryTracker
    reasons: list[str] = field(default_factory=list)


def build_optimizer(
    run: RunConfig, model: nn.Module, device: torch.device, *, local_ranks: int
) -> Optimizer:
    """Build the optimizer of a resolved run; weights and activations are offloaded first."""
    optim = run.optim
    queue = get_parallel_model(model).bucket_scheduler
    placement.offload_weights(run, model, local_ranks)
    placement.offload_activations(run, model, local_ranks)
    return Optimizer(
        queue,
        lr=run.peak_lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        decay=run.weight_decay,
        clip=optim.max_grad_norm,
        factors=lr_factors(run),
        # Only fp16 gradients underflow; bf16 has the exponent range of fp32.
        scale=GradScaler(device) if run.train.dtype == "fp16" else None,
        moments=optim.state_dtype,
        home=placement.states_placement(run, local_ranks, queue.host_offload),
        rule=build_rule(run),
        adamw_factor=run.adamw_peak_lr / run.peak_lr,
    )


def lr_factors(run: RunConfig) -> dict[ParamGroup, float]:
    """Returns the factor of the learning rate of each parameter group."""
    return {
        "matrix": run.optim.matrix_lr_scale,
        "embedding": run.optim.embedding_lr_scale,
        "vector": run.optim.vector_lr_scale,
    }


def build_rule(run: RunConfig) -> Rule | None:
    """Build the update rule of a run; None means AdamW."""
    optim = run.optim
    match optim.name:
        case "adamw":
            return None
        case "sgd":
            return Sgd(run.momentum)
        case "muon":
            return Muon(
                run.momentum,
                optim.muon_nesterov,
                optim.muon_adjust_lr,
                optim.muon_coefficients,
                optim.muon_steps,
                optim.muon_dtype,
            )
        case "jorge":
            return Jorge(
                run.momentum,
                optim.jorge_variant == "symmetric",
                optim.max_preconditioner_dim,
                optim.precondition_interval,
                optim.grafting,
                optim.preconditioner_eps,
            )


def resolve_memory(
    run: RunConfig, model: nn.Module, device: torch.device, *, local_ranks: int
) -> ResolvedMemory:
    """Resolve the open memory settings; returns the run, its optimizer, and the reasons.

    Communicates: if something is open, numbers over all axes, and two trial steps.
    """
    parallel = get_parallel_model(model)
    free = settings_to_choose(run, device)
    # This choice needs only rates, no memory.
    if free == {"optimizer_step_on"}:
        run = choose_update_device(run, parallel, device)
        free = frozenset()
    if not free:
        optimizer = build_optimizer(run, model, device, local_ranks=local_ranks)
        return ResolvedMemory(run, optimizer, MemoryTracker(peers=count_peers(run, parallel)))
    limits = measure_limits(run, parallel, device, local_ranks)
    run = choose.choose_tile(run, limits.device_bytes)
    spec = resolve_model_spec(run)
    if free & choose.RATE_DEPENDENT:
        rates = _slowest_rates(_measure_rates(parallel, device), parallel)
    else:
        rates = choose.EQUAL_RATES
    notes = list[str]()
    for tries in range(MAX_TRIES):
        stage = parallel.grid.index["pipe"]
        choice = choose.choose_memory(run, spec, limits, rates, free=free, stage=stage)
        choice.tracker.peers = count_peers(run, parallel)
        tried, missing = _try_choice(choice, model, device, local_ranks, limits)
        if tried is not None:
            return ResolvedMemory(choice.run, tried, choice.tracker, [*notes, *choice.reasons])
        # The prediction was too low by at least `missing`; choose again with a smaller limit.
        most = limits.device_bytes
        lower = most - max(missing, int(LIMIT_REDUCTION * most))
        reason = (
            f"a trial step did not fit into {most / GIB:.3g} GiB, {missing / GIB:.3g} GiB were "
            "missing"
        )
        if tries == MAX_TRIES - 1:
            notes.append(reason)
            break
        notes.append(f"{reason}; chosen again for {lower / GIB:.3g} GiB")
        limits = replace(limits, device_bytes=lower)
    raise choice.tracker.out_of_memory_error("; ".join(notes))


def settings_to_choose(run: RunConfig, device: torch.device) -> frozenset[str]:
    """The settings that a run leaves open and that make a difference on a device."""
    free = choose.open_settings(run)
    if device.type == "cpu" and run.memory.device_limit_gib == 0.0:
        # The host is the device: there is nothing to offload to.
        free -= choose.RATE_DEPENDENT
    return free


def preview_choice(run: RunConfig, device: torch.device, *, local_ranks: int) -> MemoryChoice:
    """The choice that this process alone would make, before there are ranks and a model.

    The ranks of a run agree on the least memory among them, and verify their choice by trial steps.
    """
    memory = run.memory
    free = settings_to_choose(run, device)
    limits = MemoryLimits(
        available_bytes(memory.device_limit_gib, device, local_ranks),
        host_bytes_per_rank(local_ranks, memory.host_limit_gib),
        uses_nccl=run.train.backend == "nccl",
    )
    rates = choose.EQUAL_RATES
    if free & choose.RATE_DEPENDENT:
        rates = device_rates.measure_rates(device, DTYPES[run.train.dtype])
    run = choose.choose_tile(run, limits.device_bytes)
    return choose.choose_memory(run, resolve_model_spec(run), limits, rates, free=free)


def measure_limits(
    run: RunConfig,
    parallel: ParallelModel,
    device: torch.device,
    local_ranks: int,
    optimizer: Optimizer | None = None,
) -> MemoryLimits:
    """The limits of the rank with the least memory. optimizer: the optimizer if it exists already.

    Communicates: numbers over all axes.
    """
    memory = run.memory
    # Tensors in reference cycles of an earlier model would count as tensors of libraries.
    gc.collect()
    _allocate_workspaces(device, parallel.bucket_scheduler.buckets[0].data.dtype)
    room = available_bytes(memory.device_limit_gib, device, local_ranks)
    host = host_bytes_per_rank(local_ranks, memory.host_limit_gib)
    library = other_bytes(parallel, device, optimizer)
    # All ranks must choose alike, so the rank with the least memory decides: min x = -max(-x).
    most = max_each([-room, -host, library], parallel.grid, device)
    return MemoryLimits(-most[0], -most[1], most[2], parallel.grid.backend == "nccl")


def _allocate_workspaces(device: torch.device, dtype: torch.dtype) -> None:
    """Let cuBLAS and cuBLASLt allocate their workspaces, which a run keeps.

    Before that `other_bytes` would not see them: 64 MiB on a Hopper GPU.
    """
    if device.type == "cuda":
        x = torch.zeros(64, 64, device=device, dtype=dtype)
        torch.mm(x, x)
        torch.addmm(x[0], x, x)
        torch.cuda.synchronize(device)


def choose_update_device(
    run: RunConfig, parallel: ParallelModel, device: torch.device
) -> RunConfig:
    """Choose the faster device for the update of offloaded states: the GPU or the CPU.

    Communicates: numbers over all axes.
    """
    found = _slowest_rates(
        device_rates.measure_rates(device, parallel.bucket_scheduler.buckets[0].data.dtype),
        parallel,
    )
    ranks = choose.rank_memories(run, resolve_model_spec(run))
    # All ranks choose alike: the stage with most states decides.
    sizes = max((rank.sizes for rank in ranks), key=lambda one: one.state_bytes)
    moved = StepTraffic(
        0, 0, sizes.state_bytes - sizes.resident_states, sizes.trained_elements, 0, 0, 0
    )
    times = {cpu: offloaded_update_seconds(moved, found, cpu=cpu) for cpu in (False, True)}
    if times[True] < times[False]:
        update: Literal["device", "cpu"] = "cpu"
    else:
        update = "device"
    return replace(run, memory=replace(run.memory, optimizer_step_on=update))


def predict_memory(
    run: RunConfig, model: nn.Module, optimizer: Optimizer, device: torch.device, local_ranks: int
) -> MemoryTracker:
    """Predict the memory of a run without open settings, and of the changes that would save memory.

    Communicates: numbers over all axes.
    """
    parallel = get_parallel_model(model)
    peers = count_peers(run, parallel)
    # A CUDA graph has its own memory pool, which is not predicted.
    if run.plan.cuda_graph:
        return MemoryTracker(peers=peers)
    limits = measure_limits(run, parallel, device, local_ranks, optimizer)
    case = choose.build_fit_problem(
        run, resolve_model_spec(run), limits, choose.EQUAL_RATES, frozenset()
    )
    stage = parallel.grid.index["pipe"]
    return MemoryTracker(case, case.given_placement, stage=stage, peers=peers)


def count_peers(run: RunConfig, parallel: ParallelModel) -> int:
    """Number of point-to-point peers of this rank, over all communicators."""
    plan = run.plan
    stage = parallel.grid.index["pipe"]
    stages = pipe_peers(stage, plan.pipe, chunks=plan.virtual_stages, spread=plan.vocab_over_pipe)
    found = sum(stages.values()) + (plan.expert - 1 if parallel.load_balancer is not None else 0)
    if OptimizerSpec.from_run(run).matrix_rule is not None:
        found += plan.world_size // plan.pipe - 1
    return found


def resolve_in_flight_limit(
    run: RunConfig, model: nn.Module, device: torch.device, local_ranks: int
) -> list[str]:
    """Choose the in-flight limit of the stages, in closed form; returns notes on the pipeline.

    Communicates: numbers over all axes, and the policy as a text.
    """
    parallel = get_parallel_model(model)
    plan = run.plan
    limited = run.memory.device_limit_gib
    pipeline = parallel.pipeline
    stage = pipeline.executor.stage
    if stage.num_stages == 1:
        return []
    lines = stage.describe_stages()
    if limited > 0.0 and plan.max_in_flight == 0:
        lines.append(_limit_in_flight(run, parallel, device, local_ranks))
    # The policy search simulates on rank 0 only; all ranks follow what it found.
    if parallel.grid.rank == 0:
        found = pipeline.policy_for_step(plan.num_micro_batches)
    else:
        found = None
    policy = policy_from_text(
        broadcast_text(policy_to_text(found), parallel.grid, device),
        pipeline.step_shape(plan.num_micro_batches),
    )
    pipeline.policies[plan.num_micro_batches] = policy
    return [*lines, f"schedule {plan.schedule}: {policy}"]


def _limit_in_flight(
    run: RunConfig, parallel: ParallelModel, device: torch.device, local_ranks: int
) -> str:
    """Limit the micro-batches that stages hold if the schedule would need too much memory.

    Returns a note on it. Communicates: a number over all axes.
    """
    available = available_bytes(run.memory.device_limit_gib, device, local_ranks)
    case = choose.build_fit_problem(
        run,
        resolve_model_spec(run),
        MemoryLimits(available, 0),
        choose.EQUAL_RATES,
        frozenset(),
    )
    rank = case.stages[parallel.grid.index["pipe"]]
    modes = current_modes(parallel)
    now = offload_search.with_stage_modes(case, case.given_placement, rank, modes)
    missing = offload_search.stage_device_bytes(case, rank, now) - available
    first, further = rank.in_flight_bytes(
        now.micro_batch, modes, offloaded=now.activation_offload_fraction
    )
    fixed = offload_search.resting_bytes(rank, now)
    if missing <= 0:
        limit = NO_LIMIT
    else:
        limit = max(available - fixed - first + further, 0) // max(further, 1)
    # The stage with the least room decides for all: the policy assumes one limit.
    limit = -max_over_ranks(-limit, parallel.grid, device)
    if limit == NO_LIMIT:
        return f"each stage may hold all micro-batches of its schedule in {available / GIB:.3g} GiB"
    if limit < 1:
        raise PlanError(
            f"memory.device_limit_gib={run.memory.device_limit_gib} leaves no room for a "
            f"micro-batch: of {available / GIB:.3g} GiB on rank {parallel.grid.rank}, weights and "
            f"optimizer states need {fixed / GIB:.3g} GiB, gradients and one micro-batch "
            f"{first / GIB:.3g} GiB. A stage must hold at least one. Use a larger "
            "memory.device_limit_gib, a smaller plan.micro_batch, or plan.recompute='full'."
        )
    pipeline = parallel.pipeline
    pipeline.config = replace(pipeline.config, max_in_flight=limit)
    # Trial steps may have chosen a policy without the limit.
    pipeline.policies.clear()
    return f"each stage may hold {limit} micro-batches in {available / GIB:.3g} GiB"


def current_modes(parallel: ParallelModel) -> tuple[RecomputeMode, ...]:
    """The recompute modes of the blocks of this rank."""
    found = list[RecomputeMode]()
    for kind in parallel.recompute_modes.values():
        assert kind != "memory_budget", parallel.recompute_modes
        found.append(kind)
    return tuple(found)


# ---- rates and limits -------------------------------------------------------------------


def _measure_rates(parallel: ParallelModel, device: torch.device) -> DeviceRates:
    """Measured rates of a device, or typical ones if it has no memory left to measure."""
    try:
        return device_rates.measure_rates(device, parallel.bucket_scheduler.buckets[0].data.dtype)
    except torch.OutOfMemoryError:
        return TYPICAL_RATES


def _slowest_rates(found: DeviceRates, parallel: ParallelModel) -> DeviceRates:
    """The minimum of each rate over all ranks. Communicates: numbers over all axes."""
    device = parallel.bucket_scheduler.device
    numbers = [-int(getattr(found, name)) for name in found.__dataclass_fields__]
    return DeviceRates(*(float(-number) for number in max_each(numbers, parallel.grid, device)))


def other_bytes(parallel: ParallelModel, device: torch.device, optimizer: Optimizer | None) -> int:
    """Bytes on the device other than weights and states: library workspaces, inputs."""
    if device.type != "cuda":
        return 0
    tensors = [bucket.data for bucket in parallel.bucket_scheduler.buckets]
    if optimizer is not None:
        tensors = [x for some in tensors_by_category(optimizer).values() for x in some]
    # Views share a storage, which must be counted once.
    here = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors if x.is_cuda}
    known = sum(storage.nbytes() for storage in here.values())
    return max(torch.cuda.memory_allocated(device) - known, 0)


# ---- trial ------------------------------------------------------------------------------


def _try_choice(
    choice: MemoryChoice,
    model: nn.Module,
    device: torch.device,
    local_ranks: int,
    limits: MemoryLimits,
) -> tuple[Optimizer | None, int]:
    """Build the optimizer and run trial steps; returns it, or the bytes missing on the worst rank.

    Communicates: as two steps; a number over all axes.
    """
    run = choice.run
    parallel = get_parallel_model(model)
    missing = 0
    optimizer = None
    # The optimizer and the trial steps see the chosen modes and placement.
    modes = choice.tracker.rank_memory.own_modes(choice.placement.recompute_modes)
    parallel.recompute_modes.update(zip(parallel.recompute_modes, modes, strict=True))
    try:
        optimizer = build_optimizer(run, model, device, local_ranks=local_ranks)
        peak = run_trial_steps(run, model, optimizer, device)
        # A run without a limit may use the reserve as well.
        if run.memory.device_limit_gib > 0.0:
            missing = max(peak - limits.device_bytes, 0)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        missing = max(missing_bytes(str(error)), 1)
    missing = max_over_ranks(missing, parallel.grid, device)
    if missing:
        if optimizer is not None:
            # Its pending copies must end before their memory is freed.
            with suppress(RuntimeError):
                optimizer.state_store.synchronize()
        # The callback is the gradient-norm accumulator of the discarded optimizer.
        optimizer = parallel.bucket_scheduler.on_bucket_complete = None
        gc.collect()
    drop_gradients(parallel, device)
    return optimizer, missing


def run_trial_steps(
    run: RunConfig, model: nn.Module, optimizer: Optimizer, device: torch.device
) -> int:
    """Run two steps whose updates are vetoed; returns the peak bytes of the second, 0 on a CPU.

    Two, because an update may overlap with the forward pass that follows it, and because compilers
    and libraries allocate memory in the first. Communicates: as steps do.
    """
    count = run.plan.num_micro_batches
    # With a pipeline, the memory of a stage depends on the number of all micro-batches.
    if run.plan.pipe == 1:
        count = min(count, TRIAL_PASSES)
    grid = get_parallel_model(model).grid
    batches = [blank_batch(run, run.plan.micro_batch, grid, device) for _ in range(count)]
    scale = optimizer.grad_scaler
    if scale is None:
        before = None
    else:
        before = (scale.scale.clone(), scale.growth_tracker.clone())
    # Dropout of the trial must not advance the random numbers of the run.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for _ in range(2):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
            forward_backward(model, batches, scale=None if scale is None else scale.scale)
            veto = torch.ones(1, dtype=torch.bool, device=device)
            optimizer.step(0.0, votes=veto, vetoes=1)
    if scale is not None and before is not None:
        scale.scale.copy_(before[0])
        scale.growth_tracker.copy_(before[1])
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def missing_bytes(words: str) -> int:
    """Bytes that were missing according to torch's out-of-memory message; 0 if unknown."""
    units = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    found = re.search(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", words)
    free = re.search(r"of which ([\d.]+) (bytes|KiB|MiB|GiB) is free", words)
    want, there = (int(float(m[1]) * units[m[2]]) if m else 0 for m in (found, free))
    return max(want - there, 0) or want
