"""Restarts: how an attempt ended, and what follows from it. Pure functions, without processes.

What came from outside (a rank was killed) is worth another try; what a rank did itself would happen
again. Tries that get no further are counted: then a smaller grid is taken, or the run gives up.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ranvier.errors import (
    INTERNAL_EXIT_CODE,
    NO_PROGRESS_EXIT_CODE,
    STOPPED_EXIT_CODE,
    CommunicationError,
)
from ranvier.launch.environment import Failure
from ranvier.launch.heartbeat import DONE, HeartbeatState
from ranvier.launch.signals import NOTHING_SAVED_MESSAGE, STOP_SIGNALS

FAULT_SIGNALS = (
    *(signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGBUS, signal.SIGILL),
    *(signal.SIGTRAP, signal.SIGSYS),
)
"""Signals that a process brings on itself."""
LOST_EXIT_CODE = CommunicationError.exit_code
NOTICE_DELAY_SECONDS = 0.5
"""A death is noticed so much later than what other ranks report of it."""
ResultKind = Literal["done", "stopped", "lost", "fault", "error", "hang"]


@dataclass(frozen=True)
class RestartPolicy:
    """What is done when ranks end or hang."""

    max_restarts: int = 0
    """Restarts in a row without a new step."""
    restart_on_error: bool = False
    """Whether a rank's own fault leads to a restart, too."""
    watchdog_seconds: float = -1.0
    """Seconds a rank may be silent; 0: learnt from its steps; -1: for ever."""
    grids: tuple[tuple[str, int], ...] = ()
    """Name and number of ranks of each grid that may be taken; the first is the one asked for."""


@dataclass(frozen=True)
class AttemptResult:
    """How an attempt ended."""

    kind: ResultKind
    exit_code: int
    message: str = ""
    """What people are told."""
    rank: int = -1
    """The rank it began with."""
    step: int = -1
    """The step that was reached."""
    is_secondary: bool = False
    """Whether it only followed from the end of ranks elsewhere."""


@dataclass(frozen=True)
class RankOutcome:
    """How one rank ended."""

    rank: int
    exit_code: int
    """Negative: the signal that killed it."""
    heartbeat: HeartbeatState
    report: dict[str, Any] | None = None
    """What it left: message, code, secondary, time."""
    notice_time: float = 0.0
    """When its end was noticed (seconds since 1970)."""
    was_killed: bool = False
    """Whether it was ended because of another rank."""
    stack: str = ""
    """Where it crashed, if it could say so."""

    @property
    def is_done(self) -> bool:
        """Whether it had done its work well when it ended, or was ended."""
        return self.heartbeat.section == DONE and self.exit_code <= 0 and self.report is None

    def possible_causes(self, *, told: bool) -> Iterator[tuple[bool, float, AttemptResult]]:
        """Whether it only followed from another rank's end, when, and the end it makes."""
        if self.heartbeat.step >= 0:
            at = f" at step {self.heartbeat.step}"
        else:
            at = " before its first step"
        if self.report is not None:
            code = int(self.report["code"])
            text = str(self.report["message"])
            kind: ResultKind = "fault" if code == INTERNAL_EXIT_CODE else "error"
            when = float(self.report["time"])
            yield bool(self.report["secondary"]), when, self._attempt_result(kind, code, text)
        elif self.was_killed or (told and -self.exit_code in STOP_SIGNALS):
            return
        elif self.exit_code < 0:
            own = -self.exit_code in FAULT_SIGNALS
            text = (
                f"Rank {self.rank} was killed by signal {-self.exit_code} "
                f"({_signal_name(-self.exit_code)}){at}."
            )
            text += " Memory may have run out." if self.exit_code == -signal.SIGKILL else ""
            text += f"\n{self.stack}" if own and self.stack else ""
            when = self.notice_time - (0.0 if own else NOTICE_DELAY_SECONDS)
            yield (
                False,
                when,
                self._attempt_result("fault" if own else "lost", LOST_EXIT_CODE, text),
            )
        elif self.exit_code == 0 and self.heartbeat.section != DONE:
            text = f"Rank {self.rank} ended with exit code 0{at}, before the run was over."
            yield (
                False,
                self.notice_time - NOTICE_DELAY_SECONDS,
                self._attempt_result("fault", LOST_EXIT_CODE, text),
            )
        elif self.exit_code not in (0, STOPPED_EXIT_CODE):
            text = (
                f"Rank {self.rank} ended with exit code {self.exit_code}{at} and left no message."
            )
            over = self.heartbeat.section == DONE
            yield (
                False,
                self.notice_time,
                self._attempt_result("error", self.exit_code, "" if over else text),
            )

    def _attempt_result(self, kind: ResultKind, code: int, text: str) -> AttemptResult:
        return AttemptResult(kind, code, text, self.rank, self.heartbeat.step)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"


