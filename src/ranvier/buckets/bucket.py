"""Parameters on this rank, and the buckets in which they are gathered, reduced and updated.

Parameters that are communicated together form a `Bucket` (the matrices of a block; all vectors of
a kind). It has one flat buffer of values and one of gradients, so that one collective is enough.
Gradients and states of a pruned bucket are compressed: `reduced_elements` instead of `size` (see
`sparsity`).

The ranks with other tokens but the same shards of a bucket form its replica axis: data, context,
and expert for dense weights, fused. It splits gradients and optimizer states into equal ranges
(ZeRO-1). The optimizer shard of a bucket is the range that this rank updates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ranvier.buckets.sparsity import SparsityMask, pack_bits
from ranvier.buckets.spec import BucketSpec, BucketTraffic, ParamGroup
from ranvier.comm import autograd, collectives
from ranvier.comm.accumulator import GradientAccumulator, Pieces, flatten_pieces
from ranvier.comm.collectives import PendingTensor
from ranvier.comm.streams import PendingUpdate, StreamEvent
from ranvier.cost.layers import AxisGroup
from ranvier.grid import Axis
from ranvier.sharding import Dim, Shard, Sharding

if TYPE_CHECKING:
    from ranvier.buckets.scheduler import BucketScheduler


@dataclass(eq=False)
class ShardedParameter:
    """A parameter on this rank: its shard, its unsharded values, and its gradients."""

    name: str
    dims: tuple[Dim, ...]
    sharding: Sharding
    shard: Shard
    param_group: ParamGroup
    """vector (fewer than two named dims), embedding (possibly tied to a head) or matrix."""
    std: float
    mean: float
    """Mean of the initial values; `std` is their standard deviation."""
    owners: list[tuple[torch.nn.Module, str]]
    """Modules and attribute names of the parameter; several if it is tied."""
    trainable: bool = True
    original_values: Tensor | None = None
    """Values in the serial model; None if it was on the meta device."""
    expected_param: torch.nn.Parameter | None = None
    """The parameter that `parallelize` created; a replacement would not be trained."""
    tied_axis: Axis | None = None
    """The ranks of all stages that have this tied parameter."""
    bucket: Bucket = field(init=False)
    offset: int = field(init=False)

    @property
    def param(self) -> torch.nn.Parameter:
        """The `torch.nn.Parameter` with this rank's shard."""
        module, attribute = self.owners[0]
        param = getattr(module, attribute)
        assert isinstance(param, torch.nn.Parameter), self.name
        return param

    @property
    def storage(self) -> Tensor:
        """This rank's shard where it is stored: in the parameter, or in its copy on the host."""
        if self.bucket.host_data is None:
            return self.param.detach()
        flat = self.bucket.host_data[self.offset : self.offset + self.num_elements]
        return flat.view(self.sharding.local_shape)

    @property
    def num_elements(self) -> int:
        """Number of elements of this rank's shard, including padding."""
        return int(torch.Size(self.sharding.local_shape).numel())

    @property
    def is_gathered(self) -> bool:
        """Whether it is split between its uses and gathered before them."""
        return self.sharding.is_gathered

    def unsharded_data(self) -> Tensor:
        """Returns the weight gathered over depth, outside of autograd.

        Communicates: all-gather over depth, by bucket.
        """
        self.bucket.unshard()
        # Not gathered: `unshard` has only fetched it or waited for its update.
        if not self.is_gathered:
            return self.param.detach()
        assert self.bucket.unsharded_params is not None, self.name
        return self.bucket.unsharded_params[self.bucket.weights.index(self)]

    def unsharded_param(self) -> Tensor:
        """Returns the weight gathered over depth; differentiable.

        Communicates: all-gather over depth; backward: reduce-scatter over depth.
        """
        # The compiler cannot trace the Python state of the scheduler.
        if not torch.compiler.is_compiling():
            self.bucket.unshard()
        if not self.is_gathered:
            return self.param
        dim = self.sharding.gather_dim
        whole = autograd.all_gather(self.param, self.bucket.bucket_scheduler.gather_axis, dim)
        # Remove the padding of an uneven depth split.
        return whole.narrow(dim, 0, self.sharding.unsharded_shape[dim])

    def accumulate_grad(self, grad: Tensor) -> None:
        """Adds the gradient of the gathered weight.

        Communicates: reduce-scatter over depth, by bucket, later.
        """
        if self.trainable:
            self.bucket.bucket_scheduler.accumulate_grad(self, grad)


