"""Nodes made of network namespaces: their links, their ranks, and that nothing of them is left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import network_namespaces
from network_namespaces import (
    INTERFACE,
    PREFIX,
    NamespaceError,
    NetworkNode,
    find_limitation,
    list_namespaces,
    place_ranks,
    remove_leftovers,
    run_in_namespaces,
    start_program,
)
from pool import RankError
from ranvier.comm import collectives
from ranvier.grid import Grid

needs_namespaces = pytest.mark.usefixtures("namespaces")
MESSAGE_BYTES = 1 << 18

SEND_TO_RANK_0 = f"""
import contextlib, os, socket, time
where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    with socket.create_server(where) as server:
        for _ in range(int(os.environ["WORLD_SIZE"]) - 1):
            connection, _ = server.accept()
            with connection, connection.makefile("rb") as file:
                print(len(file.read()))
else:
    connection = None
    while connection is None:
        with contextlib.suppress(ConnectionRefusedError):
            connection = socket.create_connection(where)
        time.sleep(0.01)
    with connection:
        connection.sendall(bytes({MESSAGE_BYTES}))
print(socket.gethostname(), os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"])
"""
MAKE_AND_WAIT = """
import subprocess, sys, time
from network_namespaces import network_namespaces
with network_namespaces(2) as nodes:
    inside = subprocess.Popen(nodes[1].command(["sleep", "600"]))
    print(inside.pid, nodes[0].namespace, flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def namespaces() -> None:
    """Skips tests on machines without network namespaces."""
    limitation = find_limitation()
    if limitation:
        pytest.skip(limitation)


def describe(kind: str, namespace: str, *words: str) -> list[dict[str, Any]]:
    """What ip or tc reports about the links or queues of a namespace."""
    command = [kind, "-json", "-statistics", "-n", namespace, *words]
    reported = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: list[dict[str, Any]] = json.loads(reported)
    return found


def received_bytes(node: NetworkNode, interface: str) -> int:
    (link,) = describe("ip", node.namespace, "link", "show", "dev", interface)
    count: int = link["stats64"]["rx"]["bytes"]
    return count


@contextlib.contextmanager
def another_creator() -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    """A process that has made namespaces, the pid of a program in one of them, and their prefix."""
    path = os.pathsep.join([str(Path(network_namespaces.__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", MAKE_AND_WAIT]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=quiet, text=True
    ) as process:
        assert process.stdout is not None
        pid, name = process.stdout.readline().split()
        try:
            yield process, int(pid), name.removesuffix("node0")
        finally:
            process.kill()


def names_with(prefix: str) -> list[str]:
    return [name for name in list_namespaces() if name.startswith(prefix)]


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def has_ended(pid: int) -> bool:
    """Whether a process has ended; one that was killed may take a moment."""
    deadline = time.monotonic() + 10.0
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_alive(pid)


@needs_namespaces
def test_both_ends_of_a_link_have_the_rate() -> None:
    with network_namespaces.network_namespaces(2, bits_per_second=20_000_000) as nodes:
        switch = nodes[0].namespace.replace("node0", "switch")
        ends = [(node.namespace, INTERFACE) for node in nodes]
        ends += [(switch, f"port{node.index}") for node in nodes]
        for namespace, interface in ends:
            (queue,) = describe("tc", namespace, "qdisc", "show", "dev", interface)
            assert queue["kind"] == "tbf", queue
            assert queue["options"]["rate"] * 8 == 20_000_000, queue


@needs_namespaces
def test_nodes_reach_each_other_by_their_links_and_themselves_by_lo() -> None:
    pipe = subprocess.PIPE
    with network_namespaces.network_namespaces(2) as nodes:
        program = [sys.executable, "-IS", "-c", SEND_TO_RANK_0]
        ranks = start_program(program, nodes, 2, stdout=pipe)
        texts = [rank.communicate(timeout=60)[0].split() for rank in ranks]
        received = {name: received_bytes(nodes[0], name) for name in ("lo", INTERFACE)}
    assert texts[0] == [*[str(MESSAGE_BYTES)] * 3, "node0", "0", "2"]
    assert texts[1:] == [["node0", "1", "2"], ["node1", "0", "2"], ["node1", "1", "2"]]
    # Headers and acknowledgements take less than a tenth.
    assert 1 <= received["lo"] / MESSAGE_BYTES < 1.1
    assert 2 <= received[INTERFACE] / MESSAGE_BYTES < 2.2


@needs_namespaces
def test_two_networks_at_once_have_the_same_addresses_and_different_names() -> None:
    make = network_namespaces.network_namespaces
    with make(2) as first, make(2) as second:
        assert [node.address for node in first] == [node.address for node in second]
        names = {node.namespace for node in (*first, *second)}
        assert len(names) == 4 and names <= {*list_namespaces()}
        with pytest.raises(ZeroDivisionError), make(1) as (third,):
            1 // 0  # noqa: B018
        assert third.namespace not in list_namespaces()
    assert not names & {*list_namespaces()}


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_after_a_signal(number: signal.Signals) -> None:
    with another_creator() as (creator, inside, prefix):
        assert len(names_with(prefix)) == 3 and is_alive(inside)
        creator.send_signal(number)
        assert creator.wait(60) != 0
        assert names_with(prefix) == [] and has_ended(inside)


@needs_namespaces
def test_namespaces_of_a_killed_process_are_removed_and_those_of_a_running_one_stay() -> None:
    with another_creator() as (running, _, kept), another_creator() as (killed, inside, prefix):
        killed.kill()
        killed.wait(60)
        assert len(names_with(prefix)) == 3 and is_alive(inside)
        with network_namespaces.network_namespaces(1):
            assert names_with(prefix) == [] and len(names_with(kept)) == 3
        assert has_ended(inside)
        running.terminate()
        assert running.wait(60) == 128 + signal.SIGTERM


@needs_namespaces
def test_a_namespace_of_an_earlier_process_with_the_same_pid_is_removed() -> None:
    name = f"{PREFIX}-{os.getpid()}-1-0-node0"
    subprocess.run(["ip", "netns", "add", name], check=True)
    assert remove_leftovers() == [name]
    assert name not in list_namespaces()


def test_a_machine_without_root_or_iproute2_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else f"/sbin/{name}")
    assert find_limitation() == "Network namespaces need iproute2 and util-linux; tc not found."
    monkeypatch.setattr(shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert find_limitation() == "Network namespaces need root, and this is user 1000."
    with pytest.raises(NamespaceError, match="root"), network_namespaces.network_namespaces(1):
        pass


def test_ranks_are_placed_in_blocks_or_round_robin() -> None:
    assert place_ranks(2, 3, "block") == (0, 0, 0, 1, 1, 1)
    assert place_ranks(2, 3, "round_robin") == (0, 1, 0, 1, 0, 1)


def gather_host_names(rank: int) -> tuple[str, str, list[float]]:
    """Host, local rank, and a sum over all ranks."""
    grid = Grid({"row": 4}, connected=True, ranks_per_node=2)
    value = torch.full((1000,), float(rank))
    gathered = collectives.all_gather(value, grid.axis("row")).wait()
    return socket.gethostname(), os.environ["LOCAL_RANK"], gathered.view(4, -1).sum(1).tolist()


def fail_on_last(rank: int) -> None:
    if rank == 1:
        raise ValueError(f"rank {rank} has failed")


@needs_namespaces
def test_functions_run_on_the_ranks_of_all_nodes() -> None:
    gathered = [0.0, 1000.0, 2000.0, 3000.0]
    assert run_in_namespaces(gather_host_names, 2, 2, placement="round_robin") == [
        ("node0", "0", gathered),
        ("node1", "0", gathered),
        ("node0", "1", gathered),
        ("node1", "1", gathered),
    ]


@needs_namespaces
def test_a_failure_of_a_rank_is_shown_and_nothing_is_left() -> None:
    before = list_namespaces()
    with pytest.raises(RankError, match="rank 1 has failed"):
        run_in_namespaces(fail_on_last, 2, 1)
    assert list_namespaces() == before
