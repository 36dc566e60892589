"""Costs of linear layers: weights, communication, FLOPs and saved bytes, without torch.

A linear layer all-gathers its input, multiplies, and reduce-scatters its output
(`sharding.ShardingTable.linear_comm`); fused layers that read the same input communicate together.
The head communicates in chunks of tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from ranvier.cost.layers import ActivationShape, AxisGroup, LayerCost, LayoutContext
from ranvier.errors import ShardingError
from ranvier.sharding import (
    WEIGHT_RULE,
    AxisSplit,
    Dim,
    LinearComm,
    Sharding,
    dim_name,
    num_packed_dims,
)
from ranvier.trace import Event

MAX_CHUNK_BYTES = 1 << 32
"""Maximum bytes of the logits of a chunk."""
MAX_UNCHUNKED_BYTES = 1 << 30
"""Maximum bytes of logits that are not split into chunks."""
ALIGNMENT_BYTES = 16
"""Alignment of matrix rows in bytes. On a GPU, products with a matrix with unaligned rows take 3 to
8 times as long."""


@dataclass(frozen=True, eq=False)
class LinearWeight:
    """The weight of a linear layer: its dims, its sharding and its shape on this rank."""

    shape: tuple[int, ...]
    """Global shape in the stored order of dims."""
    dims: tuple[Dim, ...]
    layout_context: LayoutContext = field(repr=False)
    trainable: bool = True
    is_transposed: bool = False
    """Whether the weight is stored as (in, out)."""

    def __post_init__(self) -> None:
        # Only kv heads may be on several ranks.
        if self.in_dim == "kv_heads":
            _refuse_shared_input(self.input_sharding)

    @property
    def packed_out_dim(self) -> Dim:
        """The out dim; (count, name) if several are packed consecutively."""
        return self.dims[1 if self.is_transposed else 0]

    @property
    def packed_in_dim(self) -> Dim:
        """The in dim; (count, name) if several are packed consecutively."""
        return self.dims[0 if self.is_transposed else 1]

    @property
    def out_dim(self) -> str:
        """Name of the out dim."""
        return dim_name(self.packed_out_dim)

    @property
    def in_dim(self) -> str:
        """Name of the in dim."""
        return dim_name(self.packed_in_dim)

    @property
    def num_packed(self) -> int:
        """Number of out dims that are packed consecutively."""
        return num_packed_dims(self.packed_out_dim)

    @property
    def num_packed_inputs(self) -> int:
        """Number of in dims that are packed consecutively."""
        return num_packed_dims(self.packed_in_dim)

    @property
    def num_row_dims(self) -> int:
        """Number of dims of the sharded weight, in which packed dims are two, that are rows of the
        stored matrix; the others are its columns."""
        return 1 if isinstance(self.dims[0], str) else 2

    @cached_property
    def linear_comm(self) -> LinearComm:
        """Communication of input and output."""
        return self.layout_context.table.linear_comm(self.out_dim, self.in_dim)

    @cached_property
    def weight_sharding(self) -> Sharding:
        """Sharding of the weight."""
        return self.layout_context.weight_sharding(
            self.shape, self.dims, is_transposed=self.is_transposed
        )

    @cached_property
    def input_sharding(self) -> Sharding:
        """Sharding of the input features of one of the packed dims."""
        features = self.shape[0 if self.is_transposed else 1]
        return self.layout_context.feature_sharding(features // self.num_packed_inputs, self.in_dim)

    @cached_property
    def output_sharding(self) -> Sharding:
        """Sharding of the output features of one of the packed dims."""
        features = self.shape[1 if self.is_transposed else 0]
        return self.layout_context.feature_sharding(features // self.num_packed, self.out_dim)

    @cached_property
    def used_part(self) -> tuple[int, AxisSplit] | None:
        """Dim and split of the part of the weight that this rank uses; None for all of it.

        Only LoRA matrices are used in part: their activations may be split over an axis that does
        not split the weight.
        """
        if "rank" not in (self.out_dim, self.in_dim):
            return None
        if self.in_dim == "rank":
            name, is_row = self.out_dim, not self.is_transposed
        else:
            name, is_row = self.in_dim, self.is_transposed
        dim = (self.num_row_dims if is_row else len(self.weight_sharding.shape)) - 1
        cuts = self.layout_context.feature_sharding(self.weight_sharding.shape[dim], name).splits[0]
        # The split of the activations that the weight does not have.
        return next(((dim, cut) for cut in cuts if cut.axis not in WEIGHT_RULE[name]), None)

    @cached_property
    def used_shape(self) -> tuple[int, ...]:
        """Shape of the used part of the gathered weight."""
        shape = list(self.weight_sharding.unsharded_shape)
        if self.used_part is not None:
            shape[self.used_part[0]] = self.used_part[1].block_size
        return tuple(shape)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Output and input features of the matmul on this rank."""
        rows = math.prod(self.used_shape[: self.num_row_dims])
        columns = math.prod(self.used_shape[self.num_row_dims :])
        if self.is_transposed:
            return columns, rows
        return rows, columns

    @property
    def local_width(self) -> int:
        """Number of output features on this rank."""
        return self.num_packed * self.output_sharding.local_shape[0]

    def flops(self, flow: ActivationShape) -> int:
        """Returns 2 · tokens · (out · in) on this rank."""
        # The product is computed before the scatter, for all tokens that are scattered.
        scatter = self.linear_comm.scatter
        if scatter.dim >= 0:
            scattered = self.layout_context.axis_group(*scatter.axes).size
        else:
            scattered = 1
        tokens = self.layout_context.local_tokens(flow, self.out_dim) * scattered
        return 2 * tokens * math.prod(self.used_shape)

    def product_elements(self, flow: ActivationShape) -> int:
        """Returns the number of elements of the product before it is communicated."""
        return self.flops(flow) // (2 * self.matrix_shape[1])


