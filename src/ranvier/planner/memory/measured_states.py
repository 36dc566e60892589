"""Bytes of a rank that follow from shapes alone: weights, optimizer states, buffers.

A bucket of vectors is too small to be worth offloading: it stays on the device, and so do weights
that several layers share. All others may be offloaded to the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ranvier.buckets.bucket import Bucket
from ranvier.buckets.offload import can_offload
from ranvier.cost.layers import ActivationShape
from ranvier.nn.lm_head import LMHead
from ranvier.optim.low_precision_states import BLOCK_SIZE
from ranvier.optim.state_store import NUM_SLOTS
from ranvier.parallel.parallel_model import ParallelModel


@dataclass(frozen=True)
class ModelStateSizes:
    """Bytes of a rank."""

    block_weights: int
    """Weights of a block that may be offloaded."""
    head_weights: int
    """Weights of the largest layer outside of blocks that may be offloaded."""
    other_weights: int
    """Weights of the other layers that may be offloaded."""
    resident_weights: int
    """Weights that stay on the device."""
    num_blocks: int
    """Number of blocks."""
    master: int
    """Master weights of trained 16-bit weights."""
    moments: int
    vector_states: int
    """Part of master weights and moments that stays on the device: that of vectors."""
    state_ring: int
    """Buffers on the device for tiles of offloaded states."""
    offload_ring: int
    """The same if weights are offloaded as well: gradients and weights pass through them, too."""
    gathered_weights: int
    """Weights gathered over depth: of the current block and of the next."""
    communication: int
    """Gradients being reduced over depth and data."""
    host_gradients: int
    """Gradients of weights that may be offloaded, once they are on the host."""
    publish: int
    """Updated weights being gathered over data."""
    trained_elements: int
    """Elements that this rank updates."""

    @property
    def weight_bytes(self) -> int:
        """All working weights."""
        return (
            self.num_blocks * self.block_weights
            + self.head_weights
            + self.other_weights
            + self.resident_weights
        )

    @property
    def state_bytes(self) -> int:
        """All master weights and moments."""
        return self.master + self.moments


def model_state_sizes(
    parallel: ParallelModel, *, moments: str = "master", tile: int = 2**24
) -> ModelStateSizes:
    """Sizes of a model on this rank. moments: `optim.state_dtype`; tile: `memory.offload_tile`."""
    queue = parallel.bucket_scheduler
    names = parallel.blocks
    data = queue.data_axis.size
    depth = queue.gather_axis.size
    wide = queue.reduce_dtype.itemsize
    able = [bucket for bucket in queue.buckets if can_offload(bucket)]
    blocks = [sum(b.data.nbytes for b in able if b.name == name) for name in names]
    layers = sorted(b.data.nbytes for b in able if b.name not in names)
    trained = [bucket for bucket in queue.buckets if bucket.trainable and bucket.size]
    states = {bucket: _bucket_state_bytes(bucket, moments) for bucket in trained}
    vectors = [bucket for bucket in trained if bucket.weights[0].param_group == "vector"]
    # Elements of a tile, its bytes of states per element, and bytes of a weight.
    tiles = [
        (min(tile, b.data_shard_size), sum(states[b]) / b.data_shard_size, b.data.element_size())
        for b in trained
        if b not in vectors and b.data_shard_size
    ]
    # Buckets whose gradients are reduced at all.
    moved = [bucket for bucket in trained if bucket.is_depth_sharded or data > 1]
    masks = sum(
        bucket.sparsity_mask.num_bytes
        for bucket in queue.buckets
        if bucket.sparsity_mask is not None
    )
    return ModelStateSizes(
        block_weights=max(blocks, default=0),
        head_weights=layers[-1] if layers else 0,
        other_weights=sum(layers[:-1]),
        resident_weights=sum(b.data.nbytes for b in queue.buckets if not can_offload(b)) + masks,
        num_blocks=len(names),
        master=sum(master for master, _ in states.values()),
        moments=sum(both for _, both in states.values()),
        vector_states=sum(sum(states[b]) for b in vectors),
        state_ring=NUM_SLOTS * round(max((n * each for n, each, _ in tiles), default=0)),
        offload_ring=NUM_SLOTS
        * round(max((n * (each + wide + own) for n, each, own in tiles), default=0)),
        gathered_weights=2
        * max((b.data.nbytes * depth for b in queue.buckets if b.is_depth_sharded), default=0),
        communication=2 * max((b.reduced_elements * depth * wide for b in moved), default=0),
        host_gradients=sum(b.reduced_elements * wide for b in able if b.trainable),
        publish=sum(b.data.nbytes for b in trained) if data > 1 else 0,
        trained_elements=sum(b.data_shard_size for b in trained),
    )


def block_grad_bytes(parallel: ParallelModel, block: str, *, passes: int, last: bool) -> int:
    """Bytes of the stored gradient of a block after so many passes.

    A gradient of a single pass keeps its dtype; it is widened once it is accumulated or reduced.
    last: of a step; then each data rank keeps its shard.
    """
    queue = parallel.bucket_scheduler
    total = 0
    for bucket in queue.buckets:
        if bucket.name == block and bucket.trainable:
            wide, own = (
                bucket.reduced_elements * d.itemsize
                for d in (queue.reduce_dtype, bucket.data.dtype)
            )
            if bucket.is_depth_sharded or passes > 1:
                size = wide
            else:
                size = own
            reduced = last and queue.data_axis.size > 1
            total += wide // queue.data_axis.size if reduced else size
    return total


def _bucket_state_bytes(bucket: Bucket, moments: str) -> tuple[int, int]:
    """Bytes of master weights and of both moments of this rank's shard of a bucket."""
    count = bucket.data_shard_size
    dtype = bucket.data.dtype
    wide = bucket.bucket_scheduler.reduce_dtype.itemsize
    # A pruned bucket has master weights in any dtype.
    own = dtype in (torch.bfloat16, torch.float16) or bucket.sparsity_mask is not None
    master = count * wide if own else 0
    if bucket.weights[0].param_group == "vector" or moments == "master":
        return master, 2 * count * wide
    if moments == "bf16":
        return master, 2 * count * 2
    # One byte per element and an fp32 scale per block, for each of the two moments.
    return master, 2 * count + 8 * -(-count // BLOCK_SIZE)


def chunk_logit_bytes(parallel: ParallelModel, flow: ActivationShape) -> int:
    """Bytes of the logits of the largest chunk of a micro-batch."""
    heads = [leaf for leaf in parallel.layers.values() if isinstance(leaf, LMHead)]
    return max((head.cost_model.chunk_bytes(flow) for head in heads), default=0)
