"""One-shot: an all-reduce in one round, in which every rank sends everything to every other one.

The lowest latency, for small messages inside a node. Sums are in the order of the ranks.
"""

from __future__ import annotations

from ranvier.comm.algorithms.direct import messages_leaving, other_ranks
from ranvier.comm.algorithms.flat import FlatAlgorithm, Phase
from ranvier.comm.algorithms.schedule import AxisShape, Round, Transfer


def all_reduce_rounds(size: int, index: int) -> list[Round]:
    """Returns one round in which a rank exchanges all blocks with all others."""
    all_blocks = tuple(range(size))
    messages = [Transfer(rank, all_blocks, reduce=True) for rank in other_ranks(size, index)]
    return [Round(sends=tuple(messages), receives=tuple(reversed(messages)))]


def num_rounds(size: int) -> int:
    """Returns 1."""
    return 1


def sent_bytes(size: int) -> float:
    """Returns p - 1."""
    return size - 1


def leaving_bytes(shape: AxisShape) -> dict[int, float]:
    """Returns m (p - m) for a node of m ranks."""
    return {node: float(count) for node, count in messages_leaving(shape).items()}


ALL_REDUCE = Phase(all_reduce_rounds, num_rounds, sent_bytes, leaving_bytes)
ONE_SHOT = FlatAlgorithm("one_shot", {"all_reduce": [ALL_REDUCE]}, companion="direct")
