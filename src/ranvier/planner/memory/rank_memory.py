"""Memory of the ranks of a stage for any micro-batch, recompute modes and placement.

This is the closed form of `peaks`, for a run that has settings left to choose. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from ranvier.config.plan import Plan
from ranvier.cost.layers import ActivationShape
from ranvier.cost.linear import LinearCost
from ranvier.cost.optimizer import ADAMW, OptimizerSpec
from ranvier.memory.recompute_budget import RECOMPUTE_COST, RecomputeMode
from ranvier.pipeline.balance import part_ranges
from ranvier.planner.comm_volume import (
    ShardingKey,
    StageBlocks,
    build_layers,
    build_stage_blocks,
    find_stage_starts,
)
from ranvier.planner.memory.activations import STATISTICS_BYTES
from ranvier.planner.memory.chunks import MemoryOptions, chunk_saving
from ranvier.planner.memory.model_states import (
    ModelStateSizes,
    StageModelStates,
    model_state_sizes,
)
from ranvier.planner.memory.peaks import PeakUsage, with_weights_on_host
from ranvier.planner.memory.total import chunk_bytes, stage_peaks
from ranvier.planner.model_spec import ModelSpec
from ranvier.planner.time.offload import StepWork

CACHED_PEAKS = 1 << 14
DEFAULT_OPTIONS = MemoryOptions()


@dataclass(frozen=True, eq=False)
class RankMemory:
    """Memory and compute of a rank of a stage, as a function of the settings left to choose."""

    model: ModelSpec
    plan: Plan
    """Its `micro_batch` and `recompute` are not read."""
    seq: int
    """Tokens per sample."""
    itemsize: int
    """Bytes per element of weights and activations."""
    stage: int = 0
    options: MemoryOptions = DEFAULT_OPTIONS
    optimizer: OptimizerSpec = ADAMW
    density: float = 1.0
    """Fraction of the matrices of blocks that is trained."""
    tile: int = 2**24
    """Elements of offloaded states that are updated at once."""

    @cached_property
    def stage_blocks(self) -> StageBlocks:
        """The parts of the stage."""
        plan = self.plan
        return build_stage_blocks(
            self.model,
            self.stage,
            plan.pipe,
            plan.virtual_stages,
            find_stage_starts(self.model, plan, self.seq),
            plan.vocab_over_pipe,
        )

    @cached_property
    def block_indices(self) -> tuple[int, ...]:
        """Indices of its blocks in the model."""
        count = len(self.model.parts_in_order)
        starts = find_stage_starts(self.model, self.plan, self.seq)
        mine = part_ranges(starts, count)[self.stage :: self.plan.pipe]
        # The first part is the embedding and the last one the head.
        return tuple(i - 1 for one in mine for i in range(count)[one] if 0 < i < count - 1)

    def own_modes(self, modes: Sequence[RecomputeMode]) -> tuple[RecomputeMode, ...]:
        """Returns the modes of its blocks. modes: of all blocks of the model."""
        return tuple(modes[i] for i in self.block_indices)

    @cached_property
    def sizes(self) -> ModelStateSizes:
        """Weights and optimizer states."""
        return model_state_sizes(
            self.model,
            self.stage_blocks,
            ShardingKey.from_plan(self.plan),
            self.itemsize,
            self.optimizer,
            self.density,
            self.tile,
        )

    @cached_property
    def work(self) -> StepWork:
        """FLOPs per sample, and the samples and tokens of a step."""
        share = self.plan.global_batch // self.plan.num_replicas
        flow = self._activation_shape(share)
        spot = ShardingKey.from_plan(self.plan).activation_key
        forward = backward = inside = 0
        for part, count in self.stage_blocks.block_counts:
            for layer in build_layers(self.model, part, spot):
                frozen = isinstance(layer, LinearCost) and not layer.has_trainable_weight
                flops = count * layer.flops(flow)
                ahead = round(flops * part.calls.total)
                back = round(flops * (1 if frozen else 2) * part.calls.with_grad)
                forward += ahead
                backward += back
                # Only the work inside of blocks can be recomputed.
                inside += (ahead + back) * part.is_block
        blocks = inside / max(forward + backward, 1)
        return StepWork(forward // share, backward // share, blocks, share, self.seq)

    def peaks(
        self,
        micro: int,
        modes: Sequence[RecomputeMode],
        *,
        offloaded: float = 0.0,
        weights_on_host: bool = False,
        update_continues: bool = False,
    ) -> tuple[PeakUsage, ...]:
        """Returns the candidate memory peaks without weights and states. modes: of its blocks, in
        order.

        offloaded: `memory.activation_offload_fraction`.
        """
        how = self.options._replace(
            recompute_modes=tuple(modes),
            offloaded_fraction=self.offloaded_fraction(offloaded),
            update_continues=update_continues,
        )
        own, found = _cached_peaks(*self._peak_inputs(micro), how, self.density)
        if not weights_on_host:
            return found
        return with_weights_on_host(own, found, depth=self.plan.gather_ranks, num_blocks=len(modes))

    def in_flight_bytes(
        self, micro: int, modes: Sequence[RecomputeMode], *, offloaded: float = 0.0
    ) -> tuple[int, int]:
        """Returns the peak bytes without weights and states with one micro-batch, and of each
        further one.
        """
        how = self.options._replace(
            recompute_modes=tuple(modes),
            offloaded_fraction=self.offloaded_fraction(offloaded),
            counts_in_flight=False,
        )
        given = *self._peak_inputs(micro), how
        peak = max(one.total_bytes for one in _cached_peaks(*given, self.density)[1])
        return peak, chunk_bytes(*given)

    def _peak_inputs(
        self, micro: int
    ) -> tuple[ModelSpec, Plan, ActivationShape, int, OptimizerSpec]:
        plan = replace(self.plan, micro_batch=micro, recompute="none")
        return self.model, plan, self._activation_shape(micro), self.stage, self.optimizer

    def offloaded_fraction(self, offloaded: float) -> float:
        """Returns the fraction to offload of all blocks but the last, so that it is `offloaded` of
        all blocks.
        """
        count = len(self.block_indices)
        if self.stage < self.plan.pipe - 1:
            return offloaded
        if count > 1:
            return min(offloaded * count / (count - 1), 1.0)
        return 0.0

    def saved_bytes(self, micro: int, modes: Sequence[RecomputeMode]) -> list[int]:
        """Returns the bytes that each of its blocks saves for backward with a mode."""
        by_mode = self.saved_bytes_by_mode(micro)
        return [by_mode[kind][i] for i, kind in enumerate(modes)]

    def saved_bytes_by_mode(self, micro: int) -> Mapping[RecomputeMode, Sequence[int]]:
        """Returns the bytes that each of its blocks would save with each mode."""
        if micro not in self._saved_bytes:
            self._saved_bytes[micro] = {
                kind: self._block_bytes(micro, kind) for kind in RECOMPUTE_COST
            }
        return self._saved_bytes[micro]

    @cached_property
    def _saved_bytes(self) -> dict[int, dict[RecomputeMode, list[int]]]:
        return {}

    def _block_bytes(self, micro: int, kind: RecomputeMode) -> list[int]:
        spot = ShardingKey.from_plan(self.plan).activation_key
        flow = self._activation_shape(micro)
        order = self.model.parts_in_order
        saving = chunk_saving(self.model, self.plan, flow, self.options)
        found = []
        for at in self.block_indices:
            block = saving.activations(self.model, order[at + 1], spot, flow, kind)
            found.append(block.saved_bytes(kind, keeps=self.options.saves_collectives))
        return found

    def _activation_shape(self, micro: int) -> ActivationShape:
        wide = max(self.itemsize, STATISTICS_BYTES)
        return ActivationShape(micro, self.seq, self.itemsize, statistics_itemsize=wide)


@lru_cache(CACHED_PEAKS)
def _cached_peaks(
    model: ModelSpec,
    plan: Plan,
    flow: ActivationShape,
    stage: int,
    optimizer: OptimizerSpec,
    how: MemoryOptions,
    density: float,
) -> tuple[StageModelStates, tuple[PeakUsage, ...]]:
    own, found = stage_peaks(model, plan, flow, stage, optimizer, how, density)
    return own, tuple(dict.fromkeys(found))
