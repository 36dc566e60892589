"""Resolves the open memory settings of a run by measuring, before its first step.

Open are the settings that ask for it: `plan.recompute = memory_budget`,
`memory.activation_offload_fraction = -1`, `memory.optimizer_states = split` without
`optimizer_states_on_device_gib`, `memory.optimizer_step_on = auto` with offloaded states; and with
`memory.auto` all of recomputation, micro-batch, states, weights, activations and update that have
their default value. Any other value is the user's decision and is kept. A fit is verified by trial
steps, which change no weights.
"""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from ranvier.comm.consensus import max_each, max_over_ranks
from ranvier.config.plan import Plan, divisors
from ranvier.config.run import RunConfig
from ranvier.config.sections import MemoryConfig
from ranvier.cost.layers import ActivationShape
from ranvier.errors import PlanError
from ranvier.memory import recompute_budget
from ranvier.memory.host import host_bytes_per_rank
from ranvier.memory.recompute_budget import PassMemory, RecomputeMode, StepMemory
from ranvier.models import Decoder
from ranvier.nn.linear import Linear
from ranvier.optim.grad_scaler import GradScaler
from ranvier.optim.optimizer import Optimizer
from ranvier.optim.state_store import NUM_SLOTS
from ranvier.parallel.parallel_model import ParallelModel, get_parallel_model
from ranvier.planner import device_rates, offload_search
from ranvier.planner.communicators import pipe_peers, worst_stage_bytes
from ranvier.planner.device_rates import DeviceRates
from ranvier.planner.memory.measured_states import chunk_logit_bytes, model_state_sizes
from ranvier.planner.model_spec import resolve_model_spec
from ranvier.planner.offload_search import FitProblem, Placement
from ranvier.planner.time.offload import StepTraffic, StepWork, offloaded_update_seconds
from ranvier.train.memory import placement
from ranvier.train.memory.breakdown import (
    TYPICAL_RATES,
    MemoryTracker,
    is_out_of_memory,
    tensors_by_category,
)
from ranvier.train.memory.probe import (
    GIB,
    available_bytes,
    blank_batch,
    candidate_micro_batches,
    drop_gradients,
    measure_passes,
)
from ranvier.train.step import forward_backward

MEASURED_PASSES = 3
"""Micro-batches of a step to measure: from the third on all need the same memory."""
MAX_TRIES = 3
"""Number of fits to try before the run fails."""
LIMIT_REDUCTION = 0.05
"""Minimum fraction by which the limit is lowered when a trial step does not fit."""
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


@dataclass
class ResolvedMemory:
    """A run without open memory settings, its optimizer, and notes on what was chosen."""

    run: RunConfig
    optimizer: Optimizer
    memory_tracker: MemoryTracker
    notes: list[str] = field(default_factory=list)


def build_optimizer(
    run: RunConfig, model: Decoder, device: torch.device, *, local_ranks: int
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
        decay=optim.weight_decay,
        clip=optim.max_grad_norm,
        factors={
            "matrix": optim.matrix_lr_scale,
            "embedding": optim.embedding_lr_scale,
            "vector": optim.vector_lr_scale,
        },
        # Only fp16 gradients underflow; bf16 has the exponent range of fp32.
        scale=GradScaler(device) if run.train.dtype == "fp16" else None,
        moments=optim.state_dtype,
        home=placement.states_placement(run, local_ranks, queue.host_offload),
    )


