"""Pool: buffers on the host that are used again and again, of exactly the sizes asked for.

What is needed is not known before it has been needed once. So at first each buffer is taken for
itself; when all are back, they become parts of one arena of their total.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ranvier.comm.streams import Mark
from ranvier.errors import PlanError
from ranvier.memory.host import ALIGN, GIB, aligned


class Pool:
    """Buffers by their size."""

    def __init__(self, arena: Callable[[int], Tensor], *, room: int) -> None:
        """arena: makes so many bytes on the host. room: how many there may be."""
        self.arena, self.room = arena, room
        self.size = 0
        """Bytes of all buffers."""
        self._out = 0
        self._pieces = 0
        self._free: dict[int, list[tuple[Tensor, Mark]]] = {}

    def take(self, size: int) -> tuple[Tensor, Mark]:
        """A buffer of so many bytes, and when the copies from it are done."""
        whole = aligned(size)
        if not self._free.setdefault(whole, []):
            self._refuse(whole)
            self._free[whole].append((self.arena(whole), None))
            self.size += whole
            self._pieces += 1
        buffer, mark = self._free[whole].pop()
        self._out += whole
        return buffer[:size], mark

    def give(self, buffer: Tensor, mark: Mark) -> None:
        """Take a buffer back; mark: when what was asked of it is done."""
        whole = aligned(buffer.numel())
        self._free[whole].append((buffer.as_strided((whole,), (1,)), mark))
        self._out -= whole

    def settle(self) -> None:
        """Make one arena of many buffers, if nobody uses any."""
        if self._out or self._pieces < 2:
            return
        counts = {size: len(buffers) for size, buffers in self._free.items()}
        for buffers in self._free.values():
            for _, mark in buffers:
                if mark is not None:
                    mark.synchronize()
        self._free.clear()  # before as much is taken again
        whole, at = self.arena(self.size), 0
        for size, count in counts.items():
            cut = whole[at : at + size * count].split(size)
            self._free[size] = [(piece, None) for piece in cut]
            at += size * count
        self._pieces = 1

    def _refuse(self, more: int) -> None:
        if self.size + more > self.room:
            raise PlanError(
                f"Activations take {(self.size + more) / GIB:.3g} GiB of the host, but a rank may "
                f"use {self.room / GIB:.3g} there. What waits must fit. Use a smaller "
                "memory.activations or plan.micro_batch, or a larger memory.host."
            )


assert ALIGN % 16 == 0, "a buffer begins where any type may"
