"""Activation memory of a block on a rank, as the layers of `nn` save tensors for backward.

A linear layer saves its input (before it is gathered). A norm saves its input and its normalized
output, both in fp32. Attention saves its queries, keys, values, output and one statistic per token
and head. An MLP saves the intermediate tensors of its gate. In backward each layer temporarily
needs some more. Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from ranvier.config.plan import AXES, Recompute
from ranvier.cost.context_attention import RingLayout, UlyssesLayout
from ranvier.cost.layers import ActivationShape, AttentionCost, LayerCost, MoECost, NormCost
from ranvier.cost.linear import LinearCost, LMHeadCost
from ranvier.planner.comm_volume import CACHE_SIZE, ShardingKey, build_layers
from ranvier.planner.memory.activations_moe import (
    NO_MOE_ACTIVATIONS,
    MoeActivations,
    moe_activations,
)
from ranvier.planner.model_spec import BlockSpec, LayerSpec, ModelSpec
from ranvier.planner.time.compute import Fp8Scaling

STATISTICS_BYTES = 4
"""Bytes per statistic of norms and of attention."""
WIDENED_LOGITS = 1 << 18
"""Logits that a loss without a fused kernel widens at a time: `nn.cross_entropy.CHUNK_LOGITS`."""
GATED_MLP_TENSORS = {"swiglu": 3, "geglu": 3, "geglu_exact": 3, "reglu": 2}
"""Hidden tensors that a gated MLP saves in addition to the input of its last layer: gate, up and
the activated gate; for ReLU the activated gate replaces the gate."""
UNGATED_MLP_TENSORS = {"gelu": 1, "gelu_exact": 1, "relu": 0}


@dataclass(frozen=True)
class BlockActivations:
    """Activation bytes of a block.

    A moment is a pair: the bytes at a point of the step, and the elements of weight gradients
    computed until then.
    """

    none: int
    """Saved from forward to backward without recomputation."""
    selective: int
    full: int
    saved_collectives: tuple[int, int]
    """Additional bytes if results of collectives are saved for recomputation: for a selective
    block, and for a full one."""
    backward_moments: tuple[tuple[int, int], ...]
    """Peaks of its backward pass above `none`, and elements of weight gradients until then."""
    recompute_moment: tuple[int, int]
    """Peak of recomputation above `none`; saved results of a selective block not yet consumed."""
    picked_features_bytes: int
    """Needed in forward to select each rank's features, above what a selective block saves."""
    deferred_moment: tuple[int, int]
    """An additional peak if weight gradients are deferred."""
    entry_bytes: int
    """Needed by the backward pass of its first matmul, without the inputs of its weight gradient;
    includes the tensors saved by the norm before it."""
    input_bytes: int
    """Part of `none` that is the input itself: a first norm does not copy an input in fp32."""
    unused_result_bytes: int
    """Saved by a selective block but not used by recomputation: the result of its last matmul."""
    attention_bytes: int = 0
    """Saved by a fully recomputed block: the result of attention over context."""
    calls: int = 1
    """Runs of the block that save activations; all other sizes are those of one run."""

    def moments_of_mode(
        self, kind: Recompute, *, keeps: bool = False, last: bool = True
    ) -> tuple[tuple[int, int], ...]:
        """Returns the peaks of a block with a recompute mode. last: it is the last of its chunk."""
        most, waiting = self.recompute_moment
        # A block's forward pass is part of the peak only if recomputed, or if it is the last one.
        if kind == "none" and not last:
            return self.backward_moments
        if kind != "selective" or keeps:
            return (*self.backward_moments, (most, 0))
        # All saved results are still in memory during the first forward pass.
        forward = self.picked_features_bytes - self.recomputed_bytes(kind)
        return (*self.backward_moments, (most + waiting, 0), (forward, 0))

    def recomputed_bytes(self, kind: Recompute, *, keeps: bool = False) -> int:
        """Returns the increase of memory by recomputing a block, which consumes its saved results.

        Its input stays.
        """
        if kind == "none":
            return 0
        if kind == "selective" and not keeps:
            left = self.unused_result_bytes
        else:
            left = 0
        once = self.saved_bytes(kind, keeps=keeps) // self.calls
        return self.none - self.input_bytes - (once - self.full - left)

    def saved_bytes(self, kind: Recompute, *, keeps: bool = False) -> int:
        """Returns the bytes saved by a block with a recompute mode. keeps: with results of
        collectives.
        """
        if kind == "none":
            once = self.none
        elif kind == "selective":
            once = self.selective + (self.saved_collectives[0] if keeps else 0)
        else:
            once = self.full + self.attention_bytes + (self.saved_collectives[1] if keeps else 0)
        return once * self.calls


