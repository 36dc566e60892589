"""A rank that is killed, stopped or raises inside a collective: the others end and name it.

Checked for every algorithm and transport at random moments; nothing is left behind.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from pool import Pool
from ranvier.comm import collectives
from ranvier.comm.algorithm_table import SHARED_MEMORY, AlgorithmTable
from ranvier.comm.algorithms.registry import ALGORITHMS
from ranvier.errors import CommunicationError
from ranvier.grid import Grid

RANKS = 4
LIMIT_SECONDS = 2.0
"""Time limit of a collective."""
NAMES = [*ALGORITHMS, SHARED_MEMORY, "hierarchical/bruck/shared_memory", "nvrar/shared_memory"]


class PlannedError(Exception):
    """The error of the rank that raises."""


def communicate(rank: int, name: str, folder: Path, raising: int, at: int) -> None:
    """Runs collectives without end; writes what the failure of one of them says to a file.

    raising: the rank that raises in its collective with number `at`.
    """
    grid = Grid(
        {"row": RANKS},
        connected=True,
        timeout_seconds=LIMIT_SECONDS,
        ranks_per_node=2 if "/" in name or name in ("hierarchical", "nvrar") else RANKS,
        algorithms=AlgorithmTable.parse(name),
    )
    axis = grid.axis("row")
    (folder / f"ready{rank}").touch()
    x = torch.ones(30_000 * RANKS)
    try:
        for number in range(10**9):
            if rank == raising and number == at:
                raise PlannedError
            started = [
                collectives.all_gather(x[:1000].clone(), axis),
                collectives.reduce_scatter(x, axis),
                collectives.all_reduce(x, axis),
            ]
            for one in started:
                one.wait()
    except CommunicationError as error:
        written = folder / f"partial{rank}"
        written.write_text(str(error))
        written.rename(folder / f"message{rank}")
        # As a rank of a run does.
        os._exit(70)


def lose_rank(name: str, how: str, seed: int, folder: Path) -> dict[int, str]:
    """Loses a rank at a random moment; returns what the others say."""
    chooser = random.Random(seed)
    victim = chooser.randrange(RANKS)
    pool = Pool(RANKS)
    try:
        pool.start()
        raising = victim if how == "raise" else -1
        pool._send(communicate, RANKS, (name, folder, raising, chooser.randrange(20)))
        wait_for(folder, "ready", [*range(RANKS)], 60.0)
        time.sleep(chooser.random() * 0.2)
        process = pool.workers[victim][0]
        if how != "raise":
            os.kill(process.pid or 0, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        others = [rank for rank in range(RANKS) if rank != victim]
        found = wait_for(folder, "message", others, LIMIT_SECONDS + 5.0)
        return {rank: text for rank, text in found.items() if f"rank {victim}" not in text}
    finally:
        for worker, _ in pool.workers:
            worker.kill()
        pool.stop()


def wait_for(folder: Path, kind: str, ranks: list[int], seconds: float) -> dict[int, str]:
    """The texts of ranks, which must appear within a time."""
    deadline = time.monotonic() + seconds
    while missing := [rank for rank in ranks if not (folder / f"{kind}{rank}").exists()]:
        assert time.monotonic() < deadline, f"ranks {missing} still run"
        time.sleep(0.01)
    return {rank: (folder / f"{kind}{rank}").read_text() for rank in ranks}


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(100 // len(NAMES) + 1))
@pytest.mark.parametrize("how", ["kill", "stop", "raise"])
@pytest.mark.parametrize("name", NAMES)
def test_a_lost_rank_is_named(name: str, how: str, seed: int, tmp_path: Path) -> None:
    assert lose_rank(name, how, seed, tmp_path) == {}
    assert [file for file in os.listdir("/dev/shm") if "ranvier" in file] == []


def communicate_in_pairs(rank: int, folder: Path) -> None:
    """Runs collectives of two ranks each, until a file says that a rank of another pair is lost."""
    grid = Grid({"data": 2, "row": 2}, connected=True, timeout_seconds=LIMIT_SECONDS)
    axis = grid.axis("row")
    (folder / f"ready{rank}").touch()
    x = torch.ones(30_000)
    rest = 200
    while rest:
        # Both ranks of a pair must see it at the same time.
        x[-1] = (folder / "lost").exists()
        total = collectives.all_reduce(x, axis).wait()
        rest -= bool(total[-1] > 0.0)
    (folder / f"total{rank}").write_text(f"{float(total[0])}")


def test_other_ranks_continue_after_one_is_lost(tmp_path: Path) -> None:
    pool = Pool(RANKS)
    try:
        pool.start()
        pool._send(communicate_in_pairs, RANKS, (tmp_path,))
        wait_for(tmp_path, "ready", [*range(RANKS)], 60.0)
        os.kill(pool.workers[3][0].pid or 0, signal.SIGKILL)
        (tmp_path / "lost").touch()
        assert wait_for(tmp_path, "total", [0, 1], 60.0) == {0: "2.0", 1: "2.0"}
    finally:
        for worker, _ in pool.workers:
            worker.kill()
        pool.stop()
