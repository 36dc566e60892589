"""Kept: bytes of the activations of a part on a rank, as the leaves of `nn` save them; no torch.

A product keeps what it reads (before it is gathered), a norm its input and its normalised output,
both wide, attention its queries, keys, values, result and a number a token and head, an MLP the
inside of its gate. Backward each needs some more for a moment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from ranvier.config.plan import Recompute
from ranvier.cost.layers import Attention, Flow, Layer, Mixture, Statistics
from ranvier.cost.linear import Product, Scores
from ranvier.planner.comm_volume import KEPT, Spot, layers_of
from ranvier.planner.memory.activations_moe import NOTHING, Mixed, mixed
from ranvier.planner.model_spec import Leaf, Model, Part
from ranvier.planner.time.compute import Scales

WIDE = 4
"""Bytes of statistics of norms and of attention."""
WIDENED = 1 << 22
"""Logits that a loss without a kernel widens at once."""
GATED = {"swiglu": 3, "geglu": 3, "geglu_exact": 3, "reglu": 2}
"""Tensors of the hidden size that a gated MLP keeps besides what its last layer reads: gate, up and
the activated gate; of a ReLU the latter is enough."""
UNGATED = {"gelu": 1, "gelu_exact": 1, "relu": 0}


@dataclass(frozen=True)
class Kept:
    """Bytes of a block's activations; `matrix`: elements of gradients of weights made by then."""

    none: int
    """Kept from forward to backward if nothing is computed again."""
    selective: int
    full: int
    held: tuple[int, int]
    """More, if what is communicated is kept for the second run: of a selective block, of a full
    one."""
    moments: tuple[tuple[int, int], ...]
    """Most while it runs backward, above `none`, and elements of gradients of weights by then."""
    second: tuple[int, int]
    """Most above `none` in a second run; what of a selective block is still to be taken then."""
    picked: int
    """Needed forward where each rank's features are picked, above what a selective block keeps."""
    put_off: tuple[int, int]
    """Another moment, if gradients of weights are made later."""
    entry: int
    """Needed backward by its first product, but for what its weight's gradient needs; with what the
    norm before it has kept."""
    same: int
    """Of `none` what is the input itself: a first norm does not widen what is wide."""
    left: int
    """Of what a selective block keeps what its second run does not come to: the last result."""

    def needs(
        self, kind: Recompute, *, keeps: bool = False, last: bool = True
    ) -> tuple[tuple[int, int], ...]:
        """Moments of a block of a kind. last: of one that runs once its first run counts."""
        most, waiting = self.second
        if kind == "none" and not last:
            return self.moments
        if kind != "selective" or keeps:
            return (*self.moments, (most, 0))
        forward = self.picked - self.again(kind)  # beside all results, which are taken later
        return (*self.moments, (most + waiting, 0), (forward, 0))

    def again(self, kind: Recompute, *, keeps: bool = False) -> int:
        """How much more is there once a block has run again: what was kept for it has been taken.

        Its input stays.
        """
        if kind == "none":
            return 0
        left = self.left if kind == "selective" and not keeps else 0
        return self.none - self.same - (self.of(kind, keeps=keeps) - self.full - left)

    def of(self, kind: Recompute, *, keeps: bool = False) -> int:
        """Kept by a block of a kind. keeps: with what it communicates."""
        if kind == "none":
            return self.none
        if kind == "selective":
            return self.selective + (self.held[0] if keeps else 0)
        return self.full + (self.held[1] if keeps else 0)


