"""Arena: one piece of host memory, of exactly the size asked for, that a device can copy from.

torch rounds each pinned block up to a power of two, so 65 GiB would take 128. An arena is mapped,
touched by several threads and pinned once, or it is a file on a disk that is mapped. What does not
fit is refused before anything is taken.
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

from ranvier.errors import PlanError

ALIGNMENT_BYTES = 256
"""Bytes that parts begin at multiples of."""
TOUCH_CHUNK_BYTES = 2**28
"""Bytes that a thread touches at once."""
RESERVED_FRACTION = 0.05
"""Share of the machine's memory that is left to others."""
GIB = 2**30


def align_size(size: int) -> int:
    """Bytes that a part of so many takes in an arena."""
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Arena:
    """Bytes on the host, given out one part after the other."""

    def __init__(self, size: int, device: torch.device, *, path: Path | None = None) -> None:
        """path: directory of the file that holds them; None: memory, pinned if device is CUDA."""
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
            _advise_kernel(
                held, "MADV_DONTFORK"
            )  # a child's copy must not move what a device reads
            pin_memory(self.buffer)
            weakref.finalize(held, _unpin_memory, self.buffer.data_ptr())  # before it is unmapped

    def allocate_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next part, as a tensor of this shape."""
        count = torch.Size(shape).numel() * dtype.itemsize
        start = self.used_bytes
        self.used_bytes = self.used_bytes + align_size(count)
        assert start + count <= self.size, (self.used_bytes, self.size)
        return self.buffer[start : start + count].view(dtype).view(shape)


def _map_anonymous_memory(size: int) -> mmap.mmap:
    """Memory of this process alone."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _advise_kernel(memory: mmap.mmap, word: str) -> None:
    with suppress(OSError, AttributeError):  # not every system takes it
        memory.madvise(getattr(mmap, word))


def _map_temporary_file(folder: Path, size: int) -> mmap.mmap:
    """A file of so many bytes that is gone when the process ends."""
    name = folder / f"states-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise PlanError(
            f"{name}: {error.strerror}. States on disk need a directory that can be written. "
            "Choose another memory.path."
        ) from None
    try:
        os.unlink(name)
        os.posix_fallocate(handle, 0, max(size, 1))  # a full disk must show now, not in a step
        return mmap.mmap(handle, max(size, 1))
    except OSError as error:
        raise PlanError(
            f"{name}: {error.strerror}, for {size} bytes of states. All of them are reserved at "
            "the start. Free space, or choose another memory.path."
        ) from None
    finally:
        os.close(handle)


def _touch_pages(memory: Tensor) -> None:
    """Have all pages there, by several threads: one alone takes seconds for each ten GiB."""
    start = memory.data_ptr()
    size = memory.numel()
    spans = [
        (start + at, min(TOUCH_CHUNK_BYTES, size - at)) for at in range(0, size, TOUCH_CHUNK_BYTES)
    ]
    with ThreadPoolExecutor(min(len(spans), os.cpu_count() or 1)) as threads:
        list(threads.map(lambda span: ctypes.memset(span[0], 0, span[1]), spans))


def pin_memory(memory: Tensor) -> None:
    """Have the device copy from this memory itself."""
    done = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(done) != 0:
        raise PlanError(
            f"{memory.numel()} bytes of host memory cannot be pinned (CUDA error {int(done)}). A "
            "device copies from pinned memory only. Use a smaller memory.host, or raise the limit "
            "of locked memory (ulimit -l)."
        )


def _unpin_memory(address: int) -> None:
    if torch.cuda.is_available():
        with suppress(RuntimeError):  # no copy may be under way
            torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(address)


# ---- what there is ----------------------------------------------------------------------


def available_host_bytes() -> int:
    """Bytes of host memory that this process may still take: of the machine, of its container."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _read_lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    return min([free, *_cgroup_free_bytes()])


def _cgroup_free_bytes() -> list[int]:
    """What the limits of the control groups of this process leave."""
    found = []
    for line in _read_lines(Path("/proc/self/cgroup")):
        kinds, where = line.split(":", 2)[1:]
        top = Path("/sys/fs/cgroup") / (kinds if "memory" in kinds else "")
        for folder in {top / where.lstrip("/"), top}:
            for limit, used in (("memory.max", "memory.current"), *_CGROUP_V1_FILES):
                most = _read_integer(folder / limit)
                taken = _read_integer(folder / used)
                if most is not None and taken is not None and most < 2**60:
                    found.append(max(most - taken + _page_cache_bytes(folder), 0))
    return found


_CGROUP_V1_FILES = (("memory.limit_in_bytes", "memory.usage_in_bytes"),)


def _page_cache_bytes(folder: Path) -> int:
    """Bytes of files in a group's memory that are given up when they are needed."""
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
    """Bytes of host memory that each of so many ranks may keep things in; limit: GiB of a rank."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    there = max(int(available_host_bytes() - RESERVED_FRACTION * total), 0) // ranks
    if limit > 0.0:
        return min(there, int(limit * GIB))
    return there


def check_host_memory(
    size: int, room: int, device: torch.device, *, pinning: Callable[[Tensor], None] = pin_memory
) -> None:
    """Refuse more bytes on the host than there is room for, or than may be pinned."""
    if size > room:
        raise PlanError(
            f"{size / GIB:.3g} GiB are to lie on the host, but a rank may use {room / GIB:.3g} "
            "there. What is kept must fit. Use memory.states=split or file, narrower "
            "optim.moments, or more ranks."
        )
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if device.type != "cuda" or limit == resource.RLIM_INFINITY or size <= limit:
        return
    # Most drivers do not count against this limit: one page more than it allows will tell.
    trial = torch.empty(limit + mmap.PAGESIZE, dtype=torch.uint8)
    try:
        pinning(trial)
    except PlanError:
        raise PlanError(
            f"{size / GIB:.3g} GiB are to be pinned, but the limit of locked memory is "
            f"{limit / GIB:.3g} GiB and is enforced here. Raise it (ulimit -l unlimited)."
        ) from None
    _unpin_memory(trial.data_ptr())


def check_disk_space(size: int, folder: Path) -> None:
    """Refuse more bytes of states than a disk has free."""
    where = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    stat = os.statvfs(where)
    free = stat.f_bavail * stat.f_frsize
    if size > free:
        raise PlanError(
            f"{size / GIB:.3g} GiB of states are to lie in {folder}, whose disk has "
            f"{free / GIB:.3g} GiB free. All must fit. Free space, or choose another memory.path."
        )