def resolve_memory(
    run: RunConfig, model: Decoder, device: torch.device, *, local_ranks: int
) -> ResolvedMemory:
    """Resolve the open memory settings; returns the run, its optimizer, and notes on the choice.

    Communicates: if something is open, passes of a model of two blocks, a few times, and numbers
    over all axes; after a fit two trial steps.
    """
    free = open_settings(run)
    if device.type == "cpu" and run.memory.device_limit_gib == 0.0:
        # The host is the device: there is nothing to offload to.
        free -= RATE_DEPENDENT
    # This choice needs only rates, so no memory is measured.
    if free == {"optimizer_step_on"}:
        run = choose_update_device(run, get_parallel_model(model), device)
        free = frozenset()
    # Two blocks are not representative of a pipeline stage, so with stages nothing is searched
    # here; see `resolve_in_flight_limit`.
    if not free or run.plan.pipe > 1:
        optimizer = build_optimizer(run, model, device, local_ranks=local_ranks)
        return ResolvedMemory(
            run, optimizer, MemoryTracker(peers=count_peers(run, get_parallel_model(model)))
        )
    run = _choose_tile(run, device, local_ranks)
    case = build_fit_problem(run, model, device, local_ranks, free)
    # Next to all weights not even a model of two blocks fits: offload weights and measure again.
    if not case.needs and "parameters" in free:
        run = replace(run, memory=replace(run.memory, parameters="host"))
        free = free - {"parameters"}
        placement.offload_weights(run, model, local_ranks)
        case = build_fit_problem(run, model, device, local_ranks, free)
    parallel = get_parallel_model(model)
    notes = list[str]()
    for tries in range(MAX_TRIES):
        every = [*offload_search.enumerate_fits(case)]
        found = offload_search.fastest_fit(every)
        if found is None:
            raise PlanError(_refusal_text(run, case))
        chosen = apply_placement(run, found.placement)
        # The optimizer and the trial step below see the chosen modes and placement.
        parallel.recompute_modes.update(
            zip(parallel.recompute_modes, found.placement.recompute_modes, strict=True)
        )
        account = MemoryTracker(case, found.placement, peers=count_peers(run, parallel))
        tried, missing = _try_placement(chosen, model, device, local_ranks)
        if tried is not None:
            notes += offload_search.explain_fit(case, found, every)
            return ResolvedMemory(chosen, tried, account, notes)
        # The prediction was too low by at least `missing`; search again with a smaller limit.
        lower = case.device_limit - max(missing, int(LIMIT_REDUCTION * case.device_limit))
        notes.append(
            f"a trial step did not fit into {case.device_limit / GIB:.3g} GiB, "
            f"{missing / GIB:.3g} were missing: chosen again for {lower / GIB:.3g} GiB"
        )
        if tries == MAX_TRIES - 1:
            break
        case = replace(case, device_limit=lower)
    raise account.out_of_memory_error("; ".join(notes))


def open_settings(run: RunConfig) -> frozenset[str]:
    """Names of the settings a run leaves open, as `planner.offload_search` knows them."""
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
    sizes = model_state_sizes(parallel, moments=run.optim.state_dtype, tile=run.memory.offload_tile)
    moved = StepTraffic(
        0, 0, sizes.state_bytes - sizes.vector_states, sizes.trained_elements, 0, 0, 0
    )
    times = {cpu: offloaded_update_seconds(moved, found, cpu=cpu) for cpu in (False, True)}
    if times[True] < times[False]:
        update: Literal["device", "cpu"] = "cpu"
    else:
        update = "device"
    return replace(run, memory=replace(run.memory, optimizer_step_on=update))


def _choose_tile(run: RunConfig, device: torch.device, local_ranks: int) -> RunConfig:
    """With `memory.auto`: limit the size of state tiles to a small fraction of the device memory.

    The update is elementwise, so no result depends on the tile size.
    """
    memory = run.memory
    if not memory.auto or memory.offload_tile != MemoryConfig().offload_tile:
        return run
    most = (
        TILE_FRACTION
        * available_bytes(memory.device_limit_gib, device, local_ranks)
        / (NUM_SLOTS * STATE_BYTES)
    )
    # Round down to a power of two, but never above the configured tile.
    tile = min(1 << max(int(most).bit_length() - 1, MIN_TILE_BITS), memory.offload_tile)
    return replace(run, memory=replace(memory, offload_tile=tile))


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


