"""Schedules of collectives: what each rank of an axis sends and receives, round by round.

The whole (gathered or reduced) tensor is divided into blocks, one for each rank of the axis, and a
schedule moves blocks between the buffers of the ranks, each of which has room for all of them:

    all_gather       rank i starts with block i, and ends with all blocks
    reduce_scatter   all ranks start with all blocks, and rank i ends with the sum of block i
    all_reduce       all ranks start with all blocks, and end with the sums of all blocks

Blocks may have different sizes. Ranks are indices on the axis. Imports no torch: the same schedule
is executed (`comm.executor`), simulated and priced.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Operation = Literal["all_gather", "reduce_scatter", "all_reduce"]
OPERATIONS: tuple[Operation, ...] = ("all_gather", "reduce_scatter", "all_reduce")
Level = Literal["intra", "inter"]
"""Ranks of the same node; ranks with the same position in their nodes."""
Blocks = tuple[int, ...]
"""Numbers of blocks; block i is that of the rank at index i of the axis."""


@dataclass(frozen=True)
class AxisShape:
    """What an algorithm knows of an axis."""

    size: int
    nodes: tuple[int, ...]
    """Node of each rank, in the order of the axis."""

    def __post_init__(self) -> None:
        assert len(self.nodes) == self.size, (self.size, self.nodes)

    @classmethod
    def of_nodes(cls, nodes: Sequence[int]) -> AxisShape:
        """Returns the shape of an axis with these nodes."""
        return cls(len(nodes), tuple(nodes))

    @cached_property
    def members(self) -> dict[int, tuple[int, ...]]:
        """Ranks of each node, in the order in which the axis reaches them."""
        found: dict[int, list[int]] = {}
        for index, node in enumerate(self.nodes):
            found.setdefault(node, []).append(index)
        return {node: tuple(ranks) for node, ranks in found.items()}

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.members)

    @property
    def is_even(self) -> bool:
        """Whether every node has the same number of ranks."""
        return len({len(ranks) for ranks in self.members.values()}) == 1

    @property
    def ranks_per_node(self) -> int:
        """Ranks in each node of an even axis."""
        assert self.is_even, self.nodes
        return self.size // self.num_nodes

    @cached_property
    def positions(self) -> tuple[tuple[int, ...], ...]:
        """Ranks at each position in their nodes, one of each node; of an even axis."""
        assert self.is_even, self.nodes
        return tuple(zip(*self.members.values(), strict=True))

    def group(self, level: Level, index: int) -> tuple[int, ...]:
        """Returns the ranks with which the rank at `index` communicates on a level."""
        node_ranks = self.members[self.nodes[index]]
        if level == "intra":
            return node_ranks
        return self.positions[node_ranks.index(index)]

    def bytes_leaving(self, messages: Iterable[tuple[int, int, float]]) -> dict[int, float]:
        """Returns how many bytes of messages `(source, target, bytes)` leave each node."""
        leaving = dict.fromkeys(self.members, 0.0)
        for source, target, num_bytes in messages:
            if self.nodes[source] != self.nodes[target]:
                leaving[self.nodes[source]] += num_bytes
        return leaving


@dataclass(frozen=True)
class Transfer:
    """One side of a message of a round."""

    peer: int
    blocks: Blocks
    """Blocks of the message, in the order of their data."""
    reduce: bool = False
    """Whether the receiver adds them to its own blocks instead of storing them."""


@dataclass(frozen=True)
class Round:
    """Messages that a rank sends and receives at the same time.

    Sent blocks have the values from before the round. If several messages reduce the same block,
    the receiver adds all contributions, including its own, in the order of their ranks, and rounds
    once.
    """

    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()


@dataclass(frozen=True)
class GroupStep:
    """A whole collective of some ranks of the axis, run by an engine (NCCL, Gloo, shared memory).

    It moves `blocks[i]` as one block of its member i.
    """

    operation: Operation
    level: Level
    ranks: tuple[int, ...]
    """Its members, as indices on the axis, in the order of their blocks."""
    blocks: tuple[Blocks, ...]
    engine: str
    """`native` or `shared_memory`."""


Step = Round | GroupStep


@dataclass(frozen=True)
class ScheduleCost:
    """Closed-form cost of a schedule for a whole of one byte, with equal blocks."""

    rounds: int
    """Rounds, one after the other. Those of an engine are counted as its ring."""
    sent_bytes: float
    """Bytes that the busiest rank sends."""
    leaving_node: float
    """Bytes that leave the busiest node."""


@dataclass(frozen=True)
class RecordedCost:
    """Closed form of what a rank counts while it runs a collective, for a whole of one byte.

    A collective of an engine is one round, and the bytes that it sends are not counted.
    """

    rounds: int
    sent_bytes: float
    """Bytes that the busiest rank sends."""


class Algorithm(abc.ABC):
    """An algorithm for some collectives, described without executing it."""

    name: str
    operations: tuple[Operation, ...]

    @abc.abstractmethod
    def limitation(self, operation: Operation, shape: AxisShape) -> str:
        """Returns why an axis of this shape cannot use it, and what it can; empty if it can."""

    @abc.abstractmethod
    def steps(self, operation: Operation, shape: AxisShape, index: int) -> list[Step]:
        """Returns the steps of the rank at `index`; all ranks have the same number of steps.

        There are none if the axis has one rank, and if the engine runs the collective as a whole.
        """

    def needs_group(self, level: Level) -> bool:
        """Returns whether it runs the backend's collectives on a level, which needs groups."""
        return False

    @abc.abstractmethod
    def cost(self, operation: Operation, shape: AxisShape) -> ScheduleCost:
        """Returns its cost in closed form."""

    def recorded_cost(self, operation: Operation, shape: AxisShape) -> RecordedCost:
        """Returns what the events of its collectives record, in closed form."""
        cost = self.cost(operation, shape)
        return RecordedCost(cost.rounds, cost.sent_bytes)
