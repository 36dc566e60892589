"""The command `ranvier`, also as `python -m ranvier`.

Local ranks are forked from a process that imports torch while this one does: it is begun here,
before anything else is imported.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO

from ranvier import launch
from ranvier.errors import PlanError

WORKER_MODULES = {"train": "ranvier.train.train", "verify": "ranvier.tools.verify"}
"""What the local ranks of a verb import."""


def main() -> None:
    """Run the command line; exits with its code."""
    words = sys.argv[1:]
    if words[:1] == ["train"]:  # from the very start, whoever sends a signal learns the same
        launch.exit_on_stop_signals()
    if sys.stdout is None:  # closed by whoever started this
        sys.stdout = _open_null(1)
    if sys.stderr is None:
        sys.stderr = _open_null(2)
    one = " --nproc 1 " in f"{' '.join(words)} ".replace("=", " ")
    if words and words[0] in WORKER_MODULES and not one and not {"-h", "--help"} & {*words}:
        with suppress(PlanError, OSError):  # told later
            if launch.read_process_info() is None:
                launch.start_forkserver([WORKER_MODULES[words[0]]])
    from ranvier.cli import main as command_line

    command_line.main()


def _open_null(number: int) -> TextIO:
    """A descriptor that takes everything, for the ranks too: no other file may get its number."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    os.set_inheritable(number, True)
    return os.fdopen(number, "w")


if __name__ == "__main__":
    main()
