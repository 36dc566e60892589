"""Tiles: the states of buckets cut into parts that are updated at once, and where they rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ranvier.buckets.bucket import Bucket, ShardedParameter
from ranvier.comm.accumulator import Pieces
from ranvier.optim.low_precision_states import BLOCK_SIZE

StateLocation = Literal["device", "host", "file"]


@dataclass(frozen=True)
class StatePlacement:
    """Where states rest, and how much of each place they may take."""

    states: Literal["device", "host", "file", "split"] = "device"
    device_bytes: int = 0
    """Bytes of states that stay on the device with `split`."""
    host_bytes: int = 2**62
    """Bytes of host memory that may be taken."""
    path: str = ""
    """Directory of the file."""
    update_device: Literal["device", "cpu"] = "device"
    """Who updates states that rest elsewhere."""
    tile_elements: int = 2**24
    """Numbers of a tile."""


@dataclass(frozen=True)
class Tile:
    """A range of my states of a bucket."""

    bucket: Bucket
    start: int
    stop: int
    weight: ShardedParameter | None = None
    """Whose it is, where that matters."""
    num_blocks: int = 0
    """Scales of 8-bit moments that belong to it."""

    @property
    def as_slice(self) -> slice:
        """As a slice of a flat tensor of a bucket's states."""
        return slice(self.start, self.stop)


def state_locations(
    kinds: Mapping[Bucket, Mapping[str, torch.dtype]], home: StatePlacement
) -> dict[Bucket, StateLocation]:
    """Where the states of each bucket rest; vectors are too few to be worth a way."""
    found: dict[Bucket, StateLocation] = {}
    if home.states == "split":
        left = home.device_bytes
    else:
        left = 0
    for bucket, types in kinds.items():
        size = sum(bucket.data_shard_size * dtype.itemsize for dtype in types.values())
        small = bucket.weights[0].param_group == "vector" or size == 0
        stays = home.states == "device" or small or size <= left
        left -= size if stays and not small else 0
        if stays:
            found[bucket] = "device"
        elif home.states == "file":
            found[bucket] = "file"
        else:
            found[bucket] = "host"
    return found


def split_into_tiles(bucket: Bucket, types: Mapping[str, torch.dtype], size: int) -> Iterator[Tile]:
    """My range of a bucket in parts of at most `size`.

    Where moments are narrow none goes across two weights: they are rounded by weight and index.
    """
    spans: list[tuple[int, int, ShardedParameter | None]] = [(0, bucket.data_shard_size, None)]
    if types["mean"].itemsize < bucket.bucket_scheduler.reduce_dtype.itemsize:
        spans = [(*bucket.state_range(weight), weight) for weight in bucket.weights]
    step = max(size // BLOCK_SIZE, 1) * BLOCK_SIZE
    for start, stop, weight in spans:
        for at in range(start, stop, step):
            count = min(step, stop - at)
            if types["mean"] == torch.uint8:
                blocks = -(-count // BLOCK_SIZE)
            else:
                blocks = 0
            yield Tile(bucket, at, at + count, weight, blocks)


def grads_in_tile(tile: Tile, pieces: Pieces) -> Iterator[tuple[int, Tensor]]:
    """What of a gradient falls on a tile, with where in the tile it begins."""
    for start, grad in pieces:
        low = max(start, tile.start)
        high = min(start + grad.numel(), tile.stop)
        if low < high:
            yield low - tile.start, grad[low - start : high - start]
