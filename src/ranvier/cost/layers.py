"""Layer costs: communication, FLOPs and saved bytes of each layer, in closed form, without torch.

Here a layer consists of its dim names, its shapes and its `LayoutContext` (degrees, sharding table,
units). The layers of `nn` use these costs for their predictions; the planner uses the same costs
without layers. All activation shapes follow from the tables of `sharding`; `Event.bytes` is the
size of the full (gathered or reduced) tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

from ranvier.config.plan import AXES, ContextAttentionChoice, ContextOrder, Dispatch
from ranvier.cost.context_attention import (
    EventScope,
    KeyShape,
    Layout,
    UlyssesLayout,
    build_layout,
    choose_method,
)
from ranvier.sharding import (
    WEIGHT_RULE,
    Dim,
    Sharding,
    ShardingTable,
    TokenOrder,
    count_parts,
    order_tokens,
)
from ranvier.trace import Event

COUNT_BYTES = 4
"""Bytes of a token count."""
SCALE_BYTES = 4
"""Bytes of the scale of an fp8 row."""


@dataclass(frozen=True)
class ActivationShape:
    """Activations of a micro-batch on one (data, expert, depth) coordinate, for predictions."""

    samples: int
    """Sequences per micro-batch."""
    seq: int
    """Tokens per sequence."""
    itemsize: int
    """Bytes per element of activations."""
    statistics_itemsize: int
    """Bytes per element of norm and loss statistics."""
    expert_load: float = 1.0
    """Rows of the busiest expert rank, relative to the mean; 1 for balanced experts."""
    token_orders: tuple[TokenOrder, ...] = ()
    """Order of the tokens of each sample over context; by default one document per sample."""


@dataclass(frozen=True)
class AxisGroup:
    """Names and number of ranks of one axis, or of several fused axes."""

    names: tuple[str, ...]
    size: int


@dataclass(frozen=True, eq=False)
class LayoutContext:
    """The layout that all layers of a model share."""

    degrees: Mapping[str, int]
    table: ShardingTable
    units: Mapping[str, int]
    """Number of units of each named dim of the model (for heads: their number, not elements)."""
    dispatch: Dispatch = "model"
    """Dtype in which tokens are dispatched to experts."""
    context_attention: ContextAttentionChoice = "auto"
    """How attention gets keys of other ranks of context."""
    context_order: ContextOrder = "balanced"
    """Order of the tokens over context of samples whose documents are not known."""
    context_index: int = 0
    """Index on context of the rank that layers without a grid describe."""
    streams: int = 1
    """Samples of a layer for each sample of a micro-batch (ParScale)."""

    def axis_group(self, *names: str) -> AxisGroup:
        """Returns the ranks along these axes, without axes of degree 1."""
        used = tuple(axis for axis in AXES if axis in names and self.degrees[axis] > 1)
        return AxisGroup(used, math.prod(self.degrees[axis] for axis in used))

    def feature_sharding(self, size: int, dim: str) -> Sharding:
        """Returns the sharding of `size` elements of a dim as the features of an activation."""
        region = self.table.activation_rule(dim)
        return Sharding.from_dims([size], [dim], region, self.degrees, units=self.units)

    def weight_sharding(
        self, shape: Sequence[int], dims: Sequence[Dim], *, is_transposed: bool = False
    ) -> Sharding:
        """Returns the sharding of the weight of a layer, which is gathered before use."""
        return self.table.weight_sharding(
            shape, dims, self.degrees, units=self.units, is_transposed=is_transposed
        )

    def local_tokens(self, flow: ActivationShape, dim: str) -> int:
        """Returns the tokens of a micro-batch on this rank for the feature dim `dim`."""
        # An ActivationShape already belongs to one replica.
        inside = (self.table.axes_inside_replica(dim, name) for name in ("batch", "seq"))
        parts = count_parts(chain.from_iterable(inside), self.degrees)
        return self.num_samples(flow) * flow.seq // parts

    def num_samples(self, flow: ActivationShape) -> int:
        """Returns the samples of a micro-batch in the layer."""
        return flow.samples * self.streams

    def inner_seq(self, flow: ActivationShape) -> int:
        """Returns the tokens of a sample on this rank inside attention, MLP and head."""
        return flow.seq // self.table.num_parts("vocab", "seq", self.degrees)


@dataclass(frozen=True, eq=False)
class LayerCost:
    """Base class: a layer that communicates, computes and saves nothing."""

    name: str
    layout_context: LayoutContext = field(repr=False)

    def forward_events(self, flow: ActivationShape) -> list[Event]:
        """Returns the communication of a forward pass, without weight gathers."""
        return []

    def backward_events(self, flow: ActivationShape) -> list[Event]:
        """Returns the communication of a backward pass, without weight gathers and gradients."""
        return []

    def events(self, flow: ActivationShape, *, recomputed: bool = False) -> list[Event]:
        """Returns the communication of a micro-batch; a recomputed layer runs forward twice."""
        # Recomputation repeats the communication of forward, unless its results are saved.
        forward = self.forward_events(flow)
        return forward * (2 if recomputed else 1) + self.backward_events(flow)

    def saved_bytes(self, flow: ActivationShape, *, selective: bool = False) -> int:
        """Returns the bytes needed to save the results of this layer's forward collectives.

        selective: they replace saved results of matrix products, which may have been larger.
        """
        # The result of a reduce-scatter is one part of the event's tensor.
        line = self.layout_context.axis_group
        return sum(
            event.bytes // (line(*event.axis).size if event.op == "reduce_scatter" else 1)
            for event in self.forward_events(flow)
        )

    def flops(self, flow: ActivationShape) -> int:
        """Returns the FLOPs of one forward pass of a micro-batch on this rank."""
        return 0

    def predict_event(self, op: str, line: AxisGroup, elements: int, itemsize: int) -> list[Event]:
        """Returns one predicted event, or none if the group has one rank."""
        if line.size == 1:
            return []
        return [Event(op, line.names, elements * itemsize, self.name)]


@dataclass(frozen=True, eq=False)
class EmbeddingCost(LayerCost):
    """Cost of W[ids], where the first dim is split over row or not split."""

    shape: tuple[int, ...]
    row_dim: str
    """Name of the first dim."""
    trainable: bool = True

    @cached_property
    def row_group(self) -> AxisGroup:
        """The ranks over which rows are split."""
        return self.layout_context.axis_group(*WEIGHT_RULE.get(self.row_dim, ()))

    @cached_property
    def weight_sharding(self) -> Sharding:
        """Sharding of the table."""
        return self.layout_context.weight_sharding(self.shape, (self.row_dim, "embed"))

    def forward_events(self, flow: ActivationShape) -> list[Event]:
        """Returns the reduce-scatter of the rows along the tokens, or their sum for all tokens."""
        keeps_tokens = self.layout_context.table.row_splits == "none"
        return self.predict_event(
            "all_reduce" if keeps_tokens else "reduce_scatter",
            self.row_group,
            self._num_elements(flow),
            flow.itemsize,
        )

    def backward_events(self, flow: ActivationShape) -> list[Event]:
        """Returns the all-gather of the gradient of all tokens, if the table is trained."""
        if not self.trainable:
            return []
        return self.predict_event(
            "all_gather", self.row_group, self._num_elements(flow), flow.itemsize
        )

    # Before the scatter a rank has rows for all tokens, with its part of the embed dim.
    def _num_elements(self, flow: ActivationShape) -> int:
        tokens = flow.samples * self.layout_context.inner_seq(flow)
        return tokens * self.weight_sharding.unsharded_shape[1]


@dataclass(frozen=True, eq=False)
class NormCost(LayerCost):
    """Cost of a norm, which sums numbers per token over the axes that split its dim."""

    size: int
    dim: str
    sums_per_token: int = 1
    """Number of sums per token."""

    @cached_property
    def feature_sharding(self) -> Sharding:
        """Sharding of the normalized dim."""
        return self.layout_context.feature_sharding(self.size, self.dim)

    def forward_events(self, flow: ActivationShape) -> list[Event]:
        """Returns one all-reduce per sum."""
        line = self.layout_context.axis_group(
            *(cut.axis for cut in self.feature_sharding.splits[0])
        )
        elements = self.layout_context.local_tokens(flow, self.dim)
        return (
            self.predict_event("all_reduce", line, elements, flow.statistics_itemsize)
            * self.sums_per_token
        )

    def backward_events(self, flow: ActivationShape) -> list[Event]:
        """Returns the same events as forward."""
        return self.forward_events(flow)


@dataclass(frozen=True, eq=False)
class CrossEntropyCost(LayerCost):
    """Cost of the cross-entropy of unchunked logits."""

    dim: str

    def forward_events(self, flow: ActivationShape) -> list[Event]:
        """Returns the all-reduce of the maximum, then of the sum and the target logit."""
        line = self.layout_context.axis_group(*self.layout_context.table.feature_axes(self.dim))
        tokens = self.layout_context.local_tokens(flow, self.dim)
        return [
            *self.predict_event("all_reduce", line, tokens, flow.statistics_itemsize),
            *self.predict_event("all_reduce", line, 2 * tokens, flow.statistics_itemsize),
        ]


@dataclass(frozen=True, eq=False)
class AttentionCost(LayerCost):
    """Cost of attention over the heads, samples and tokens of a rank.

    It communicates over context, which depends on the order of tokens (`cost.context_attention`).
    """

    dim: str
    head_dim: int
    window: int = 0
    """Number of tokens that a token attends to; 0 for all previous tokens."""
    context_index: int = 0
    """Index of the rank on context."""
    sample_part: int = 0
    """Index of the rank among those that split the samples of a micro-batch."""
    prefix_tokens: int = 0
    """Number of learned keys that every token sees (ParScale)."""

    def events(self, flow: ActivationShape, *, recomputed: bool = False) -> list[Event]:
        """Returns the communication of a micro-batch; attention is not recomputed."""
        return super().events(flow)

    def forward_events(self, flow: ActivationShape) -> list[Event]:
        """Returns the communication of keys, or of tokens and heads, over context."""
        if self.layout_context.degrees["context"] == 1:
            return []
        layout, shape, samples = self.context_layout(flow)
        return self._repeat_events(layout.forward_events(shape, self._event_scope), samples)

    def backward_events(self, flow: ActivationShape) -> list[Event]:
        """Returns the communication of keys again, and of their gradients, over context."""
        if self.layout_context.degrees["context"] == 1:
            return []
        layout, shape, samples = self.context_layout(flow)
        return self._repeat_events(layout.backward_events(shape, self._event_scope), samples)

    @property
    def _event_scope(self) -> EventScope:
        return EventScope(("context",), self.name)

    def saved_bytes(self, flow: ActivationShape, *, selective: bool = False) -> int:
        """Returns 0: the result of attention is saved, and keys are never."""
        return 0

    def _repeat_events(self, events: list[Event], samples: int) -> list[Event]:
        """Returns the events of so many equal samples, which communicate together."""
        return [replace(event, bytes=event.bytes * samples) for event in events]

    def context_layout(self, flow: ActivationShape) -> tuple[Layout, KeyShape, int]:
        """Returns the layout of attention on this rank, the size of its heads, and how many samples
        have this layout: 1 if it contains all samples."""
        context = self.layout_context
        parts = count_parts(context.table.feature_axes(self.dim), context.degrees)
        shape = KeyShape(
            context.units[self.dim] // parts,
            max(context.units["kv_heads"] // parts, 1),
            self.head_dim,
            flow.itemsize,
            flow.statistics_itemsize,
        )
        # Samples of this rank inside attention.
        inside = count_parts(context.table.axes_inside_replica(self.dim, "batch"), context.degrees)
        every = tuple(order for order in flow.token_orders for _ in range(context.streams))
        each = max((len(every) or context.num_samples(flow)) // inside, 1)
        samples = each
        if every:
            first = min(self.sample_part * each, len(every) - each)
            orders = every[first : first + each]
            samples = 1
        else:
            # One layout stands for all samples, because they are equal.
            ranks = context.degrees["context"]
            orders = (order_tokens((flow.seq,), ranks, context.context_order),)
        window = self.window if self.window < flow.seq else 0
        method = choose_method(context.context_attention, orders, shape, window)
        return build_layout(method, orders, self.context_index, window), shape, samples

    @property
    def local_width(self) -> int:
        """Number of features of the heads on this rank."""
        ranks = self.layout_context.axis_group(
            *self.layout_context.table.feature_axes(self.dim)
        ).size
        return self.layout_context.units[self.dim] * self.head_dim // ranks

    def flops(self, flow: ActivationShape) -> int:
        """Returns the FLOPs of causal attention: 2 · s · (width of local heads) per token.

        With a window of w tokens it is 2 · w · (2 - w/s) · (width of local heads) per token. If
        documents are known, it is 4 · (width of local heads) per query and key that it sees. All
        tokens see the keys of a prefix.
        """
        tokens = self.layout_context.local_tokens(flow, self.dim)
        prefix = 4 * tokens * self.prefix_tokens * self.local_width
        if flow.token_orders:
            layout, shape, _ = self.context_layout(flow)
            if isinstance(layout, UlyssesLayout):
                shape = layout.head_shape(shape)
            return 4 * layout.num_scores * shape.heads * self.head_dim + prefix
        # QKᵀ and PV take 4 · s · width per token without a mask; the causal mask halves that.
        seen = min(self.window or flow.seq, flow.seq)
        return 2 * tokens * seen * (2 * flow.seq - seen) // flow.seq * self.local_width + prefix


@dataclass(frozen=True, eq=False)
class StreamScoresCost(LayerCost):
    """Cost of the scores of the streams of a token (ParScale), which are sums over features."""

    shape: tuple[int, int]
    """Number of streams, and of features."""

    def forward_events(self, flow: ActivationShape) -> list[Event]:
        """Returns the all-reduce of one number per stream and token over the axes of embed."""
        line = self.layout_context.axis_group(*self.layout_context.table.feature_axes("embed"))
        elements = self.layout_context.local_tokens(flow, "embed") * self.shape[0]
        return self.predict_event("all_reduce", line, elements, flow.statistics_itemsize)

    def backward_events(self, flow: ActivationShape) -> list[Event]:
        """Returns the same events as forward."""
        return self.forward_events(flow)

    def flops(self, flow: ActivationShape) -> int:
        """Returns 2 · (number of weights) per token."""
        ground = self.layout_context
        (features,) = ground.feature_sharding(self.shape[1], "embed").local_shape
        return 2 * ground.local_tokens(flow, "embed") * self.shape[0] * features


@dataclass(frozen=True, eq=False)
class DoraNormCost(LayerCost):
    """Cost of the row norms of an adapted weight (DoRA)."""

    size: int
    out_dim: str
    in_dim: str

    def forward_events(self, flow: ActivationShape) -> list[Event]:
        """Returns the all-reduce of one number per row, over the axes that split the in dim."""
        ground = self.layout_context
        weights = ground.table.weight_rule
        (rows,) = Sharding.from_dims(
            [self.size], [self.out_dim], weights, ground.degrees, units=ground.units
        ).local_shape
        return self.predict_event(
            "all_reduce",
            ground.axis_group(*WEIGHT_RULE[self.in_dim]),
            rows,
            flow.statistics_itemsize,
        )


@dataclass(frozen=True, eq=False)
class SequenceGatherCost(LayerCost):
    """Cost of the all-gather of the sequence over row, once for all layers of a module."""

    def forward_events(self, flow: ActivationShape) -> list[Event]:
        """Returns the all-gather of the tokens."""
        return self.predict_event(
            "all_gather", self._row_group, self._num_elements(flow), flow.itemsize
        )

    def backward_events(self, flow: ActivationShape) -> list[Event]:
        """Returns the reduce-scatter of their gradients."""
        return self.predict_event(
            "reduce_scatter", self._row_group, self._num_elements(flow), flow.itemsize
        )

    @property
    def _row_group(self) -> AxisGroup:
        return self.layout_context.axis_group("row")

    def _num_elements(self, flow: ActivationShape) -> int:
        (width,) = self.layout_context.feature_sharding(
            self.layout_context.units["embed"], "embed"
        ).local_shape
        return self.layout_context.local_tokens(flow, "embed") * self._row_group.size * width


@dataclass(frozen=True, eq=False)
class MoECost(LayerCost):
    """Cost of a mixture of experts, with tokens dispatched over expert and features split over col.

    A rank sends one row per choice of its tokens. The number of rows that it receives depends on
    the data: it is `flow.expert_load` times the number that it sends.
    """

    num_experts: int
    experts_per_token: int
    expert_width: int
    """Hidden size of an expert."""
    matrices: int = 3
    """Number of matrices per expert: 3 with a gate, 2 without."""
    has_capacity: bool = False
    """Whether choices beyond the capacity of an expert are dropped."""
    has_aux_loss: bool = True
    """Whether an auxiliary loss depends on the choices of whole sequences."""

    def local_tokens(self, flow: ActivationShape) -> int:
        """Returns the tokens that a rank dispatches, also if row splits none of them before."""
        layout = self.layout_context
        table = replace(layout.table, row_splits="tokens")
        return replace(layout, table=table).local_tokens(flow, "embed")

    def sent_rows(self, flow: ActivationShape) -> int:
        """Returns the rows that a rank sends: one per choice of its tokens."""
        return self.local_tokens(flow) * self.experts_per_token

    def received_rows(self, flow: ActivationShape) -> int:
        """Returns the rows that a rank receives, or its own rows if expert has one rank."""
        choices = self.sent_rows(flow)
        if self.layout_context.axis_group("expert").size > 1:
            return math.ceil(choices * flow.expert_load)
        return choices

    def forward_events(self, flow: ActivationShape) -> list[Event]:
        """Returns the events of router logits, token counts, dispatch, experts and combine."""
        peers = self.layout_context.axis_group("expert", "row")
        # One count per sample and expert from each rank of expert and row.
        counts = self.layout_context.num_samples(flow) * self.num_experts * peers.size
        return [
            *self._router_events(flow, self.num_experts),
            *self.predict_event("all_gather", peers, counts, COUNT_BYTES),
            *self._context_events(flow, counts),
            # Outputs of gate and up are reduce-scattered over col, and the input of down is
            # gathered; in backward it is the reverse.
            *self._dispatch_events(flow, self.matrices - 1, 1, self.layout_context.dispatch),
            *self._output_events(flow),
        ]

    def _context_events(self, flow: ActivationShape, counts: int) -> list[Event]:
        """Returns the events that make choices those of whole sequences, if context splits them."""
        layout = self.layout_context
        context = layout.axis_group("context")
        if context.size == 1:
            return []
        samples = layout.num_samples(flow)
        choices = samples * flow.seq * self.experts_per_token
        events = list[Event]()
        if self.has_aux_loss:
            elements = samples * self.num_experts
            events += self.predict_event("all_reduce", context, elements, COUNT_BYTES)
        if self.has_capacity:
            tokens = layout.axis_group("context", "row")
            events += self.predict_event("all_gather", tokens, choices, COUNT_BYTES)
            peers = layout.axis_group("expert", "row")
            events += self.predict_event("all_gather", peers, counts, COUNT_BYTES)
        return events

    def _output_events(self, flow: ActivationShape) -> list[Event]:
        """Returns the all-gather of the outputs, if row splits no tokens of the residual stream."""
        if self.layout_context.table.row_splits == "tokens":
            return []
        layout = self.layout_context
        (features,) = layout.feature_sharding(layout.units["embed"], "embed").local_shape
        elements = layout.local_tokens(flow, "embed") * features
        return self.predict_event("all_gather", layout.axis_group("row"), elements, flow.itemsize)

    def backward_events(self, flow: ActivationShape) -> list[Event]:
        """Returns the events of the router gradient, then of the gradients of the rows."""
        return [
            *self._router_events(flow, self.experts_per_token),
            # Gradients are always sent in the dtype of activations.
            *self._dispatch_events(flow, 1, self.matrices - 1, "model"),
        ]

    def _router_events(self, flow: ActivationShape, numbers: int) -> list[Event]:
        """Returns the all-reduce of `numbers` partial sums per token over col."""
        elements = self.local_tokens(flow) * numbers
        return self.predict_event(
            "all_reduce", self.layout_context.axis_group("col"), elements, flow.statistics_itemsize
        )

    def _dispatch_events(
        self, flow: ActivationShape, before: int, after: int, dispatch: Dispatch
    ) -> list[Event]:
        """Returns the events of dispatch, expert matrices (over row and col) and combine.

        before, after: number of hidden activations that are reduce-scattered and all-gathered over
        col. dispatch: the dtype in which rows are sent to the experts.
        """
        line = self.layout_context.axis_group
        rows = self.received_rows(flow)
        size = flow.itemsize
        (features,) = self.layout_context.feature_sharding(
            self.layout_context.units["embed"], "embed"
        ).local_shape
        # All ranks of row compute the rows of all of them, each with its part of the hidden
        # features.
        whole = rows * line("row").size
        hidden = whole * self.expert_width // line("row").size
        row = line("row")
        col = line("col")
        expert = line("expert")
        # Bytes per row; each fp8 row has a scale.
        narrow = {"model": features * size, "bf16": features * 2, "fp8": features + SCALE_BYTES}
        return [
            *self.predict_event("all_to_all", expert, self.sent_rows(flow), narrow[dispatch]),
            *self.predict_event("all_gather", row, whole * features, size),
            *self.predict_event("reduce_scatter", col, hidden * before, size),
            *self.predict_event("all_gather", col, hidden * after, size),
            *self.predict_event("reduce_scatter", row, whole * features, size),
            *self.predict_event("all_to_all", expert, rows * features, size),
        ]

    def flops(self, flow: ActivationShape) -> int:
        """Returns 2 · rows · (expert matrix elements) + 2 · tokens · (router elements)."""
        tokens = self.local_tokens(flow)
        (features,) = self.layout_context.feature_sharding(
            self.layout_context.units["embed"], "embed"
        ).local_shape
        # The full width: a rank computes its part of it for the rows of all ranks of row.
        hidden = self.expert_width * self.matrices
        return 2 * features * (self.received_rows(flow) * hidden + tokens * self.num_experts)
