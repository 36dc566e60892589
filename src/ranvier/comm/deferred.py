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

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ranvier.comm import pairs, verbs
from ranvier.comm.sums import Pieces, Sum, flat
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


class Deferred:
    """The queue of weights being gathered and gradients being reduced; one for each model."""

    def __init__(
        self, grid: Grid, *, overlap: Iterable[str], dtype: torch.dtype, keep: bool = False
    ) -> None:
        self.grid = grid
        self.keep = keep
        """Gathered weights stay until the step ends."""
        self.overlap = frozenset(overlap)
        self.dtype = dtype
        """Type in which gradients are accumulated and reduced."""
        self.gather_axis = grid.axis("depth", channel="gather")
        self.scatter_axis = grid.axis("depth", channel="scatter")
        self.data_axis = grid.axis("data")
        self.buckets: list[Bucket] = []
        self.device = torch.device("cpu")
        """Where the weights lie."""
        self.loads = 0
        """How often values were loaded into the weights from outside."""
        self.complete: Callable[[Bucket], None] | None = None
        """Told of buckets whose gradients, which nobody else has, are complete early."""
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
            bucket.gathered = bucket.grad = bucket.full = bucket.finished = None
            bucket.reduced, bucket.squares = [], []

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
        here = self._split(block)
        if not self.keep:
            for bucket in self._split(self._resident):
                bucket.gathered = None
        self._resident = block
        if here and all(bucket.gathered is not None for bucket in here):
            return
        pending = self._ahead.pop(block, None) or self._gather(block)
        self._seen.append(block)
        self._prefetch()
        for bucket, values in zip(here, pending, strict=True):
            bucket.gathered = bucket.unpack(values.wait())

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

    def job(self, *, last: bool = False, forget: bool = False) -> None:
        """Start a pass over some blocks; in the last one reductions over data start early.

        forget: the block before is not the first of this pass, whichever it is.
        """
        self._close()
        self._last = last
        if forget and not self.keep:
            for bucket in self._split(self._resident):
                bucket.gathered = None
            self._resident = ""

    # ---- gradients --------------------------------------------------------------------

    def deliver(self, weight: Weight, grad: Tensor) -> None:
        """Take a gradient of a gathered weight.

        The bucket filled before is complete and gets reduced.
        """
        if not weight.split:
            self.arrive(weight.bucket, weight.offset, grad)
            return
        with verbs.hidden():
            self._fill(weight.bucket)
            weight.bucket.add(weight, grad)

    def arrive(self, bucket: Bucket, start: int, grad: Tensor) -> None:
        """Take a gradient of my shards that lie one after the other from `start` on."""
        with verbs.hidden():
            self._fill(bucket)
            bucket.accumulate(grad, start)

    def _fill(self, bucket: Bucket) -> None:
        """Gradients of a bucket begin to come: that of the block before is complete.

        Other buckets of the same block come in between; they are reduced at the end.
        """
        if bucket.late or (self._filling is not None and bucket.name == self._filling.name):
            return
        self._close()
        self._filling = bucket

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
        if bucket.late or bucket.copied:
            return
        if self.data_axis.size > 1:
            self._reduce(bucket)
        elif self.complete is not None and "dw" in self.overlap:
            self.complete(bucket)

    def _reduce(self, bucket: Bucket) -> None:
        """Start the reduction over data.

        A gradient that comes later is reduced once more and added.
        """
        assert bucket.grad is not None, bucket.name
        with self.grid.trace.at(bucket.name):
            pending = verbs.reduce_scatter(bucket.grad.flat(bucket.data.device), self.data_axis)
        bucket.grad = None
        bucket.reduced.append(pending)
        if "dw" not in self.overlap:
            pending.wait()

    def finish(self) -> list[tuple[Bucket, Pieces]]:
        """Each trainable bucket with my range over data of its gradient, in pieces.

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
            if bucket.grad is None and not bucket.reduced and bucket.finished is None:
                bucket.grad = Sum(bucket.size, self.dtype)
            if bucket.grad is not None:
                self._sum_copies(bucket)
                if self.data_axis.size > 1:
                    self._reduce(bucket)
        return [(bucket, self._finished(bucket)) for bucket in buckets]

    def _finished(self, bucket: Bucket) -> Pieces:
        """My range over data of a gradient: as it was reduced, or as it came if nobody else has it.

        Late buckets have many small weights, or one that came twice: they are one piece.
        """
        device = bucket.data.device
        if bucket.finished is None:
            bucket.finished = Sum(bucket.size // self.data_axis.size, self.dtype)
        if bucket.grad is not None:
            pieces = bucket.grad.covering(device)
            for at, piece in [(0, flat(pieces, self.dtype))] if bucket.late else pieces:
                bucket.finished.add(at, piece)
        for pending in bucket.reduced:
            bucket.finished.add(0, pending.wait())
        bucket.grad, bucket.reduced = None, []
        return bucket.finished.covering(device)

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
        if not bucket.copied and bucket.tied is None:
            return
        whole = bucket.grad.flat(bucket.data.device).clone()
        with self.grid.trace.at(bucket.name):
            for segment in bucket.copied:
                part = whole[segment.start : segment.stop]
                part.copy_(verbs.all_reduce(part, segment.over).wait())
            if bucket.tied is not None:
                whole = verbs.all_reduce(whole, bucket.tied).wait()
        bucket.grad.parts = {(0, bucket.size): whole}