def predict_memory(
    run: RunConfig, model: Decoder, optimizer: Optimizer, device: torch.device, local_ranks: int
) -> MemoryTracker:
    """Predict the memory of a run without open settings, and of the changes that would save memory.

    Smaller micro-batches and full recomputation are estimated from the measured configuration.
    Communicates: see `measure_passes`.
    """
    parallel = get_parallel_model(model)
    plan = run.plan
    peers = count_peers(run, parallel)
    # Neither a stage nor a CUDA graph is like the eager model of two blocks that is measured.
    if plan.pipe > 1 or plan.cuda_graph:
        return MemoryTracker(peers=peers)
    case = build_fit_problem(run, model, device, local_ranks, frozenset(), optimizer)
    own = plan.micro_batch
    share = plan.global_batch // plan.num_replicas
    if own not in case.needs:
        return MemoryTracker(peers=peers)
    need = case.needs[own]
    passes = need.passes
    # Bytes of the input of a block, which a block with full recomputation still saves.
    shape = parallel.table.local_shape(
        "embed", own, run.data.seq_len, run.model.embed, plan.degrees
    )
    output = math.prod(shape) * parallel.bucket_scheduler.buckets[0].data.element_size()
    # Smaller micro-batches mean more of them per step than were measured: accumulated gradients
    # make the first passes differ.
    if len(passes) < min(share, MEASURED_PASSES):
        more = measure_passes(
            run,
            model,
            device,
            own,
            passes=min(share, MEASURED_PASSES),
            kinds=(_recompute_mode(parallel),),
        )
        passes = more or passes
    wider = replace(need, passes=_estimate_passes(need.passes, 1.0, output))
    needs = {own: wider}
    chunks = dict(case.logit_bytes)
    for micro in (n for n in divisors(share) if n < own and own % n == 0):
        needs[micro] = replace(need, passes=_estimate_passes(passes, micro / own, output))
        chunks[micro] = chunk_logit_bytes(parallel, activation_shape(run, parallel, micro))
    return MemoryTracker(
        replace(case, needs=needs, logit_bytes=chunks), case.given_placement, peers=peers
    )


def count_peers(run: RunConfig, parallel: ParallelModel) -> int:
    """Number of point-to-point peers of this rank, over all communicators."""
    plan = run.plan
    stage = parallel.grid.index["pipe"]
    stages = pipe_peers(stage, plan.pipe, chunks=plan.virtual_stages, spread=plan.vocab_over_pipe)
    return sum(stages.values()) + (plan.expert - 1 if parallel.load_balancer is not None else 0)


def _estimate_passes(
    passes: Sequence[PassMemory], share: float, output: int
) -> tuple[PassMemory, ...]:
    return tuple(recompute_budget.estimate_pass(one, passes[0], share, output) for one in passes)


# ---- inputs of the search ---------------------------------------------------------------


def build_fit_problem(
    run: RunConfig,
    model: Decoder,
    device: torch.device,
    local_ranks: int,
    free: frozenset[str],
    optimizer: Optimizer | None = None,
) -> FitProblem:
    """Collect the inputs of the placement search. optimizer: if it exists already.

    Communicates: see `measure_passes`; numbers over all axes.
    """
    parallel = get_parallel_model(model)
    plan = run.plan
    memory = run.memory
    grid = parallel.grid
    micros = candidate_micro_batches(plan, run.data.seq_len)
    # All ranks must choose alike, so the rank with the least memory decides: min x = -max(-x).
    limit = -max_over_ranks(
        -available_bytes(memory.device_limit_gib, device, local_ranks), grid, device
    )
    host = -max_over_ranks(-host_bytes_per_rank(local_ranks, memory.host_limit_gib), grid, device)
    kind = _recompute_mode(parallel)
    if "recompute" in free:
        kinds = tuple(recompute_budget.RECOMPUTE_COST)
    else:
        kinds = (kind,)
    chunks = {
        micro: chunk_logit_bytes(parallel, activation_shape(run, parallel, micro))
        for micro in micros
    }
    needs = MemoryProbes(run, model, device, kinds, chunks).memory_needs(micros)
    sizes = model_state_sizes(parallel, moments=run.optim.state_dtype, tile=memory.offload_tile)
    needs = {
        micro: replace(need, weight_gather_bytes=sizes.publish) for micro, need in needs.items()
    }
    given = Placement(
        micros[0],
        (kind,) * sizes.num_blocks,
        memory.optimizer_states,
        int(memory.optimizer_states_on_device_gib * GIB),
        memory.optimizer_step_on,
        memory.parameters,
        max(memory.activation_offload_fraction, 0.0),
    )
    found = EQUAL_RATES
    if free & RATE_DEPENDENT:
        found = _slowest_rates(_measure_rates(parallel, device), parallel)
    return FitProblem(
        needs,
        sizes,
        count_work(run, parallel),
        found,
        limit,
        host,
        given,
        free,
        max_over_ranks(other_bytes(parallel, device, optimizer), grid, device),
        chunks,
        worst_stage_bytes(resolve_model_spec(run), plan) if grid.backend == "nccl" else 0,
    )