@lru_cache(KEPT)
def kept(
    model: Model, part: Part, spot: Spot, flow: Flow, compiled: bool = False, fp8: Scales = ""
) -> Kept:
    """The activations of a block; spot: its `inside`.

    compiled: norms keep their input as it came, a gate is activated again, and the last product's
    result, which nobody reads backward, is not kept. fp8: products of a graph are in 8 bits.
    """
    pairs = [*zip(part.leaves, layers_of(model, part, spot), strict=True)]
    item, stream = flow.itemsize, stream_bytes(model, spot, flow)
    none = made = attended = 0
    for leaf, layer in pairs:
        if isinstance(layer, Statistics):
            elements = _normed(leaf, layer, pairs, flow)
            none += norm_bytes(layer, flow, elements, compiled)
            if layer.dim != "embed" and item >= WIDE and _entered_together(pairs):
                none -= elements * item  # a part of what attention keeps of all three
        elif isinstance(layer, Product):
            made += sum(one.made(flow) for one in layer.factors) * item
            none += read(layer, flow) if layer.trained else 0
        elif isinstance(layer, Attention):
            numbers, tokens = _statistics(layer, flow), layer.ground.tokens(flow, layer.dim)
            attended += numbers + tokens * layer.width * item
            none += numbers + _attended(pairs, flow, model)
    hidden = _hidden(pairs, flow)
    inside = min(_inside(model), 2) if compiled else _inside(model)
    mine = _mixture(pairs, flow, inside, reads=hidden > 0)
    none += inside * hidden + mine.none
    none += _eighths(pairs, flow, fp8) if compiled and mine is NOTHING else 0
    some, every = (_held(pairs, flow, selective=x) for x in (True, False))
    first, last = (_norm(pairs, at, flow, compiled) for at in (0, -1))
    # by its turn the norm behind is over, and so is a mixture by that of attention's products
    over = last + (mine.none if not hidden else 0)
    moments = [(n - over, m) for n, m in _backward(pairs, flow, hidden, inside, none, stream)]
    moments += [*mine.moments, (_entered(pairs, flow) + first - none, _grads(pairs))]
    end = _last(pairs)
    result = sum(one.made(flow) for one in end.factors) * item if end else 0
    return Kept(
        none,
        stream + made + attended + mine.made - (result if compiled else 0),
        stream,
        (some, every),
        tuple(moments),
        mine.second,
        _picked(pairs, flow),
        max(mine.put_off, (_put_off_moment(pairs, flow, hidden, inside) - over, 0)),
        entry=_entry(pairs, flow) + first,
        same=stream if first and item >= WIDE and not compiled else 0,
        left=0 if compiled else result,
    )


def _eighths(pairs: list[tuple[Leaf, Layer]], flow: Flow, fp8: Scales) -> int:
    """Bytes that a graph keeps more, or less, of what products in 8 bits read.

    One scale: the last one's is kept in 8 bits only; attention's result both ways, since attention
    needs it, too. A scale for each row: nothing is kept but that; of queries, keys and values,
    which come in one buffer, all.
    """
    products = [layer for _, layer in pairs if isinstance(layer, Product)]
    kept = {layer: read(layer, flow) for layer in products}
    attended = sum(n for layer, n in kept.items() if layer.factors[0].into == "heads")
    if fp8 == "tensor":
        return (attended - kept[products[-1]]) // flow.itemsize
    if fp8 == "row":
        turned = sum(_outputs(pairs, dim, flow) for dim in ("heads", "kv_heads"))
        return attended + turned * flow.itemsize - sum(kept.values())
    return 0


def _mixture(pairs: list[tuple[Leaf, Layer]], flow: Flow, inside: int, *, reads: bool) -> Mixed:
    """Of the mixture of a block, if there is one."""
    found = [mixed(x, flow, inside, reads=reads) for _, x in pairs if isinstance(x, Mixture)]
    return found[0] if found else NOTHING


def _held(pairs: list[tuple[Leaf, Layer]], flow: Flow, *, selective: bool) -> int:
    """Bytes that layers keep more of what they communicate; nobody needs the last one's result."""
    found = sum(layer.held(flow, selective=selective) for _, layer in pairs)
    last = _last(pairs)
    if last is None or last.gathers.size * last.scatters.size * last.totals.size == 1:
        return found
    made = sum(one.made(flow) for one in last.factors) * flow.itemsize if selective else 0
    return found - last.held(flow, selective=selective) - made


def _last(pairs: list[tuple[Leaf, Layer]]) -> Product | None:
    """The product whose result a second run does not come to: what is last in a block."""
    last = pairs[-1][1]
    mixture = any(isinstance(layer, Mixture) for _, layer in pairs)
    return last if isinstance(last, Product) and not mixture else None


@lru_cache(KEPT)
def stream_bytes(model: Model, spot: Spot, flow: Flow) -> int:
    """Bytes of the residual stream `[b, s/row, d/col]`."""
    ground = spot.ground(model)
    (width,) = ground.features(model.units["embed"], "embed").local
    return ground.tokens(flow, "embed") * width * flow.itemsize


def read(layer: Product, flow: Flow) -> int:
    """Bytes of what a product reads, before it is gathered."""
    return layer.elements(flow)[0] // layer.gathers.size * flow.itemsize


def norm_bytes(layer: Statistics, flow: Flow, elements: int, compiled: bool = False) -> int:
    """What a norm keeps of so many elements."""
    wide = max(flow.itemsize, WIDE)
    if compiled:
        return elements * flow.itemsize + layer.ground.tokens(flow, layer.dim) * wide
    return 2 * elements * wide + layer.ground.tokens(flow, layer.dim) * wide


def _normed(leaf: Leaf, layer: Statistics, pairs: list[tuple[Leaf, Layer]], flow: Flow) -> int:
    """Elements on this rank that a norm reads; one of each head reads all heads."""
    if layer.dim != "head_dim":
        return layer.ground.tokens(flow, layer.dim) * layer.features.local[0]
    dim = "kv_heads" if leaf.name.endswith("k_norm") else "heads"
    return _outputs(pairs, dim, flow)


