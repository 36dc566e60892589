"""Peak memory of a rank, by category; imports no torch.

Weights and optimizer states are constant; `peaks` finds the point of a step with most other memory.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from ranvier.config.plan import Plan
from ranvier.cost.layers import ActivationShape
from ranvier.cost.optimizer import ADAMW, OptimizerSpec
from ranvier.planner.comm_volume import (
    CACHE_SIZE,
    ShardingKey,
    build_stage_blocks,
    find_stage_starts,
)
from ranvier.planner.memory.breakdown import MemoryBreakdown
from ranvier.planner.memory.chunks import MemoryOptions, build_chunks
from ranvier.planner.memory.model_states import (
    StageModelStates,
    stage_model_states,
)
from ranvier.planner.memory.peaks import PeakUsage, find_peaks
from ranvier.planner.model_spec import BlockSpec, ModelSpec
from ranvier.planner.time.compute import Fp8Scaling


def peak_memory(
    model: ModelSpec,
    plan: Plan,
    flow: ActivationShape,
    *,
    stage: int | None = None,
    states: str = "device",
    optimizer: OptimizerSpec = ADAMW,
    keeps: bool = False,
    compiled: bool = False,
    fp8: Fp8Scaling = "",
    simulated: bool = True,
) -> MemoryBreakdown:
    """Returns the peak bytes by category of a rank of a stage, for a resolved plan.

    stage: None for the worst one. keeps: recomputed blocks reuse saved results of collectives. fp8:
    as in `Candidate`. simulated: simulate the pipeline schedule to get the micro-batches in flight;
    otherwise assume 1F1B.
    """
    how = MemoryOptions(keeps, compiled, fp8, simulated)
    firsts = find_stage_starts(model, plan, flow.seq)
    shape = plan.pipe, plan.virtual_stages, firsts, plan.vocab_over_pipe
    found = list[tuple[int, StageModelStates, PeakUsage]]()
    for i in fullest_stages(model, *shape) if stage is None else (stage,):
        own, peaks = stage_peaks(model, plan, flow, i, optimizer, how)
        peak = max(peaks, key=lambda one: one.total_bytes)
        # The worst stage is the one with most device memory; offloaded states do not count.
        rests = own.weight_bytes + (0 if states == "host" else own.master_bytes + own.moment_bytes)
        found.append((rests + peak.total_bytes, own, peak))
    _, own, peak = max(found, key=lambda one: one[0])
    device = {
        "weights": own.weight_bytes,
        "gradients": peak.gradients,
        "master": own.master_bytes,
        "moments": own.moment_bytes,
        "activations": peak.activations,
        "gathered weights": peak.gathered_weights,
        "logits": peak.logits,
        "communication": peak.communication,
    }
    host: dict[str, int] = {}
    # Offloaded states move from the device's column to the host's.
    if states == "host":
        host = {name: device.pop(name) for name in ("master", "moments")}
    return MemoryBreakdown({n: size for n, size in device.items() if size}, host, peak.where)


def stage_peaks(
    model: ModelSpec,
    plan: Plan,
    flow: ActivationShape,
    stage: int,
    optimizer: OptimizerSpec,
    how: MemoryOptions,
    density: float = 1.0,
) -> tuple[StageModelStates, list[PeakUsage]]:
    """Returns the weights and states of a rank of a stage, and its other candidate peaks."""
    spot = ShardingKey.from_plan(plan)
    firsts = find_stage_starts(model, plan, flow.seq)
    here = build_stage_blocks(
        model, stage, plan.pipe, plan.virtual_stages, firsts, plan.vocab_over_pipe
    )
    own = stage_model_states(model, here, spot, flow.itemsize, optimizer, density)
    return own, find_peaks(model, plan, flow, spot, firsts, here, own, how)


def chunk_bytes(
    model: ModelSpec,
    plan: Plan,
    flow: ActivationShape,
    stage: int,
    optimizer: OptimizerSpec,
    how: MemoryOptions,
) -> int:
    """Returns the bytes that the largest chunk of a stage saves for a micro-batch in flight."""
    spot = ShardingKey.from_plan(plan)
    firsts = find_stage_starts(model, plan, flow.seq)
    here = build_stage_blocks(
        model, stage, plan.pipe, plan.virtual_stages, firsts, plan.vocab_over_pipe
    )
    own = stage_model_states(model, here, spot, flow.itemsize, optimizer)
    _, chunks = build_chunks(model, here, firsts, spot.activation_key, flow, plan, own, how)
    return max(one.saved_bytes for one in chunks)


@lru_cache(CACHE_SIZE)
def fullest_stages(
    model: ModelSpec, count: int, chunks: int, firsts: tuple[int, ...], spread: bool
) -> tuple[int, ...]:
    """Returns the stages that may need most: their parts are not a subset of an earlier stage's.

    Of two stages with the same parts the earlier one has more micro-batches in flight.
    """
    found = dict[int, Counter[BlockSpec]]()
    for i in range(count):
        parts = Counter(
            dict(build_stage_blocks(model, i, count, chunks, firsts, spread).block_counts)
        )
        if not any(parts <= other for other in found.values()):
            found[i] = parts
    return tuple(found)
