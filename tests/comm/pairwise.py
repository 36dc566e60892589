"""Pairwise: p - 1 rounds in which every rank sends its own block to another rank each time.

The rounds of a ring, but blocks come from their owners, so that no rank passes on what it received.
"""

from __future__ import annotations

from ranvier.comm.algorithms.flat import FlatAlgorithm, Phase, send_receive
from ranvier.comm.algorithms.schedule import AxisShape, Round


def all_gather_rounds(size: int, index: int) -> list[Round]:
    """Returns rounds in which rank i sends block i to rank i + d and receives block i - d."""
    return [
        send_receive(
            target=(index + distance) % size,
            sends=[index],
            source=(index - distance) % size,
            receives=[(index - distance) % size],
        )
        for distance in range(1, size)
    ]


def num_rounds(size: int) -> int:
    """Returns p - 1."""
    return size - 1


def sent_bytes(size: int) -> float:
    """Returns (p - 1) / p."""
    return (size - 1) / size


def leaving_bytes(shape: AxisShape) -> dict[int, float]:
    """Returns 1 / p for each message from a rank of the node to another node."""
    p = shape.size
    return shape.bytes_leaving((i, (i + d) % p, 1 / p) for d in range(1, p) for i in range(p))


ALL_GATHER = Phase(all_gather_rounds, num_rounds, sent_bytes, leaving_bytes)
PAIRWISE = FlatAlgorithm("pairwise", {"all_gather": [ALL_GATHER]}, companion="folded")
