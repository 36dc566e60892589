"""The git hashes of the folders of src/ranvier and of the files directly in it.

They are computed from the files, so that a copy without .git has them too, and are those of `git
rev-parse COMMIT:src/ranvier/NAME` if the files are those of the commit:

    blob   sha1("blob SIZE\\0" + content)
    tree   sha1("tree SIZE\\0" + for each entry "MODE NAME\\0" + its hash)

`python scripts/source_hashes.py` prints them.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "ranvier"
FILE_MODE = b"100644"
EXECUTABLE_MODE = b"100755"
LINK_MODE = b"120000"
TREE_MODE = b"40000"


def source_hashes(folder: Path = SOURCE) -> dict[str, str]:
    """Returns the git hash, 40 hex digits, of each folder of and file in a package, by name.

    Ignored are compiled Python files, folders without any other file, and names in the .gitignore
    of the repository, whose `src` has the package.
    """
    return {name.decode(): digest.hex() for name, _, digest in _entries(folder, _patterns(folder))}


def tree_hash(folder: Path = SOURCE) -> str:
    """Returns the git hash of a package, 40 hex digits, with the same files."""
    return _tree_digest(_entries(folder, _patterns(folder))).hex()


def _patterns(folder: Path) -> list[str]:
    return ["__pycache__/", "*.pyc", *_ignored_names(folder.parents[1] / ".gitignore")]


def _ignored_names(gitignore: Path) -> list[str]:
    """Returns the patterns that hold in all folders: those without a slash, but at the end."""
    lines = gitignore.read_text("utf-8").splitlines() if gitignore.is_file() else []
    return [line for line in lines if line and line[0] != "#" and "/" not in line[:-1]]


def _is_ignored(path: Path, patterns: Sequence[str]) -> bool:
    is_folder = path.is_dir() and not path.is_symlink()
    return any(
        (is_folder or not pattern.endswith("/"))
        and fnmatch.fnmatchcase(path.name, pattern.rstrip("/"))
        for pattern in patterns
    )


def _entries(folder: Path, patterns: Sequence[str]) -> list[tuple[bytes, bytes, bytes]]:
    """Returns name, mode and hash of each entry, in the order of git."""
    entries = []
    for path in folder.iterdir():
        if _is_ignored(path, patterns):
            continue
        name = os.fsencode(path.name)
        if path.is_symlink():
            entries.append((name, LINK_MODE, _digest(b"blob", os.fsencode(path.readlink()))))
        elif path.is_dir():
            inner = _entries(path, patterns)
            # Git has no empty folders.
            if inner:
                entries.append((name, TREE_MODE, _tree_digest(inner)))
        else:
            is_executable = path.stat().st_mode & stat.S_IXUSR
            mode = EXECUTABLE_MODE if is_executable else FILE_MODE
            entries.append((name, mode, _digest(b"blob", path.read_bytes())))
    # Git sorts a folder as if its name ended with a slash.
    return sorted(entries, key=lambda entry: entry[0] + b"/" * (entry[1] == TREE_MODE))


def _tree_digest(entries: Sequence[tuple[bytes, bytes, bytes]]) -> bytes:
    content = b"".join(mode + b" " + name + b"\0" + digest for name, mode, digest in entries)
    return _digest(b"tree", content)


def _digest(kind: bytes, content: bytes) -> bytes:
    header = kind + b" " + str(len(content)).encode() + b"\0"
    return hashlib.sha1(header + content, usedforsecurity=False).digest()


if __name__ == "__main__":
    for name, digest in source_hashes().items():
        print(digest, name)
