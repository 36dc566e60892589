"""Fused linear layers: several linear layers that are computed and communicated together.

Layers that read the same input (q, k, v; gate, up) share one all-gather, one reduce-scatter and one
dX reduction. Layers with few features that are adjacent in a bucket may be viewed as one matrix.
The layers of a `GroupedInputLinear` each read a different part of the input (the B matrices of
LoRA adapters) and share one all-gather.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ranvier.buckets.bucket import Bucket
from ranvier.cost.layers import ActivationShape
from ranvier.cost.linear import LinearCost
from ranvier.nn.example import EXAMPLE_SIZES, LayerExample
from ranvier.nn.layer import LayerContext, ParallelLayer
from ranvier.nn.linear import Linear, PackedLayers, parallel_linear
from ranvier.sharding import Dim

MAX_PACKED_FEATURES = 1024
"""Maximum output features of a layer that is packed with its neighbours, if another layer is at
least twice as wide (e.g. k and v next to q)."""


def example_linear(into: int, out: int) -> torch.nn.Linear:
    """Returns a linear layer without bias, for examples."""
    return torch.nn.Linear(into, out, bias=False)


class FusedLinear(ParallelLayer):
    """Linear layers that read the same input and share one gather, scatter and dX reduction.

    x: `[b, s/row, d/col]`; y: a tuple with the output of each layer, as of `Linear`.
    Communicates: the collectives of one `Linear` that has the outputs of all layers.
    """

    grouped_input = False
    """Whether each layer reads a separate part of the input."""

    def __init__(
        self, site: LayerContext, serial: torch.nn.Module, dims: Sequence[Dim] = ()
    ) -> None:
        super().__init__(site)
        self.packed_layers: list[PackedLayers] = []
        """Neighbours whose weights are viewed as one matrix."""

    def pack_weights(self, widest: int = MAX_PACKED_FEATURES, *, all_alike: bool = False) -> None:
        """Views adjacent layers with few output features as one matrix with one gradient.

        A small matmul does not use the whole device. For a large one, splitting the packed output
        and concatenating its gradient costs more than it saves. Therefore only layers at most half
        as wide as the widest layer are packed, unless `all_alike` is set. Their weights must be
        adjacent in the bucket and not sharded over depth.
        """
        layers = self.layers
        self.packed_layers = []
        widths = [layer.matrix_shape[0] for layer in layers]
        if all_alike:
            limit = widest
        else:
            limit = min(widest, max(widths) // 2)
        start = 0
        while start < len(layers):
            stop = start + 1
            # Extend the run while the next weight is adjacent in the bucket and none is too wide.
            while stop < len(layers) and are_adjacent(*layers[stop - 1 : stop + 1]):
                if max(widths[start : stop + 1]) > limit:
                    break
                stop += 1
            # There is nothing to pack in a run of one layer.
            if stop > start + 1:
                self.packed_layers.append(
                    PackedLayers(start, stop, _packed_matrix(layers[start:stop]))
                )
            start = stop

    @staticmethod
    def example_layers() -> list[LayerExample]:
        """Examples for the generic tests."""
        dims: dict[str, Sequence[Dim]] = {"q": ("heads", "embed"), "k": ("kv_heads", "embed")}
        ranks: dict[str, Sequence[Dim]] = {"q": ("rank", "embed"), "k": ("rank", "embed")}
        shared: dict[str, Sequence[Dim]] = {"q": ("heads", "rank"), "k": ("kv_heads", "rank")}
        outer = ("batch", "seq", "embed")
        inner = ("batch", "seq", "heads")
        rank = ("batch", "seq", "rank")
        groups = ("batch", "seq", "kv_heads")
        same: dict[str, Sequence[Dim]] = {"a": ("mlp", "mlp"), "b": ("mlp", "mlp")}
        hidden = ("batch", "seq", "mlp")
        return [
            LayerExample(
                lambda twin: twin({"a": torch.nn.Linear(24, 24), "b": example_linear(24, 24)}),
                (),
                [hidden],
                [hidden, hidden],
                children=same,
            ),
            LayerExample(
                lambda twin: twin({"q": torch.nn.Linear(16, 32), "k": torch.nn.Linear(16, 8)}),
                (),
                [outer],
                [inner, groups],
                children=dims,
            ),
            LayerExample(
                lambda twin: twin({"q": example_linear(16, 3), "k": example_linear(16, 3)}),
                (),
                [outer],
                [rank, rank],
                children=ranks,
            ),
            LayerExample(
                lambda twin: twin({"q": example_linear(3, 32), "k": example_linear(3, 8)}),
                (),
                [rank],
                [inner, groups],
                children=shared,
            ),
        ]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns the outputs of all layers, in order."""
        with self.trace_scope():
            return parallel_linear(
                x, self.layers, self.site, self.packed_layers, apart=self.grouped_input
            )

    @property
    def layers(self) -> list[Linear]:
        """The linear layers, in order."""
        return [layer for layer in self.children() if isinstance(layer, Linear)]

    @property
    def cost_model(self) -> LinearCost:
        """Cost of one layer with the outputs of all."""
        # The cost of the first layer with the weights of all, under the name of the fused layer.
        product = self.layers[0].fused_cost_model(self.layers, apart=self.grouped_input)
        return replace(product, name=self.site.name)

    def flops(self, flow: ActivationShape) -> int:
        """Returns 0, as the children report their own FLOPs."""
        return 0


