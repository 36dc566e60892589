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
from ranvier.sharding import WEIGHTS, Sharding, Table
from ranvier.trace import Event

COUNT = 4
"""Bytes of a count of tokens."""
SCALE = 4
"""Bytes of the scale of a row in fp8."""


@dataclass(frozen=True)
class Flow:
    """What runs through a model on one (data, expert, depth) coordinate, for predictions."""

    samples: int
    """Sequences of a micro-batch."""
    seq: int
    """Tokens of a sequence."""
    itemsize: int
    """Bytes of an activation element."""
    statistics: int
    """Bytes of an element of norms and loss statistics."""
    load: float = 1.0
    """Rows of the busiest rank of expert, in means of all; 1: experts are balanced."""


@dataclass(frozen=True)
class Line:
    """Ranks along one axis or several, as predictions need them."""

    names: tuple[str, ...]
    size: int


@dataclass(frozen=True, eq=False)
class Ground:
    """What all layers of a model share."""

    degrees: Mapping[str, int]
    table: Table
    units: Mapping[str, int]
    """Number of units of each named dim of the model (heads, not their elements)."""
    dispatch: Dispatch = "same"
    """In which type tokens travel to experts."""

    def line(self, *names: str) -> Line:
        """The ranks along these axes; those of degree 1 are left out."""
        used = tuple(axis for axis in AXES if axis in names and self.degrees[axis] > 1)
        return Line(used, math.prod(self.degrees[axis] for axis in used))

    def features(self, size: int, dim: str) -> Sharding:
        """How `size` elements of a dim lie as the features of an activation."""
        region = self.table.region(dim)
        return Sharding.make([size], [dim], region, self.degrees, units=self.units)

    def tokens(self, flow: Flow, dim: str) -> int:
        """Tokens of a micro-batch on this rank where `dim` is the features."""
        region = self.table.region(dim)
        cut = {*region["batch"], *region["seq"]} - {"data", "expert", "depth"}
        return flow.samples * flow.seq // math.prod(self.degrees[axis] for axis in cut)


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer that communicates nothing, computes nothing and keeps nothing."""

    name: str
    ground: Ground = field(repr=False)

    def forward_events(self, flow: Flow) -> list[Event]:
        """Communication of the forward pass of a micro-batch, gathered weights apart."""
        return []

    def backward_events(self, flow: Flow) -> list[Event]:
        """Communication of the backward pass of a micro-batch.

        Gathered weights and gradients are apart.
        """
        return []

    def events(self, flow: Flow, *, recomputed: bool = False) -> list[Event]:
        """Communication of a micro-batch; a recomputed layer runs forward twice."""
        forward = self.forward_events(flow)
        return forward * (2 if recomputed else 1) + self.backward_events(flow)

    def held(self, flow: Flow, *, selective: bool = False) -> int:
        """Bytes that a block keeps more if it keeps what this layer communicates in forward.

        selective: they take the place of the results of products, which may have been larger.
        """
        line = self.ground.line
        return sum(
            event.bytes // (line(*event.axis).size if event.op == "reduce_scatter" else 1)
            for event in self.forward_events(flow)
        )

    def flops(self, flow: Flow) -> int:
        """Multiplications and additions of one forward pass of a micro-batch on this rank."""
        return 0

    def event(self, op: str, line: Line, elements: int, itemsize: int) -> list[Event]:
        """One predicted event; none if the line has one rank."""
        if line.size == 1:
            return []
        return [Event(op, line.names, elements * itemsize, self.name)]


@dataclass(frozen=True, eq=False)
class LookUp(Layer):
    """W[ids]: the first dim split over row, or whole."""

    shape: tuple[int, ...]
    rows: str
    """Name of the first dim."""
    trainable: bool = True

    @cached_property
    def line(self) -> Line:
        """Ranks that hold different rows."""
        return self.ground.line(*WEIGHTS.get(self.rows, ()))

    @cached_property
    def weight(self) -> Sharding:
        """Sharding of the table."""
        ground, dims = self.ground, (self.rows, "embed")
        return Sharding.make(
            self.shape, dims, ground.table.weights, ground.degrees, units=ground.units, depth=True
        )

    def forward_events(self, flow: Flow) -> list[Event]:
        """Scatter the looked-up rows to the tokens."""
        return self.event("reduce_scatter", self.line, self._elements(flow), flow.itemsize)

    def backward_events(self, flow: Flow) -> list[Event]:
        """Gather the gradient of all tokens, if the table is trained."""
        if not self.trainable:
            return []
        return self.event("all_gather", self.line, self._elements(flow), flow.itemsize)

    def _elements(self, flow: Flow) -> int:
        return flow.samples * flow.seq * self.weight.gathered[1]


@dataclass(frozen=True, eq=False)
class Statistics(Layer):
    """A norm: numbers a token, summed over the axes that split its dim."""

    size: int
    dim: str
    sums: int = 1
    """Numbers a token."""

    @cached_property
    def features(self) -> Sharding:
        """How the dim lies."""
        return self.ground.features(self.size, self.dim)

    def forward_events(self, flow: Flow) -> list[Event]:
        """One all-reduce for each sum."""
        line = self.ground.line(*(cut.axis for cut in self.features.cuts[0]))
        elements = self.ground.tokens(flow, self.dim)
        return self.event("all_reduce", line, elements, flow.statistics) * self.sums

    def backward_events(self, flow: Flow) -> list[Event]:
        """As forward."""
        return self.forward_events(flow)


@dataclass(frozen=True, eq=False)
class Entropy(Layer):
    """The loss of whole logits."""

    dim: str

    def forward_events(self, flow: Flow) -> list[Event]:
        """The maximum, then sum and target logit together."""
        line = self.ground.line(*self.ground.table.axes(self.dim))
        tokens = self.ground.tokens(flow, self.dim)
        return [
            *self.event("all_reduce", line, tokens, flow.statistics),
            *self.event("all_reduce", line, 2 * tokens, flow.statistics),
        ]


@dataclass(frozen=True, eq=False)
class Attention(Layer):
    """The heads and samples of a rank."""

    dim: str
    head_dim: int
    window: int = 0
    """Tokens that a token sees; 0: all before it."""

    @property
    def width(self) -> int:
        """Features of my heads."""
        ranks = self.ground.line(*self.ground.table.axes(self.dim)).size
        return self.ground.units[self.dim] * self.head_dim // ranks

    def flops(self, flow: Flow) -> int:
        """Scores and values of the causal half: 2 · s · (width of my heads) a token.

        In a window of w tokens: 2 · w · (2 - w/s).
        """
        seen = min(self.window or flow.seq, flow.seq)
        tokens = self.ground.tokens(flow, self.dim)
        return 2 * tokens * seen * (2 * flow.seq - seen) // flow.seq * self.width


@dataclass(frozen=True, eq=False)
class Lengths(Layer):
    """The lengths of the rows of an adapted weight (DoRA)."""

    size: int
    out: str
    into: str

    def forward_events(self, flow: Flow) -> list[Event]:
        """A number for each row of the weight."""
        ground = self.ground
        weights = ground.table.weights
        (rows,) = Sharding.make(
            [self.size], [self.out], weights, ground.degrees, units=ground.units
        ).local
        return self.event("all_reduce", ground.line(*WEIGHTS[self.into]), rows, flow.statistics)


@dataclass(frozen=True, eq=False)
class Opening(Layer):
    """The whole sequence, once for all layers of a module."""

    def forward_events(self, flow: Flow) -> list[Event]:
        """Gather the tokens."""
        return self.event("all_gather", self._line, self._elements(flow), flow.itemsize)

    def backward_events(self, flow: Flow) -> list[Event]:
        """Sum their gradients to where they came from."""
        return self.event("reduce_scatter", self._line, self._elements(flow), flow.itemsize)

    @property
    def _line(self) -> Line:
        return self.ground.line("row")

    def _elements(self, flow: Flow) -> int:
        (width,) = self.ground.features(self.ground.units["embed"], "embed").local
        return self.ground.tokens(flow, "embed") * self._line.size * width


@dataclass(frozen=True, eq=False)
class Mixture(Layer):
    """Experts: tokens travel over expert, features lie on col.

    How many rows a rank receives is a matter of the data: `flow.load` times the mean, which is one
    for each choice of its own tokens. It sends as many as it has choices.
    """

    experts: int
    top: int
    width: int
    """Features of the hidden layer of an expert."""
    matrices: int = 3
    """Of an expert: with a gate 3, else 2."""

    def choices(self, flow: Flow) -> int:
        """Rows that a rank sends: one for each choice of its tokens."""
        return self.ground.tokens(flow, "embed") * self.top

    def rows(self, flow: Flow) -> int:
        """Rows that a rank receives; on one rank of expert those that it has."""
        choices = self.choices(flow)
        return math.ceil(choices * flow.load) if self.ground.line("expert").size > 1 else choices

    def forward_events(self, flow: Flow) -> list[Event]:
        """Logits, counts, to the experts, through them, back."""
        peers = self.ground.line("expert", "row")
        counts = flow.samples * self.experts * peers.size
        return [
            *self._shared(flow, self.experts),
            *self.event("all_gather", peers, counts, COUNT),
            *self._passes(flow, self.matrices - 1, 1, self.ground.dispatch),
        ]

    def backward_events(self, flow: Flow) -> list[Event]:
        """The same way for gradients, after that of the weights of choices."""
        return [*self._shared(flow, self.top), *self._passes(flow, 1, self.matrices - 1, "same")]

    def _shared(self, flow: Flow, numbers: int) -> list[Event]:
        """So many numbers of each token, of which all ranks of col have a part."""
        elements = self.ground.tokens(flow, "embed") * numbers
        return self.event("all_reduce", self.ground.line("col"), elements, flow.statistics)

    def _passes(self, flow: Flow, before: int, after: int, dispatch: Dispatch) -> list[Event]:
        """There, hidden layers scattered (so many) and gathered over col, and back.

        dispatch: the type in which rows go there.
        """
        line, rows, size = self.ground.line, self.rows(flow), flow.itemsize
        (features,) = self.ground.features(self.ground.units["embed"], "embed").local
        whole = rows * line("row").size
        hidden = whole * self.width // line("row").size
        row, col, expert = line("row"), line("col"), line("expert")
        narrow = {"same": features * size, "bf16": features * 2, "fp8": features + SCALE}
        return [
            *self.event("all_to_all", expert, self.choices(flow), narrow[dispatch]),
            *self.event("all_gather", row, whole * features, size),
            *self.event("reduce_scatter", col, hidden * before, size),
            *self.event("all_gather", col, hidden * after, size),
            *self.event("reduce_scatter", row, whole * features, size),
            *self.event("all_to_all", expert, rows * features, size),
        ]

    def flops(self, flow: Flow) -> int:
        """2 · rows · (elements of an expert's matrices) and 2 · tokens · (the router's)."""
        tokens = self.ground.tokens(flow, "embed")
        (features,) = self.ground.features(self.ground.units["embed"], "embed").local
        hidden = self.width * self.matrices  # of all ranks of row, for whose rows I compute a part
        return 2 * features * (self.rows(flow) * hidden + tokens * self.experts)