@lru_cache(CACHE_SIZE)
def block_activations(
    model: ModelSpec,
    part: BlockSpec,
    spot: ShardingKey,
    flow: ActivationShape,
    compiled: bool = False,
    fp8: Fp8Scaling = "",
) -> BlockActivations:
    """Returns the activations of a block. spot: its `activation_key`.

    compiled: norms save their input in its own dtype, a gate is recomputed, and the result of the
    last matmul, which backward does not read, is not saved. fp8: matmuls of a graph are in 8 bits.
    """
    if part.inner_blocks:
        return _core_activations(model, part, spot, flow, compiled, fp8)
    pairs = [*zip(part.layers, build_layers(model, part, spot), strict=True)]
    item = flow.itemsize
    stream = stream_bytes(model, spot, flow)
    # A recomputed block saves its inputs.
    saved_inputs = part.num_inputs * stream
    none = made = attended = keys = swapped = copied = 0
    # Sum up the saved tensors of each layer; a selective block keeps `made` and `attended`.
    for leaf, layer in pairs:
        if isinstance(layer, NormCost):
            elements = _norm_elements(leaf, layer, pairs, flow)
            none += norm_bytes(layer, flow, elements, compiled)
            # Already counted with the fused query, key and value buffer that attention saves.
            if layer.dim != "embed" and item >= STATISTICS_BYTES and _is_qkv_fused(pairs):
                none -= elements * item
        elif isinstance(layer, LinearCost):
            if not layer.is_pending or compiled:
                made += sum(one.product_elements(flow) for one in layer.weights) * item
            none += product_input_bytes(layer, flow) if layer.has_trainable_weight else 0
        elif isinstance(layer, AttentionCost):
            numbers = attention_statistics_bytes(layer, flow)
            tokens = layer.layout_context.local_tokens(flow, layer.dim)
            attended += numbers + tokens * layer.local_width * item
            none += numbers + _qkv_bytes(pairs, flow, model)
            keys += _context_key_bytes(layer, flow)
            swapped, copied = _ulysses_bytes(layer, flow)
            attended += swapped
            none += copied
    hidden = _hidden_bytes(pairs, flow)
    # A graph recomputes the activated gate instead of saving it.
    if compiled:
        inside = min(saved_hidden_tensors(model), 2)
    else:
        inside = saved_hidden_tensors(model)
    mine = _block_moe_activations(pairs, flow, inside, reads=hidden > 0)
    none += inside * hidden + mine.none
    none += _fp8_difference(pairs, flow, fp8) if compiled and mine is NO_MOE_ACTIVATIONS else 0
    some, every = (_saved_collective_bytes(pairs, flow, selective=x) for x in (True, False))
    first, last = (_norm_bytes_at(pairs, at, flow, compiled) for at in (0, -1))
    # At this point backward has freed the last norm and, in attention's matmuls, also the experts.
    over = last + (mine.none if not hidden else 0)
    moments = [
        (n - over, m) for n, m in _backward_moments(pairs, flow, hidden, inside, none, stream)
    ]
    moments += [
        *mine.backward_moments,
        (_first_product_backward_bytes(pairs, flow) + first - none, _grad_elements(pairs)),
    ]
    # The MLP has freed its tensors when attention runs backward.
    if keys:
        moments.append((keys - over - (inside + 1) * hidden, _grad_elements(pairs)))
    # A selective block saves its result, although recomputation does not need it.
    end = _last_product(pairs)
    if end and not end.is_pending:
        result = sum(one.product_elements(flow) for one in end.weights) * item
    else:
        result = 0
    return BlockActivations(
        none,
        saved_inputs + made + attended + mine.product_bytes - (result if compiled else 0),
        saved_inputs,
        (some, every),
        tuple(moments),
        mine.recompute_moment,
        _picked_features_bytes(pairs, flow),
        max(mine.deferred_moment, (_deferred_moment_bytes(pairs, flow, hidden, inside) - over, 0)),
        entry_bytes=_entry_bytes(pairs, flow) + first,
        input_bytes=stream if first and item >= STATISTICS_BYTES and not compiled else 0,
        unused_result_bytes=0 if compiled else result,
        attention_bytes=attended if _splits_context(spot) else 0,
    )


