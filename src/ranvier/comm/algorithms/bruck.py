"""Bruck: an all-gather in ceil(log2 p) rounds for any number of ranks (Bruck et al. 1997).

After each round a rank has twice as many blocks, from its own one upwards: i, i + 1, ... i + 2d - 1
modulo p. In the last round only those that are missing are sent. Blocks are stored at their final
place, so that the rotation at the end of the usual formulation is not needed.
"""

from __future__ import annotations

from collections.abc import Iterator

from ranvier.comm.algorithms.doubling import distances
from ranvier.comm.algorithms.flat import FlatAlgorithm, Phase, send_receive
from ranvier.comm.algorithms.schedule import AxisShape, Round


def all_gather_rounds(size: int, index: int) -> list[Round]:
    """Returns rounds in which rank i sends min(d, p - d) blocks to rank i - d, d = 1, 2, 4, ..."""

    def first_blocks(rank: int, count: int) -> list[int]:
        return [(rank + k) % size for k in range(count)]

    return [
        send_receive(
            target=(index - distance) % size,
            sends=first_blocks(index, min(distance, size - distance)),
            source=(index + distance) % size,
            receives=first_blocks(index + distance, min(distance, size - distance)),
        )
        for distance in distances(size)
    ]


def num_rounds(size: int) -> int:
    """Returns ceil(log2 p)."""
    return len(distances(size))


def sent_bytes(size: int) -> float:
    """Returns (p - 1) / p."""
    return (size - 1) / size


def leaving_bytes(shape: AxisShape) -> dict[int, float]:
    """Returns min(d, p - d) / p for each rank of the node with rank i - d on another node."""
    p = shape.size

    def messages() -> Iterator[tuple[int, int, float]]:
        for d in distances(p):
            yield from ((i, (i - d) % p, min(d, p - d) / p) for i in range(p))

    return shape.bytes_leaving(messages())


ALL_GATHER = Phase(all_gather_rounds, num_rounds, sent_bytes, leaving_bytes)
BRUCK = FlatAlgorithm("bruck", {"all_gather": [ALL_GATHER]}, companion="folded")