def _outputs(pairs: list[tuple[Leaf, Layer]], dim: str, flow: Flow) -> int:
    """Elements on this rank of the first output with a dim."""
    factors = (f for _, layer in pairs if isinstance(layer, Product) for f in layer.factors)
    found = next((f for f in factors if f.out == dim), None)
    return 0 if found is None else found.ground.tokens(flow, dim) * found.width // found.count


def _statistics(layer: Attention, flow: Flow) -> int:
    heads = layer.width // max(layer.head_dim, 1)
    return layer.ground.tokens(flow, layer.dim) * heads * WIDE


def _attended(pairs: list[tuple[Leaf, Layer]], flow: Flow, model: Model) -> int:
    """Queries, keys and values; values are a view of all three if these came in one buffer."""
    q, k = (_outputs(pairs, dim, flow) for dim in ("heads", "kv_heads"))
    if model.traits.get("positions", "rope") != "rope":
        return (q + 2 * k) * flow.itemsize
    values = q + 2 * k if _entered_together(pairs) else k
    return (q + k + values) * flow.itemsize


def _entered_together(pairs: list[tuple[Leaf, Layer]]) -> bool:
    """Whether queries, keys and values are parts of one buffer."""
    return any(
        layer.scatters.size * layer.totals.size > 1 and not leaf.inside[0].bias
        for leaf, layer in pairs
        if isinstance(layer, Product) and len(leaf.inside) == 3
    )


def _hidden(pairs: list[tuple[Leaf, Layer]], flow: Flow) -> int:
    """Bytes of a hidden tensor of the MLP."""
    return _outputs(pairs, "mlp", flow) * flow.itemsize


def _inside(model: Model) -> int:
    """Hidden tensors that an MLP keeps besides what its last layer reads."""
    word = str(model.traits.get("activation", "swiglu"))
    return {**GATED, **UNGATED}.get(word, 3)


