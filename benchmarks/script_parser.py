"""The command line of a benchmark: its docstring as help, and `--smoke`.

A smoke runs the whole script at a toy shape on the CPU. It is given as words of the script's own
options, so that it is the same code as any other run and its shape can be read in `--help`. Its
times, and what they are compared with, mean nothing. A failure to compile is an error.
"""

from __future__ import annotations

import argparse
import atexit
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence

os.environ.setdefault("RANVIER_COMPILE_ERRORS", "raise")


class ScriptParser(argparse.ArgumentParser):
    """Parses the command line of a benchmark.

    description: The docstring of the script, shown as it is.
    smoke: The options that `--smoke` stands for; those of the user follow them and win. `{folder}`
        is a new temporary directory.
    skipped: What a smoke leaves out, and why.
    """

    def __init__(self, description: str | None, *, smoke: str, skipped: str = "") -> None:
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self.smoke = smoke
        self.skipped = skipped
        text = f"toy shape on the CPU, at most 10 s: {smoke}" if smoke else "at most 10 s"
        self.add_argument("--smoke", action="store_true", help=text.replace("%", "%%"))

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses the words, those of the smoke before them if `--smoke` is one of them."""
        words = [*(sys.argv[1:] if args is None else args)]
        if "--smoke" in words:
            words = [*self._start_smoke(), *words]
        return super().parse_known_args(words, namespace)

    def _start_smoke(self) -> list[str]:
        """Hides GPUs, prints what is run and returns its words."""
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        folder = ""
        if "{folder}" in self.smoke:
            folder = tempfile.mkdtemp(prefix="ranvier-smoke-")
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
        print(f"Smoke: {self.smoke}" if self.smoke else "Smoke", flush=True)
        if self.skipped:
            print(f"Skipped: {self.skipped}", flush=True)
        return shlex.split(self.smoke.replace("{folder}", folder))
