"""Linear layers: all-gather, matmul, reduce-scatter; backward runs the same steps in reverse.

Between the residual stream `[b, s/row, d/col]` and the inside of attention or MLP
`[b/col, s, n/row]` a linear layer moves tokens and features at once. Its weight `(out, in)` has
`out` on one axis and `in` on the other (`sharding.WEIGHT_RULE`), so
(`sharding.ShardingTable.linear_comm`)

    enter (q, k, v, up, head)
        x  -gather seq over row->  [b, s, d/col] · W[n/row, d/col]ᵀ  -scatter over col->      y
    leave (o, down)
        x  -gather over col->      [b, s, n/row] · W[d/col, n/row]ᵀ  -scatter seq over row->  y

where over col either the batch is moved (`col_splits = samples`) or the features
(`col_splits = features`). With col = depth = 1 these are Megatron's column- and row-parallel layers
with sequence parallelism; with row = col = 1 no activation is moved and only the gather of the
weight over depth remains, which is ZeRO-3.

A dim between these two may be unsplit (a LoRA rank r, `[b/col, s/row, r]` or `[b, s/row, r]`); then
only activations of width r are moved:

    embed to rank   x · W[r, d/col]ᵀ  -scatter batch (or sum) over col->        y
    rank to inner   x  -gather seq over row->  x · W[n/row, r]ᵀ                 y
    inner to rank   x · W[r, n/row]ᵀ  -scatter seq over row (sum over col)->    y
    rank to embed   x  -gather batch over col->  x · W[d/col, r]ᵀ               y

Several layers that read the same value share their communication (`FusedLinear`). There are two
implementations, tested for equality: `parallel_linear_reference`, built from differentiable
collectives, and `_ParallelLinear`, whose backward overlaps: X is re-gathered during the dX matmul,
dX is reduced during the dW matmul, and dW goes to the weight's bucket, whose reduction over depth
overlaps with everything that follows. For frozen weights X is neither saved nor re-gathered.

Outputs of several linear layers packed into one buffer, so that one reduce-scatter serves all.

Outputs are packed along their features, (b, s, Σn). Where the scatter itself is over features, each
rank must get its part of every output: (b, s, col, Σn/col), scattered along dim 2. kv heads that
several ranks share are repeated there, once for each rank that needs them.
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
from ranvier.comm.autograd import all_gather, copy_to_axis, reduce_from_axis, reduce_scatter
from ranvier.cost.linear import LinearCost, LinearWeight
from ranvier.grid import Axis
from ranvier.memory.saved_results import STOP_RECOMPUTATION
from ranvier.nn.example import EXAMPLE_SIZES, LayerExample
from ranvier.nn.layer import LayerContext, ParallelLayer, apply_autograd
from ranvier.nn.matmul import MatmulBackend, PlainMatmul, differentiable_linear, forward, grad_x
from ranvier.sharding import Dim


@dataclass(frozen=True)
class PackedLayers:
    """Layers `start` to `stop` of a fused layer whose weights are viewed as one matrix."""

    start: int
    stop: int
    matrix: Tensor | None


class Linear(ParallelLayer):
    """y = x Wᵀ + b.

    enter: x `[b, s/row, d/col]`, y `[b/col, s, n/row]` or `[b, s, n/(row·col)]`.
    leave: the reverse.
    Communicates: all-gather x, reduce-scatter y; backward: all-gather x and dy, reduce-scatter dx.
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
        self.linear_comm = self.linear_weight.linear_comm
        self.comm_axes = self._resolve_comm_axes()
        """Axis and dim of the input's all-gather, and of the output's reduce-scatter."""
        self.copy_axis = site.axis(*filter(None, [self.linear_comm.copy_axis]))
        """Ranks that hold the same input and use it differently (dx is summed over them)."""
        self.reduce_axis = site.axis(*filter(None, [self.linear_comm.reduce_axis]))
        """Ranks that all get the same sum as their output."""
        self.matmul_backend: MatmulBackend = PlainMatmul()
        """How the matmuls are computed: plain, or float8."""
        # 0.02 is only the default; a model's `init` table overrides it
        # (`LayerContext.initial_mean_std`).
        self.shard_parameter("weight", weight, dims, std=0.02)
        self.is_split = self.handles["weight"].is_depth_sharded
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
        """Dim, start and size of the part of the matrix that this rank uses; None: all of it."""

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
            *_low_rank_examples(),
        ]

    def _resolve_comm_axes(self) -> tuple[tuple[Axis, int], tuple[Axis, int]]:
        move = self.linear_comm
        site = self.site
        # Dim 1 is the sequence: where it was gathered before, an axis of one rank makes the gather
        # a no-op.
        gathered = site.whole_sequence and move.gather.dim == 1
        from_axis, to_axis = (
            site.axis(*filter(None, [step.axis])) for step in (move.gather, move.scatter)
        )
        return (site.axis() if gathered else from_axis, move.gather.dim), (
            to_axis,
            move.scatter.dim,
        )

    def _resolve_used_slice(self) -> tuple[int, int, int] | None:
        if self.linear_weight.used_part is None:
            return None
        dim, cut = self.linear_weight.used_part
        # Ranks that share replicated kv heads use the same block, hence the division by `replicas`.
        return dim, self.site.grid.index[cut.axis] // cut.replicas * cut.block_size, cut.block_size

    @property
    def num_scatter_parts(self) -> int:
        """Number of distinct parts into which the scatter over features cuts the output.

        Fewer than the ranks of the axis where kv heads are shared.
        """
        cuts = [
            cut
            for cut in self.output_sharding.splits[0]
            if cut.axis == self.linear_comm.scatter.axis
        ]
        if cuts:
            return cuts[0].ranks // cuts[0].replicas
        return 1

    def gather_weight(self) -> Tensor:
        """The weight gathered over depth, in autograd."""
        # The graph is shared by all equal blocks, so it must not read the handle of one of them.
        if not torch.compiler.is_compiling():
            self.handles["weight"].bucket.unshard()
        if self.is_split:
            return self.handles["weight"].unsharded_param()
        return self.weight

    def local_matrix(self, weight: Tensor) -> Tensor:
        """The gathered weight as (out, in), restricted to the part this rank uses."""
        if self.is_transposed:
            matrix = weight.flatten(1).T
        else:
            matrix = weight.flatten(0, -2)
        if self.used_slice is None:
            return matrix
        return matrix.narrow(*self.used_slice)

    def weight_grad(self, x: Tensor, dy: Tensor) -> Tensor:
        """dW in the stored shape of the weight."""
        x = x.flatten(0, -2)
        dy = dy.flatten(0, -2)
        if self.is_transposed:
            grad = x.T @ dy
        else:
            grad = self.matmul_backend.grad_w(dy, x)
        shape = self.handles["weight"].sharding.unsharded_shape
        if self.used_slice is not None:
            # Rows or columns that this rank does not use get a zero gradient.
            part = grad
            grad = grad.new_zeros(shape)
            grad.narrow(*self.used_slice).copy_(part)
        return grad.view(shape)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to x."""
        with self.trace_scope():
            (y,) = parallel_linear(x, [self], self.site, [])
        # Padding columns (from an out dim that the axis does not divide) must not reach the caller.
        # In training they stay: the loss ignores them itself.
        if not torch.is_grad_enabled():
            y = y[
                ...,
                : self.output_sharding.shard_at(self.site.grid.index).valid_shape[0]
                * self.num_packed,
            ]
        return y

    @property
    def cost_model(self) -> LinearCost:
        """All-gather x, reduce-scatter y."""
        return self.fused_cost_model([self])

    def fused_cost_model(self, layers: Sequence[Linear], *, apart: bool = False) -> LinearCost:
        """Cost model of several layers computed together, of which this is the first."""
        factors = tuple(layer.linear_weight for layer in layers)
        whole = self.site.whole_sequence
        return LinearCost(self.site.name, self.site.layout_context, factors, apart, whole)


def _low_rank_examples() -> list[LayerExample]:
    """Layers from and to an unsplit dim; size 3 is divisible by no axis, so that depth pads."""
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


def _layer_factory(into: int, out: int) -> Callable[[Any], torch.nn.Module]:
    return lambda twin: twin(into, out, bias=False)


class Conv1D(Linear):
    """A linear layer whose weight is stored as (in, out), as in Hugging Face's GPT-2."""

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
    """Multiply x by the weights of layers that read it, or that each read a part of it (apart).

    Communicates: as Linear.
    """
    if torch.compiler.is_compiling() or not site.step_context.overlapped_autograd:
        ys = parallel_linear_reference(x, layers, runs, apart)
    else:
        try:
            ys = apply_autograd(
                _ParallelLinear, x, layers, site, apart, *[layer.weight for layer in layers]
            )
        except STOP_RECOMPUTATION:
            # torch stopped the recomputation here, so backward needs nothing from this layer on.
            # That holds for later steps as well, which then save only the shape of its result.
            site.step_context.save_policy.unneeded_layers.add(site.name)
            raise
    return tuple(
        y if layer.bias is None else y + layer.bias.flatten()
        for y, layer in zip(ys, layers, strict=True)
    )


