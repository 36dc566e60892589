"""Linear layers: all-gather, matmul, reduce-scatter; backward runs the same steps in reverse.

Between the residual stream `[b, s/row, d/col]` and the inside of attention or MLP
`[b/col, s, n/row]` a linear layer changes the layout of tokens and features together. Its weight
`(out, in)` has `out` on one axis and `in` on the other (`sharding.WEIGHT_RULE`). The communication
(`sharding.ShardingTable.linear_comm`) is

    enter (q, k, v, up, head)
        x  -gather seq over row->  [b, s, d/col] · W[n/row, d/col]ᵀ  -scatter over col->      y
    leave (o, down)
        x  -gather over col->      [b, s, n/row] · W[d/col, n/row]ᵀ  -scatter seq over row->  y

where col splits either the batch (`col_splits = samples`) or the features
(`col_splits = features`). With col = depth = 1 these are Megatron's column- and row-parallel layers
with sequence parallelism; with row = col = 1 no activation is communicated and only the gather of
the weight over depth remains, which is ZeRO-3.

A layer from a dim to itself stays in its region. Its in dim is split like its input, its out dim is
not split, and the features of its output are reduce-scattered:

    embed to embed  x · W[d, d/col]ᵀ  -scatter features over col->                  y
    mlp to mlp      x · W[n, n/row]ᵀ  -scatter features over row (or row, col)->    y

Backward gathers the features of dY over the same axes, and computes dX and dW locally.

A dim between these two may be unsplit (a LoRA rank r, `[b/col, s/row, r]` or `[b, s/row, r]`); then
only activations of width r are communicated:

    embed to rank   x · W[r, d/col]ᵀ  -scatter batch (or sum) over col->        y
    rank to inner   x  -gather seq over row->  x · W[n/row, r]ᵀ                 y
    inner to rank   x · W[r, n/row]ᵀ  -scatter seq over row (sum over col)->    y
    rank to embed   x  -gather batch over col->  x · W[d/col, r]ᵀ               y

For few tokens row may split no tokens in the residual stream, `[b, s, d/col]`; then an entering
layer gathers nothing over row, and a leaving layer sums over row by an all-reduce (forward only).

Several layers that read the same input share their communication (`FusedLinear`). There are two
implementations, which tests compare: `parallel_linear_reference`, built from differentiable
collectives, and `_ParallelLinear`, whose backward overlaps communication with computation: X is
re-gathered during the dX matmul, dX is reduced during the dW matmul, and dW is added to the bucket
of the weight, whose reduction over depth overlaps with the following work. For frozen weights X is
neither saved nor re-gathered. A layer whose output is added only after the next module has run
(ladder residual) returns a `nn.pending_output.PendingOutput`, and its reduction overlaps with that
module.

The outputs of several linear layers are packed into one buffer, so that one reduce-scatter is
enough. They are packed along their features, (b, s, Σn). If the scatter is over features, each rank
must get its part of every output: (b, s, col, Σn/col), scattered along dim -2. kv heads that
several ranks share are repeated there, once per rank that needs them. The features of a packed
input `(2, "mlp")` are gathered as (b, s, 2, n), so that each of the packed dims becomes whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ranvier.comm import collectives
from ranvier.comm.autograd import all_gather, copy_to_axis, reduce_from_axis, reduce_scatter
from ranvier.config.plan import RowSplit
from ranvier.cost.linear import LinearCost, LinearWeight
from ranvier.grid import Axis
from ranvier.memory.saved_results import STOP_RECOMPUTATION
from ranvier.nn.example import EXAMPLE_SIZES, LayerExample
from ranvier.nn.layer import LayerContext, ParallelLayer, apply_autograd
from ranvier.nn.matmul import MatmulBackend, PlainMatmul, differentiable_linear, forward, grad_x
from ranvier.nn.pending_output import PendingOutput, PendingReduction
from ranvier.sharding import Dim, LinearComm


@dataclass(frozen=True)
class LinearCommAxes:
    """The communication of a linear layer, with the axes of its grid."""

    comm: LinearComm
    gather: tuple[Axis, int]
    """Axis and dim of the all-gather of the input."""
    scatter: tuple[Axis, int]
    """Axis and dim of the reduce-scatter of the output."""
    copy_axis: Axis
    """Ranks that hold the same input and use it differently (dx is summed over them)."""
    reduce_axis: Axis
    """Ranks that all get the same sum as their output."""
    num_scatter_parts: int
    """Number of distinct parts into which a scatter over features splits the output; smaller than
    the axis if ranks share kv heads."""


@dataclass(frozen=True)
class PackedLayers:
    """Layers `start` to `stop` of a fused layer whose weights are viewed as one matrix."""

    start: int
    stop: int
    matrix: Tensor | None


class Linear(ParallelLayer):
    """A linear layer, y = x Wᵀ + b.

    A layer that enters attention or MLP maps x `[b, s/row, d/col]` to y `[b/col, s, n/row]` or
    `[b, s, n/(row·col)]`; a layer that leaves it has the reverse shapes. In a layer from a dim to
    itself, x and y have the same shape.
    Communicates: all-gather x, reduce-scatter y; backward: all-gather x and dy, reduce-scatter dx.
    From a dim to itself: reduce-scatter y; backward: all-gather dy.

    Args:
        site: Name and context of the layer.
        serial: The `torch.nn.Linear` to replace.
        dims: Names of the dims of the weight, (out, in).
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    is_transposed = False
    """Whether the weight is stored as (in, out)."""

    def __init__(self, site: LayerContext, serial: torch.nn.Module, dims: Sequence[Dim]) -> None:
        super().__init__(site)
        weight = serial.weight
        bias = serial.bias
        assert isinstance(weight, torch.nn.Parameter), type(weight)
        assert bias is None or isinstance(bias, torch.nn.Parameter), type(bias)
        self.linear_weight = LinearWeight(
            tuple(weight.shape),
            tuple(dims),
            site.layout_context,
            weight.requires_grad,
            self.is_transposed,
        )
        self.in_dim = self.linear_weight.in_dim
        self.out_dim = self.linear_weight.out_dim
        self.num_packed = self.linear_weight.num_packed
        self.num_packed_inputs = self.linear_weight.num_packed_inputs
        self.num_row_dims = self.linear_weight.num_row_dims
        self.matrix_shape = self.linear_weight.matrix_shape
        """Output and input features of the matmul on this rank."""
        self.comm_by_row_split = {one: self._resolve_comm(one) for one in get_args(RowSplit)}
        """Communication for each layout of the residual stream."""
        self.defers_reduction = False
        """Whether the reduction of the output runs behind the next module; the output then is a
        `PendingOutput`."""
        self.matmul_backend: MatmulBackend = PlainMatmul()
        """Computes the matmuls, in the dtype of the weights or in float8."""
        # 0.02 is the default; the `init` table of a model overrides it (`initial_mean_std`).
        self.shard_parameter("weight", weight, dims, is_transposed=self.is_transposed, std=0.02)
        self.is_split = self.handles["weight"].is_gathered
        self.shard_parameter(
            "bias",
            bias,
            (self.linear_weight.packed_out_dim,),
            # The bias is split like the output it is added to, so no gather is needed.
            rule=site.table.activation_rule(self.out_dim),
        )
        self.output_sharding = self.linear_weight.output_sharding
        """Sharding of the output features."""
        self.used_slice = self._resolve_used_slice()
        """(dim, start, size) of the part of the weight that this rank uses; None for all of it."""

    @staticmethod
    def example_layers() -> list[LayerExample]:
        """Examples for the generic tests."""
        enter = [("batch", "seq", "embed")]
        return [
            LayerExample(
                lambda twin: twin(16, 32), ("heads", "embed"), enter, [("batch", "seq", "heads")]
            ),
            LayerExample(
                lambda twin: twin(16, 8),
                ("kv_heads", "embed"),
                enter,
                [("batch", "seq", "kv_heads")],
            ),
            LayerExample(
                lambda twin: twin(16, 29, bias=False),
                ("vocab", "embed"),
                enter,
                [("batch", "seq", "vocab")],
            ),
            LayerExample(
                lambda twin: twin(24, 16), ("embed", "mlp"), [("batch", "seq", "mlp")], enter
            ),
            *_same_dim_examples(),
            *_packed_input_examples(),
            *_low_rank_examples(),
        ]

    def _resolve_comm(self, row_splits: RowSplit) -> LinearCommAxes:
        site = self.site
        table = replace(site.table, row_splits=row_splits)
        comm = table.linear_comm(self.out_dim, self.in_dim)
        # Dim 1 is the sequence: if it is already gathered, an axis of one rank makes the gather a
        # no-op.
        gathered = site.whole_sequence and comm.gather.dim == 1
        return LinearCommAxes(
            comm,
            (site.axis(*(() if gathered else comm.gather.axes)), comm.gather.dim),
            (site.axis(*comm.scatter.axes), comm.scatter.dim),
            site.axis(*comm.copy_axes),
            site.axis(*comm.reduce_axes),
            math.prod(
                cut.ranks // cut.replicas
                for cut in self.linear_weight.output_sharding.splits[0]
                if cut.axis in comm.scatter.axes
            ),
        )

    @property
    def linear_comm(self) -> LinearCommAxes:
        """Communication in the current layout of the residual stream."""
        return self.comm_by_row_split[self.site.step_context.row_splits]

    @property
    def comm_axes(self) -> tuple[tuple[Axis, int], tuple[Axis, int]]:
        """(axis, dim) of the all-gather of the input, and of the reduce-scatter of the output."""
        return self.linear_comm.gather, self.linear_comm.scatter

    def _resolve_used_slice(self) -> tuple[int, int, int] | None:
        if self.linear_weight.used_part is None:
            return None
        dim, cut = self.linear_weight.used_part
        # Ranks that share kv heads use the same block, so the index is divided by `replicas`.
        return dim, self.site.grid.index[cut.axis] // cut.replicas * cut.block_size, cut.block_size

    def gather_weight(self) -> Tensor:
        """Returns the weight gathered over depth; differentiable."""
        # All identical blocks share the graph, so it must not read the handle of one of them.
        if not torch.compiler.is_compiling():
            self.handles["weight"].bucket.unshard()
        if self.is_split:
            return self.handles["weight"].unsharded_param()
        return self.weight

    def local_matrix(self, weight: Tensor) -> Tensor:
        """Returns the gathered weight as (out, in), restricted to the part that this rank uses."""
        if self.used_slice is not None:
            weight = weight.narrow(*self.used_slice)
        return self.as_matrix(weight)

    def as_matrix(self, weight: Tensor) -> Tensor:
        """Returns a weight, in which packed dims are two, as (out, in)."""
        matrix = weight.flatten(0, self.num_row_dims - 1).flatten(1)
        if self.is_transposed:
            return matrix.T
        return matrix

    def weight_grad(self, x: Tensor, dy: Tensor) -> Tensor:
        """Returns dW in the stored shape of the weight."""
        x = x.flatten(0, -2)
        dy = dy.flatten(0, -2)
        if self.is_transposed:
            grad = x.T @ dy
        else:
            grad = self.matmul_backend.grad_w(dy, x)
        shape = self.handles["weight"].sharding.unsharded_shape
        if self.used_slice is None:
            return grad.view(shape)
        # Rows or columns that this rank does not use get a zero gradient.
        whole = grad.new_zeros(shape)
        whole.narrow(*self.used_slice).copy_(grad.view(self.linear_weight.used_shape))
        return whole

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer to x, this rank's part of the input."""
        with self.trace_scope():
            if self.defers_reduction and can_defer_reduction(self):
                # It is used like a tensor.
                return start_linear(x, self, self.site)  # type: ignore[return-value]
            (y,) = parallel_linear(x, [self], self.site, [])
        # Padding columns (from an out dim that the axis does not divide) must not reach the caller.
        # In training they remain, as the loss ignores them.
        if not torch.is_grad_enabled():
            y = y[
                ...,
                : self.output_sharding.shard_at(self.site.grid.index).valid_shape[0]
                * self.num_packed,
            ]
        return y

    @property
    def weight_in_layout(self) -> LinearWeight:
        """The weight in the current layout of the residual stream."""
        return replace(self.linear_weight, layout_context=self.site.layout_context)

    @property
    def cost_model(self) -> LinearCost:
        """Cost of the all-gather of x, the matmul and the reduce-scatter of y."""
        return self.fused_cost_model([self])

    def fused_cost_model(self, layers: Sequence[Linear], *, apart: bool = False) -> LinearCost:
        """Returns the cost model of several layers that run together; this is the first."""
        factors = tuple(layer.weight_in_layout for layer in layers)
        whole = self.site.whole_sequence
        return LinearCost(
            self.site.name,
            self.site.layout_context,
            factors,
            apart,
            whole,
            defers_reduction=self.defers_reduction,
        )


