"""Restarts: how an attempt ended, and what follows from it. Pure functions, without processes.

What came from outside (a rank was killed) is worth another try; what a rank did itself would happen
again. Tries that get no further are counted: then a smaller grid is taken, or the run gives up.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ranvier.errors import INTERNAL, NO_PROGRESS, STOPPED, CommunicationError
from ranvier.launch.environment import Failure
from ranvier.launch.heartbeat import DONE, Beat
from ranvier.launch.signals import BEFORE, STOPS

FAULTS = (
    *(signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGBUS, signal.SIGILL),
    *(signal.SIGTRAP, signal.SIGSYS),
)
"""Signals that a process brings on itself."""
LOST = CommunicationError.exit_code
SLACK_SECONDS = 0.5
"""A death is noticed so much later than what other ranks report of it."""
Kind = Literal["done", "stopped", "lost", "fault", "error", "hang"]


@dataclass(frozen=True)
class Policy:
    """What is done when ranks end or hang."""

    retries: int = 0
    """Restarts in a row without a new step."""
    faults: bool = False
    """Whether a rank's own fault leads to a restart, too."""
    watchdog: float = -1.0
    """Seconds a rank may be silent; 0: learnt from its steps; -1: for ever."""
    grids: tuple[tuple[str, int], ...] = ()
    """Name and number of ranks of each grid that may be taken; the first is the one asked for."""


@dataclass(frozen=True)
class End:
    """How an attempt ended."""

    kind: Kind
    code: int
    message: str = ""
    """What people are told."""
    rank: int = -1
    """The rank it began with."""
    step: int = -1
    """The step that was reached."""
    secondary: bool = False
    """Whether it only followed from the end of ranks elsewhere."""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended."""

    rank: int
    code: int
    """Negative: the signal that killed it."""
    beat: Beat
    report: dict[str, Any] | None = None
    """What it left: message, code, secondary, time."""
    noticed: float = 0.0
    """When its end was noticed (seconds since 1970)."""
    slain: bool = False
    """Whether it was ended because of another rank."""
    stack: str = ""
    """Where it crashed, if it could say so."""

    @property
    def is_done(self) -> bool:
        """Whether it had done its work well when it ended, or was ended."""
        return self.beat.section == DONE and self.code <= 0 and self.report is None

    def causes(self, *, told: bool) -> Iterator[tuple[bool, float, End]]:
        """Whether it only followed from another rank's end, when, and the end it makes."""
        at = f" at step {self.beat.step}" if self.beat.step >= 0 else " before its first step"
        if self.report is not None:
            code, text = int(self.report["code"]), str(self.report["message"])
            kind: Kind = "fault" if code == INTERNAL else "error"
            when = float(self.report["time"])
            yield bool(self.report["secondary"]), when, self._end(kind, code, text)
        elif self.slain or (told and -self.code in STOPS):
            return
        elif self.code < 0:
            own = -self.code in FAULTS
            text = f"Rank {self.rank} was killed by signal {-self.code} ({_name(-self.code)}){at}."
            text += " Memory may have run out." if self.code == -signal.SIGKILL else ""
            text += f"\n{self.stack}" if own and self.stack else ""
            when = self.noticed - (0.0 if own else SLACK_SECONDS)
            yield False, when, self._end("fault" if own else "lost", LOST, text)
        elif self.code == 0 and self.beat.section != DONE:
            text = f"Rank {self.rank} ended with exit code 0{at}, before the run was over."
            yield False, self.noticed - SLACK_SECONDS, self._end("fault", LOST, text)
        elif self.code not in (0, STOPPED):
            text = f"Rank {self.rank} ended with exit code {self.code}{at} and left no message."
            over = self.beat.section == DONE
            yield False, self.noticed, self._end("error", self.code, "" if over else text)

    def _end(self, kind: Kind, code: int, text: str) -> End:
        return End(kind, code, text, self.rank, self.beat.step)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"