def _core_activations(
    model: ModelSpec,
    part: BlockSpec,
    spot: ShardingKey,
    flow: ActivationShape,
    compiled: bool,
    fp8: Fp8Scaling,
) -> BlockActivations:
    """Returns the activations of a recurrent core: those of its layers, and of several runs."""
    inner = [block_activations(model, one, spot, flow, compiled, fp8) for one in part.inner_blocks]
    first = inner[0]
    last = inner[-1]
    stream = stream_bytes(model, spot, flow)
    # The gradients of earlier iterations are complete, whichever layer runs backward.
    elements = sum(
        matrix_elements(layer)
        for layer in build_layers(model, part, spot)
        if isinstance(layer, LinearCost)
    )
    return BlockActivations(
        # The adapter saves the state.
        sum(one.none for one in inner) + stream,
        stream + sum(one.selective for one in inner),
        stream,
        (
            sum(one.saved_collectives[0] for one in inner),
            sum(one.saved_collectives[1] for one in inner),
        ),
        tuple((size, elements) for size, _ in last.backward_moments),
        last.recompute_moment,
        last.picked_features_bytes,
        last.deferred_moment,
        entry_bytes=first.entry_bytes,
        input_bytes=0,
        unused_result_bytes=last.unused_result_bytes,
        attention_bytes=sum(one.attention_bytes for one in inner),
        calls=math.ceil(part.calls.with_grad),
    )


def _fp8_difference(
    pairs: list[tuple[LayerSpec, LayerCost]], flow: ActivationShape, fp8: Fp8Scaling
) -> int:
    """Returns the difference in bytes that a graph saves if the inputs of matmuls are in 8 bits.

    With one scale per tensor, the input of the last matmul is saved only in 8 bits, and attention's
    output in both formats, because attention needs it as well. With a scale per row, only
    attention's output is saved, and the whole buffer of queries, keys and values.
    """
    products = [layer for _, layer in pairs if isinstance(layer, LinearCost)]
    kept = {layer: product_input_bytes(layer, flow) for layer in products}
    attended = sum(n for layer, n in kept.items() if layer.weights[0].in_dim == "heads")
    if fp8 == "tensor":
        return (attended - kept[products[-1]]) // flow.itemsize
    if fp8 == "row":
        turned = sum(output_elements(pairs, dim, flow) for dim in ("heads", "kv_heads"))
        return attended + turned * flow.itemsize - sum(kept.values())
    return 0


def _block_moe_activations(
    pairs: list[tuple[LayerSpec, LayerCost]], flow: ActivationShape, inside: int, *, reads: bool
) -> MoeActivations:
    """Returns the activations of the MoE layer of a block, if there is one."""
    found = [
        moe_activations(x, flow, inside, reads=reads) for _, x in pairs if isinstance(x, MoECost)
    ]
    if found:
        return found[0]
    return NO_MOE_ACTIVATIONS


def _saved_collective_bytes(
    pairs: list[tuple[LayerSpec, LayerCost]], flow: ActivationShape, *, selective: bool
) -> int:
    """Returns the additional bytes of saved collective results, without the last matmul."""
    found = sum(layer.saved_bytes(flow, selective=selective) for _, layer in pairs)
    # Backward does not read the last result, so its collective is not saved either.
    last = _last_product(pairs)
    if (
        last is None
        or last.is_pending
        or last.gather_group.size * last.scatter_group.size * last.reduce_group.size == 1
    ):
        return found
    if selective:
        made = sum(one.product_elements(flow) for one in last.weights) * flow.itemsize
    else:
        made = 0
    return found - last.saved_bytes(flow, selective=selective) - made


