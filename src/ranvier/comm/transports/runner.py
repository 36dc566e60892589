"""Runs the collectives of an axis by any algorithm but the engine's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ranvier.comm.algorithms.direct import DIRECT
from ranvier.comm.algorithms.native import SHARED_MEMORY
from ranvier.comm.algorithms.one_shot import ONE_SHOT
from ranvier.comm.algorithms.registry import find_algorithm
from ranvier.comm.algorithms.schedule import AxisShape, Operation, Step
from ranvier.comm.transports.executor import CollectiveBuffer, ScheduleExecutor, ScheduleWork
from ranvier.comm.transports.output_pool import LARGE_BYTES
from ranvier.comm.transports.reduction import Reduction
from ranvier.comm.transports.shared_memory import SharedMemoryGroup, SharedMemoryWork
from ranvier.comm.transports.symmetric_memory import (
    SymmetricMemoryCommunicator,
    SymmetricMemoryWork,
)

Work = SharedMemoryWork | ScheduleWork | SymmetricMemoryWork


class CollectiveRunner:
    """Starts collectives of the ranks of an axis by the algorithm that the caller names.

    Tensors are contiguous, and inputs must not change until the work is done. counts: elements of
    each rank's part, if they differ.
    """

    def __init__(
        self,
        shape: AxisShape,
        index: int,
        shared_memory: SharedMemoryGroup | None,
        executor: ScheduleExecutor,
        symmetric_memory: SymmetricMemoryCommunicator | None = None,
    ) -> None:
        self.shape = shape
        self.index = index
        self.shared_memory = shared_memory
        self.executor = executor
        self.symmetric_memory = symmetric_memory
        """Memory of GPUs of one node, through which `direct` and `one_shot` send their messages."""

    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Returns memory for a result with the dtype and the device of `like`."""
        size = math.prod(shape) * like.element_size()
        if size < LARGE_BYTES or self.shared_memory is None or like.device.type != "cpu":
            return like.new_empty(shape)
        return self.shared_memory.segment.outputs.empty(shape, like.dtype)

    def warm_up(self, algorithm: str, device: torch.device) -> None:
        """Runs every collective of an algorithm once. Communicates: all of them."""
        x = torch.zeros(self.shape.size, device=device)
        for operation in find_algorithm(algorithm).operations:
            if operation == "all_gather":
                work = self.all_gather(algorithm, x[:1], torch.empty_like(x))
            elif operation == "reduce_scatter":
                work = self.reduce_scatter(algorithm, x, x.new_empty(1))
            else:
                work = self.all_reduce(algorithm, x, torch.empty_like(x))
            work.wait()

    def all_gather(
        self, algorithm: str, part: Tensor, out: Tensor, counts: Sequence[int] | None = None
    ) -> Work:
        """Gathers parts into `out`. Communicates: all-gather."""
        if algorithm == SHARED_MEMORY.name:
            assert self.shared_memory is not None
            return self.shared_memory.all_gather(part, out, counts)
        memory = self._symmetric_memory_for(algorithm, out, counts)
        if memory is not None:
            return memory.all_gather(out, part, async_op=True)
        buffer = CollectiveBuffer(out.view(-1), counts or self._equal_counts(out))
        buffer.block(self.index).copy_(part.view(-1))
        return self._execute(algorithm, "all_gather", buffer)

    def reduce_scatter(
        self, algorithm: str, x: Tensor, out: Tensor, counts: Sequence[int] | None = None
    ) -> Work:
        """Sums over all ranks and writes the part of this rank to `out`.

        Communicates: reduce-scatter.
        """
        if algorithm == SHARED_MEMORY.name:
            assert self.shared_memory is not None
            return self.shared_memory.reduce_scatter(x, out, counts)
        memory = self._symmetric_memory_for(algorithm, x, counts)
        if memory is not None:
            return memory.reduce_scatter(out, x, async_op=True)
        # Partial sums are written into the buffer, but `x` must not change.
        buffer = CollectiveBuffer(x.flatten().clone(), counts or self._equal_counts(x))
        return self._execute(algorithm, "reduce_scatter", buffer, out=out)

    def all_reduce(self, algorithm: str, x: Tensor, out: Tensor, op: Reduction = "sum") -> Work:
        """Reduces over all ranks into `out`. Communicates: all-reduce."""
        if algorithm == SHARED_MEMORY.name:
            assert self.shared_memory is not None
            return self.shared_memory.all_reduce(x, out, op)
        memory = self._symmetric_memory_for(algorithm, x, None)
        if memory is not None and op == "sum":
            if algorithm == ONE_SHOT.name:
                return memory.one_shot_all_reduce(out, x, async_op=True)
            return memory.two_shot_all_reduce(out, x, async_op=True)
        out.copy_(x)
        # Blocks as equal as possible.
        count, more = divmod(out.numel(), self.shape.size)
        counts = [count + (index < more) for index in range(self.shape.size)]
        return self._execute(algorithm, "all_reduce", CollectiveBuffer(out.view(-1), counts), op)

    def _symmetric_memory_for(
        self, algorithm: str, whole: Tensor, counts: Sequence[int] | None
    ) -> SymmetricMemoryCommunicator | None:
        """Returns the memory of GPUs if it can be used for a collective of this tensor."""
        memory = self.symmetric_memory
        if memory is None or counts is not None or algorithm not in (DIRECT.name, ONE_SHOT.name):
            return None
        return None if memory.limitation(whole) else memory

    def _equal_counts(self, whole: Tensor) -> list[int]:
        return [whole.numel() // self.shape.size] * self.shape.size

    def _execute(
        self,
        algorithm: str,
        operation: Operation,
        buffer: CollectiveBuffer,
        op: Reduction = "sum",
        out: Tensor | None = None,
    ) -> Work:
        steps = schedule_steps(algorithm, operation, self.shape, self.index)
        return self.executor.start(steps, buffer, op, None if out is None else (self.index, out))


@lru_cache(256)
def schedule_steps(
    algorithm: str, operation: Operation, shape: AxisShape, index: int
) -> tuple[Step, ...]:
    """Returns the steps of a rank."""
    return tuple(find_algorithm(algorithm).steps(operation, shape, index))