class GroupedInputLinear(FusedLinear):
    """Linear layers that each read one part of the input, in order.

    Communicates: the collectives of one `Linear` that has the inputs and outputs of all layers.
    """

    grouped_input = True

    def pack_weights(self, widest: int = MAX_PACKED_FEATURES, *, all_alike: bool = False) -> None:
        """Does nothing, as the layers read different inputs."""

    @staticmethod
    def example_layers() -> list[LayerExample]:
        """Examples for the generic tests."""
        dims: dict[str, Sequence[Dim]] = {"q": ("heads", "rank"), "k": ("kv_heads", "rank")}
        return [
            LayerExample(
                lambda twin: twin({"q": example_linear(3, 32), "k": example_linear(3, 8)}),
                (),
                [("batch", "seq", "rank")],
                [("batch", "seq", "heads"), ("batch", "seq", "kv_heads")],
                sizes={**EXAMPLE_SIZES, "rank": 6},
                children=dims,
            )
        ]


def are_adjacent(before: Linear, layer: Linear) -> bool:
    """Whether two weights are adjacent in the same bucket and use the same kind of matmul."""
    a = before.handles["weight"]
    b = layer.handles["weight"]
    # A view of the bucket is a valid matrix only if the weight is stored as it is multiplied.
    plain = not any(one.is_split or one.is_transposed or one.used_slice for one in (before, layer))
    plain = plain and before.matmul_backend == layer.matmul_backend
    return plain and a.bucket is b.bucket and a.offset + a.num_elements == b.offset


def _packed_matrix(layers: Sequence[Linear]) -> Tensor:
    """Returns the weights of adjacent layers as one matrix `[Σn, i]`, a view of their bucket."""
    first, last = (layer.handles["weight"] for layer in (layers[0], layers[-1]))
    bucket = first.bucket
    start = first.offset
    stop = last.offset + last.num_elements
    # Weights offloaded to the host have no storage on the device at this point.
    with bucket.temporary_storage():
        flat = bucket.data[start:stop]
    columns = layers[0].matrix_shape[1]
    matrix = flat.view(-1, columns).requires_grad_(first.trainable)
    if first.trainable:
        # A weak reference: a hook with a reference to the bucket would form a cycle with the matrix
        # and leak both.
        hook = partial(_accumulate_packed_grad, weakref.ref(bucket), start)
        matrix.register_post_accumulate_grad_hook(hook)
    return matrix


def _accumulate_packed_grad(reference: weakref.ref[Bucket], start: int, packed: Tensor) -> None:
    """Moves the gradient of packed weights to their bucket."""
    bucket = reference()
    if packed.grad is not None and bucket is not None:
        bucket.bucket_scheduler.accumulate_shard_grad(bucket, start, packed.grad)
        packed.grad = None
