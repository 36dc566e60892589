"""Rendezvous of nodes: one launcher per node; all launchers start the ranks of a run together.

Node 0 hosts a TCPStore, in which each launcher writes heartbeats and the results of its part of an
attempt. Only node 0 decides what follows, and writes it to the store as the next order. A node that
stops sending heartbeats is excluded; if node 0 stops, the others exit. Nodes cannot join later, and
an excluded node does not come back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hmac
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ranvier.errors import CommunicationError, PlanError
from ranvier.launch.environment import Failure
from ranvier.launch.restart_policy import AttemptResult, Decision, RestartHistory, RestartPolicy
from ranvier.launch.signals import GracefulStop
from ranvier.launch.store import (
    check_same_key,
    derive_prefix,
    is_loopback,
    new_key,
    open_listener,
    open_tcp_store,
    with_prefix,
)
from ranvier.system.terminal import print

HEARTBEAT_SECONDS = 1.0
NODE_TIMEOUT_SECONDS = 10.0
"""A node without a heartbeat for this time is lost."""
STORE_POLL_SECONDS = 0.3
"""Interval at which the store is read during an attempt."""
LOST_EXIT_CODE = CommunicationError.exit_code
SIGNATURE_LENGTH = 64
"""Characters of the signature before each text in the store."""


@dataclass(frozen=True)
class NodeInfo:
    """Rank and endpoint of this node among all nodes of a run."""

    num_nodes: int
    node_rank: int
    endpoint: str
    """host:port on which node 0 listens."""

    def __post_init__(self) -> None:
        host, _, port = self.endpoint.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise PlanError(
                f"launch.rdzv_endpoint={self.endpoint!r} is not a valid address. All nodes connect "
                "to node 0 at this address. Use host:port, such as node01:29400."
            )
        if not 0 <= self.node_rank < self.num_nodes:
            raise PlanError(
                f"launch.node_rank={self.node_rank} is not less than "
                f"launch.nnodes={self.num_nodes}. Nodes are numbered from 0, each with a different "
                "rank. Fix one of these settings."
            )

    @property
    def host(self) -> str:
        """Host name or address of node 0."""
        return self.endpoint.rpartition(":")[0]

    @property
    def port(self) -> int:
        """Port of node 0."""
        return int(self.endpoint.rpartition(":")[2])


@dataclass(frozen=True)
class LaunchOrder:
    """What all nodes do next: run an attempt, or exit."""

    attempt: int = 0
    exit_code: int | None = None
    """Exit code if the nodes are to exit; None to run an attempt."""
    grid_index: int = 0
    world_size: int = 0
    address: str = ""
    port: int = 0
    start_time: float = 0.0
    first_ranks: dict[str, int] = field(default_factory=dict)
    """The first rank of each node that takes part."""
    local_ranks: dict[str, list[int]] = field(default_factory=dict)
    """Local ranks (devices) used on each node."""
    failures: tuple[Failure, ...] = ()
    generation: str = ""
    """Random text that, with the key of the run, gives the store prefix of the attempt."""

    def to_json(self) -> str:
        """Serialize to JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LaunchOrder:
        """Deserialize from JSON."""
        table = json.loads(text)
        failures = tuple(Failure(**one) for one in table.pop("failures"))
        return cls(**table, failures=failures)


def assign_ranks(world: int, places: dict[int, list[int]]) -> dict[int, tuple[int, list[int]]]:
    """Return first rank and devices of each node; nodes are filled one after the other."""
    parts = {}
    rank = 0
    for node in sorted(places):
        # A grid smaller than the cluster leaves the last devices unused.
        mine = places[node][: world - rank]
        if mine:
            parts[node] = (rank, mine)
        rank += len(mine)
    return parts


def root_cause(ends: Sequence[AttemptResult]) -> AttemptResult:
    """Return the result that caused the others: primary before secondary, hangs first."""
    rank = {"hang": 0, "error": 1, "fault": 1, "lost": 1, "stopped": 2, "done": 3}
    return min(ends, key=lambda end: (end.is_secondary and end.kind != "hang", rank[end.kind]))


