"""Profiles of the frameworks whose published runs are scored, and one for all others.

Entries are facts about code, not numbers fitted to its runs; `source` names the origin of each.
What does not follow from code is one number for all frameworks that do a thing in the same way
(`EAGER`, `HIDDEN`), and a memory reserve per framework (benchmarks/published.py). Runs of the same
framework may differ in sequence parallelism, compilation or asynchronous tensor parallelism: use
`replace` on the field. A framework without a profile has `COMMON`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import published_formulas as formulas

from ranvier.config.plan import Plan
from ranvier.planner.cluster import Cluster
from ranvier.planner.frameworks import Foreign
from ranvier.planner.memory.breakdown import MemoryBreakdown
from ranvier.planner.model_spec import BlockSpec, ModelSpec
from ranvier.planner.predict import Candidate, Workload
from ranvier.planner.time.communication import CommTime, RankGroups
from ranvier.planner.time.compute import ComputeContext
from ranvier.planner.time.links import RankGroup

Reduction = Literal["all_reduce", "scatter", "both"]

EAGER = 2.0
"""Memory accesses between matmuls if kernels are not fused, relative to hand-fused kernels. Fitted,
the same for all eager frameworks."""
PARTLY = (1 + EAGER) / 2
"""The same if norms and rotations are fused, and activations and residuals are not."""
HIDDEN = 0.52
"""Share of communication over row, and of messages, that overlaps with compute if a framework
overlaps them. Fitted, the same for all of them."""
BUCKET = 25e6
"""Bytes of a bucket of torch's DistributedDataParallel, in the dtype of the weights."""


@dataclass(frozen=True, kw_only=True)
class Framework(Foreign):
    """Another framework."""

    reduce: Reduction = "scatter"
    """Reduction of gradients over data: an all-reduce; a reduce-scatter and a gather of updated
    weights; or an all-reduce and that gather."""
    gathers: Literal["again", "keep"] = "again"
    """Whether weights are gathered over depth for each micro-batch, or once per step."""
    regathers: bool = False
    """Whether recomputation gathers weights over depth again."""
    bucket: float = 0.0
    """Bytes of gradients that are reduced over data at a time; 0 means all, or by blocks."""
    copied: int = 0
    """Tensors of a block whose parts are copied rank by rank around a reduce-scatter and a gather
    over data, with one kernel each; 0 means no copies."""
    interleaves: bool = True
    """Whether its pipelines support virtual stages."""
    held_gradient: float = 0.0
    """Bytes of gradient per parameter in memory, with copies and buckets; 0 means `gradient`."""
    wide_gradient: float = 4.0
    """The same if gradients are accumulated in fp32."""
    fsdp: bool = False
    """Whether weights are also sharded over context, even if depth is 1."""
    kept: float = 1.0
    """Bytes that a block saves, relative to the inputs of its matmuls, norms and activations."""
    logits: int = 10
    """Bytes per logit, with temporaries of the loss."""
    split_logits: int = 0
    """The same if row splits the vocabulary and no kernel is fused; 0 means `logits`."""
    buffers: float = 0.0
    """Bytes of fixed buffers: flat copies, buckets."""
    messages: int = 0
    """Messages per micro-batch in flight that a stage keeps in addition to saved activations."""
    copies: int = 2
    """Number of gathered blocks in memory at once."""
    repeats_kv_heads: bool = False
    """Whether keys over context are sent once for each query head."""
    context_grad_bytes: int = 2
    """Bytes per element of the gradients of keys over context."""
    merged_bytes: tuple[int, int] = (0, 0)
    """Bytes read and written per element of attention's output to merge the results of one more
    block of keys, forward and backward."""

    def memory(self, job: Workload, layout: Candidate) -> MemoryBreakdown:
        """Returns the bytes of its worst stage by category."""
        return formulas.memory(job, layout, self)

    def spoken(
        self,
        model: ModelSpec,
        plan: Plan,
        setup: ComputeContext,
        cluster: Cluster,
        places: RankGroups,
    ) -> CommTime:
        """Returns the seconds per step that a rank communicates."""
        return formulas.spoken(model, plan, setup, cluster, self, places)

    def context_seconds(
        self,
        part: BlockSpec,
        plan: Plan,
        setup: ComputeContext,
        cluster: Cluster,
        ranks: RankGroup,
    ) -> float:
        """Returns the seconds of a block over context per micro-batch, before any overlap."""
        return formulas.context_seconds(part, plan, setup, cluster, self, ranks)


