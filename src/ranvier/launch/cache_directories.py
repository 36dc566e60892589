"""Cache directories, and whether Triton kernels can be built."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path


def cache_dir() -> Path:
    """Return a writable cache directory: the user's, else one in the temporary directory."""
    env = os.environ
    folder = Path(env.get("XDG_CACHE_HOME") or "~/.cache") / "ranvier"
    # RuntimeError: there is no home directory.
    with contextlib.suppress(OSError, RuntimeError):
        folder = Path(env.get("RANVIER_CACHE") or folder).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if is_writable(folder):
            return folder
    folder = Path(tempfile.gettempdir()) / f"ranvier-{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        # Compiled kernels are executed, so nobody else may own the directory or redirect it.
        if folder.lstat().st_uid == os.getuid() and not folder.is_symlink():
            folder.chmod(0o700)
            return folder
    # Another user owns that name.
    return Path(tempfile.mkdtemp(prefix="ranvier-"))


def is_writable(folder: Path) -> bool:
    """Whether a file can be written in a directory."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"ranvier")
    except OSError:
        return False
    return True


def cache_compiled_kernels() -> None:
    """Have Inductor and Triton use our cache directory, for the benefit of later runs."""
    folder = cache_dir() / "compiled"
    for name, part in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        os.environ.setdefault(name, str(folder / part))


def has_triton() -> bool:
    """Whether Triton kernels can be built: the package and a C compiler are installed."""
    found = importlib.util.find_spec("triton") is not None
    names = (os.environ.get("CC", ""), "gcc", "cc", "clang")
    return found and any(name and shutil.which(name) for name in names)
