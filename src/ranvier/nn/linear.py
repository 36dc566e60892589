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

Between these two a dim may be whole (a LoRA rank r, `[b/col, s/row, r]` or `[b, s/row, r]`), and
only activations of the rank are moved:

    embed to rank   x · W[r, d/col]ᵀ  -scatter batch (or sum) over col->        y
    rank to inner   x  -gather seq over row->  x · W[n/row, r]ᵀ                 y
    inner to rank   x · W[r, n/row]ᵀ  -scatter seq over row (sum over col)->    y
    rank to embed   x  -gather batch over col->  x · W[d/col, r]ᵀ               y

Several layers that read the same value share their communication (`Siblings`). Two implementations,
held equal by the tests: `reference` in differentiable pairs, and `_Product`, whose backward
overlaps: X is gathered again while dX is multiplied, dX is reduced while dW is multiplied, and dW
goes to the weight's bucket, whose reduction over depth runs on behind everything that follows. Of
frozen weights X is neither kept nor gathered again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ranvier.comm import collectives
from ranvier.comm.autograd import gather, share, sum_scatter, total
from ranvier.cost.linear import Factor, Product
from ranvier.grid import Axis
from ranvier.memory.saved_results import STOPPED
from ranvier.nn.example import SIZES, Example
from ranvier.nn.layer import Leaf, Site, applied
from ranvier.nn.linear_outputs import buffer_dim, pack, pack_adjoint, repack, unpack
from ranvier.nn.matmul import Plain, Products, forward, grad_x, multiply
from ranvier.sharding import Dim


@dataclass(frozen=True)
class Run:
    """Layers `start` to `stop` of siblings, whose weights are one matrix."""

    start: int
    stop: int
    matrix: Tensor | None


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
        weight, bias = serial.weight, serial.bias
        assert isinstance(weight, torch.nn.Parameter), type(weight)
        assert bias is None or isinstance(bias, torch.nn.Parameter), type(bias)
        self.factor = Factor(
            tuple(weight.shape), tuple(dims), site.ground, weight.requires_grad, self.transposed
        )
        self.into, self.out = self.factor.into, self.factor.out
        self.count, self.move = self.factor.count, self.factor.move
        self.steps = self._steps()
        """Axis and dim of the gather of the input, and of the scatter of the output."""
        self.share_axis = site.axis(*filter(None, [self.move.share]))
        """Ranks that have the same input and use it differently."""
        self.total_axis = site.axis(*filter(None, [self.move.total]))
        """Ranks that get the same sum as their output."""
        self.products: Products = Plain()
        """How it multiplies."""
        self.place("weight", weight, dims, std=0.02)
        self.split = self.handles["weight"].split
        self.place("bias", bias, (self.factor.packed,), rule=site.table.region(self.out))
        self.output = self.factor.output
        """Sharding of the output features."""
        self.part = self._part()
        """Dim, start and size of what of its matrix a rank uses; None: all of it."""

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
            *_ranked(),
        ]

    def _steps(self) -> tuple[tuple[Axis, int], tuple[Axis, int]]:
        move, site = self.move, self.site
        gathered = site.whole_sequence and move.gather.dim == 1
        from_axis, to_axis = (
            site.axis(*filter(None, [step.axis])) for step in (move.gather, move.scatter)
        )
        return (site.axis() if gathered else from_axis, move.gather.dim), (
            to_axis,
            move.scatter.dim,
        )

    def _part(self) -> tuple[int, int, int] | None:
        if self.factor.part is None:
            return None
        dim, cut = self.factor.part
        return dim, self.site.grid.index[cut.axis] // cut.share * cut.block, cut.block

    @property
    def parts(self) -> int:
        """Different parts into which the scatter over features cuts the output.

        Shared kv heads: fewer.
        """
        cuts = [cut for cut in self.output.cuts[0] if cut.axis == self.move.scatter.axis]
        return cuts[0].ranks // cuts[0].share if cuts else 1

    def gathered(self) -> Tensor:
        """The weight gathered over depth, in autograd; a graph for all blocks reads no handle."""
        if not torch.compiler.is_compiling():
            self.handles["weight"].bucket.arrive()
        return self.handles["weight"].gathered() if self.split else self.weight

    def matrix(self, weight: Tensor) -> Tensor:
        """The weight as (out, in), what I use of it."""
        matrix = weight.flatten(1).T if self.transposed else weight.flatten(0, -2)
        return matrix if self.part is None else matrix.narrow(*self.part)

    def matrix_grad(self, x: Tensor, dy: Tensor) -> Tensor:
        """dW in the shape in which the weight is stored."""
        x, dy = x.flatten(0, -2), dy.flatten(0, -2)
        grad = x.T @ dy if self.transposed else self.products.grad_w(dy, x)
        shape = self.handles["weight"].sharding.gathered
        if self.part is not None:
            part, grad = grad, grad.new_zeros(shape)
            grad.narrow(*self.part).copy_(part)
        return grad.view(shape)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        with self.here():
            (y,) = product(x, [self], self.site, [])
        if not torch.is_grad_enabled():  # nobody shall see padding; the loss leaves it out itself
            y = y[..., : self.output.place(self.site.grid.index).valid[0] * self.count]
        return y

    @property
    def layer(self) -> Product:
        """Gather x, scatter y."""
        return self.together([self])

    def together(self, layers: Sequence[Linear], *, apart: bool = False) -> Product:
        """What predicts the product of layers, of which this is the first."""
        factors, whole = tuple(layer.factor for layer in layers), self.site.whole_sequence
        return Product(self.site.name, self.site.ground, factors, apart, whole)