def _last_product(pairs: list[tuple[LayerSpec, LayerCost]]) -> LinearCost | None:
    """Returns the matmul whose result is not recomputed because it ends the block."""
    last = pairs[-1][1]
    # Experts are combined after any linear layer, so with them no matmul is last.
    mixture = any(isinstance(layer, MoECost) for _, layer in pairs)
    if isinstance(last, LinearCost) and not mixture:
        return last
    return None


@lru_cache(CACHE_SIZE)
def stream_bytes(model: ModelSpec, spot: ShardingKey, flow: ActivationShape) -> int:
    """Returns the bytes of the residual stream `[b, s/row, d/col]` on a rank, with all streams."""
    ground = replace(spot.layout_context(model), streams=model.streams)
    (width,) = ground.feature_sharding(model.units["embed"], "embed").local_shape
    return ground.local_tokens(flow, "embed") * width * flow.itemsize


def product_input_bytes(layer: LinearCost, flow: ActivationShape) -> int:
    """Returns the bytes of the input of a matmul, before it is gathered."""
    return layer.comm_elements(flow)[0] // layer.gather_group.size * flow.itemsize


def norm_bytes(
    layer: NormCost, flow: ActivationShape, elements: int, compiled: bool = False
) -> int:
    """Returns the bytes that a norm over `elements` elements saves."""
    # One statistic per token, and input and output in fp32; a graph saves the input unchanged.
    wide = max(flow.itemsize, STATISTICS_BYTES)
    if compiled:
        return elements * flow.itemsize + layer.layout_context.local_tokens(flow, layer.dim) * wide
    return 2 * elements * wide + layer.layout_context.local_tokens(flow, layer.dim) * wide


def _norm_elements(
    leaf: LayerSpec,
    layer: NormCost,
    pairs: list[tuple[LayerSpec, LayerCost]],
    flow: ActivationShape,
) -> int:
    """Returns the elements on this rank that a norm reads; a per-head norm reads all heads."""
    if layer.dim != "head_dim":
        return (
            layer.layout_context.local_tokens(flow, layer.dim)
            * layer.feature_sharding.local_shape[0]
        )
    if leaf.name.endswith("k_norm"):
        dim = "kv_heads"
    else:
        dim = "heads"
    return output_elements(pairs, dim, flow)


def output_elements(
    pairs: list[tuple[LayerSpec, LayerCost]], dim: str, flow: ActivationShape
) -> int:
    """Returns the elements on this rank of the first output with a dim."""
    factors = (f for _, layer in pairs if isinstance(layer, LinearCost) for f in layer.weights)
    # A packed weight has several consecutive outputs; this counts one of them.
    found = next((f for f in factors if f.out_dim == dim), None)
    if found is None:
        return 0
    return found.layout_context.local_tokens(flow, dim) * found.local_width // found.num_packed


def attention_statistics_bytes(layer: AttentionCost, flow: ActivationShape) -> int:
    """Returns the bytes of the log-sum-exps that attention saves."""
    heads = layer.local_width // max(layer.head_dim, 1)
    return layer.layout_context.local_tokens(flow, layer.dim) * heads * STATISTICS_BYTES


