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

from commands import SMALL_OPTIONS, call
from ranvier.cli import main
from ranvier.config.arguments import RunOptions
from ranvier.errors import PlanError
from ranvier.launch import Failure, NodeInfo, find_free_port, read_process_info
from ranvier.launch.rendezvous import LaunchOrder, assign_ranks, root_cause
from ranvier.launch.restart_policy import AttemptResult, RestartHistory, RestartPolicy

AGENT = """
import os, sys, time
from pathlib import Path
from ranvier import launch
from ranvier.errors import CommunicationError
from ranvier.launch import Heartbeat, NodeInfo, RestartPolicy, agent, rendezvous

def task(me):
    pulse = Heartbeat(me.heartbeat_file)
    Path(f"rank{me.rank}.{me.attempt}").write_text(str(os.getpid()))
    with launch.GracefulStop(quiet=True, patient=True) as stop:
        for step in range(1000):
            pulse.begin_section("step", step)
            time.sleep(0.02)
            if stop.signal or Path("stop").exists():
                Path("stop").touch()
                return 75
            if me.world_size == 1 and step == 10:
                return 0
    return 1

if __name__ == "__main__":
    rendezvous.NODE_TIMEOUT_SECONDS, agent.GRACE_SECONDS = 2.0, 0.3
    where = NodeInfo(2, int(sys.argv[1]), sys.argv[2])
    policy = RestartPolicy(max_restarts=3, grids=(("data=2", 2), ("data=1", 1)))
    options = {"preload": ["torch"], "policy": policy, "nodes": where}
    sys.exit(launch.launch_ranks(1, task, **options, timeout_seconds=120.0))
"""


def awaited(*paths: Path) -> list[int]:
    """The processes whose numbers ranks have written."""
    limit = time.monotonic() + 240
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
    address = f"127.0.0.1:{find_free_port()}"
    agents = [
        subprocess.Popen(
            [sys.executable, "agent.py", str(node), address],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    try:
        yield tmp_path, agents, awaited(tmp_path / "rank0.0", tmp_path / "rank1.0")
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()


def test_a_killed_rank_starts_all_nodes_again_and_a_node_that_is_gone_is_left_out(
    pair: Pair,
) -> None:
    folder, (first, second), (_, rank) = pair
    os.kill(rank, signal.SIGKILL)
    _, rank = awaited(folder / "rank0.1", folder / "rank1.1")
    second.kill()
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 0
    assert "Rank 1 was killed by signal 9 (SIGKILL) at step" in errors
    assert "Restarting all ranks" in errors
    assert "Node(s) 1 did not respond for 2 s. Continuing on the grid data=1" in errors
    assert not alive(rank)


@pytest.mark.full
def test_a_signal_stops_all_nodes(pair: Pair) -> None:
    _, (first, second), _ = pair
    second.send_signal(signal.SIGUSR1)
    first.communicate(timeout=120)
    assert (first.returncode, second.wait(timeout=60)) == (75, 75)


@pytest.mark.full
def test_without_node_0_the_others_end(pair: Pair) -> None:
    _, (first, second), ranks = pair
    first.kill()
    _, errors = second.communicate(timeout=120)
    assert second.returncode == 71
    assert "node 1: Node 0 at 127.0.0.1" in errors and "is gone" in errors
    assert not any(map(alive, ranks))


def test_nodes_are_filled_one_after_the_other() -> None:
    places = {0: [0, 1, 2], 1: [0, 2], 3: [0, 1]}
    assert assign_ranks(7, places) == {0: (0, [0, 1, 2]), 1: (3, [0, 2]), 3: (5, [0, 1])}
    assert assign_ranks(4, places) == {0: (0, [0, 1, 2]), 1: (3, [0])}
    assert assign_ranks(2, places) == {0: (0, [0, 1])}


def test_the_end_that_others_followed_from_counts() -> None:
    followed = AttemptResult("error", 71, "It lost a peer.", is_secondary=True)
    killed, hang = AttemptResult("lost", 71, "killed"), AttemptResult("hang", 72, "silent")
    stopped, done = AttemptResult("stopped", 75), AttemptResult("done", 0)
    assert root_cause([followed, killed]) is killed and root_cause([done, done]) is done
    assert (
        root_cause([followed, stopped]) is stopped and root_cause([followed, hang, killed]) is hang
    )


def test_without_nodes_the_largest_grid_that_fits_is_taken() -> None:
    grids = (("data=4", 4), ("data=2", 2), ("data=3", 3))
    gone = AttemptResult("lost", 71, "A node is gone.", step=5)
    history = RestartHistory(RestartPolicy(max_restarts=3, grids=grids))
    assert history.decide_without_nodes(gone, 4).restart and history.grid_index == 0
    assert history.decide_without_nodes(gone, 3).restart and history.grid_index == 2
    assert history.decide_without_nodes(gone, 2).restart and history.grid_index == 1
    then = history.decide_without_nodes(gone, 1)
    assert not then.restart and then.exit_code == 71 and "1 rank(s) are left" in then.message
    assert "Add a grid of at most 1 rank(s)" in then.message
    never = RestartHistory(RestartPolicy(max_restarts=0, grids=grids))
    then = never.decide_without_nodes(gone, 3)
    assert not then.restart and "launch.max_restarts=0 forbids restarts" in then.message


def test_orders_are_read_as_they_were_written() -> None:
    failure = Failure(0, 3, "Rank 1 is gone.", "data=2")
    order = LaunchOrder(
        1, None, 0, 2, "host", 5, 1.0, {"0": 0, "1": 1}, {"0": [0], "1": [2]}, (failure,)
    )
    assert LaunchOrder.from_json(order.to_json()) == order
    for node, address in ((2, "a:1"), (-1, "a:1"), (0, "a"), (0, ":1"), (0, "a:x"), (0, "a:70000")):
        with pytest.raises(PlanError):
            NodeInfo(2, node, address)
    assert (NodeInfo(2, 1, "::1:80").host, NodeInfo(2, 1, "::1:80").port) == ("::1", 80)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "launch.nnodes=2 needs --nproc, which is 0"),
        (["--nproc", "1"], "launch.rdzv_endpoint='' is not a valid address"),
        (
            ["--nproc", "1", "--launch.rdzv-endpoint", "a:5", "--launch.node-rank", "2"],
            "launch.node_rank=2 is not",
        ),
    ],
)
def test_mistakes_about_nodes_are_told(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("train", *SMALL_OPTIONS, "--launch.nnodes", "2", *words) == 64
    assert says in capsys.readouterr().err


def test_one_task_a_node_of_srun_is_a_launcher() -> None:
    slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_NODEID": "1", "SLURM_JOB_ID": "7"}
    slurm |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "node[07-08]"}
    me = read_process_info(slurm)
    assert me is not None
    nodes = main._resolve_nodes(RunOptions(nproc=8), me)
    assert nodes == NodeInfo(2, 1, f"node07:{me.port}")
    assert main._resolve_nodes(RunOptions(), me) is None, "each task is a rank"
    two = read_process_info({**slurm, "SLURM_STEP_TASKS_PER_NODE": "2"})
    assert main._resolve_nodes(RunOptions(nproc=2), two) is None