def judged(outcomes: Sequence[Outcome], *, told: bool) -> End:
    """How an attempt ended, by how its ranks did; told: the launcher was asked to stop.

    The rank that ended first, and of its own accord, counts: the others only lost it.
    """
    step = max(outcome.beat.step for outcome in outcomes)
    if all(outcome.is_done for outcome in outcomes):
        return End("done", 0, step=step)  # whatever came after their work was done
    causes = [cause for outcome in outcomes for cause in outcome.causes(told=told)]
    stopping = told or any(o.code == STOPPED and o.report is None for o in outcomes)
    if causes:
        secondary, _, end = min(causes, key=lambda cause: cause[:2])
        if not (stopping and secondary):
            kind = "error" if stopping and end.kind == "lost" else end.kind
            return End(kind, end.code, end.message, end.rank, step, secondary)
    if stopping:
        return End("stopped", STOPPED, BEFORE if step < 0 else "", step=step)
    if any(outcome.slain for outcome in outcomes):
        return End("lost", LOST, "Ranks elsewhere were lost.", step=step, secondary=True)
    return End("done", 0, step=step)


@dataclass(frozen=True)
class Next:
    """What follows an attempt."""

    again: bool
    message: str
    code: int = 0
    """The exit code if nothing follows."""


@dataclass
class History:
    """The attempts of a run so far."""

    policy: Policy
    grid: int = 0
    """Which grid is taken."""
    best: int = -1
    """The highest step that any attempt reached."""
    idle: int = 0
    """Restarts in a row that did not get further."""
    blamed: list[int] = field(default_factory=list)
    """The ranks with which the attempts since the last progress ended."""
    spare: int | None = None
    """The rank of the grid before that always failed: its device is left out."""
    failures: tuple[Failure, ...] = ()

    def after(self, end: End) -> Next:
        """Whether all ranks are started again, and what people are told."""
        again = end.kind == "lost" or (end.kind == "fault" and self.policy.faults)
        if not again or not self.policy.retries:
            more = " All ranks were ended." if end.kind == "lost" else ""
            return Next(False, end.message + more, end.code)
        self._note(end)
        if self.idle == self.policy.retries:
            return self._smaller(end)
        self.idle += 1
        return Next(
            True,
            f"{end.message} Starting all ranks again from the newest checkpoint ({self.idle} of "
            f"{self.policy.retries} without a new step).",
        )

    def without(self, end: End, left: int) -> Next:
        """What follows when nodes are gone for good; left: ranks on the others."""
        self._note(end)
        grids = self.policy.grids
        fits = grids[self.grid][1] <= left
        grid = self.grid if fits else largest([world for _, world in grids], left)
        if grid is None or not self.policy.retries:
            rule = f"{left} rank(s) are left. No grid of launch.grids fits, or launch.retries=0."
            return Next(False, f"{end.message} {rule} Name a smaller grid.", LOST)
        self.grid, self.idle, self.blamed = grid, 0, []
        name, world = grids[grid]
        return Next(True, f"{end.message} Going on with the grid {name} on {world} rank(s).")

    def _note(self, end: End) -> None:
        """Remember how an attempt ended."""
        if end.step > self.best:
            self.best, self.idle, self.blamed = end.step, 0, []
        self.blamed.append(end.rank)
        why = end.message.splitlines()[0]
        failure = Failure(len(self.failures), end.step, why, self.policy.grids[self.grid][0])
        self.failures = (*self.failures, failure)

    def _smaller(self, end: End) -> Next:
        """Go on with a smaller grid, or give up."""
        grids = self.policy.grids
        grid = largest([world for _, world in grids], grids[self.grid][1] - 1)
        where = f"step {self.best}" if self.best >= 0 else "the start"
        stuck = f"{end.message} {self.idle} restarts in a row got no further than {where}."
        if grid is None:
            remedy = "Mend the cause, or name a smaller grid in launch.grids."
            return Next(False, f"{stuck} Another would not either. {remedy}", NO_PROGRESS)
        self.spare = self.blamed[0] if len({*self.blamed}) == 1 else None
        self.grid, self.idle, self.blamed = grid, 0, []
        name, world = grids[grid]
        return Next(True, f"{stuck} Going on with the grid {name} on {world} rank(s).")


def largest(worlds: Sequence[int], left: int) -> int | None:
    """Which of the grids needs most ranks of those that are left; None if none fits."""
    fits = [grid for grid, world in enumerate(worlds) if 0 < world <= left]
    return max(fits, key=lambda grid: (worlds[grid], -grid), default=None)
