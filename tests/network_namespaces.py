"""Several nodes on one machine: network namespaces joined by a bridge, with links of a given rate.

    node 0   eth0 10.77.0.1 ── port0 ┐
    node 1   eth0 10.77.0.2 ── port1 ┤ bridge
    node 2   eth0 10.77.0.3 ── port2 ┘

Each link is full duplex: a token bucket (`tc tbf`) at both of its ends limits the rate. Processes
of the same node reach each other through `lo`, which has no limit, also by the address of eth0. The
bridge has a namespace of its own, so nothing of the host changes, and several runs at the same time
can use the same addresses.

Nothing is left after an error, Ctrl-C, SIGTERM or SIGHUP. Namespaces of a process that was killed
are removed by the next one: their names contain its pid.

Linux only; needs root and iproute2, see `find_limitation`. There are no delays: `netem` is missing
in many kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import multiprocessing
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pool import PRELOAD, Pool

if TYPE_CHECKING:
    from types import FrameType

    from ranvier.launch import ProcessInfo

Placement = Literal["block", "round_robin"]
"""Whether consecutive ranks are on the same node, or on different nodes."""

PREFIX = "ranvier"
"""Names are PREFIX-PID-START-RUN-NODE: process that made them, its start time, a random word."""
NAME = re.compile(rf"{PREFIX}-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]+-(switch|node\d+)")
DIRECTORY = Path("/run/netns")
"""Where iproute2 keeps the names of namespaces."""
INTERFACE = "eth0"
MASTER_PORT = 29500
JUMBO_FRAME = 9000
ETHERNET_HEADER = 14
LIMIT_SECONDS = 1.0
"""Time that packets may wait in a token bucket. It drops none, as in a lossless network: dropped
ones would be sent again after 0.2 s, and a measurement would depend on chance."""
CLONE_NEWNET = 0x40000000
CLONE_NEWUTS = 0x04000000
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class NamespaceError(RuntimeError):
    """Namespaces that could not be made."""


@dataclasses.dataclass(frozen=True)
class NetworkNode:
    """A namespace that stands for a node."""

    index: int
    namespace: str
    address: str
    """Address of INTERFACE."""

    @property
    def host_name(self) -> str:
        """Host name of its processes."""
        return f"node{self.index}"

    def command(self, words: Sequence[str]) -> list[str]:
        """Returns the command that runs these words on the node."""
        name = 'echo "$0" > /proc/sys/kernel/hostname; exec "$@"'
        shell = ["unshare", "--uts", "sh", "-c", name, self.host_name]
        return ["ip", "netns", "exec", self.namespace, *shell, *words]

    def enter(self) -> None:
        """Moves this thread, and all that it starts from now on, to the node."""
        library = ctypes.CDLL(None, use_errno=True)
        with (DIRECTORY / self.namespace).open() as file:
            done = library.setns(file.fileno(), CLONE_NEWNET) or library.unshare(CLONE_NEWUTS)
        if done != 0:
            raise OSError(ctypes.get_errno(), f"Namespace {self.namespace} cannot be entered")
        socket.sethostname(self.host_name)


def find_limitation() -> str:
    """Returns why namespaces cannot be made here; empty if they can."""
    missing = _find_missing_requirement()
    if missing:
        return missing
    # A container may lack capabilities, and a kernel may lack bridges or token buckets.
    try:
        with network_namespaces(1):
            return ""
    except NamespaceError as error:
        return str(error)


def _find_missing_requirement() -> str:
    if sys.platform != "linux":
        return f"Network namespaces need Linux, and this is {sys.platform}."
    programs = [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]
    if programs:
        return f"Network namespaces need iproute2 and util-linux; {', '.join(programs)} not found."
    if os.geteuid() != 0:
        return f"Network namespaces need root, and this is user {os.geteuid()}."
    return ""


@contextlib.contextmanager
def network_namespaces(
    num_nodes: int, *, bits_per_second: int = 100_000_000, mtu: int = JUMBO_FRAME
) -> Iterator[tuple[NetworkNode, ...]]:
    """Context in which nodes exist, connected by links of this rate in each direction.

    mtu: bytes of a packet. Up to two packets that follow a pause are not slowed down. The default
    keeps the work of the kernel small; a smaller one gives small messages more exact times.
    """
    missing = _find_missing_requirement()
    if missing:
        raise NamespaceError(missing)
    remove_leftovers()
    run = f"{PREFIX}-{os.getpid()}-{_start_time(os.getpid())}-{secrets.token_hex(4)}"
    nodes = tuple(NetworkNode(i, f"{run}-node{i}", f"10.77.0.{i + 1}") for i in range(num_nodes))
    with _raise_on_stop_signals():
        try:
            _make_network(f"{run}-switch", nodes, bits_per_second, mtu)
            yield nodes
        finally:
            _remove_namespaces([name for name in list_namespaces() if name.startswith(f"{run}-")])


def _make_network(
    switch: str, nodes: Sequence[NetworkNode], bits_per_second: int, mtu: int
) -> None:
    """Makes the namespaces, the bridge in `switch`, and a link from it to each node."""
    queue = int(bits_per_second / 8 * LIMIT_SECONDS)
    bucket = (
        f"tbf rate {bits_per_second}bit burst {2 * (mtu + ETHERNET_HEADER)} limit {queue + 2 * mtu}"
    )
    for namespace in (switch, *(node.namespace for node in nodes)):
        _run_command(["ip", "netns", "add", namespace])
    ports = [f"port{node.index}" for node in nodes]
    lines = ["link add bridge type bridge", "link set bridge up"]
    for node, port in zip(nodes, ports, strict=True):
        peer = f"peer name {INTERFACE} mtu {mtu} netns {node.namespace}"
        lines += [f"link add {port} mtu {mtu} type veth {peer}"]
        lines += [f"link set {port} master bridge up"]
    _run_command(["ip", "-n", switch, "-batch", "-"], lines)
    buckets = [f"qdisc add dev {port} root {bucket}" for port in ports]
    _run_command(["tc", "-n", switch, "-batch", "-"], buckets)
    for node in nodes:
        lines = [f"addr add {node.address}/24 dev {INTERFACE}"]
        lines += ["link set lo up", f"link set {INTERFACE} up"]
        _run_command(["ip", "-n", node.namespace, "-batch", "-"], lines)
        words = f"qdisc add dev {INTERFACE} root {bucket}".split()
        _run_command(["tc", "-n", node.namespace, *words])


def _run_command(command: Sequence[str], lines: Sequence[str] = ()) -> str:
    """Returns the output of a command that gets these lines; raises if it fails."""
    text = "".join(f"{line}\n" for line in lines)
    end = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60.0)
    if end.returncode != 0:
        raise NamespaceError(
            f"`{' '.join(command)}` failed: {end.stderr.strip()}. Making nodes needs the "
            "capabilities of root, and a kernel with veth, bridge and tbf. Run it on another host "
            "or in a privileged container."
        )
    return end.stdout


def list_namespaces() -> list[str]:
    """Returns the names of all namespaces that this module has made and that still exist."""
    if not DIRECTORY.is_dir():
        return []
    return sorted(path.name for path in DIRECTORY.iterdir() if NAME.fullmatch(path.name))


def remove_leftovers() -> list[str]:
    """Removes the namespaces of processes that have ended, and returns their names."""
    names = []
    for name in list_namespaces():
        found = NAME.fullmatch(name)
        assert found is not None, name
        # The start time differs if another process has got the same pid.
        if _start_time(int(found["pid"])) != int(found["start"]):
            names.append(name)
    _remove_namespaces(names)
    return names


def _start_time(pid: int) -> int:
    """Returns when a process was started, in clock ticks since boot; -1 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    # The second field is the name of the program, which may contain spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    if fields[0] in ("Z", "X"):
        return -1
    return int(fields[19])


