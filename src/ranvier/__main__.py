"""The command `ranvier`, also as `python -m ranvier`.

Local ranks are forked from a process that imports torch while this one does: it is begun here,
before anything else is imported.
"""

from __future__ import annotations

import sys
from contextlib import suppress

from ranvier import launch
from ranvier.errors import PlanError

WORKERS = {"train": "ranvier.train.train", "verify": "ranvier.verify"}
"""What the local ranks of a verb import."""


def main() -> None:
    """Run the command line; exits with its code."""
    words = sys.argv[1:]
    one = "--nproc 1" in " ".join(words).replace("=", " ")
    if words and words[0] in WORKERS and not one and not {"-h", "--help"} & {*words}:
        with suppress(PlanError):  # told later
            if launch.ranks() is None:
                launch.warm([WORKERS[words[0]]])
    from ranvier import cli

    cli.main()


if __name__ == "__main__":
    main()
