"""Runtime: how a framework runs a step: what it keeps, what it overlaps, which kernels it has.

One row a framework. Entries are facts about code, not numbers fitted to its runs; `source` says
where each comes from. What no code says is one number for all that do a thing the same way
(`EAGER`, `HIDDEN`), and a reserve of memory a framework (benchmarks/published.py). Runs of the same
framework may differ in sequence parallelism, compilation or asynchronous tensor parallelism:
`replace` the field then. A framework without a row has `COMMON`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Attention = Literal["scores", "flash1", "flash2", "flash3"]
Reduction = Literal["all_reduce", "scatter", "both"]

FLASH: Mapping[str, Mapping[int, tuple[float, float]]] = {
    "flash1": {70: (0.40, 0.30), 80: (0.50, 0.45), 90: (0.37, 0.31), 100: (0.30, 0.25)},
    "flash2": {70: (0.40, 0.30), 80: (0.70, 0.60), 90: (0.45, 0.40), 100: (0.30, 0.25)},
    "flash3": {70: (0.40, 0.30), 80: (0.70, 0.60), 90: (0.75, 0.60), 100: (0.70, 0.60)},
}
"""Causal attention of head size 128, forward and backward, as a share of the best matrix product,
by generation of the device. FlashAttention (arXiv 2205.14135): 110 to 140 TFLOP/s on an A100;
FlashAttention-2 (arXiv 2307.08691): 190 and 165 on an A100, 335 on an H100; FlashAttention-3 (arXiv
2407.08608) and cuDNN: 600 and 480 on an H100."""

EAGER = 2.0
"""Reads and writes of what is between matrix products where one kernel follows another, over those
of kernels fused by hand. Fitted, the same for all eager frameworks."""
PARTLY = (1 + EAGER) / 2
"""The same where norms and rotations are fused, and activations and residuals are not."""
HIDDEN = 0.52
"""Share of communication over row, and of messages, that runs beside compute where a framework
overlaps them. Fitted, the same for all that do."""
BUCKET = 25e6
"""Bytes of a bucket of torch's DistributedDataParallel, in the type of the weights."""


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """A framework at work."""

    name: str
    attention: Attention = "flash2"
    """scores: matrix products with all scores written to memory, softmax and dropout kernels."""
    sequence: bool = True
    """Whether norms, dropouts and residuals are split over row as well (sequence parallelism)."""
    passes: float = 1.0
    """Reads and writes of what is between matrix products, over those of kernels fused by hand."""
    compiled: float = 0.8
    """The same of a compiled block."""
    stream: float = 1.0
    """Rate of its kernels that only read and write, over that of usual ones (`Reach.memory`)."""
    loss: int = 20
    """Bytes of a logit that are read and written: cast, softmax, its gradient, cast."""
    kernels: int = 30
    """Launched in the forward pass of a block."""
    blocking: bool = False
    """Whether the host waits for each kernel (CUDA_LAUNCH_BLOCKING)."""
    casts: Literal["fused", "apart"] = "apart"
    """Whether values are cast to 8 bits by the kernel that makes them, and weights once a step."""
    hidden_row: float = 0.0
    """Share of the communication over row that runs beside matrix products."""
    hidden_dx: bool = False
    """Whether what is reduced in backward over row runs beside the product of dW."""
    graphs: bool = True
    """Whether compiled blocks overlap as others do."""
    hidden_data: bool = True
    """Whether gradients are reduced while the backward pass still runs."""
    hidden_pipe: float = 0.0
    """Share of the messages between stages that runs beside compute."""
    reduce: Reduction = "scatter"
    """Gradients over data: an all-reduce; a reduce-scatter, and a gather of updated weights; or an
    all-reduce and that gather."""
    gradient: int = 4
    """Bytes of a gradient, kept and reduced."""
    fused_gradient: bool = False
    """Whether products add into the gradient themselves."""
    states: int = 12
    """Bytes of master weight and moments of a parameter."""
    sharded: bool = True
    """Whether states are split over data."""
    gathers: Literal["again", "keep"] = "again"
    """Weights gathered over depth for each micro-batch, or once a step."""
    regathers: bool = False
    """Whether what is computed again gathers weights over depth once more."""
    bucket: float = 0.0
    """Bytes of gradients that are reduced over data at a time; 0: all, or by blocks."""
    copied: int = 0
    """Tensors of a block whose parts are copied rank by rank around a reduce-scatter and a gather
    over data, a kernel for each; 0: no copies."""
    interleaves: bool = True
    """Whether its pipelines know chunks."""
    scatter: bool = True
    """Whether ranks of a row send parts of a message to the next stage, not all the whole."""
    cut: Literal["equal", "balanced"] = "equal"
    """Stages: equal numbers of blocks (or of blocks, embedding and head, where that divides), or by
    their work."""
    selective: Literal["attention", "half", "small"] = "attention"
    """What selective recomputation computes again: attention; every other matrix product and all
    between them; all between them."""
    held_gradient: float = 0.0
    """Bytes of a parameter's gradient in memory, with copies and buckets; 0: `gradient`."""
    wide_gradient: float = 4.0
    """The same where gradients are added up in fp32."""
    fsdp: bool = False
    """Whether weights are split over context as well, also where depth is 1."""
    kept: float = 1.0
    """Bytes that a block keeps over those that its products, norms and activations read."""
    logits: int = 10
    """Bytes of a logit, with what the loss makes of it."""
    split_logits: int = 0
    """The same where row splits the words, and no kernel is fused; 0: `logits`."""
    buffers: float = 0.0
    """Bytes of fixed buffers: flat copies, buckets."""
    messages: int = 0
    """Messages of a micro-batch in flight that a stage keeps besides what its blocks keep."""
    reserve: float = 0.05
    """What the allocator holds and no tensor has, over all that tensors have."""
    returned: float = 0.5
    """Share of that which it gives back before a run is out of memory."""
    context: float = 1.5e9
    """Bytes of the device that no tensor has: context, libraries, and NCCL, but for ours, whose
    communicators are counted (`communicators`)."""
    margin: float = 0.0
    """Share of the device's memory that must stay free."""
    copies: int = 2
    """Gathered blocks that are there at once."""
    source: str = ""


