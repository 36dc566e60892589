"""Direct: every rank sends to every other one, in one round.

    all_gather       a rank sends its block to all others
    reduce_scatter   a rank sends each block to its owner, which adds them in the order of the ranks
    all_reduce       reduce_scatter, then all_gather: two rounds ("two-shot")

The bytes of a ring in p - 1 messages per rank. Sums equal those of one process bit by bit, and
narrow payloads are rounded once (ZeRO++).
"""

from __future__ import annotations

from ranvier.comm.algorithms.flat import FlatAlgorithm, Phase
from ranvier.comm.algorithms.schedule import AxisShape, Round, Transfer


def other_ranks(size: int, index: int) -> list[int]:
    """Returns all ranks except `index`, from the next one on: so all have different targets."""
    return [(index + distance) % size for distance in range(1, size)]


def all_gather_rounds(size: int, index: int) -> list[Round]:
    """Returns one round in which a rank sends its block to all others."""
    others = other_ranks(size, index)
    return [
        Round(
            sends=tuple(Transfer(rank, (index,)) for rank in others),
            receives=tuple(Transfer(rank, (rank,)) for rank in reversed(others)),
        )
    ]


def reduce_scatter_rounds(size: int, index: int) -> list[Round]:
    """Returns one round in which a rank sends every other rank the block of that rank."""
    others = other_ranks(size, index)
    return [
        Round(
            sends=tuple(Transfer(rank, (rank,), reduce=True) for rank in others),
            receives=tuple(Transfer(rank, (index,), reduce=True) for rank in reversed(others)),
        )
    ]


def num_rounds(size: int) -> int:
    """Returns 1."""
    return 1


def sent_bytes(size: int) -> float:
    """Returns (p - 1) / p."""
    return (size - 1) / size


def messages_leaving(shape: AxisShape) -> dict[int, int]:
    """Returns m (p - m) for a node of m ranks: one message from each to every rank elsewhere."""
    return {node: len(ranks) * (shape.size - len(ranks)) for node, ranks in shape.members.items()}


def leaving_bytes(shape: AxisShape) -> dict[int, float]:
    """Returns m (p - m) / p for a node of m ranks."""
    return {node: count / shape.size for node, count in messages_leaving(shape).items()}


ALL_GATHER = Phase(all_gather_rounds, num_rounds, sent_bytes, leaving_bytes)
REDUCE_SCATTER = Phase(reduce_scatter_rounds, num_rounds, sent_bytes, leaving_bytes)
DIRECT = FlatAlgorithm(
    "direct",
    {
        "all_gather": [ALL_GATHER],
        "reduce_scatter": [REDUCE_SCATTER],
        "all_reduce": [REDUCE_SCATTER, ALL_GATHER],
    },
)
