"""Activation memory of an MoE layer on a rank; imports no torch.

With t tokens, k experts per token, R rows received (`MoECost.received_rows`) and T = R · row of
them in matmuls, `nn.moe` saves

    router     x in fp32 [t, d/col], scores [t, E]
    experts    rows [T, d/col], gate and up, the activated gate, and the input of down [T, f/row]
    combine    the returned rows [t·k, d/col]

If no axis splits the layer, it is one operation that saves x, gate and up of t·k rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from ranvier.cost.layers import ActivationShape, MoECost

ROUTER_BYTES = 4
"""Bytes per number of the router, which computes in fp32."""
INDEX_BYTES = 8
"""Bytes per row index."""
SCORES_PER_EXPERT = 3
"""Numbers that a router saves per token and expert."""


@dataclass(frozen=True)
class MoeActivations:
    """Bytes of an MoE layer, as in `BlockActivations`."""

    none: int
    product_bytes: int
    """Results of matmuls, which a selective block saves."""
    backward_moments: tuple[tuple[int, int], ...]
    """Peaks of its backward pass above `none`, and elements of weight gradients until then."""
    recompute_moment: tuple[int, int]
    """Peak of recomputation above `none`; results of matmuls that are not yet recomputed then."""
    deferred_moment: tuple[int, int]
    """An additional peak if weight gradients are deferred."""
    deferred_bytes: int
    """Kept for deferred weight gradients: x and dy of each matmul or, for the single operation, the
    gradients themselves."""


NO_MOE_ACTIVATIONS = MoeActivations(0, 0, (), (0, 0), (0, 0), 0)


def moe_activations(
    layer: MoECost, flow: ActivationShape, inside: int, *, reads: bool
) -> MoeActivations:
    """Returns the bytes of an MoE layer.

    inside: hidden tensors in addition to the input of down. reads: another layer saves x as well.
    """
    ground = layer.layout_context
    item = flow.itemsize
    tokens = ground.local_tokens(flow, "embed")
    choices = layer.sent_rows(flow)
    (width,) = ground.feature_sharding(ground.units["embed"], "embed").local_shape
    row = ground.axis_group("row").size
    col = ground.axis_group("col").size
    routed = (
        tokens * width * max(item, ROUTER_BYTES)
        + SCORES_PER_EXPERT * tokens * layer.num_experts * ROUTER_BYTES
    )
    scores = tokens * layer.num_experts * ROUTER_BYTES
    enter = layer.matrices - 1
    # Unsplit: one operation for all experts, without dispatch buffers.
    if ground.axis_group("expert", "row").size == col == 1:
        hidden = enter * choices * layer.expert_width * item
        x = 0 if reads else tokens * width * item
        made = hidden + tokens * width * item + scores
        grads = layer.num_experts * layer.matrices * layer.expert_width * width * item
        # dx and all weight gradients are produced at once.
        at_once = (tokens * width * item + grads, 1)
        return MoeActivations(routed + x + hidden, made, (at_once,), (0, 0), at_once, grads)
    rows = layer.received_rows(flow) * row
    stream = rows * width * item
    hidden = rows * layer.expert_width // row * item
    # Permutation and inverse permutation of the sent and the received rows.
    places = 2 * INDEX_BYTES * (choices + rows)
    none = routed + places + stream + inside * hidden // col + hidden + choices * width * item
    made = enter * hidden + stream + scores
    matrix = (
        layer.num_experts // ground.axis_group("expert").size * (layer.expert_width // row) * width
    )
    # Freed once the up projections run backward: the gate and everything after it.
    behind = inside * hidden // col + hidden + choices * width * item
    moments: tuple[tuple[int, int], ...] = (
        # Down: the received gradient, before and after its permutation.
        (2 * stream - choices * width * item, 0),
        (stream + hidden - choices * width * item, matrix),
        # The gate.
        (enter * hidden + hidden // col, matrix),
        # Up projections: dx of each one, after the hidden tensors are freed. Their sum replaces the
        # inputs, which are already freed unless weight gradients are deferred.
        (entered := enter * stream + enter * hidden - behind, layer.matrices * matrix),
    )
    # Permuted results, the copy of them in which a reduce-scatter of unequal parts over row adds,
    # and the rows to be returned.
    second = (2 * stream + stream // row - choices * width * item, 0)
    # The reduce-scatter over col: its input side by side and in rank order, and its output.
    if col > 1:
        picked = 3 * enter * hidden + enter * hidden // col - behind
        second = max(second, (picked, stream), key=sum)
    return MoeActivations(
        none,
        made,
        moments,
        second,
        (stream + max(entered, enter * hidden + hidden // col), 0),
        2 * stream + (enter + 1) * hidden,
    )
