"""Watchdog: how long a rank may take without progress, which rank blocks the others, and their
stacks.

Limits are derived from the steps of the run. The agent monitors from outside, so it also notices a
rank that is stopped or whose interpreter is stuck. Ranks of other launchers monitor themselves with
a thread, which notices neither.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ranvier.errors import HangError
from ranvier.launch.heartbeat import DONE, START, STEP, Heartbeat, HeartbeatState
from ranvier.launch.shared_file import SharedFile
from ranvier.system.terminal import print

START_SECONDS = 600.0
"""Limit before the first steps, in an evaluation, or after the last step."""
CHECKPOINT_SECONDS = 420.0
SLOWEST_STEP_FACTOR = 2.0
MARGIN_SECONDS = 30.0
"""Limit of a step: factor · slowest recent step + margin."""
DUMP_SIGNAL = signal.SIGQUIT
"""Signal at which a rank dumps its stacks."""
STACK_LINES = 60
"""Maximum number of lines shown of a rank's stacks."""


def silence_limit(beat: HeartbeatState, seconds: float) -> float:
    """Return how long a rank may stay in its section; seconds: see `RestartPolicy`."""
    if seconds < 0.0 or beat.section == DONE:
        return math.inf
    # The start (imports, compilation, loading) is not limited by a value meant for steps.
    if seconds > 0.0 and beat.section != START:
        return seconds
    if beat.section == STEP and beat.slowest_step_seconds > 0.0:
        return SLOWEST_STEP_FACTOR * beat.slowest_step_seconds + MARGIN_SECONDS
    if beat.section == "checkpoint":
        usual = CHECKPOINT_SECONDS
    else:
        usual = START_SECONDS
    return max(usual, seconds)


def warning_limit(beat: HeartbeatState, seconds: float) -> float:
    """Return how long a rank may stay in its section before a warning is printed."""
    return max(silence_limit(beat, seconds) / 4.0, 1.5 * beat.slowest_step_seconds + 1.0)


def process_state(pid: int | None) -> str:
    """Return the kernel's state letter of a process (T: stopped); empty if unknown."""
    # The name of the process, in parentheses, may contain spaces, so split after it.
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def find_slowest_rank(beats: Sequence[HeartbeatState], states: Sequence[str]) -> int:
    """Returns the rank that the others wait for: stopped, else fewest steps, then fewest
    collectives."""
    order = [
        (s != "T", b.step, b.num_collectives, b.begin_time)
        for b, s in zip(beats, states, strict=True)
    ]
    return min(range(len(beats)), key=lambda i: order[i])


class Watchdog:
    """Measures the time without progress; time in which it was suspended itself does not count."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._counts_since = self._last_look = time.monotonic()

    def silence_seconds(self, beats: Sequence[HeartbeatState]) -> list[float]:
        """Returns the seconds that each rank has been in its section, as far as observed."""
        now = time.monotonic()
        # This process was suspended, perhaps with all ranks, so start counting again.
        if now - self._last_look > 5.0:
            self._counts_since = now
        self._last_look = now
        return [now - max(beat.begin_time, self._counts_since) for beat in beats]

    def is_over_limit(
        self,
        beats: Sequence[HeartbeatState],
        most: Callable[[HeartbeatState, float], float] = silence_limit,
    ) -> bool:
        """Whether a rank has been in its section for too long."""
        ages = self.silence_seconds(beats)
        return any(age > most(b, self.seconds) for age, b in zip(ages, beats, strict=True))


def register_stack_dump(path: str | SharedFile) -> None:
    """Makes this rank write its stacks into a file at DUMP_SIGNAL, or when it crashes."""
    where = Path(path)
    # faulthandler uses the descriptor, so the file stays open as long as the process lives.
    file = where.open("w")
    faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True)
    faulthandler.enable(file=file)


def collect_stacks(pids: Sequence[int | None], paths: Sequence[str | SharedFile]) -> list[str]:
    """Returns the stacks of all ranks; empty for a rank that is stopped or does not respond."""
    for pid in pids:
        if pid is not None and process_state(pid) not in ("", "T", "Z"):
            with contextlib.suppress(OSError):
                os.kill(pid, DUMP_SIGNAL)
    # Time for the signal handlers to write.
    time.sleep(0.5)
    return [read_stack(path) for path in paths]


def read_stack(path: str | SharedFile) -> str:
    """Return the stacks that a rank has written, main thread first; empty if there are none."""
    with contextlib.suppress(OSError):
        blocks = Path(path).read_text(errors="replace").strip().split("\n\n")
        blocks = [block for block in blocks if not block.startswith("Extension modules")]
        blocks.sort(key=lambda block: not block.startswith(("Fatal", "Current")))
        lines = "\n".join(blocks).splitlines()
        return "\n".join(f"    {line}" for line in lines[:STACK_LINES])
    return ""


def describe_hang(
    ranks: Sequence[int],
    beats: Sequence[HeartbeatState],
    states: Sequence[str],
    texts: Sequence[str],
    seconds: float,
) -> str:
    """Return the message of a hang: which rank blocks the others, and where each is."""
    worst = find_slowest_rank(beats, states)
    now = time.monotonic()
    beat = beats[worst]
    if states[worst] == "T":
        stopped = ", where it was stopped by SIGSTOP"
    else:
        stopped = ""
    lines = [
        f"HangError: Rank {ranks[worst]} has made no progress for {now - beat.begin_time:.0f} "
        f"s in section {beat.section} after step {beat.step}{stopped}. The limit is "
        f"{silence_limit(beat, seconds):g} s. Check its stack below, or use a larger "
        "launch.watchdog_seconds."
    ]
    for rank, one, letter, text in zip(ranks, beats, states, texts, strict=True):
        if one.num_collectives:
            did = f"operation {one.num_collectives}: {one.last_collective}"
        else:
            did = "no operation yet"
        ago = f"{now - one.begin_time:.1f} s ago"
        lines.append(f"rank {rank}: section {one.section}, step {one.step}, {did}, {ago}")
        lines.append(text or f"    no stack: it did not respond (state {letter or 'unknown'})")
    return "\n".join(lines)


@contextlib.contextmanager
def watch_for_hangs(pulse: Heartbeat, rank: int, seconds: float) -> Iterator[None]:
    """Context in which a thread prints the stacks and ends this rank when it hangs."""
    ended = threading.Event()
    eye = Watchdog(seconds)

    def look() -> None:
        while not ended.wait(1.0):
            if eye.is_over_limit([pulse.read_state()]):
                message = describe_hang(
                    [rank], [pulse.read_state()], [""], ["    its stacks follow"], seconds
                )
                print(message, file=sys.stderr, flush=True)
                faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
                os._exit(HangError.exit_code)

    threading.Thread(target=look, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