def _same_dim_examples() -> list[LayerExample]:
    """Returns layers from a dim to itself, with packed inputs and outputs."""
    made = []
    for name, size in (("embed", 16), ("heads", 32), ("mlp", 24)):
        x = ("batch", "seq", name)
        made.append(LayerExample(_layer_factory(size, size, bias=True), (name, name), [x], [x]))
    x = ("batch", "seq", "embed")
    pair: Sequence[Dim] = ("batch", "seq", (2, "embed"))
    triple: Sequence[Dim] = ("batch", "seq", (3, "embed"))
    return [
        *made,
        LayerExample(_layer_factory(32, 16), ("embed", (2, "embed")), [pair], [x]),
        LayerExample(
            _layer_factory(32, 48, bias=True), ((3, "embed"), (2, "embed")), [pair], [triple]
        ),
    ]


def _packed_input_examples() -> list[LayerExample]:
    """Returns layers that leave, enter and reduce the dims of a packed input."""
    outer = ("batch", "seq", "embed")
    inner = ("batch", "seq", "mlp")
    pair: Sequence[Dim] = ("batch", "seq", (2, "mlp"))
    return [
        LayerExample(_layer_factory(48, 16), ("embed", (2, "mlp")), [pair], [outer]),
        LayerExample(
            _layer_factory(32, 24), ("mlp", (2, "embed")), [("batch", "seq", (2, "embed"))], [inner]
        ),
        LayerExample(
            _layer_factory(48, 3), ("rank", (2, "mlp")), [pair], [("batch", "seq", "rank")]
        ),
    ]


