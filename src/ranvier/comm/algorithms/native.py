"""Native: the collectives of an engine (NCCL, Gloo, shared memory), which has its own schedule.

Priced as a ring in the order of the axis. An engine may do better: NCCL orders its rings by node,
and takes trees for small messages.
"""

from __future__ import annotations

from collections.abc import Sequence

from ranvier.comm.algorithms.flat import FlatAlgorithm
from ranvier.comm.algorithms.ring import RING
from ranvier.comm.algorithms.schedule import AxisShape, Blocks, GroupStep, Level, Operation, Step


class Engine(FlatAlgorithm):
    """An engine that runs a collective of an axis, or of one level of it, as a whole."""

    def __init__(self, name: str) -> None:
        super().__init__(name, RING.phases)

    def steps(self, operation: Operation, shape: AxisShape, index: int) -> list[Step]:
        return []

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