MEGATRON20 = Runtime(
    name="Megatron-LM 2020",
    attention="scores",
    sequence=False,
    reduce="all_reduce",
    gradient=2,
    states=12,
    sharded=False,
    scatter=False,
    bucket=BUCKET,
    interleaves=False,
    source="arXiv 1909.08053 and its repository: torch DDP overlaps the all-reduce of fp16 "
    "gradients; fused scale-mask-softmax; all-reduces over row",
)
MEGATRON21 = Runtime(
    name="Megatron-LM 2021",
    attention="scores",
    sequence=False,
    hidden_data=False,
    reduce="all_reduce",
    gradient=2,
    sharded=False,
    source="arXiv 2104.04473: own DDP reduces at the end of a step; messages are scattered over "
    "row and gathered (section 4.1); interleaved 1F1B",
)
MEGATRON22 = Runtime(
    name="Megatron-LM 2022",
    attention="scores",
    hidden_dx=True,
    hidden_data=False,
    reduce="all_reduce",
    gradient=2,
    held_gradient=4.0,
    sharded=False,
    source="arXiv 2205.05198: sequence parallelism, selective recomputation of attention; what is "
    "reduced over row in backward overlaps with the gradient of the weight",
)
MEGATRON_DEEPSPEED = Runtime(
    name="Megatron-DeepSpeed",
    attention="scores",
    sequence=False,
    hidden_data=False,
    reduce="both",
    gradient=2,
    wide_gradient=6.0,
    messages=1,
    reserve=0.22,
    context=3.0e9,
    buffers=4.5e9,
    interleaves=False,
    source="DeepSpeed's pipeline engine: gradients are all-reduced in buckets after the last "
    "micro-batch, ZeRO-1 then gathers weights; messages are partitioned over row",
)
DEEPSPEED3 = Runtime(
    name="DeepSpeed ZeRO-3",
    attention="scores",
    sequence=False,
    gradient=2,
    regathers=True,
    interleaves=False,
    source="arXiv 1910.02054: weights are gathered for forward, for what is computed again and for "
    "backward",
)
MEGATRON_CORE = Runtime(
    name="Megatron-Core",
    attention="flash3",
    casts="fused",
    hidden_dx=True,
    hidden_row=HIDDEN,
    hidden_pipe=HIDDEN,
    fused_gradient=True,
    gradient=2,
    kernels=25,
    source="NeMo and Megatron-Core performance guides and recipes: cuDNN attention, Transformer "
    "Engine's fused casts, user buffers overlap the communication over row, p2p and gradients "
    "overlap, gradients in bf16 (grad-reduce-in-bf16)",
)
TORCHTITAN = Runtime(
    name="torchtitan",
    attention="flash2",
    passes=EAGER,
    kernels=60,
    gradient=2,
    selective="half",
    fsdp=True,
    held_gradient=4.5,
    logits=14,
    split_logits=16,
    reserve=0.18,
    context=1.0e9,
    source="arXiv 2410.06511: FSDP2, torch's SDPA; selective recomputation keeps every other "
    "matrix product; pipelines without a given number take as many micro-batches as stages",
)
NANOTRON = Runtime(
    name="nanotron",
    attention="flash2",
    passes=PARTLY,
    kernels=70,
    bucket=2 * BUCKET,
    copied=6,
    cut="balanced",
    interleaves=False,
    kept=2.0,
    reserve=0.1,
    source="huggingface/nanotron (models/llama.py, optim/gradient_accumulator.py, distributed.py): "
    "eager but for Triton's RMSNorm and flash-attn's rotation; fp32 gradient accumulation, half "
    "gradients are freed; a hook reduces DDP's buckets during backward; ZeRO-1 flattens and copies "
    "each rank's part of each tensor; stages cut by the compute cost of blocks",
)
FOUNDRY = Runtime(
    name="llm-foundry",
    attention="flash1",
    passes=EAGER,
    kernels=60,
    sequence=False,
    fsdp=True,
    kept=0.8,
    logits=6,
    source="mosaicml/llm-foundry: FSDP, eager, Triton FlashAttention; mixed precision DEFAULT "
    "reduces in fp32, PURE in bf16",
)
AXONN = Runtime(
    name="AxoNN",
    attention="flash2",
    passes=EAGER,
    kernels=60,
    sequence=False,
    gradient=2,
    hidden_row=HIDDEN,
    source="arXiv 2502.08145: overlapped all-reduces, reduce-scatters and gathers over Z",
)
COMMON = Runtime(
    name="common",
    passes=EAGER,
    casts="fused",
    kernels=60,
    source="a framework that has no row: eager kernels, FlashAttention-2, nothing hidden over row, "
    "gradients reduced beside backward in fp32, states split over data",
)
OURS = Runtime(
    name="ranvier",
    attention="flash3",
    passes=4.8,
    compiled=1.0,
    stream=1.5,
    loss=7,
    kernels=70,
    hidden_dx=True,
    graphs=False,
    selective="small",
    cut="balanced",
    context=0.63e9,
    margin=0.04,
    reserve=0.03,
    returned=0.0,
    source="this package: three overlaps, sequence split over row, gradients in fp32 once they are "
    "added up or reduced, stages cut by work; kernels as profiled (docs/benchmarks.md): cuDNN's "
    "attention, 0.9 of the bandwidth, three passes over logits",
)
ROWS: Mapping[str, Runtime] = {
    row.name: row
    for row in (
        MEGATRON20,
        MEGATRON21,
        MEGATRON22,
        MEGATRON_DEEPSPEED,
        DEEPSPEED3,
        MEGATRON_CORE,
        TORCHTITAN,
        NANOTRON,
        FOUNDRY,
        AXONN,
        COMMON,
        OURS,
    )
}