def _context_key_bytes(layer: AttentionCost, flow: ActivationShape) -> int:
    """Returns the bytes of keys and their gradients in the backward pass of attention over context.

    With kv_gather, for a group of heads: keys as received, in order and contiguous, and their
    gradients from the kernel; in fp32 the sums of those, and what is sent of the gradients of the
    group before.
    """
    if layer.layout_context.degrees["context"] == 1:
        return 0
    layout, shape, samples = layer.context_layout(flow)
    wide = shape.gradient_itemsize
    queries = layout.num_rows * samples * shape.heads * shape.head_dim
    if isinstance(layout, UlyssesLayout):
        # Queries, keys and values of all tokens for some heads, and their gradients.
        return 2 * queries * (shape.itemsize + wide)
    head = 2 * samples * shape.head_dim
    if isinstance(layout, RingLayout):
        # The own block, two that are computed and two that arrive, and the gradients of those.
        blocks = head * layout.num_rows * shape.kv_heads
        return blocks * (5 * shape.itemsize + 5 * wide) + queries * wide
    groups = len(layout.head_groups(shape.kv_heads))
    num_keys = layout.num_rows + max(layout.fetched_counts)
    keys = head * num_keys * max(shape.kv_heads // groups, 1)
    if layout.collective == "none":
        return keys * (shape.itemsize + 2 * wide) + queries * wide
    most = max(4 * shape.itemsize + wide, 2 * (shape.itemsize + wide))
    if groups > 1:
        most = 4 * shape.itemsize + 2 * wide
    return keys * most + queries * (wide + 4 * shape.itemsize) // groups


def _splits_context(spot: ShardingKey) -> bool:
    return spot.degrees[AXES.index("context")] > 1


def _ulysses_bytes(layer: AttentionCost, flow: ActivationShape) -> tuple[int, int]:
    """Returns the bytes that attention over context saves for recomputation in addition to its
    result, and without recomputation in addition to queries, keys and values.

    With ulysses these are tensors of some heads of all tokens, and copies of kv heads.
    """
    if layer.layout_context.degrees["context"] == 1:
        return 0, 0
    layout, shape, samples = layer.context_layout(flow)
    if not isinstance(layout, UlyssesLayout):
        return 0, 0
    head = layout.num_rows * samples * shape.head_dim * shape.itemsize
    kv_heads = max(shape.kv_heads, layout.near)
    return head * (2 * shape.heads + 2 * kv_heads), head * (
        shape.heads + 2 * (kv_heads - shape.kv_heads)
    )


def _qkv_bytes(
    pairs: list[tuple[LayerSpec, LayerCost]], flow: ActivationShape, model: ModelSpec
) -> int:
    """Returns the bytes of queries, keys and values. A view of values keeps a fused buffer of all
    three.
    """
    q, k = (output_elements(pairs, dim, flow) for dim in ("heads", "kv_heads"))
    # Without rotary embeddings q and k are used directly; with them they are copies.
    if model.traits.get("position_embedding", "rope") != "rope":
        return (q + 2 * k) * flow.itemsize
    if _is_qkv_fused(pairs):
        values = q + 2 * k
    else:
        values = k
    return (q + k + values) * flow.itemsize


def _is_qkv_fused(pairs: list[tuple[LayerSpec, LayerCost]]) -> bool:
    """Returns whether queries, keys and values are views of one buffer."""
    return any(
        layer.scatter_group.size * layer.reduce_group.size > 1 and not leaf.inside[0].bias
        for leaf, layer in pairs
        if isinstance(layer, LinearCost) and len(leaf.inside) == 3
    )


def _hidden_bytes(pairs: list[tuple[LayerSpec, LayerCost]], flow: ActivationShape) -> int:
    """Returns the bytes of one hidden tensor of the MLP."""
    return output_elements(pairs, "mlp", flow) * flow.itemsize


def saved_hidden_tensors(model: ModelSpec) -> int:
    """Returns the hidden tensors that an MLP saves in addition to the input of its last layer."""
    word = str(model.traits.get("activation", "swiglu"))
    return {**GATED_MLP_TENSORS, **UNGATED_MLP_TENSORS}.get(word, 3)


def _backward_moments(
    pairs: list[tuple[LayerSpec, LayerCost]],
    flow: ActivationShape,
    hidden: int,
    inside: int,
    none: int,
    stream: int,
) -> tuple[tuple[int, int], ...]:
    """Returns the peaks of a backward pass: bytes above saved ones, and elements of matrix
    gradients until then.

    The last layer of the MLP gathers its operands; then its gate runs backward; then the gradients
    of its first layers are summed. At the end all saved tensors are freed.
    """
    products = [layer for _, layer in pairs if isinstance(layer, LinearCost)]
    if not products:
        return ((0, 0),)
    down = products[-1]
    if len(products) > 1:
        enter = products[-2]
    else:
        enter = products[-1]
    last, first = (sum(matrix_elements(layer) for layer in some) for some in ([down], [enter]))
    whole = sum(matrix_elements(layer) for layer in products)
    gate = inside >= 2
    # In order: the down projection, the gate, the up projections, and the end of the block.
    found = [
        (_product_backward_bytes(down, flow), last),
        ((2 if gate else 1) * hidden, last),
        (
            _product_backward_bytes(enter, flow)
            + (2 if gate else 1) * hidden
            - (inside + 1) * hidden,
            last + first,
        ),
        (4 * stream * STATISTICS_BYTES // flow.itemsize - none, whole),
    ]
    picked = _picked_features_bytes(pairs, flow)
    if picked:
        x = enter.comm_elements(flow)[0] * flow.itemsize
        found.append((picked + x - (inside + 1) * hidden, 0))
    return tuple(found)


def _picked_features_bytes(pairs: list[tuple[LayerSpec, LayerCost]], flow: ActivationShape) -> int:
    """Returns the bytes needed in forward to select a rank's features of the MLP's first layers."""
    products = [layer for _, layer in pairs if isinstance(layer, LinearCost)]
    if len(products) > 1:
        enter = products[-2]
    else:
        enter = None
    if (
        enter is None
        or enter.scatter_group.size == 1
        or enter.weights[0].linear_comm.scatter.dim != -1
    ):
        return 0
    y = enter.comm_elements(flow)[1]
    return (2 * y + y // enter.scatter_group.size) * flow.itemsize


def _first_product_backward_bytes(
    pairs: list[tuple[LayerSpec, LayerCost]], flow: ActivationShape
) -> int:
    """Returns the bytes in the backward pass of the first matmul: its operands, saved input and
    dy.
    """
    first = next((layer for _, layer in pairs if isinstance(layer, LinearCost)), None)
    if first is None:
        return 0
    dy = first.comm_elements(flow)[1] // first.scatter_group.size * flow.itemsize
    return _product_backward_bytes(first, flow) + product_input_bytes(first, flow) + dy


def _entry_bytes(pairs: list[tuple[LayerSpec, LayerCost]], flow: ActivationShape) -> int:
    """Returns the bytes that the first matmul needs in backward, without inputs of its weight
    gradient.
    """
    first = next((layer for _, layer in pairs if isinstance(layer, LinearCost)), None)
    if first is None:
        return 0
    return _product_backward_bytes(first, flow) - _deferred_product_bytes(first, flow)


def _norm_bytes_at(
    pairs: list[tuple[LayerSpec, LayerCost]], at: int, flow: ActivationShape, compiled: bool
) -> int:
    """Returns the bytes that the layer at an index saves if it is a norm."""
    leaf, layer = pairs[at]
    if not isinstance(layer, NormCost):
        return 0
    return norm_bytes(layer, flow, _norm_elements(leaf, layer, pairs, flow), compiled)


def _grad_elements(pairs: list[tuple[LayerSpec, LayerCost]]) -> int:
    """Returns the elements of the weight gradients of all matmuls."""
    return sum(matrix_elements(layer) for _, layer in pairs if isinstance(layer, LinearCost))


def _deferred_moment_bytes(
    pairs: list[tuple[LayerSpec, LayerCost]], flow: ActivationShape, hidden: int, inside: int
) -> int:
    """Returns the peak as in `_backward_moments` if weight gradients are deferred, which keep the
    last input.
    """
    products = [layer for _, layer in pairs if isinstance(layer, LinearCost)]
    if not hidden or len(products) < 2:
        return 0
    down = products[-1]
    enter = products[-2]
    gate = (2 if inside >= 2 else 1) * hidden
    entered = (
        _product_backward_bytes(enter, flow)
        + gate
        - inside * hidden
        + _deferred_product_bytes(down, flow)
    )
    return max(gate + hidden, entered)


def matrix_elements(layer: LinearCost) -> int:
    """Returns the elements of the unsharded matrices that get gradients."""
    return sum(
        math.prod(one.weight_sharding.unsharded_shape) for one in layer.weights if one.trainable
    )


def _product_backward_bytes(layer: LinearCost, flow: ActivationShape) -> int:
    """Returns the bytes that a matmul needs in backward: gathered x and dy, each layer's dx, and
    their sum.

    Tensors gathered along the sequence of several samples are copied to be contiguous for the
    matmul, and dx for its reduce-scatter; dx along features is copied as well.
    """
    x, y = layer.comm_elements(flow)
    move = layer.weights[0].linear_comm
    some = layer.layout_context.local_tokens(flow, "heads") > flow.seq
    terms = len(layer.weights)
    ranks = layer.scatter_group.size
    # One dx per fused layer, and their sum if there are several.
    dx = (terms + (terms > 1)) * x
    found = 0
    if layer.gather_group.size > 1:
        found += (x if layer.has_trainable_weight else 0) + x // layer.gather_group.size
        dx += 2 * x if some and move.gather.dim == 1 else 0
        dx += x + x // layer.gather_group.size if move.gather.dim == -1 else 0
    # Each fused layer's features are selected from the gathered dy.
    if ranks > 1 and move.scatter.dim == -1:
        found += y + max(y, dx)
    elif ranks > 1:
        found += y + max(y // ranks, dx + (y if some and move.scatter.dim == 1 else 0))
    else:
        found += dx
    return found * flow.itemsize


def _deferred_product_bytes(layer: LinearCost, flow: ActivationShape) -> int:
    """Returns the bytes of gathered x and dy, which a deferred weight gradient keeps."""
    x, y = layer.comm_elements(flow)
    found = (x if layer.gather_group.size > 1 else 0) + (y if layer.scatter_group.size > 1 else 0)
    if layer.has_trainable_weight:
        return found * flow.itemsize
    return 0


@dataclass(frozen=True)
class LossMemory:
    """Bytes of the LM head and its loss."""

    logit_bytes: int
    """Logits of a chunk, with buffers of their communication."""
    hidden_bytes: int
    """Gathered input and its gradient."""
    peak_bytes: int
    """Peak in addition to these: of statistics, a chunk's part of dx, or the weight gradient."""


@lru_cache(CACHE_SIZE)
def loss_memory(layer: LMHeadCost, flow: ActivationShape, gradient: int) -> LossMemory:
    """Returns the bytes of an LM head. gradient: bytes of its accumulated weight gradient."""
    chunk = layer.chunk_bytes(flow)
    ranks = layer.scatter_group.size
    count = max(len(layer.chunk_tokens(flow)), 1)
    x = layer.comm_elements(flow)[0] * flow.itemsize
    if ranks == 1:
        logits = chunk
    else:
        logits = chunk + chunk // ranks
    rows = x * (2 if layer.gather_group.size > 1 else 1)
    # The slice of the input for the logits of a chunk is copied.
    rows += x // count if ranks > 1 else 0
    # Copies of some logits: widened (unless they are fp32), and one relative to the maximum.
    if flow.itemsize < STATISTICS_BYTES:
        copies = 2
    else:
        copies = 1
    widened = (
        copies
        * max(flow.itemsize, STATISTICS_BYTES)
        * min(chunk // ranks // flow.itemsize, WIDENED_LOGITS)
    )
    # Each rank's features are selected from the scattered logits.
    if ranks > 1 and layer.weights[0].linear_comm.scatter.dim == -1:
        several = gradient if count > 1 else 0
        last = gradient + (several if flow.itemsize >= STATISTICS_BYTES else 0) - chunk
        moment = max(several, last, several + widened - 2 * chunk)
        return LossMemory(2 * chunk + chunk // ranks, rows, moment)
    # Logits are gathered only after the statistics are computed.
    widened -= chunk if ranks > 1 else 0
    if count == 1:
        return LossMemory(logits, rows, max(widened, x, gradient))
    # In fp32 a chunk's weight gradient is added to the sum, not accumulated by the matmul.
    if flow.itemsize >= STATISTICS_BYTES:
        again = gradient
    else:
        again = 0
    return LossMemory(logits, rows, gradient + max(widened, x // count, again))


@lru_cache(CACHE_SIZE)
def deferred_grad_bytes(
    model: ModelSpec, part: BlockSpec, spot: ShardingKey, flow: ActivationShape
) -> int:
    """Returns the bytes of all inputs that a block keeps for deferred weight gradients."""
    layers = build_layers(model, part, spot)
    products = [x for x in layers if isinstance(x, LinearCost) and x.has_trainable_weight]
    found = sum(sum(layer.comm_elements(flow)) for layer in products) * flow.itemsize
    inside = saved_hidden_tensors(model)
    return found + sum(
        moe_activations(x, flow, inside, reads=True).deferred_bytes
        for x in layers
        if isinstance(x, MoECost)
    )