def _low_rank_examples() -> list[LayerExample]:
    """Returns layers from and to an unsplit dim; no axis divides its size 3, so depth pads it."""
    sizes = {**EXAMPLE_SIZES, "rank": 3}
    outer = ("batch", "seq", "embed")
    rank = ("batch", "seq", "rank")
    made = []
    for name, size in (("embed", 16), ("heads", 32), ("kv_heads", 8), ("mlp", 24)):
        if name == "embed":
            other = outer
        else:
            other = ("batch", "seq", name)
        made.append(LayerExample(_layer_factory(3, size), (name, "rank"), [rank], [other], sizes))
        # No layer reads kv_heads as its input.
        if name != "kv_heads":
            made.append(
                LayerExample(_layer_factory(size, 3), ("rank", name), [other], [rank], sizes)
            )
    return made


def _layer_factory(into: int, out: int, *, bias: bool = False) -> Callable[[Any], torch.nn.Module]:
    return lambda twin: twin(into, out, bias=bias)


class Conv1D(Linear):
    """A `Linear` layer whose weight is stored as (in, out), as in Hugging Face's GPT-2."""

    is_transposed = True


# ---- matmul with communication ----------------------------------------------------------


def parallel_linear(
    x: Tensor,
    layers: Sequence[Linear],
    site: LayerContext,
    runs: Sequence[PackedLayers],
    *,
    apart: bool = False,
) -> tuple[Tensor, ...]:
    """Applies several layers to x. apart: each layer reads its own part of x, not all of it.

    Communicates: the collectives of one `Linear`.
    """
    if torch.compiler.is_compiling() or not site.step_context.overlapped_autograd:
        ys = parallel_linear_reference(x, layers, runs, apart)
    elif not torch.is_grad_enabled() and site.grid.trace.saved_results is None:
        ys = list(_linear_forward(x, layers, apart, runs))
    else:
        try:
            ys = apply_autograd(
                _ParallelLinear, x, layers, site, apart, *[layer.weight for layer in layers]
            )
        except STOP_RECOMPUTATION:
            # torch stopped the recomputation here: backward needs no result from here on. This is
            # also true in later steps, which then save only the shape of the result.
            site.step_context.save_policy.unneeded_layers.add(site.name)
            raise
    return tuple(
        y if layer.bias is None else y + layer.bias.flatten()
        for y, layer in zip(ys, layers, strict=True)
    )


