"""Memory for the results of large collectives on a CPU, which is reused when they are freed.

The system provides new memory page by page and fills it with zeros, which takes several times as
long as copying into it. torch returns large blocks to the system when they are freed.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

LARGE_BYTES = 2**20
"""Smaller results are allocated by torch."""
BLOCK_BYTES = 2**21
"""Sizes are rounded up to a multiple, which is a huge page on most systems."""
KEPT_BYTES = 2**29
"""Free memory that is kept; more is returned to the system."""


class OutputPool:
    """Blocks of host memory by size, of which each holds one tensor at a time."""

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}
        self.free_bytes = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a contiguous tensor; its memory is reused when no tensor refers to it."""
        count = torch.Size(shape).numel()
        num_bytes = count * dtype.itemsize
        if num_bytes < LARGE_BYTES:
            return torch.empty(shape, dtype=dtype)
        size = -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
        block = self._take(size)
        # torch keeps this object for as long as a tensor uses the memory.
        owner = (ctypes.c_ubyte * size).from_buffer(block)
        weakref.finalize(owner, self._give_back, block).atexit = False
        return torch.frombuffer(owner, dtype=dtype, count=count).view(shape)

    def _take(self, size: int) -> mmap.mmap:
        blocks = self._free.get(size)
        if blocks:
            self.free_bytes -= size
            return blocks.pop()
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Only an optimization, which not every system has.
        with contextlib.suppress(OSError, AttributeError):
            block.madvise(mmap.MADV_HUGEPAGE)
        return block

    def _give_back(self, block: mmap.mmap) -> None:
        size = len(block)
        if self.free_bytes + size <= KEPT_BYTES:
            self._free.setdefault(size, []).append(block)
            self.free_bytes += size
