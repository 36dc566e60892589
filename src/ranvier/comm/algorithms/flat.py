"""Flat algorithms: their schedules depend on the number of ranks, and not on their nodes.

A flat algorithm consists of phases for each operation; an all-reduce, for example, of a
reduce-scatter phase and an all-gather phase. It also serves as one level of a hierarchical
algorithm, where each of its ranks has a group of blocks instead of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ranvier.comm.algorithms.schedule import (
    OPERATIONS,
    Algorithm,
    AxisShape,
    Blocks,
    Level,
    Operation,
    RecordedCost,
    Round,
    ScheduleCost,
    Step,
    Transfer,
)


@dataclass(frozen=True)
class Phase:
    """Rounds that follow one pattern, and their cost in closed form for a whole of one byte."""

    rounds: Callable[[int, int], list[Round]]
    """Rounds of a rank, from the number of ranks and its index."""
    num_rounds: Callable[[int], int]
    """Number of rounds, from the number of ranks."""
    sent_bytes: Callable[[int], float]
    """Bytes that the busiest rank sends, from the number of ranks."""
    leaving_bytes: Callable[[AxisShape], dict[int, float]]
    """Bytes that leave each node."""
    needs_power_of_two: bool = False
    """Whether the number of ranks must be a power of two."""


class FlatAlgorithm(Algorithm):
    """An algorithm that consists of phases over all ranks."""

    def __init__(
        self,
        name: str,
        phases: Mapping[Operation, Sequence[Phase]],
        *,
        companion: str = "",
    ) -> None:
        """Creates an algorithm from the phases of each operation that it implements.

        companion: the algorithm for the other operations, if this one is a level of a hierarchical
            algorithm.
        """
        self.name = name
        self.phases = phases
        self.operations = tuple(one for one in OPERATIONS if one in phases)
        self.companion = companion

    def complete_with(self, companion: FlatAlgorithm) -> FlatAlgorithm:
        """Returns this algorithm, with the operations of `companion` that it does not implement."""
        return FlatAlgorithm(self.name, {**companion.phases, **self.phases})

    def limitation(self, operation: Operation, shape: AxisShape) -> str:
        return self.size_limitation(operation, shape.size, "ranks")

    def size_limitation(self, operation: Operation, size: int, unit: str) -> str:
        """Returns why it does not support this number of units; empty if it does."""
        if operation not in self.operations:
            remedy = self.companion or "native"
            known = " and ".join(self.operations)
            return f"{self.name} has no {operation}. It implements {known}. Use {remedy}."
        is_power_of_two = size & (size - 1) == 0
        if not is_power_of_two and any(one.needs_power_of_two for one in self.phases[operation]):
            return (
                f"The axis has {size} {unit}. {self.name} needs a power of two. Use bruck for "
                "all_gather, folded for reduce_scatter and all_reduce."
            )
        return ""

    def steps(self, operation: Operation, shape: AxisShape, index: int) -> list[Step]:
        return [*self.rounds(operation, shape.size, index)]

    def rounds(self, operation: Operation, size: int, index: int) -> list[Round]:
        """Returns the rounds of the rank at `index` of `size` ranks."""
        limitation = self.size_limitation(operation, size, "ranks")
        assert not limitation, limitation
        if size == 1:
            return []
        return [each for phase in self.phases[operation] for each in phase.rounds(size, index)]

    def level_steps(
        self,
        operation: Operation,
        level: Level,
        ranks: Sequence[int],
        blocks: Sequence[Blocks],
        index: int,
    ) -> list[Step]:
        """Returns the steps of the rank at `index` in a collective of some ranks of the axis.

        It moves `blocks[i]` as one block of `ranks[i]`.
        """
        rounds = self.rounds(operation, len(ranks), ranks.index(index))
        return [relabel(each, ranks, blocks) for each in rounds]

    def num_rounds(self, operation: Operation, size: int) -> int:
        """Returns the number of rounds for `size` ranks."""
        if size == 1:
            return 0
        return sum(phase.num_rounds(size) for phase in self.phases[operation])

    def sent_bytes(self, operation: Operation, size: int) -> float:
        """Returns how many bytes the busiest of `size` ranks sends."""
        return sum(phase.sent_bytes(size) for phase in self.phases[operation])

    def recorded_rounds(self, operation: Operation, size: int) -> int:
        """Returns the number of rounds that `size` ranks count."""
        return self.num_rounds(operation, size)

    def recorded_sent_bytes(self, operation: Operation, size: int) -> float:
        """Returns how many bytes the busiest of `size` ranks counts as sent."""
        return self.sent_bytes(operation, size)

    def recorded_cost(self, operation: Operation, shape: AxisShape) -> RecordedCost:
        return RecordedCost(
            self.recorded_rounds(operation, shape.size),
            self.recorded_sent_bytes(operation, shape.size),
        )

    def cost(self, operation: Operation, shape: AxisShape) -> ScheduleCost:
        phases = [phase.leaving_bytes(shape) for phase in self.phases[operation]]
        return ScheduleCost(
            rounds=self.num_rounds(operation, shape.size),
            sent_bytes=self.sent_bytes(operation, shape.size),
            leaving_node=max(sum(leaving[node] for leaving in phases) for node in shape.members),
        )


def send_receive(
    *, target: int, sends: Iterable[int], source: int, receives: Iterable[int], reduce: bool = False
) -> Round:
    """Returns a round with one message in each direction."""
    return Round(
        sends=(Transfer(target, tuple(sends), reduce),),
        receives=(Transfer(source, tuple(receives), reduce),),
    )


def relabel(one: Round, ranks: Sequence[int], blocks: Sequence[Blocks]) -> Round:
    """Returns a round between `ranks[i]` instead of i, with `blocks[i]` instead of block i."""

    def relabel_transfers(transfers: Iterable[Transfer]) -> tuple[Transfer, ...]:
        return tuple(
            Transfer(
                ranks[each.peer],
                tuple(block for i in each.blocks for block in blocks[i]),
                each.reduce,
            )
            for each in transfers
        )

    return Round(relabel_transfers(one.sends), relabel_transfers(one.receives))
