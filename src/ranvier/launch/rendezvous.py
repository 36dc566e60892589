"""Nodes: one launcher on each, which start the ranks of a run together and lose each other.

Node 0 keeps a board (a TCPStore) on which each launcher shows that it lives, and how its part of an
attempt ended. Node 0 alone decides what follows and writes it on the board as the next order. A
node that falls silent is left out; if node 0 does, the others end. No ranks are found anew: a node
that was left out does not come back.
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
from ranvier.launch.restart_policy import End, History, Next, Policy
from ranvier.launch.signals import Stop
from ranvier.launch.store import (
    derive_prefix,
    greet,
    is_loopback,
    new_key,
    open_listener,
    open_tcp_store,
    with_prefix,
)
from ranvier.system.terminal import print

BEAT_SECONDS = 1.0
GONE_SECONDS = 10.0
"""A node that has been silent for so long is gone."""
BOARD_SECONDS = 0.3
"""How often the board is read during an attempt."""
LOST = CommunicationError.exit_code
SIGNATURE = 64
"""Characters of the signature before each text on the board."""


@dataclass(frozen=True)
class Nodes:
    """This node among all nodes of a run."""

    count: int
    node: int
    address: str
    """host:port where node 0 listens."""

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise PlanError(
                f"launch.address={self.address!r} is no address. All nodes meet where node 0 "
                "listens. Write host:port, for example node01:29400."
            )
        if not 0 <= self.node < self.count:
            raise PlanError(
                f"launch.node={self.node} is not below launch.nodes={self.count}. Nodes count from "
                "0, and each has a number of its own. Mend one."
            )

    @property
    def host(self) -> str:
        """The name of node 0."""
        return self.address.rpartition(":")[0]

    @property
    def port(self) -> int:
        """Where node 0 listens."""
        return int(self.address.rpartition(":")[2])


@dataclass(frozen=True)
class Order:
    """What all nodes do next: an attempt, or an end."""

    attempt: int = 0
    code: int | None = None
    """The exit code if this is the end."""
    grid: int = 0
    world: int = 0
    address: str = ""
    port: int = 0
    began: float = 0.0
    first: dict[str, int] = field(default_factory=dict)
    """The first rank of each node that takes part."""
    places: dict[str, list[int]] = field(default_factory=dict)
    """The devices that the ranks of each node take."""
    failures: tuple[Failure, ...] = ()
    generation: str = ""
    """Random: with the key of the run it makes the prefix of all keys of the attempt."""

    def text(self) -> str:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of(cls, text: str) -> Order:
        """From JSON."""
        table = json.loads(text)
        failures = tuple(Failure(**one) for one in table.pop("failures"))
        return cls(**table, failures=failures)


def laid(world: int, places: dict[int, list[int]]) -> dict[int, tuple[int, list[int]]]:
    """First rank and devices of each node: nodes are filled one after the other."""
    parts, rank = {}, 0
    for node in sorted(places):
        mine = places[node][: world - rank]
        if mine:
            parts[node] = (rank, mine)
        rank += len(mine)
    return parts


def worst(ends: Sequence[End]) -> End:
    """The end that the others followed from."""
    rank = {"hang": 0, "error": 1, "fault": 1, "lost": 1, "stopped": 2, "done": 3}
    return min(ends, key=lambda end: (end.secondary and end.kind != "hang", rank[end.kind]))


class Board:
    """What all launchers can read and write; silence of node 0 is an error.

    Each text is signed with the key of the run: one that a stranger has written is not read.
    """

    def __init__(self, nodes: Nodes, key: str, timeout_seconds: float) -> None:
        self.nodes, self._key = nodes, key
        first = nodes.node == 0
        listener = open_listener(nodes.host, nodes.port) if first else None
        if listener is not None and is_hidden(nodes.host, listener.getsockname()[0]):
            say(
                f"{nodes.host} is {listener.getsockname()[0]} on this node, which no other machine "
                "reaches. Node 0 listens at launch.address only. Give the address of an interface."
            )
        try:
            store = open_tcp_store(nodes.host, nodes.port, timeout_seconds, listener=listener)
            prefix = derive_prefix(key, "board", nodes.address)
            self._store = with_prefix(prefix, store)
        except RuntimeError as error:
            raise CommunicationError(
                f"Node {nodes.node} could not reach node 0 at {nodes.address}: "
                f"{str(error).splitlines()[0]}. All nodes must start within "
                f"{timeout_seconds:.0f} s. Check launch.address."
            ) from None
        greet(self._store, first, nodes.address)
        self._store.set_timeout(datetime.timedelta(seconds=GONE_SECONDS))

    def write(self, name: str, text: str) -> None:
        """Replace what is written under a name."""
        with self._reached():
            self._store.set(name, derive_prefix(self._key, "signed", name, text) + text)

    def read(self, name: str) -> str | None:
        """What is written under a name; None if nothing is, or not by a launcher of this run."""
        with self._reached():
            if not self._store.check([name]):
                return None
            signed = self._store.get(name).decode(errors="replace")
        signature, text = signed[:SIGNATURE], signed[SIGNATURE:]
        good = derive_prefix(self._key, "signed", name, text)
        return text if hmac.compare_digest(good.encode(), signature.encode()) else None

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError:
            raise CommunicationError(
                f"Node 0 at {self.nodes.address} is gone. It keeps the others together. Start all "
                "nodes again; the run goes on from its newest checkpoint."
            ) from None

    def live(self, ended: threading.Event) -> None:
        """Show again and again that this node lives."""
        with contextlib.suppress(CommunicationError):  # told by who waits for node 0
            while not ended.wait(BEAT_SECONDS):
                self.write(f"beat/{self.nodes.node}", str(time.monotonic()))


class Pulses:
    """When node 0 last saw each other node alive, on its own clock."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.seen: dict[int, tuple[str | None, float]] = {}

    def gone(self, nodes: Sequence[int]) -> list[int]:
        """The nodes that have been silent for too long."""
        now = time.monotonic()
        for node in nodes:
            text = self.board.read(f"beat/{node}")
            if node not in self.seen or self.seen[node][0] != text:
                self.seen[node] = (text, now)
        return [node for node in nodes if node and now - self.seen[node][1] > GONE_SECONDS]