def _remove_namespaces(names: Sequence[str]) -> None:
    """Kills the processes in these namespaces and removes them."""
    for name in names:
        # Another run may remove the same leftovers at this moment, so failures do not matter.
        found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
        for pid in map(int, found.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextlib.contextmanager
def _raise_on_stop_signals() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise as Ctrl-C does; later signals do not interrupt the removal.

    Signals that are ignored, or that the program handles itself, stay as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    defaults = (signal.SIG_DFL, signal.default_int_handler)
    before = {each: signal.getsignal(each) for each in STOP_SIGNALS}
    before = {each: handler for each, handler in before.items() if handler in defaults}
    for each in before:
        signal.signal(each, stop)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def place_ranks(num_nodes: int, ranks_per_node: int, placement: Placement) -> tuple[int, ...]:
    """Returns the node of each rank."""
    ranks = range(num_nodes * ranks_per_node)
    if placement == "block":
        return tuple(rank // ranks_per_node for rank in ranks)
    return tuple(rank % num_nodes for rank in ranks)


def rank_environment(
    nodes: Sequence[NetworkNode], node_of_rank: Sequence[int], rank: int
) -> dict[str, str]:
    """Returns the variables of a rank, as torchrun sets them, and the interface of Gloo."""
    node = node_of_rank[rank]
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(node_of_rank)),
        "LOCAL_RANK": str(node_of_rank[:rank].count(node)),
        "LOCAL_WORLD_SIZE": str(node_of_rank.count(node)),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": nodes[node_of_rank[0]].address,
        # Each namespace has its own ports, so this one is free.
        "MASTER_PORT": str(MASTER_PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }


def start_program(
    words: Sequence[str],
    nodes: Sequence[NetworkNode],
    ranks_per_node: int,
    *,
    placement: Placement = "block",
    **options: Any,
) -> list[subprocess.Popen[str]]:
    """Starts a program once per rank, as torchrun does, and returns the processes in rank order.

    They are killed when the namespaces are removed. options: those of `subprocess.Popen`.
    """
    node_of_rank = place_ranks(len(nodes), ranks_per_node, placement)
    # Without a key of their own, ranks would create one in the user's home.
    common = {"RANVIER_KEY": secrets.token_hex(32), **os.environ}
    return [
        subprocess.Popen(
            nodes[node].command(words),
            env=common | rank_environment(nodes, node_of_rank, rank),
            text=True,
            **options,
        )
        for rank, node in enumerate(node_of_rank)
    ]


class NamespacePool(Pool):
    """Workers on the nodes of `network_namespaces`, which have joined one Gloo process group."""

    def __init__(
        self,
        nodes: Sequence[NetworkNode],
        ranks_per_node: int,
        *,
        placement: Placement = "block",
        preload: Sequence[str] = PRELOAD,
    ) -> None:
        super().__init__(len(nodes) * ranks_per_node, preload=preload)
        self.nodes = nodes
        self.node_of_rank = place_ranks(len(nodes), ranks_per_node, placement)

    def process_infos(self) -> list[ProcessInfo]:
        """Returns rank and node of each worker.

        They find each other through a shared file. A store at the address of rank 0 would also
        work, but torch then warns that the addresses have no names.
        """
        infos = []
        for info in super().process_infos():
            given = rank_environment(self.nodes, self.node_of_rank, info.rank)
            local = int(given["LOCAL_RANK"]), int(given["LOCAL_WORLD_SIZE"])
            infos.append(dataclasses.replace(info, local_rank=local[0], local_world_size=local[1]))
        return infos

    def worker_setup(self, rank: int) -> Callable[[], None]:
        """Returns what a worker does first: it moves to its node."""
        environment = rank_environment(self.nodes, self.node_of_rank, rank)
        return functools.partial(_prepare_worker, self.nodes[self.node_of_rank[rank]], environment)


def _prepare_worker(node: NetworkNode, environment: dict[str, str]) -> None:
    node.enter()
    os.environ.update(environment)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_creator() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    # The forkserver lives as long as its workers, so that its end does not end them.
    threading.Thread(target=end_with_creator, daemon=True).start()


def run_in_namespaces(
    function: Callable[..., Any],
    num_nodes: int,
    ranks_per_node: int,
    *arguments: Any,
    bits_per_second: int = 100_000_000,
    mtu: int = JUMBO_FRAME,
    placement: Placement = "block",
    preload: Sequence[str] = PRELOAD,
    timeout: float = 600.0,
) -> list[Any]:
    """Calls `function(rank, *arguments)` on all ranks of new nodes; returns results in rank order.

    The ranks are processes that have joined a Gloo process group through links of the given rate.
    """
    with network_namespaces(num_nodes, bits_per_second=bits_per_second, mtu=mtu) as nodes:
        pool = NamespacePool(nodes, ranks_per_node, placement=placement, preload=preload)
        try:
            return pool.run(function, pool.size, *arguments, timeout=timeout)
        finally:
            pool.stop()
