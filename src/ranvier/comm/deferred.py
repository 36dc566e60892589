"""Deferred work: weights gathered before they are needed, gradients reduced after they are made.

Parameters that are communicated together form a `Bucket` (the matrices of a block; all vectors of
a kind): one flat buffer of values, one of gradients, one collective instead of many. Over the depth
axis a bucket is

* gathered just before a layer of it computes and forgotten when another bucket is used (OAG: in the
  order recorded at the first step the gather of the next bucket runs while this one computes),
* reduce-scattered when the gradients of another bucket begin to arrive (ORS: until it is needed).

Gathers and reduce-scatters have communicators of their own. At the last micro-batch of a step the
reduction over data follows at once. Gradients are delivered by parameter identity, never to a
tensor seen in backward (recomputation makes other ones), and are added in micro-batch order. An
overlap that is switched off uses the same buffers in the same order and waits at once, so it
changes no bit. All waiting is in `finish`.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ranvier.comm import pairs, verbs
from ranvier.comm.verbs import Pending
from ranvier.errors import ShardingError
from ranvier.grid import Axis, Grid
from ranvier.sharding import Dim, Place, Sharding

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
        if not self.split:
            return self.param.detach()
        self.bucket.queue.use(self.bucket.name)
        assert self.bucket.gathered is not None, self.name
        return self.bucket.gathered[self.bucket.weights.index(self)]

    def gathered(self) -> Tensor:
        """The weight gathered over depth, in autograd.

        Communicates: all-gather over depth; backward: the dual.
        """
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
    data: Tensor = field(init=False)
    """Values `[size]`; the parameters are views of it."""
    grad: Tensor | None = None
    """Sum of the gradients of this step `[size]`."""
    full: Tensor | None = None
    """Gradients of the gathered weights `[depth, size]`, before their reduction."""
    reduced: list[Pending] = field(default_factory=list)
    """My range over data of the gradient `[size/data]`; several are to be added."""
    gathered: list[Tensor] | None = None

    @property
    def split(self) -> bool:
        """Whether the depth axis splits its weights."""
        return self.weights[0].split

    @property
    def trainable(self) -> bool:
        """Whether its weights get gradients."""
        return self.weights[0].trainable

    @property
    def copied(self) -> list[Segment]:
        """Segments whose gradients have to be summed over other axes than depth and data."""
        return [segment for segment in self.segments if segment.over.size > 1]

    def first(self, grad: Tensor) -> list[Tensor]:
        """Of my range over data of a gradient what no rank before me holds as well."""
        low = self.queue.data_axis.index * grad.numel()
        owned = [segment for segment in self.segments if segment.over.index == 0]
        return [grad[max(s.start - low, 0) : max(s.stop - low, 0)] for s in owned]

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

    def accumulate(self, grad: Tensor, weight: Weight | None = None) -> None:
        """Add a gradient of my shards: of one weight, or of the whole bucket."""
        if self.grad is None:
            self.grad = torch.zeros(self.size, dtype=self.queue.dtype, device=grad.device)
        if weight is None:
            self.grad += grad
        else:
            self.grad[weight.offset : weight.offset + weight.elements] += grad.reshape(-1)


class Deferred:
    """The queue of weights being gathered and gradients being reduced; one for each model."""

    def __init__(self, grid: Grid, *, overlap: Iterable[str], dtype: torch.dtype) -> None:
        self.grid = grid
        self.overlap = frozenset(overlap)
        self.dtype = dtype
        """Type in which gradients are accumulated and reduced."""
        self.gather_axis = grid.axis("depth", channel="gather")
        self.scatter_axis = grid.axis("depth", channel="scatter")
        self.data_axis = grid.axis("data")
        self.buckets: list[Bucket] = []
        self.loads = 0
        """How often values were loaded into the weights from outside."""
        self._last = False
        self._orders: dict[str, list[str]] = {}
        self._kind = ""
        self._seen: list[str] = []
        self._ahead: dict[str, list[Pending]] = {}
        self._resident = ""
        self._filling: Bucket | None = None
        self._reducing: deque[tuple[Bucket, Pending, bool]] = deque()

    # ---- weights ----------------------------------------------------------------------

    def begin(self, kind: str) -> None:
        """Start a step of a kind; forget gathered weights and gradients.

        Steps of the same kind use blocks in the same order, which is recorded and followed; the
        kind "" has none. Gradients of passes without a `begin` between them are added.
        """
        if self._kind and self._orders.get(self._kind) != self._seen:
            self._orders[self._kind] = self._seen
        for block in self._ahead.values():
            for pending in block:
                pending.wait()
        self._kind, self._last = kind, False
        self._seen, self._ahead, self._resident = [], {}, ""
        self._filling, self._reducing = None, deque()
        for bucket in self.buckets:
            bucket.gathered = bucket.grad = bucket.full = None
            bucket.reduced = []

    def use(self, block: str) -> None:
        """Have the weights of a block gathered.

        Communicates: all-gather over depth, often issued before.
        """
        if block != self._resident:
            with verbs.hidden():
                self._enter(block)

    def _enter(self, block: str) -> None:
        if self._filling is not None and self._filling.name != block:
            self._close()  # the block before is done: reduce it behind all that follows
        for bucket in self._split(self._resident):
            bucket.gathered = None
        pending = self._ahead.pop(block, None) or self._gather(block)
        self._seen.append(block)
        self._prefetch()
        for bucket, values in zip(self._split(block), pending, strict=True):
            bucket.gathered = bucket.unpack(values.wait())
        self._resident = block

    def _split(self, block: str) -> list[Bucket]:
        """Buckets of a block that lie split over depth."""
        return [bucket for bucket in self.buckets if bucket.name == block and bucket.split]

    def _gather(self, block: str) -> list[Pending]:
        with self.grid.trace.at(block):
            pending = [verbs.all_gather(b.data, self.gather_axis) for b in self._split(block)]
        if "gather" not in self.overlap:
            for one in pending:
                one.wait()
        return pending

    def _prefetch(self) -> None:
        """Issue the gather that followed here last time, as long as this step goes the same way."""
        order, position = self._orders.get(self._kind, []), len(self._seen)
        if order[:position] != self._seen:
            return
        for block in order[position : position + 1]:
            if block not in self._ahead:
                self._ahead[block] = self._gather(block)

    def micro_batch(self, *, last: bool) -> None:
        """Start a micro-batch; in the last one reductions over data start as soon as they can."""
        self._close()
        self._last = last

    # ---- gradients --------------------------------------------------------------------

    def deliver(self, weight: Weight, grad: Tensor) -> None:
        """Take a gradient of a gathered weight.

        The bucket filled before is complete and gets reduced.
        """
        bucket = weight.bucket
        with verbs.hidden():
            if bucket is not self._filling and not bucket.late:
                self._close()
                self._filling = bucket
            if weight.split:
                bucket.add(weight, grad)
            else:
                bucket.accumulate(grad, weight)

    def _close(self) -> None:
        """Reduce the bucket that was being filled."""
        bucket, self._filling = self._filling, None
        if bucket is not None and bucket.full is not None:
            self._scatter(bucket)
        elif bucket is not None and self._last:
            self._advance(bucket)

    def _scatter(self, bucket: Bucket) -> None:
        assert bucket.full is not None
        with self.grid.trace.at(bucket.name):
            pending = verbs.reduce_scatter(bucket.full.view(-1), self.scatter_axis)
        bucket.full = None
        self._reducing.append((bucket, pending, self._last))
        while len(self._reducing) > (1 if "dw" in self.overlap else 0):
            self._settle()

    def _settle(self) -> None:
        """Wait for the oldest reduction over depth."""
        bucket, pending, last = self._reducing.popleft()
        bucket.accumulate(pending.wait())
        if last:
            self._advance(bucket)

    def _advance(self, bucket: Bucket) -> None:
        """Start the reduction over data early, where nothing has to come before it."""
        if not bucket.late and not bucket.copied:
            self._reduce(bucket)

    def _reduce(self, bucket: Bucket) -> None:
        """Start the reduction over data.

        A gradient that comes later is reduced once more and added.
        """
        assert bucket.grad is not None, bucket.name
        with self.grid.trace.at(bucket.name):
            pending = verbs.reduce_scatter(bucket.grad, self.data_axis)
        bucket.grad = None
        bucket.reduced.append(pending)
        if "dw" not in self.overlap:
            pending.wait()

    def finish(self) -> list[tuple[Bucket, Tensor]]:
        """Each trainable bucket with my range over data of its gradient.

        The gradient is summed over all who hold the bucket.
        Communicates: what is left of the reductions over depth, then over the axes that do not
        shard a weight, then over data.
        """
        self._check()
        self._close()
        for bucket in self.buckets:
            if bucket.full is not None:
                self._scatter(bucket)
        while self._reducing:
            self._settle()
        buckets = [bucket for bucket in self.buckets if bucket.trainable]
        for bucket in buckets:
            if bucket.grad is None and not bucket.reduced:
                bucket.accumulate(torch.zeros_like(bucket.data, dtype=self.dtype))
            if bucket.grad is not None:
                self._sum_copies(bucket)
                self._reduce(bucket)
        return [
            (bucket, functools.reduce(torch.add, [pending.wait() for pending in bucket.reduced]))
            for bucket in buckets
        ]

    def _check(self) -> None:
        """Refuse parameters that were changed behind the back of their buckets."""
        for bucket in self.buckets:
            start, itemsize = bucket.data.data_ptr(), bucket.data.element_size()
            for weight in bucket.weights:
                param = weight.param
                moved = param.data_ptr() != start + weight.offset * itemsize and param.numel() > 0
                if param is not weight.made or moved:
                    raise ShardingError(
                        f"{weight.name} is no longer part of its bucket. A parallel model is not "
                        "moved, cast, copied or assigned to. Give parallelize dtype= and device=, "
                        "and load values with model.parallel.load()."
                    )
                if param.requires_grad != weight.trainable:
                    raise ShardingError(
                        f"{weight.name} has requires_grad={param.requires_grad}, but had "
                        f"{weight.trainable}. What is trained is settled by parallelize. Freeze or "
                        "free weights before it."
                    )

    def _sum_copies(self, bucket: Bucket) -> None:
        """Sum over the ranks that hold the same parts, where depth and data are not all of them."""
        assert bucket.grad is not None, bucket.name
        with self.grid.trace.at(bucket.name):
            for segment in bucket.copied:
                part = bucket.grad[segment.start : segment.stop]
                part.copy_(verbs.all_reduce(part, segment.over).wait())


def fill(queue: Deferred, weights: Iterable[Weight], blocks: Mapping[str, str]) -> None:
    """Sort weights into buckets: by block, split over depth, group, trained, tied.

    blocks: name of the block of each weight. Communicates: the making of groups.
    """
    groups: dict[tuple[str, bool, Group, bool, bool], list[Weight]] = {}
    for weight in weights:
        tied = len(weight.owners) > 1
        key = (blocks[weight.name], weight.split, weight.group, weight.trainable, tied)
        groups.setdefault(key, []).append(weight)
    multiple = queue.data_axis.size
    for (block, _, _, _, tied), members in groups.items():
        members.sort(key=lambda weight: sorted(_copies(weight, queue).items()))
        segments = _segments(members, queue)
        bucket = Bucket(
            name=block,
            weights=members,
            queue=queue,
            segments=segments,
            size=-(-segments[-1].stop // multiple) * multiple,
            late=tied or block == VECTORS,
        )
        for weight in members:
            weight.bucket = bucket
        queue.buckets.append(bucket)


def _copies(weight: Weight, queue: Deferred) -> dict[str, int]:
    """Ranks of each axis but data that hold the same part."""
    same = weight.sharding.over(queue.grid.degrees)
    return {axis: count for axis, count in same.items() if axis != "data"}


def _segments(members: list[Weight], queue: Deferred) -> list[Segment]:
    """Lay weights one after the other; neighbours with the same copies form a segment."""
    segments, start = [], 0
    for copies, group in itertools.groupby(members, key=lambda weight: _copies(weight, queue)):
        stop = start
        for weight in group:
            weight.offset, stop = stop, stop + weight.elements
        segments.append(Segment(start, stop, queue.grid.axis(share=copies)))
        start = stop
    return segments