def _ranked() -> list[Example]:
    """Layers from and to a dim that is whole; 3 fit no axis, so that depth pads."""
    sizes = {**SIZES, "rank": 3}
    outer, rank = ("batch", "seq", "embed"), ("batch", "seq", "rank")
    made = []
    for name, size in (("embed", 16), ("heads", 32), ("kv_heads", 8), ("mlp", 24)):
        other = outer if name == "embed" else ("batch", "seq", name)
        made.append(Example(_between(3, size), (name, "rank"), [rank], [other], sizes))
        if name != "kv_heads":  # nothing reads these
            made.append(Example(_between(size, 3), ("rank", name), [other], [rank], sizes))
    return made


def _between(into: int, out: int) -> Callable[[Any], torch.nn.Module]:
    return lambda twin: twin(into, out, bias=False)


class Conv1D(Linear):
    """A linear layer whose weight is stored as (in, out), as in Hugging Face's GPT-2."""

    transposed = True


# ---- the product ------------------------------------------------------------------------


def product(
    x: Tensor, layers: Sequence[Linear], site: Site, runs: Sequence[Run], *, apart: bool = False
) -> tuple[Tensor, ...]:
    """x times the weights of layers that read it, or a part of it each. Communicates: as Linear."""
    if torch.compiler.is_compiling() or not site.fast:
        ys = reference(x, layers, runs, apart)
    else:
        try:
            ys = applied(_Product, x, layers, site, apart, *[layer.weight for layer in layers])
        except STOPPED:  # here, as backward needs nothing behind it: nor will it next time
            site.moment.keeping.spare.add(site.name)
            raise
    return tuple(
        y if layer.bias is None else y + layer.bias.flatten()
        for y, layer in zip(ys, layers, strict=True)
    )


def reference(
    x: Tensor, layers: Sequence[Linear], runs: Sequence[Run], apart: bool = False
) -> list[Tensor]:
    """The product in differentiable pairs."""
    (from_axis, from_dim), (to_axis, to_dim) = layers[0].steps
    xs = _read(gather(share(x, layers[0].share_axis), from_axis, from_dim), layers, apart)
    ys: list[Tensor] = []
    for run in [*runs, Run(len(layers), len(layers), None)]:
        for layer in layers[len(ys) : run.start]:
            ys.append(multiply(xs[len(ys)], layer.matrix(layer.gathered()), layer.products))
        if run.matrix is not None:
            sizes = [layer.weight.flatten(0, -2).shape[0] for layer in layers[run.start : run.stop]]
            ys += multiply(xs[0], run.matrix, layers[run.start].products).split(sizes, -1)
    if to_axis.size == layers[0].total_axis.size == 1:
        return ys
    y = sum_scatter(pack(ys, layers, to_axis, to_dim), to_axis, buffer_dim(to_dim))
    return unpack(total(y, layers[0].total_axis), layers, to_dim)


