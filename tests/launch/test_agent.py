"""Ranks that end, hang or are told to stop, and what their launcher makes of it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ranvier import launch
from ranvier.errors import CommunicationError, DataError
from ranvier.launch import GracefulStop, Heartbeat, ProcessInfo, RestartPolicy
from ranvier.launch.signals import STOP_SIGNALS

PAIR = (("data=2", 2),)
FAST = ("torch",)
SOON = 25.0
"""Seconds after which a busy machine has ended ranks, and before which no rank ends by itself."""


def _first_attempt(action: Callable[[], object], me: ProcessInfo) -> int:
    """Rank 1 does something at step 4 of the first attempt; rank 0 loses it."""
    pulse = Heartbeat(me.heartbeat_file)
    pulse.begin_section("step", 4 + me.attempt)
    if me.attempt == 0:
        if me.rank == 1:
            action()
        time.sleep(0.1)
        raise CommunicationError("It lost a peer.")
    return 0


def _always(me: ProcessInfo) -> int:
    """Rank 1 of two dies at the same step each time; alone, rank 0 is well."""
    Heartbeat(me.heartbeat_file).begin_section("step", 4)
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if me.world_size > 1:
        raise CommunicationError("It lost a peer.")
    return 0


def _raise(kind: type[Exception]) -> None:
    raise kind("words of rank 1")


def kill(number: int) -> Callable[[], object]:
    return partial(_kill, number)


def _kill(number: int) -> None:
    os.kill(os.getpid(), number)


def run(action: Callable[[], object], **policy: object) -> int:
    return launch.launch_ranks(
        2,
        partial(_first_attempt, action),
        preload=FAST,
        policy=RestartPolicy(grids=PAIR, **policy),  # type: ignore[arg-type]
    )


def test_a_killed_rank_is_started_again_with_all_others(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(kill(signal.SIGKILL), max_restarts=3) == 0
    assert capfd.readouterr().err == (
        "Rank 1 was killed by signal 9 (SIGKILL) at step 4. The host may be out of memory. "
        "Restarting all ranks from the latest checkpoint (1 of 3 without a new step).\n"
    )
    assert run(kill(signal.SIGKILL)) == 71
    assert "The host may be out of memory. All ranks were stopped." in capfd.readouterr().err


def test_a_fault_of_a_rank_ends_the_run_unless_asked_otherwise(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run(kill(signal.SIGSEGV), max_restarts=3) == 71
    text = capfd.readouterr().err
    assert text.startswith("Rank 1 was killed by signal 11 (SIGSEGV) at step 4.")
    assert "in _kill" in text, "where it was"
    assert run(partial(_raise, RuntimeError), max_restarts=3) == 70
    text = capfd.readouterr().err
    assert text.startswith("rank 1: Traceback") and "words of rank 1" in text
    assert "It lost a peer" not in text
    assert run(partial(_raise, RuntimeError), max_restarts=3, restart_on_error=True) == 0


def test_mistakes_and_silent_ends_are_not_tried_again(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(partial(_raise, DataError), max_restarts=3, restart_on_error=True) == 65
    assert "rank 1: DataError: words of rank 1" in capfd.readouterr().err
    assert run(partial(os._exit, 0), max_restarts=3) == 71
    assert "Rank 1 exited with code 0 at step 4, before the run" in capfd.readouterr().err


def _late_end(me: ProcessInfo) -> int:
    """A task without steps, in which rank 0 has more to do than rank 1."""
    time.sleep(2.2 * (me.rank == 0))
    return 1


@pytest.mark.full
def test_a_rank_may_end_before_the_others() -> None:
    assert launch.launch_ranks(2, _late_end, preload=FAST) == 1


def test_a_crash_loop_ends_or_goes_on_smaller(capfd: pytest.CaptureFixture[str]) -> None:
    policy = RestartPolicy(max_restarts=2, grids=PAIR)
    assert launch.launch_ranks(2, _always, preload=FAST, policy=policy) == 93
    text = capfd.readouterr().err
    assert text.count("Restarting all ranks") == 2 and "no progress beyond step 4" in text
    policy = RestartPolicy(max_restarts=1, grids=(*PAIR, ("data=1", 1)))
    assert launch.launch_ranks(2, _always, preload=FAST, policy=policy) == 0
    assert "Continuing on the grid data=1 with 1 rank(s)" in capfd.readouterr().err


def _waiting(folder: Path, me: ProcessInfo) -> int:
    """At its start for a long time; rank 0 is deaf as in C++."""
    if me.rank == 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    (folder / str(me.rank)).touch()
    time.sleep(60)
    return 0


def test_others_are_ended_soon_after_a_rank_is_killed_at_the_start(
    capfd: pytest.CaptureFixture[str],
) -> None:
    start, ends = time.monotonic(), list[tuple[int, str]]()

    def ended(code: int, message: str) -> None:
        ends.append((code, message))

    policy = RestartPolicy(grids=PAIR)
    assert launch.launch_ranks(2, _dead_at_start, preload=FAST, policy=policy, ended=ended) == 71
    assert time.monotonic() - start < SOON
    assert "(SIGKILL) before its first step" in capfd.readouterr().err
    assert [code for code, _ in ends] == [71] and "Rank 1 was killed" in ends[0][1]


def _dead_at_start(me: ProcessInfo) -> int:
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    return 0


def _stepping(folder: Path, heed: bool, me: ProcessInfo) -> int:
    """Takes steps until told to stop; heed: and then stops."""
    pulse = Heartbeat(me.heartbeat_file)
    with GracefulStop(quiet=True, patient=True) as stop:
        for step in range(1000):
            pulse.begin_section("step", step)
            (folder / str(me.rank)).touch()
            time.sleep(0.05)
            if stop.signal and heed:
                return 75
    return 0


def told(folder: Path, task: Callable[[ProcessInfo], int], *numbers: int) -> tuple[int, float]:
    """Exit code and seconds after the last of signals to the launcher."""
    sent: list[float] = []

    def tell() -> None:
        while not all((folder / str(rank)).exists() for rank in range(2)):
            time.sleep(0.02)
        for number in numbers:
            os.kill(os.getpid(), number)
            sent.append(time.monotonic())
            time.sleep(0.3)

    thread = threading.Thread(target=tell)
    thread.start()
    code = launch.launch_ranks(
        2, task, preload=FAST, policy=RestartPolicy(max_restarts=3, grids=PAIR)
    )
    seconds = time.monotonic() - sent[-1]
    thread.join()
    return code, seconds


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_to_the_launcher_stops_all_ranks(tmp_path: Path, number: int) -> None:
    code, seconds = told(tmp_path, partial(_stepping, tmp_path, True), number)
    assert code == 75 and seconds < SOON


def test_a_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        folder = tmp_path / str(code)
        folder.mkdir()
        end, seconds = told(folder, partial(_stepping, folder, False), number, number)
        assert end == code and seconds < SOON


def test_a_signal_before_the_first_step_ends_all_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, seconds = told(tmp_path, partial(_waiting, tmp_path), signal.SIGTERM)
    assert code == 75 and seconds < SOON
    assert capfd.readouterr().err == "Stopped before the first step. There was nothing to save.\n"


def _silent(action: Callable[[], object], seconds: float, me: ProcessInfo) -> int:
    """Rank 1 is silent at step 2 for some time, then all take steps again."""
    pulse = Heartbeat(me.heartbeat_file)
    for step in range(3):
        pulse.begin_section("step", step)
        pulse.record_collective(step, "all_reduce over data of 8 bytes at here")
        time.sleep(0.02)
    if me.rank == 1:
        pulse.record_collective(2, "barrier")
        action()
    pulse.record_collective(3, "all_gather over data of 16 bytes at there")
    time.sleep(seconds)
    return 0


def _hold_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(60)


def _pause(seconds: float) -> None:
    """Be stopped from outside for a while."""
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_rank_that_is_stopped_for_ever_is_a_hang(capfd: pytest.CaptureFixture[str]) -> None:
    start, policy = (
        time.monotonic(),
        RestartPolicy(max_restarts=3, watchdog_seconds=1.5, grids=PAIR),
    )
    task = partial(_silent, kill(signal.SIGSTOP), 60.0)
    assert launch.launch_ranks(2, task, preload=FAST, policy=policy) == 72
    assert time.monotonic() - start < SOON
    text = capfd.readouterr().err
    assert "HangError: Rank 1 has made no progress" in text and "stopped by SIGSTOP" in text
    assert "rank 0: section step, step 2, operation 3: all_gather over data" in text
    assert "in _silent" in text, "the stack of the rank that can answer"
    assert "rank 1: section step, step 2, operation 2: barrier" in text and "(state T)" in text


@pytest.mark.full
def test_a_rank_that_holds_its_interpreter_is_a_hang(capfd: pytest.CaptureFixture[str]) -> None:
    policy = RestartPolicy(watchdog_seconds=1.5, grids=PAIR)
    task = partial(_silent, _hold_the_interpreter, 60.0)
    assert launch.launch_ranks(2, task, preload=FAST, policy=policy) == 72
    text = capfd.readouterr().err
    assert "HangError: Rank 1" in text and "in _hold_the_interpreter" in text


@pytest.mark.full
def test_a_rank_that_lags_is_named_once(capfd: pytest.CaptureFixture[str]) -> None:
    policy = RestartPolicy(watchdog_seconds=6.0, grids=PAIR)
    task = partial(_silent, partial(_pause, 2.8), 0.0)
    assert launch.launch_ranks(2, partial(_late, task), preload=FAST, policy=policy) == 0
    text = capfd.readouterr().err
    assert text.count("is slow") == 1 and "Rank 1 is slow: no progress for" in text


def _late(task: Callable[[ProcessInfo], int], me: ProcessInfo) -> int:
    code = task(me)
    time.sleep(3.2 * (me.rank == 0))  # rank 0 waits for rank 1
    return code


ALONE = """
import time
from ranvier import launch

