"""NVRAR: a hierarchical all-reduce for small messages, by recursive doubling between nodes.

    reduce_scatter inside each node
    all_reduce between nodes: exchanges the whole shard in log2 N rounds, instead of 2 log2 N
    all_gather inside each node

Fewer rounds and more bytes than halving and doubling. For N not a power of two it is folded.
"""

from __future__ import annotations

from collections.abc import Iterator

from ranvier.comm.algorithms.doubling import distances
from ranvier.comm.algorithms.flat import FlatAlgorithm, Phase, send_receive
from ranvier.comm.algorithms.folded import fold, largest_power_of_two, num_rounds
from ranvier.comm.algorithms.hierarchical import Hierarchical
from ranvier.comm.algorithms.schedule import AxisShape, Round


def all_reduce_rounds(size: int, index: int) -> list[Round]:
    """Returns exchanges of all blocks with distances 1, 2, 4, ..., folded."""
    all_blocks = tuple(range(size))

    def doubling_rounds(power: int, index: int) -> list[Round]:
        # Both ends add the same two values, so that they have the same bits.
        return [
            send_receive(
                target=index ^ distance,
                sends=all_blocks,
                source=index ^ distance,
                receives=all_blocks,
                reduce=True,
            )
            for distance in distances(power)
        ]

    return fold(size, index, rounds=doubling_rounds, returned=lambda rank: all_blocks)


def sent_bytes(size: int) -> float:
    """Returns log2 P for the largest power of two P, plus 1 for ranks with a folded partner."""
    power = largest_power_of_two(size)
    return power.bit_length() - 1 + (power < size)


def leaving_bytes(shape: AxisShape) -> dict[int, float]:
    """Returns the bytes of all messages that leave the node."""
    power = largest_power_of_two(shape.size)

    def messages() -> Iterator[tuple[int, int, float]]:
        for i in range(shape.size - power):
            yield power + i, i, 1.0
            yield i, power + i, 1.0
        for distance in distances(power):
            yield from ((i, i ^ distance, 1.0) for i in range(power))

    return shape.bytes_leaving(messages())


ALL_REDUCE = Phase(all_reduce_rounds, num_rounds, sent_bytes, leaving_bytes)
RECURSIVE_DOUBLING = FlatAlgorithm("recursive_doubling", {"all_reduce": [ALL_REDUCE]})


class Nvrar(Hierarchical):
    """Recursive doubling of shards between nodes, and any algorithm inside nodes."""

    def __init__(self, name: str, *, intra: FlatAlgorithm) -> None:
        super().__init__(name, inter=RECURSIVE_DOUBLING, intra=intra, operations=("all_reduce",))
