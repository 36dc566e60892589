"""Errors for users, with three parts: what is wrong with its value, the rule, the remedy.

Broken internal invariants are `assert`s with the values in the message instead.
"""

from __future__ import annotations

from collections.abc import Iterable

INTERNAL_EXIT_CODE = 70
"""Exit code of an internal error."""
STOPPED_EXIT_CODE = 75
"""Exit code of a run that was stopped and has saved a checkpoint. Starting it again resumes it."""
NO_PROGRESS_EXIT_CODE = 93
"""Exit code of a run that was restarted repeatedly without progress."""


class RanvierError(Exception):
    """Any error a user can fix; the command line prints it without a traceback."""

    exit_code = 64


class PlanError(RanvierError):
    """A plan, a configuration or an input that cannot run, with all problems at once."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        if isinstance(problems, str):
            self.problems = [problems]
        else:
            self.problems = list(problems)
        super().__init__("\n".join(self.problems))


class ShardingError(RanvierError):
    """A model whose weights cannot be sharded over the grid."""


class CommunicationError(RanvierError):
    """Ranks that disagree on a collective, or a peer that was lost."""

    exit_code = 71


class DeviceMemoryError(RanvierError):
    """A step that did not fit into device memory, with what it needs and what would fit."""

    exit_code = INTERNAL_EXIT_CODE


class OtherRankError(CommunicationError):
    """An error that another rank reports; this rank only exits with its code."""

    def __init__(self, code: int) -> None:
        super().__init__("Another rank has failed. See the message of that rank.")
        self.exit_code = code


class NumericError(RanvierError):
    """A loss or gradient that is not finite."""

    exit_code = 74


class DataError(RanvierError):
    """Training data or a file that cannot be used."""

    exit_code = 65


class CheckpointError(RanvierError):
    """A checkpoint that is missing, damaged, or of another model."""

    exit_code = 66


class DamageError(CheckpointError):
    """A checkpoint that differs from what was written; an older one may be used."""


class HangError(RanvierError):
    """Ranks that do not respond."""

    exit_code = 72


class WriteError(RanvierError):
    """A file that cannot be written: a full disk, no permission."""

    exit_code = 73


class VersionError(RanvierError):
    """A file in another version of the format."""

    exit_code = 76


class UnsafeInputError(RanvierError):
    """Unsafe input: path traversal, a symlink, a pickle."""

    exit_code = 77
