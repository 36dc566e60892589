"""Launchers of several nodes, here two on one machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import SMALL, call
from ranvier.cli import main
from ranvier.config.arguments import Arguments
from ranvier.errors import PlanError
from ranvier.launch import Failure, Nodes, free_port, ranks
from ranvier.launch.rendezvous import Order, laid, worst
from ranvier.launch.restart_policy import End, History, Policy

AGENT = """
import os, sys, time
from pathlib import Path
from ranvier import launch
from ranvier.errors import CommunicationError
from ranvier.launch import Nodes, Policy, Pulse, nodes, supervisor

def task(me):
    pulse = Pulse(me.pulse)
    Path(f"rank{me.rank}.{me.attempt}").write_text(str(os.getpid()))
    with launch.Stop(quiet=True, patient=True) as stop:
        for step in range(1000):
            pulse.beat("step", step)
            time.sleep(0.02)
            if stop.signal or Path("stop").exists():
                Path("stop").touch()
                return 75
            if me.world == 1 and step == 10:
                return 0
    return 1

if __name__ == "__main__":
    nodes.GONE_SECONDS, supervisor.GRACE_SECONDS = 2.0, 0.3
    where = Nodes(2, int(sys.argv[1]), sys.argv[2])
    policy = Policy(retries=3, grids=(("data=2", 2), ("data=1", 1)))
    options = {"preload": ["torch"], "policy": policy, "nodes": where}
    sys.exit(launch.start(1, task, **options, timeout_seconds=30.0))
"""


def awaited(*paths: Path) -> list[int]:
    """The processes whose numbers ranks have written."""
    limit = time.monotonic() + 60
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < limit
        time.sleep(0.02)
    return [int(path.read_text()) for path in paths]


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


Pair = tuple[Path, list["subprocess.Popen[str]"], list[int]]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """Two launchers with a rank each, which are at their steps."""
    (tmp_path / "agent.py").write_text(AGENT)
    address = f"127.0.0.1:{free_port()}"
    agents = [
        subprocess.Popen(
            [sys.executable, "agent.py", str(node), address],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    yield tmp_path, agents, awaited(tmp_path / "rank0.0", tmp_path / "rank1.0")
    for agent in agents:
        agent.kill()
        agent.communicate()


def test_a_killed_rank_starts_all_nodes_again_and_a_node_that_is_gone_is_left_out(
    pair: Pair,
) -> None:
    folder, (first, second), (_, rank) = pair
    os.kill(rank, signal.SIGKILL)
    _, rank = awaited(folder / "rank0.1", folder / "rank1.1")
    start = time.monotonic()
    second.kill()
    _, errors = first.communicate(timeout=30)
    assert first.returncode == 0 and time.monotonic() - start < 15.0
    assert "Rank 1 was killed by signal 9 (SIGKILL) at step" in errors
    assert "Starting all ranks again" in errors
    assert "Node(s) 1 gave no sign of life for 2 s. Going on with the grid data=1" in errors
    assert not alive(rank)


@pytest.mark.full
def test_a_signal_stops_all_nodes(pair: Pair) -> None:
    _, (first, second), _ = pair
    second.send_signal(signal.SIGUSR1)
    first.communicate(timeout=30)
    assert (first.returncode, second.wait(timeout=10)) == (75, 75)


@pytest.mark.full
def test_without_node_0_the_others_end(pair: Pair) -> None:
    _, (first, second), ranks = pair
    start = time.monotonic()
    first.kill()
    _, errors = second.communicate(timeout=30)
    assert second.returncode == 71 and time.monotonic() - start < 15.0
    assert "node 1: Node 0 at 127.0.0.1" in errors and "is gone" in errors
    assert not any(map(alive, ranks))


def test_nodes_are_filled_one_after_the_other() -> None:
    places = {0: [0, 1, 2], 1: [0, 2], 3: [0, 1]}
    assert laid(7, places) == {0: (0, [0, 1, 2]), 1: (3, [0, 2]), 3: (5, [0, 1])}
    assert laid(4, places) == {0: (0, [0, 1, 2]), 1: (3, [0])}
    assert laid(2, places) == {0: (0, [0, 1])}


def test_the_end_that_others_followed_from_counts() -> None:
    followed = End("error", 71, "It lost a peer.", secondary=True)
    killed, hang = End("lost", 71, "killed"), End("hang", 72, "silent")
    stopped, done = End("stopped", 75), End("done", 0)
    assert worst([followed, killed]) is killed and worst([done, done]) is done
    assert worst([followed, stopped]) is stopped and worst([followed, hang, killed]) is hang


def test_without_nodes_the_largest_grid_that_fits_is_taken() -> None:
    grids = (("data=4", 4), ("data=2", 2), ("data=3", 3))
    gone = End("lost", 71, "A node is gone.", step=5)
    history = History(Policy(retries=3, grids=grids))
    assert history.without(gone, 4).again and history.grid == 0
    assert history.without(gone, 3).again and history.grid == 2
    assert history.without(gone, 2).again and history.grid == 1
    then = history.without(gone, 1)
    assert not then.again and then.code == 71 and "1 rank(s) are left" in then.message
    assert not History(Policy(retries=0, grids=grids)).without(gone, 3).again


def test_orders_are_read_as_they_were_written() -> None:
    failure = Failure(0, 3, "Rank 1 is gone.", "data=2")
    order = Order(1, None, 0, 2, "host", 5, 1.0, {"0": 0, "1": 1}, {"0": [0], "1": [2]}, (failure,))
    assert Order.of(order.text()) == order
    for node, address in ((2, "a:1"), (-1, "a:1"), (0, "a"), (0, ":1"), (0, "a:x"), (0, "a:70000")):
        with pytest.raises(PlanError):
            Nodes(2, node, address)
    assert (Nodes(2, 1, "::1:80").host, Nodes(2, 1, "::1:80").port) == ("::1", 80)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "launch.nodes=2 with nproc=0"),
        (["--nproc", "1"], "launch.address='' is no address"),
        (["--nproc", "1", "--launch.address", "a:5", "--launch.node", "2"], "launch.node=2 is not"),
    ],
)
def test_mistakes_about_nodes_are_told(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("train", *SMALL, "--launch.nodes", "2", *words) == 64
    assert says in capsys.readouterr().err


def test_one_task_a_node_of_srun_is_a_launcher() -> None:
    slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_NODEID": "1", "SLURM_JOB_ID": "7"}
    slurm |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "node[07-08]"}
    me = ranks(slurm)
    assert me is not None
    nodes = main._nodes(Arguments(nproc=8), me)
    assert nodes == Nodes(2, 1, f"node07:{me.port}")
    assert main._nodes(Arguments(), me) is None, "each task is a rank"
    two = ranks({**slurm, "SLURM_STEP_TASKS_PER_NODE": "2"})
    assert main._nodes(Arguments(nproc=2), two) is None
