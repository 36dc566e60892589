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

from ranvier.cost.layers import Flow, Mixture

WIDE = 4
"""Bytes of a number of the router."""
INDEX = 8
"""Bytes of a place of a row."""
SCORES = 3
"""Numbers that a router keeps of a token and an expert."""


@dataclass(frozen=True)
class Mixed:
    """Bytes of a mixture, as `kept.Kept` has them."""

    none: int
    made: int
    """Results of products, which a selective block keeps."""
    moments: tuple[tuple[int, int], ...]
    """Most while it runs backward, above `none`, and elements of gradients of weights by then."""
    second: tuple[int, int]
    """Most above `none` in a second run; results of products that it has not come to by then."""
    put_off: tuple[int, int]
    """Another moment, if gradients of weights are made later."""
    later: int
    """What waits where gradients of weights are made later: x and dy of each product, or, of one
    operation, the gradients themselves."""


NOTHING = Mixed(0, 0, (), (0, 0), (0, 0), 0)


def mixed(layer: Mixture, flow: Flow, inside: int, *, reads: bool) -> Mixed:
    """The bytes of a mixture.

    inside: hidden tensors besides what down reads. reads: another layer keeps x as well.
    """
    ground, item = layer.ground, flow.itemsize
    tokens, choices = ground.tokens(flow, "embed"), layer.choices(flow)
    (width,) = ground.features(ground.units["embed"], "embed").local
    row, col = ground.line("row").size, ground.line("col").size
    routed = tokens * width * max(item, WIDE) + SCORES * tokens * layer.experts * WIDE
    scores, enter = tokens * layer.experts * WIDE, layer.matrices - 1
    if ground.line("expert", "row").size == col == 1:
        hidden = enter * choices * layer.width * item
        x = 0 if reads else tokens * width * item
        made = hidden + tokens * width * item + scores
        grads = layer.experts * layer.matrices * layer.width * width * item
        at_once = (tokens * width * item + grads, 1)  # dx and all gradients come together
        return Mixed(routed + x + hidden, made, (at_once,), (0, 0), at_once, grads)
    rows = layer.rows(flow) * row
    stream, hidden = rows * width * item, rows * layer.width // row * item
    places = 2 * INDEX * (choices + rows)
    none = routed + places + stream + inside * hidden // col + hidden + choices * width * item
    made = enter * hidden + stream + scores
    matrix = layer.experts // ground.line("expert").size * (layer.width // row) * width
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
    return Mixed(
        none,
        made,
        moments,
        second,
        (stream + max(entered, enter * hidden + hidden // col), 0),
        2 * stream + (enter + 1) * hidden,
    )
