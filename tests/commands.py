"""The command line for tests: in this process, or as processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ranvier.cli.main import main

SMALL_OPTIONS = [
    *("--data.max-bytes", "60000", "--data.seq-len", "32", "--data.tokenizer", "bytes"),
    *("--model.layers", "2", "--model.embed", "32", "--model.head-dim", "8", "--model.mlp", "48"),
    *("--model.vocab", "260", "--train.eval-interval", "0", "--train.sample-prompt", ""),
]
"""A run of a few hundredths of a second a step."""


def call(*words: str) -> int:
    """The exit code of a command, run in this process."""
    with pytest.raises(SystemExit) as end:
        main(list(words))
    assert isinstance(end.value.code, int)
    return end.value.code


PATCHED = """
import importlib.util, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != {module!r}:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def patched(module):
            run(module)
            exec({patch!r}, vars(module))
        spec.loader.exec_module = patched
        return spec

sys.meta_path.insert(0, Finder())
"""
"""Code that every process runs first: it does nothing until a module is imported."""


def started(
    folder: Path,
    *words: str,
    patch: tuple[str, str] = ("", ""),
    environment: dict[str, str] | None = None,
) -> subprocess.Popen[str]:
    """A command begun in a folder; patch: a module, and code that its end runs."""
    (folder / "sitecustomize.py").write_text(PATCHED.format(module=patch[0], patch=patch[1]))
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "ranvier", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, output and errors of a command."""
    out, errors = process.communicate(timeout=120)
    return process.returncode, out, errors


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    """The losses of a run."""
    return [row["loss"] for row in metrics(folder)]