def parallel_linear_reference(
    x: Tensor, layers: Sequence[Linear], runs: Sequence[PackedLayers], apart: bool = False
) -> list[Tensor]:
    """The same computation with differentiable collectives, which tests use as the reference."""
    (from_axis, from_dim), (to_axis, to_dim) = layers[0].comm_axes
    x = unpack_input(copy_to_axis(x, layers[0].linear_comm.copy_axis), layers, from_dim)
    x = pack_input(all_gather(x, from_axis, from_dim), layers, from_dim)
    xs = _split_input(x, layers, apart)
    ys: list[Tensor] = []
    # The empty run at the end makes the loop include the layers after the last packed run.
    for run in [*runs, PackedLayers(len(layers), len(layers), None)]:
        for layer in layers[len(ys) : run.start]:
            ys.append(
                differentiable_linear(
                    xs[len(ys)], layer.local_matrix(layer.gather_weight()), layer.matmul_backend
                )
            )
        if run.matrix is not None:
            sizes = [one.matrix_shape[0] for one in layers[run.start : run.stop]]
            ys += differentiable_linear(xs[0], run.matrix, layers[run.start].matmul_backend).split(
                sizes, -1
            )
    if to_axis.size == layers[0].linear_comm.reduce_axis.size == 1:
        return ys
    y = reduce_scatter(pack_outputs(ys, layers, to_axis, to_dim), to_axis, buffer_dim(to_dim))
    return unpack_outputs(reduce_from_axis(y, layers[0].linear_comm.reduce_axis), layers, to_dim)


