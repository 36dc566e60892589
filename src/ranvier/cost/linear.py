"""Products: matrices of linear layers, and what multiplying by them communicates; no torch.

A linear layer gathers its input, multiplies and scatters its output (`sharding.Table.move`);
several that read the same value do it together. A head does it in chunks of tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from ranvier.cost.layers import Flow, Ground, Layer, Line
from ranvier.errors import ShardingError
from ranvier.sharding import WEIGHTS, Cut, Dim, Move, Sharding
from ranvier.trace import Event

CHUNK = 1 << 32
"""Bytes of the logits of a chunk at most."""
SMALL = 1 << 30
"""Bytes of logits that may be whole."""
ALIGNMENT = 16
"""Bytes. On a GPU, products with a matrix whose rows do not begin at multiples of it take 3 to 8
times as long."""


@dataclass(frozen=True, eq=False)
class Factor:
    """The matrix of a linear layer: of what it multiplies, to what, and which part is here."""

    shape: tuple[int, ...]
    """Of the whole weight, as it is stored."""
    dims: tuple[Dim, ...]
    ground: Ground = field(repr=False)
    trainable: bool = True
    transposed: bool = False
    """Whether the weight is stored as (in, out)."""

    def __post_init__(self) -> None:
        into = self.dims[0 if self.transposed else 1]
        if not isinstance(into, str):
            raise ShardingError(f"The in dim {into} of a linear layer cannot be packed.")

    @property
    def packed(self) -> Dim:
        """The out dim, several of it perhaps packed one after the other."""
        return self.dims[1 if self.transposed else 0]

    @property
    def out(self) -> str:
        """Name of the out dim."""
        return self.packed if isinstance(self.packed, str) else self.packed[1]

    @property
    def into(self) -> str:
        """Name of the in dim."""
        into = self.dims[0 if self.transposed else 1]
        assert isinstance(into, str), self.dims
        return into

    @property
    def count(self) -> int:
        """Out dims that are packed one after the other."""
        return 1 if isinstance(self.packed, str) else self.packed[0]

    @cached_property
    def move(self) -> Move:
        """What is gathered and scattered."""
        return self.ground.table.move(self.out, self.into)

    @cached_property
    def weight(self) -> Sharding:
        """Sharding of the weight."""
        ground = self.ground
        return Sharding.make(
            self.shape,
            self.dims,
            ground.table.weights,
            ground.degrees,
            units=ground.units,
            depth=True,
        )

    @cached_property
    def output(self) -> Sharding:
        """Sharding of the output features, of one of the packed."""
        features = self.shape[1 if self.transposed else 0]
        return self.ground.features(features // self.count, self.out)

    @cached_property
    def part(self) -> tuple[int, Cut] | None:
        """Dim and cut of what of its matrix a rank uses; None: all of it.

        Of the dim opposite to a rank my features: their region may cut it where no weight is.
        """
        if "rank" not in (self.out, self.into):
            return None
        dim, name = (0, self.out) if self.into == "rank" else (1, self.into)
        cuts = self.ground.features(self.weight.shape[dim], name).cuts[0]
        return next(((dim, cut) for cut in cuts if cut.axis not in WEIGHTS[name]), None)

    @cached_property
    def used(self) -> tuple[int, ...]:
        """Shape of the gathered weight, what I use of it."""
        shape = list(self.weight.gathered)
        if self.part is not None:
            shape[self.part[0]] = self.part[1].block
        return tuple(shape)

    @property
    def width(self) -> int:
        """Output features on this rank."""
        return self.count * self.output.local[0]

    def flops(self, flow: Flow) -> int:
        """2 · tokens · (out · in) of this rank."""
        scatter = self.move.scatter
        scattered = self.ground.line(scatter.axis).size if scatter.dim >= 0 else 1
        tokens = self.ground.tokens(flow, self.out) * scattered
        return 2 * tokens * math.prod(self.used)

    def made(self, flow: Flow) -> int:
        """Elements of the result of its product, before it is communicated."""
        return self.flops(flow) // (2 * self.used[0 if self.transposed else -1])


@dataclass(frozen=True, eq=False)
class Product(Layer):
    """x Wᵀ of layers that read the same value, or (apart) a part of it each."""

    factors: tuple[Factor, ...]
    apart: bool = False
    whole_sequence: bool = False
    """The sequence was gathered over row where the enclosing module begins."""

    @cached_property
    def gathers(self) -> Line:
        """Ranks over which the input is gathered."""
        step = self.factors[0].move.gather
        return self.ground.line(*([] if self.whole_sequence and step.dim == 1 else [step.axis]))

    @cached_property
    def scatters(self) -> Line:
        """Ranks over which the output is scattered."""
        return self.ground.line(self.factors[0].move.scatter.axis)

    @cached_property
    def shares(self) -> Line:
        """Ranks that have the same input and use it differently."""
        return self.ground.line(self.factors[0].move.share)

    @cached_property
    def totals(self) -> Line:
        """Ranks that get the same sum as their output."""
        return self.ground.line(self.factors[0].move.total)

    @property
    def trained(self) -> bool:
        """Whether a weight of the layers gets a gradient."""
        return any(factor.trainable for factor in self.factors)

    @property
    def wide(self) -> int:
        """Features of all outputs on this rank."""
        return sum(factor.width for factor in self.factors)

    def elements(self, flow: Flow) -> tuple[int, int]:
        """Elements of the gathered input and of the output before its scatter."""
        ground, first = self.ground, self.factors[0]
        width = ground.line(*ground.table.axes(first.into)).size
        features = first.weight.shape[0 if first.transposed else -1] // width
        features *= len(self.factors) if self.apart else 1
        x = ground.tokens(flow, first.into) * features * self.gathers.size
        return x, ground.tokens(flow, first.out) * self.wide * self.scatters.size

    def forward_events(self, flow: Flow) -> list[Event]:
        """Gather x, scatter y."""
        x, y = self.elements(flow)
        return [
            *self.event("all_gather", self.gathers, x, flow.itemsize),
            *self.event("reduce_scatter", self.scatters, y, flow.itemsize),
            *self.event("all_reduce", self.totals, y // self.scatters.size, flow.itemsize),
        ]

    def backward_events(self, flow: Flow) -> list[Event]:
        """Gather x and dy, scatter dx."""
        x, y = self.elements(flow)
        again = self.event("all_gather", self.gathers, x, flow.itemsize) if self.trained else []
        return [
            *again,
            *self.event("all_gather", self.scatters, y, flow.itemsize),
            *self.event("reduce_scatter", self.gathers, x, flow.itemsize),
            *self.event("all_reduce", self.shares, x // self.gathers.size, flow.itemsize),
        ]

    def output_kept(self, features: int, selective: bool) -> bool:
        """Whether a block that keeps what it communicates keeps the output, not the gathered input.

        Then it does not multiply again. It is so if the output is communicated, if it is kept
        anyway, or if it is no larger than the input (of `features` on this rank).
        """
        if self.scatters.size * self.totals.size > 1:
            return True
        gathered = features * (self.gathers.size if self.factors[0].move.gather.dim == -1 else 1)
        return self.gathers.size > 1 and (selective or self.wide <= gathered)

    def held(self, flow: Flow, *, selective: bool = False) -> int:
        """The output, or what is gathered if it is smaller: see `output_kept`."""
        x, y = self.elements(flow)
        communicated, output = self.scatters.size * self.totals.size > 1, y // self.scatters.size
        if self.gathers.size == 1 and not communicated:
            return 0
        if selective:  # instead of the results of its products
            return (output - sum(one.made(flow) for one in self.factors)) * flow.itemsize
        return (output if communicated else min(x, output)) * flow.itemsize

    def flops(self, flow: Flow) -> int:
        """2 · tokens · (out · in) of this rank, of all."""
        return sum(factor.flops(flow) for factor in self.factors)


@dataclass(frozen=True, eq=False)
class Scores(Product):
    """Logits over the vocabulary and their loss, a chunk of tokens at a time."""

    @property
    def vocab(self) -> Line:
        """Ranks that hold the other columns."""
        return self.ground.line(*self.ground.table.axes(self.factors[0].out))

    def forward_events(self, flow: Flow) -> list[Event]:
        """Gather x; of each chunk scatter the logits, then sum their statistics."""
        batch = self.ground.table.region(self.factors[0].out)["batch"]
        samples = self.ground.line(*(axis for axis in batch if axis == "col")).size
        events = self.event("all_gather", self.gathers, self._features(flow), flow.itemsize)
        for tokens in self.chunked(flow):
            events += self.event(
                "reduce_scatter", self.scatters, self._logits(tokens), flow.itemsize
            )
            for numbers in (1, 2):
                count = numbers * tokens // samples
                events += self.event("all_reduce", self.vocab, count, flow.statistics)
        return events

    def backward_events(self, flow: Flow) -> list[Event]:
        """Of each chunk gather the gradient of the logits; scatter dx."""
        events = [
            event
            for tokens in self.chunked(flow)
            for event in self.event(
                "all_gather", self.scatters, self._logits(tokens), flow.itemsize
            )
        ]
        dx = self._features(flow)
        return events + self.event("reduce_scatter", self.gathers, dx, flow.itemsize)

    def chunked(self, flow: Flow) -> list[int]:
        """Tokens of each chunk, of all samples; where nothing is scattered samples are one."""
        row = self.factors[0].weight.gathered[0] * flow.itemsize
        if self.scatters.size == 1:
            return [cut.stop - cut.start for cut in chunks(flow.samples * flow.seq, row)]
        cuts = chunks(flow.seq, flow.samples * row)
        return [flow.samples * (cut.stop - cut.start) for cut in cuts]

    def chunk_bytes(self, flow: Flow) -> int:
        """Bytes of the logits of the largest chunk, before they are scattered."""
        row = self.factors[0].weight.gathered[0] * flow.itemsize
        return max(self.chunked(flow), default=0) * row

    def _features(self, flow: Flow) -> int:
        return flow.samples * flow.seq * self.factors[0].weight.gathered[1]

    def _logits(self, tokens: int) -> int:
        """Elements of the logits of a chunk before they are scattered."""
        factor = self.factors[0]
        ranks = self.scatters.size if factor.move.scatter.dim == -1 else 1
        return tokens * factor.output.local[0] * ranks


def align_columns(columns: int, itemsize: int) -> int:
    """The smallest number of columns, at least `columns`, whose rows fill whole multiples of
    ALIGNMENT."""
    multiple = max(ALIGNMENT // itemsize, 1)
    return -(-columns // multiple) * multiple


def chunks(tokens: int, row_bytes: int) -> list[slice]:
    """Ranges of tokens of which at most CHUNK bytes are needed at once, and never all of many.

    A power of two: matrix products come in tiles.
    """
    many = tokens * row_bytes > SMALL
    step = min(CHUNK // max(row_bytes, 1), tokens // 2 if many else tokens)
    step = 1 << max(step.bit_length() - 1, 0) if step < tokens else tokens
    return [slice(start, min(start + step, tokens)) for start in range(0, tokens, max(step, 1))]
