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

from ranvier.errors import DamageError, UnsafeInputError

BLOCK_BYTES = 1 << 20
"""Bytes that have a checksum of their own."""
SEGMENT_BYTES = 16 * BLOCK_BYTES
"""Bytes that one thread writes at once."""
WRITER_THREADS = 4
"""Threads that write a large file: one alone does not fill a fast disk."""


@dataclass(frozen=True)
class BlockChecksums:
    """Size of a file and the checksums of its blocks."""

    size: int
    checksums: tuple[int, ...]

    def to_hex(self) -> str:
        """The checksums as hexadecimal digits, eight for each block."""
        return "".join(f"{x:08x}" for x in self.checksums)

    @classmethod
    def from_hex(cls, size: int, text: str) -> BlockChecksums:
        """From what `text` wrote; a ValueError if it cannot be."""
        if size < 0 or len(text) != 8 * -(-size // BLOCK_BYTES) or text != text.lower():
            raise ValueError(f"{len(text) // 8} checksums for {size} bytes")
        return cls(size, tuple(int(text[i : i + 8], 16) for i in range(0, len(text), 8)))


class LazyBytes(Protocol):
    """Bytes that may be made only when they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> memoryview: ...


def write_checksummed(path: Path, pieces: Sequence[LazyBytes]) -> BlockChecksums:
    """Write a new file of these bytes and have the disk hold it."""
    size = sum(len(piece) for piece in pieces)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        starts = range(0, size, SEGMENT_BYTES)

        def put(start: int) -> list[int]:
            data = join_bytes(pieces, start, min(start + SEGMENT_BYTES, size))
            _write_all(handle, data, start)
            return [zlib.crc32(data[i : i + BLOCK_BYTES]) for i in range(0, len(data), BLOCK_BYTES)]

        if len(starts) < 2 * WRITER_THREADS:
            sums = [put(start) for start in starts]
        else:
            with ThreadPoolExecutor(WRITER_THREADS, thread_name_prefix="checkpoint") as threads:
                sums = list(threads.map(put, starts))
        os.fsync(handle)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(handle)
    return BlockChecksums(size, tuple(x for group in sums for x in group))


def join_bytes(pieces: Sequence[LazyBytes], start: int, stop: int) -> memoryview:
    """Bytes `start` to `stop` of pieces that lie one after the other; copied only at their ends."""
    found = []
    at = 0
    for piece in pieces:
        low = max(start - at, 0)
        high = min(stop - at, len(piece))
        if low < high:
            found.append(piece[low:high])
        at += len(piece)
    if len(found) == 1:
        return found[0]
    return memoryview(b"".join(found))


def _write_all(handle: int, data: memoryview, start: int) -> None:
    """Write all of it, however little the system takes at once."""
    while data:
        done = os.pwrite(handle, data, start)
        data = data[done:]
        start = start + done


def fsync_path(path: Path) -> None:
    """Have the disk hold a directory's entries, or what was written to a file."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_plain_file(path: Path) -> int:
    """A handle to a plain file that lies in its directory and nowhere else; it never blocks."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise _refused_error(path, "a symbolic link") from None
        raise DamageError(f"{path} cannot be read: {error.strerror}. It must be there.") from None
    facts = os.fstat(handle)
    if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
        os.close(handle)
        raise _refused_error(
            path, "a hard link" if stat.S_ISREG(facts.st_mode) else "no plain file"
        )
    return handle


def _refused_error(path: Path, what: str) -> UnsafeInputError:
    return UnsafeInputError(
        f"{path} is {what}. A checkpoint holds plain files of its own, so that nothing outside of "
        "it is read. Put a copy of the file in its place."
    )


class ChecksummedFile:
    """A file that is read in checked blocks."""

    def __init__(self, path: Path, sums: BlockChecksums) -> None:
        self.path = path
        self.checksums = sums
        self._handle = open_plain_file(path)
        size = os.fstat(self._handle).st_size
        if size != sums.size:
            self.close()
            raise DamageError(f"{path} has {size} bytes, but was written with {sums.size}.")

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes `start` to `stop`; the blocks they lie in are read and checked."""
        first = start // BLOCK_BYTES
        last = -(-stop // BLOCK_BYTES)
        low = first * BLOCK_BYTES
        high = min(last * BLOCK_BYTES, self.checksums.size)
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
                raise DamageError(f"{self.path} ends at byte {low + at} of {self.checksums.size}.")
            at += done
        for block in range(first, last):
            here = data[(block - first) * BLOCK_BYTES : (block - first + 1) * BLOCK_BYTES]
            if zlib.crc32(here) != self.checksums.checksums[block]:
                raise DamageError(
                    f"{self.path} is damaged in bytes {block * BLOCK_BYTES} to "
                    f"{block * BLOCK_BYTES + len(here)}: their checksum is not the one they were "
                    "written with."
                )
        return data[start - low : stop - low]

    def close(self) -> None:
        """Give the handle back."""
        os.close(self._handle)

    def __enter__(self) -> ChecksummedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