@dataclass
class MemoryProbes:
    """Measured passes, cached by micro-batch and number of passes."""

    run: RunConfig
    model: Decoder
    device: torch.device
    recompute_modes: Sequence[RecomputeMode]
    logit_bytes: dict[int, int]
    """Bytes of the logits of a chunk, by micro-batch; they do not grow linearly."""
    measured_passes: dict[tuple[int, int], tuple[PassMemory, ...] | None] = field(
        default_factory=dict
    )

    def step_passes(self, micro: int, count: int) -> tuple[PassMemory, ...] | None:
        """The passes of a step of `count` micro-batches; None if they do not fit.

        Only a reduction over data makes the last pass of a step differ from the others.
        """
        plan = self.run.plan
        if plan.micro_batch > 0:
            share = plan.global_batch // (plan.num_replicas * micro)
        else:
            share = MEASURED_PASSES
        # Without a reduction a longer measurement contains the shorter ones, so measure once.
        if plan.data > 1:
            whole = count
        else:
            whole = max(min(share, MEASURED_PASSES), count)
        if (micro, whole) not in self.measured_passes:
            self.measured_passes[micro, whole] = measure_passes(
                self.run, self.model, self.device, micro, passes=whole, kinds=self.recompute_modes
            )
        found = self.measured_passes[micro, whole]
        if found is None:
            return None
        return found[:count]

    def memory_needs(self, micros: Sequence[int]) -> dict[int, StepMemory]:
        """Memory of a step by micro-batch, without those that do not fit on their own.

        The largest and the smallest are measured and the others interpolated, as compilation of
        each size takes time.
        """
        blocks = len(self.model.blocks)
        share = self.run.plan.global_batch // self.run.plan.num_replicas
        counts = {micro: min(share // micro, MEASURED_PASSES) for micro in micros}
        high = next((m for m in micros if self.step_passes(m, counts[m]) is not None), None)
        if high is None:
            return {}
        found = {}
        for micro in (m for m in micros if m <= high):
            passes = self._interpolate_passes(micros[-1], high, micro, counts[micro])
            if passes is not None:
                found[micro] = StepMemory(passes, blocks)
        return found

    def _interpolate_passes(
        self, low: int, high: int, micro: int, count: int
    ) -> tuple[PassMemory, ...] | None:
        if micro in (low, high):
            return self.step_passes(micro, count)
        small = self.step_passes(low, count)
        large = self.step_passes(high, count)
        if small is None or large is None:
            return None
        share = (micro - low) / (high - low)
        # Logits are computed in chunks whose size is a step function of the micro-batch: replace
        # their interpolated size by the exact one.
        chunk = self.logit_bytes[low] + (self.logit_bytes[high] - self.logit_bytes[low]) * share
        more = self.logit_bytes[micro] - round(chunk)
        mixed = (
            recompute_budget.interpolate_pass(a, b, share)
            for a, b in zip(small, large, strict=True)
        )
        return tuple(replace(one, head_peak=max(one.head_peak + more, 0)) for one in mixed)


def _recompute_mode(parallel: ParallelModel) -> RecomputeMode:
    """The recomputation mode of all blocks while measuring; the budget starts from none."""
    word = next(iter(parallel.recompute_modes.values()))
    if word == "memory_budget":
        return "none"
    return word


def activation_shape(run: RunConfig, parallel: ParallelModel, micro: int) -> ActivationShape:
    """The activation shape of a micro-batch."""
    size = parallel.bucket_scheduler.buckets[0].data.element_size()
    return ActivationShape(micro, run.data.seq_len, size, statistics_itemsize=4)


def count_work(run: RunConfig, parallel: ParallelModel) -> StepWork:
    """FLOPs of this rank per sample, and the samples and tokens of its step."""
    share = run.plan.global_batch // run.plan.num_replicas
    flow = activation_shape(run, parallel, share)
    forward = backward = inside = 0
    for name, leaf in parallel.layers.items():
        frozen = isinstance(leaf, Linear) and not leaf.handles["weight"].trainable
        flops = leaf.flops(flow)
        forward = forward + flops
        backward = backward + flops * (1 if frozen else 2)
        # Only the work inside of blocks can be recomputed.
        if any(name.startswith(f"{block}.") for block in parallel.recompute_modes):
            inside += flops * (2 if frozen else 3)
    blocks = inside / max(forward + backward, 1)
    return StepWork(forward // share, backward // share, blocks, share, run.data.seq_len)


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


def _refusal_text(run: RunConfig, case: FitProblem) -> str:
    if run.memory.auto:
        word = "memory.auto=True"
    else:
        word = "plan.recompute='memory_budget'"
    if case.needs:
        short = offload_search.min_device_bytes(case)
    else:
        short = 0
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
        f"{case.host_limit / GIB:.3g} of the host). Weights, moments, gradients and what a block "
        f"computes again must fit. Use {remedy}a smaller data.seq_len or model.size, or more ranks "
        "on depth, row or col."
    )


# ---- trial ------------------------------------------------------------------------------


def _try_placement(
    run: RunConfig, model: Decoder, device: torch.device, local_ranks: int
) -> tuple[Optimizer | None, int]:
    """Build the optimizer and run trial steps; returns it, or the bytes missing on the worst rank.

    Communicates: as two steps; a number over all axes.
    """
    parallel = get_parallel_model(model)
    missing = 0
    optimizer = None
    try:
        optimizer = build_optimizer(run, model, device, local_ranks=local_ranks)
        if run.memory.auto:
            run_trial_steps(run, model, optimizer, device)
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
    if missing or run.memory.auto:
        drop_gradients(parallel, device)
    return optimizer, missing


def run_trial_steps(
    run: RunConfig, model: Decoder, optimizer: Optimizer, device: torch.device
) -> None:
    """Run two steps whose updates are vetoed. Communicates: as steps do.

    Two, because an update may overlap with the forward pass that follows it.
    """
    count = min(run.plan.num_micro_batches, MEASURED_PASSES)
    batches = [blank_batch(run, run.plan.micro_batch, device) for _ in range(count)]
    scale = optimizer.grad_scaler
    if scale is None:
        before = None
    else:
        before = (scale.scale.clone(), scale.growth_tracker.clone())
    # Dropout of the trial must not advance the random numbers of the run.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for _ in range(2):
            forward_backward(model, batches, scale=None if scale is None else scale.scale)
            veto = torch.ones(1, dtype=torch.bool, device=device)
            optimizer.step(0.0, votes=veto, vetoes=1)
    if scale is not None and before is not None:
        scale.scale.copy_(before[0])
        scale.growth_tracker.copy_(before[1])
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def missing_bytes(words: str) -> int:
    """Bytes that were missing according to torch's out-of-memory message; 0 if unknown."""
    units = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    found = re.search(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", words)
    free = re.search(r"of which ([\d.]+) (bytes|KiB|MiB|GiB) is free", words)
    want, there = (int(float(m[1]) * units[m[2]]) if m else 0 for m in (found, free))
    return max(want - there, 0) or want