def _split_input(x: Tensor, layers: Sequence[Linear], apart: bool) -> list[Tensor]:
    """Returns the part of the gathered input that each layer reads."""
    if apart:
        return list(x.chunk(len(layers), -1))
    return [x] * len(layers)


def can_defer_reduction(layer: Linear) -> bool:
    """Whether a layer has a reduction, and runs outside of graphs and of the reference."""
    comm = layer.linear_comm
    return (
        comm.scatter[0].size * comm.reduce_axis.size > 1
        and layer.site.step_context.overlapped_autograd
        and not torch.compiler.is_compiling()
    )


def start_linear(x: Tensor, layer: Linear, site: LayerContext) -> PendingOutput:
    """Applies a layer to x up to its reduction, which is started.

    Communicates: all-gather x, starts the reduce-scatter of y; backward: as a `Linear`.
    """
    comm = layer.linear_comm
    (to_axis, to_dim), overlap = comm.scatter, site.bucket_scheduler.overlap
    reduction = PendingReduction(
        to_axis, buffer_dim(to_dim), comm.reduce_axis, allow_overlap="residual" in overlap
    )
    if layer.bias is None:
        bias = None
    else:
        bias = layer.bias.flatten()
    if not torch.is_grad_enabled():
        reduction.start_reduction(_product_to_reduce(x, [layer], False))
        return PendingOutput(reduction, None, bias)
    if site.step_context.is_recompute:
        unneeded = x.new_full((), torch.nan)
    else:
        unneeded = None
    link = apply_autograd(_StartLinear, x, layer, site, reduction, layer.weight)
    return PendingOutput(reduction, link, bias, unneeded)


