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

from ranvier.buckets.bucket import Bucket, ShardedParameter
from ranvier.buckets.offload import HostOffload
from ranvier.comm import collectives
from ranvier.comm.accumulator import GradientAccumulator, Pieces, flatten_pieces
from ranvier.comm.collectives import PendingTensor
from ranvier.comm.streams import wait_for_event
from ranvier.errors import ShardingError
from ranvier.grid import Grid


class BucketScheduler:
    """The queue of weights being gathered and gradients being reduced; one for each model."""

    def __init__(
        self, grid: Grid, *, overlap: Iterable[str], dtype: torch.dtype, keep: bool = False
    ) -> None:
        self.grid = grid
        self.keep_unsharded = keep
        """Gathered weights stay until the step ends."""
        self.overlap = frozenset(overlap)
        self.reduce_dtype = dtype
        """Type in which gradients are accumulated and reduced."""
        self.gather_axis = grid.axis("depth", channel="gather")
        self.scatter_axis = grid.axis("depth", channel="scatter")
        self.data_axis = grid.axis("data")
        self.buckets: list[Bucket] = []
        self.device = torch.device("cpu")
        """Where the weights lie."""
        self.load_count = 0
        """How often values were loaded into the weights from outside."""
        self.on_bucket_complete: Callable[[Bucket], None] | None = None
        """Told of buckets whose gradients, which nobody else has, are complete early."""
        self.on_optimizer_step: Callable[[Tensor], None] | None = None
        """Told of each step of the optimizer, and whether it was made (a bool on the device)."""
        self.host_offload: HostOffload | None = None
        """Host memory of weights that come to the device for their turn only."""
        self._is_last_micro_batch = False
        self._recorded_orders: dict[str, list[str]] = {}
        self._step_kind = ""
        self._blocks_seen: list[str] = []
        self._prefetches: dict[str, list[PendingTensor]] = {}
        self._resident_block = ""
        self._filling_bucket: Bucket | None = None
        self._depth_reductions: deque[tuple[Bucket, PendingTensor, bool]] = deque()
        self._replica_sums: deque[tuple[Bucket, Tensor, list[PendingTensor]]] = deque()

    # ---- weights ----------------------------------------------------------------------

    def begin_step(self, kind: str) -> None:
        """Start a step of a kind; forget gathered weights and gradients.

        Steps of the same kind use blocks in the same order, which is recorded and followed; the
        kind "" has none. Gradients of passes without a `begin` between them are added.
        """
        if self._step_kind and self._recorded_orders.get(self._step_kind) != self._blocks_seen:
            self._recorded_orders[self._step_kind] = self._blocks_seen
        for block in self._prefetches.values():
            for pending in block:
                pending.wait()
        self._step_kind = kind
        self._is_last_micro_batch = False
        self._blocks_seen = []
        self._prefetches = {}
        self._resident_block = ""
        self._filling_bucket, self._depth_reductions, self._replica_sums = None, deque(), deque()
        if self.host_offload is not None:
            wait_for_event(self.host_offload.finish_transfers(), self.device)
        for bucket in self.buckets:
            self._reshard_bucket(bucket)
            bucket.grad = bucket.unsharded_grads = bucket.final_grads = None
            bucket.reduced_grads = []
            bucket.grad_squares = []
            bucket.squares_event = None

    def unshard_block(self, block: str) -> None:
        """Have the weights of a block gathered.

        Communicates: all-gather over depth, often issued before.
        """
        if block != self._resident_block:
            with collectives.hide_from_dispatch_modes(), self.grid.trace.outside_block():
                self._unshard_block(block)

    def prepare_block(self, block: str) -> None:
        """A block is about to compute: have what it needs that is not on its way by itself."""
        for bucket in self.buckets:
            if bucket.pending_update is not None and bucket.name == block:
                bucket.wait_for_update()
        if self.host_offload is not None:
            self.unshard_block(block)

    def offload_weights(self, room: int) -> None:
        """Have weights rest on the host from now on. room: bytes that may be taken there."""
        self.host_offload = HostOffload(
            self.buckets, self.buckets[0].data.dtype, self.device, room=room
        )
        for bucket in self.host_offload.buckets:
            self.host_offload.register_bucket(bucket)
        self.begin_step("")

    def discard_trial(self) -> None:
        """Forget gradients, gathered weights and the order of blocks: it was that of a trial."""
        self.begin_step("")
        self._recorded_orders = {}

    def wait_for_updates(self) -> None:
        """Have the device wait for all updates of weights that are under way."""
        for bucket in self.buckets:
            bucket.wait_for_update()
        if self.host_offload is not None:
            self.host_offload.synchronize()

    def _unshard_block(self, block: str) -> None:
        if self._filling_bucket is not None and self._filling_bucket.name != block:
            # The block before is done: reduce it behind all that follows.
            self._reduce_filled_bucket()
        here = self._buckets_to_fetch(block)
        follows = self._next_block([*self._blocks_seen, block])
        if not self.keep_unsharded:
            for bucket in self._buckets_to_fetch(self._resident_block):
                self._reshard_bucket(bucket, soon=bucket.name == follows)
        self._resident_block = block
        if here and all(bucket.unsharded_params is not None for bucket in here):
            return
        pending = self._prefetches.pop(block, None) or self._gather_block(block)
        self._blocks_seen.append(block)
        self._prefetch_next_block()
        for bucket, values in zip(here, pending, strict=True):
            whole = values.wait()
            if bucket.is_depth_sharded:
                bucket.unsharded_params = bucket.unpack_gathered(whole)
            else:
                bucket.unsharded_params = []
            if bucket.is_depth_sharded:
                self._evict_weights(bucket)  # what was gathered is a copy

    def _buckets_to_fetch(self, block: str) -> list[Bucket]:
        """Buckets of a block that have to come: split over depth, or from the host."""
        return [bucket for bucket in self.buckets if bucket.name == block and bucket.needs_fetch]

    def _reshard_bucket(self, bucket: Bucket, *, soon: bool = False) -> None:
        """Forget the weights of a bucket that have come. soon: they are used again at once."""
        bucket.unsharded_params = None
        if not soon:
            self._evict_weights(bucket)

    def _evict_weights(self, bucket: Bucket) -> None:
        """Give the device memory of weights that rest on the host back.

        Not while a fetch or a gather of them is under way: it reads that memory. Where a block is
        used twice in a row (by two jobs of a stage) the second is issued before the first has come.
        """
        under_way = bucket.name in self._prefetches
        if bucket.host_data is not None and self.host_offload is not None and not under_way:
            self.host_offload.evict_weights(bucket)

    def _next_block(self, seen: list[str]) -> str:
        """The block that came next last time, as long as this step goes the same way."""
        order = self._recorded_orders.get(self._step_kind, [])
        if order[: len(seen)] == seen and len(order) > len(seen):
            return order[len(seen)]
        return ""

    def _gather_block(self, block: str) -> list[PendingTensor]:
        pending: list[PendingTensor] = []
        for bucket in self._buckets_to_fetch(block):
            part = PendingTensor(bucket.data)
            if bucket.host_data is None:
                bucket.wait_for_update()
            elif self.host_offload is not None:
                part = self.host_offload.fetch_weights(bucket)
            if bucket.is_depth_sharded:
                with self.grid.trace.named_scope(block):
                    part = collectives.all_gather(part.wait(), self.gather_axis)
            pending.append(part)
        if "gather" not in self.overlap:
            for one in pending:
                one.wait()
        return pending

    def _prefetch_next_block(self) -> None:
        """Issue the gather that followed here last time."""
        block = self._next_block(self._blocks_seen)
        if block and block not in self._prefetches:
            self._prefetches[block] = self._gather_block(block)

    def begin_pass(self, *, last: bool = False, forget: bool = False) -> None:
        """Start a pass over some blocks; in the last one reductions over data start early.

        forget: the block before is not the first of this pass, whichever it is.
        """
        self._reduce_filled_bucket()
        self._is_last_micro_batch = last
        if forget and not self.keep_unsharded:
            for bucket in self._buckets_to_fetch(self._resident_block):
                self._reshard_bucket(bucket)
            self._resident_block = ""

    def flush_reductions(self) -> None:
        """Start all reductions of this pass, so that none waits for another pass to begin."""
        self._reduce_filled_bucket()
        while self._depth_reductions:
            self._finish_depth_reduction()
        while self._replica_sums:
            self._finish_replica_sum()

    # ---- gradients --------------------------------------------------------------------

    def accumulate_grad(self, weight: ShardedParameter, grad: Tensor) -> None:
        """Take a gradient of a gathered weight.

        The bucket filled before is complete and gets reduced.
        """
        if not weight.is_depth_sharded:
            self.accumulate_shard_grad(weight.bucket, weight.offset, grad)
            return
        with collectives.hide_from_dispatch_modes():
            self._start_filling(weight.bucket)
            weight.bucket.add_unsharded_grad(weight, grad)

    def accumulate_shard_grad(self, bucket: Bucket, start: int, grad: Tensor) -> None:
        """Take a gradient of my shards that lie one after the other from `start` on."""
        with collectives.hide_from_dispatch_modes():
            self._start_filling(bucket)
            self._add_to_bucket(bucket, grad, start)

    def _add_to_bucket(self, bucket: Bucket, grad: Tensor, start: int = 0) -> None:
        """Add to the gradient of a bucket, which may have been taken to the host."""
        if bucket.host_data is not None and self.host_offload is not None:
            self.host_offload.fetch_grads(bucket)
        bucket.add_shard_grad(grad, start)

    def _offload_grads(self, bucket: Bucket) -> None:
        """Take the gradient of a bucket to the host, if its weights rest there.

        At the end of a step their squares must be known: the norm is summed on the device.
        """
        if bucket.host_data is None or self.host_offload is None or bucket.grad is None:
            return
        if not self._is_last_micro_batch or bucket.grad_squares or bucket.data.device.type == "cpu":
            self.host_offload.offload_grads(bucket)

    def _start_filling(self, bucket: Bucket) -> None:
        """Gradients of a bucket begin to come: that of the block before is complete.

        Other buckets of the same block come in between; they are reduced at the end.
        """
        if bucket.reduce_at_step_end or (
            self._filling_bucket is not None and bucket.name == self._filling_bucket.name
        ):
            return
        self._reduce_filled_bucket()
        self._filling_bucket = bucket

    def _reduce_filled_bucket(self) -> None:
        """Reduce the bucket that was being filled."""
        bucket = self._filling_bucket
        self._filling_bucket = None
        if bucket is not None and bucket.unsharded_grads is not None:
            self._reduce_scatter_over_depth(bucket)
        elif bucket is not None:
            if self._is_last_micro_batch:
                self._start_early_reduction(bucket)
            self._offload_grads(bucket)

    def _reduce_scatter_over_depth(self, bucket: Bucket) -> None:
        assert bucket.unsharded_grads is not None
        with self.grid.trace.named_scope(bucket.name):
            pending = collectives.reduce_scatter(bucket.unsharded_grads.view(-1), self.scatter_axis)
        bucket.unsharded_grads = None
        self._depth_reductions.append((bucket, pending, self._is_last_micro_batch))
        while len(self._depth_reductions) > (1 if "dw" in self.overlap else 0):
            self._finish_depth_reduction()

    def _finish_depth_reduction(self) -> None:
        """Wait for the oldest reduction over depth."""
        bucket, pending, last = self._depth_reductions.popleft()
        if bucket.host_data is not None and self.host_offload is not None:
            self.host_offload.fetch_grads(bucket)
        bucket.add_compressed_grad(pending.wait())
        if last:
            self._start_early_reduction(bucket)
        self._offload_grads(bucket)

    def _start_early_reduction(self, bucket: Bucket) -> None:
        """Start the reduction over data early, where nothing has to come before it."""
        if bucket.reduce_at_step_end or (bucket.replicated_segments and self.data_axis.size == 1):
            return
        if bucket.replicated_segments:
            self._replica_sums.append((bucket, *self._start_replica_sums(bucket)))
            while len(self._replica_sums) > (1 if "dw" in self.overlap else 0):
                self._finish_replica_sum()
        elif self.data_axis.size > 1:
            self._reduce_over_data(bucket, self._pop_grad(bucket))
        elif self.on_bucket_complete is not None and "dw" in self.overlap:
            self.on_bucket_complete(bucket)

    def _finish_replica_sum(self) -> None:
        """Wait for the oldest sum over copies; the reduction over data follows."""
        bucket, whole, pending = self._replica_sums.popleft()
        self._reduce_over_data(bucket, _merge_replica_sums(bucket, whole, pending))

    def _pop_grad(self, bucket: Bucket) -> Tensor:
        """The gradient of a bucket, which has none any more; one that comes later is added."""
        assert bucket.grad is not None, bucket.name
        whole = bucket.grad.flat_grad(bucket.data.device)
        bucket.grad = None
        return whole

    def _reduce_over_data(self, bucket: Bucket, whole: Tensor) -> None:
        """Start the reduction of a gradient over data."""
        with self.grid.trace.named_scope(bucket.name):
            pending = collectives.reduce_scatter(whole, self.data_axis)
        bucket.reduced_grads.append(pending)
        if "dw" not in self.overlap:
            pending.wait()

    def finish_gradients(self) -> list[tuple[Bucket, Pieces]]:
        """Each trainable bucket with my range over data of its gradient, in pieces.

        The gradient is summed over all who hold the bucket.
        Communicates: what is left of the reductions over depth, then over the axes that do not
        shard a weight, then over data.
        """
        self._check_params()
        self._reduce_filled_bucket()
        for bucket in self.buckets:
            if bucket.unsharded_grads is not None:
                self._reduce_scatter_over_depth(bucket)
        self.flush_reductions()
        buckets = [bucket for bucket in self.buckets if bucket.trainable]
        for bucket in buckets:
            if bucket.grad is None and not bucket.reduced_grads and bucket.final_grads is None:
                bucket.grad = GradientAccumulator(bucket.reduced_elements, self.reduce_dtype)
            if bucket.grad is not None:
                if (
                    self.host_offload is not None
                    and bucket.data.is_cuda
                    and not bucket.grad_squares
                ):
                    self.host_offload.fetch_grads(bucket)  # nothing came last: the norm needs it
                self._sum_over_replicas(bucket)
                if self.data_axis.size > 1:
                    self._reduce_over_data(bucket, self._pop_grad(bucket))
        return [(bucket, self._collect_final_grads(bucket)) for bucket in buckets]

    def _collect_final_grads(self, bucket: Bucket) -> Pieces:
        """My range over data of a gradient: as it was reduced, or as it came if nobody else has it.

        Late buckets have many small weights, or one that came twice: they are one piece.
        """
        device = bucket.data.device
        if bucket.final_grads is None:
            bucket.final_grads = GradientAccumulator(
                bucket.reduced_elements // self.data_axis.size, self.reduce_dtype
            )
        if bucket.grad is not None:
            pieces = bucket.grad.covering_pieces(device)
            for at, piece in (
                [(0, flatten_pieces(pieces, self.reduce_dtype))]
                if bucket.reduce_at_step_end
                else pieces
            ):
                bucket.final_grads.add_grad(at, piece)
        for pending in bucket.reduced_grads:
            bucket.final_grads.add_grad(0, pending.wait())
        bucket.grad = None
        bucket.reduced_grads = []
        return bucket.final_grads.covering_pieces(device)

    def _check_params(self) -> None:
        """Refuse parameters that were changed behind the back of their buckets."""
        for bucket in self.buckets:
            start = bucket.data.data_ptr()
            itemsize = bucket.data.element_size()
            for weight in bucket.weights:
                param = weight.param
                at = start + weight.offset * itemsize
                moved = param.data_ptr() != at and param.numel() > 0 and bucket.host_data is None
                if param is not weight.expected_param or moved:
                    raise ShardingError(
                        f"{weight.name} is no longer part of its bucket. A parallel model is not "
                        "moved, cast, copied or assigned to. Give parallelize dtype= and device=, "
                        "and load values with model.parallel.load_full_state()."
                    )
                if param.requires_grad != weight.trainable:
                    raise ShardingError(
                        f"{weight.name} has requires_grad={param.requires_grad}, but had "
                        f"{weight.trainable}. What is trained is settled by parallelize. Freeze or "
                        "free weights before it."
                    )

    def _sum_over_replicas(self, bucket: Bucket) -> None:
        """Sum over the ranks that hold the same parts, where depth and data are not all of them."""
        if not bucket.replicated_segments and bucket.tied_axis is None:
            return
        whole = _merge_replica_sums(bucket, *self._start_replica_sums(bucket))
        if bucket.tied_axis is not None:
            with self.grid.trace.named_scope(bucket.name):
                whole = collectives.all_reduce(whole, bucket.tied_axis).wait()
        bucket.grad = GradientAccumulator(bucket.reduced_elements, self.reduce_dtype)
        bucket.grad.parts = {(0, bucket.reduced_elements): whole}

    def _start_replica_sums(self, bucket: Bucket) -> tuple[Tensor, list[PendingTensor]]:
        """The gradient of a bucket, and the sums of its segments over copies, under way."""
        whole = self._pop_grad(bucket).clone()
        with self.grid.trace.named_scope(bucket.name):
            parts = [
                (whole[one.start : one.stop], one.replica_axis)
                for one in bucket.replicated_segments
            ]
            return whole, [collectives.all_reduce(part, over) for part, over in parts]


def _merge_replica_sums(bucket: Bucket, whole: Tensor, pending: list[PendingTensor]) -> Tensor:
    """The gradient with the sums of its segments where they belong."""
    for segment, one in zip(bucket.replicated_segments, pending, strict=True):
        whole[segment.start : segment.stop].copy_(one.wait())
    return whole
