"""Mixed: bytes of the activations of a mixture of experts on a rank; no torch.

With t tokens, k choices of each, R rows received (`layers.Mixture.rows`) and T = R · row of them in
products, `nn.experts` keeps

    router     x wide [t, d/col], scores [t, E]
    experts    rows [T, d/col], gate and up, the activated gate, and what down reads [T, f/row]
    combine    what came back [t·k, d/col]

Where no axis splits anything all is one operation that keeps x, gate and up of t·k rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from ranvier.cost.layers import ActivationShape, MoECost

ROUTER_BYTES = 4
"""Bytes of a number of the router."""
INDEX_BYTES = 8
"""Bytes of a place of a row."""
SCORES_PER_EXPERT = 3
"""Numbers that a router keeps of a token and an expert."""


@dataclass(frozen=True)
class MoeActivations:
    """Bytes of a mixture, as `kept.Kept` has them."""

    none: int
    product_bytes: int
    """Results of products, which a selective block keeps."""
    backward_moments: tuple[tuple[int, int], ...]
    """Most while it runs backward, above `none`, and elements of gradients of weights by then."""
    recompute_moment: tuple[int, int]
    """Most above `none` in a second run; results of products that it has not come to by then."""
    deferred_moment: tuple[int, int]
    """Another moment, if gradients of weights are made later."""
    deferred_bytes: int
    """What waits where gradients of weights are made later: x and dy of each product, or, of one
    operation, the gradients themselves."""


NO_MOE_ACTIVATIONS = MoeActivations(0, 0, (), (0, 0), (0, 0), 0)


def moe_activations(
    layer: MoECost, flow: ActivationShape, inside: int, *, reads: bool
) -> MoeActivations:
    """The bytes of a mixture.

    inside: hidden tensors besides what down reads. reads: another layer keeps x as well.
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
    if ground.axis_group("expert", "row").size == col == 1:
        hidden = enter * choices * layer.expert_width * item
        x = 0 if reads else tokens * width * item
        made = hidden + tokens * width * item + scores
        grads = layer.num_experts * layer.matrices * layer.expert_width * width * item
        at_once = (tokens * width * item + grads, 1)  # dx and all gradients come together
        return MoeActivations(routed + x + hidden, made, (at_once,), (0, 0), at_once, grads)
    rows = layer.received_rows(flow) * row
    stream = rows * width * item
    hidden = rows * layer.expert_width // row * item
    places = 2 * INDEX_BYTES * (choices + rows)
    none = routed + places + stream + inside * hidden // col + hidden + choices * width * item
    made = enter * hidden + stream + scores
    matrix = (
        layer.num_experts // ground.axis_group("expert").size * (layer.expert_width // row) * width
    )
    behind = inside * hidden // col + hidden + choices * width * item  # the gate, and what follows
    moments: tuple[tuple[int, int], ...] = (
        (2 * stream - choices * width * item, 0),  # down: what came, in both orders of its rows
        (stream + hidden - choices * width * item, matrix),
        (enter * hidden + hidden // col, matrix),  # the gate
        # what enters: each product's gradient, while the hidden tensors are gone; with their sum it
        # is as much, as what was read is gone by then, unless gradients of weights are made later
        (entered := enter * stream + enter * hidden - behind, layer.matrices * matrix),
    )
    # results, once more in the order of their rows, and what goes back
    second = (2 * stream + stream // row - choices * width * item, 0)
    if col > 1:  # what is scattered, side by side and in the order of ranks
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
