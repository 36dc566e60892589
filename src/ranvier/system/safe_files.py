"""Safe files: files that somebody else wrote, opened so that nothing but them is read.

A published model, an adapter, a tokenizer or the directory of a run may come from anywhere. A link
in it leads to any file of this machine, whose content would be copied and published; a pipe waits
forever; a device never ends; a large file fills the memory. `open_untrusted` refuses all of them,
and everything that reads such a file goes through it. Directories on the way are opened one after
the other without following links, and the file is judged by its handle, not by its name.

One link is followed: the cache of a hub keeps a model as `snapshots/REVISION/NAME`, a link to
`../../blobs/DIGEST`, and the blob must be a plain file in exactly that folder.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
from pathlib import Path
from typing import BinaryIO

from ranvier.errors import UnsafeInputError

MIB = 1 << 20
SIZE_LIMITS = {
    "config.json": 16 * MIB,
    "adapter_config.json": 16 * MIB,
    "generation_config.json": 4 * MIB,
    "model.safetensors.index.json": 128 * MIB,
    "tokenizer.json": 256 * MIB,
    "tokenizer_config.json": 4 * MIB,
    "special_tokens_map.json": 4 * MIB,
    "added_tokens.json": 16 * MIB,
    "chat_template.jinja": 4 * MIB,
    "chat_template.json": 4 * MIB,
    "LICENSE": 4 * MIB,
    "NOTICE": 4 * MIB,
    "config.toml": 16 * MIB,
    "run.json": 64 * MIB,
    "origin.txt": MIB // 16,
    "metrics.jsonl": 4096 * MIB,
    "timeline.json": 1024 * MIB,
}
"""Most bytes of a file by its name: several times what the largest known model or run has."""
SUFFIX_LIMITS = {".safetensors": 1 << 40, ".jinja": 4 * MIB}
"""Most bytes of other files by their suffix."""
DEFAULT_LIMIT = 64 * MIB
"""Most bytes of any other file."""
DIRECTORY_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def path_exists(path: Path) -> bool:
    """Whether a name is taken, be it by a link that leads nowhere: it is then refused, not missed.

    A name that no file can have is not taken.
    """
    try:
        return os.path.lexists(path)
    except ValueError:
        return False


def size_limit(name: str) -> int:
    """Most bytes of a file of this name."""
    return SIZE_LIMITS.get(name, SUFFIX_LIMITS.get(os.path.splitext(name)[1], DEFAULT_LIMIT))


def open_untrusted(
    path: Path, *, root: Path | None = None, limit: int | None = None
) -> io.BufferedReader:
    """A plain file of at most `limit` bytes; an OSError if it is not there.

    root: the directory that the user named, below which no part of the path is a link; None: the
    one that the file lies in. limit: None: that of its name.
    """
    root = path.parent if root is None else root
    if limit is None:
        limit = size_limit(path.name)
    *folders, name = path.relative_to(root).parts
    try:
        folder = os.open(root, DIRECTORY_FLAGS)
        try:
            for below in folders:
                folder = _open_subdirectory(folder, below, path)
            return _open_entry(folder, name, path, limit)
        finally:
            os.close(folder)
    except ValueError as error:  # no name of a file: it holds a NUL or half a surrogate pair
        raise OSError(errno.EINVAL, str(error), str(path)) from None


def read_bytes(path: Path, *, root: Path | None = None, limit: int | None = None) -> bytes:
    """The content of a file that `open_untrusted` accepts."""
    if limit is None:
        limit = size_limit(path.name)
    with open_untrusted(path, root=root, limit=limit) as file:
        content = file.read(limit + 1)
    if len(content) > limit:  # it has grown since, or its file system does not know its size
        raise _too_large_error(path, len(content), limit)
    return content


def read_text(
    path: Path, *, root: Path | None = None, limit: int | None = None, errors: str = "strict"
) -> str:
    """The text of a file that `open_untrusted` accepts, in UTF-8, with \\n at the ends of lines."""
    content = read_bytes(path, root=root, limit=limit)
    return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", errors=errors).read()


def copy_file(source: Path, target: Path, *, root: Path | None = None) -> None:
    """Copy a file that `open_untrusted` accepts; a file that is there is replaced."""
    with open_untrusted(source, root=root) as file, open_to_write(target) as copied:
        shutil.copyfileobj(file, copied, MIB)


def handle_path(file: BinaryIO) -> str:
    """A path to the very file that is open, for libraries that open by name."""
    return f"/proc/self/fd/{file.fileno()}"


def open_to_write(path: Path, *, append: bool = False) -> BinaryIO:
    """A plain file to write to, new or emptied or appended to; a link there is never followed."""
    if not append:
        path.unlink(missing_ok=True)
    how = os.O_APPEND if append else os.O_EXCL
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | how
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _unsafe_error(path, "a link or a pipe") from None
        raise
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(handle)
        raise _unsafe_error(path, _describe_kind(found))
    return os.fdopen(handle, "a+b" if append else "w+b")


def _open_subdirectory(folder: int, name: str, path: Path) -> int:
    """The handle of a folder in a folder, whose handle is closed."""
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if stat.S_ISLNK(found.st_mode):
        raise _unsafe_error(path, f"behind a symbolic link ({name})")
    below = os.open(name, DIRECTORY_FLAGS | os.O_NOFOLLOW, dir_fd=folder)
    os.close(folder)
    return below


def _open_entry(folder: int, name: str, path: Path, limit: int) -> io.BufferedReader:
    """A plain file in a folder, or in the blobs of the hub's cache that the folder belongs to."""
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if stat.S_ISLNK(found.st_mode):
        target = os.readlink(name, dir_fd=folder)
        blob = _hub_blob_name(target, path)
        if blob is None:
            raise _unsafe_error(path, f"a symbolic link that leads to {target[:200]!r}")
        try:
            blobs = os.open("../../blobs", DIRECTORY_FLAGS | os.O_NOFOLLOW, dir_fd=folder)
        except NotADirectoryError:
            raise _unsafe_error(path, "a symbolic link into a folder that is none itself") from None
        try:
            return _open_plain_file(blobs, blob, path, limit)
        finally:
            os.close(blobs)
    return _open_plain_file(folder, name, path, limit)


