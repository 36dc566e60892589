"""Native: the collectives of an engine (NCCL, Gloo, shared memory), which has its own schedule.

Priced as a ring in the order of the axis. An engine may do better: NCCL orders its rings by node,
and takes trees for small messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ranvier.comm.algorithms.flat import FlatAlgorithm
from ranvier.comm.algorithms.ring import RING
from ranvier.comm.algorithms.schedule import (
    AxisShape,
    Blocks,
    GroupStep,
    Level,
    Operation,
    RecordedCost,
    Step,
)


class Engine(FlatAlgorithm):
    """An engine that runs a collective of an axis, or of one level of it, as a whole."""

    def __init__(self, name: str) -> None:
        super().__init__(name, RING.phases)

    def steps(self, operation: Operation, shape: AxisShape, index: int) -> list[Step]:
        return []

    def recorded_rounds(self, operation: Operation, size: int) -> int:
        return 1

    def recorded_sent_bytes(self, operation: Operation, size: int) -> float:
        return 0.0

    def level_steps(
        self,
        operation: Operation,
        level: Level,
        ranks: Sequence[int],
        blocks: Sequence[Blocks],
        index: int,
    ) -> list[Step]:
        if len(ranks) == 1:
            return []
        return [GroupStep(operation, level, tuple(ranks), tuple(blocks), self.name)]


NATIVE = Engine("native")
SHARED_MEMORY = Engine("shared_memory")
"""Only inside a node."""


def shared_memory_cost(operation: str, size: int) -> RecordedCost:
    """Returns what a rank writes into its segment, relative to the bytes of the event.

    A message to several ranks is written once:

        all_gather                   1/p: its part
        reduce_scatter, all_to_all   (p-1)/p: a part for each other rank
        all_reduce                   1: everything, or (p-1)/p and the sum of its part
        broadcast, send              1 on the rank that sends
    """
    shares: Mapping[str, float] = {
        "all_gather": 1 / size,
        "reduce_scatter": (size - 1) / size,
        "all_to_all": (size - 1) / size,
        "receive": 0.0,
    }
    return RecordedCost(rounds=1, sent_bytes=shares.get(operation, 1.0))