class RendezvousStore:
    """Key-value store of all launchers; raises if node 0 does not respond.

    Each text is signed with the key of the run; texts with other signatures are ignored.
    """

    def __init__(self, nodes: NodeInfo, key: str, timeout_seconds: float) -> None:
        self.nodes = nodes
        self._key = key
        # Node 0 opens the socket itself, so that it listens on one address only.
        first = nodes.node_rank == 0
        if first:
            listener = open_listener(nodes.host, nodes.port)
        else:
            listener = None
        if listener is not None and is_hidden_loopback(nodes.host, listener.getsockname()[0]):
            print_message(
                f"{nodes.host} is {listener.getsockname()[0]} on this node, which other machines "
                "cannot reach. Node 0 listens only at launch.rdzv_endpoint. Use the address of a "
                "network interface."
            )
        try:
            store = open_tcp_store(nodes.host, nodes.port, timeout_seconds, listener=listener)
            prefix = derive_prefix(key, "board", nodes.endpoint)
            self._store = with_prefix(prefix, store)
        except RuntimeError as error:
            raise CommunicationError(
                f"Node {nodes.node_rank} could not reach node 0 at {nodes.endpoint}: "
                f"{str(error).splitlines()[0]}. All nodes must start within {timeout_seconds:.0f} "
                "s. Check launch.rdzv_endpoint."
            ) from None
        # The long timeout is only for the start; from here on node 0 must respond quickly.
        check_same_key(self._store, first, nodes.endpoint)
        self._store.set_timeout(datetime.timedelta(seconds=NODE_TIMEOUT_SECONDS))

    def write_text(self, name: str, text: str) -> None:
        """Write a signed text under a name."""
        with self._report_lost_node_0():
            self._store.set(name, derive_prefix(self._key, "signed", name, text) + text)

    def read_text(self, name: str) -> str | None:
        """Returns the text under a name; None if there is none, or if its signature is wrong."""
        with self._report_lost_node_0():
            # `get` would block until the key exists.
            if not self._store.check([name]):
                return None
            signed = self._store.get(name).decode(errors="replace")
        signature = signed[:SIGNATURE_LENGTH]
        text = signed[SIGNATURE_LENGTH:]
        # The name is part of the signature, so a text cannot be replayed under another name.
        good = derive_prefix(self._key, "signed", name, text)
        return text if hmac.compare_digest(good.encode(), signature.encode()) else None

    @contextlib.contextmanager
    def _report_lost_node_0(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError:
            raise CommunicationError(
                f"Node 0 at {self.nodes.endpoint} does not respond. It coordinates all nodes. "
                "Start all nodes again; the run resumes from its latest checkpoint."
            ) from None

    def send_heartbeats(self, ended: threading.Event) -> None:
        """Write heartbeats of this node until `ended` is set."""
        # The main thread reports the loss of node 0.
        with contextlib.suppress(CommunicationError):
            while not ended.wait(HEARTBEAT_SECONDS):
                self.write_text(f"beat/{self.nodes.node_rank}", str(time.monotonic()))


class NodeHeartbeats:
    """Time at which node 0 last saw a new heartbeat of each node, by its own clock."""

    def __init__(self, board: RendezvousStore) -> None:
        self.store = board
        self.last_seen: dict[int, tuple[str | None, float]] = {}

    def lost_nodes(self, nodes: Sequence[int]) -> list[int]:
        """Returns the nodes without a heartbeat for too long, except node 0."""
        now = time.monotonic()
        for node in nodes:
            text = self.store.read_text(f"beat/{node}")
            # Any change counts as a heartbeat, because the clocks of nodes differ.
            if node not in self.last_seen or self.last_seen[node][0] != text:
                self.last_seen[node] = (text, now)
        return [
            node for node in nodes if node and now - self.last_seen[node][1] > NODE_TIMEOUT_SECONDS
        ]


class Coordinator:
    """Runs on node 0: collects nodes and results of attempts, and decides what follows."""

    def __init__(self, board: RendezvousStore, policy: RestartPolicy, began: float) -> None:
        self.store, self.history, self.start_time = board, RestartHistory(policy), began
        self.local_ranks: dict[int, list[int]] = {}
        self.hosts: dict[int, str] = {}
        self.heartbeats = NodeHeartbeats(board)
        self.assignments: dict[int, tuple[int, list[int]]] = {}

    def wait_for_nodes(self, seconds: float, told: GracefulStop) -> bool:
        """Waits until all nodes have registered; returns False if a stop signal arrives first."""
        limit = time.monotonic() + seconds
        count = self.store.nodes.num_nodes
        while len(self.local_ranks) < count:
            for node in range(count):
                text = self.store.read_text(f"node/{node}")
                if text is not None and node not in self.local_ranks:
                    facts = json.loads(text)
                    self.local_ranks[node] = list(range(facts["ranks"]))
                    self.hosts[node] = facts["host"]
            if told.signal:
                return False
            if time.monotonic() > limit:
                missing = [str(node) for node in range(count) if node not in self.local_ranks]
                raise CommunicationError(
                    f"Node(s) {', '.join(missing)} did not start within {seconds:.0f} s. All "
                    f"launch.nnodes={count} nodes must start. Start them, or use fewer nodes."
                )
            time.sleep(0.1)
        world = self.history.policy.grids[0][1]
        there = sum(map(len, self.local_ranks.values()))
        if there != world:
            raise PlanError(
                f"The nodes start {there} ranks in all, but the plan needs {world}. The ranks of "
                f"all launch.nnodes={count} nodes must add up to the plan. Change --nproc on the "
                "nodes, or a degree of the plan."
            )
        return True

    def check_lost_nodes(self, attempt: int) -> bool:
        """Returns whether a participating node is lost; if so, ends the attempt on all nodes."""
        if not self.heartbeats.lost_nodes(list(self.assignments)):
            return False
        self.store.write_text(f"over/{attempt}", "1")
        return True

    def issue_order(self, port: int) -> LaunchOrder:
        """Write the order of an attempt on the remaining nodes to the store, and return it."""
        history = self.history
        _, world = history.policy.grids[history.grid_index]
        self.assignments = assign_ranks(world, self.local_ranks)
        order = LaunchOrder(
            attempt=len(history.failures),
            grid_index=history.grid_index,
            world_size=world,
            address=self.hosts[min(self.assignments)],
            port=port,
            generation=new_key(),
            start_time=self.start_time,
            first_ranks={str(node): first for node, (first, _) in self.assignments.items()},
            local_ranks={str(node): mine for node, (_, mine) in self.assignments.items()},
            failures=history.failures,
        )
        self.store.write_text(f"order/{order.attempt}", order.to_json())
        return order

    def decide_next(self, attempt: int) -> Decision:
        """Wait until all nodes have reported the end of an attempt or are lost, then decide."""
        ends: dict[int, AttemptResult] = {}
        lost: list[int] = []
        # Every node either reports its end or stops sending heartbeats.
        while left := [node for node in self.assignments if node not in ends and node not in lost]:
            for node in left:
                text = self.store.read_text(f"end/{attempt}/{node}")
                if text is not None:
                    ends[node] = AttemptResult(**json.loads(text))
            lost += self.heartbeats.lost_nodes([node for node in left if node not in ends])
            time.sleep(0.05)
        end = root_cause(list(ends.values()))
        if lost:
            for node in lost:
                del self.local_ranks[node]
            words = f"Node(s) {', '.join(map(str, lost))} did not respond for "
            end = dataclasses.replace(
                end,
                kind="lost",
                exit_code=LOST_EXIT_CODE,
                message=words + f"{NODE_TIMEOUT_SECONDS:.0f} s.",
            )
            return self.history.decide_without_nodes(end, sum(map(len, self.local_ranks.values())))
        before = self.history.grid_index
        then = self.history.decide_after(end)
        if (
            then.restart
            and self.history.grid_index != before
            and self.history.excluded_rank is not None
        ):
            self._exclude_device(self.history.excluded_rank)
        return then

    def _exclude_device(self, rank: int) -> None:
        """Exclude the device of a rank, except the last one of node 0, which hosts the store."""
        for node, (first, mine) in self.assignments.items():
            if first <= rank < first + len(mine) and (node or len(mine) > 1):
                self.local_ranks[node].remove(mine[rank - first])

    def dismiss_nodes(self, attempt: int, code: int) -> None:
        """Orders all nodes to exit, and waits until they have read it, at most five seconds."""
        # The store ends with this process, so the others must have read the order before.
        self.store.write_text(f"order/{attempt}", LaunchOrder(attempt, code).to_json())
        limit = time.monotonic() + 5.0
        while time.monotonic() < limit:
            if all(self.store.read_text(f"bye/{node}") for node in self.local_ranks if node):
                return
            time.sleep(0.05)


def is_hidden_loopback(name: str, address: str) -> bool:
    """Whether a host name resolves to a loopback address without being one itself."""
    return is_loopback(address) and not is_loopback(name)


def reachable_host(nodes: NodeInfo) -> str:
    """Returns the address by which others reach this node: its own address in a connection to node
    0."""
    if nodes.node_rank == 0:
        return nodes.host
    with contextlib.suppress(OSError), socket.create_connection((nodes.host, nodes.port), 10) as s:
        return str(s.getsockname()[0])
    return socket.gethostname()


def print_message(text: str) -> None:
    """Prints to stderr and flushes; prints nothing if the text is empty."""
    if text:
        print(text, file=sys.stderr, flush=True)