def _read(x: Tensor, layers: Sequence[Linear], apart: bool) -> list[Tensor]:
    """What each layer reads of the gathered input."""
    return list(x.chunk(len(layers), -1)) if apart else [x] * len(layers)


class _Product(torch.autograd.Function):
    """The product with its communication overlapped.

    Gradients of weights are delivered, not returned.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layers: Sequence[Linear], site: Site, apart: bool, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        if _trained(layers):
            ctx.save_for_backward(x)
        ctx.layers, ctx.site, ctx.apart = layers, site, apart
        results, work = site.grid.trace.results, partial(_multiplied, x, layers, apart)
        if results is None:
            return work()
        if not layers[0].together(layers).output_kept(x.shape[-1], results.selective):
            return work()
        ys: tuple[Tensor, ...] = results.once(work)
        return ys

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        layers, site = ctx.layers, ctx.site
        trace, hide = site.grid.trace, "dx" in site.queue.overlap
        (from_axis, from_dim), (to_axis, to_dim) = layers[0].steps
        with trace.at(site.name):
            again = None
            if _trained(layers):  # X once more, behind the dX matmul
                x = ctx.saved_tensors[0].detach()  # what waits for dW shall not hold the graph
                again = collectives.all_gather(x, from_axis, from_dim)
            if again is not None and not hide:
                again.wait()
            dys = list(grads)
            if to_axis.size > 1:
                dys = _gathered(grads, layers, to_axis, to_dim)
            pending = None
            if ctx.needs_input_grad[0]:
                terms = [
                    grad_x(d, layer.matrix(layer.handles["weight"].whole()), layer.products)
                    for d, layer in zip(dys, layers, strict=True)
                ]
                dx = torch.cat(terms, -1) if ctx.apart else _sum(terms)
                # in flight while dW is computed
                pending = collectives.reduce_scatter(dx, from_axis, from_dim)
                if not hide:
                    pending.wait()
            if again is not None:
                xs = _read(again.wait(), layers, ctx.apart)
                site.moment.do(partial(_deliver, site, layers, xs, dys))
            none = [None] * (3 + len(layers))
            if pending is None:
                return None, *none
            return collectives.all_reduce(pending.wait(), layers[0].share_axis).wait(), *none


def _multiplied(x: Tensor, layers: Sequence[Linear], apart: bool) -> tuple[Tensor, ...]:
    """The forward pass of a product."""
    (from_axis, from_dim), (to_axis, to_dim) = layers[0].steps
    xs = _read(collectives.all_gather(x, from_axis, from_dim).wait(), layers, apart)
    ys = [
        forward(part, layer.matrix(layer.handles["weight"].whole()), layer.products)
        for part, layer in zip(xs, layers, strict=True)
    ]
    if to_axis.size == layers[0].total_axis.size == 1:
        return tuple(ys)
    packed = pack(ys, layers, to_axis, to_dim)
    del ys  # what is scattered is a copy
    y = collectives.reduce_scatter(packed, to_axis, buffer_dim(to_dim)).wait()
    return tuple(unpack(collectives.all_reduce(y, layers[0].total_axis).wait(), layers, to_dim))


def _gathered(
    grads: Sequence[Tensor], layers: Sequence[Linear], axis: Axis, dim: int
) -> list[Tensor]:
    """Gradients of each layer's outputs, of all ranks: no buffer outlives this.

    Communicates: all-gather over axis.
    """
    whole = collectives.all_gather(repack(grads, layers, dim), axis, buffer_dim(dim)).wait()
    return pack_adjoint(whole, layers, axis, dim)


def _trained(layers: Sequence[Linear]) -> bool:
    """Whether a weight of the layers gets a gradient."""
    return any(layer.handles["weight"].trainable for layer in layers)


def _deliver(
    site: Site, layers: Sequence[Linear], xs: Sequence[Tensor], dys: Sequence[Tensor]
) -> None:
    """Gradients of the weights. Communicates: reduce-scatter over depth, by bucket, later."""
    with site.grid.trace.compute(f"dW {site.name}"):
        for layer, x, dy in zip(layers, xs, dys, strict=True):
            weight = layer.handles["weight"]
            if weight.trainable:
                weight.deliver(layer.matrix_grad(x, dy))


def _sum(terms: list[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
