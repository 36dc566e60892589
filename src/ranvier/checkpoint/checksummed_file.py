"""Blocks: a file whose bytes can be read in part and are checked as they are read.

Every block of `BLOCK` bytes has a checksum (CRC-32, which sees each single bit and each burst of 32
bits), so that a reader of a few bytes checks the block they lie in and nothing else.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ranvier.errors import DamageError, RefusedError

BLOCK = 1 << 20
"""Bytes that have a checksum of their own."""
SEGMENT = 16 * BLOCK
"""Bytes that one thread writes at once."""
THREADS = 4
"""Threads that write a large file: one alone does not fill a fast disk."""


@dataclass(frozen=True)
class Sums:
    """Size of a file and the checksums of its blocks."""

    size: int
    blocks: tuple[int, ...]

    def text(self) -> str:
        """The checksums as hexadecimal digits, eight for each block."""
        return "".join(f"{x:08x}" for x in self.blocks)

    @classmethod
    def of(cls, size: int, text: str) -> Sums:
        """From what `text` wrote; a ValueError if it cannot be."""
        if size < 0 or len(text) != 8 * -(-size // BLOCK) or text != text.lower():
            raise ValueError(f"{len(text) // 8} checksums for {size} bytes")
        return cls(size, tuple(int(text[i : i + 8], 16) for i in range(0, len(text), 8)))


class Bytes(Protocol):
    """Bytes that may be made only when they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> memoryview: ...


def write(path: Path, pieces: Sequence[Bytes]) -> Sums:
    """Write a new file of these bytes and have the disk hold it."""
    size = sum(len(piece) for piece in pieces)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        starts = range(0, size, SEGMENT)

        def put(start: int) -> list[int]:
            data = joined(pieces, start, min(start + SEGMENT, size))
            _put(handle, data, start)
            return [zlib.crc32(data[i : i + BLOCK]) for i in range(0, len(data), BLOCK)]

        if len(starts) < 2 * THREADS:
            sums = [put(start) for start in starts]
        else:
            with ThreadPoolExecutor(THREADS, thread_name_prefix="checkpoint") as threads:
                sums = list(threads.map(put, starts))
        os.fsync(handle)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(handle)
    return Sums(size, tuple(x for group in sums for x in group))


def joined(pieces: Sequence[Bytes], start: int, stop: int) -> memoryview:
    """Bytes `start` to `stop` of pieces that lie one after the other; copied only at their ends."""
    found, at = [], 0
    for piece in pieces:
        low, high = max(start - at, 0), min(stop - at, len(piece))
        if low < high:
            found.append(piece[low:high])
        at += len(piece)
    return found[0] if len(found) == 1 else memoryview(b"".join(found))


def _put(handle: int, data: memoryview, start: int) -> None:
    """Write all of it, however little the system takes at once."""
    while data:
        done = os.pwrite(handle, data, start)
        data, start = data[done:], start + done


def flush(path: Path) -> None:
    """Have the disk hold a directory's entries, or what was written to a file."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def opened(path: Path) -> int:
    """A handle to a plain file that lies in its directory and nowhere else; it never blocks."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise _refused(path, "a symbolic link") from None
        raise DamageError(f"{path} cannot be read: {error.strerror}. It must be there.") from None
    facts = os.fstat(handle)
    if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
        os.close(handle)
        raise _refused(path, "a hard link" if stat.S_ISREG(facts.st_mode) else "no plain file")
    return handle


def _refused(path: Path, what: str) -> RefusedError:
    return RefusedError(
        f"{path} is {what}. A checkpoint holds plain files of its own, so that nothing outside of "
        "it is read. Put a copy of the file in its place."
    )


class Blocks:
    """A file that is read in checked blocks."""

    def __init__(self, path: Path, sums: Sums) -> None:
        self.path, self.sums = path, sums
        self._handle = opened(path)
        size = os.fstat(self._handle).st_size
        if size != sums.size:
            self.close()
            raise DamageError(f"{path} has {size} bytes, but was written with {sums.size}.")

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes `start` to `stop`; the blocks they lie in are read and checked."""
        first, last = start // BLOCK, -(-stop // BLOCK)
        low, high = first * BLOCK, min(last * BLOCK, self.sums.size)
        data = memoryview(bytearray(high - low))
        at = 0
        while at < len(data):
            try:
                done = os.preadv(self._handle, [data[at:]], low + at)
            except OSError as error:
                raise DamageError(
                    f"{self.path} cannot be read at byte {low + at}: {error.strerror}."
                ) from None
            if done == 0:
                raise DamageError(f"{self.path} ends at byte {low + at} of {self.sums.size}.")
            at += done
        for block in range(first, last):
            here = data[(block - first) * BLOCK : (block - first + 1) * BLOCK]
            if zlib.crc32(here) != self.sums.blocks[block]:
                raise DamageError(
                    f"{self.path} is damaged in bytes {block * BLOCK} to "
                    f"{block * BLOCK + len(here)}: their checksum is not the one they were "
                    "written with."
                )
        return data[start - low : stop - low]

    def close(self) -> None:
        """Give the handle back."""
        os.close(self._handle)

    def __enter__(self) -> Blocks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
