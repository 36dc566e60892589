"""Host memory: arenas of exactly the requested size that a device can access, and buffer pools.

torch rounds each pinned block up to a power of two, so 65 GiB would take 128 GiB. An `Arena` is
mapped, touched by several threads and pinned once, or it is a memory-mapped file on a disk. Sizes
are checked before anything is allocated.

A `HostBufferPool` has reusable buffers of exactly the requested sizes, which are not known in
advance. At first each buffer is allocated separately; when all buffers are returned, they are
merged into one arena.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from ranvier.comm.streams import StreamEvent
from ranvier.errors import PlanError

ALIGNMENT_BYTES = 256
"""Alignment of the tensors of an arena, in bytes."""
TOUCH_CHUNK_BYTES = 2**28
"""Number of bytes that a thread touches per task."""
RESERVED_FRACTION = 0.05
"""Fraction of the memory of the machine that is reserved for other processes."""
GIB = 2**30


def align_size(size: int) -> int:
    """Rounds a size in bytes up to the alignment of an arena."""
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Arena:
    """A bump allocator for host memory: tensors are allocated consecutively and never freed."""

    def __init__(self, size: int, device: torch.device, *, path: Path | None = None) -> None:
        """path: directory of a backing file; if None, memory, which is pinned for CUDA devices."""
        self.size = size
        self.used_bytes = 0
        if path is not None:
            held = _map_temporary_file(path, size)
        else:
            held = _map_anonymous_memory(max(size, 1))
        self.buffer = torch.frombuffer(held, dtype=torch.uint8)[:size]
        self.is_pinned = path is None and device.type == "cuda" and size > 0
        if path is None and size > 0:
            _advise_kernel(held, "MADV_HUGEPAGE")
            _touch_pages(self.buffer)
        if self.is_pinned:
            # After a fork, copy-on-write could give the pages that the device reads to the child.
            _advise_kernel(held, "MADV_DONTFORK")
            pin_memory(self.buffer)
            # The memory must be unregistered before it is unmapped.
            weakref.finalize(held, _unpin_memory, self.buffer.data_ptr())

    def allocate_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocates a tensor of this shape."""
        count = torch.Size(shape).numel() * dtype.itemsize
        start = self.used_bytes
        self.used_bytes = self.used_bytes + align_size(count)
        assert start + count <= self.size, (self.used_bytes, self.size)
        return self.buffer[start : start + count].view(dtype).view(shape)


def _map_anonymous_memory(size: int) -> mmap.mmap:
    """Maps private memory for this process."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _advise_kernel(memory: mmap.mmap, word: str) -> None:
    # Not every system supports every advice, which is only an optimization.
    with suppress(OSError, AttributeError):
        memory.madvise(getattr(mmap, word))


def _map_temporary_file(folder: Path, size: int) -> mmap.mmap:
    """Maps a file of `size` bytes that is deleted when the process ends."""
    name = folder / f"states-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise PlanError(
            f"{name}: {error.strerror}. Optimizer states on disk need a writable directory. "
            "Choose another memory.offload_dir."
        ) from None
    try:
        # Unlinked while open: the kernel frees the space even after a crash.
        os.unlink(name)
        # Reserve the space now, as writing to a mapping on a full disk would raise SIGBUS later.
        os.posix_fallocate(handle, 0, max(size, 1))
        return mmap.mmap(handle, max(size, 1))
    except OSError as error:
        raise PlanError(
            f"{name}: {error.strerror}. {size} bytes of optimizer states must be reserved at the "
            "start. Free space, or choose another memory.offload_dir."
        ) from None
    finally:
        os.close(handle)


def _touch_pages(memory: Tensor) -> None:
    """Touches all pages with several threads; a single thread takes seconds per 10 GiB."""
    start = memory.data_ptr()
    size = memory.numel()
    spans = [
        (start + at, min(TOUCH_CHUNK_BYTES, size - at)) for at in range(0, size, TOUCH_CHUNK_BYTES)
    ]
    with ThreadPoolExecutor(min(len(spans), os.cpu_count() or 1)) as threads:
        list(threads.map(lambda span: ctypes.memset(span[0], 0, span[1]), spans))


def pin_memory(memory: Tensor) -> None:
    """Registers host memory with CUDA, so that the device can access it directly."""
    done = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(done) != 0:
        raise PlanError(
            f"{memory.numel()} bytes of host memory cannot be pinned (CUDA error {int(done)}). "
            "Offloading needs pinned memory. Use a smaller memory.host_limit_gib, or raise the "
            "limit of locked memory (ulimit -l)."
        )


def _unpin_memory(address: int) -> None:
    if torch.cuda.is_available():
        # Wait for copies in flight.
        with suppress(RuntimeError):
            torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(address)


# ---- available memory -------------------------------------------------------------------


def available_host_bytes() -> int:
    """Returns the bytes that this process may still allocate, limited by machine and cgroup."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _read_lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    return min([free, *_cgroup_free_bytes()])