def parallel_linear_reference(
    x: Tensor, layers: Sequence[Linear], runs: Sequence[PackedLayers], apart: bool = False
) -> list[Tensor]:
    """The same computation in differentiable collectives: the definition that tests compare to."""
    (from_axis, from_dim), (to_axis, to_dim) = layers[0].comm_axes
    xs = _split_input(
        all_gather(copy_to_axis(x, layers[0].copy_axis), from_axis, from_dim), layers, apart
    )
    ys: list[Tensor] = []
    # The empty run at the end makes the loop also cover the layers after the last packed ones.
    for run in [*runs, PackedLayers(len(layers), len(layers), None)]:
        for layer in layers[len(ys) : run.start]:
            ys.append(
                differentiable_linear(
                    xs[len(ys)], layer.local_matrix(layer.gather_weight()), layer.matmul_backend
                )
            )
        if run.matrix is not None:
            sizes = [layer.weight.flatten(0, -2).shape[0] for layer in layers[run.start : run.stop]]
            ys += differentiable_linear(xs[0], run.matrix, layers[run.start].matmul_backend).split(
                sizes, -1
            )
    if to_axis.size == layers[0].reduce_axis.size == 1:
        return ys
    y = reduce_scatter(pack_outputs(ys, layers, to_axis, to_dim), to_axis, buffer_dim(to_dim))
    return unpack_outputs(reduce_from_axis(y, layers[0].reduce_axis), layers, to_dim)


