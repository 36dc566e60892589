"""Weights on this rank, and the buckets in which they are gathered, reduced and updated.

Parameters that are communicated together form a `Bucket` (the matrices of a block; all vectors of
a kind): one flat buffer of values, one of gradients, one collective instead of many. Of a pruned
bucket gradients and states are compressed: `count` elements instead of `size` (see kept).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ranvier.buckets.sparsity import Kept, packed
from ranvier.buckets.spec import Bulk, Group
from ranvier.comm import autograd, collectives
from ranvier.comm.accumulator import Pieces, Sum, flat
from ranvier.comm.collectives import Pending
from ranvier.comm.streams import Mark, Updating
from ranvier.grid import Axis
from ranvier.sharding import Dim, Place, Sharding

if TYPE_CHECKING:
    from ranvier.buckets.scheduler import Deferred


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
        dim = self.sharding.depth_dim
        whole = autograd.gather(self.param, self.bucket.queue.gather_axis, dim)
        return whole.narrow(dim, 0, self.sharding.gathered[dim])

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
    kept: Kept | None = None
    """Which elements are not zero for good; None: none is."""
    grad: Sum | None = None
    """Sum of the gradients of this step, of `count` elements."""
    full: Tensor | None = None
    """Gradients of the gathered weights `[depth, count]`, before their reduction."""
    reduced: list[Pending] = field(default_factory=list)
    """My range over data of the gradient `[count/data]`; several are to be added."""
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
    def bulk(self) -> Bulk:
        """What of it is communicated."""
        spans = [(segment.over.names, segment.stop - segment.start) for segment in self.copied]
        tied = self.tied is not None
        return Bulk(
            self.name,
            self.size,
            self.count,
            self.split,
            self.trainable,
            self.late,
            tuple(spans),
            tied,
        )

    @property
    def split(self) -> bool:
        """Whether the depth axis splits its weights."""
        return self.weights[0].split

    @property
    def trainable(self) -> bool:
        """Whether its weights get gradients."""
        return self.weights[0].trainable

    @property
    def count(self) -> int:
        """Elements that are reduced and updated, a multiple of the data axis."""
        return self.size if self.kept is None else self.kept.count

    @property
    def held(self) -> int:
        """Elements of my range over data that are updated."""
        return self.count // self.queue.data_axis.size

    @property
    def rest(self) -> Tensor:
        """Its values `[size]` where they rest."""
        return self.data if self.home is None else self.home

    @property
    def comes(self) -> bool:
        """Whether something has to come before its weights can be used."""
        return self.split or self.home is not None

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
        return [segment for segment in self._compressed() if segment.over.size > 1]

    def _compressed(self) -> list[Segment]:
        """Segments as they lie in a gradient."""
        if self.kept is None:
            return self.segments
        return [Segment(self.kept.at(s.start), self.kept.at(s.stop), s.over) for s in self.segments]

    def owned(self, weight: Weight) -> bool:
        """Whether no rank before me, along other axes than data, holds the same of a weight."""
        tied = self.tied is not None and self.tied.index > 0
        return self.segment(weight).over.index == 0 and not tied

    def segment(self, weight: Weight) -> Segment:
        """The segment that a weight lies in."""
        offset = weight.offset
        return next(s for s in self.segments if s.start <= offset < max(s.stop, s.start + 1))

    def first(self, pieces: Pieces) -> list[Tensor]:
        """Of my range over data of a gradient what no rank before me holds as well."""
        low = self.queue.data_axis.index * self.held
        tied = self.tied is not None and self.tied.index > 0
        owned = [s for s in self._compressed() if s.over.index == 0 and not tied]
        return [
            piece[max(s.start - low - at, 0) : max(s.stop - low - at, 0)]
            for at, piece in pieces
            for s in owned
        ]

    @property
    def bounds(self) -> tuple[int, int]:
        """Where my range over data begins and ends in the values `[size]`."""
        axis = self.queue.data_axis
        if self.kept is not None:
            return self.kept.bounds[axis.index], self.kept.bounds[axis.index + 1]
        return axis.index * self.held, (axis.index + 1) * self.held

    def place(self, weight: Weight) -> Place:
        """The part of `weight` whose optimizer state lies here.

        It is the overlap with my range over data.
        """
        start, stop = (bound - weight.offset for bound in self.bounds)
        return weight.place.narrow(max(start, 0), max(stop, 0))

    def range(self, weight: Weight) -> tuple[int, int]:
        """Where that part lies in a dense tensor of my range over data."""
        start = max(weight.offset - self.bounds[0], 0)
        flat = self.place(weight).flat
        assert flat is not None
        return start, start + flat[1] - flat[0]

    def by_weight(self, pieces: Pieces) -> list[tuple[Weight, Tensor]]:
        """What of my range over data each weight has, zeros where it is pruned."""
        whole = self.spread(flat(pieces, self.queue.dtype))
        return [(weight, whole[slice(*self.range(weight))]) for weight in self.weights]

    # ---- my range over data, of which a pruned bucket holds what stays --------------------

    def prune(self, mask: Tensor | None) -> None:
        """Let only these elements of my shards `[size]` be other than zero; None: all.

        What states and gradients there are does not follow. Communicates: all-gather of bits over
        depth.
        """
        if mask is None:
            self.kept = None
            return
        axis, rows = self.queue.gather_axis, packed(mask)[None]
        if self.split:
            with self.queue.grid.trace.at(self.name):
                rows = collectives.all_gather(rows, axis).wait()
        edges = [edge for w in self.weights for edge in (w.offset, w.offset + w.elements)]
        mine, ranks = axis.index if self.split else 0, self.queue.data_axis.size
        self.kept = Kept(rows, self.size, edges, mine=mine, ranks=ranks)
        self.kept.clear(self.rest)

    def span(self, weight: Weight) -> tuple[int, int]:
        """Where my part of a weight lies in a tensor of its states `[held]`."""
        if self.kept is None:
            return self.range(weight)
        first = self.queue.data_axis.index * self.held
        edges = (weight.offset, weight.offset + weight.elements)
        low, high = (min(max(self.kept.at(edge) - first, 0), self.held) for edge in edges)
        return low, high

    def mine(self, flat: Tensor) -> Tensor:
        """My range over data of a flat tensor `[size]`: `[held]`, a copy if it is pruned."""
        if self.kept is not None:
            first = self.queue.data_axis.index * self.held
            return self.kept.take(flat.to(self.kept.device), 0, first, first + self.held)
        return flat.view(-1, self.held)[self.queue.data_axis.index] if self.held else flat[:0]

    def spread(self, part: Tensor) -> Tensor:
        """A tensor of my range `[held]` as it lies in the values, zeros where it is pruned."""
        if self.kept is None:
            return part
        low, high = self.bounds
        dense = torch.zeros(high - low, dtype=part.dtype, device=self.kept.device)
        self.kept.put(dense, low, self.queue.data_axis.index * self.held, part)
        return dense

    def compress(self, dense: Tensor) -> Tensor:
        """The converse of `spread`."""
        if self.kept is None:
            return dense
        first = self.queue.data_axis.index * self.held
        dense = dense.to(self.kept.device)
        return self.kept.take(dense, self.bounds[0], first, first + self.held)

    def renew(self, start: int, new: Tensor) -> None:
        """Take new values of my range from `start` on, where they rest."""
        self.write(self.queue.data_axis.index * self.held + start, new)

    def write(self, start: int, new: Tensor) -> None:
        """Take new values of what is updated, the ranges of all data ranks, from `start` on."""
        if self.kept is None:
            self.rest[start : start + new.numel()].copy_(new, non_blocking=True)
            return
        new = new.to(self.kept.device, non_blocking=True)
        if self.home is None:
            self.kept.put(self.data, 0, start, new)
            return
        # A device puts them in their places quickly: what lies around them comes and goes.
        low, high = self.kept.position(start), self.kept.position(start + new.numel())
        dense = self.home[low:high].to(self.kept.device, non_blocking=True, copy=True)
        self.kept.put(dense, low, start, new)
        self.home[low:high].copy_(dense, non_blocking=True)

    # ---- over depth ---------------------------------------------------------------------

    def unpack(self, buffer: Tensor) -> list[Tensor]:
        """The gathered weights from their gathered buffer `[depth · size]`."""
        rows = buffer.view(-1, self.size)  # (depth, size)
        out = []
        for weight in self.weights:
            local, dim = weight.sharding.local, weight.sharding.depth_dim
            part = rows[:, weight.offset : weight.offset + weight.elements]
            whole = part.unflatten(1, local).movedim(0, dim).flatten(dim, dim + 1)
            out.append(whole.narrow(dim, 0, weight.sharding.gathered[dim]).contiguous())
        return out

    def add(self, weight: Weight, grad: Tensor) -> None:
        """Add the gradient of a gathered weight to the buffer that waits for its reduction."""
        depth = self.queue.scatter_axis.size
        if self.full is None:
            self.full = torch.zeros(depth, self.count, dtype=self.queue.dtype, device=grad.device)
        local, dim = weight.sharding.local, weight.sharding.depth_dim
        if grad.shape[dim] != depth * local[dim]:  # the depth split is padded
            shape = [*local[:dim], depth * local[dim], *local[dim + 1 :]]
            padded = grad.new_zeros(shape)
            padded.narrow(dim, 0, grad.shape[dim]).copy_(grad)
            grad = padded
        rows = grad.unflatten(dim, (depth, -1)).movedim(dim, 0).reshape(depth, -1)
        if self.kept is not None:
            self.kept.add(self.full, rows, weight.offset)
        else:
            self.full[:, weight.offset : weight.offset + weight.elements] += rows

    def accumulate(self, grad: Tensor, start: int = 0) -> None:
        """Add a gradient of my shards that lie one after the other from `start` on."""
        if self.kept is not None:
            low, high = self.kept.at(start), self.kept.at(start + grad.numel())
            start, grad = low, self.kept.take(grad.reshape(-1), start, low, high)
        self.collect(grad, start)

    def collect(self, grad: Tensor, start: int = 0) -> None:
        """Add a gradient that is compressed where the bucket is, from `start` on."""
        if self.grad is None:
            self.grad = Sum(self.count, self.queue.dtype)
        if grad.numel():
            self.grad.add(start, grad)