MEGATRON20 = Framework(
    name="Megatron-LM 2020",
    attention="scores",
    sequence_parallel=False,
    reduce="all_reduce",
    grad_bytes=2,
    state_bytes=12,
    shards_states=False,
    scatters_messages=False,
    bucket=BUCKET,
    interleaves=False,
    source="arXiv 1909.08053 and its repository: torch DDP overlaps the all-reduce of fp16 "
    "gradients; fused scale-mask-softmax; all-reduces over row",
)
MEGATRON21 = Framework(
    name="Megatron-LM 2021",
    attention="scores",
    sequence_parallel=False,
    overlaps_grad_reduction=False,
    reduce="all_reduce",
    grad_bytes=2,
    shards_states=False,
    source="arXiv 2104.04473: own DDP reduces at the end of a step; messages are scattered over "
    "row and gathered (section 4.1); interleaved 1F1B",
)
MEGATRON22 = Framework(
    name="Megatron-LM 2022",
    attention="scores",
    overlaps_dx=True,
    overlaps_grad_reduction=False,
    reduce="all_reduce",
    grad_bytes=2,
    held_gradient=4.0,
    shards_states=False,
    source="arXiv 2205.05198: sequence parallelism, selective recomputation of attention; "
    "reductions over row in backward overlap with the gradient of the weight",
)
MEGATRON_DEEPSPEED = Framework(
    name="Megatron-DeepSpeed",
    attention="scores",
    sequence_parallel=False,
    overlaps_grad_reduction=False,
    reduce="both",
    grad_bytes=2,
    wide_gradient=6.0,
    messages=1,
    allocator_reserve=0.22,
    context_bytes=3.0e9,
    buffers=4.5e9,
    interleaves=False,
    source="DeepSpeed's pipeline engine: gradients are all-reduced in buckets after the last "
    "micro-batch, ZeRO-1 then gathers weights; messages are partitioned over row",
)
DEEPSPEED3 = Framework(
    name="DeepSpeed ZeRO-3",
    attention="scores",
    sequence_parallel=False,
    grad_bytes=2,
    regathers=True,
    interleaves=False,
    source="arXiv 1910.02054: weights are gathered for forward, for recomputation and for backward",
)
MEGATRON_CORE = Framework(
    name="Megatron-Core",
    attention="flash3",
    fp8_casts="fused",
    overlaps_dx=True,
    row_overlap=HIDDEN,
    pipe_overlap=HIDDEN,
    fused_grad_accumulation=True,
    grad_bytes=2,
    kernels_per_block=25,
    source="NeMo and Megatron-Core performance guides and recipes: cuDNN attention, Transformer "
    "Engine's fused casts, user buffers overlap the communication over row, p2p and gradients "
    "overlap, gradients in bf16 (grad-reduce-in-bf16)",
)
TORCHTITAN = Framework(
    name="torchtitan",
    attention="flash2",
    elementwise_passes=EAGER,
    kernels_per_block=60,
    grad_bytes=2,
    selective_recompute="half",
    fsdp=True,
    held_gradient=4.5,
    logits=14,
    split_logits=16,
    allocator_reserve=0.18,
    context_bytes=1.0e9,
    overlaps_context=False,
    repeats_kv_heads=True,
    context_grad_bytes=4,
    merged_bytes=(46, 70),
    source="arXiv 2410.06511: FSDP2, torch's SDPA; selective recomputation keeps every other "
    "matmul; pipelines without a given number take as many micro-batches as stages; models/llama "
    "repeats kv heads before SDPA; torch.distributed.tensor.experimental context_parallel: a ring "
    "of SDPA blocks in head-tail order, keys gathered, gradients in fp32 (convert_to_f32), and "
    "eager kernels that merge blocks: cast, difference, product, difference, cat of keys; in "
    "backward sums of dq, dk and dv by chunk and cat, cat of keys and of their gradients",
)
NANOTRON = Framework(
    name="nanotron",
    attention="flash2",
    elementwise_passes=PARTLY,
    kernels_per_block=70,
    bucket=2 * BUCKET,
    copied=6,
    stage_partition="balanced",
    interleaves=False,
    kept=2.0,
    allocator_reserve=0.1,
    source="huggingface/nanotron (models/llama.py, optim/gradient_accumulator.py, distributed.py): "
    "eager except for Triton's RMSNorm and flash-attn's rotation; fp32 gradient accumulation, half "
    "gradients are freed; a hook reduces DDP's buckets during backward; ZeRO-1 flattens and copies "
    "each rank's part of each tensor; stages balanced by the compute cost of blocks",
)
FOUNDRY = Framework(
    name="llm-foundry",
    attention="flash1",
    elementwise_passes=EAGER,
    kernels_per_block=60,
    sequence_parallel=False,
    fsdp=True,
    kept=0.8,
    logits=6,
    source="mosaicml/llm-foundry: FSDP, eager, Triton FlashAttention; mixed precision DEFAULT "
    "reduces in fp32, PURE in bf16",
)
AXONN = Framework(
    name="AxoNN",
    attention="flash2",
    elementwise_passes=EAGER,
    kernels_per_block=60,
    sequence_parallel=False,
    grad_bytes=2,
    row_overlap=HIDDEN,
    source="arXiv 2502.08145: overlapped all-reduces, reduce-scatters and gathers over Z",
)
COMMON = Framework(
    name="common",
    elementwise_passes=EAGER,
    fp8_casts="fused",
    kernels_per_block=60,
    source="a framework without a profile: eager kernels, FlashAttention-2, no overlap over row, "
    "gradients reduced in fp32 during backward, states sharded over data",
)
