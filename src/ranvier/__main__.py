"""The command `ranvier`, also as `python -m ranvier`.

Local ranks are forked from a forkserver that imports torch in parallel with this process. It is
started here, before anything else is imported.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO

from ranvier import launch
from ranvier.errors import PlanError

WORKER_MODULES = {"train": "ranvier.train.train", "verify": "ranvier.tools.verify"}
"""Module that the local ranks of a command import."""


def main() -> None:
    """Runs the command line; exits with its code."""
    words = sys.argv[1:]
    # From the start, so that a signal gives the same exit code whenever it arrives.
    if words[:1] == ["train"]:
        launch.exit_on_stop_signals()
    # Python sets these to None if the parent process has closed the descriptors.
    if sys.stdout is None:
        sys.stdout = _open_null(1)
    if sys.stderr is None:
        sys.stderr = _open_null(2)
    # Only a quick look at the arguments, because a full parse would import too much before the
    # forkserver starts. A single rank runs in this process and does not need a forkserver.
    one = " --nproc 1 " in f"{' '.join(words)} ".replace("=", " ")
    if words and words[0] in WORKER_MODULES and not one and not {"-h", "--help"} & {*words}:
        # The command line reports these errors later.
        with suppress(PlanError, OSError):
            # None means no external launcher, so this process starts the ranks.
            if launch.read_process_info() is None:
                launch.start_forkserver([WORKER_MODULES[words[0]]])
    from ranvier.cli import main as command_line

    command_line.main()


def _open_null(number: int) -> TextIO:
    """Opens /dev/null as descriptor `number`, also for the ranks, so that no other file gets it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    os.set_inheritable(number, True)
    return os.fdopen(number, "w")


if __name__ == "__main__":
    main()