def _split_input(x: Tensor, layers: Sequence[Linear], apart: bool) -> list[Tensor]:
    """The part of the gathered input that each layer reads."""
    if apart:
        return list(x.chunk(len(layers), -1))
    return [x] * len(layers)


class _ParallelLinear(torch.autograd.Function):
    """The linear layer with its communication overlapped.

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
        # Outside of a recomputed block there is nothing to save or reuse.
        if results is None:
            return work()
        if not layers[0].fused_cost_model(layers).saves_output(x.shape[-1], results.selective):
            return work()
        ys: tuple[Tensor, ...] = results.run_once(work)
        return ys

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        layers = ctx.layers
        site = ctx.site
        trace = site.grid.trace
        hide = "dx" in site.bucket_scheduler.overlap
        (from_axis, from_dim), (to_axis, to_dim) = layers[0].comm_axes
        with trace.named_scope(site.name):
            # 1. Re-gather X; the transfer overlaps with the dX matmul below.
            again = None
            if _needs_weight_grad(layers):
                # Detached: a deferred dW must not keep the autograd graph alive.
                x = ctx.saved_tensors[0].detach()
                again = collectives.all_gather(x, from_axis, from_dim)
            if again is not None and not hide:
                again.wait()
            # 2. Gather dY, undoing the reduce-scatter of the output.
            dys = list(grads)
            if to_axis.size > 1:
                dys = _gather_output_grads(grads, layers, to_axis, to_dim)
            # 3. dX, reduced while dW is computed.
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
                pending = collectives.reduce_scatter(dx, from_axis, from_dim)
                if not hide:
                    pending.wait()
            if again is not None:
                # 4. dW, now or deferred by the pipeline schedule.
                xs = _split_input(again.wait(), layers, ctx.apart)
                site.step_context.run_or_defer(
                    partial(_accumulate_weight_grads, site, layers, xs, dys)
                )
            none = [None] * (3 + len(layers))
            if pending is None:
                return None, *none
            return collectives.all_reduce(pending.wait(), layers[0].copy_axis).wait(), *none


def _linear_forward(x: Tensor, layers: Sequence[Linear], apart: bool) -> tuple[Tensor, ...]:
    """The forward pass of a linear layer, outside autograd. Communicates: as Linear."""
    (from_axis, from_dim), (to_axis, to_dim) = layers[0].comm_axes
    xs = _split_input(collectives.all_gather(x, from_axis, from_dim).wait(), layers, apart)
    ys = [
        forward(
            part, layer.local_matrix(layer.handles["weight"].unsharded_data()), layer.matmul_backend
        )
        for part, layer in zip(xs, layers, strict=True)
    ]
    if to_axis.size == layers[0].reduce_axis.size == 1:
        return tuple(ys)
    packed = pack_outputs(ys, layers, to_axis, to_dim)
    # `packed` is a copy where there are several outputs; free the originals before the scatter.
    del ys
    y = collectives.reduce_scatter(packed, to_axis, buffer_dim(to_dim)).wait()
    return tuple(
        unpack_outputs(collectives.all_reduce(y, layers[0].reduce_axis).wait(), layers, to_dim)
    )


def _gather_output_grads(
    grads: Sequence[Tensor], layers: Sequence[Linear], axis: Axis, dim: int
) -> list[Tensor]:
    """Gradients of each layer's full output; the gathered buffer is freed on return.

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
    """Accumulate dW into the buckets. Communicates: reduce-scatter over depth, by bucket, later."""
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