def _refuse_shared_input(features: Sharding) -> None:
    """Raises if several ranks have the same input features, which a sum would count repeatedly."""
    for cut in features.splits[0]:
        if cut.replicas > 1:
            raise ShardingError(
                f"A linear layer reads kv_heads, which {cut.replicas} of {cut.axis}={cut.ranks} "
                "ranks share. A sum over these ranks would count them several times. Use fewer "
                f"ranks on {cut.axis}, or more kv heads."
            )


@dataclass(frozen=True, eq=False)
class LinearCost(LayerCost):
    """Cost of x Wᵀ of fused layers with the same input, or with a part each (`grouped_input`)."""

    weights: tuple[LinearWeight, ...]
    grouped_input: bool = False
    whole_sequence: bool = False
    """Whether the enclosing module has already gathered the sequence over row."""
    defers_reduction: bool = False
    """Whether the reduction of the output runs behind the next module (ladder residual)."""

    @property
    def is_pending(self) -> bool:
        """Whether the reduction overlaps with the next module; no recomputation repeats it."""
        return self.defers_reduction and self.scatter_group.size * self.reduce_group.size > 1

    @cached_property
    def gather_group(self) -> AxisGroup:
        """The ranks over which the input is gathered."""
        # Dim 1 is the sequence, which the enclosing module may already have gathered.
        step = self.weights[0].linear_comm.gather
        return self.layout_context.axis_group(
            *(() if self.whole_sequence and step.dim == 1 else step.axes)
        )

    @cached_property
    def scatter_group(self) -> AxisGroup:
        """The ranks over which the output is reduce-scattered."""
        return self.layout_context.axis_group(*self.weights[0].linear_comm.scatter.axes)

    @cached_property
    def copy_group(self) -> AxisGroup:
        """The ranks that have the same input and use it differently."""
        return self.layout_context.axis_group(*self.weights[0].linear_comm.copy_axes)

    @cached_property
    def reduce_group(self) -> AxisGroup:
        """The ranks that get the same sum as their output."""
        return self.layout_context.axis_group(*self.weights[0].linear_comm.reduce_axes)

    @property
    def has_trainable_weight(self) -> bool:
        """Whether a weight of the layers is trained."""
        return any(factor.trainable for factor in self.weights)

    @property
    def output_width(self) -> int:
        """Number of output features of all layers on this rank."""
        return sum(factor.local_width for factor in self.weights)

    def comm_elements(self, flow: ActivationShape) -> tuple[int, int]:
        """Returns the elements of the gathered input, and of the output before its scatter."""
        ground = self.layout_context
        first = self.weights[0]
        features = first.num_packed_inputs * first.input_sharding.local_shape[0]
        # With a grouped input, each layer reads its own part, and all parts are gathered.
        features *= len(self.weights) if self.grouped_input else 1
        x = ground.local_tokens(flow, first.in_dim) * features * self.gather_group.size
        return x, ground.local_tokens(
            flow, first.out_dim
        ) * self.output_width * self.scatter_group.size

    def events(self, flow: ActivationShape, *, recomputed: bool = False) -> list[Event]:
        """Returns the communication of a micro-batch; a pending output is not recomputed."""
        return super().events(flow, recomputed=recomputed and not self.is_pending)

    def forward_events(self, flow: ActivationShape) -> list[Event]:
        """Returns the all-gather of x and the reduce-scatter of y."""
        x, y = self.comm_elements(flow)
        return [
            *self.predict_event("all_gather", self.gather_group, x, flow.itemsize),
            *self.predict_event("reduce_scatter", self.scatter_group, y, flow.itemsize),
            *self.predict_event(
                "all_reduce", self.reduce_group, y // self.scatter_group.size, flow.itemsize
            ),
        ]

    def backward_events(self, flow: ActivationShape) -> list[Event]:
        """Returns the all-gathers of x and dy and the reduce-scatter of dx."""
        x, y = self.comm_elements(flow)
        # The gathered x is not saved for dW; it is gathered again.
        if self.has_trainable_weight:
            again = self.predict_event("all_gather", self.gather_group, x, flow.itemsize)
        else:
            again = []
        return [
            *again,
            *self.predict_event("all_gather", self.scatter_group, y, flow.itemsize),
            *self.predict_event("reduce_scatter", self.gather_group, x, flow.itemsize),
            *self.predict_event(
                "all_reduce", self.copy_group, x // self.gather_group.size, flow.itemsize
            ),
        ]

    def saves_output(self, features: int, selective: bool) -> bool:
        """Whether a block that saves communicated results saves the output or the gathered input.

        With the output it need not recompute the product. The output is saved if it is
        communicated, if selective recomputation saves it in any case, or if it is not larger than
        the input, which has `features` features on this rank.
        """
        if self.scatter_group.size * self.reduce_group.size > 1:
            return True
        # Compared per token: only a gather of features makes the input wider.
        gathered = features * (
            self.gather_group.size if self.weights[0].linear_comm.gather.dim == -1 else 1
        )
        return self.gather_group.size > 1 and (selective or self.output_width <= gathered)

    def saved_bytes(self, flow: ActivationShape, *, selective: bool = False) -> int:
        """Returns the bytes of the output, or of the gathered input; see `saves_output`."""
        x, y = self.comm_elements(flow)
        communicated = self.scatter_group.size * self.reduce_group.size > 1
        output = y // self.scatter_group.size
        if self.gather_group.size == 1 and not communicated:
            return 0
        # Neither it nor its product is saved.
        if self.is_pending:
            return 0
        # It replaces the results of products, which selective recomputation saves.
        if selective:
            return (
                output - sum(one.product_elements(flow) for one in self.weights)
            ) * flow.itemsize
        return (output if communicated else min(x, output)) * flow.itemsize

    def flops(self, flow: ActivationShape) -> int:
        """Returns 2 · tokens · (out · in) on this rank, for all layers."""
        return sum(factor.flops(flow) for factor in self.weights)


