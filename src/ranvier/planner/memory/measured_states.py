"""Sizes: bytes of a rank that follow from shapes alone: weights, states, buffers.

A bucket of vectors is too small to be worth a way to the host and back: it stays on the device, and
so do weights that several layers share. All others may rest on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ranvier.buckets.bucket import Bucket
from ranvier.buckets.offload import resting
from ranvier.cost.layers import Flow
from ranvier.nn.lm_head import Head
from ranvier.optim.low_precision_states import BLOCK
from ranvier.optim.state_store import SLOTS
from ranvier.parallel.parallelize import Parallel


@dataclass(frozen=True)
class Sizes:
    """Bytes of a rank."""

    block: int
    """Weights of a block that may rest on the host."""
    head: int
    """Of the largest layer outside of blocks that may."""
    others: int
    """Of the other layers that may."""
    still: int
    """Weights that stay on the device."""
    count: int
    """Blocks."""
    master: int
    """Master weights, of trained weights in 16 bits."""
    moments: int
    small: int
    """What of these two stays on the device: of vectors."""
    ring: int
    """Tiles of states on the device, where states rest elsewhere."""
    wide_ring: int
    """The same where weights rest on the host as well: gradients and weights pass through, too."""
    gathered: int
    """Weights gathered over depth: of the block that computes and of the next."""
    communication: int
    """Gradients being reduced over depth and data."""
    returned: int
    """Gradients of weights that may rest on the host, once they rest there."""
    publish: int
    """Updated weights being gathered over data."""
    trained: int
    """Numbers that this rank updates."""

    @property
    def weights(self) -> int:
        """All working weights."""
        return self.count * self.block + self.head + self.others + self.still

    @property
    def states(self) -> int:
        """All master weights and moments."""
        return self.master + self.moments


def sizes_of(parallel: Parallel, *, moments: str = "master", tile: int = 2**24) -> Sizes:
    """The sizes of a model on this rank. moments: `optim.moments`; tile: `memory.tile`."""
    queue, names = parallel.queue, list(parallel.kinds)
    data, depth, wide = queue.data_axis.size, queue.gather_axis.size, queue.dtype.itemsize
    able = [bucket for bucket in queue.buckets if resting(bucket)]
    blocks = [sum(b.data.nbytes for b in able if b.name == name) for name in names]
    layers = sorted(b.data.nbytes for b in able if b.name not in parallel.kinds)
    trained = [bucket for bucket in queue.buckets if bucket.trainable and bucket.size]
    states = {bucket: _states(bucket, moments) for bucket in trained}
    vectors = [bucket for bucket in trained if bucket.weights[0].group == "vector"]
    tiles = [
        (min(tile, b.held), sum(states[b]) / b.held, b.data.element_size())
        for b in trained
        if b not in vectors and b.held
    ]
    moved = [bucket for bucket in trained if bucket.split or data > 1]
    masks = sum(bucket.kept.bytes for bucket in queue.buckets if bucket.kept is not None)
    return Sizes(
        block=max(blocks, default=0),
        head=layers[-1] if layers else 0,
        others=sum(layers[:-1]),
        still=sum(b.data.nbytes for b in queue.buckets if not resting(b)) + masks,
        count=len(names),
        master=sum(master for master, _ in states.values()),
        moments=sum(both for _, both in states.values()),
        small=sum(sum(states[b]) for b in vectors),
        ring=SLOTS * round(max((n * each for n, each, _ in tiles), default=0)),
        wide_ring=SLOTS
        * round(max((n * (each + wide + own) for n, each, own in tiles), default=0)),
        gathered=2 * max((b.data.nbytes * depth for b in queue.buckets if b.split), default=0),
        communication=2 * max((b.count * depth * wide for b in moved), default=0),
        returned=sum(b.count * wide for b in able if b.trainable),
        publish=sum(b.data.nbytes for b in trained) if data > 1 else 0,
        trained=sum(b.held for b in trained),
    )


def gradient(parallel: Parallel, block: str, *, passes: int, last: bool) -> int:
    """Bytes of the gradient of a block after so many passes, once it is where it stays.

    One that came once stays as it came; it is wide once it is added to another or was reduced over
    an axis. last: of a step; then each data rank gets its range.
    """
    queue, total = parallel.queue, 0
    for bucket in queue.buckets:
        if bucket.name == block and bucket.trainable:
            wide, own = (bucket.count * d.itemsize for d in (queue.dtype, bucket.data.dtype))
            size = wide if bucket.split or passes > 1 else own
            reduced = last and queue.data_axis.size > 1
            total += wide // queue.data_axis.size if reduced else size
    return total


def _states(bucket: Bucket, moments: str) -> tuple[int, int]:
    """Bytes of master weights and of both moments of my range of a bucket."""
    count, dtype = bucket.held, bucket.data.dtype
    wide = bucket.queue.dtype.itemsize
    own = dtype in (torch.bfloat16, torch.float16) or bucket.kept is not None
    master = count * wide if own else 0
    if bucket.weights[0].group == "vector" or moments == "master":
        return master, 2 * count * wide
    if moments == "bf16":
        return master, 2 * count * 2
    return master, 2 * count + 8 * -(-count // BLOCK)


def logits(parallel: Parallel, flow: Flow) -> int:
    """Bytes of the logits of the largest chunk of a micro-batch."""
    heads = [leaf for leaf in parallel.leaves.values() if isinstance(leaf, Head)]
    return max((head.layer.chunk_bytes(flow) for head in heads), default=0)
