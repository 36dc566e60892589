"""Runtime: how a framework runs a step: what it keeps, what it overlaps, which kernels it has.

`OURS` is the one that plans are made for. Rows of frameworks whose published runs are scored lie
beside the score (benchmarks/published_frameworks.py). Entries are facts about code, not numbers
fitted to its runs; `source` says where each comes from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ranvier.config.plan import Plan
    from ranvier.planner.cluster import Cluster
    from ranvier.planner.memory.breakdown import MemoryBreakdown
    from ranvier.planner.model_spec import ModelSpec
    from ranvier.planner.predict import Candidate, Workload
    from ranvier.planner.time.communication import CommTime, RankGroups
    from ranvier.planner.time.compute import ComputeContext

AttentionKernel = Literal["scores", "flash1", "flash2", "flash3"]

FLASH_EFFICIENCY: Mapping[str, Mapping[int, tuple[float, float]]] = {
    "flash1": {70: (0.40, 0.30), 80: (0.50, 0.45), 90: (0.37, 0.31), 100: (0.30, 0.25)},
    "flash2": {70: (0.40, 0.30), 80: (0.70, 0.60), 90: (0.45, 0.40), 100: (0.30, 0.25)},
    "flash3": {70: (0.40, 0.30), 80: (0.70, 0.60), 90: (0.75, 0.60), 100: (0.70, 0.60)},
}
"""Causal attention of head size 128, forward and backward, as a share of the best matrix product,
by generation of the device. FlashAttention (arXiv 2205.14135): 110 to 140 TFLOP/s on an A100;
FlashAttention-2 (arXiv 2307.08691): 190 and 165 on an A100, 335 on an H100; FlashAttention-3 (arXiv
2407.08608) and cuDNN: 600 and 480 on an H100."""


@dataclass(frozen=True, kw_only=True)
class FrameworkProfile:
    """A framework at work."""

    name: str
    attention: AttentionKernel = "flash2"
    """scores: matrix products with all scores written to memory, softmax and dropout kernels."""
    sequence_parallel: bool = True
    """Whether norms, dropouts and residuals are split over row as well (sequence parallelism)."""
    elementwise_passes: float = 1.0
    """Reads and writes of what is between matrix products, over those of kernels fused by hand."""
    compiled_passes: float = 0.8
    """The same of a compiled block."""
    bandwidth_factor: float = 1.0
    """Rate of its kernels that only read and write, over that of usual ones (`Reach.memory`)."""
    loss_bytes_per_logit: int = 20
    """Bytes of a logit that are read and written: cast, softmax, its gradient, cast."""
    kernels_per_block: int = 30
    """Launched in the forward pass of a block."""
    launch_blocking: bool = False
    """Whether the host waits for each kernel (CUDA_LAUNCH_BLOCKING)."""
    fp8_casts: Literal["fused", "apart"] = "apart"
    """Whether values are cast to 8 bits by the kernel that makes them, and weights once a step."""
    row_overlap: float = 0.0
    """Share of the communication over row that runs beside matrix products."""
    overlaps_dx: bool = False
    """Whether what is reduced in backward over row runs beside the product of dW."""
    overlaps_in_graphs: bool = True
    """Whether compiled blocks overlap as others do."""
    overlaps_grad_reduction: bool = True
    """Whether gradients are reduced while the backward pass still runs."""
    pipe_overlap: float = 0.0
    """Share of the messages between stages that runs beside compute."""
    grad_bytes: int = 4
    """Bytes of a gradient, kept and reduced."""
    fused_grad_accumulation: bool = False
    """Whether products add into the gradient themselves."""
    state_bytes: int = 12
    """Bytes of master weight and moments of a parameter."""
    shards_states: bool = True
    """Whether states are split over data."""
    scatters_messages: bool = True
    """Whether ranks of a row send parts of a message to the next stage, not all the whole."""
    stage_partition: Literal["equal", "balanced"] = "equal"
    """Stages: equal numbers of blocks (or of blocks, embedding and head, where that divides), or by
    their work."""
    selective_recompute: Literal["attention", "half", "small"] = "attention"
    """What selective recomputation computes again: attention; every other matrix product and all
    between them; all between them."""
    allocator_reserve: float = 0.05
    """What the allocator holds and no tensor has, over all that tensors have."""
    released_reserve: float = 0.5
    """Share of that which it gives back before a run is out of memory."""
    context_bytes: float = 1.5e9
    """Bytes of the device that no tensor has: context, libraries, and NCCL, but for ours, whose
    communicators are counted (`communicators`)."""
    memory_margin: float = 0.0
    """Share of the device's memory that must stay free."""
    source: str = ""


class Foreign(FrameworkProfile, ABC):
    """A runtime that is not ours: what ours counts follows from formulas of its own."""

    @abstractmethod
    def memory(self, job: Workload, layout: Candidate) -> MemoryBreakdown:
        """Bytes of its worst stage by category."""

    @abstractmethod
    def spoken(
        self,
        model: ModelSpec,
        plan: Plan,
        setup: ComputeContext,
        cluster: Cluster,
        places: RankGroups,
    ) -> CommTime:
        """Seconds that a rank communicates in a step."""


RANVIER = FrameworkProfile(
    name="ranvier",
    attention="flash3",
    elementwise_passes=4.8,
    compiled_passes=1.0,
    bandwidth_factor=1.5,
    loss_bytes_per_logit=7,
    kernels_per_block=70,
    overlaps_dx=True,
    overlaps_in_graphs=False,
    selective_recompute="small",
    stage_partition="balanced",
    context_bytes=0.63e9,
    memory_margin=0.04,
    allocator_reserve=0.03,
    released_reserve=0.0,
    source="this package: three overlaps, sequence split over row, gradients in fp32 once they are "
    "added up or reduced, stages cut by work; kernels as profiled (docs/benchmarks.md): cuDNN's "
    "attention, 0.9 of the bandwidth, three passes over logits",
)