class _ParallelLinear(torch.autograd.Function):
    """The linear layer with overlapped communication.

    Gradients of weights are accumulated into buckets, not returned to autograd.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        layers: Sequence[Linear],
        site: LayerContext,
        apart: bool,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        # Only dW needs X, and the sharded X is enough: backward gathers it again.
        if _needs_weight_grad(layers):
            ctx.save_for_backward(x)
        ctx.layers = layers
        ctx.site = site
        ctx.apart = apart
        results = site.grid.trace.saved_results
        work = partial(_linear_forward, x, layers, apart)
        # Outside of a recomputed block no result is saved or reused.
        if results is None:
            return work()
        if not layers[0].fused_cost_model(layers).saves_output(x.shape[-1], results.selective):
            return work()
        ys: tuple[Tensor, ...] = results.run_once(work)
        return ys

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (to_axis, to_dim) = ctx.layers[0].linear_comm.scatter

        def gather_grads() -> list[Tensor]:
            if to_axis.size == 1:
                return list(grads)
            return _gather_output_grads(grads, ctx.layers, to_axis, to_dim)

        return _linear_backward(ctx, gather_grads)


class _StartLinear(torch.autograd.Function):
    """The linear layer up to its reduction; `_FinishReduction` has the other end.

    Backward waits for the all-gather of the gradient that the other end has started.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        layer: Linear,
        site: LayerContext,
        reduction: PendingReduction,
        weight: Tensor,
    ) -> Tensor:
        if _needs_weight_grad([layer]):
            ctx.save_for_backward(x)
        ctx.layers = [layer]
        ctx.site = site
        ctx.apart = False
        ctx.reduction = reduction
        if not site.step_context.is_recompute:
            # A recomputation does not need the product, so nothing inside is saved for it.
            with site.grid.trace.outside_block(), collectives.hide_from_dispatch_modes():
                reduction.start_reduction(_product_to_reduce(x, [layer], False))
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, link: Tensor) -> tuple[Tensor | None, ...]:
        layers = ctx.layers
        to_axis, to_dim = layers[0].linear_comm.scatter
        dx, *_ = _linear_backward(
            ctx,
            lambda: unpack_output_grads(ctx.reduction.wait(), layers, to_axis, to_dim),
        )
        return dx, None, None, None, None


def _linear_backward(
    ctx: Any, gather_grads: Callable[[], list[Tensor]]
) -> tuple[Tensor | None, ...]:
    """Returns dX, and None for the other inputs of `_ParallelLinear`; adds dW to the buckets.

    gather_grads: returns the gradient of each layer's full output.
    Communicates: all-gather x, reduce-scatter dx.
    """
    layers = ctx.layers
    site = ctx.site
    hide = "dx" in site.bucket_scheduler.overlap
    from_axis, from_dim = layers[0].linear_comm.gather
    with site.grid.trace.named_scope(site.name):
        # 1. Re-gather X; the transfer overlaps with the dX matmul below.
        again = None
        if _needs_weight_grad(layers):
            # Detached: a deferred dW must not keep the autograd graph alive.
            x = ctx.saved_tensors[0].detach()
            again = collectives.all_gather(unpack_input(x, layers, from_dim), from_axis, from_dim)
        if again is not None and not hide:
            again.wait()
        # 2. Gather dY: the reverse of the reduce-scatter of the output.
        dys = gather_grads()
        # 3. Compute dX, which is reduced while dW is computed.
        pending = None
        if ctx.needs_input_grad[0]:
            terms = [
                grad_x(
                    d,
                    layer.local_matrix(layer.handles["weight"].unsharded_data()),
                    layer.matmul_backend,
                )
                for d, layer in zip(dys, layers, strict=True)
            ]
            if ctx.apart:
                dx = torch.cat(terms, -1)
            else:
                dx = _sum_tensors(terms)
            pending = collectives.reduce_scatter(
                unpack_input(dx, layers, from_dim), from_axis, from_dim
            )
            if not hide:
                pending.wait()
        if again is not None:
            # 4. Compute dW now, or later if the pipeline schedule defers it.
            x = pack_input(again.wait(), layers, from_dim)
            xs = _split_input(x, layers, ctx.apart)
            site.step_context.run_or_defer(partial(_accumulate_weight_grads, site, layers, xs, dys))
        none = [None] * (3 + len(layers))
        if pending is None:
            return None, *none
        dx = pack_input(pending.wait(), layers, from_dim)
        return collectives.all_reduce(dx, layers[0].linear_comm.copy_axis).wait(), *none