def judge_attempt(outcomes: Sequence[RankOutcome], *, told: bool) -> AttemptResult:
    """How an attempt ended, by how its ranks did; told: the launcher was asked to stop.

    The rank that ended first, and of its own accord, counts: the others only lost it.
    """
    step = max(outcome.heartbeat.step for outcome in outcomes)
    if all(outcome.is_done for outcome in outcomes):
        return AttemptResult("done", 0, step=step)  # whatever came after their work was done
    causes = [cause for outcome in outcomes for cause in outcome.possible_causes(told=told)]
    stopping = told or any(o.exit_code == STOPPED_EXIT_CODE and o.report is None for o in outcomes)
    if causes:
        secondary, _, end = min(causes, key=lambda cause: cause[:2])
        if not (stopping and secondary):
            kind = "error" if stopping and end.kind == "lost" else end.kind
            return AttemptResult(kind, end.exit_code, end.message, end.rank, step, secondary)
    if stopping:
        return AttemptResult(
            "stopped", STOPPED_EXIT_CODE, NOTHING_SAVED_MESSAGE if step < 0 else "", step=step
        )
    if any(outcome.was_killed for outcome in outcomes):
        return AttemptResult(
            "lost", LOST_EXIT_CODE, "Ranks elsewhere were lost.", step=step, is_secondary=True
        )
    return AttemptResult("done", 0, step=step)


@dataclass(frozen=True)
class Decision:
    """What follows an attempt."""

    restart: bool
    message: str
    exit_code: int = 0
    """The exit code if nothing follows."""


@dataclass
class RestartHistory:
    """The attempts of a run so far."""

    policy: RestartPolicy
    grid_index: int = 0
    """Which grid is taken."""
    best_step: int = -1
    """The highest step that any attempt reached."""
    idle_restarts: int = 0
    """Restarts in a row that did not get further."""
    blamed_ranks: list[int] = field(default_factory=list)
    """The ranks with which the attempts since the last progress ended."""
    excluded_rank: int | None = None
    """The rank of the grid before that always failed: its device is left out."""
    failures: tuple[Failure, ...] = ()

    def decide_after(self, end: AttemptResult) -> Decision:
        """Whether all ranks are started again, and what people are told."""
        again = end.kind == "lost" or (end.kind == "fault" and self.policy.restart_on_error)
        if not again or not self.policy.max_restarts:
            if end.kind == "lost":
                more = " All ranks were ended."
            else:
                more = ""
            return Decision(False, end.message + more, end.exit_code)
        self._record_failure(end)
        if self.idle_restarts == self.policy.max_restarts:
            return self._shrink_grid(end)
        self.idle_restarts += 1
        return Decision(
            True,
            f"{end.message} Starting all ranks again from the newest checkpoint "
            f"({self.idle_restarts} of "
            f"{self.policy.max_restarts} without a new step).",
        )

    def decide_without_nodes(self, end: AttemptResult, left: int) -> Decision:
        """What follows when nodes are gone for good; left: ranks on the others."""
        self._record_failure(end)
        grids = self.policy.grids
        fits = grids[self.grid_index][1] <= left
        grid = (
            self.grid_index if fits else largest_fitting_grid([world for _, world in grids], left)
        )
        if grid is None or not self.policy.max_restarts:
            rule = f"{left} rank(s) are left. No grid of launch.grids fits, or launch.retries=0."
            return Decision(False, f"{end.message} {rule} Name a smaller grid.", LOST_EXIT_CODE)
        self.grid_index = grid
        self.idle_restarts = 0
        self.blamed_ranks = []
        name, world = grids[grid]
        return Decision(True, f"{end.message} Going on with the grid {name} on {world} rank(s).")

    def _record_failure(self, end: AttemptResult) -> None:
        """Remember how an attempt ended."""
        if end.step > self.best_step:
            self.best_step = end.step
            self.idle_restarts = 0
            self.blamed_ranks = []
        self.blamed_ranks.append(end.rank)
        why = end.message.splitlines()[0]
        failure = Failure(len(self.failures), end.step, why, self.policy.grids[self.grid_index][0])
        self.failures = (*self.failures, failure)

    def _shrink_grid(self, end: AttemptResult) -> Decision:
        """Go on with a smaller grid, or give up."""
        grids = self.policy.grids
        grid = largest_fitting_grid([world for _, world in grids], grids[self.grid_index][1] - 1)
        if self.best_step >= 0:
            where = f"step {self.best_step}"
        else:
            where = "the start"
        stuck = f"{end.message} {self.idle_restarts} restarts in a row got no further than {where}."
        if grid is None:
            remedy = "Mend the cause, or name a smaller grid in launch.grids."
            return Decision(
                False, f"{stuck} Another would not either. {remedy}", NO_PROGRESS_EXIT_CODE
            )
        if len({*self.blamed_ranks}) == 1:
            self.excluded_rank = self.blamed_ranks[0]
        else:
            self.excluded_rank = None
        self.grid_index = grid
        self.idle_restarts = 0
        self.blamed_ranks = []
        name, world = grids[grid]
        return Decision(True, f"{stuck} Going on with the grid {name} on {world} rank(s).")


def largest_fitting_grid(worlds: Sequence[int], left: int) -> int | None:
    """Which of the grids needs most ranks of those that are left; None if none fits."""
    fits = [grid for grid, world in enumerate(worlds) if 0 < world <= left]
    return max(fits, key=lambda grid: (worlds[grid], -grid), default=None)