pulse = launch.Heartbeat()
pulse.begin_section("step", 5)
with launch.watch_for_hangs(pulse, 3, 0.5):
    time.sleep(20)
"""


def test_ranks_watch_themselves_where_no_launcher_does() -> None:
    end = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True)
    assert end.returncode == 72
    assert "HangError: Rank 3" in end.stderr and "step 5" in end.stderr
    assert "most recent call first" in end.stderr


MEETING = """
import sys
from ranvier import launch

with launch.report_errors(launch.ProcessInfo(1, 2)):
    print("waiting", flush=True)
    me = launch.ProcessInfo(1, 2, port=int(sys.argv[1]), launcher="srun")
    launch.init_process_group(me, backend="gloo")
"""


@pytest.mark.full
def test_a_rank_of_another_launcher_stops_while_it_waits_for_others() -> None:
    words = [sys.executable, "-c", MEETING, str(launch.find_free_port())]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=quiet, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "waiting\n"
        time.sleep(3.0)  # it is in C++ now
        process.send_signal(signal.SIGUSR2)
        assert process.wait(timeout=60) == 75


DEAF = """
import hashlib
from ranvier import launch

with launch.report_errors(launch.ProcessInfo()), launch.GracefulStop():
    print("busy", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**27)  # a minute in C, which hears no signals
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_ends_a_rank_alone_even_in_a_long_operation(number: int, code: int) -> None:
    words = [sys.executable, "-c", DEAF]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=quiet, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "busy\n"
        for _ in range(2):
            time.sleep(0.3)
            process.send_signal(number)
        start = time.monotonic()
        assert process.wait(timeout=60) == code and time.monotonic() - start < SOON


def test_a_signal_to_a_command_that_has_just_begun() -> None:
    early = "import os, sys; sys.argv = ['', 'train']; import ranvier.__main__ as m; "
    early += "m.launch.read_process_info = lambda: os.kill(os.getpid(), 15); m.main()"
    end = subprocess.run([sys.executable, "-c", early], capture_output=True, text=True)
    assert end.returncode == 75 and end.stderr.startswith("Stopped before the first step.")
