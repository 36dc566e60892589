"""Opens untrusted files so that nothing but the file itself is read.

A pretrained model, an adapter, a tokenizer or a run directory may come from anywhere. A link in it
may point to any file of this machine, whose content would be copied and published; a pipe blocks
forever; a device never ends; a huge file exhausts memory. `open_untrusted` rejects all of them, and
all code that reads such a file uses it. Directories on the path are opened one by one without
following links, and the file is checked by its handle, not by its name.

One link is followed: the Hub cache stores a model as `snapshots/REVISION/NAME`, a link to
`../../blobs/DIGEST`, and the blob must be a regular file in exactly that directory.
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
"""Size limits in bytes by file name: several times the largest known model or run."""
SUFFIX_LIMITS = {".safetensors": 1 << 40, ".jinja": 4 * MIB}
"""Size limits in bytes of other files by suffix."""
DEFAULT_LIMIT = 64 * MIB
"""Size limit in bytes of any other file."""
DIRECTORY_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
# O_NONBLOCK: opening a pipe must not wait for a writer; O_NOCTTY: a terminal must not become ours.
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def path_exists(path: Path) -> bool:
    """Whether a name is taken, even by a dangling link, which is then rejected and not ignored.

    False for an impossible name.
    """
    try:
        return os.path.lexists(path)
    except ValueError:
        return False


def size_limit(name: str) -> int:
    """Returns the size limit in bytes of a file with this name."""
    return SIZE_LIMITS.get(name, SUFFIX_LIMITS.get(os.path.splitext(name)[1], DEFAULT_LIMIT))


def open_untrusted(
    path: Path, *, root: Path | None = None, limit: int | None = None
) -> io.BufferedReader:
    """Opens a regular file of at most `limit` bytes; raises OSError if it does not exist.

    root: the directory that the user named, below which no part of the path may be a link (default:
    the directory of the file). limit: derived from the name by default.
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
    # An invalid file name: it contains a NUL or a lone surrogate.
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error), str(path)) from None


def read_bytes(path: Path, *, root: Path | None = None, limit: int | None = None) -> bytes:
    """Returns the content of a file that `open_untrusted` accepts."""
    if limit is None:
        limit = size_limit(path.name)
    with open_untrusted(path, root=root, limit=limit) as file:
        content = file.read(limit + 1)
    # It has grown since it was opened, or its file system does not report a size.
    if len(content) > limit:
        raise _too_large_error(path, len(content), limit)
    return content


def read_text(
    path: Path, *, root: Path | None = None, limit: int | None = None, errors: str = "strict"
) -> str:
    """Returns the text of a file that `open_untrusted` accepts, in UTF-8, with \\n as line ends."""
    content = read_bytes(path, root=root, limit=limit)
    return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", errors=errors).read()


def copy_file(source: Path, target: Path, *, root: Path | None = None) -> None:
    """Copy a file that `open_untrusted` accepts; an existing target is replaced."""
    with open_untrusted(source, root=root) as file, open_to_write(target) as copied:
        shutil.copyfileobj(file, copied, MIB)


def handle_path(file: BinaryIO) -> str:
    """Returns a path to the open file itself, for libraries that open by name."""
    return f"/proc/self/fd/{file.fileno()}"


def open_to_write(path: Path, *, append: bool = False) -> BinaryIO:
    """Opens a regular file to overwrite or append; never follows a link."""
    if not append:
        # Removed and not truncated, so that a link is replaced and not followed.
        path.unlink(missing_ok=True)
    how = os.O_APPEND if append else os.O_EXCL
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | how
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        # ELOOP: a symbolic link with O_NOFOLLOW; ENXIO: a special file that cannot be opened.
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _unsafe_error(path, "a link or a pipe") from None
        raise
    found = os.fstat(handle)
    # Checked on the handle, because the name may have been replaced in between.
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(handle)
        raise _unsafe_error(path, _describe_kind(found))
    return os.fdopen(handle, "a+b" if append else "w+b")


def _open_subdirectory(folder: int, name: str, path: Path) -> int:
    """Opens a directory within a directory, and closes the handle of the latter."""
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if stat.S_ISLNK(found.st_mode):
        raise _unsafe_error(path, f"behind a symbolic link ({name})")
    # O_NOFOLLOW again, because the entry may have been replaced since the check above.
    below = os.open(name, DIRECTORY_FLAGS | os.O_NOFOLLOW, dir_fd=folder)
    os.close(folder)
    return below


def _open_entry(folder: int, name: str, path: Path, limit: int) -> io.BufferedReader:
    """Opens a regular file in a directory, or in the blobs of its Hub cache."""
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if stat.S_ISLNK(found.st_mode):
        target = os.readlink(name, dir_fd=folder)
        blob = _hub_blob_name(target, path)
        if blob is None:
            raise _unsafe_error(path, f"a symbolic link to {target[:200]!r}")
        try:
            blobs = os.open("../../blobs", DIRECTORY_FLAGS | os.O_NOFOLLOW, dir_fd=folder)
        except NotADirectoryError:
            raise _unsafe_error(path, "a symbolic link into a directory that is a link") from None
        try:
            return _open_plain_file(blobs, blob, path, limit)
        finally:
            os.close(blobs)
    return _open_plain_file(folder, name, path, limit)


def _hub_blob_name(target: str, path: Path) -> str | None:
    """Returns the name of the blob that a link of the Hub cache points to; None for other links."""
    *above, name = target.split("/")
    own = path.parent.resolve().parent.name == "snapshots"
    plain = name not in ("", ".", "..")
    if own and plain and above == ["..", "..", "blobs"]:
        return name
    return None


def _open_plain_file(folder: int, name: str, path: Path, limit: int) -> io.BufferedReader:
    """Opens a regular file in a directory, checked before and after opening it."""
    # Also checked before, because opening a device or a pipe can already have an effect.
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
    """Returns the kind of a file that is not a regular file of its own."""
    kinds = {
        stat.S_IFREG: "a hard link to a file with other names",
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFDIR: "a directory",
    }
    return kinds.get(stat.S_IFMT(found.st_mode), "a device")


def _unsafe_error(path: Path, what: str) -> UnsafeInputError:
    return UnsafeInputError(
        f"{path} is {what}. A model or a run must contain only regular files, so that no file "
        "outside of it is read, published or overwritten. Replace it by a copy of the file."
    )


def _too_large_error(path: Path, size: int, limit: int) -> UnsafeInputError:
    return UnsafeInputError(
        f"{path} has {size:,} bytes or more. A file with this name may have at most {limit:,}. Use "
        "the original file of the model or the run."
    )