def _linear_forward(
    x: Tensor, layers: Sequence[Linear], apart: bool, runs: Sequence[PackedLayers] = ()
) -> tuple[Tensor, ...]:
    """Runs the forward pass outside of autograd. Communicates: all-gather x, reduce-scatter y."""
    to_axis, to_dim = layers[0].linear_comm.scatter
    ys = _local_products(x, layers, apart, runs)
    if to_axis.size == layers[0].linear_comm.reduce_axis.size == 1:
        return tuple(ys)
    packed = pack_outputs(ys, layers, to_axis, to_dim)
    # `packed` is a copy if there are several outputs; free the originals before the scatter.
    del ys
    y = collectives.reduce_scatter(packed, to_axis, buffer_dim(to_dim)).wait()
    return tuple(
        unpack_outputs(
            collectives.all_reduce(y, layers[0].linear_comm.reduce_axis).wait(), layers, to_dim
        )
    )


def _product_to_reduce(x: Tensor, layers: Sequence[Linear], apart: bool) -> Tensor:
    """Returns the packed outputs before their reduction. Communicates: all-gather x."""
    to_axis, to_dim = layers[0].linear_comm.scatter
    return pack_outputs(_local_products(x, layers, apart), layers, to_axis, to_dim)


def _local_products(
    x: Tensor, layers: Sequence[Linear], apart: bool, runs: Sequence[PackedLayers] = ()
) -> list[Tensor]:
    """Returns the products of the layers, not reduced. Communicates: all-gather x."""
    from_axis, from_dim = layers[0].linear_comm.gather
    x = unpack_input(x, layers, from_dim)
    x = pack_input(collectives.all_gather(x, from_axis, from_dim).wait(), layers, from_dim)
    xs = _split_input(x, layers, apart)
    packed_runs = {run.start: run for run in runs}
    ys: list[Tensor] = []
    while len(ys) < len(layers):
        layer = layers[len(ys)]
        run = packed_runs.get(len(ys))
        weight = layer.handles["weight"].unsharded_data()
        if run is not None and run.matrix is not None:
            sizes = [one.matrix_shape[0] for one in layers[run.start : run.stop]]
            y = forward(xs[0], run.matrix, layer.matmul_backend)
            ys += y.split(sizes, -1)
        else:
            matrix = layer.local_matrix(weight)
            ys.append(forward(xs[len(ys)], matrix, layer.matmul_backend))
    return ys


def _gather_output_grads(
    grads: Sequence[Tensor], layers: Sequence[Linear], axis: Axis, dim: int
) -> list[Tensor]:
    """Returns the gradients of each layer's full output; frees the gathered buffer on return.

    Communicates: all-gather over axis.
    """
    whole = collectives.all_gather(
        pack_output_grads(grads, layers, dim), axis, buffer_dim(dim)
    ).wait()
    return unpack_output_grads(whole, layers, axis, dim)


def _needs_weight_grad(layers: Sequence[Linear]) -> bool:
    """Whether any weight of the layers is trainable."""
    return any(layer.handles["weight"].trainable for layer in layers)


