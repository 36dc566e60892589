"""Pool of reusable host buffers, of exactly the requested sizes.

The sizes are not known before they were needed once. So at first each buffer is allocated
separately; when all are returned, they are merged into one arena of their total size.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ranvier.comm.streams import StreamEvent
from ranvier.errors import PlanError
from ranvier.memory.host import ALIGNMENT_BYTES, GIB, align_size


class HostBufferPool:
    """Free host buffers by size."""

    def __init__(self, arena: Callable[[int], Tensor], *, room: int) -> None:
        """arena: allocates a number of bytes on the host. room: maximum total bytes."""
        self.make_arena = arena
        self.max_bytes = room
        self.total_bytes = 0
        """Bytes of all buffers."""
        self._bytes_in_use = 0
        self._num_arenas = 0
        self._free_buffers: dict[int, list[tuple[Tensor, StreamEvent]]] = {}

    def take_buffer(self, size: int) -> tuple[Tensor, StreamEvent]:
        """Return a buffer of `size` bytes, and the event after which it may be overwritten."""
        whole = align_size(size)
        if not self._free_buffers.setdefault(whole, []):
            self._check_room(whole)
            self._free_buffers[whole].append((self.make_arena(whole), None))
            self.total_bytes += whole
            self._num_arenas += 1
        buffer, mark = self._free_buffers[whole].pop()
        self._bytes_in_use += whole
        return buffer[:size], mark

    def return_buffer(self, buffer: Tensor, mark: StreamEvent) -> None:
        """Return a buffer to the pool; mark: event after which it is no longer used."""
        # `take_buffer` has cut the buffer to its size: restore the aligned length.
        whole = align_size(buffer.numel())
        self._free_buffers[whole].append((buffer.as_strided((whole,), (1,)), mark))
        self._bytes_in_use -= whole

    def merge_buffers(self) -> None:
        """Merge all buffers into one arena, if none is in use."""
        if self._bytes_in_use or self._num_arenas < 2:
            return
        counts = {size: len(buffers) for size, buffers in self._free_buffers.items()}
        for buffers in self._free_buffers.values():
            for _, mark in buffers:
                if mark is not None:
                    mark.synchronize()
        # Free the old buffers before as much is allocated again.
        self._free_buffers.clear()
        whole = self.make_arena(self.total_bytes)
        at = 0
        for size, count in counts.items():
            cut = whole[at : at + size * count].split(size)
            self._free_buffers[size] = [(piece, None) for piece in cut]
            at += size * count
        self._num_arenas = 1

    def _check_room(self, more: int) -> None:
        if self.total_bytes + more > self.max_bytes:
            raise PlanError(
                f"Activations take {(self.total_bytes + more) / GIB:.3g} GiB of the host, but "
                "a rank may "
                f"use {self.max_bytes / GIB:.3g} there. What waits must fit. Use a smaller "
                "memory.activations or plan.micro_batch, or a larger memory.host."
            )


assert ALIGNMENT_BYTES % 16 == 0, "a buffer begins where any type may"
