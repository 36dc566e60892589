"""Several processes: results in order, what is kept stays, errors come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from ranvier.errors import RanvierError
from ranvier.planner.worker_pool import open_worker_pool


class Kept:
    """Counts its calls, as something that keeps results would."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, item: int) -> tuple[int, int, int]:
        if item < 0:
            raise ValueError(f"{item} is below 0")
        self.calls += 1
        return item, os.getpid(), self.calls


@pytest.mark.parametrize("workers", [1, 2])
def test_results_are_in_order_and_processes_stay(workers: int) -> None:
    items = [*range(25)]
    with open_worker_pool({"one": Kept()}, workers) as mapped:
        found = [mapped("one", items), mapped("one", items)]
        assert mapped("one", []) == []
    assert [item for item, _, _ in found[0]] == items == [item for item, _, _ in found[1]]
    here = {pid for some in found for _, pid, _ in some}
    assert len(here) == workers and (os.getpid() in here) == (workers == 1)
    most = {pid: max(n for some in found for _, p, n in some if p == pid) for pid in here}
    assert sum(most.values()) == 50, "each process goes on counting in the second call"


class OddError(Exception):
    """An error that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("odd")
        self.lock = threading.Lock()


def odd(_: int) -> None:
    raise OddError


def dies(item: int) -> int:
    if item == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def test_errors_that_cannot_travel_are_told() -> None:
    with (
        pytest.raises(RuntimeError, match="OddError: odd"),
        open_worker_pool({"one": odd}, 2) as mapped,
    ):
        mapped("one", [1, 2])


def test_a_process_that_dies_is_no_endless_wait() -> None:
    with (
        pytest.raises(RanvierError, match="exit code -9"),
        open_worker_pool({"one": dies}, 2) as mapped,
    ):
        mapped("one", [*range(8)])


@pytest.mark.full
def test_no_process_outlives_its_parent() -> None:
    """Killed, it says nothing; they see that their pipe is closed."""
    code = (
        "import os, signal; from ranvier.planner.worker_pool import open_worker_pool\n"
        "with open_worker_pool({'one': lambda _: os.getpid()}, 2) as mapped:\n"
        "    print(*{*mapped('one', [*range(64)])}, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=60)
    pids = [int(word) for word in out.stdout.split()]
    assert out.returncode == -signal.SIGKILL and pids
    end = time.monotonic() + 30.0
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.parametrize("workers", [1, 2])
def test_errors_come_back(workers: int) -> None:
    with (
        pytest.raises(ValueError, match="-3 is below 0"),
        open_worker_pool({"one": Kept()}, workers) as mapped,
    ):
        mapped("one", [1, 2, -3, 4])
