"""Layer costs: what each layer communicates, computes and saves, in closed form, without torch.

A layer here is its dim names, its shapes and its `LayoutContext`: degrees, sharding table, units.
The layers of `nn` use these for their predictions, and the planner uses the same without any layer.
All activation shapes follow from the tables of `sharding`; `Event.bytes` is the size of the full
(gathered or reduced) tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from ranvier.config.plan import AXES, Dispatch
from ranvier.sharding import WEIGHT_RULE, Sharding, ShardingTable, count_parts
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
    """Bytes of an activation element."""
    statistics_itemsize: int
    """Bytes of an element of norms and loss statistics."""
    expert_load: float = 1.0
    """Rows of the busiest expert rank, relative to the mean; 1: balanced experts."""


@dataclass(frozen=True)
class AxisGroup:
    """Names and number of ranks along one axis or several fused ones."""

    names: tuple[str, ...]
    size: int


@dataclass(frozen=True, eq=False)
class LayoutContext:
    """Layout that all layers of a model share."""

    degrees: Mapping[str, int]
    table: ShardingTable
    units: Mapping[str, int]
    """Number of units of each named dim of the model (heads, not their elements)."""
    dispatch: Dispatch = "model"
    """Dtype in which tokens are dispatched to experts."""

    def axis_group(self, *names: str) -> AxisGroup:
        """Return the ranks along these axes; axes of degree 1 are left out."""
        used = tuple(axis for axis in AXES if axis in names and self.degrees[axis] > 1)
        return AxisGroup(used, math.prod(self.degrees[axis] for axis in used))

    def feature_sharding(self, size: int, dim: str) -> Sharding:
        """Return the sharding of `size` elements of a dim as the features of an activation."""
        region = self.table.activation_rule(dim)
        return Sharding.from_dims([size], [dim], region, self.degrees, units=self.units)

    def local_tokens(self, flow: ActivationShape, dim: str) -> int:
        """Return the tokens of a micro-batch on this rank where `dim` is the feature dim."""
        # An ActivationShape is already that of one replica.
        inside = (self.table.axes_inside_replica(dim, name) for name in ("batch", "seq"))
        return flow.samples * flow.seq // count_parts(chain.from_iterable(inside), self.degrees)


@dataclass(frozen=True, eq=False)
class LayerCost:
    """Base class: a layer that communicates, computes and saves nothing."""

    name: str
    layout_context: LayoutContext = field(repr=False)

    def forward_events(self, flow: ActivationShape) -> list[Event]:
        """Return the communication of a forward pass, without weight gathers."""
        return []

    def backward_events(self, flow: ActivationShape) -> list[Event]:
        """Return the communication of a backward pass, without weight gathers and gradients."""
        return []

    def events(self, flow: ActivationShape, *, recomputed: bool = False) -> list[Event]:
        """Return the communication of a micro-batch; a recomputed layer runs forward twice."""
        # Recomputation repeats the communication of forward, unless its results are saved.
        forward = self.forward_events(flow)
        return forward * (2 if recomputed else 1) + self.backward_events(flow)

    def saved_bytes(self, flow: ActivationShape, *, selective: bool = False) -> int:
        """Return the extra bytes of a block that saves what this layer communicates in forward.

        selective: they replace saved results of matrix products, which may have been larger.
        """
        # The result of a reduce-scatter is one part of the event's tensor.
        line = self.layout_context.axis_group
        return sum(
            event.bytes // (line(*event.axis).size if event.op == "reduce_scatter" else 1)
            for event in self.forward_events(flow)
        )

    def flops(self, flow: ActivationShape) -> int:
        """Return the FLOPs of one forward pass of a micro-batch on this rank."""
        return 0

    def predict_event(self, op: str, line: AxisGroup, elements: int, itemsize: int) -> list[Event]:
        """Return one predicted event; none if the group has one rank."""
        if line.size == 1:
            return []
        return [Event(op, line.names, elements * itemsize, self.name)]


@dataclass(frozen=True, eq=False)
class EmbeddingCost(LayerCost):
    """W[ids]: the first dim is split over row, or not split."""

    shape: tuple[int, ...]
    row_dim: str
    """Name of the first dim."""
    trainable: bool = True

    @cached_property
    def row_group(self) -> AxisGroup:
        """Ranks that hold different rows."""
        return self.layout_context.axis_group(*WEIGHT_RULE.get(self.row_dim, ()))

    @cached_property
    def weight_sharding(self) -> Sharding:
        """Sharding of the table."""
        ground = self.layout_context
        dims = (self.row_dim, "embed")
        return Sharding.from_dims(
            self.shape,
            dims,
            ground.table.weight_rule,
            ground.degrees,
            units=ground.units,
            depth=True,
        )

    def forward_events(self, flow: ActivationShape) -> list[Event]:
        """Reduce-scatter the looked-up rows along the tokens."""
        return self.predict_event(
            "reduce_scatter", self.row_group, self._num_elements(flow), flow.itemsize
        )

    def backward_events(self, flow: ActivationShape) -> list[Event]:
        """All-gather the gradient of all tokens, if the table is trained."""
        if not self.trainable:
            return []
        return self.predict_event(
            "all_gather", self.row_group, self._num_elements(flow), flow.itemsize
        )

    # Before the scatter a rank has rows for all tokens, with its part of the embed dim.
    def _num_elements(self, flow: ActivationShape) -> int:
        return flow.samples * flow.seq * self.weight_sharding.unsharded_shape[1]


@dataclass(frozen=True, eq=False)
class NormCost(LayerCost):
    """A norm: numbers per token, summed over the axes that split its dim."""

    size: int
    dim: str
    sums_per_token: int = 1
    """Numbers per token."""

    @cached_property
    def feature_sharding(self) -> Sharding:
        """Sharding of the normalized dim."""
        return self.layout_context.feature_sharding(self.size, self.dim)

    def forward_events(self, flow: ActivationShape) -> list[Event]:
        """One all-reduce per sum."""
        line = self.layout_context.axis_group(
            *(cut.axis for cut in self.feature_sharding.splits[0])
        )
        elements = self.layout_context.local_tokens(flow, self.dim)
        return (
            self.predict_event("all_reduce", line, elements, flow.statistics_itemsize)
            * self.sums_per_token
        )

    def backward_events(self, flow: ActivationShape) -> list[Event]:
        """As forward."""
        return self.forward_events(flow)


@dataclass(frozen=True, eq=False)
class CrossEntropyCost(LayerCost):
    """The cross entropy of unchunked logits."""

    dim: str

    def forward_events(self, flow: ActivationShape) -> list[Event]:
        """The maximum, then sum and target logit together."""
        line = self.layout_context.axis_group(*self.layout_context.table.feature_axes(self.dim))
        tokens = self.layout_context.local_tokens(flow, self.dim)
        return [
            *self.predict_event("all_reduce", line, tokens, flow.statistics_itemsize),
            *self.predict_event("all_reduce", line, 2 * tokens, flow.statistics_itemsize),
        ]


@dataclass(frozen=True, eq=False)
class AttentionCost(LayerCost):
    """Attention over the heads and samples of a rank; communicates nothing."""

    dim: str
    head_dim: int
    window: int = 0
    """Sliding window: tokens that a token attends to; 0: all before it."""

    @property
    def local_width(self) -> int:
        """Features of the heads on this rank."""
        ranks = self.layout_context.axis_group(
            *self.layout_context.table.feature_axes(self.dim)
        ).size
        return self.layout_context.units[self.dim] * self.head_dim // ranks

    def flops(self, flow: ActivationShape) -> int:
        """Scores and values of the causal half: 2 · s · (width of local heads) per token.

        With a window of w tokens: 2 · w · (2 - w/s) · (width of local heads).
        """
        # QKᵀ and PV take 4 · s · width per token without a mask; the causal mask halves it.
        seen = min(self.window or flow.seq, flow.seq)
        tokens = self.layout_context.local_tokens(flow, self.dim)
        return 2 * tokens * seen * (2 * flow.seq - seen) // flow.seq * self.local_width


@dataclass(frozen=True, eq=False)
class DoraNormCost(LayerCost):
    """The norms of the rows of an adapted weight (DoRA)."""

    size: int
    out_dim: str
    in_dim: str

    def forward_events(self, flow: ActivationShape) -> list[Event]:
        """All-reduce of one number per row of the weight, over the axes that split its in dim."""
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
    """All-gather of the sequence over row, once for all layers of a module."""

    def forward_events(self, flow: ActivationShape) -> list[Event]:
        """All-gather the tokens."""
        return self.predict_event(
            "all_gather", self._row_group, self._num_elements(flow), flow.itemsize
        )

    def backward_events(self, flow: ActivationShape) -> list[Event]:
        """Reduce-scatter their gradients."""
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
    """Mixture of experts: tokens are dispatched over expert, features are split over col.

    The number of rows a rank receives depends on data: `flow.expert_load` times the mean, which is
    one per choice of its own tokens. It sends one row per choice.
    """

    num_experts: int
    experts_per_token: int
    expert_width: int
    """Hidden features of an expert."""
    matrices: int = 3
    """Matrices of an expert: 3 with a gate, else 2."""

    def sent_rows(self, flow: ActivationShape) -> int:
        """Return the rows that a rank sends: one per choice of its tokens."""
        return self.layout_context.local_tokens(flow, "embed") * self.experts_per_token

    def received_rows(self, flow: ActivationShape) -> int:
        """Return the rows that a rank receives; its own ones if expert has one rank."""
        choices = self.sent_rows(flow)
        if self.layout_context.axis_group("expert").size > 1:
            return math.ceil(choices * flow.expert_load)
        return choices

    def forward_events(self, flow: ActivationShape) -> list[Event]:
        """Router logits, token counts, dispatch, expert matrices, combine."""
        peers = self.layout_context.axis_group("expert", "row")
        # One count per sample and expert from each rank of expert and row.
        counts = flow.samples * self.num_experts * peers.size
        return [
            *self._router_events(flow, self.num_experts),
            *self.predict_event("all_gather", peers, counts, COUNT_BYTES),
            # Outputs of gate and up are reduce-scattered over col, the input of down is gathered;
            # in backward it is the other way round.
            *self._dispatch_events(flow, self.matrices - 1, 1, self.layout_context.dispatch),
        ]

    def backward_events(self, flow: ActivationShape) -> list[Event]:
        """Gradient of the router weights, then the same path for gradients of the rows."""
        return [
            *self._router_events(flow, self.experts_per_token),
            # Gradients are always sent in the dtype of activations.
            *self._dispatch_events(flow, 1, self.matrices - 1, "model"),
        ]

    def _router_events(self, flow: ActivationShape, numbers: int) -> list[Event]:
        """All-reduce of `numbers` per token over col, whose ranks hold partial sums."""
        elements = self.layout_context.local_tokens(flow, "embed") * numbers
        return self.predict_event(
            "all_reduce", self.layout_context.axis_group("col"), elements, flow.statistics_itemsize
        )

    def _dispatch_events(
        self, flow: ActivationShape, before: int, after: int, dispatch: Dispatch
    ) -> list[Event]:
        """Dispatch, the communication of the expert matrices over row and col, and combine.

        before, after: hidden activations that are reduce-scattered and all-gathered over col.
        dispatch: the dtype in which rows are sent to the experts.
        """
        line = self.layout_context.axis_group
        rows = self.received_rows(flow)
        size = flow.itemsize
        (features,) = self.layout_context.feature_sharding(
            self.layout_context.units["embed"], "embed"
        ).local_shape
        # Ranks of row compute on each other's rows, each with its part of the hidden features.
        whole = rows * line("row").size
        hidden = whole * self.expert_width // line("row").size
        row = line("row")
        col = line("col")
        expert = line("expert")
        # Bytes per row; fp8 rows carry a scale each.
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
        """2 · rows · (elements of expert matrices) + 2 · tokens · (elements of the router)."""
        tokens = self.layout_context.local_tokens(flow, "embed")
        (features,) = self.layout_context.feature_sharding(
            self.layout_context.units["embed"], "embed"
        ).local_shape
        # The full width: this rank computes its part of it for the rows of all ranks of row.
        hidden = self.expert_width * self.matrices
        return 2 * features * (self.received_rows(flow) * hidden + tokens * self.num_experts)
