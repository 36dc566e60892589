"""Roofline model: seconds of compute on a device, layer by layer.

    matmul        2 m n k / (best · efficiency) · tiles(m, n) · (1 + TILE_FILL / k)
    elementwise   bytes / (bandwidth · efficiency)
    attention     FLOPs of half the square / share of the best matmul, or matmuls and scores

The tiles of a matmul are computed `cores` at a time, so the last wave may be nearly empty (wave
quantization); libraries choose the tile that wastes least. Rows of a weight that are not a multiple
of 16 bytes are read in smaller words, at a fraction of the rate (`alignment_factor`). If matmuls
were measured on the machine, the rate is interpolated between the nearest shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from ranvier.cost.linear import align_columns
from ranvier.planner.cluster import Device, MatmulRate
from ranvier.planner.frameworks import FLASH_EFFICIENCY, RANVIER, FrameworkProfile
from ranvier.planner.model_spec import BlockSpec, LayerSpec
from ranvier.sharding import dim_name

MATMUL_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 1.06), (128, 64, 1.2))
"""Output tiles of a matmul: rows, columns, and relative cost of memory traffic of smaller ones."""
TILE_FILL = 128
"""Elements of k that take as long as filling and writing a tile (CUTLASS's prologue and
epilogue).
"""
UNALIGNED_SHARE = 0.4
"""Share of the fp32 peak without tensor cores that attention scores reach if head_dim is not a
multiple of 8."""
EVEN_RATE = 0.39
ODD_RATE = 0.22
ODD_RESULT_RATE = 0.15
"""Rate of a 16-bit matmul relative to the same shape with dims that are multiples of 8: with a dim
that is only a multiple of 2 or 4, with an odd one, and forward with odd columns of the result.
Means of 138 matmuls on an H200 (vocabularies of 32,000 to 151,648, docs/concepts/planner.md)."""
BATCHED_RATE = 0.6
"""Rate of the small batched matmuls of attention with materialized scores, relative to large
ones.
"""
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
SCORE_BYTES = (13, 19)
"""Bytes per score, forward and backward: written, read and written by softmax and dropout with its
mask, read by the next matmul."""
STREAM_ACCESSES = (11, 17)
"""Accesses to the residual stream per token, forward and backward, in model widths: two norms, two
dropouts with residual additions."""
EAGER_OP_SECONDS = 60e-6
"""Host seconds per eager operation: 2 ms for the 30 kernels of a block's forward pass."""
COMPILED_KERNEL_SHARE = 0.25
"""Kernels of a compiled block, relative to an eager one."""
COLUMN_CAST_FACTOR = 1.75
"""Time of a cast by columns, relative to a cast by rows: compiled kernels read the columns twice
and not in memory order (three sizes on an H200)."""
ROW_SPLIT_DIMS = ("heads", "kv_heads", "mlp", "vocab")
Fp8Scaling = Literal["", "tensor", "row"]
"""Scaling of 8-bit matmuls: none, one scale per tensor, or one scale per row."""
FP8_SCALING: Mapping[str, Fp8Scaling] = {"off": "", "tensorwise": "tensor", "rowwise": "row"}
"""The scaling for each value of `train.float8`."""