@dataclass(frozen=True)
class BucketSegment:
    """A range of a bucket, and the ranks of row and col that share its shards.

    With more ranks than kv heads, several consecutive ranks have the same head; norms are on all
    ranks of row.
    """

    start: int
    stop: int
    shared_axis: Axis


@dataclass(eq=False)
class Bucket:
    """Parameters that are gathered, reduced and updated together, in flat buffers."""

    name: str
    spec: BucketSpec
    weights: list[ShardedParameter]
    bucket_scheduler: BucketScheduler
    segments: list[BucketSegment]
    """Ranges whose gradients are summed over the same ranks, before the replica axis."""
    replica_axis: Axis
    """The ranks with the same shards, which split its gradients and optimizer states."""
    size: int
    """Number of elements on this rank, rounded up to a multiple of the replica axis."""
    reduce_at_step_end: bool
    """Whether gradients are complete only at the end of a step (tied weights, vectors)."""
    tied_axis: Axis | None
    """The ranks of all stages that have these tied weights."""
    data: Tensor = field(init=False)
    """Values `[size]`; the parameters are views of it."""
    sparsity_mask: SparsityMask | None = None
    """The elements that are not pruned; None for a dense bucket."""
    grad: GradientAccumulator | None = None
    """Sum of the gradients of this step, `[reduced_elements]`."""
    unsharded_grads: Tensor | None = None
    """Gradients of the gathered weights `[depth, reduced_elements]`, before their reduction."""
    reduced_grads: list[PendingTensor] = field(default_factory=list)
    """Optimizer shards of gradients `[optimizer_shard_size]`, to be summed."""
    final_grads: GradientAccumulator | None = None
    """The optimizer shard of the gradient, summed over all ranks that have the bucket."""
    grad_squares: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Gradients of this step whose squares are already being summed, with their partial sums."""
    squares_event: StreamEvent = None
    """Event after which these sums are complete."""
    unsharded_params: list[Tensor] | None = None
    """The weights gathered over depth; an empty list if the weights are on the device and need no
    gather."""
    host_data: Tensor | None = None
    """Values `[size]` of offloaded weights, on the host; they are on the device only during use."""
    pending_update: PendingUpdate | None = None
    """An optimizer update in progress."""

    @property
    def traffic(self) -> BucketTraffic:
        """The communication volumes of the bucket."""
        spans = [
            (segment.shared_axis.names, segment.stop - segment.start)
            for segment in self.shared_segments
        ]
        tied = self.tied_axis is not None
        return BucketTraffic(
            self.name,
            self.size,
            self.reduced_elements,
            self.is_gathered,
            self.trainable,
            self.reduce_at_step_end,
            AxisGroup(self.replica_axis.names, self.replica_axis.size),
            tuple(spans),
            tied,
        )

    @property
    def is_gathered(self) -> bool:
        """Whether its weights are split between their uses and gathered before them."""
        return self.weights[0].is_gathered

    @property
    def trainable(self) -> bool:
        """Whether its weights get gradients."""
        return self.weights[0].trainable

    @property
    def reduced_elements(self) -> int:
        """Number of elements that are reduced and updated; a multiple of the replica axis."""
        return self.size if self.sparsity_mask is None else self.sparsity_mask.compressed_size

    @property
    def optimizer_shard_size(self) -> int:
        """Number of elements of the optimizer shard, which this rank updates."""
        return self.reduced_elements // self.replica_axis.size

    @property
    def storage(self) -> Tensor:
        """The values `[size]` where they are stored, on the device or on the host."""
        if self.host_data is None:
            return self.data
        return self.host_data

    @property
    def needs_fetch(self) -> bool:
        """Whether its weights must be gathered or copied to the device before use."""
        return self.is_gathered or self.host_data is not None

    @contextmanager
    def temporary_storage(self) -> Iterator[None]:
        """Temporarily allocates the values of offloaded weights, to create views of them."""
        storage = self.data.untyped_storage()
        absent = storage.nbytes() < self.data.nbytes
        if absent:
            storage.resize_(self.data.nbytes)
        yield
        if absent:
            storage.resize_(0)

    def wait_for_update(self) -> None:
        """Makes the device wait for an update in progress."""
        if self.pending_update is not None:
            updating = self.pending_update
            self.pending_update = None
            updating.wait()

    def unshard(self) -> None:
        """Makes the current weights available on the device.

        Communicates: all-gather over depth, often prefetched.
        """
        # Weights must not be read before their update in the background is done.
        self.wait_for_update()
        if self.needs_fetch:
            self.bucket_scheduler.unshard_block(self.name)

    @property
    def shared_segments(self) -> list[BucketSegment]:
        """Segments whose gradients must be summed over ranks of row and col that share them."""
        return [segment for segment in self._segments_in_grad() if segment.shared_axis.size > 1]

    def _segments_in_grad(self) -> list[BucketSegment]:
        """Returns the segments with their bounds in a (compressed) gradient."""
        if self.sparsity_mask is None:
            return self.segments
        return [
            BucketSegment(
                self.sparsity_mask.compressed_offset(s.start),
                self.sparsity_mask.compressed_offset(s.stop),
                s.shared_axis,
            )
            for s in self.segments
        ]

    def owns_weight(self, weight: ShardedParameter) -> bool:
        """Whether this is the first of all ranks with this shard of the weight."""
        return self.replica_axis.index == 0 and self.owns_states(weight)

    def owns_states(self, weight: ShardedParameter) -> bool:
        """Whether this is the first rank with this optimizer shard of the weight."""
        # For tied weights the first stage that has them is the owner.
        tied = self.tied_axis is not None and self.tied_axis.index > 0
        return self.segment_of(weight).shared_axis.index == 0 and not tied

    def segment_of(self, weight: ShardedParameter) -> BucketSegment:
        """Returns the segment of a weight."""
        offset = weight.offset
        # An empty segment still contains the offset of its empty weights.
        return next(s for s in self.segments if s.start <= offset < max(s.stop, s.start + 1))

    def owned_pieces(self, pieces: Pieces) -> list[Tensor]:
        """Returns the parts of a gradient's optimizer shard that this rank owns."""
        low = self.replica_axis.index * self.optimizer_shard_size
        tied = self.tied_axis is not None and self.tied_axis.index > 0
        owned = [s for s in self._segments_in_grad() if s.shared_axis.index == 0 and not tied]
        # Bounds below zero are before the piece; the slice clips bounds after its end.
        return [
            piece[max(s.start - low - at, 0) : max(s.stop - low - at, 0)]
            for at, piece in pieces
            for s in owned
        ]

    @property
    def optimizer_shard_bounds(self) -> tuple[int, int]:
        """Start and end of the optimizer shard in the values `[size]`."""
        axis = self.replica_axis
        # Shards have equal numbers of compressed elements, so their dense sizes differ.
        if self.sparsity_mask is not None:
            return self.sparsity_mask.shard_bounds[axis.index], self.sparsity_mask.shard_bounds[
                axis.index + 1
            ]
        return axis.index * self.optimizer_shard_size, (axis.index + 1) * self.optimizer_shard_size

    def state_shard(self, weight: ShardedParameter) -> Shard:
        """Returns the part of `weight` with optimizer states on this rank.

        It is the overlap of the weight with the optimizer shard.
        """
        start, stop = (bound - weight.offset for bound in self.optimizer_shard_bounds)
        return weight.shard.narrow_flat(max(start, 0), max(stop, 0))

    def dense_state_range(self, weight: ShardedParameter) -> tuple[int, int]:
        """Returns the range of `state_shard(weight)` in a dense tensor of the optimizer shard."""
        start = max(weight.offset - self.optimizer_shard_bounds[0], 0)
        flat = self.state_shard(weight).flat_range
        assert flat is not None
        return start, start + flat[1] - flat[0]

    def split_by_weight(self, pieces: Pieces) -> list[tuple[ShardedParameter, Tensor]]:
        """Splits the optimizer shard by weight, with zeros for pruned elements."""
        whole = self.to_dense(flatten_pieces(pieces, self.bucket_scheduler.reduce_dtype))
        return [(weight, whole[slice(*self.dense_state_range(weight))]) for weight in self.weights]

    # ---- the optimizer shard, compressed if the bucket is pruned --------------------------------

    def set_sparsity_mask(self, mask: Tensor | None) -> None:
        """Prunes the weights to the elements in `mask` `[size]`; None makes the bucket dense.

        Existing states and gradients are not converted.
        Communicates: all-gather of bits over depth.
        """
        if mask is None:
            self.sparsity_mask = None
            return
        axis = self.bucket_scheduler.gather_axis
        # The gradient of the gathered weights is compressed before its reduction, which needs the
        # masks of all depth ranks.
        rows = pack_bits(mask)[None]
        if self.is_gathered:
            with self.bucket_scheduler.grid.trace.named_scope(self.name):
                rows = collectives.all_gather(rows, axis).wait()
        # Compressed offsets are needed at the bounds of every weight.
        edges = [edge for w in self.weights for edge in (w.offset, w.offset + w.num_elements)]
        if self.is_gathered:
            mine = axis.index
        else:
            mine = 0
        ranks = self.replica_axis.size
        self.sparsity_mask = SparsityMask(rows, self.size, edges, mine=mine, ranks=ranks)
        self.sparsity_mask.zero_pruned(self.storage)

    def state_range(self, weight: ShardedParameter) -> tuple[int, int]:
        """Returns the range of a weight in the states `[optimizer_shard_size]`."""
        if self.sparsity_mask is None:
            return self.dense_state_range(weight)
        first = self.replica_axis.index * self.optimizer_shard_size
        edges = (weight.offset, weight.offset + weight.num_elements)
        # Clamp to the optimizer shard, as a weight may begin or end on another rank.
        low, high = (
            min(
                max(self.sparsity_mask.compressed_offset(edge) - first, 0),
                self.optimizer_shard_size,
            )
            for edge in edges
        )
        return low, high

    def take_optimizer_shard(self, flat: Tensor) -> Tensor:
        """Returns the optimizer shard of a tensor `[size]`; a copy if pruned."""
        if self.sparsity_mask is not None:
            first = self.replica_axis.index * self.optimizer_shard_size
            return self.sparsity_mask.compress_range(
                flat.to(self.sparsity_mask.device), 0, first, first + self.optimizer_shard_size
            )
        if self.optimizer_shard_size:
            return flat.view(-1, self.optimizer_shard_size)[self.replica_axis.index]
        return flat[:0]

    def to_dense(self, part: Tensor) -> Tensor:
        """Converts an optimizer shard to dense, with zeros for pruned elements."""
        if self.sparsity_mask is None:
            return part
        low, high = self.optimizer_shard_bounds
        dense = torch.zeros(high - low, dtype=part.dtype, device=self.sparsity_mask.device)
        self.sparsity_mask.write_dense(
            dense, low, self.replica_axis.index * self.optimizer_shard_size, part
        )
        return dense

    def to_compressed(self, dense: Tensor) -> Tensor:
        """Converts a dense tensor to a compressed optimizer shard; the inverse of `to_dense`."""
        if self.sparsity_mask is None:
            return dense
        first = self.replica_axis.index * self.optimizer_shard_size
        dense = dense.to(self.sparsity_mask.device)
        return self.sparsity_mask.compress_range(
            dense, self.optimizer_shard_bounds[0], first, first + self.optimizer_shard_size
        )

    def write_optimizer_shard(self, start: int, new: Tensor) -> None:
        """Writes new values of the optimizer shard, from offset `start`, to their storage."""
        self.write_updated_values(self.replica_axis.index * self.optimizer_shard_size + start, new)

    def write_updated_values(self, start: int, new: Tensor) -> None:
        """Writes new values of updated elements (of all replicas), from offset `start`."""
        if self.sparsity_mask is None:
            self.storage[start : start + new.numel()].copy_(new, non_blocking=True)
            return
        new = new.to(self.sparsity_mask.device, non_blocking=True)
        if self.host_data is None:
            self.sparsity_mask.write_dense(self.data, 0, start, new)
            return
        # A scatter is slow on the host: copy the dense range to the device and back.
        low = self.sparsity_mask.dense_position(start)
        high = self.sparsity_mask.dense_position(start + new.numel())
        dense = self.host_data[low:high].to(self.sparsity_mask.device, non_blocking=True, copy=True)
        self.sparsity_mask.write_dense(dense, low, start, new)
        self.host_data[low:high].copy_(dense, non_blocking=True)

    # ---- depth axis ---------------------------------------------------------------------

    def unpack_gathered(self, buffer: Tensor) -> list[Tensor]:
        """Returns the unsharded weights from their all-gathered buffer `[depth · size]`."""
        rows = buffer.view(-1, self.size)  # (depth, size)
        out = []
        for weight in self.weights:
            local = weight.sharding.local_shape
            dim = weight.sharding.gather_dim
            part = rows[:, weight.offset : weight.offset + weight.num_elements]
            # (depth, *local): move depth next to the split dim, merge both, remove the padding.
            whole = part.unflatten(1, local).movedim(0, dim).flatten(dim, dim + 1)
            out.append(whole.narrow(dim, 0, weight.sharding.unsharded_shape[dim]).contiguous())
        return out

    def add_unsharded_grad(self, weight: ShardedParameter, grad: Tensor) -> None:
        """Adds the gradient of a gathered weight to the buffer for the next reduction."""
        depth = self.bucket_scheduler.scatter_axis.size
        if self.unsharded_grads is None:
            self.unsharded_grads = torch.zeros(
                depth,
                self.reduced_elements,
                dtype=self.bucket_scheduler.reduce_dtype,
                device=grad.device,
            )
        local = weight.sharding.local_shape
        dim = weight.sharding.gather_dim
        # An uneven depth split is padded, but the gradient is not.
        if grad.shape[dim] != depth * local[dim]:
            shape = [*local[:dim], depth * local[dim], *local[dim + 1 :]]
            padded = grad.new_zeros(shape)
            padded.narrow(dim, 0, grad.shape[dim]).copy_(grad)
            grad = padded
        # One row per depth rank, in the layout that reduce-scatter expects.
        rows = grad.unflatten(dim, (depth, -1)).movedim(dim, 0).reshape(depth, -1)
        if self.sparsity_mask is not None:
            self.sparsity_mask.add_to_compressed(self.unsharded_grads, rows, weight.offset)
        else:
            self.unsharded_grads[:, weight.offset : weight.offset + weight.num_elements] += rows

    def add_shard_grad(self, grad: Tensor, start: int = 0) -> None:
        """Adds a gradient of consecutive shards, from offset `start`."""
        if self.sparsity_mask is not None:
            # Both ends are bounds of weights, whose compressed offsets are known on the host.
            low = self.sparsity_mask.compressed_offset(start)
            high = self.sparsity_mask.compressed_offset(start + grad.numel())
            start, grad = low, self.sparsity_mask.compress_range(grad.reshape(-1), start, low, high)
        self.add_compressed_grad(grad, start)

    def add_compressed_grad(self, grad: Tensor, start: int = 0) -> None:
        """Adds a gradient, which is compressed if the bucket is pruned, from offset `start`."""
        if self.grad is None:
            self.grad = GradientAccumulator(
                self.reduced_elements, self.bucket_scheduler.reduce_dtype
            )
        if grad.numel():
            self.grad.add_grad(start, grad)
