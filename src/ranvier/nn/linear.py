"""Linear layers: gather, multiply, reduce-scatter; backward is the same read from right to left.

Between the residual stream `[b, s/row, d/col]` and the inside of attention or MLP
`[b/col, s, n/row]` a linear layer moves tokens and features at once. Its weight `(out, in)` has
`out` on one axis and `in` on the other (`sharding.WEIGHTS`), so (`sharding.Table.move`)

    enter (q, k, v, up, head)
        x  -gather seq over row->  [b, s, d/col] · W[n/row, d/col]ᵀ  -scatter over col->      y
    leave (o, down)
        x  -gather over col->      [b, s, n/row] · W[d/col, n/row]ᵀ  -scatter seq over row->  y

where over col the batch is moved (`inner = samples`) or the features (`inner = features`). With
col = depth = 1 these are Megatron's column- and row-parallel layers with sequence parallelism; with
row = col = 1 nothing is moved and the gather of the weight over depth alone is ZeRO-3.

Layers that read the same value (`Siblings`: q, k, v; gate, up) share one gather, one scatter and
one dX reduction. Two implementations, held equal by the tests: `reference` in differentiable pairs,
and `_Product`, whose backward overlaps: X is gathered again while dX is multiplied, dX is reduced
while dW is multiplied, and dW goes to the weight's bucket, whose reduction over depth runs on
behind everything that follows.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ranvier.comm import verbs
from ranvier.comm.deferred import Bucket
from ranvier.comm.pairs import gather, sum_scatter
from ranvier.errors import ShardingError
from ranvier.grid import Axis
from ranvier.nn.example import Example
from ranvier.nn.leaf import Flow, Leaf, Site, applied
from ranvier.nn.matmul import Layouts, Products, forward, grad_x, multiply
from ranvier.sharding import Dim, Sharding
from ranvier.trace import Event

NARROW = 1024
"""Output features up to which a layer is packed with its neighbours, if another is twice as wide
(k and v beside q)."""


@dataclass(frozen=True)
class Run:
    """Layers `start` to `stop` of siblings, whose weights are one matrix."""

    start: int
    stop: int
    matrix: Tensor | None


def _name(dim: Dim) -> str:
    return dim if isinstance(dim, str) else dim[1]


class Linear(Leaf):
    """y = x Wᵀ + b.

    enter: x `[b, s/row, d/col]`, y `[b/col, s, n/row]` or `[b, s, n/(row·col)]`.
    leave: the other way.
    Communicates: all-gather x, reduce-scatter y; backward: all-gather x and dy, reduce-scatter dx.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    transposed = False
    """Whether the weight is stored as (in, out)."""

    def __init__(self, site: Site, serial: torch.nn.Module, dims: Sequence[Dim]) -> None:
        super().__init__(site)
        packed, into = dims if not self.transposed else (dims[1], dims[0])
        if not isinstance(into, str):
            raise ShardingError(
                f"{site.name}: the in dim {into} of a linear layer cannot be packed."
            )
        self.into = into
        self.out = _name(packed)
        self.count = 1 if isinstance(packed, str) else packed[0]
        self.move = site.table.move(self.out, self.into)
        self.steps = self._steps()
        """Axis and dim of the gather of the input, and of the scatter of the output."""
        weight, bias = serial.weight, serial.bias
        assert isinstance(weight, torch.nn.Parameter), type(weight)
        assert bias is None or isinstance(bias, torch.nn.Parameter), type(bias)
        self.products: Products = Layouts()
        """How it multiplies."""
        self.place("weight", weight, dims, std=0.02)
        self.split = self.handles["weight"].split
        self.place("bias", bias, (packed,), rule=site.table.region(self.out))
        features = weight.shape[1 if self.transposed else 0]
        self.output = Sharding.make(
            [features // self.count],
            [self.out],
            site.table.region(self.out),
            site.grid.degrees,
            units=site.units,
        )
        """Sharding of the output features."""

    @staticmethod
    def examples() -> list[Example]:
        """What the generic tests try."""
        enter = [("batch", "seq", "embed")]
        return [
            Example(
                lambda twin: twin(16, 32), ("heads", "embed"), enter, [("batch", "seq", "heads")]
            ),
            Example(
                lambda twin: twin(16, 8),
                ("kv_heads", "embed"),
                enter,
                [("batch", "seq", "kv_heads")],
            ),
            Example(
                lambda twin: twin(16, 29, bias=False),
                ("vocab", "embed"),
                enter,
                [("batch", "seq", "vocab")],
            ),
            Example(lambda twin: twin(24, 16), ("embed", "mlp"), [("batch", "seq", "mlp")], enter),
        ]

    def _steps(self) -> tuple[tuple[Axis, int], tuple[Axis, int]]:
        move, site = self.move, self.site
        gathered = site.whole_sequence and move.gather.dim == 1
        from_axis = site.axis() if gathered else site.axis(move.gather.axis)
        return (from_axis, move.gather.dim), (site.axis(move.scatter.axis), move.scatter.dim)

    @property
    def parts(self) -> int:
        """Different parts into which the scatter over features cuts the output.

        Shared kv heads: fewer.
        """
        cuts = [cut for cut in self.output.cuts[0] if cut.axis == self.move.scatter.axis]
        return cuts[0].ranks // cuts[0].share if cuts else 1

    def gathered(self) -> Tensor:
        """The weight gathered over depth, in autograd; a graph for all blocks reads no handle."""
        return self.handles["weight"].gathered() if self.split else self.weight

    def matrix(self, weight: Tensor) -> Tensor:
        """The weight as (out, in)."""
        return weight.flatten(1).T if self.transposed else weight.flatten(0, -2)

    def matrix_grad(self, x: Tensor, dy: Tensor) -> Tensor:
        """dW in the shape in which the weight is stored."""
        x, dy = x.flatten(0, -2), dy.flatten(0, -2)
        grad = x.T @ dy if self.transposed else self.products.grad_w(dy, x)
        return grad.view(self.handles["weight"].sharding.gathered)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        with self.here():
            (y,) = product(x, [self], self.site, [])
        if not torch.is_grad_enabled():  # nobody shall see padding; the loss leaves it out itself
            y = y[..., : self.output.place(self.site.grid.index).valid[0] * self.count]
        return y

    def forward_events(self, flow: Flow) -> list[Event]:
        """Gather x, scatter y."""
        return _forward_events(self, flow, [self])

    def backward_events(self, flow: Flow) -> list[Event]:
        """Gather x and dy, scatter dx."""
        return _backward_events(self, flow, [self])

    def flops(self, flow: Flow) -> int:
        """2 · tokens · (out · in) of this rank."""
        weight = self.handles["weight"].sharding.gathered
        scattered = self.site.axis(self.move.scatter.axis).size if self.move.scatter.dim >= 0 else 1
        return 2 * self.tokens(flow, self.out) * scattered * int(torch.Size(weight).numel())


class Conv1D(Linear):
    """A linear layer whose weight is stored as (in, out), as in Hugging Face's GPT-2."""

    transposed = True


class Siblings(Leaf):
    """Linear layers that read the same value: one gather, one scatter and one dX reduction for all.

    Communicates: as one Linear with the outputs of all.
    """

    def __init__(self, site: Site, serial: torch.nn.Module, dims: Sequence[Dim] = ()) -> None:
        super().__init__(site)
        self.runs: list[Run] = []
        """Neighbours whose weights are seen as one matrix."""

    def pack(self, widest: int = NARROW, *, all_alike: bool = False) -> None:
        """See neighbours with few output features as one matrix; their gradients come as one, too.

        A small product does not fill a device; of large ones the packed result would have to be
        cut, and its gradient put together, which costs more than it saves: so only those half as
        wide as another are packed, unless all are to be treated alike. In the bucket they must lie
        one after the other, whole over depth.
        """
        layers, self.runs = self.layers, []
        widths = [math.prod(layer.handles["weight"].sharding.local[:-1]) for layer in layers]
        limit = widest if all_alike else min(widest, max(widths) // 2)
        start = 0
        while start < len(layers):
            stop = start + 1
            while stop < len(layers) and follows(*layers[stop - 1 : stop + 1]):
                if max(widths[start : stop + 1]) > limit:
                    break
                stop += 1
            if stop > start + 1:
                self.runs.append(Run(start, stop, _together(layers[start:stop])))
            start = stop

    @staticmethod
    def examples() -> list[Example]:
        """What the generic tests try."""
        dims: dict[str, Sequence[Dim]] = {"q": ("heads", "embed"), "k": ("kv_heads", "embed")}
        return [
            Example(
                lambda twin: twin({"q": torch.nn.Linear(16, 32), "k": torch.nn.Linear(16, 8)}),
                (),
                [("batch", "seq", "embed")],
                [("batch", "seq", "heads"), ("batch", "seq", "kv_heads")],
                children=dims,
            )
        ]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """The outputs of all layers, in order."""
        with self.here():
            return product(x, self.layers, self.site, self.runs)

    @property
    def layers(self) -> list[Linear]:
        """The layers, in order."""
        return [layer for layer in self.children() if isinstance(layer, Linear)]

    def forward_events(self, flow: Flow) -> list[Event]:
        """As one layer."""
        return _forward_events(self, flow, self.layers)

    def backward_events(self, flow: Flow) -> list[Event]:
        """As one layer."""
        return _backward_events(self, flow, self.layers)


# ---- the product ------------------------------------------------------------------------


def product(
    x: Tensor, layers: Sequence[Linear], site: Site, runs: Sequence[Run]
) -> tuple[Tensor, ...]:
    """x times the weights of layers that read it. Communicates: as Linear."""
    if torch.compiler.is_compiling() or not site.fast:
        ys = reference(x, layers, runs)
    else:
        ys = list(applied(_Product, x, layers, site, *[layer.weight for layer in layers]))
    return tuple(
        y if layer.bias is None else y + layer.bias.flatten()
        for y, layer in zip(ys, layers, strict=True)
    )


def reference(x: Tensor, layers: Sequence[Linear], runs: Sequence[Run]) -> list[Tensor]:
    """The product in differentiable pairs."""
    (from_axis, from_dim), (to_axis, to_dim) = layers[0].steps
    x = gather(x, from_axis, from_dim)
    ys: list[Tensor] = []
    for run in [*runs, Run(len(layers), len(layers), None)]:
        for layer in layers[len(ys) : run.start]:
            ys.append(multiply(x, layer.matrix(layer.gathered()), layer.products))
        if run.matrix is not None:
            sizes = [layer.weight.flatten(0, -2).shape[0] for layer in layers[run.start : run.stop]]
            ys += multiply(x, run.matrix, layers[run.start].products).split(sizes, -1)
    if to_axis.size == 1:
        return ys
    y = sum_scatter(pack(ys, layers, to_axis, to_dim), to_axis, _packed(to_dim))
    return unpack(y, layers, to_dim)


class _Product(torch.autograd.Function):
    """The product with its communication overlapped.

    Gradients of weights are delivered, not returned.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layers: Sequence[Linear], site: Site, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        (from_axis, from_dim), (to_axis, to_dim) = layers[0].steps
        whole = verbs.all_gather(x, from_axis, from_dim).wait()
        ys = [
            forward(whole, layer.matrix(layer.handles["weight"].whole()), layer.products)
            for layer in layers
        ]
        ctx.save_for_backward(x)
        ctx.layers, ctx.site = layers, site
        if to_axis.size == 1:
            return tuple(ys)
        y = verbs.reduce_scatter(pack(ys, layers, to_axis, to_dim), to_axis, _packed(to_dim)).wait()
        return tuple(unpack(y, layers, to_dim))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), layers, site = ctx.saved_tensors, ctx.layers, ctx.site
        trace, hide = site.grid.trace, "dx" in site.queue.overlap
        (from_axis, from_dim), (to_axis, to_dim) = layers[0].steps
        with trace.at(site.name):
            again = verbs.all_gather(x, from_axis, from_dim)  # X once more, behind the dX matmul
            if not hide:
                again.wait()
            dys = list(grads)
            if to_axis.size > 1:
                packed = repack(grads, layers, to_dim)
                dy = verbs.all_gather(packed, to_axis, _packed(to_dim)).wait()
                dys = pack_adjoint(dy, layers, to_axis, to_dim)
            pending = None
            if ctx.needs_input_grad[0]:
                dx = _sum(
                    [
                        grad_x(d, layer.matrix(layer.handles["weight"].whole()), layer.products)
                        for d, layer in zip(dys, layers, strict=True)
                    ]
                )
                # in flight while dW is computed
                pending = verbs.reduce_scatter(dx, from_axis, from_dim)
                if not hide:
                    pending.wait()
            whole = again.wait()
            site.moment.do(partial(_deliver, site, layers, whole, dys))
            return (None if pending is None else pending.wait(), None, None, *[None] * len(layers))


def _deliver(site: Site, layers: Sequence[Linear], x: Tensor, dys: Sequence[Tensor]) -> None:
    """Gradients of the weights. Communicates: reduce-scatter over depth, by bucket, later."""
    with site.grid.trace.compute(f"dW {site.name}"):
        for layer, dy in zip(layers, dys, strict=True):
            weight = layer.handles["weight"]
            if weight.trainable:
                weight.deliver(layer.matrix_grad(x, dy))


def follows(before: Linear, layer: Linear) -> bool:
    """Whether the weight of a layer lies in the bucket right behind that of the one before.

    And is multiplied in the same way.
    """
    a, b = before.handles["weight"], layer.handles["weight"]
    plain = not any(one.split or one.transposed for one in (before, layer))
    plain = plain and before.products == layer.products
    return plain and a.bucket is b.bucket and a.offset + a.elements == b.offset


def _together(layers: Sequence[Linear]) -> Tensor:
    """The weights of layers that follow each other as one matrix `[Σn, i]`."""
    first, last = (layer.handles["weight"] for layer in (layers[0], layers[-1]))
    bucket, start = first.bucket, first.offset
    flat = bucket.data[start : last.offset + last.elements]
    matrix = flat.view(-1, first.sharding.local[-1]).requires_grad_(first.trainable)
    if first.trainable:
        hook = partial(_arrived, weakref.ref(bucket), start)
        matrix.register_post_accumulate_grad_hook(hook)
    return matrix


def _arrived(reference: weakref.ref[Bucket], start: int, packed: Tensor) -> None:
    """Move the gradient of packed weights to their bucket."""
    bucket = reference()
    if packed.grad is not None and bucket is not None:
        bucket.queue.arrive(bucket, start, packed.grad)
        packed.grad = None


def _sum(terms: list[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


# ---- several outputs in one buffer ------------------------------------------------------
# Outputs are packed along their features, (b, s, Σn). Where the scatter itself is over features
# each rank must get its part of every output: (b, s, col, Σn/col), scattered along dim 2. kv heads
# that several ranks share are repeated there, once for each rank that needs them.


def _packed(dim: int) -> int:
    return 2 if dim == -1 else dim


def pack(ys: Sequence[Tensor], layers: Sequence[Linear], axis: Axis, dim: int) -> Tensor:
    """Outputs `[b, s, n_i]` before the scatter in one buffer."""
    if dim != -1:
        return ys[0] if len(ys) == 1 else torch.cat(list(ys), -1)
    blocks = []
    for y, layer in zip(ys, layers, strict=True):
        for one in y.unflatten(-1, (layer.count, -1)).unbind(-2):
            block = one.unflatten(-1, (layer.parts, -1))  # (b, s, parts, m)
            blocks.append(block.repeat_interleave(axis.size // layer.parts, 2))  # (b, s, col, m)
    return torch.cat(blocks, -1)


def pack_adjoint(dy: Tensor, layers: Sequence[Linear], axis: Axis, dim: int) -> list[Tensor]:
    """Gradients `[b, s, n_i]` from the gathered buffer: copies of a shared head are added."""
    sizes = _sizes(layers)
    if dim != -1:
        return list(dy.split([sum(of_layer) for of_layer in sizes], -1))
    blocks = iter(dy.split([size for of_layer in sizes for size in of_layer], -1))  # (b, s, col, m)
    out = []
    for layer in layers:
        parts = [
            next(blocks).unflatten(2, (layer.parts, -1)).sum(3).flatten(2)
            for _ in range(layer.count)
        ]
        out.append(torch.cat(parts, -1))
    return out


def unpack(y: Tensor, layers: Sequence[Linear], dim: int) -> list[Tensor]:
    """Outputs of the layers on this rank from the scattered buffer."""
    if dim == -1:
        y = y.squeeze(2)
    return list(y.split([sum(of_layer) for of_layer in _sizes(layers)], -1))


def repack(grads: Sequence[Tensor], layers: Sequence[Linear], dim: int) -> Tensor:
    """Gradients of the outputs on this rank in one buffer, as it was scattered."""
    dy = grads[0] if len(grads) == 1 else torch.cat(list(grads), -1)
    return dy.unsqueeze(2) if dim == -1 else dy


def _sizes(layers: Sequence[Linear]) -> list[list[int]]:
    """Features of each output on this rank, one number for each packed part."""
    return [[layer.output.local[0]] * layer.count for layer in layers]


# ---- prediction -------------------------------------------------------------------------


def _elements(leaf: Leaf, flow: Flow, layers: Sequence[Linear]) -> tuple[Axis, int, Axis, int]:
    """Axes and elements of the gathered input and of the output before its scatter."""
    first = layers[0]
    (from_axis, _), (to_axis, _) = first.steps
    width = leaf.site.grid.axis(*leaf.site.table.axes(first.into)).size
    features = first.handles["weight"].sharding.shape[0 if first.transposed else -1] // width
    x = leaf.tokens(flow, first.into) * features * from_axis.size
    y = (
        leaf.tokens(flow, first.out)
        * sum(sum(of_layer) for of_layer in _sizes(layers))
        * to_axis.size
    )
    return from_axis, x, to_axis, y


def _forward_events(leaf: Leaf, flow: Flow, layers: Sequence[Linear]) -> list[Event]:
    from_axis, x, to_axis, y = _elements(leaf, flow, layers)
    return [
        *leaf.event("all_gather", from_axis, x, flow.itemsize),
        *leaf.event("reduce_scatter", to_axis, y, flow.itemsize),
    ]


def _backward_events(leaf: Leaf, flow: Flow, layers: Sequence[Linear]) -> list[Event]:
    from_axis, x, to_axis, y = _elements(leaf, flow, layers)
    return [
        *leaf.event("all_gather", from_axis, x, flow.itemsize),
        *leaf.event("all_gather", to_axis, y, flow.itemsize),
        *leaf.event("reduce_scatter", from_axis, x, flow.itemsize),
    ]
