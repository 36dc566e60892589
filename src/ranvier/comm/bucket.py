"""Weights on this rank, and the buckets in which they are gathered, reduced and updated.

Parameters that are communicated together form a `Bucket` (the matrices of a block; all vectors of
a kind): one flat buffer of values, one of gradients, one collective instead of many.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ranvier.comm import pairs
from ranvier.comm.lane import Mark, Updating
from ranvier.comm.sums import Pieces, Sum, flat
from ranvier.comm.verbs import Pending
from ranvier.grid import Axis
from ranvier.sharding import Dim, Place, Sharding

if TYPE_CHECKING:
    from ranvier.comm.deferred import Deferred

VECTORS = "vectors"
"""Block of all parameters that are no matrices."""

Group = Literal["matrix", "embedding", "vector"]
"""Kinds of parameters that an optimizer may treat differently, told by their named dims."""


@dataclass(eq=False)
class Weight:
    """A parameter on this rank.

    What part of the whole it is, and how layers get it and return gradients.
    """

    name: str
    dims: tuple[Dim, ...]
    sharding: Sharding
    place: Place
    group: Group
    """vector: fewer than two named dims; embedding: looked up, perhaps tied to a head; matrix."""
    std: float
    mean: float
    """Distribution of the initial values."""
    owners: list[tuple[torch.nn.Module, str]]
    """Modules and attributes that hold the parameter; several if it is tied."""
    trainable: bool = True
    original: Tensor | None = None
    """Values the model came with; None if it came without (meta device)."""
    made: torch.nn.Parameter | None = None
    """The parameter that parallelize made; another in its place would not be trained."""
    tied: Axis | None = None
    """Ranks of other stages that hold it as well."""
    bucket: Bucket = field(init=False)
    offset: int = field(init=False)

    @property
    def param(self) -> torch.nn.Parameter:
        """The parameter itself: my shard `place`."""
        module, attribute = self.owners[0]
        param = getattr(module, attribute)
        assert isinstance(param, torch.nn.Parameter), self.name
        return param

    @property
    def rest(self) -> Tensor:
        """My shard where it rests: the parameter itself, or on the host."""
        if self.bucket.home is None:
            return self.param.detach()
        flat = self.bucket.home[self.offset : self.offset + self.elements]
        return flat.view(self.sharding.local)

    @property
    def elements(self) -> int:
        """Elements of my shard, padding included."""
        return int(torch.Size(self.sharding.local).numel())

    @property
    def split(self) -> bool:
        """Whether the depth axis splits it."""
        return "depth" in self.sharding.axes

    def whole(self) -> Tensor:
        """The weight gathered over depth, outside autograd.

        Communicates: all-gather over depth, by bucket.
        """
        self.bucket.arrive()
        if not self.split:
            return self.param.detach()
        assert self.bucket.gathered is not None, self.name
        return self.bucket.gathered[self.bucket.weights.index(self)]

    def gathered(self) -> Tensor:
        """The weight gathered over depth, in autograd.

        Communicates: all-gather over depth; backward: the dual.
        """
        if not torch.compiler.is_compiling():
            self.bucket.arrive()
        if not self.split:
            return self.param
        whole = pairs.gather(self.param, self.bucket.queue.gather_axis, 0)
        return whole.narrow(0, 0, self.sharding.gathered[0])

    def deliver(self, grad: Tensor) -> None:
        """Take the gradient of the gathered weight.

        Communicates: reduce-scatter over depth, by bucket, later.
        """
        if self.trainable:
            self.bucket.queue.deliver(self, grad)


@dataclass(frozen=True)
class Segment:
    """A range of a bucket, and the ranks (other than along data) that hold the same parts of it."""

    start: int
    stop: int
    over: Axis


@dataclass(eq=False)
class Bucket:
    """Parameters that are gathered, reduced and updated together, in flat buffers."""

    name: str
    weights: list[Weight]
    queue: Deferred
    segments: list[Segment]
    """Ranges whose gradients are summed over the same ranks."""
    size: int
    """Elements on this rank, rounded up to a multiple of the data axis."""
    late: bool
    """Complete only at the end of a step: tied weights, vectors."""
    tied: Axis | None
    """Ranks of other stages that hold its weights as well."""
    data: Tensor = field(init=False)
    """Values `[size]`; the parameters are views of it."""
    grad: Sum | None = None
    """Sum of the gradients of this step, of `size` elements."""
    full: Tensor | None = None
    """Gradients of the gathered weights `[depth, size]`, before their reduction."""
    reduced: list[Pending] = field(default_factory=list)
    """My range over data of the gradient `[size/data]`; several are to be added."""
    finished: Sum | None = None
    """My range over data of the gradient, summed over all who hold the bucket."""
    squares: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Gradients of this step whose squares are being summed already, with their sums."""
    summed: Mark = None
    """When they are."""
    gathered: list[Tensor] | None = None
    """Its weights gathered over depth, or nothing but the sign that they are on the device."""
    home: Tensor | None = None
    """Values `[size]` on the host, of weights that come to the device for their turn only."""
    updating: Updating | None = None
    """An update that is under way."""

    @property
    def split(self) -> bool:
        """Whether the depth axis splits its weights."""
        return self.weights[0].split

    @property
    def trainable(self) -> bool:
        """Whether its weights get gradients."""
        return self.weights[0].trainable

    @property
    def rest(self) -> Tensor:
        """Its values `[size]` where they rest."""
        return self.data if self.home is None else self.home

    @property
    def comes(self) -> bool:
        """Whether something has to come before its weights can be used."""
        return self.split or self.home is not None

    @property
    def held(self) -> int:
        """Elements of my range over data."""
        return self.size // self.queue.data_axis.size

    def mine(self, flat: Tensor) -> Tensor:
        """My range over data of a flat tensor `[size]`."""
        return flat.view(-1, self.held)[self.queue.data_axis.index] if self.held else flat[:0]

    @contextmanager
    def under(self) -> Iterator[None]:
        """Memory under its values, for a moment: who makes views of resting weights needs it."""
        storage = self.data.untyped_storage()
        absent = storage.nbytes() < self.data.nbytes
        if absent:
            storage.resize_(self.data.nbytes)
        yield
        if absent:
            storage.resize_(0)

    def settle(self) -> None:
        """Have the device wait for an update that is under way."""
        if self.updating is not None:
            updating, self.updating = self.updating, None
            updating.wait()

    def arrive(self) -> None:
        """Have its weights on the device, as new as they are.

        Communicates: all-gather over depth, often issued before.
        """
        self.settle()
        if self.comes:
            self.queue.use(self.name)

    @property
    def copied(self) -> list[Segment]:
        """Segments whose gradients have to be summed over other axes than depth and data."""
        return [segment for segment in self.segments if segment.over.size > 1]

    def owned(self, weight: Weight) -> bool:
        """Whether no rank before me, along other axes than data, holds the same of a weight."""
        tied = self.tied is not None and self.tied.index > 0
        at = next(s for s in self.segments if s.start <= weight.offset < max(s.stop, s.start + 1))
        return at.over.index == 0 and not tied

    def first(self, pieces: Pieces) -> list[Tensor]:
        """Of my range over data of a gradient what no rank before me holds as well."""
        low = self.queue.data_axis.index * (self.size // self.queue.data_axis.size)
        tied = self.tied is not None and self.tied.index > 0
        owned = [s for s in self.segments if s.over.index == 0 and not tied]
        return [
            piece[max(s.start - low - at, 0) : max(s.stop - low - at, 0)]
            for at, piece in pieces
            for s in owned
        ]

    def place(self, weight: Weight) -> Place:
        """The part of `weight` whose optimizer state lies here.

        It is the overlap with my range over data.
        """
        axis = self.queue.data_axis
        step = self.size // axis.size
        start, stop = axis.index * step - weight.offset, (axis.index + 1) * step - weight.offset
        return weight.place.narrow(max(start, 0), max(stop, 0))

    def range(self, weight: Weight) -> tuple[int, int]:
        """Where that part lies in a tensor of my range over data."""
        axis = self.queue.data_axis
        step = self.size // axis.size
        start = max(weight.offset - axis.index * step, 0)
        flat = self.place(weight).flat
        assert flat is not None
        return start, start + flat[1] - flat[0]

    def by_weight(self, pieces: Pieces) -> list[tuple[Weight, Tensor]]:
        """What of my range over data each weight has."""
        whole = flat(pieces, self.queue.dtype)
        return [(weight, whole[slice(*self.range(weight))]) for weight in self.weights]

    def unpack(self, buffer: Tensor) -> list[Tensor]:
        """The gathered weights from their gathered buffer `[depth · size]`."""
        rows = buffer.view(-1, self.size)  # (depth, size)
        out = []
        for weight in self.weights:
            local = weight.sharding.local
            part = rows[:, weight.offset : weight.offset + weight.elements]
            whole = part.reshape(rows.shape[0] * local[0], *local[1:])
            out.append(whole[: weight.sharding.gathered[0]])
        return out

    def add(self, weight: Weight, grad: Tensor) -> None:
        """Add the gradient of a gathered weight to the buffer that waits for its reduction."""
        depth = self.queue.scatter_axis.size
        if self.full is None:
            self.full = torch.zeros(depth, self.size, dtype=self.queue.dtype, device=grad.device)
        local = weight.sharding.local
        if grad.shape[0] != depth * local[0]:  # the depth split of dim 0 is padded
            padded = grad.new_zeros(depth * local[0], *local[1:])
            padded[: grad.shape[0]] = grad
            grad = padded
        self.full[:, weight.offset : weight.offset + weight.elements] += grad.reshape(depth, -1)

    def accumulate(self, grad: Tensor, start: int = 0) -> None:
        """Add a gradient of my shards that lie one after the other from `start` on."""
        if self.grad is None:
            self.grad = Sum(self.size, self.queue.dtype)
        self.grad.add(start, grad)