@dataclass(frozen=True)
class ComputeContext:
    """Everything that the times of a block depend on."""

    samples: int
    """Per micro-batch."""
    seq: int
    row: int = 1
    col: int = 1
    context: int = 1
    col_splits_features: bool = False
    """Whether col splits features inside of layers instead of samples."""
    dtype: str = "bf16"
    fp8: Fp8Scaling = ""
    ranks: int = 1
    """Number of ranks that share the machine's cores."""
    is_compiled: bool = False
    is_serial: bool = False
    """Whether kernel launches do not overlap with kernels (CPUs, blocking launches)."""

    @property
    def tokens(self) -> int:
        """Tokens of a rank in a matmul."""
        return self.samples * self.seq // self.context

    def with_streams(self, part: BlockSpec) -> ComputeContext:
        """Returns the context of a block, which may have several streams of each sample."""
        return self if part.streams == 1 else replace(self, samples=self.samples * part.streams)


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of one block per micro-batch."""

    matmuls: float
    attention: float
    elementwise: float
    dx: float
    dw: float
    attention_backward: float
    elementwise_backward: float
    launch: float
    """Launching the kernels of the forward pass: overlapped with them, or added if serial."""
    is_serial: bool = False
    recompute_savings: float = 0.0
    """Part of `matmuls` that recomputation skips, because the block's result is not needed."""
    grad_share: float = 1.0
    """Share of its forward passes that have a backward pass; below 1 for a recurrent core."""

    @property
    def forward(self) -> float:
        """Seconds of the forward pass."""
        own = self.matmuls + self.attention + self.elementwise
        if self.is_serial:
            return own + self.launch
        return max(own, self.launch)

    @property
    def backward(self) -> float:
        """Seconds of the backward pass, which launches about twice as many kernels."""
        own = self.dx + self.dw + self.attention_backward + self.elementwise_backward
        if self.is_serial:
            return own + 2 * self.launch * self.grad_share
        return max(own, 2 * self.launch * self.grad_share)


# ---- matmuls ----------------------------------------------------------------------------


@lru_cache(maxsize=200_000)
def matmul_seconds(
    device: Device, m: int, n: int, k: int, dtype: str, kind: str = "y", ranks: int = 1
) -> float:
    """Returns the seconds of a matmul (m, k) · (k, n); kind: `y`, `dx` or `dw`."""
    flops = 2.0 * m * n * k
    rows = _measured_matmuls(device, dtype, kind, ranks)
    part = 1.0
    # CPUs read unaligned words at full rate.
    if dtype in ("bf16", "fp16") and device.cores > 1:
        part = alignment_factor(m, n, k, kind)
    if rows:
        # Interpolate between shapes of the same alignment, where the rate is smooth.
        same = tuple(row for row in rows if alignment_factor(row.m, row.n, row.k, row.kind) == part)
        return flops / (
            _interpolate_rate(same, m, n, k) if same else part * _interpolate_rate(rows, m, n, k)
        )
    share = part * (device.reach.narrow if dtype == "fp8" else device.reach.matmul)
    return (
        flops
        / (device.best_matmul_rate(dtype) * share)
        * _wave_quantization(m, n, device.cores)
        * (1 + TILE_FILL / k)
    )


def alignment_factor(m: int, n: int, k: int, kind: str) -> float:
    """Returns the rate of a 16-bit matmul relative to aligned dims.

    Only the dims of the weight matter, because they are the contiguous ones of all operands; the
    number of tokens does not: n and k for `y` and `dx`, m and n for `dw`.
    """
    dims = (m, n) if kind == "dw" else (n, k)
    if all(dim % 8 == 0 for dim in dims):
        return 1.0
    if all(dim % 2 == 0 for dim in dims):
        return EVEN_RATE
    if kind == "y" and n % 2:
        return ODD_RESULT_RATE
    return ODD_RATE


def _wave_quantization(m: int, n: int, cores: int) -> float:
    """Returns the time relative to full waves, with the best tile."""
    found = math.inf
    for high, wide, cost in MATMUL_TILES:
        waves = math.ceil(math.ceil(m / high) * math.ceil(n / wide) / cores)
        found = min(found, waves * cores * high * wide / (m * n) * cost)
    return found


@lru_cache(maxsize=1000)
def _measured_matmuls(device: Device, dtype: str, kind: str, ranks: int) -> tuple[MatmulRate, ...]:
    """Returns the measured matmuls of this dtype and kind with the nearest number of ranks."""
    rows = [row for row in device.products if row.dtype == dtype]
    # Without measurements of this kind, use all kinds.
    rows = [row for row in rows if row.kind == kind] or rows
    if not rows:
        return ()
    near = min((row.ranks for row in rows), key=lambda r: abs(math.log(r / ranks)))
    return tuple(row for row in rows if row.ranks == near)


def _interpolate_rate(rows: tuple[MatmulRate, ...], m: int, n: int, k: int) -> float:
    """Returns the rate at a shape: the inverse-distance weighted mean of the logarithms of measured
    rates.
    """
    total = weight = 0.0
    for row in rows:
        far = math.log(row.m / m) ** 2 + math.log(row.n / n) ** 2 + math.log(row.k / k) ** 2
        # The offset keeps an exact match finite.
        near = 1.0 / (far + 0.01) ** 2
        total = total + near * math.log(row.rate)
        weight = weight + near
    return math.exp(total / weight)


