"""Bucket scheduler: gathers weights before they are needed and reduces gradients after backward.

Over the depth axis (context and depth with `plan.shard_weights_over = "depth_context"`) a bucket is

* gathered before a layer of it computes and resharded when another bucket is used. The order of
  buckets is recorded in the first step; later the gather of the next bucket overlaps with the
  computation of the current one (OAG).
* reduce-scattered when the gradients of another bucket begin to arrive. The reduction overlaps with
  the computation of that bucket (ORS).

Gathers and reduce-scatters have separate communicators. In the last micro-batch of a step the
reduction over the replica axis of a bucket (ranks with the same shards) follows immediately; what
several ranks of row or col share is summed first, while the next block computes. Gradients are
accumulated by parameter identity, never into a tensor of the backward pass (recomputation creates
new ones), and are added in micro-batch order. If an overlap is disabled, the same buffers are used
in the same order and waited for immediately, so results are bit-identical. `finish_gradients` waits
for everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ranvier.buckets.bucket import Bucket, ShardedParameter
from ranvier.buckets.offload import HostOffload
from ranvier.buckets.spec import VECTORS
from ranvier.comm import collectives
from ranvier.comm.accumulator import GradientAccumulator, Pieces, flatten_pieces
from ranvier.comm.collectives import PendingTensor
from ranvier.comm.streams import wait_for_event
from ranvier.errors import ShardingError
from ranvier.grid import GATHER_CHANNEL, SCATTER_CHANNEL, Grid


class BucketScheduler:
    """Schedules the gathers of weights and the reductions of gradients of one model."""

    def __init__(
        self,
        grid: Grid,
        *,
        overlap: Iterable[str],
        dtype: torch.dtype,
        keep: bool = False,
        gather_axes: Sequence[str] = ("depth",),
    ) -> None:
        self.grid = grid
        self.keep_unsharded = keep
        """Whether gathered weights are kept until the end of the step."""
        self.overlap = frozenset(overlap)
        self.reduce_dtype = dtype
        """Dtype in which gradients are accumulated and reduced."""
        # Two communicators for the same ranks, so that a gather does not wait for a reduce-scatter.
        self.gather_axis = grid.axis(*gather_axes, channel=GATHER_CHANNEL)
        self.scatter_axis = grid.axis(*gather_axes, channel=SCATTER_CHANNEL)
        self.buckets: list[Bucket] = []
        self.device = torch.device("cpu")
        """Device of the weights."""
        self.load_count = 0
        """Number of times that values were loaded into the weights from outside."""
        self.on_bucket_complete: Callable[[Bucket], None] | None = None
        """Called with each bucket that only this rank has, once its gradients are complete."""
        self.on_optimizer_step: Callable[[Tensor], None] | None = None
        """Called after each optimizer step with a bool on the device: whether the update was
        applied."""
        self.host_offload: HostOffload | None = None
        """Host memory of offloaded weights."""
        self._is_last_micro_batch = False
        self._recorded_orders: dict[str, list[str]] = {}
        self._step_kind = ""
        self._blocks_seen: list[str] = []
        self._prefetches: dict[str, list[PendingTensor]] = {}
        self._resident_block = ""
        self._filling_buckets: list[Bucket] = []
        self._depth_reductions: deque[tuple[list[tuple[Bucket, PendingTensor]], bool]] = deque()
        self._shared_sums: deque[tuple[Bucket, Tensor, list[PendingTensor]]] = deque()
        self._weight_grad_sums: dict[ShardedParameter, Tensor] | None = None

    # ---- weights: all-gather over depth, fetch from the host ---------------------------

    def begin_step(self, kind: str) -> None:
        """Starts a step of a kind; drops gathered weights and gradients.

        Steps of the same kind use blocks in the same order, which is recorded for prefetching; the
        kind "" has no recorded order. Gradients accumulate until the next `begin_step`.
        """
        # If the last step had another order than recorded, use the newer one from now on.
        if self._step_kind and self._recorded_orders.get(self._step_kind) != self._blocks_seen:
            self._recorded_orders[self._step_kind] = self._blocks_seen
        # Wait for every collective that was issued, even if its result is not used.
        for block in self._prefetches.values():
            for pending in block:
                pending.wait()
        self._step_kind = kind
        self._is_last_micro_batch = False
        self._blocks_seen = []
        self._prefetches = {}
        self._resident_block = ""
        self._filling_buckets, self._depth_reductions, self._shared_sums = [], deque(), deque()
        if self.host_offload is not None:
            wait_for_event(self.host_offload.finish_transfers(), self.device)
        for bucket in self.buckets:
            self._reshard_bucket(bucket)
            bucket.grad = bucket.unsharded_grads = bucket.final_grads = None
            bucket.reduced_grads = []
            bucket.grad_squares = []
            bucket.squares_event = None

    def unshard_block(self, block: str) -> None:
        """Gathers the weights of a block.

        Communicates: all-gather over depth, often prefetched.
        """
        if block != self._resident_block:
            # Dispatch modes of selective checkpointing must not save these copies and collectives.
            with collectives.hide_from_dispatch_modes(), self.grid.trace.outside_block():
                self._unshard_block(block)

    def prepare_block(self, block: str) -> None:
        """Waits for the update of a block, and fetches its offloaded weights."""
        for bucket in self.buckets:
            # Weights of streams are used by all blocks, and share the bucket of vectors.
            if bucket.pending_update is not None and bucket.name in (block, VECTORS):
                bucket.wait_for_update()
        if self.host_offload is not None:
            self.unshard_block(block)

    def offload_weights(self, room: int) -> None:
        """Offloads weights to the host from now on. room: bytes of host memory that may be used."""
        self.host_offload = HostOffload(
            self.buckets, self.buckets[0].data.dtype, self.device, room=room
        )
        for bucket in self.host_offload.buckets:
            self.host_offload.register_bucket(bucket)
        self.begin_step("")

    def discard_trial(self) -> None:
        """Drops gradients, gathered weights and recorded orders after a trial step."""
        self.begin_step("")
        self._recorded_orders = {}

    def wait_for_updates(self) -> None:
        """Makes the device wait for all pending updates of weights."""
        for bucket in self.buckets:
            bucket.wait_for_update()
        if self.host_offload is not None:
            self.host_offload.synchronize()

    def _unshard_block(self, block: str) -> None:
        if self._filling_buckets and self._filling_buckets[0].name != block:
            # The previous block is complete: issue its reduction before the gathers below.
            self._reduce_filled_buckets()
        here = self._buckets_to_fetch(block)
        # A block that is needed after this one keeps its memory, as it is prefetched below.
        follows = self._next_block([*self._blocks_seen, block])
        if not self.keep_unsharded:
            for bucket in self._buckets_to_fetch(self._resident_block):
                self._reshard_bucket(bucket, soon=bucket.name == follows)
        self._resident_block = block
        if here and all(bucket.unsharded_params is not None for bucket in here):
            return
        pending = self._prefetches.pop(block, None) or self._gather_block(block)
        self._blocks_seen.append(block)
        # Issue the next gather before waiting for this one, so that it overlaps with this block.
        self._prefetch_next_block()
        for bucket, values in zip(here, pending, strict=True):
            whole = values.wait()
            if bucket.is_gathered:
                bucket.unsharded_params = bucket.unpack_gathered(whole)
                # The gathered weights are a copy; the fetched shard is no longer needed.
                self._evict_weights(bucket)
            else:
                bucket.unsharded_params = []

    def _buckets_to_fetch(self, block: str) -> list[Bucket]:
        """Returns the buckets of a block that must be gathered over depth or fetched."""
        return [bucket for bucket in self.buckets if bucket.name == block and bucket.needs_fetch]

    def _reshard_bucket(self, bucket: Bucket, *, soon: bool = False) -> None:
        """Drops the gathered or fetched weights of a bucket. soon: they are needed next."""
        bucket.unsharded_params = None
        if not soon:
            self._evict_weights(bucket)

    def _evict_weights(self, bucket: Bucket) -> None:
        """Frees the device memory of offloaded weights.

        Memory is not freed while a fetch or gather of it is in flight: if two jobs of a stage use
        the same block in succession, the second fetch is issued before the first is complete.
        """
        under_way = bucket.name in self._prefetches
        if bucket.host_data is not None and self.host_offload is not None and not under_way:
            self.host_offload.evict_weights(bucket)

    def _next_block(self, seen: list[str]) -> str:
        """Returns the next block in the recorded order, or "" if this step deviates from it."""
        order = self._recorded_orders.get(self._step_kind, [])
        if order[: len(seen)] == seen and len(order) > len(seen):
            return order[len(seen)]
        return ""

    def _gather_block(self, block: str) -> list[PendingTensor]:
        pending: list[PendingTensor] = []
        for bucket in self._buckets_to_fetch(block):
            # A bucket on the host is fetched first; the gather reads the fetched shard.
            part = PendingTensor(bucket.data)
            if bucket.host_data is None:
                bucket.wait_for_update()
            elif self.host_offload is not None:
                part = self.host_offload.fetch_weights(bucket)
            if bucket.is_gathered:
                with self.grid.trace.named_scope(block):
                    part = collectives.all_gather(part.wait(), self.gather_axis)
            pending.append(part)
        if "weight_gather" not in self.overlap:
            for one in pending:
                one.wait()
        return pending

    def _prefetch_next_block(self) -> None:
        """Issues the gather of the next block in the recorded order, if any."""
        block = self._next_block(self._blocks_seen)
        if block and block not in self._prefetches:
            self._prefetches[block] = self._gather_block(block)

    def begin_pass(self, *, last: bool = False, forget: bool = False) -> None:
        """Starts a pass over some blocks. last: reductions over replicas start during this pass.

        forget: whether to drop the weights of the current block, with which this pass does not
        begin.
        """
        self._reduce_filled_buckets()
        self._is_last_micro_batch = last
        if forget and not self.keep_unsharded:
            for bucket in self._buckets_to_fetch(self._resident_block):
                self._reshard_bucket(bucket)
            self._resident_block = ""

    def flush_reductions(self) -> None:
        """Starts all remaining reductions of this pass, before another pass begins."""
        self._reduce_filled_buckets()
        while self._depth_reductions:
            self._finish_depth_reductions()
        while self._shared_sums:
            self._finish_shared_sum()

    # ---- gradients: reduce over depth, shared weights, replicas ------------------------

    def accumulate_grad(self, weight: ShardedParameter, grad: Tensor) -> None:
        """Adds a gradient of a gathered weight.

        If another block was being filled, it is complete and is reduced.
        """
        if self._weight_grad_sums is not None:
            total = self._weight_grad_sums.get(weight)
            # In place: the first sum is a copy, unless the gradient has the wide dtype already.
            if total is None:
                self._weight_grad_sums[weight] = grad.to(self.reduce_dtype)
            else:
                total += grad
            return
        if not weight.is_gathered:
            self.accumulate_shard_grad(weight.bucket, weight.offset, grad)
            return
        with collectives.hide_from_dispatch_modes():
            self._start_filling(weight.bucket)
            weight.bucket.add_unsharded_grad(weight, grad)

    @contextmanager
    def sum_weight_grads(self) -> Iterator[None]:
        """Returns a context that sums the gradients of each weight and adds every sum once.

        Chunks of a micro-batch each compute a gradient. Summed here in the wide dtype and then
        rounded once, they leave the bucket in the dtype that a single gradient has.
        """
        assert self._weight_grad_sums is None, "sums of weight gradients are not nested"
        self._weight_grad_sums = {}
        try:
            yield
            sums = self._weight_grad_sums
        finally:
            self._weight_grad_sums = None
        while sums:
            weight, total = sums.popitem()
            self.accumulate_grad(weight, total.to(weight.param.dtype))

    def accumulate_shard_grad(self, bucket: Bucket, start: int, grad: Tensor) -> None:
        """Adds a gradient of consecutive shards, from offset `start`."""
        with collectives.hide_from_dispatch_modes():
            self._start_filling(bucket)
            self._add_to_bucket(bucket, grad, start)

    def _add_to_bucket(self, bucket: Bucket, grad: Tensor, start: int = 0) -> None:
        """Adds to the gradient of a bucket, which may be on the host."""
        if bucket.host_data is not None and self.host_offload is not None:
            self.host_offload.fetch_grads(bucket)
        bucket.add_shard_grad(grad, start)

    def _offload_grads(self, bucket: Bucket) -> None:
        """Offloads the gradient of a bucket if its weights are offloaded.

        In the last micro-batch its squares must be summed first, as the norm is computed on the
        device.
        """
        if bucket.host_data is None or self.host_offload is None or bucket.grad is None:
            return
        if not self._is_last_micro_batch or bucket.grad_squares or bucket.data.device.type == "cpu":
            self.host_offload.offload_grads(bucket)

    def _start_filling(self, bucket: Bucket) -> None:
        """Marks a bucket as being filled, and reduces the buckets of the previous block."""
        if bucket.reduce_at_step_end or bucket in self._filling_buckets:
            return
        if self._filling_buckets and self._filling_buckets[0].name != bucket.name:
            self._reduce_filled_buckets()
        self._filling_buckets.append(bucket)

    def _reduce_filled_buckets(self) -> None:
        """Reduces the buckets of the block that was being filled."""
        # The order of all buckets is the same on all ranks, unlike that of the first gradients.
        filled = [bucket for bucket in self.buckets if bucket in self._filling_buckets]
        self._filling_buckets = []
        unsharded = [bucket for bucket in filled if bucket.unsharded_grads is not None]
        self._reduce_scatter_over_depth(unsharded)
        for bucket in filled:
            if bucket not in unsharded:
                if self._is_last_micro_batch:
                    self._start_early_reduction(bucket)
                self._offload_grads(bucket)

    def _reduce_scatter_over_depth(self, buckets: list[Bucket]) -> None:
        """Starts the reductions over depth of the buckets of a block."""
        if not buckets:
            return
        pending = []
        for bucket in buckets:
            assert bucket.unsharded_grads is not None
            flat = bucket.unsharded_grads.view(-1)
            with self.grid.trace.named_scope(bucket.name):
                pending.append((bucket, collectives.reduce_scatter(flat, self.scatter_axis)))
            bucket.unsharded_grads = None
        self._depth_reductions.append((pending, self._is_last_micro_batch))
        # With overlap, those of one block remain in flight while the next block computes; more
        # would keep the gradient buffers of several blocks.
        while len(self._depth_reductions) > (1 if "dw" in self.overlap else 0):
            self._finish_depth_reductions()

    def _finish_depth_reductions(self) -> None:
        """Waits for the oldest reductions over depth."""
        reductions, last = self._depth_reductions.popleft()
        for bucket, pending in reductions:
            if bucket.host_data is not None and self.host_offload is not None:
                self.host_offload.fetch_grads(bucket)
            bucket.add_compressed_grad(pending.wait())
            # `last` belongs to the pass that issued the reduction; another may have begun since.
            if last:
                self._start_early_reduction(bucket)
            self._offload_grads(bucket)

    def _start_early_reduction(self, bucket: Bucket) -> None:
        """Starts the reduction over replicas during backward, if the gradient is complete."""
        shared = bucket.shared_segments
        # Without replicas, `finish_gradients` computes the sum of shared weights.
        if bucket.reduce_at_step_end or (shared and bucket.replica_axis.size == 1):
            return
        if shared:
            self._shared_sums.append((bucket, *self._start_shared_sums(bucket)))
            while len(self._shared_sums) > (1 if "dw" in self.overlap else 0):
                self._finish_shared_sum()
        elif bucket.replica_axis.size > 1:
            self._reduce_over_replicas(bucket, self._pop_grad(bucket))
        elif self.on_bucket_complete is not None and "dw" in self.overlap:
            self.on_bucket_complete(bucket)

    def _finish_shared_sum(self) -> None:
        """Waits for the oldest sum of shared weights; the reduction over replicas follows."""
        bucket, whole, pending = self._shared_sums.popleft()
        self._reduce_over_replicas(bucket, _merge_shared_sums(bucket, whole, pending))

    def _pop_grad(self, bucket: Bucket) -> Tensor:
        """Removes and returns the gradient of a bucket; later gradients are added separately."""
        assert bucket.grad is not None, bucket.name
        whole = bucket.grad.flat_grad(bucket.data.device)
        bucket.grad = None
        return whole

    def _reduce_over_replicas(self, bucket: Bucket, whole: Tensor) -> None:
        """Starts the reduction of a gradient over all ranks with the same shards."""
        with self.grid.trace.named_scope(bucket.name):
            pending = collectives.reduce_scatter(whole, bucket.replica_axis)
        bucket.reduced_grads.append(pending)
        if "dw" not in self.overlap:
            pending.wait()

    def finish_gradients(self) -> list[tuple[Bucket, Pieces]]:
        """Returns each trainable bucket with the optimizer shard of its gradient, in pieces.

        The gradient is summed over all ranks that have the bucket.
        Communicates: the remaining reductions over depth, then over ranks of row and col that share
        weights, then over the replica axis.
        """
        self._check_params()
        self._reduce_filled_buckets()
        # Buckets that are complete only now.
        for bucket in self.buckets:
            if bucket.unsharded_grads is not None:
                self._reduce_scatter_over_depth([bucket])
        self.flush_reductions()
        buckets = [bucket for bucket in self.buckets if bucket.trainable]
        for bucket in buckets:
            # This rank has no gradient, but other ranks may have one: contribute zeros.
            if bucket.grad is None and not bucket.reduced_grads and bucket.final_grads is None:
                bucket.grad = GradientAccumulator(bucket.reduced_elements, self.reduce_dtype)
            if bucket.grad is not None:
                if (
                    self.host_offload is not None
                    and bucket.data.is_cuda
                    and not bucket.grad_squares
                ):
                    # The last micro-batch had no gradient for it, so its squares are not summed.
                    self.host_offload.fetch_grads(bucket)
                self._sum_shared_grads(bucket)
                if bucket.replica_axis.size > 1:
                    self._reduce_over_replicas(bucket, self._pop_grad(bucket))
        return [(bucket, self._collect_final_grads(bucket)) for bucket in buckets]

    def _collect_final_grads(self, bucket: Bucket) -> Pieces:
        """Returns the optimizer shard of a gradient, reduced if other ranks have the bucket.

        Buckets that are reduced at the end of a step have many small weights, or one weight with
        two gradients; they are merged into one piece.
        """
        device = bucket.data.device
        if bucket.final_grads is None:
            bucket.final_grads = GradientAccumulator(bucket.optimizer_shard_size, self.reduce_dtype)
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
        """Raises if parameters were replaced, moved or (un)frozen after `parallelize`."""
        for bucket in self.buckets:
            start = bucket.data.data_ptr()
            itemsize = bucket.data.element_size()
            for weight in bucket.weights:
                param = weight.param
                at = start + weight.offset * itemsize
                # Offloaded parameters have no memory, and so no address, between uses.
                moved = param.data_ptr() != at and param.numel() > 0 and bucket.host_data is None
                if param is not weight.expected_param or moved:
                    raise ShardingError(
                        f"{weight.name} is no longer part of its bucket. The parameters of a "
                        "parallel model must not be moved, cast, copied or replaced. Pass dtype= "
                        "and device= to parallelize(), and load values with "
                        "model.parallel.load_full_state()."
                    )
                if param.requires_grad != weight.trainable:
                    raise ShardingError(
                        f"{weight.name} has requires_grad={param.requires_grad}, but had "
                        f"{weight.trainable} in parallelize(). It must not change afterwards. "
                        "Freeze or unfreeze weights before you call parallelize()."
                    )

    def _sum_shared_grads(self, bucket: Bucket) -> None:
        """Sums the gradient over ranks of row and col, and over stages, that share weights."""
        if not bucket.shared_segments and bucket.tied_axis is None:
            return
        whole = _merge_shared_sums(bucket, *self._start_shared_sums(bucket))
        if bucket.tied_axis is not None:
            with self.grid.trace.named_scope(bucket.name):
                whole = collectives.all_reduce(whole, bucket.tied_axis).wait()
        bucket.grad = GradientAccumulator(bucket.reduced_elements, self.reduce_dtype)
        bucket.grad.parts = {(0, bucket.reduced_elements): whole}

    def _start_shared_sums(self, bucket: Bucket) -> tuple[Tensor, list[PendingTensor]]:
        """Returns the gradient of a bucket, and the pending sums of its shared segments."""
        # Clone, as the sums are written into it, and the gradient may be a tensor of autograd.
        whole = self._pop_grad(bucket).clone()
        with self.grid.trace.named_scope(bucket.name):
            parts = [
                (whole[one.start : one.stop], one.shared_axis) for one in bucket.shared_segments
            ]
            return whole, [collectives.all_reduce(part, over) for part, over in parts]


def _merge_shared_sums(bucket: Bucket, whole: Tensor, pending: list[PendingTensor]) -> Tensor:
    """Writes the sums of the segments into the gradient and returns it."""
    for segment, one in zip(bucket.shared_segments, pending, strict=True):
        whole[segment.start : segment.stop].copy_(one.wait())
    return whole
