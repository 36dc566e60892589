"""Tiles: the states of buckets cut into parts that are updated at once, and where they rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ranvier.buckets.bucket import Bucket, Weight
from ranvier.comm.accumulator import Pieces
from ranvier.optim.low_precision_states import BLOCK

Rest = Literal["device", "host", "file"]


@dataclass(frozen=True)
class Home:
    """Where states rest, and how much of each place they may take."""

    states: Literal["device", "host", "file", "split"] = "device"
    resident: int = 0
    """Bytes of states that stay on the device with `split`."""
    room: int = 2**62
    """Bytes of host memory that may be taken."""
    path: str = ""
    """Directory of the file."""
    update: Literal["device", "cpu"] = "device"
    """Who updates states that rest elsewhere."""
    tile: int = 2**24
    """Numbers of a tile."""


@dataclass(frozen=True)
class Tile:
    """A range of my states of a bucket."""

    bucket: Bucket
    start: int
    stop: int
    weight: Weight | None = None
    """Whose it is, where that matters."""
    blocks: int = 0
    """Scales of 8-bit moments that belong to it."""

    @property
    def range(self) -> slice:
        """As a slice of a flat tensor of a bucket's states."""
        return slice(self.start, self.stop)


def rests_of(kinds: Mapping[Bucket, Mapping[str, torch.dtype]], home: Home) -> dict[Bucket, Rest]:
    """Where the states of each bucket rest; vectors are too few to be worth a way."""
    found: dict[Bucket, Rest] = {}
    left = home.resident if home.states == "split" else 0
    for bucket, types in kinds.items():
        size = sum(bucket.held * dtype.itemsize for dtype in types.values())
        small = bucket.weights[0].group == "vector" or size == 0
        stays = home.states == "device" or small or size <= left
        left -= size if stays and not small else 0
        found[bucket] = "device" if stays else "file" if home.states == "file" else "host"
    return found


def tiles_of(bucket: Bucket, types: Mapping[str, torch.dtype], size: int) -> Iterator[Tile]:
    """My range of a bucket in parts of at most `size`.

    Where moments are narrow none goes across two weights: they are rounded by weight and index.
    """
    spans: list[tuple[int, int, Weight | None]] = [(0, bucket.held, None)]
    if types["mean"].itemsize < bucket.queue.dtype.itemsize:
        spans = [(*bucket.span(weight), weight) for weight in bucket.weights]
    step = max(size // BLOCK, 1) * BLOCK
    for start, stop, weight in spans:
        for at in range(start, stop, step):
            count = min(step, stop - at)
            blocks = -(-count // BLOCK) if types["mean"] == torch.uint8 else 0
            yield Tile(bucket, at, at + count, weight, blocks)


def meet(tile: Tile, pieces: Pieces) -> Iterator[tuple[int, Tensor]]:
    """What of a gradient falls on a tile, with where in the tile it begins."""
    for start, grad in pieces:
        low, high = max(start, tile.start), min(start + grad.numel(), tile.stop)
        if low < high:
            yield low - tile.start, grad[low - start : high - start]
