"""File checksums: size and digest, computed while writing and compared when reading."""

from __future__ import annotations

import errno
import hashlib
import stat
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

DIGEST_BYTES = 16


@dataclass(frozen=True)
class FileChecksum:
    """Size and digest of a file."""

    size: int
    digest: str
    """blake2b, 16 bytes, hexadecimal."""


def digest_of(*parts: bytes | str) -> str:
    """Digest of several parts, each with its length, so that their boundaries matter too."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        if isinstance(part, str):
            raw = part.encode("utf-8", "surrogatepass")
        else:
            raw = part
        state.update(len(raw).to_bytes(8, "little"))
        state.update(raw)
    return state.hexdigest()


def file_size(path: Path) -> int:
    """Size of a regular file; OSError for anything else: opening a FIFO would block."""
    try:
        now = path.stat()
    # Not a valid file name: it contains a NUL or a lone surrogate.
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    if not stat.S_ISREG(now.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return now.st_size


def file_checksum(path: Path) -> FileChecksum:
    """Checksum of a file, read in chunks."""
    with path.open("rb") as file:
        state = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES))
        return FileChecksum(file.tell(), state.hexdigest())


class ChecksumWriter:
    """A new file whose checksum is computed while it is written."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._state = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._size = 0

    def write(self, raw: bytes) -> None:
        """Append bytes."""
        self._file.write(raw)
        self._state.update(raw)
        self._size += len(raw)

    def close(self) -> FileChecksum:
        """Close the file; return its checksum."""
        self._file.close()
        return FileChecksum(self._size, self._state.hexdigest())

    def __enter__(self) -> ChecksumWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._file.close()