def _hub_blob_name(target: str, path: Path) -> str | None:
    """The name of the blob that a link of a hub's cache leads to; None: it is no such link."""
    *above, name = target.split("/")
    own = path.parent.resolve().parent.name == "snapshots"
    plain = name not in ("", ".", "..")
    if own and plain and above == ["..", "..", "blobs"]:
        return name
    return None


def _open_plain_file(folder: int, name: str, path: Path, limit: int) -> io.BufferedReader:
    """A plain file in a folder; to open another kind could already have an effect."""
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode):
        raise _unsafe_error(path, _describe_kind(found))
    file = os.fdopen(os.open(name, FILE_FLAGS, dir_fd=folder), "rb")
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        file.close()
        raise _unsafe_error(path, _describe_kind(found))
    if found.st_size > limit:
        file.close()
        raise _too_large_error(path, found.st_size, limit)
    return file


def _describe_kind(found: os.stat_result) -> str:
    """What a file is that is no plain one."""
    kinds = {
        stat.S_IFREG: "a hard link to a file that has other names, too",
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFDIR: "a directory",
    }
    return kinds.get(stat.S_IFMT(found.st_mode), "a device")


def _unsafe_error(path: Path, what: str) -> UnsafeInputError:
    return UnsafeInputError(
        f"{path} is {what}. A model or a run holds plain files of its own, so that nothing outside "
        "of it is read, published or overwritten. Put a copy of the file in its place."
    )


def _too_large_error(path: Path, size: int, limit: int) -> UnsafeInputError:
    return UnsafeInputError(
        f"{path} has {size:,} bytes or more. A file of this name has at most {limit:,}. Use the "
        "model or the run as it was published."
    )