class Captain:
    """Node 0's part: which nodes there are, what became of an attempt, what follows."""

    def __init__(self, board: Board, policy: Policy, began: float) -> None:
        self.board, self.history, self.began = board, History(policy), began
        self.places: dict[int, list[int]] = {}
        self.hosts: dict[int, str] = {}
        self.pulses = Pulses(board)
        self.parts: dict[int, tuple[int, list[int]]] = {}

    def meet(self, seconds: float, told: Stop) -> bool:
        """Wait until all nodes are there; False if told to stop before."""
        limit, count = time.monotonic() + seconds, self.board.nodes.count
        while len(self.places) < count:
            for node in range(count):
                text = self.board.read(f"node/{node}")
                if text is not None and node not in self.places:
                    facts = json.loads(text)
                    self.places[node], self.hosts[node] = list(range(facts["ranks"])), facts["host"]
            if told.signal:
                return False
            if time.monotonic() > limit:
                missing = [str(node) for node in range(count) if node not in self.places]
                raise CommunicationError(
                    f"Node(s) {', '.join(missing)} did not come within {seconds:.0f} s. All "
                    f"launch.nodes={count} must start. Start them, or use fewer."
                )
            time.sleep(0.1)
        world, there = self.history.policy.grids[0][1], sum(map(len, self.places.values()))
        if there != world:
            raise PlanError(
                f"The nodes have {there} ranks, the plan {world}. All must start the same number. "
                "Give each the same nproc."
            )
        return True

    def over(self, attempt: int) -> bool:
        """Whether a node that takes part is gone."""
        if not self.pulses.gone(list(self.parts)):
            return False
        self.board.write(f"over/{attempt}", "1")
        return True

    def order(self, port: int) -> Order:
        """An attempt of all nodes that are left, written on the board."""
        history = self.history
        _, world = history.policy.grids[history.grid]
        self.parts = laid(world, self.places)
        order = Order(
            attempt=len(history.failures),
            grid=history.grid,
            world=world,
            address=self.hosts[min(self.parts)],
            port=port,
            generation=new_key(),
            began=self.began,
            first={str(node): first for node, (first, _) in self.parts.items()},
            places={str(node): mine for node, (_, mine) in self.parts.items()},
            failures=history.failures,
        )
        self.board.write(f"order/{order.attempt}", order.text())
        return order

    def judge(self, attempt: int) -> Next:
        """Wait until all nodes have told how an attempt ended, or are gone; what follows."""
        ends: dict[int, End] = {}
        lost: list[int] = []
        while left := [node for node in self.parts if node not in ends and node not in lost]:
            for node in left:
                text = self.board.read(f"end/{attempt}/{node}")
                if text is not None:
                    ends[node] = End(**json.loads(text))
            lost += self.pulses.gone([node for node in left if node not in ends])
            time.sleep(0.05)
        end = worst(list(ends.values()))
        if lost:
            for node in lost:
                del self.places[node]
            words = f"Node(s) {', '.join(map(str, lost))} gave no sign of life for "
            end = dataclasses.replace(
                end, kind="lost", code=LOST, message=words + f"{GONE_SECONDS:.0f} s."
            )
            return self.history.without(end, sum(map(len, self.places.values())))
        before = self.history.grid
        then = self.history.after(end)
        if then.again and self.history.grid != before and self.history.spare is not None:
            self._spare(self.history.spare)
        return then

    def _spare(self, rank: int) -> None:
        """Leave out the device of a rank, except the last one of node 0, where the run began."""
        for node, (first, mine) in self.parts.items():
            if first <= rank < first + len(mine) and (node or len(mine) > 1):
                self.places[node].remove(mine[rank - first])

    def dismiss(self, attempt: int, code: int) -> None:
        """Tell all nodes to end, and wait a little until they have read it."""
        self.board.write(f"order/{attempt}", Order(attempt, code).text())
        limit = time.monotonic() + 5.0
        while time.monotonic() < limit:
            if all(self.board.read(f"bye/{node}") for node in self.places if node):
                return
            time.sleep(0.05)


def is_hidden(name: str, address: str) -> bool:
    """Whether a name that does not say so belongs to this node alone."""
    return is_loopback(address) and not is_loopback(name)


def own_host(nodes: Nodes) -> str:
    """The address by which others reach this node: the one it reaches node 0 from."""
    if nodes.node == 0:
        return nodes.host
    with contextlib.suppress(OSError), socket.create_connection((nodes.host, nodes.port), 10) as s:
        return str(s.getsockname()[0])
    return socket.gethostname()


def say(text: str) -> None:
    """Tell people, at once."""
    if text:
        print(text, file=sys.stderr, flush=True)
