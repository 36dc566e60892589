"""Hierarchical: any algorithm between N nodes × any algorithm inside nodes of M ranks (PCCL).

    all_gather       between nodes, among ranks with the same position; then inside nodes
    reduce_scatter   inside nodes; then between nodes
    all_reduce       reduce_scatter inside, all_reduce of the shards between, all_gather inside

With N - 1 or log2 N rounds between nodes instead of N·M - 1, and (N - 1)/N of the whole that leaves
a node, wherever the ranks of the axis are. Inside one node, or with one rank per node, it consists
of one of its two algorithms only. Nodes with different numbers of ranks are not supported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ranvier.comm.algorithms.flat import FlatAlgorithm
from ranvier.comm.algorithms.schedule import (
    OPERATIONS,
    Algorithm,
    AxisShape,
    Blocks,
    Level,
    Operation,
    RecordedCost,
    ScheduleCost,
    Step,
)

PARTS: Mapping[Operation, tuple[tuple[Level, Operation], ...]] = {
    "all_gather": (("inter", "all_gather"), ("intra", "all_gather")),
    "reduce_scatter": (("intra", "reduce_scatter"), ("inter", "reduce_scatter")),
    "all_reduce": (
        ("intra", "reduce_scatter"),
        ("inter", "all_reduce"),
        ("intra", "all_gather"),
    ),
}
"""Collectives of the levels that a collective consists of, in their order."""


class Hierarchical(Algorithm):
    """An algorithm between nodes and an algorithm inside nodes."""

    def __init__(
        self,
        name: str,
        *,
        inter: FlatAlgorithm,
        intra: FlatAlgorithm,
        operations: tuple[Operation, ...] = OPERATIONS,
    ) -> None:
        self.name = name
        self.levels: Mapping[Level, FlatAlgorithm] = {"inter": inter, "intra": intra}
        self.operations = operations

    def limitation(self, operation: Operation, shape: AxisShape) -> str:
        if operation not in self.operations:
            known = " and ".join(self.operations)
            return f"{self.name} has no {operation}. It implements {known}. Use hierarchical."
        if not shape.is_even:
            counts = ", ".join(str(len(ranks)) for ranks in shape.members.values())
            return (
                f"The nodes of the axis have {counts} ranks. {self.name} needs equally many on "
                "each. Use native."
            )
        sizes = level_sizes(shape)
        units = {"inter": "nodes", "intra": "ranks per node"}
        reasons = [
            self.levels[level].size_limitation(part, sizes[level], units[level])
            for level, part in level_parts(operation, shape)
        ]
        return next(filter(None, reasons), "")

    def needs_group(self, level: Level) -> bool:
        return self.levels[level].name == "native"

    def steps(self, operation: Operation, shape: AxisShape, index: int) -> list[Step]:
        position = shape.group("intra", index).index(index)
        owned = owned_blocks(operation, shape)
        blocks: Mapping[Level, Sequence[Blocks]] = {
            "intra": owned,
            "inter": [(block,) for block in owned[position]],
        }
        steps: list[Step] = []
        for level, part in level_parts(operation, shape):
            ranks = shape.group(level, index)
            steps += self.levels[level].level_steps(part, level, ranks, blocks[level], index)
        return steps

    def cost(self, operation: Operation, shape: AxisShape) -> ScheduleCost:
        sizes = level_sizes(shape)
        rounds = 0
        sent: dict[Level, float] = {"inter": 0.0, "intra": 0.0}
        for level, part in level_parts(operation, shape):
            rounds += self.levels[level].num_rounds(part, sizes[level])
            sent[level] += self.levels[level].sent_bytes(part, sizes[level])
        # Between nodes a rank moves 1/M of the whole, and the M ranks of a node all of it.
        return ScheduleCost(
            rounds=rounds,
            sent_bytes=sent["intra"] + sent["inter"] / shape.ranks_per_node,
            leaving_node=sent["inter"],
        )

    def recorded_cost(self, operation: Operation, shape: AxisShape) -> RecordedCost:
        sizes = level_sizes(shape)
        # As in `cost`: between nodes a rank moves 1/M of the whole.
        scale: dict[Level, float] = {"inter": 1.0 / shape.ranks_per_node, "intra": 1.0}
        rounds = 0
        sent = 0.0
        for level, part in level_parts(operation, shape):
            rounds += self.levels[level].recorded_rounds(part, sizes[level])
            sent += self.levels[level].recorded_sent_bytes(part, sizes[level]) * scale[level]
        return RecordedCost(rounds, sent)


def level_sizes(shape: AxisShape) -> dict[Level, int]:
    """Returns the number of ranks that communicate on each level."""
    return {"inter": shape.num_nodes, "intra": shape.ranks_per_node}


def level_parts(operation: Operation, shape: AxisShape) -> Sequence[tuple[Level, Operation]]:
    """Returns the collectives of the levels that a collective of this axis consists of."""
    if shape.num_nodes == 1:
        return [("intra", operation)]
    if shape.ranks_per_node == 1:
        return [("inter", operation)]
    return PARTS[operation]


def owned_blocks(operation: Operation, shape: AxisShape) -> Sequence[Blocks]:
    """Returns the N blocks that the ranks at each position in their nodes own between the levels.

    These are their own. In an all-reduce they may be any, and those that follow each other need no
    shuffle.
    """
    if operation != "all_reduce":
        return shape.positions
    N = shape.num_nodes
    return [tuple(range(start, start + N)) for start in range(0, shape.size, N)]