@dataclass(frozen=True, eq=False)
class LMHeadCost(LinearCost):
    """Cost of the logits and their loss, one chunk of tokens at a time."""

    @property
    def vocab_group(self) -> AxisGroup:
        """The ranks over which the columns of the logits are split."""
        return self.layout_context.axis_group(
            *self.layout_context.table.feature_axes(self.weights[0].out_dim)
        )

    def forward_events(self, flow: ActivationShape) -> list[Event]:
        """Returns the all-gather of x and, per chunk, the events of logits and statistics."""
        # If col splits samples, a rank has only the statistics of its samples after the scatter.
        inside = self.layout_context.table.axes_inside_replica(self.weights[0].out_dim, "batch")
        samples = self.layout_context.axis_group(*inside).size
        events = self.predict_event(
            "all_gather", self.gather_group, self._input_elements(flow), flow.itemsize
        )
        for tokens in self.chunk_tokens(flow):
            events += self.predict_event(
                "reduce_scatter", self.scatter_group, self._logit_elements(tokens), flow.itemsize
            )
            # The maximum, then the sum and the target logit; see `CrossEntropyCost`.
            for numbers in (1, 2):
                count = numbers * tokens // samples
                events += self.predict_event(
                    "all_reduce", self.vocab_group, count, flow.statistics_itemsize
                )
        return events

    def backward_events(self, flow: ActivationShape) -> list[Event]:
        """Returns the all-gather of logit gradients per chunk, and the reduce-scatter of dx."""
        events = [
            event
            for tokens in self.chunk_tokens(flow)
            for event in self.predict_event(
                "all_gather", self.scatter_group, self._logit_elements(tokens), flow.itemsize
            )
        ]
        dx = self._input_elements(flow)
        return events + self.predict_event("reduce_scatter", self.gather_group, dx, flow.itemsize)

    def chunk_tokens(self, flow: ActivationShape) -> list[int]:
        """Returns the number of tokens of each chunk, over all samples."""
        row = self.weights[0].matrix_shape[0] * flow.itemsize
        seq = self.layout_context.inner_seq(flow)
        # Without a scatter, samples are flattened; otherwise a chunk is a range of the sequence of
        # all samples.
        if self.scatter_group.size == 1:
            return [cut.stop - cut.start for cut in chunk_slices(flow.samples * seq, row)]
        cuts = chunk_slices(seq, flow.samples * row)
        return [flow.samples * (cut.stop - cut.start) for cut in cuts]

    def chunk_bytes(self, flow: ActivationShape) -> int:
        """Returns the bytes of the logits of the largest chunk, before they are scattered."""
        row = self.weights[0].matrix_shape[0] * flow.itemsize
        return max(self.chunk_tokens(flow), default=0) * row

    def _input_elements(self, flow: ActivationShape) -> int:
        tokens = flow.samples * self.layout_context.inner_seq(flow)
        return tokens * self.weights[0].matrix_shape[1]

    def _logit_elements(self, tokens: int) -> int:
        """Returns the number of logits of a chunk before they are scattered."""
        factor = self.weights[0]
        if factor.linear_comm.scatter.dim == -1:
            ranks = self.scatter_group.size
        else:
            ranks = 1
        return tokens * factor.output_sharding.local_shape[0] * ranks


def align_columns(columns: int, itemsize: int) -> int:
    """Rounds the number of columns up, so that rows are multiples of ALIGNMENT_BYTES."""
    multiple = max(ALIGNMENT_BYTES // itemsize, 1)
    return -(-columns // multiple) * multiple


def chunk_slices(tokens: int, row_bytes: int) -> list[slice]:
    """Splits tokens into chunks of at most MAX_CHUNK_BYTES; at least 2 above MAX_UNCHUNKED_BYTES.

    The length of a chunk is a power of two, as matrix products are computed in tiles.
    """
    # Large logits have at least two chunks, so that not all of them are in memory.
    many = tokens * row_bytes > MAX_UNCHUNKED_BYTES
    step = min(MAX_CHUNK_BYTES // max(row_bytes, 1), tokens // 2 if many else tokens)
    if step < tokens:
        step = 1 << max(step.bit_length() - 1, 0)
    else:
        step = tokens
    return [slice(start, min(start + step, tokens)) for start in range(0, tokens, max(step, 1))]