def _backward(
    pairs: list[tuple[Leaf, Layer]], flow: Flow, hidden: int, inside: int, none: int, stream: int
) -> tuple[tuple[int, int], ...]:
    """Moments of a backward pass: bytes above what was kept, elements of gradients of matrices.

    The last layer of the MLP gathers what it needs; its gate is gone through; its first layers add
    what each gives. At the end all is gone but gradients.
    """
    products = [layer for _, layer in pairs if isinstance(layer, Product)]
    if not products:
        return ((0, 0),)
    down, enter = products[-1], products[-2] if len(products) > 1 else products[-1]
    last, first = (sum(_matrix(layer) for layer in some) for some in ([down], [enter]))
    whole = sum(_matrix(layer) for layer in products)
    gate = inside >= 2
    found = [
        (_needed(down, flow), last),
        ((2 if gate else 1) * hidden, last),
        (_needed(enter, flow) + (2 if gate else 1) * hidden - (inside + 1) * hidden, last + first),
        (4 * stream * WIDE // flow.itemsize - none, whole),
    ]
    picked = _picked(pairs, flow)
    if picked:
        x = enter.elements(flow)[0] * flow.itemsize
        found.append((picked + x - (inside + 1) * hidden, 0))
    return tuple(found)


def _picked(pairs: list[tuple[Leaf, Layer]], flow: Flow) -> int:
    """Bytes that the way into an MLP needs forward where each rank's features are picked."""
    products = [layer for _, layer in pairs if isinstance(layer, Product)]
    enter = products[-2] if len(products) > 1 else None
    if enter is None or enter.scatters.size == 1 or enter.factors[0].move.scatter.dim != -1:
        return 0
    y = enter.elements(flow)[1]
    return (2 * y + y // enter.scatters.size) * flow.itemsize


def _entered(pairs: list[tuple[Leaf, Layer]], flow: Flow) -> int:
    """Bytes while the first product runs backward: what it needs, what it read, and dy."""
    first = next((layer for _, layer in pairs if isinstance(layer, Product)), None)
    if first is None:
        return 0
    dy = first.elements(flow)[1] // first.scatters.size * flow.itemsize
    return _needed(first, flow) + read(first, flow) + dy


def _entry(pairs: list[tuple[Leaf, Layer]], flow: Flow) -> int:
    """Bytes that the first product needs backward, but for what its weight's gradient needs."""
    first = next((layer for _, layer in pairs if isinstance(layer, Product)), None)
    return 0 if first is None else _needed(first, flow) - _put_off(first, flow)


def _norm(pairs: list[tuple[Leaf, Layer]], at: int, flow: Flow, compiled: bool) -> int:
    """Bytes that the layer at a place keeps if it is a norm."""
    leaf, layer = pairs[at]
    if not isinstance(layer, Statistics):
        return 0
    return norm_bytes(layer, flow, _normed(leaf, layer, pairs, flow), compiled)


def _grads(pairs: list[tuple[Leaf, Layer]]) -> int:
    """Elements of the gradients of all products."""
    return sum(_matrix(layer) for _, layer in pairs if isinstance(layer, Product))


def _put_off_moment(pairs: list[tuple[Leaf, Layer]], flow: Flow, hidden: int, inside: int) -> int:
    """As `_backward`, where gradients of weights are made later: what the last layer read stays."""
    products = [layer for _, layer in pairs if isinstance(layer, Product)]
    if not hidden or len(products) < 2:
        return 0
    down, enter = products[-1], products[-2]
    gate = (2 if inside >= 2 else 1) * hidden
    entered = _needed(enter, flow) + gate - inside * hidden + _put_off(down, flow)
    return max(gate + hidden, entered)


def _matrix(layer: Product) -> int:
    """Elements of the gathered matrices that get gradients."""
    return sum(math.prod(one.weight.gathered) for one in layer.factors if one.trainable)


def _needed(layer: Product, flow: Flow) -> int:
    """Bytes that a product needs backward: gathered x and dy, each layer's dx, their sum.

    What is gathered along the sequence of several samples is copied to be multiplied, dx to go; so
    is dx along features.
    """
    x, y = layer.elements(flow)
    move, some = layer.factors[0].move, layer.ground.tokens(flow, "heads") > flow.seq
    terms, ranks = len(layer.factors), layer.scatters.size
    dx, found = (terms + (terms > 1)) * x, 0
    if layer.gathers.size > 1:
        found += (x if layer.trained else 0) + x // layer.gathers.size
        dx += 2 * x if some and move.gather.dim == 1 else 0
        dx += x + x // layer.gathers.size if move.gather.dim == -1 else 0
    if ranks > 1 and move.scatter.dim == -1:  # each layer's features are picked from what came
        found += y + max(y, dx)
    elif ranks > 1:
        found += y + max(y // ranks, dx + (y if some and move.scatter.dim == 1 else 0))
    else:
        found += dx
    return found * flow.itemsize


def _put_off(layer: Product, flow: Flow) -> int:
    """Bytes of gathered x and dy, which a gradient of weights that is made later keeps."""
    x, y = layer.elements(flow)
    found = (x if layer.gathers.size > 1 else 0) + (y if layer.scatters.size > 1 else 0)
    return found * flow.itemsize if layer.trained else 0


@dataclass(frozen=True)
class Loss:
    """Bytes of a head."""

    logits: int
    """Of a chunk, with copies on their way to other ranks."""
    rows: int
    """Gathered input, and its gradient."""
    moment: int
    """Most besides, of statistics, a chunk's part of dx, or the gradient of the weight."""


@lru_cache(KEPT)
def loss(layer: Scores, flow: Flow, gradient: int) -> Loss:
    """The bytes of a head. gradient: of its weight, as it is added up."""
    chunk, ranks = layer.chunk_bytes(flow), layer.scatters.size
    count = max(len(layer.chunked(flow)), 1)
    x = layer.elements(flow)[0] * flow.itemsize
    logits = chunk if ranks == 1 else chunk + chunk // ranks
    rows = x * (2 if layer.gathers.size > 1 else 1)
    rows += x // count if ranks > 1 else 0  # what the logits of a chunk come from, once more
    copies = 3 if flow.itemsize < WIDE else 2  # widened; less its logarithm; what is counted of it
    widened = copies * max(flow.itemsize, WIDE) * min(chunk // ranks // flow.itemsize, WIDENED)
    if ranks > 1 and layer.factors[0].move.scatter.dim == -1:  # each rank's features are picked
        several = gradient if count > 1 else 0
        last = gradient + (several if flow.itemsize >= WIDE else 0) - chunk
        moment = max(several, last, several + widened - 2 * chunk)
        return Loss(2 * chunk + chunk // ranks, rows, moment)
    widened -= chunk if ranks > 1 else 0  # they are gathered once they are scored
    if count == 1:
        return Loss(logits, rows, max(widened, x, gradient))
    again = gradient if flow.itemsize >= WIDE else 0  # a wide chunk's is added, not multiplied in
    return Loss(logits, rows, gradient + max(widened, x // count, again))


@lru_cache(KEPT)
def later(model: Model, part: Part, spot: Spot, flow: Flow) -> int:
    """Bytes that a block keeps where gradients of weights are made later: all that they need."""
    layers = layers_of(model, part, spot)
    products = [x for x in layers if isinstance(x, Product) and x.trained]
    found = sum(sum(layer.elements(flow)) for layer in products) * flow.itemsize
    inside = _inside(model)
    return found + sum(
        mixed(x, flow, inside, reads=True).later for x in layers if isinstance(x, Mixture)
    )
