"""Folded: recursive halving for any number of ranks p (Rabenseifner 2004).

    fold      each rank behind the largest power of two, r >= P, adds its blocks to those of r - P
    halve     the first P ranks reduce-scatter by recursive halving; rank i keeps blocks i and P + i
    unfold    rank r - P returns block r to rank r

An all-reduce continues with Bruck's all-gather. Two rounds more than a power of two has, and the
folded ranks send the whole; without them it is recursive halving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ranvier.comm.algorithms import bruck, doubling
from ranvier.comm.algorithms.flat import FlatAlgorithm, Phase, relabel
from ranvier.comm.algorithms.schedule import AxisShape, Blocks, Round, Transfer


def largest_power_of_two(size: int) -> int:
    """Returns the largest power of two that is not above `size`."""
    return 1 << (size.bit_length() - 1)


def fold(
    size: int,
    index: int,
    *,
    rounds: Callable[[int, int], list[Round]],
    returned: Callable[[int], Blocks],
) -> list[Round]:
    """Returns rounds for any number of ranks, from `rounds` for a power of two.

    returned: the blocks that a folded rank receives at the end.
    """
    power = largest_power_of_two(size)
    if power == size:
        return rounds(size, index)
    all_blocks = tuple(range(size))
    if index >= power:
        partner = index - power
        first = Round(sends=(Transfer(partner, all_blocks, reduce=True),))
        last = Round(receives=(Transfer(partner, returned(index)),))
        return [first, *[Round()] * (power.bit_length() - 1), last]
    partner = index + power
    if partner >= size:
        return [Round(), *rounds(power, index), Round()]
    first = Round(receives=(Transfer(partner, all_blocks, reduce=True),))
    last = Round(sends=(Transfer(partner, returned(partner)),))
    return [first, *rounds(power, index), last]


def reduce_scatter_rounds(size: int, index: int) -> list[Round]:
    """Returns recursive halving of pairs of blocks i and P + i, folded."""

    def halving_rounds(power: int, index: int) -> list[Round]:
        pairs = [tuple(range(i, size, power)) for i in range(power)]
        rounds = doubling.reduce_scatter_rounds(power, index)
        return [relabel(each, range(power), pairs) for each in rounds]

    return fold(size, index, rounds=halving_rounds, returned=lambda rank: (rank,))


def num_rounds(size: int) -> int:
    """Returns log2 P, plus 2 unless p is a power of two."""
    power = largest_power_of_two(size)
    return power.bit_length() - 1 + 2 * (power < size)


def sent_bytes(size: int) -> float:
    """Returns (p - 1) / p for a power of two, else 1: a folded rank sends the whole."""
    if largest_power_of_two(size) == size:
        return (size - 1) / size
    return 1.0


def leaving_bytes(shape: AxisShape) -> dict[int, float]:
    """Returns the bytes of all messages that leave the node."""
    p = shape.size
    power = largest_power_of_two(p)
    folded = p - power

    def messages() -> Iterator[tuple[int, int, float]]:
        for i in range(folded):
            yield power + i, i, 1.0
            yield i, power + i, 1 / p
        for distance in doubling.distances(power):
            for i in range(power):
                half = doubling.aligned_range(i ^ distance, distance)
                # The first blocks are in pairs.
                pairs = len(range(half.start, min(half.stop, folded)))
                yield i, i ^ distance, (distance + pairs) / p

    return shape.bytes_leaving(messages())


REDUCE_SCATTER = Phase(reduce_scatter_rounds, num_rounds, sent_bytes, leaving_bytes)
FOLDED = FlatAlgorithm(
    "folded",
    {
        "reduce_scatter": [REDUCE_SCATTER],
        "all_reduce": [REDUCE_SCATTER, bruck.ALL_GATHER],
    },
    companion="bruck",
)