def buffer_dim(dim: int) -> int:
    """The dim of the packed buffer that is scattered."""
    if dim == -1:
        return 2
    return dim


def pack_outputs(ys: Sequence[Tensor], layers: Sequence[Linear], axis: Axis, dim: int) -> Tensor:
    """Pack outputs `[b, s, n_i]` into one buffer before the reduce-scatter."""
    if dim != -1:
        if len(ys) == 1:
            return ys[0]
        return torch.cat(list(ys), -1)
    blocks = []
    for y, layer in zip(ys, layers, strict=True):
        # Parts of a packed weight (such as gate and up in one matrix) are each split over the axis.
        for one in y.unflatten(-1, (layer.num_packed, -1)).unbind(-2):
            block = one.unflatten(-1, (layer.num_scatter_parts, -1))
            # Fewer parts than ranks: neighbouring ranks share a kv head and get a copy each.
            copies = axis.size // layer.num_scatter_parts
            blocks.append(block if copies == 1 else block.repeat_interleave(copies, 2))
    return _concat_features(blocks)  # (b, s, col, m)


def unpack_output_grads(dy: Tensor, layers: Sequence[Linear], axis: Axis, dim: int) -> list[Tensor]:
    """Gradients `[b, s, n_i]` from the gathered buffer; copies of a shared head are summed."""
    sizes = output_widths(layers)
    if dim != -1:
        return list(dy.split([sum(of_layer) for of_layer in sizes], -1))
    blocks = iter(dy.split([size for of_layer in sizes for size in of_layer], -1))  # (b, s, col, m)
    out = []
    for layer in layers:
        each = [
            next(blocks).unflatten(2, (layer.num_scatter_parts, -1))
            for _ in range(layer.num_packed)
        ]
        # Dual of the copies in `pack_outputs`.
        parts = [x.squeeze(3) if x.shape[3] == 1 else x.sum(3) for x in each]
        out.append(_concat_features([x.flatten(2) for x in parts]))
    return out


def _concat_features(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate along features; a single part is not copied."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts), -1)


def unpack_outputs(y: Tensor, layers: Sequence[Linear], dim: int) -> list[Tensor]:
    """Outputs of the layers on this rank from the scattered buffer."""
    if dim == -1:
        y = y.squeeze(2)
    return list(y.split([sum(of_layer) for of_layer in output_widths(layers)], -1))


def pack_output_grads(grads: Sequence[Tensor], layers: Sequence[Linear], dim: int) -> Tensor:
    """Pack the gradients of this rank's outputs as `unpack_outputs` found them."""
    if len(grads) == 1:
        dy = grads[0]
    else:
        dy = torch.cat(list(grads), -1)
    if dim == -1:
        return dy.unsqueeze(2)
    return dy


def output_widths(layers: Sequence[Linear]) -> list[list[int]]:
    """Features of each output on this rank, one number per packed part."""
    return [[layer.output_sharding.local_shape[0]] * layer.num_packed for layer in layers]
