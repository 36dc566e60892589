"""Layers: what each communicates, computes and keeps, in closed form, without torch.

A layer here is its names of dims, its shapes and the ground it stands on: ranks, tables, units. The
leaves of `nn` ask these for their predictions, and the planner asks the same without any leaf. All
shapes of activations follow from the tables of `sharding`; `Event.bytes` is the size of the whole
(gathered or reduced) tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ranvier.config.plan import AXES, Dispatch
from ranvier.sharding import WEIGHT_RULE, Sharding, ShardingTable
from ranvier.trace import Event

COUNT_BYTES = 4
"""Bytes of a count of tokens."""
SCALE_BYTES = 4
"""Bytes of the scale of a row in fp8."""


@dataclass(frozen=True)
class ActivationShape:
    """What runs through a model on one (data, expert, depth) coordinate, for predictions."""

    samples: int
    """Sequences of a micro-batch."""
    seq: int
    """Tokens of a sequence."""
    itemsize: int
    """Bytes of an activation element."""
    statistics_itemsize: int
    """Bytes of an element of norms and loss statistics."""
    expert_load: float = 1.0
    """Rows of the busiest rank of expert, in means of all; 1: experts are balanced."""


@dataclass(frozen=True)
class AxisGroup:
    """Ranks along one axis or several, as predictions need them."""

    names: tuple[str, ...]
    size: int


@dataclass(frozen=True, eq=False)
class LayoutContext:
    """What all layers of a model share."""

    degrees: Mapping[str, int]
    table: ShardingTable
    units: Mapping[str, int]
    """Number of units of each named dim of the model (heads, not their elements)."""
    dispatch: Dispatch = "same"
    """In which type tokens travel to experts."""

    def axis_group(self, *names: str) -> AxisGroup:
        """The ranks along these axes; those of degree 1 are left out."""
        used = tuple(axis for axis in AXES if axis in names and self.degrees[axis] > 1)
        return AxisGroup(used, math.prod(self.degrees[axis] for axis in used))

    def feature_sharding(self, size: int, dim: str) -> Sharding:
        """How `size` elements of a dim lie as the features of an activation."""
        region = self.table.activation_rule(dim)
        return Sharding.from_dims([size], [dim], region, self.degrees, units=self.units)

    def local_tokens(self, flow: ActivationShape, dim: str) -> int:
        """Tokens of a micro-batch on this rank where `dim` is the features."""
        region = self.table.activation_rule(dim)
        cut = {*region["batch"], *region["seq"]} - {"data", "expert", "depth"}
        return flow.samples * flow.seq // math.prod(self.degrees[axis] for axis in cut)


@dataclass(frozen=True, eq=False)
class LayerCost:
    """A layer that communicates nothing, computes nothing and keeps nothing."""

    name: str
    layout_context: LayoutContext = field(repr=False)

    def forward_events(self, flow: ActivationShape) -> list[Event]:
        """Communication of the forward pass of a micro-batch, gathered weights apart."""
        return []

    def backward_events(self, flow: ActivationShape) -> list[Event]:
        """Communication of the backward pass of a micro-batch.

        Gathered weights and gradients are apart.
        """
        return []

    def events(self, flow: ActivationShape, *, recomputed: bool = False) -> list[Event]:
        """Communication of a micro-batch; a recomputed layer runs forward twice."""
        forward = self.forward_events(flow)
        return forward * (2 if recomputed else 1) + self.backward_events(flow)

    def saved_bytes(self, flow: ActivationShape, *, selective: bool = False) -> int:
        """Bytes that a block keeps more if it keeps what this layer communicates in forward.

        selective: they take the place of the results of products, which may have been larger.
        """
        line = self.layout_context.axis_group
        return sum(
            event.bytes // (line(*event.axis).size if event.op == "reduce_scatter" else 1)
            for event in self.forward_events(flow)
        )

    def flops(self, flow: ActivationShape) -> int:
        """Multiplications and additions of one forward pass of a micro-batch on this rank."""
        return 0

    def predict_event(self, op: str, line: AxisGroup, elements: int, itemsize: int) -> list[Event]:
        """One predicted event; none if the line has one rank."""
        if line.size == 1:
            return []
        return [Event(op, line.names, elements * itemsize, self.name)]


@dataclass(frozen=True, eq=False)
class EmbeddingCost(LayerCost):
    """W[ids]: the first dim split over row, or whole."""

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
        """Scatter the looked-up rows to the tokens."""
        return self.predict_event(
            "reduce_scatter", self.row_group, self._num_elements(flow), flow.itemsize
        )

    def backward_events(self, flow: ActivationShape) -> list[Event]:
        """Gather the gradient of all tokens, if the table is trained."""
        if not self.trainable:
            return []
        return self.predict_event(
            "all_gather", self.row_group, self._num_elements(flow), flow.itemsize
        )

    def _num_elements(self, flow: ActivationShape) -> int:
        return flow.samples * flow.seq * self.weight_sharding.unsharded_shape[1]


@dataclass(frozen=True, eq=False)
class NormCost(LayerCost):
    """A norm: numbers a token, summed over the axes that split its dim."""

    size: int
    dim: str
    sums_per_token: int = 1
    """Numbers a token."""

    @cached_property
    def feature_sharding(self) -> Sharding:
        """How the dim lies."""
        return self.layout_context.feature_sharding(self.size, self.dim)

    def forward_events(self, flow: ActivationShape) -> list[Event]:
        """One all-reduce for each sum."""
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
    """The loss of whole logits."""

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
    """The heads and samples of a rank."""

    dim: str
    head_dim: int
    window: int = 0
    """Tokens that a token sees; 0: all before it."""

    @property
    def local_width(self) -> int:
        """Features of my heads."""
        ranks = self.layout_context.axis_group(
            *self.layout_context.table.feature_axes(self.dim)
        ).size
        return self.layout_context.units[self.dim] * self.head_dim // ranks

    def flops(self, flow: ActivationShape) -> int:
        """Scores and values of the causal half: 2 · s · (width of my heads) a token.

        In a window of w tokens: 2 · w · (2 - w/s).
        """
        seen = min(self.window or flow.seq, flow.seq)
        tokens = self.layout_context.local_tokens(flow, self.dim)
        return 2 * tokens * seen * (2 * flow.seq - seen) // flow.seq * self.local_width


@dataclass(frozen=True, eq=False)
class DoraNormCost(LayerCost):
    """The lengths of the rows of an adapted weight (DoRA)."""

    size: int
    out_dim: str
    in_dim: str

    def forward_events(self, flow: ActivationShape) -> list[Event]:
        """A number for each row of the weight."""
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
    """The whole sequence, once for all layers of a module."""

    def forward_events(self, flow: ActivationShape) -> list[Event]:
        """Gather the tokens."""
        return self.predict_event(
            "all_gather", self._row_group, self._num_elements(flow), flow.itemsize
        )

    def backward_events(self, flow: ActivationShape) -> list[Event]:
        """Sum their gradients to where they came from."""
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
    """Experts: tokens travel over expert, features lie on col.

    How many rows a rank receives is a matter of the data: `flow.load` times the mean, which is one
    for each choice of its own tokens. It sends as many as it has choices.
    """

    num_experts: int
    experts_per_token: int
    expert_width: int
    """Features of the hidden layer of an expert."""
    matrices: int = 3
    """Of an expert: with a gate 3, else 2."""

    def sent_rows(self, flow: ActivationShape) -> int:
        """Rows that a rank sends: one for each choice of its tokens."""
        return self.layout_context.local_tokens(flow, "embed") * self.experts_per_token

    def received_rows(self, flow: ActivationShape) -> int:
        """Rows that a rank receives; on one rank of expert those that it has."""
        choices = self.sent_rows(flow)
        if self.layout_context.axis_group("expert").size > 1:
            return math.ceil(choices * flow.expert_load)
        return choices

    def forward_events(self, flow: ActivationShape) -> list[Event]:
        """Logits, counts, to the experts, through them, back."""
        peers = self.layout_context.axis_group("expert", "row")
        counts = flow.samples * self.num_experts * peers.size
        return [
            *self._router_events(flow, self.num_experts),
            *self.predict_event("all_gather", peers, counts, COUNT_BYTES),
            *self._dispatch_events(flow, self.matrices - 1, 1, self.layout_context.dispatch),
        ]

    def backward_events(self, flow: ActivationShape) -> list[Event]:
        """The same way for gradients, after that of the weights of choices."""
        return [
            *self._router_events(flow, self.experts_per_token),
            *self._dispatch_events(flow, 1, self.matrices - 1, "same"),
        ]

    def _router_events(self, flow: ActivationShape, numbers: int) -> list[Event]:
        """So many numbers of each token, of which all ranks of col have a part."""
        elements = self.layout_context.local_tokens(flow, "embed") * numbers
        return self.predict_event(
            "all_reduce", self.layout_context.axis_group("col"), elements, flow.statistics_itemsize
        )

    def _dispatch_events(
        self, flow: ActivationShape, before: int, after: int, dispatch: Dispatch
    ) -> list[Event]:
        """There, hidden layers scattered (so many) and gathered over col, and back.

        dispatch: the type in which rows go there.
        """
        line = self.layout_context.axis_group
        rows = self.received_rows(flow)
        size = flow.itemsize
        (features,) = self.layout_context.feature_sharding(
            self.layout_context.units["embed"], "embed"
        ).local_shape
        whole = rows * line("row").size
        hidden = whole * self.expert_width // line("row").size
        row = line("row")
        col = line("col")
        expert = line("expert")
        narrow = {"same": features * size, "bf16": features * 2, "fp8": features + SCALE_BYTES}
        return [
            *self.predict_event("all_to_all", expert, self.sent_rows(flow), narrow[dispatch]),
            *self.predict_event("all_gather", row, whole * features, size),
            *self.predict_event("reduce_scatter", col, hidden * before, size),
            *self.predict_event("all_gather", col, hidden * after, size),
            *self.predict_event("reduce_scatter", row, whole * features, size),
            *self.predict_event("all_to_all", expert, rows * features, size),
        ]

    def flops(self, flow: ActivationShape) -> int:
        """2 · rows · (elements of an expert's matrices) and 2 · tokens · (the router's)."""
        tokens = self.layout_context.local_tokens(flow, "embed")
        (features,) = self.layout_context.feature_sharding(
            self.layout_context.units["embed"], "embed"
        ).local_shape
        hidden = (
            self.expert_width * self.matrices
        )  # of all ranks of row, for whose rows I compute a part
        return 2 * features * (self.received_rows(flow) * hidden + tokens * self.num_experts)
