"""Supervisor: starts local ranks, watches them, and starts them again where that may help.

A rank that fails ends all ranks of its attempt; its own message is shown, not the broken
connections of the others. Each attempt has a store of its own, and a prefix that only its ranks
know.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from ranvier.errors import STOPPED, CommunicationError, HangError
from ranvier.launch import watchdog as watch
from ranvier.launch.environment import Ranks
from ranvier.launch.heartbeat import DONE, START, Beat, Pulse
from ranvier.launch.process_group import live, warm
from ranvier.launch.rendezvous import BOARD_SECONDS, Board, Captain, Nodes, Order, own_host, say
from ranvier.launch.restart_policy import End, History, Outcome, Policy, judged
from ranvier.launch.shared_file import SharedFile
from ranvier.launch.signals import BEFORE, Stop
from ranvier.launch.store import derive_prefix, new_key, open_listener, user_key
from ranvier.system import file_handles
from ranvier.system.terminal import draw, print

GRACE_SECONDS = 4.0
"""How long the other ranks may take to end by themselves after one has failed."""
START_SECONDS = 2.0
"""The same for ranks that have not begun: they can only tell why."""
STOP_SECONDS = 600.0
"""How long the other ranks may still save after one has stopped because of a signal."""
DONE_SECONDS = 30.0
"""How long a rank may take to leave when its work is done."""
LOOK_SECONDS = 0.5
"""How often the pulses are read."""
HANDLES = 8
"""Handles that a launcher takes for each of its ranks."""
Task = Callable[[Ranks], int]


class Told(Stop):
    """Signals to the launcher: the first is for all ranks; another ends them at once."""

    def __init__(self) -> None:
        super().__init__(patient=True)
        self.ending = 0
        """The exit code, once all are to end at once."""

    def first(self, number: int) -> None:
        """Ranks are told by whoever waits for them."""

    def again(self, number: int) -> None:
        """End all ranks."""
        self.ending = 128 + number


class Attempt:
    """Local ranks from their start to their end."""

    def __init__(self, members: Sequence[Ranks], task: Task, told: Told) -> None:
        self.members, self.told = members, told
        self.pulses: list[Pulse] = []
        self.children: list[BaseProcess] = []
        self.noticed: dict[int, float] = {}
        self.slain: set[int] = set()
        self.limit = math.inf
        """When the ranks that are left are ended."""
        self.hung = ""
        """The message of a hang."""
        self.warned = self.forwarded = self.failed = False
        context = multiprocessing.get_context("forkserver")
        for me in members:
            Pulse.lay(me.pulse)
            self.pulses.append(Pulse(me.pulse))
            self.children.append(context.Process(target=live, args=(me, task), daemon=True))
            self.children[-1].start()
            if me.listener is not None:
                me.listener.close()  # it is the rank's now

    def wait(self, watchdog: float, over: Callable[[bool], bool] = lambda _: False) -> End:
        """Wait until all have ended.

        over: is told whether a rank has failed here, and tells whether one has elsewhere.
        """
        eye, looked = watch.Eye(watchdog), 0.0
        while alive := self.alive():
            wait([self.children[i].sentinel for i in alive], timeout=0.1)
            self._notice()
            now = time.monotonic()
            if over(self.failed):
                self._within(GRACE_SECONDS)
            if self.told.ending or now > self.limit:
                self.slay()
            if self.told.signal and not self.forwarded:
                self._forward()
            if now - looked > LOOK_SECONDS and not self.slain:
                looked = now
                self._look(eye)
        self._notice()
        if self.hung:
            return End("hang", HangError.exit_code, self.hung, step=self._step())
        if self.told.ending:
            return End("error", self.told.ending, step=self._step())
        outcomes = [self._outcome(i) for i in range(len(self.members))]
        return judged(outcomes, told=bool(self.told.signal))

    def alive(self) -> list[int]:
        """The ranks that have not ended."""
        return [i for i, child in enumerate(self.children) if child.exitcode is None]

    def slay(self) -> None:
        """End the ranks that are left."""
        alive = self.alive()
        self.slain.update(alive)
        for i in alive:
            self.children[i].kill()

    def beats(self) -> list[Beat]:
        """What the pulses say."""
        return [pulse.read() for pulse in self.pulses]

    def _step(self) -> int:
        return max(beat.step for beat in self.beats())

    def _within(self, seconds: float) -> None:
        self.limit = min(self.limit, time.monotonic() + seconds)

    def _notice(self) -> None:
        """Note who has ended; the others have their time to end, too."""
        for i, child in enumerate(self.children):
            if child.exitcode is None or i in self.noticed:
                continue
            self.noticed[i] = time.time()
            silent = not os.stat(self.members[i].error_file).st_size
            if silent and self.pulses[i].read().section == DONE:
                self._within(STOP_SECONDS)
                continue
            early = self._starting()
            good = silent and child.exitcode == STOPPED and not early
            self.failed = self.failed or not good
            seconds = START_SECONDS if early else GRACE_SECONDS
            self._within(STOP_SECONDS if good else seconds)

    def _starting(self) -> bool:
        """Whether a rank is not ready to take steps: there is nothing to save."""
        return any(self.pulses[i].read().section == START for i in self.alive())

    def _forward(self) -> None:
        """Tell all ranks to stop; at their start they may be deaf, and are ended."""
        self.forwarded = True
        if self._starting():
            self.slay()
        for i in self.alive():
            with contextlib.suppress(OSError):
                os.kill(self.children[i].pid or 0, self.told.signal)

    def _look(self, eye: watch.Eye) -> None:
        """Warn of a rank that lags, and end a hang."""
        alive, beats = self.alive(), self.beats()
        for i, age in zip(alive, eye.ages([beats[i] for i in alive]), strict=True):
            if beats[i].section == DONE and age > DONE_SECONDS:
                self.children[i].kill()  # it is done whatever keeps it from leaving
        mine, pids = [beats[i] for i in alive], [self.children[i].pid for i in alive]
        if not self.warned and mine and eye.over(mine, watch.slow):
            self.warned = True
            worst = watch.behind(mine, [watch.state(pid) for pid in pids])
            print(
                f"Rank {self.members[alive[worst]].rank} lags: no sign of life for "
                f"{max(eye.ages(mine)):.0f} s in section {mine[worst].section} after step "
                f"{mine[worst].step}. The others wait for it.",
                file=sys.stderr,
                flush=True,
            )
        if mine and eye.over(mine):
            states = [watch.state(pid) for pid in pids]
            ranks = [self.members[i].rank for i in alive]
            paths = [self.members[i].stack_file for i in alive]
            texts = watch.stacks(pids, paths)
            self.hung = watch.hang(ranks, mine, states, texts, eye.seconds)
            self.slay()

    def _outcome(self, i: int) -> Outcome:
        me, report = self.members[i], None
        with contextlib.suppress(OSError, ValueError):
            report = json.loads(Path(me.error_file).read_text())
        return Outcome(
            rank=me.rank,
            code=self.children[i].exitcode or 0,
            beat=self.pulses[i].read(),
            report=report,
            noticed=self.noticed[i],
            slain=i in self.slain,
            stack=watch.stack(me.stack_file),
        )


def start(
    nproc: int,
    task: Task,
    *,
    preload: Sequence[str] = (),
    policy: Policy | None = None,
    nodes: Nodes | None = None,
    timeout_seconds: float = 600.0,
    ended: Callable[[int, str], None] = lambda code, message: None,
) -> int:
    """Run `task` as `nproc` local ranks, of one node or of several; the exit code of the run.

    preload: see `warm`; timeout_seconds: how long nodes wait for each other at the start; ended: is
    told code and message, on the first node, when no rank is left.
    """
    warm(preload)
    file_handles.require(HANDLES * nproc, f"A launcher of {nproc} ranks")
    policy = policy or Policy(grids=(("", nproc),))
    key = new_key() if nodes is None else user_key()
    board = None if nodes is None else Board(nodes, key, timeout_seconds)
    with Told() as told:
        local, over = Local(key, task, told, policy.watchdog, ended), threading.Event()
        if nodes is None or board is None:
            return _alone(local, policy, nproc)
        board.write(f"node/{nodes.node}", json.dumps({"ranks": nproc, "host": own_host(nodes)}))
        threading.Thread(target=board.live, args=(over,), daemon=True).start()
        try:
            if nodes.node == 0:
                return _lead(local, Captain(board, policy, time.time()), timeout_seconds)
            return _follow(local, board)
        except CommunicationError as error:
            say(f"node {nodes.node}: {error}")
            return error.exit_code
        finally:
            over.set()


@dataclass
class Local:
    """What attempts on this node have in common."""

    key: str
    """Of this run; see `ranvier.launch.store`."""
    task: Task
    told: Told
    watchdog: float
    ended: Callable[[int, str], None]
    """Is told the exit code of the run and its message."""

    def attempt(
        self,
        order: Order,
        node: int = 0,
        over: Callable[[bool], bool] = lambda _: False,
        *,
        store: SharedFile | None = None,
        listener: socket.socket | None = None,
    ) -> End:
        """Start this node's ranks of an attempt and wait for their end.

        store: where all ranks are on this node; listener: else that of rank 0, if it is here.
        """
        places, first = order.places[str(node)], order.first[str(node)]
        shared = [
            SharedFile(f"rank{first + i}.{name}")
            for i in range(len(places))
            for name in ("error", "pulse", "stack")
        ]
        members = [
            Ranks(
                rank=first + i,
                world=order.world,
                local_rank=place,
                local_world=len(places),
                address=order.address,
                port=order.port,
                error_file=shared[3 * i],
                pulse=shared[3 * i + 1],
                stack_file=shared[3 * i + 2],
                store=store,
                listener=listener if first + i == 0 else None,
                key=derive_prefix(self.key, order.generation),
                attempt=order.attempt,
                grid=order.grid,
                failures=order.failures,
                began=order.began,
            )
            for i, place in enumerate(places)
        ]
        attempt = Attempt(members, self.task, self.told)
        try:
            end = attempt.wait(self.watchdog, over)
        finally:
            attempt.slay()
            for file in shared:
                file.close()
        if end.code and sys.stdout.isatty():
            draw("\x1b[?25h\n")  # a progress display that was killed has hidden the cursor
        return end


def _alone(local: Local, policy: Policy, nproc: int) -> int:
    """All attempts of a run on one node."""
    history, places, began = History(policy), list(range(nproc)), time.time()
    while True:
        grid, (_, world) = history.grid, policy.grids[history.grid]
        order = Order(
            attempt=len(history.failures),
            grid=grid,
            world=world,
            generation=new_key(),
            began=began,
            first={"0": 0},
            places={"0": places[:world]},
            failures=history.failures,
        )
        with contextlib.closing(SharedFile("store")) as store:
            end = local.attempt(order, store=store)
        then = history.after(end)
        say(then.message)
        if not then.again:
            local.ended(then.code, then.message)
            return then.code
        if local.told.signal:  # it came when no rank was left to hear it
            local.ended(local.told.ending or end.code, then.message)
            return local.told.ending or end.code
        if history.grid != grid and history.spare is not None:
            del places[history.spare]


def _lead(local: Local, captain: Captain, timeout_seconds: float) -> int:
    """All attempts of a run on several nodes, as node 0."""
    if not captain.meet(timeout_seconds, local.told):
        say(BEFORE)
        captain.dismiss(0, STOPPED)
        return STOPPED
    while True:
        with open_listener(captain.board.nodes.host) as listener:
            order = captain.order(listener.getsockname()[1])
            watching = Watching(captain.board, order.attempt, captain)
            end = local.attempt(order, 0, watching.over, listener=listener)
        captain.board.write(f"end/{order.attempt}/0", json.dumps(dataclasses.asdict(end)))
        then = captain.judge(order.attempt)
        say(then.message)
        if not then.again or local.told.signal:
            code = then.code or local.told.ending or end.code
            local.ended(code, then.message)
            captain.dismiss(order.attempt + 1, code)
            return code


def _follow(local: Local, board: Board) -> int:
    """This node's part of all attempts, as node 0 orders them."""
    number, mine = 0, board.nodes.node
    while True:
        text = board.read(f"order/{number}")
        if text is None:
            if number == 0 and local.told.signal:
                say(BEFORE)
                return STOPPED
            time.sleep(0.1)
            continue
        order = Order.of(text)
        if order.code is not None:
            board.write(f"bye/{mine}", "1")
            return order.code
        if str(mine) in order.first:
            end = local.attempt(order, mine, Watching(board, number).over)
            board.write(f"end/{number}/{mine}", json.dumps(dataclasses.asdict(end)))
        number += 1


class Watching:
    """Tells other nodes of a rank that failed here, and hears of one there."""

    def __init__(self, board: Board, attempt: int, captain: Captain | None = None) -> None:
        self.board, self.attempt, self.captain = board, attempt, captain
        self._told, self._looked, self._over = False, 0.0, False

    def over(self, failed: bool) -> bool:
        """Whether a rank or a node has failed elsewhere."""
        now = time.monotonic()
        if failed and not self._told:
            self._told = True
            self.board.write(f"over/{self.attempt}", "1")
        if now - self._looked > BOARD_SECONDS and not self._over:
            self._looked = now
            self._over = self.board.read(f"over/{self.attempt}") is not None
            if self.captain is not None:
                self._over = self.captain.over(self.attempt) or self._over
        return self._over
