"""Framework profiles: what a framework saves in a step, what it overlaps, and its kernels.

Plans are made for `RANVIER`. Profiles of other frameworks, whose published runs are compared with
predictions, are in benchmarks/published_frameworks.py. Entries are facts about the code of a
framework, not numbers fitted to its runs; `source` names the origin of each.
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
    from ranvier.planner.model_spec import BlockSpec, ModelSpec
    from ranvier.planner.predict import Candidate, Workload
    from ranvier.planner.time.communication import CommTime, RankGroups
    from ranvier.planner.time.compute import ComputeContext
    from ranvier.planner.time.links import RankGroup

AttentionKernel = Literal["scores", "flash1", "flash2", "flash3"]

FLASH_EFFICIENCY: Mapping[str, Mapping[int, tuple[float, float]]] = {
    "flash1": {70: (0.40, 0.30), 80: (0.50, 0.45), 90: (0.37, 0.31), 100: (0.30, 0.25)},
    "flash2": {70: (0.40, 0.30), 80: (0.70, 0.60), 90: (0.45, 0.40), 100: (0.30, 0.25)},
    "flash3": {70: (0.40, 0.30), 80: (0.70, 0.60), 90: (0.75, 0.60), 100: (0.70, 0.60)},
}
"""Efficiency of causal attention with head_dim 128, forward and backward, relative to the best
matmul, by generation of the device. FlashAttention (arXiv 2205.14135): 110 to 140 TFLOP/s on an
A100; FlashAttention-2 (arXiv 2307.08691): 190 and 165 on an A100, 335 on an H100; FlashAttention-3
(arXiv 2407.08608) and cuDNN: 600 and 480 on an H100."""


@dataclass(frozen=True, kw_only=True)
class FrameworkProfile:
    """How a framework runs a step."""

    name: str
    attention: AttentionKernel = "flash2"
    """scores: matmuls that materialize all attention scores, with softmax and dropout kernels."""
    sequence_parallel: bool = True
    """Whether norms, dropouts and residuals are split over row as well (sequence parallelism)."""
    elementwise_passes: float = 1.0
    """Memory accesses between matmuls, relative to hand-fused kernels."""
    compiled_passes: float = 0.8
    """The same ratio for a compiled block."""
    bandwidth_factor: float = 1.0
    """Rate of its memory-bound kernels relative to typical ones (`Efficiency.memory`)."""
    loss_bytes_per_logit: int = 20
    """Bytes read and written per logit: cast, softmax, its gradient, cast."""
    kernels_per_block: int = 30
    """Kernels launched in the forward pass of a block."""
    launch_blocking: bool = False
    """Whether the host waits for each kernel (CUDA_LAUNCH_BLOCKING)."""
    fp8_casts: Literal["fused", "apart"] = "apart"
    """Whether activations are cast to 8 bits by the kernels that compute them, and weights once per
    step."""
    row_overlap: float = 0.0
    """Share of the communication over row that overlaps with matmuls."""
    overlaps_dx: bool = False
    """Whether reductions over row in backward overlap with the matmul of dW."""
    overlaps_context: bool = True
    """Whether keys of other ranks of context are sent while attention is computed."""
    overlaps_in_graphs: bool = True
    """Whether compiled blocks overlap communication as eager blocks do."""
    overlaps_grad_reduction: bool = True
    """Whether gradients are reduced while the backward pass is still running."""
    pipe_overlap: float = 0.0
    """Share of the messages between stages that overlaps with compute."""
    grad_bytes: int = 4
    """Bytes per element of gradients, as stored and reduced."""
    fused_grad_accumulation: bool = False
    """Whether matmuls accumulate into the gradient directly."""
    state_bytes: int = 12
    """Bytes of master weight and moments per parameter."""
    shards_states: bool = True
    """Whether replicas split optimizer states (ZeRO)."""
    scatters_messages: bool = True
    """Whether each rank of a row sends only its part of a message to the next stage."""
    stage_partition: Literal["equal", "balanced"] = "equal"
    """How stages are cut: equal numbers of blocks (or of blocks, embedding and head, if that
    divides), or balanced by cost."""
    selective_recompute: Literal["attention", "half", "small"] = "attention"
    """What selective recomputation recomputes: attention; every other matmul and everything between
    matmuls; or everything between matmuls."""
    allocator_reserve: float = 0.05
    """Memory that the allocator reserves but tensors do not use, relative to used memory."""
    released_reserve: float = 0.5
    """Share of that reserve which is released before a run is out of memory."""
    context_bytes: float = 1.5e9
    """Device bytes outside of tensors: context, libraries, and NCCL. For Ranvier without NCCL,
    whose communicators are counted separately (`communicators`)."""
    memory_margin: float = 0.0
    """Share of the device's memory that must stay free."""
    source: str = ""


class Foreign(FrameworkProfile, ABC):
    """Another framework, with its own formulas for memory and communication."""

    @abstractmethod
    def memory(self, job: Workload, layout: Candidate) -> MemoryBreakdown:
        """Returns the bytes of its largest stage by category."""

    @abstractmethod
    def spoken(
        self,
        model: ModelSpec,
        plan: Plan,
        setup: ComputeContext,
        cluster: Cluster,
        places: RankGroups,
    ) -> CommTime:
        """Returns the communication time of a rank per step."""

    @abstractmethod
    def context_seconds(
        self,
        part: BlockSpec,
        plan: Plan,
        setup: ComputeContext,
        cluster: Cluster,
        ranks: RankGroup,
    ) -> float:
        """Returns the seconds of a block over context per micro-batch, before any overlap."""


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
    "accumulated or reduced, stages balanced by cost; kernels as profiled "
    "(docs/benchmarks/index.md): cuDNN attention, 0.9 of the bandwidth, three passes over logits",
)