def _cgroup_free_bytes() -> list[int]:
    """Returns the bytes left under each memory limit of the cgroups of this process."""
    found = []
    for line in _read_lines(Path("/proc/self/cgroup")):
        kinds, where = line.split(":", 2)[1:]
        top = Path("/sys/fs/cgroup") / (kinds if "memory" in kinds else "")
        # Inside a container the path of the host's hierarchy may not exist; the limit of the
        # container is at the top.
        for folder in {top / where.lstrip("/"), top}:
            for limit, used in (("memory.max", "memory.current"), *_CGROUP_V1_FILES):
                most = _read_integer(folder / limit)
                taken = _read_integer(folder / used)
                # In cgroup v1 a huge number means "no limit".
                if most is not None and taken is not None and most < 2**60:
                    found.append(max(most - taken + _page_cache_bytes(folder), 0))
    return found


_CGROUP_V1_FILES = (("memory.limit_in_bytes", "memory.usage_in_bytes"),)


def _page_cache_bytes(folder: Path) -> int:
    """Returns the bytes of page cache in a cgroup, which the kernel reclaims on demand."""
    words = [line.split() for line in _read_lines(folder / "memory.stat")]
    return sum(int(w[1]) for w in words if len(w) == 2 and w[0] in ("inactive_file", "active_file"))


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _read_integer(path: Path) -> int | None:
    lines = _read_lines(path)
    if lines and lines[0].isdigit():
        return int(lines[0])
    return None


def host_bytes_per_rank(ranks: int, limit: float = 0.0) -> int:
    """Returns the bytes of host memory that each of `ranks` may use. limit: GiB per rank."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    there = max(int(available_host_bytes() - RESERVED_FRACTION * total), 0) // ranks
    if limit > 0.0:
        return min(there, int(limit * GIB))
    return there


def check_host_memory(
    size: int, room: int, device: torch.device, *, pinning: Callable[[Tensor], None] = pin_memory
) -> None:
    """Raises if `size` bytes exceed `room` or the limit of pinned memory."""
    if size > room:
        raise PlanError(
            f"Offloading needs {size / GIB:.3g} GiB of host memory per rank, but only "
            f"{room / GIB:.3g} GiB are available. Use memory.optimizer_states=split or disk, a "
            "narrower optim.state_dtype, or more ranks."
        )
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if device.type != "cuda" or limit == resource.RLIM_INFINITY or size <= limit:
        return
    # Most drivers do not enforce this limit, so try to pin one page more than it allows.
    trial = torch.empty(limit + mmap.PAGESIZE, dtype=torch.uint8)
    try:
        pinning(trial)
    except PlanError:
        raise PlanError(
            f"Offloading needs {size / GIB:.3g} GiB of pinned memory, but the limit of locked "
            f"memory is {limit / GIB:.3g} GiB. Raise it with `ulimit -l unlimited`."
        ) from None
    _unpin_memory(trial.data_ptr())


def check_disk_space(size: int, folder: Path) -> None:
    """Raises if `size` bytes of states exceed the free space of the disk of `folder`."""
    # The directory may not exist yet: use its first existing parent.
    where = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    stat = os.statvfs(where)
    free = stat.f_bavail * stat.f_frsize
    if size > free:
        raise PlanError(
            f"The optimizer states need {size / GIB:.3g} GiB in {folder}, but its disk has only "
            f"{free / GIB:.3g} GiB free. Free space, or choose another memory.offload_dir."
        )


class HostBufferPool:
    """A pool of reusable host buffers."""

    def __init__(self, arena: Callable[[int], Tensor], *, room: int) -> None:
        """arena: allocates a number of bytes on the host. room: maximum total bytes."""
        self.make_arena = arena
        self.max_bytes = room
        self.total_bytes = 0
        """Total bytes of all buffers."""
        self._bytes_in_use = 0
        self._num_arenas = 0
        self._free_buffers: dict[int, list[tuple[Tensor, StreamEvent]]] = {}

    def take_buffer(self, size: int) -> tuple[Tensor, StreamEvent]:
        """Returns a buffer of `size` bytes, and the event after which it may be overwritten."""
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
        """Returns a buffer to the pool. mark: event after which it is no longer used."""
        # `take_buffer` has truncated the buffer: restore its aligned length.
        whole = align_size(buffer.numel())
        self._free_buffers[whole].append((buffer.as_strided((whole,), (1,)), mark))
        self._bytes_in_use -= whole

    def merge_buffers(self) -> None:
        """Merges all buffers into one arena if none is in use."""
        if self._bytes_in_use or self._num_arenas < 2:
            return
        counts = {size: len(buffers) for size, buffers in self._free_buffers.items()}
        for buffers in self._free_buffers.values():
            for _, mark in buffers:
                if mark is not None:
                    mark.synchronize()
        # Free the old buffers before the new arena is allocated.
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
                "Offloaded activations need "
                f"{(self.total_bytes + more) / GIB:.3g} GiB of host memory per rank, but only "
                f"{self.max_bytes / GIB:.3g} GiB are available. Use a smaller "
                "memory.activation_offload_fraction or plan.micro_batch, or a larger "
                "memory.host_limit_gib."
            )


assert ALIGNMENT_BYTES % 16 == 0, "a buffer must be aligned for every dtype"
