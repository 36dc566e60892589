"""Restart policy: how an attempt ended, and what follows. Pure functions, without processes.

External causes, such as a killed rank, lead to a restart; an error of a rank itself would occur
again. After too many restarts without progress, a smaller grid is used or the run fails.
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
"""Signals that a process causes itself (crashes)."""
LOST_EXIT_CODE = CommunicationError.exit_code
NOTICE_DELAY_SECONDS = 0.5
"""Upper bound of the delay until the agent notices the end of a rank."""
ResultKind = Literal["done", "stopped", "lost", "fault", "error", "hang"]


@dataclass(frozen=True)
class RestartPolicy:
    """What happens when ranks fail or hang."""

    max_restarts: int = 0
    """Maximum number of consecutive restarts without a new step."""
    restart_on_error: bool = False
    """Whether an internal error or crash of a rank also leads to a restart."""
    watchdog_seconds: float = -1.0
    """Maximum seconds of a rank without progress. 0 derives the limit from its steps; -1 disables
    it."""
    grids: tuple[tuple[str, int], ...] = ()
    """Name and number of ranks of each grid that may be used; the first is the requested one."""


@dataclass(frozen=True)
class AttemptResult:
    """How an attempt ended."""

    kind: ResultKind
    exit_code: int
    message: str = ""
    """Message for the user."""
    rank: int = -1
    """The rank that failed first."""
    step: int = -1
    """The highest step that was reached."""
    is_secondary: bool = False
    """Whether it is only a consequence of failures on other nodes."""


@dataclass(frozen=True)
class RankOutcome:
    """How one rank ended."""

    rank: int
    exit_code: int
    """Exit code; negative for the signal that killed it."""
    heartbeat: HeartbeatState
    report: dict[str, Any] | None = None
    """Its error report, if any: message, code, secondary, time."""
    notice_time: float = 0.0
    """When its end was noticed (Unix time)."""
    was_killed: bool = False
    """Whether the agent killed it because of another rank."""
    stack: str = ""
    """Stack of a crash, if it was written."""

    @property
    def is_done(self) -> bool:
        """Whether its work was complete when it exited or was killed."""
        return self.heartbeat.section == DONE and self.exit_code <= 0 and self.report is None

    def possible_causes(self, *, told: bool) -> Iterator[tuple[bool, float, AttemptResult]]:
        """Yields (is secondary, time, result) of a failure that this rank may have caused."""
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
        # Killed by the agent, or by the forwarded signal: not a cause.
        elif self.was_killed or (told and -self.exit_code in STOP_SIGNALS):
            return
        elif self.exit_code < 0:
            own = -self.exit_code in FAULT_SIGNALS
            text = (
                f"Rank {self.rank} was killed by signal {-self.exit_code} "
                f"({_signal_name(-self.exit_code)}){at}."
            )
            text += " The host may be out of memory." if self.exit_code == -signal.SIGKILL else ""
            text += f"\n{self.stack}" if own and self.stack else ""
            # The agent notices a killed rank later than its peers report the broken connection.
            # Without the correction, their error would count as the cause.
            when = self.notice_time - (0.0 if own else NOTICE_DELAY_SECONDS)
            yield (
                False,
                when,
                self._attempt_result("fault" if own else "lost", LOST_EXIT_CODE, text),
            )
        # For example sys.exit() inside user code.
        elif self.exit_code == 0 and self.heartbeat.section != DONE:
            text = f"Rank {self.rank} exited with code 0{at}, before the run was complete."
            yield (
                False,
                self.notice_time - NOTICE_DELAY_SECONDS,
                self._attempt_result("fault", LOST_EXIT_CODE, text),
            )
        elif self.exit_code not in (0, STOPPED_EXIT_CODE):
            text = f"Rank {self.rank} exited with code {self.exit_code}{at} without a message."
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
    """Returns how an attempt ended, from its ranks' outcomes and whether a stop was requested.

    The first rank with a primary failure counts; the others only lost the connection to it.
    """
    step = max(outcome.heartbeat.step for outcome in outcomes)
    if all(outcome.is_done for outcome in outcomes):
        # Anything that happened after their work was done does not count.
        return AttemptResult("done", 0, step=step)
    causes = [cause for outcome in outcomes for cause in outcome.possible_causes(told=told)]
    stopping = told or any(o.exit_code == STOPPED_EXIT_CODE and o.report is None for o in outcomes)
    if causes:
        # Primary causes first, then the earliest.
        secondary, _, end = min(causes, key=lambda cause: cause[:2])
        # While ranks stop, broken connections to ranks that have exited are expected.
        if not (stopping and secondary):
            kind = "error" if stopping and end.kind == "lost" else end.kind
            return AttemptResult(kind, end.exit_code, end.message, end.rank, step, secondary)
    if stopping:
        return AttemptResult(
            "stopped", STOPPED_EXIT_CODE, NOTHING_SAVED_MESSAGE if step < 0 else "", step=step
        )
    if any(outcome.was_killed for outcome in outcomes):
        return AttemptResult(
            "lost", LOST_EXIT_CODE, "Ranks on other nodes were lost.", step=step, is_secondary=True
        )
    return AttemptResult("done", 0, step=step)


@dataclass(frozen=True)
class Decision:
    """What follows an attempt: a restart, or the end of the run."""

    restart: bool
    message: str
    exit_code: int = 0
    """Exit code of the run if it is not restarted."""


@dataclass
class RestartHistory:
    """The attempts of a run so far."""

    policy: RestartPolicy
    grid_index: int = 0
    """Index of the current grid in `policy.grids`."""
    best_step: int = -1
    """The highest step that any attempt reached."""
    idle_restarts: int = 0
    """Consecutive restarts without progress."""
    blamed_ranks: list[int] = field(default_factory=list)
    """The ranks that failed in the attempts since the last progress."""
    excluded_rank: int | None = None
    """Rank of the previous grid that failed each time; its device is excluded."""
    failures: tuple[Failure, ...] = ()

    def decide_after(self, end: AttemptResult) -> Decision:
        """Decide whether to restart all ranks after an attempt."""
        again = end.kind == "lost" or (end.kind == "fault" and self.policy.restart_on_error)
        if not again or not self.policy.max_restarts:
            if end.kind == "lost":
                more = " All ranks were stopped."
            else:
                more = ""
            return Decision(False, end.message + more, end.exit_code)
        self._record_failure(end)
        if self.idle_restarts == self.policy.max_restarts:
            return self._shrink_grid(end)
        self.idle_restarts += 1
        return Decision(
            True,
            f"{end.message} Restarting all ranks from the latest checkpoint "
            f"({self.idle_restarts} of {self.policy.max_restarts} without a new step).",
        )

    def decide_without_nodes(self, end: AttemptResult, left: int) -> Decision:
        """Decides what follows when nodes are lost permanently; left: ranks on the remaining
        nodes."""
        self._record_failure(end)
        grids = self.policy.grids
        fits = grids[self.grid_index][1] <= left
        grid = (
            self.grid_index if fits else largest_fitting_grid([world for _, world in grids], left)
        )
        if not self.policy.max_restarts:
            rule = (
                f"{left} rank(s) are left. launch.max_restarts=0 forbids restarts. Start the same "
                "command again to resume, or use a larger launch.max_restarts."
            )
            return Decision(False, f"{end.message} {rule}", LOST_EXIT_CODE)
        if grid is None:
            rule = (
                f"{left} rank(s) are left, too few for the plan and for every grid of "
                f"launch.fallback_grids. Add a grid of at most {left} rank(s) to "
                "launch.fallback_grids, and start the same command again."
            )
            return Decision(False, f"{end.message} {rule}", LOST_EXIT_CODE)
        self.grid_index = grid
        self.idle_restarts = 0
        self.blamed_ranks = []
        name, world = grids[grid]
        return Decision(True, f"{end.message} Continuing on the grid {name} with {world} rank(s).")

    def _record_failure(self, end: AttemptResult) -> None:
        """Record a failure; progress since the last one resets the counters."""
        if end.step > self.best_step:
            self.best_step = end.step
            self.idle_restarts = 0
            self.blamed_ranks = []
        self.blamed_ranks.append(end.rank)
        why = end.message.splitlines()[0]
        failure = Failure(len(self.failures), end.step, why, self.policy.grids[self.grid_index][0])
        self.failures = (*self.failures, failure)

    def _shrink_grid(self, end: AttemptResult) -> Decision:
        """Continues on a smaller grid, or gives up."""
        grids = self.policy.grids
        grid = largest_fitting_grid([world for _, world in grids], grids[self.grid_index][1] - 1)
        if self.best_step >= 0:
            where = f"step {self.best_step}"
        else:
            where = "the start"
        stuck = (
            f"{end.message} {self.idle_restarts} consecutive restarts made no progress beyond "
            f"{where}."
        )
        if grid is None:
            remedy = "Fix the cause, or add a smaller grid to launch.fallback_grids."
            return Decision(
                False, f"{stuck} The run is not restarted again. {remedy}", NO_PROGRESS_EXIT_CODE
            )
        # If it is always the same rank, its device is probably broken.
        if len({*self.blamed_ranks}) == 1:
            self.excluded_rank = self.blamed_ranks[0]
        else:
            self.excluded_rank = None
        self.grid_index = grid
        self.idle_restarts = 0
        self.blamed_ranks = []
        name, world = grids[grid]
        return Decision(True, f"{stuck} Continuing on the grid {name} with {world} rank(s).")


def largest_fitting_grid(worlds: Sequence[int], left: int) -> int | None:
    """Return the index of the largest grid that fits on `left` ranks; None if none fits."""
    fits = [grid for grid, world in enumerate(worlds) if 0 < world <= left]
    return max(fits, key=lambda grid: (worlds[grid], -grid), default=None)
