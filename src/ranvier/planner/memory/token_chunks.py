"""Activation memory of a block in chunks of tokens, as `nn.token_chunks` runs it.

The input of the block, queries, keys, values, the result of attention and their gradients are
whole; everything else exists for one chunk. Imports no torch.
"""

from __future__ import annotations

from functools import lru_cache

from ranvier.cost.layers import ActivationShape, AttentionCost, LayerCost, MoECost
from ranvier.cost.linear import LinearCost
from ranvier.planner.comm_volume import CACHE_SIZE, ShardingKey, build_layers
from ranvier.planner.memory.activations import (
    STATISTICS_BYTES,
    BlockActivations,
    attention_statistics_bytes,
    matrix_elements,
    output_elements,
    saved_hidden_tensors,
    stream_bytes,
)
from ranvier.planner.model_spec import BlockSpec, LayerSpec, ModelSpec


def runs_in_chunks(model: ModelSpec, part: BlockSpec, spot: ShardingKey) -> bool:
    """Whether a block treats tokens alike outside of attention, as `nn.token_chunks` requires."""
    # The layers of a recurrent core run as one block.
    if part.inner_blocks:
        return False
    layers = build_layers(model, part, spot)
    return any(isinstance(one, AttentionCost) for one in layers) and not any(
        isinstance(one, MoECost) for one in layers
    )


@lru_cache(CACHE_SIZE)
def chunked_block_activations(
    model: ModelSpec, part: BlockSpec, spot: ShardingKey, flow: ActivationShape, chunk: int
) -> BlockActivations:
    """Returns the activations of a block in chunks of `chunk` tokens. spot: `activation_key`."""
    pairs = [*zip(part.layers, build_layers(model, part, spot), strict=True)]
    item = flow.itemsize
    # A ladder block also saves its addend.
    inputs = part.num_inputs * stream_bytes(model, spot, flow)
    attention = next(one for _, one in pairs if isinstance(one, AttentionCost))
    tokens = attention.layout_context.local_tokens(flow, attention.dim)
    attended = tokens * attention.local_width * item
    keys = output_elements(pairs, "kv_heads", flow) * item
    projected = attended + 2 * keys
    results = attended + attention_statistics_bytes(attention, flow)
    products = [one for _, one in pairs if isinstance(one, LinearCost)]
    elements = [matrix_elements(one) for one in products]
    wide = max(item, STATISTICS_BYTES)
    workspace = attention_workspace_bytes(attended // item, keys // item, item)
    # The first product is the q, k and v projection; the others follow attention.
    before, after = elements[0] * wide, sum(elements[1:]) * wide
    moments = (
        # The gradient of the result of attention is being written.
        (attended + after + _chunk_bytes(model, pairs, flow, chunk), 0),
        (projected + workspace, sum(elements[1:])),
        # Attention has freed what it has saved.
        (before + _projection_bytes(pairs, flow, chunk) - results, sum(elements[1:])),
    )
    return BlockActivations(
        none=inputs + projected + results,
        selective=inputs + results,
        full=inputs,
        saved_collectives=(0, 0),
        backward_moments=moments,
        recompute_moment=(0, 0),
        picked_features_bytes=0,
        deferred_moment=(0, 0),
        entry_bytes=0,
        input_bytes=inputs,
        unused_result_bytes=0,
    )


def attention_workspace_bytes(query_elements: int, key_elements: int, itemsize: int) -> int:
    """Returns the bytes that the backward kernels of GPUs allocate.

    They sum dq in fp32. With grouped kv heads they compute dk and dv for each query head.
    """
    grouped = 2 * query_elements * itemsize if key_elements < query_elements else 0
    # Kernels exist for half precision only; other dtypes are computed in chunks of queries.
    if itemsize > 2:
        return 0
    return query_elements * STATISTICS_BYTES + grouped


def _chunk_bytes(
    model: ModelSpec,
    pairs: list[tuple[LayerSpec, LayerCost]],
    flow: ActivationShape,
    chunk: int,
) -> int:
    """Returns the peak bytes of a chunk in the backward pass of the part after attention."""
    down = next(one for _, one in reversed(pairs) if isinstance(one, LinearCost))
    tokens = down.layout_context.local_tokens(flow, "mlp")
    hidden = output_elements(pairs, "mlp", flow) // tokens * chunk * flow.itemsize
    saved = saved_hidden_tensors(model)
    # The gradients of the hidden layer, and of both factors of a gated one.
    count = saved + (3 if saved >= 2 else 2)
    width = down.weights[0].local_width
    return count * hidden + _norm_bytes(width, flow, chunk) + 2 * width * chunk * flow.itemsize


def _projection_bytes(
    pairs: list[tuple[LayerSpec, LayerCost]], flow: ActivationShape, chunk: int
) -> int:
    """Returns the peak bytes of a chunk in the backward pass of the part before attention."""
    first = next(one for _, one in pairs if isinstance(one, LinearCost))
    x, y = first.comm_elements(flow)
    tokens = first.layout_context.local_tokens(flow, "heads")
    width = x // tokens
    return (
        _norm_bytes(width, flow, chunk)
        + (3 * (y // tokens) + (len(first.weights) + 1) * width) * chunk * flow.itemsize
    )


def _norm_bytes(width: int, flow: ActivationShape, chunk: int) -> int:
    """Returns the bytes of a norm of a chunk: input and result in fp32, and the result."""
    wide = max(flow.itemsize, STATISTICS_BYTES)
    return (2 * wide + flow.itemsize) * width * chunk
