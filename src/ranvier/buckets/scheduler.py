"""Deferred work: weights gathered before they are needed, gradients reduced after they are made.

Over the depth axis a bucket is

* gathered just before a layer of it computes and forgotten when another bucket is used (OAG: in the
  order recorded at the first step the gather of the next bucket runs while this one computes),
* reduce-scattered when the gradients of another bucket begin to arrive (ORS: until it is needed).

Gathers and reduce-scatters have communicators of their own. At the last micro-batch of a step the
reduction over data follows at once; where ranks of other axes hold copies of some weights, their
sum comes before it and runs while the next block computes. Gradients are delivered by parameter
identity, never to a tensor seen in backward (recomputation makes other ones), and are added in
micro-batch order. An overlap that is switched off uses the same buffers in the same order and waits
at once, so it changes no bit. All waiting is in `finish`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ranvier.buckets.bucket import Bucket, Weight
from ranvier.buckets.offload import Homes
from ranvier.comm import collectives
from ranvier.comm.accumulator import Pieces, Sum, flat
from ranvier.comm.collectives import Pending
from ranvier.comm.streams import await_mark
from ranvier.errors import ShardingError
from ranvier.grid import Grid


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
        self.stepped: Callable[[Tensor], None] | None = None
        """Told of each step of the optimizer, and whether it was made (a bool on the device)."""
        self.homes: Homes | None = None
        """Host memory of weights that come to the device for their turn only."""
        self._last = False
        self._orders: dict[str, list[str]] = {}
        self._kind = ""
        self._seen: list[str] = []
        self._ahead: dict[str, list[Pending]] = {}
        self._resident = ""
        self._filling: Bucket | None = None
        self._reducing: deque[tuple[Bucket, Pending, bool]] = deque()
        self._uniting: deque[tuple[Bucket, Tensor, list[Pending]]] = deque()

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
        self._filling, self._reducing, self._uniting = None, deque(), deque()
        if self.homes is not None:
            await_mark(self.homes.stowed(), self.device)
        for bucket in self.buckets:
            self._leave(bucket)
            bucket.grad = bucket.full = bucket.finished = None
            bucket.reduced, bucket.squares, bucket.summed = [], [], None

    def use(self, block: str) -> None:
        """Have the weights of a block gathered.

        Communicates: all-gather over depth, often issued before.
        """
        if block != self._resident:
            with collectives.hidden(), self.grid.trace.beside():
                self._enter(block)

    def enter(self, block: str) -> None:
        """A block is about to compute: have what it needs that is not on its way by itself."""
        for bucket in self.buckets:
            if bucket.updating is not None and bucket.name == block:
                bucket.settle()
        if self.homes is not None:
            self.use(block)

    def go_home(self, room: int) -> None:
        """Have weights rest on the host from now on. room: bytes that may be taken there."""
        self.homes = Homes(self.buckets, self.buckets[0].data.dtype, self.device, room=room)
        for bucket in self.homes.buckets:
            self.homes.adopt(bucket)
        self.begin("")

    def forget(self) -> None:
        """Forget gradients, gathered weights and the order of blocks: it was that of a trial."""
        self.begin("")
        self._orders = {}

    def settle(self) -> None:
        """Have the device wait for all updates of weights that are under way."""
        for bucket in self.buckets:
            bucket.settle()
        if self.homes is not None:
            self.homes.settle()

    def _enter(self, block: str) -> None:
        if self._filling is not None and self._filling.name != block:
            self._close()  # the block before is done: reduce it behind all that follows
        here, follows = self._coming(block), self._after([*self._seen, block])
        if not self.keep:
            for bucket in self._coming(self._resident):
                self._leave(bucket, soon=bucket.name == follows)
        self._resident = block
        if here and all(bucket.gathered is not None for bucket in here):
            return
        pending = self._ahead.pop(block, None) or self._gather(block)
        self._seen.append(block)
        self._prefetch()
        for bucket, values in zip(here, pending, strict=True):
            whole = values.wait()
            bucket.gathered = bucket.unpack(whole) if bucket.split else []
            if bucket.split:
                self._give_back(bucket)  # what was gathered is a copy

    def _coming(self, block: str) -> list[Bucket]:
        """Buckets of a block that have to come: split over depth, or from the host."""
        return [bucket for bucket in self.buckets if bucket.name == block and bucket.comes]

    def _leave(self, bucket: Bucket, *, soon: bool = False) -> None:
        """Forget the weights of a bucket that have come. soon: they are used again at once."""
        bucket.gathered = None
        if not soon:
            self._give_back(bucket)

    def _give_back(self, bucket: Bucket) -> None:
        """Give the device memory of weights that rest on the host back.

        Not while a fetch or a gather of them is under way: it reads that memory. Where a block is
        used twice in a row (by two jobs of a stage) the second is issued before the first has come.
        """
        under_way = bucket.name in self._ahead
        if bucket.home is not None and self.homes is not None and not under_way:
            self.homes.drop(bucket)

    def _after(self, seen: list[str]) -> str:
        """The block that came next last time, as long as this step goes the same way."""
        order = self._orders.get(self._kind, [])
        return order[len(seen)] if order[: len(seen)] == seen and len(order) > len(seen) else ""

    def _gather(self, block: str) -> list[Pending]:
        pending: list[Pending] = []
        for bucket in self._coming(block):
            part = Pending(bucket.data)
            if bucket.home is None:
                bucket.settle()
            elif self.homes is not None:
                part = self.homes.fetch(bucket)
            if bucket.split:
                with self.grid.trace.at(block):
                    part = collectives.all_gather(part.wait(), self.gather_axis)
            pending.append(part)
        if "gather" not in self.overlap:
            for one in pending:
                one.wait()
        return pending

    def _prefetch(self) -> None:
        """Issue the gather that followed here last time."""
        block = self._after(self._seen)
        if block and block not in self._ahead:
            self._ahead[block] = self._gather(block)

    def job(self, *, last: bool = False, forget: bool = False) -> None:
        """Start a pass over some blocks; in the last one reductions over data start early.

        forget: the block before is not the first of this pass, whichever it is.
        """
        self._close()
        self._last = last
        if forget and not self.keep:
            for bucket in self._coming(self._resident):
                self._leave(bucket)
            self._resident = ""

    def flush(self) -> None:
        """Start all reductions of this pass, so that none waits for another pass to begin."""
        self._close()
        while self._reducing:
            self._settle()
        while self._uniting:
            self._unite()

    # ---- gradients --------------------------------------------------------------------

    def deliver(self, weight: Weight, grad: Tensor) -> None:
        """Take a gradient of a gathered weight.

        The bucket filled before is complete and gets reduced.
        """
        if not weight.split:
            self.arrive(weight.bucket, weight.offset, grad)
            return
        with collectives.hidden():
            self._fill(weight.bucket)
            weight.bucket.add(weight, grad)

    def arrive(self, bucket: Bucket, start: int, grad: Tensor) -> None:
        """Take a gradient of my shards that lie one after the other from `start` on."""
        with collectives.hidden():
            self._fill(bucket)
            self._accumulate(bucket, grad, start)

    def _accumulate(self, bucket: Bucket, grad: Tensor, start: int = 0) -> None:
        """Add to the gradient of a bucket, which may have been taken to the host."""
        if bucket.home is not None and self.homes is not None:
            self.homes.recall(bucket)
        bucket.accumulate(grad, start)

    def _stow(self, bucket: Bucket) -> None:
        """Take the gradient of a bucket to the host, if its weights rest there.

        At the end of a step their squares must be known: the norm is summed on the device.
        """
        if bucket.home is None or self.homes is None or bucket.grad is None:
            return
        if not self._last or bucket.squares or bucket.data.device.type == "cpu":
            self.homes.stow(bucket)

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
        elif bucket is not None:
            if self._last:
                self._advance(bucket)
            self._stow(bucket)

    def _scatter(self, bucket: Bucket) -> None:
        assert bucket.full is not None
        with self.grid.trace.at(bucket.name):
            pending = collectives.reduce_scatter(bucket.full.view(-1), self.scatter_axis)
        bucket.full = None
        self._reducing.append((bucket, pending, self._last))
        while len(self._reducing) > (1 if "dw" in self.overlap else 0):
            self._settle()

    def _settle(self) -> None:
        """Wait for the oldest reduction over depth."""
        bucket, pending, last = self._reducing.popleft()
        if bucket.home is not None and self.homes is not None:
            self.homes.recall(bucket)
        bucket.collect(pending.wait())
        if last:
            self._advance(bucket)
        self._stow(bucket)

    def _advance(self, bucket: Bucket) -> None:
        """Start the reduction over data early, where nothing has to come before it."""
        if bucket.late or (bucket.copied and self.data_axis.size == 1):
            return
        if bucket.copied:
            self._uniting.append((bucket, *self._summed(bucket)))
            while len(self._uniting) > (1 if "dw" in self.overlap else 0):
                self._unite()
        elif self.data_axis.size > 1:
            self._reduce(bucket, self._taken(bucket))
        elif self.complete is not None and "dw" in self.overlap:
            self.complete(bucket)

    def _unite(self) -> None:
        """Wait for the oldest sum over copies; the reduction over data follows."""
        bucket, whole, pending = self._uniting.popleft()
        self._reduce(bucket, _united(bucket, whole, pending))

    def _taken(self, bucket: Bucket) -> Tensor:
        """The gradient of a bucket, which has none any more; one that comes later is added."""
        assert bucket.grad is not None, bucket.name
        whole, bucket.grad = bucket.grad.flat(bucket.data.device), None
        return whole

    def _reduce(self, bucket: Bucket, whole: Tensor) -> None:
        """Start the reduction of a gradient over data."""
        with self.grid.trace.at(bucket.name):
            pending = collectives.reduce_scatter(whole, self.data_axis)
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
        self.flush()
        buckets = [bucket for bucket in self.buckets if bucket.trainable]
        for bucket in buckets:
            if bucket.grad is None and not bucket.reduced and bucket.finished is None:
                bucket.grad = Sum(bucket.count, self.dtype)
            if bucket.grad is not None:
                if self.homes is not None and bucket.data.is_cuda and not bucket.squares:
                    self.homes.recall(bucket)  # nothing came last: the norm needs it
                self._sum_copies(bucket)
                if self.data_axis.size > 1:
                    self._reduce(bucket, self._taken(bucket))
        return [(bucket, self._finished(bucket)) for bucket in buckets]

    def _finished(self, bucket: Bucket) -> Pieces:
        """My range over data of a gradient: as it was reduced, or as it came if nobody else has it.

        Late buckets have many small weights, or one that came twice: they are one piece.
        """
        device = bucket.data.device
        if bucket.finished is None:
            bucket.finished = Sum(bucket.count // self.data_axis.size, self.dtype)
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
                param, at = weight.param, start + weight.offset * itemsize
                moved = param.data_ptr() != at and param.numel() > 0 and bucket.home is None
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
        if not bucket.copied and bucket.tied is None:
            return
        whole = _united(bucket, *self._summed(bucket))
        if bucket.tied is not None:
            with self.grid.trace.at(bucket.name):
                whole = collectives.all_reduce(whole, bucket.tied).wait()
        bucket.grad = Sum(bucket.count, self.dtype)
        bucket.grad.parts = {(0, bucket.count): whole}

    def _summed(self, bucket: Bucket) -> tuple[Tensor, list[Pending]]:
        """The gradient of a bucket, and the sums of its segments over copies, under way."""
        whole = self._taken(bucket).clone()
        with self.grid.trace.at(bucket.name):
            parts = [(whole[one.start : one.stop], one.over) for one in bucket.copied]
            return whole, [collectives.all_reduce(part, over) for part, over in parts]


def _united(bucket: Bucket, whole: Tensor, pending: list[Pending]) -> Tensor:
    """The gradient with the sums of its segments where they belong."""
    for segment, one in zip(bucket.copied, pending, strict=True):
        whole[segment.start : segment.stop].copy_(one.wait())
    return whole