# ---- memory and attention ---------------------------------------------------------------


def memory_seconds(device: Device, size: float, ranks: int = 1, stream: float = 1.0) -> float:
    """Returns the seconds to access `size` bytes. stream: `FrameworkProfile.bandwidth_factor`."""
    # Cap the product of both efficiencies: nothing reaches the nominal bandwidth.
    usual = device.bandwidth * min(device.reach.memory * stream, 0.9)
    return size / device.measured_rate("memory", ranks=ranks, usual=usual)


def _attention_seconds(
    leaf: LayerSpec, heads: float, device: Device, setup: ComputeContext, runtime: FrameworkProfile
) -> tuple[float, float]:
    """Returns the seconds of an attention core, forward and backward."""
    samples = setup.samples / (1 if setup.col_splits_features else setup.col)
    seen = min(leaf.window or setup.seq, setup.seq)
    # Visible (query, key) pairs of a causal mask with a sliding window of `seen` tokens.
    half = seen * (setup.seq - seen / 2) / setup.context
    # All queries see the keys of a prefix.
    half += (leaf.prefix[2] if leaf.prefix else 0) * setup.seq / setup.context
    flops = 4.0 * samples * heads * half * leaf.head_dim
    # Backward has five matmuls, forward two: 2.5 times the FLOPs.
    rows = [row for row in device.attention if row.dtype == setup.dtype]
    if rows:
        near = min(rows, key=lambda r: _attention_distance(r.seq, r.head_dim, r.ranks, setup, leaf))
        return flops / near.forward, 2.5 * flops / near.backward
    if runtime.attention == "scores":
        return _score_attention_seconds(leaf.head_dim, samples * heads, device, setup)
    shares = FLASH_EFFICIENCY[runtime.attention]
    forward, backward = shares.get(device.generation, shares[90])
    # Heads of less than 128 elements do not fill the tiles of a flash kernel.
    best = device.best_matmul_rate(setup.dtype) * min(leaf.head_dim / 128, 1.0) ** 0.5
    return flops / (best * forward), 2.5 * flops / (best * backward)


def _score_attention_seconds(
    head_dim: int, heads: float, device: Device, setup: ComputeContext
) -> tuple[float, float]:
    """Returns the seconds of attention by plain matmuls, which compute all scores (no causal
    skipping).
    """
    count = heads * setup.seq**2 / setup.context
    flops = 4.0 * count * head_dim
    rate = device.best_matmul_rate(setup.dtype) * device.reach.matmul * BATCHED_RATE
    if head_dim % 8:
        rate = device.peak["fp32"] * UNALIGNED_SHARE
    forward, backward = (memory_seconds(device, count * size) for size in SCORE_BYTES)
    return flops / rate + forward, 2 * flops / rate + backward


def _attention_distance(
    seq: int, head_dim: int, ranks: int, setup: ComputeContext, leaf: LayerSpec
) -> float:
    return (
        abs(math.log(seq / setup.seq))
        + abs(math.log(head_dim / leaf.head_dim))
        + 4 * abs(math.log(ranks / setup.ranks))
    )


# ---- blocks -----------------------------------------------------------------------------


