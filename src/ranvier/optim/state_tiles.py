"""State tiles: parts of bucket states that are updated together, and where they are stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ranvier.buckets.bucket import Bucket, ShardedParameter
from ranvier.comm.accumulator import Pieces
from ranvier.optim.low_precision_states import BLOCK_SIZE

StateLocation = Literal["device", "host", "disk"]


@dataclass(frozen=True)
class StatePlacement:
    """Where optimizer states are stored and updated, and how much memory they may use."""

    states: Literal["device", "host", "disk", "split"] = "device"
    """Where states are stored; "split": as many as fit on the device, the rest on the host."""
    device_bytes: int = 0
    """Bytes of states that remain on the device with "split"."""
    host_bytes: int = 2**62
    """Maximum bytes of host memory."""
    path: str = ""
    """Directory of the file for "disk"."""
    update_device: Literal["device", "cpu"] = "device"
    """Where offloaded states are updated."""
    tile_elements: int = 2**24
    """Maximum number of elements of a tile."""


@dataclass(frozen=True)
class Tile:
    """A range of this rank's states of a bucket."""

    bucket: Bucket
    start: int
    stop: int
    weight: ShardedParameter | None = None
    """The weight of the tile, if its rounding depends on the weight."""
    num_blocks: int = 0
    """Number of 8-bit quantization blocks, each with two scales."""

    @property
    def as_slice(self) -> slice:
        """The tile as a slice of a flat state tensor of its bucket."""
        return slice(self.start, self.stop)


def state_locations(
    kinds: Mapping[Bucket, Mapping[str, torch.dtype]], home: StatePlacement
) -> dict[Bucket, StateLocation]:
    """Returns where the states of each bucket are stored; vectors stay on the device."""
    found: dict[Bucket, StateLocation] = {}
    if home.states == "split":
        left = home.device_bytes
    else:
        left = 0
    # First fit: buckets stay on the device, in order, as long as there is room.
    for bucket, types in kinds.items():
        size = sum(bucket.optimizer_shard_size * dtype.itemsize for dtype in types.values())
        small = bucket.weights[0].param_group == "vector" or size == 0
        stays = home.states == "device" or small or size <= left
        left -= size if stays and not small else 0
        if stays:
            found[bucket] = "device"
        elif home.states == "disk":
            found[bucket] = "disk"
        else:
            found[bucket] = "host"
    return found


def split_into_tiles(bucket: Bucket, types: Mapping[str, torch.dtype], size: int) -> Iterator[Tile]:
    """Yields the optimizer shard of a bucket in tiles of at most `size` elements.

    With narrow moments no tile contains two weights, as rounding depends on the weight and the
    element index.
    """
    spans: list[tuple[int, int, ShardedParameter | None]] = [(0, bucket.optimizer_shard_size, None)]
    moments = [dtype for kind, dtype in types.items() if kind != "master"]
    if any(dtype.itemsize < bucket.bucket_scheduler.reduce_dtype.itemsize for dtype in moments):
        spans = [(*bucket.state_range(weight), weight) for weight in bucket.weights]
    # Tiles contain whole quantization blocks, so that a scale belongs to exactly one tile.
    step = max(size // BLOCK_SIZE, 1) * BLOCK_SIZE
    for start, stop, weight in spans:
        for at in range(start, stop, step):
            count = min(step, stop - at)
            if torch.uint8 in moments:
                blocks = -(-count // BLOCK_SIZE)
            else:
                blocks = 0
            yield Tile(bucket, at, at + count, weight, blocks)


def grads_in_tile(tile: Tile, pieces: Pieces) -> Iterator[tuple[int, Tensor]]:
    """Yields the parts of a gradient in a tile, with their offsets in the tile."""
    for start, grad in pieces:
        low = max(start, tile.start)
        high = min(start + grad.numel(), tile.stop)
        if low < high:
            yield low - tile.start, grad[low - start : high - start]
