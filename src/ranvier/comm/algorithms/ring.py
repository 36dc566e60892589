"""Ring: p - 1 rounds in which every rank sends to the next one (Patarasuk and Yuan 2009; NCCL).

    all_gather       passes on the block that was received last
    reduce_scatter   passes on the sum that was received last, of block j from rank j + 1 to rank j
    all_reduce       reduce_scatter, then all_gather

The fewest bytes, in the most rounds.
"""

from __future__ import annotations

from ranvier.comm.algorithms.flat import FlatAlgorithm, Phase, send_receive
from ranvier.comm.algorithms.schedule import AxisShape, Round


def all_gather_rounds(size: int, index: int) -> list[Round]:
    """Returns rounds in which rank i sends blocks i, i - 1, ... to rank i + 1."""
    return [
        send_receive(
            target=(index + 1) % size,
            sends=[(index - step) % size],
            source=(index - 1) % size,
            receives=[(index - step - 1) % size],
        )
        for step in range(size - 1)
    ]


def reduce_scatter_rounds(size: int, index: int) -> list[Round]:
    """Returns rounds in which rank i sends its sums of blocks i - 1, i - 2, ... to rank i + 1."""
    return [
        send_receive(
            target=(index + 1) % size,
            sends=[(index - step - 1) % size],
            source=(index - 1) % size,
            receives=[(index - step - 2) % size],
            reduce=True,
        )
        for step in range(size - 1)
    ]


def num_rounds(size: int) -> int:
    """Returns p - 1."""
    return size - 1


def sent_bytes(size: int) -> float:
    """Returns (p - 1) / p."""
    return (size - 1) / size


def leaving_bytes(shape: AxisShape) -> dict[int, float]:
    """Returns (p - 1) / p for each edge of the ring between a rank of the node and another node."""
    p = shape.size
    return shape.bytes_leaving((i, (i + 1) % p, sent_bytes(p)) for i in range(p))


ALL_GATHER = Phase(all_gather_rounds, num_rounds, sent_bytes, leaving_bytes)
REDUCE_SCATTER = Phase(reduce_scatter_rounds, num_rounds, sent_bytes, leaving_bytes)
RING = FlatAlgorithm(
    "ring",
    {
        "all_gather": [ALL_GATHER],
        "reduce_scatter": [REDUCE_SCATTER],
        "all_reduce": [REDUCE_SCATTER, ALL_GATHER],
    },
)
