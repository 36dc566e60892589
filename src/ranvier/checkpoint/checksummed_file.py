"""Files with one checksum per block, which can be read in part and are verified while reading.

Each block of `BLOCK_BYTES` bytes has a CRC-32, which detects any single flipped bit and any burst
of up to 32 bits. A reader of a few bytes verifies only the blocks that hold them.
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
"""Bytes covered by one checksum."""
SEGMENT_BYTES = 16 * BLOCK_BYTES
"""Bytes that one thread writes at a time."""
WRITER_THREADS = 4
"""Threads that write a large file: one thread does not saturate a fast disk."""


@dataclass(frozen=True)
class BlockChecksums:
    """Size of a file and the checksums of its blocks."""

    size: int
    checksums: tuple[int, ...]

    def to_hex(self) -> str:
        """The checksums as hexadecimal digits, eight per block."""
        return "".join(f"{x:08x}" for x in self.checksums)

    @classmethod
    def from_hex(cls, size: int, text: str) -> BlockChecksums:
        """Parse the output of `to_hex`; ValueError if it does not match the size."""
        # Upper case is rejected, so that each list of checksums has only one spelling.
        if size < 0 or len(text) != 8 * -(-size // BLOCK_BYTES) or text != text.lower():
            raise ValueError(f"{len(text) // 8} checksums for {size} bytes")
        return cls(size, tuple(int(text[i : i + 8], 16) for i in range(0, len(text), 8)))


class LazyBytes(Protocol):
    """A byte sequence that may be produced only when it is sliced."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> memoryview: ...


def write_checksummed(path: Path, pieces: Sequence[LazyBytes]) -> BlockChecksums:
    """Write a new file and fsync it; return its checksums."""
    size = sum(len(piece) for piece in pieces)
    # O_EXCL: an existing file is never overwritten, and a symbolic link is not followed.
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        starts = range(0, size, SEGMENT_BYTES)

        def put(start: int) -> list[int]:
            data = join_bytes(pieces, start, min(start + SEGMENT_BYTES, size))
            _write_all(handle, data, start)
            return [zlib.crc32(data[i : i + BLOCK_BYTES]) for i in range(0, len(data), BLOCK_BYTES)]

        # A thread pool does not pay off for small files.
        if len(starts) < 2 * WRITER_THREADS:
            sums = [put(start) for start in starts]
        else:
            with ThreadPoolExecutor(WRITER_THREADS, thread_name_prefix="checkpoint") as threads:
                sums = list(threads.map(put, starts))
        os.fsync(handle)
    except OSError as error:
        # Calls on a file descriptor raise without a path; the message to the user needs one.
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(handle)
    return BlockChecksums(size, tuple(x for group in sums for x in group))


def join_bytes(pieces: Sequence[LazyBytes], start: int, stop: int) -> memoryview:
    """Bytes `start` to `stop` of concatenated pieces; copied only across a boundary of pieces."""
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
    """Write all of the data at offset `start`, in as many calls as the system needs."""
    while data:
        done = os.pwrite(handle, data, start)
        data = data[done:]
        start = start + done


def fsync_path(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_plain_file(path: Path) -> int:
    """Open a regular file that is neither a symbolic nor a hard link; never blocks."""
    try:
        # O_NONBLOCK: opening a FIFO would otherwise wait for a writer. The type is checked on the
        # open handle, so that the file cannot be swapped in between.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise _refused_error(path, "a symbolic link") from None
        raise DamageError(f"{path} cannot be read: {error.strerror}. Restore it.") from None
    facts = os.fstat(handle)
    if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
        os.close(handle)
        raise _refused_error(
            path, "a hard link" if stat.S_ISREG(facts.st_mode) else "not a regular file"
        )
    return handle


def _refused_error(path: Path, what: str) -> UnsafeInputError:
    return UnsafeInputError(
        f"{path} is {what}. A checkpoint must contain regular files only, so that nothing outside "
        "of it is read. Replace it with a copy of the file."
    )


class ChecksummedFile:
    """A file whose blocks are verified as they are read."""

    def __init__(self, path: Path, sums: BlockChecksums) -> None:
        self.path = path
        self.checksums = sums
        self._handle = open_plain_file(path)
        size = os.fstat(self._handle).st_size
        if size != sums.size:
            self.close()
            raise DamageError(f"{path} has {size} bytes, but was written with {sums.size}.")

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes `start` to `stop`; all blocks they touch are read and verified."""
        first = start // BLOCK_BYTES
        last = -(-stop // BLOCK_BYTES)
        low = first * BLOCK_BYTES
        high = min(last * BLOCK_BYTES, self.checksums.size)
        # A bytearray, since `torch.frombuffer` expects writable memory.
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
                    f"{block * BLOCK_BYTES + len(here)}: the checksum does not match."
                )
        return data[start - low : stop - low]

    def close(self) -> None:
        """Close the file handle."""
        os.close(self._handle)

    def __enter__(self) -> ChecksummedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
