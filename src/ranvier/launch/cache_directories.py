"""Places: where this process may keep things, and what it finds to build kernels with."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path


def cache_dir() -> Path:
    """A folder for what can be made again: the user's cache, or one in the temporary folder."""
    env = os.environ
    folder = Path(env.get("XDG_CACHE_HOME") or "~/.cache") / "ranvier"
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home
        folder = Path(env.get("RANVIER_CACHE") or folder).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if is_writable(folder):
            return folder
    folder = Path(tempfile.gettempdir()) / f"ranvier-{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.lstat().st_uid == os.getuid() and not folder.is_symlink():
            folder.chmod(0o700)
            return folder
    return Path(tempfile.mkdtemp(prefix="ranvier-"))  # somebody else owns that name


def is_writable(folder: Path) -> bool:
    """Whether a file can be written in a folder."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"ranvier")
    except OSError:
        return False
    return True


def cache_compiled_kernels() -> None:
    """Have compilers keep their results in our cache, so that the next run finds them."""
    folder = cache_dir() / "compiled"
    for name, part in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        os.environ.setdefault(name, str(folder / part))


def has_triton() -> bool:
    """Whether kernels in Triton can be built here: there are the package and a C compiler."""
    found = importlib.util.find_spec("triton") is not None
    names = (os.environ.get("CC", ""), "gcc", "cc", "clang")
    return found and any(name and shutil.which(name) for name in names)