def _accumulate_weight_grads(
    site: LayerContext, layers: Sequence[Linear], xs: Sequence[Tensor], dys: Sequence[Tensor]
) -> None:
    """Adds dW to the buckets. Communicates: reduce-scatter over depth, by bucket, later."""
    with site.grid.trace.record_compute(f"dW {site.name}"):
        for layer, x, dy in zip(layers, xs, dys, strict=True):
            weight = layer.handles["weight"]
            if weight.trainable:
                weight.accumulate_grad(layer.weight_grad(x, dy))


def _sum_tensors(terms: list[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def unpack_input(x: Tensor, layers: Sequence[Linear], dim: int) -> Tensor:
    """Returns a packed input `[b, s, p·n]` as `[b, s, p, n]`, if its features are gathered."""
    packed = layers[0].num_packed_inputs
    if dim != -1 or packed == 1:
        return x
    return x.view(*x.shape[:-1], packed, -1)


def pack_input(x: Tensor, layers: Sequence[Linear], dim: int) -> Tensor:
    """The reverse of `unpack_input`."""
    if dim != -1 or layers[0].num_packed_inputs == 1:
        return x
    return x.flatten(-2)


def buffer_dim(dim: int) -> int:
    """Returns the dim of the packed buffer that is scattered."""
    if dim == -1:
        return -2
    return dim


def pack_outputs(ys: Sequence[Tensor], layers: Sequence[Linear], axis: Axis, dim: int) -> Tensor:
    """Packs outputs `[b, s, n_i]` into one buffer before the reduce-scatter."""
    if dim != -1:
        if len(ys) == 1:
            return ys[0]
        return torch.cat(list(ys), -1)
    blocks = []
    for y, layer in zip(ys, layers, strict=True):
        # Parts of a packed weight (such as gate and up in one matrix) are each split over the axis.
        for one in y.unflatten(-1, (layer.num_packed, -1)).unbind(-2):
            block = one.unflatten(-1, (layer.linear_comm.num_scatter_parts, -1))
            # Fewer parts than ranks: neighbouring ranks share a kv head and get a copy each.
            copies = axis.size // layer.linear_comm.num_scatter_parts
            blocks.append(block if copies == 1 else block.repeat_interleave(copies, -2))
    return _concat_features(blocks)  # (b, s, col, m)


def unpack_output_grads(dy: Tensor, layers: Sequence[Linear], axis: Axis, dim: int) -> list[Tensor]:
    """Returns gradients `[b, s, n_i]` from the gathered buffer; sums copies of shared heads."""
    sizes = output_widths(layers)
    if dim != -1:
        return list(dy.split([sum(of_layer) for of_layer in sizes], -1))
    blocks = iter(dy.split([size for of_layer in sizes for size in of_layer], -1))  # (b, s, col, m)
    out = []
    for layer in layers:
        each = [
            next(blocks).unflatten(-2, (layer.linear_comm.num_scatter_parts, -1))
            for _ in range(layer.num_packed)
        ]
        # The reverse of the copies in `pack_outputs`.
        parts = [x.squeeze(-2) if x.shape[-2] == 1 else x.sum(-2) for x in each]
        out.append(_concat_features([x.flatten(-2) for x in parts]))
    return out


def _concat_features(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates along features; a single part is not copied."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts), -1)


def unpack_outputs(y: Tensor, layers: Sequence[Linear], dim: int) -> list[Tensor]:
    """Returns the outputs of the layers on this rank from the scattered buffer."""
    if dim == -1:
        y = y.squeeze(-2)
    return list(y.split([sum(of_layer) for of_layer in output_widths(layers)], -1))


def pack_output_grads(grads: Sequence[Tensor], layers: Sequence[Linear], dim: int) -> Tensor:
    """Packs the gradients of this rank's outputs in the format that `unpack_outputs` reads."""
    if len(grads) == 1:
        dy = grads[0]
    else:
        dy = torch.cat(list(grads), -1)
    if dim == -1:
        return dy.unsqueeze(-2)
    return dy


def output_widths(layers: Sequence[Linear]) -> list[list[int]]:
    """Returns the features of each output on this rank, one number per packed part."""
    return [[layer.output_sharding.local_shape[0]] * layer.num_packed for layer in layers]
