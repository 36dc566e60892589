"""Doubling: log2 p rounds of exchanges between two ranks, for p a power of two (MPICH; PCCL).

    all_gather       recursive doubling: exchanges all that a rank has, with distances 1, 2, ... p/2
    reduce_scatter   recursive halving: sends the half that the other rank keeps, with p/2, ... 2, 1
    all_reduce       reduce_scatter, then all_gather (Rabenseifner 2004)

The bytes of a ring in the fewest rounds. Sums are balanced trees over the ranks.
"""

from __future__ import annotations

from ranvier.comm.algorithms.flat import FlatAlgorithm, Phase, send_receive
from ranvier.comm.algorithms.schedule import AxisShape, Round


def distances(size: int) -> list[int]:
    """Returns 1, 2, 4, ... below `size`."""
    return [1 << k for k in range((size - 1).bit_length())]


def aligned_range(index: int, length: int) -> range:
    """Returns the blocks of the aligned range of this length that contains `index`."""
    start = index // length * length
    return range(start, start + length)


def all_gather_rounds(size: int, index: int) -> list[Round]:
    """Returns rounds after which a rank has the aligned range of 2, 4, ... p blocks around it."""
    return [
        send_receive(
            target=index ^ distance,
            sends=aligned_range(index, distance),
            source=index ^ distance,
            receives=aligned_range(index ^ distance, distance),
        )
        for distance in distances(size)
    ]


def reduce_scatter_rounds(size: int, index: int) -> list[Round]:
    """Returns rounds after which a rank has sums of the aligned range of p/2, ... 2, 1 blocks."""
    return [
        send_receive(
            target=index ^ distance,
            sends=aligned_range(index ^ distance, distance),
            source=index ^ distance,
            receives=aligned_range(index, distance),
            reduce=True,
        )
        for distance in reversed(distances(size))
    ]


def num_rounds(size: int) -> int:
    """Returns log2 p."""
    return len(distances(size))


def sent_bytes(size: int) -> float:
    """Returns (p - 1) / p."""
    return (size - 1) / size


def leaving_bytes(shape: AxisShape) -> dict[int, float]:
    """Returns d / p for each rank of the node whose partner at distance d is on another node."""
    p = shape.size
    return shape.bytes_leaving((i, i ^ d, d / p) for d in distances(p) for i in range(p))


ALL_GATHER = Phase(
    all_gather_rounds, num_rounds, sent_bytes, leaving_bytes, needs_power_of_two=True
)
REDUCE_SCATTER = Phase(
    reduce_scatter_rounds, num_rounds, sent_bytes, leaving_bytes, needs_power_of_two=True
)
DOUBLING = FlatAlgorithm(
    "doubling",
    {
        "all_gather": [ALL_GATHER],
        "reduce_scatter": [REDUCE_SCATTER],
        "all_reduce": [REDUCE_SCATTER, ALL_GATHER],
    },
)