def local_size(dim: str, size: int, setup: ComputeContext) -> int:
    """Returns the local size of a dim in a matmul.

    A vocabulary is padded to a multiple of row · col. If col is 1, the head also aligns its columns
    (`nn.lm_head`), as other frameworks do.
    """
    if dim == "vocab":
        # Padded so that row and col divide it; a rank has 1/row of the padded vocabulary.
        columns = -(-size // (setup.row * setup.col)) * setup.col
        if setup.col > 1:
            return columns
        return align_columns(columns, DTYPE_BYTES[setup.dtype])
    return -(-size // (setup.row if dim in ROW_SPLIT_DIMS else setup.col if dim == "embed" else 1))


def matmul_shapes(
    part: BlockSpec, setup: ComputeContext, *, each: bool = False
) -> list[tuple[int, int]]:
    """Returns shapes (out, in) of the matmuls of a part on a rank; fused layers are one unless
    `each`.
    """
    found = []
    for leaf in part.layers_of_kind("linear", "siblings", "apart", "head"):
        several = leaf.inside or (leaf,)
        sizes = [_local_matmul_shape(one, setup) for one in several]
        found += sizes if each else [(sum(out for out, _ in sizes), sizes[0][1])]
    for leaf in part.layers_of_kind("mixture"):
        found += expert_matmul_shapes(leaf, setup)
    return found


def expert_matmul_shapes(leaf: LayerSpec, setup: ComputeContext) -> list[tuple[int, int]]:
    """Returns the matmuls of an MoE layer: an MLP as wide as a token's experts, and the router."""
    count, width, embed = leaf.shape
    hidden = leaf.top * local_size("mlp", width, setup)
    stream = local_size("embed", embed, setup)
    return [((leaf.matrices - 1) * hidden, stream), (stream, hidden), (count, stream)]


@lru_cache(maxsize=50_000)
def shared_expert_seconds(part: BlockSpec, device: Device, setup: ComputeContext) -> float:
    """Returns the seconds of the matmuls of a shared expert, forward and backward, during the
    all-to-all.
    """
    found = 0.0
    for leaf in part.layers_of_kind("linear", "siblings"):
        if ".shared." in leaf.name:
            sizes = [_local_matmul_shape(one, setup) for one in leaf.inside or (leaf,)]
            out = sum(out for out, _ in sizes)
            into = sizes[0][1]
            m = setup.tokens
            shapes = ((m, out, into, "y"), (m, into, out, "dx"), (out, into, m, "dw"))
            found += sum(
                matmul_seconds(device, *s[:3], setup.dtype, s[3], setup.ranks) for s in shapes
            )
    return found


def _local_matmul_shape(leaf: LayerSpec, setup: ComputeContext) -> tuple[int, int]:
    out, into = _dim_names(leaf)
    columns = local_size(into, leaf.shape[1], setup)
    if out != into:
        return local_size(out, leaf.shape[0], setup), columns
    # Of row and col, one splits the in dim of such a layer. The other splits its tokens, or also
    # its in dim: fewer rows for all tokens are as many FLOPs.
    other = setup.col if into in ROW_SPLIT_DIMS else setup.row
    return -(-leaf.shape[0] // other), columns


@lru_cache(maxsize=50_000)
def block_times(
    part: BlockSpec, device: Device, setup: ComputeContext, runtime: FrameworkProfile
) -> BlockTimes:
    """Returns the times of one block of a kind, with all of its runs."""
    setup = setup.with_streams(part)
    # In all three matmuls the tokens are one dim: m of y and dx, k of dw.
    tokens = setup.tokens
    shapes = matmul_shapes(part, setup)
    kind = _matmul_dtype(device, setup, runtime)
    forward = sum(
        matmul_seconds(device, tokens, out, into, kind, "y", setup.ranks) for out, into in shapes
    )
    dx = sum(
        matmul_seconds(device, tokens, into, out, kind, "dx", setup.ranks) for out, into in shapes
    )
    dw = sum(
        matmul_seconds(device, out, into, tokens, kind, "dw", setup.ranks) for out, into in shapes
    )
    cores = [(leaf, local_heads(part, leaf, setup)) for leaf in part.layers_of_kind("attention")]
    parts = [_attention_seconds(leaf, heads, device, setup, runtime) for leaf, heads in cores]
    between, back = _elementwise_seconds(part, device, setup, runtime)
    # Without a graph each layer casts its operands, fused or not, so all of them are counted.
    if setup.fp8:
        more = cast_seconds(
            matmul_shapes(part, setup, each=not setup.is_compiled), device, setup, runtime
        )
        between = between + more[0]
        back = back + more[1]
    runs = part.calls.total
    backward_runs = part.calls.with_grad
    return BlockTimes(
        matmuls=forward * runs,
        attention=sum(one for one, _ in parts) * runs,
        elementwise=between * runs,
        dx=dx * backward_runs,
        dw=dw * backward_runs,
        attention_backward=sum(one for _, one in parts) * backward_runs,
        elementwise_backward=back * backward_runs,
        # A core launches the kernels of each of its layers.
        launch=_launch_seconds(device, setup, runtime) * runs * max(len(part.inner_blocks), 1),
        is_serial=setup.is_serial,
        recompute_savings=_recompute_savings(part, device, setup, runtime) * runs,
        grad_share=backward_runs / runs,
    )


def _recompute_savings(
    part: BlockSpec, device: Device, setup: ComputeContext, runtime: FrameworkProfile
) -> float:
    """Returns the seconds of the last matmul, which compiled graphs do not recompute."""
    # Only a graph can skip it, and a block with experts does not end with a matmul.
    if not setup.is_compiled or runtime.name != RANVIER.name or part.layers_of_kind("mixture"):
        return 0.0
    out, into = matmul_shapes(part, setup)[-1]
    kind = _matmul_dtype(device, setup, runtime)
    return matmul_seconds(device, setup.tokens, out, into, kind, "y", setup.ranks)


def _matmul_dtype(device: Device, setup: ComputeContext, runtime: FrameworkProfile) -> str:
    """Returns the dtype of matmuls: 8 bits if the device supports them.

    With row-wise scales, compiled graphs use the library's kernels, which are as fast as with one
    scale. Other code uses kernels that are not faster than 16 bits, unless they were measured.
    """
    if "fp8" not in device.peak or not setup.fp8:
        return setup.dtype
    if setup.fp8 == "tensor" or (setup.is_compiled and runtime.name == RANVIER.name):
        return "fp8"
    if any(row.dtype == "fp8row" for row in device.products):
        return "fp8row"
    return setup.dtype


def _launch_seconds(device: Device, setup: ComputeContext, runtime: FrameworkProfile) -> float:
    """Returns the host seconds of a forward pass; for Ranvier of a whole block, if measured."""
    # CPUs and blocking launches pay for every operation, not only for its launch.
    if setup.is_serial:
        usual = EAGER_OP_SECONDS
    else:
        usual = device.launch
    usual = runtime.kernels_per_block * device.measured_rate(
        "launch", ranks=setup.ranks, usual=usual
    )
    if setup.is_compiled:
        return COMPILED_KERNEL_SHARE * usual
    if runtime.name != RANVIER.name:
        return usual
    return device.measured_rate("block8" if setup.fp8 else "block", ranks=setup.ranks, usual=usual)


def local_heads(part: BlockSpec, leaf: LayerSpec, setup: ComputeContext) -> float:
    """Returns the heads of an attention core on a rank."""
    # The query projection has the total number of heads as its output dim.
    everything = [one for each in part.layers for one in (*each.inside, each) if one.shape]
    whole = next((one.shape[0] for one in everything if _dim_names(one)[0] == "heads"), 0)
    return whole / leaf.head_dim / (setup.row * (setup.col if setup.col_splits_features else 1))


def _dim_names(leaf: LayerSpec) -> list[str]:
    """Returns the names of the dims of a layer."""
    return [dim_name(dim) for dim in leaf.dims]


def _elementwise_seconds(
    part: BlockSpec, device: Device, setup: ComputeContext, runtime: FrameworkProfile
) -> tuple[float, float]:
    """Returns the seconds of memory-bound operations between matmuls, forward and backward."""
    # Count elements that are read or written per token, then convert them to seconds.
    width = next((leaf.shape[0] for leaf in part.layers_of_kind("rms", "layer")), 0)
    # Sequence parallelism also splits the residual stream over row.
    outer = width / setup.col / (setup.row if runtime.sequence_parallel else 1)
    forward = STREAM_ACCESSES[0] * outer
    backward = STREAM_ACCESSES[1] * outer
    # Rows are permuted before and after the experts, with an activation in between.
    for leaf in part.layers_of_kind("mixture"):
        (hidden, stream), (_, read), _ = expert_matmul_shapes(leaf, setup)
        rows = 4 * leaf.top * stream / (setup.row if runtime.sequence_parallel else 1)
        forward = forward + rows + hidden + read
        backward = backward + rows + 2 * hidden + read
    for leaf in part.layers_of_kind("linear", "siblings", "apart"):
        several = leaf.inside or (leaf,)
        names = {_dim_names(one)[0] for one in several}
        if not names & {"heads", "kv_heads", "mlp"}:
            continue
        size = sum(_local_matmul_shape(one, setup)[0] for one in several)
        # An activation reads all hidden tensors and writes one.
        if "mlp" in names:
            one = size / len(several)
            forward = forward + size + one
            backward = backward + 2 * size + one
        else:
            # Queries, keys and values are rotated and transposed.
            forward = forward + 2 * size
            backward = backward + 2 * size
    if setup.is_compiled:
        passes = runtime.compiled_passes
    else:
        passes = runtime.elementwise_passes
    each = setup.tokens * DTYPE_BYTES[setup.dtype] * passes
    both = (
        memory_seconds(device, each * n, setup.ranks, runtime.bandwidth_factor)
        for n in (forward, backward)
    )
    return next(both), next(both)


def cast_seconds(
    shapes: list[tuple[int, int]], device: Device, setup: ComputeContext, runtime: FrameworkProfile
) -> tuple[float, float]:
    """Returns the seconds of casts to 8 bits, forward and backward.

    If fused, only attention's output and gradients are read for the cast. Otherwise a tensor is
    read for its scale, read again, and written in both layouts. Without a graph each matmul casts
    its own operands: x and W in forward; dY, W, dYᵀ and X in backward.
    """
    tokens = setup.tokens
    if runtime.fp8_casts == "fused":
        width = min(into for _, into in shapes)
        return (
            memory_seconds(device, tokens * width * 4, 1, runtime.bandwidth_factor),
            memory_seconds(
                device, sum(tokens * out * 4 for out, _ in shapes), 1, runtime.bandwidth_factor
            ),
        )
    values = sum(tokens * into for _, into in shapes) + sum(out * into for out, into in shapes)
    back = sum(tokens * out for out, _ in shapes)
    eager = device.measured_rate("cast", ranks=setup.ranks)
    # The measured rate is for eager casts; casts in a graph run at memory bandwidth.
    if eager and not setup.is_compiled:
        wide = DTYPE_BYTES[setup.dtype]
        return values * wide / eager, (values + 2 * back) * wide / eager
    sizes: tuple[float, float] = (6 * values, 6 * back)
    # Both layouts have their own scales, so backward casts everything again.
    if setup.fp8 == "row":
        sizes = 5 * values, 5 * back + COLUMN_CAST_FACTOR * 5 * (back + values)
    forward, backward = (
        memory_seconds(device, n, setup.ranks, runtime.bandwidth_factor) for n in sizes
    )
    return forward, backward


@lru_cache(maxsize=50_000)
def head_seconds(
    part: BlockSpec, device: Device, setup: ComputeContext, runtime: FrameworkProfile
) -> tuple[float, float]:
    """Returns the seconds of the model's exit, forward and backward: norm, LM head, loss."""
    tokens = setup.tokens
    forward = 0.0
    backward = 0.0
    for out, into in matmul_shapes(part, setup):
        forward += matmul_seconds(device, tokens, out, into, setup.dtype, "y", setup.ranks)
        backward += matmul_seconds(device, tokens, into, out, setup.dtype, "dx", setup.ranks)
        backward += matmul_seconds(device, out, into, tokens, setup.dtype, "dw", setup.ranks)
        loss = memory_seconds(
            device,
            tokens * out * runtime.loss_bytes_per_logit,
            setup.ranks,
            runtime.bandwidth_factor,
        )
        forward = forward + loss / 2
        backward = backward + loss / 2
    return forward, backward


def embedding_seconds(
    part: BlockSpec, device: Device, setup: ComputeContext
) -> tuple[float, float]:
    """Returns the seconds of the embedding lookup, forward and backward."""
    width = max((leaf.shape[-1] for leaf in part.layers_of_kind("embedding")), default=0)
    size = setup.tokens * width / setup.col * DTYPE_BYTES[setup.dtype]
    return memory_seconds(device, 2 * size, setup.ranks), memory_seconds(
        device, 4 * size, setup.ranks
    )
