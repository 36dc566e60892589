"""Agent: starts local ranks, monitors them, and restarts them if that may help.

A rank that fails ends all ranks of its attempt. Its own message is shown, not the broken
connections of the others. Each attempt has its own store, with a prefix that only its ranks know.
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

from ranvier.errors import STOPPED_EXIT_CODE, CommunicationError, HangError
from ranvier.launch import watchdog as watch
from ranvier.launch.environment import ProcessInfo
from ranvier.launch.heartbeat import DONE, START, Heartbeat, HeartbeatState
from ranvier.launch.process_group import run_rank, start_forkserver
from ranvier.launch.rendezvous import (
    STORE_POLL_SECONDS,
    Coordinator,
    LaunchOrder,
    NodeInfo,
    RendezvousStore,
    print_message,
    reachable_host,
)
from ranvier.launch.restart_policy import (
    AttemptResult,
    RankOutcome,
    RestartHistory,
    RestartPolicy,
    judge_attempt,
)
from ranvier.launch.shared_file import SharedFile
from ranvier.launch.signals import NOTHING_SAVED_MESSAGE, GracefulStop
from ranvier.launch.store import derive_prefix, new_key, open_listener, user_key
from ranvier.system import file_handles
from ranvier.system.terminal import print, write_raw

GRACE_SECONDS = 4.0
"""Time that the other ranks have to exit after one has failed."""
START_SECONDS = 2.0
"""The same for ranks that are still starting, which can only report an error."""
STOP_SECONDS = 600.0
"""Time that the other ranks have to save after one has stopped because of a signal."""
DONE_SECONDS = 30.0
"""Time that a rank has to exit after its work is done."""
HEARTBEAT_POLL_SECONDS = 0.5
"""Interval at which the heartbeats are read."""
HANDLES_PER_RANK = 8
"""File handles that a launcher needs per rank."""
RankTask = Callable[[ProcessInfo], int]


class SignalRelay(GracefulStop):
    """Handles signals to the launcher: the first is forwarded, a second ends all ranks at once."""

    def __init__(self) -> None:
        super().__init__(patient=True)
        self.exit_code = 0
        """Exit code if all ranks are to end at once; 0 before."""

    def on_first_signal(self, number: int) -> None:
        """Do nothing: `WorkerGroup.wait_for_end` forwards it to the ranks."""

    def on_repeated_signal(self, number: int) -> None:
        """Ends all ranks at once."""
        self.exit_code = 128 + number


class WorkerGroup:
    """Local ranks from their start to their end."""

    def __init__(self, members: Sequence[ProcessInfo], task: RankTask, told: SignalRelay) -> None:
        self.members = members
        self.signal_relay = told
        self.heartbeats: list[Heartbeat] = []
        self.children: list[BaseProcess] = []
        self.notice_times: dict[int, float] = {}
        self.killed_ranks: set[int] = set()
        self.deadline = math.inf
        """Time at which the remaining ranks are killed."""
        self.hang_message = ""
        """Message of a hang; empty without one."""
        self.has_warned = self.has_forwarded = self.has_failed = False
        context = multiprocessing.get_context("forkserver")
        for me in members:
            Heartbeat.create_file(me.heartbeat_file)
            self.heartbeats.append(Heartbeat(me.heartbeat_file))
            self.children.append(context.Process(target=run_rank, args=(me, task), daemon=True))
            self.children[-1].start()
            if me.listener is not None:
                # The rank has its own copy of the socket.
                me.listener.close()

    def wait_for_end(
        self, watchdog: float, over: Callable[[bool], bool] = lambda _: False
    ) -> AttemptResult:
        """Waits until all ranks have ended.

        over: called with whether a rank has failed here; returns whether one has failed elsewhere.
        """
        eye = watch.Watchdog(watchdog)
        looked = 0.0
        while alive := self.alive_ranks():
            wait([self.children[i].sentinel for i in alive], timeout=0.1)
            self._notice_ends()
            now = time.monotonic()
            if over(self.has_failed):
                self._set_deadline(GRACE_SECONDS)
            if self.signal_relay.exit_code or now > self.deadline:
                self.kill_ranks()
            if self.signal_relay.signal and not self.has_forwarded:
                self._forward_signal()
            if now - looked > HEARTBEAT_POLL_SECONDS and not self.killed_ranks:
                looked = now
                self._check_heartbeats(eye)
        self._notice_ends()
        # In order of precedence: a hang, a second signal, then the ranks' own exits.
        if self.hang_message:
            return AttemptResult(
                "hang", HangError.exit_code, self.hang_message, step=self._highest_step()
            )
        if self.signal_relay.exit_code:
            return AttemptResult("error", self.signal_relay.exit_code, step=self._highest_step())
        outcomes = [self._rank_outcome(i) for i in range(len(self.members))]
        return judge_attempt(outcomes, told=bool(self.signal_relay.signal))

    def alive_ranks(self) -> list[int]:
        """Return the indices of ranks that are still running."""
        return [i for i, child in enumerate(self.children) if child.exitcode is None]

    def kill_ranks(self) -> None:
        """Kill the remaining ranks."""
        alive = self.alive_ranks()
        self.killed_ranks.update(alive)
        for i in alive:
            self.children[i].kill()

    def read_heartbeats(self) -> list[HeartbeatState]:
        """Return the heartbeats of all ranks."""
        return [pulse.read_state() for pulse in self.heartbeats]

    def _highest_step(self) -> int:
        return max(beat.step for beat in self.read_heartbeats())

    def _set_deadline(self, seconds: float) -> None:
        self.deadline = min(self.deadline, time.monotonic() + seconds)

    def _notice_ends(self) -> None:
        """Note which ranks have ended, and set the deadline of the others."""
        for i, child in enumerate(self.children):
            if child.exitcode is None or i in self.notice_times:
                continue
            self.notice_times[i] = time.time()
            # A rank that is done, or has stopped cleanly, gives the others time to save. After a
            # failure they only have time to report it.
            silent = not os.stat(self.members[i].error_file).st_size
            if silent and self.heartbeats[i].read_state().section == DONE:
                self._set_deadline(STOP_SECONDS)
                continue
            early = self._is_starting()
            good = silent and child.exitcode == STOPPED_EXIT_CODE and not early
            self.has_failed = self.has_failed or not good
            if early:
                seconds = START_SECONDS
            else:
                seconds = GRACE_SECONDS
            self._set_deadline(STOP_SECONDS if good else seconds)

    def _is_starting(self) -> bool:
        """Whether a rank is still starting, so that there is nothing to save."""
        return any(self.heartbeats[i].read_state().section == START for i in self.alive_ranks())

    def _forward_signal(self) -> None:
        """Forwards the signal to all ranks. Ranks that are starting may ignore it, so they are
        killed."""
        self.has_forwarded = True
        if self._is_starting():
            self.kill_ranks()
        for i in self.alive_ranks():
            with contextlib.suppress(OSError):
                os.kill(self.children[i].pid or 0, self.signal_relay.signal)

    def _check_heartbeats(self, eye: watch.Watchdog) -> None:
        """Warns about a slow rank, and kills all ranks if one hangs."""
        alive = self.alive_ranks()
        beats = self.read_heartbeats()
        for i, age in zip(alive, eye.silence_seconds([beats[i] for i in alive]), strict=True):
            if beats[i].section == DONE and age > DONE_SECONDS:
                # Its work is done, so it does not matter what keeps it from exiting.
                self.children[i].kill()
        mine = [beats[i] for i in alive]
        pids = [self.children[i].pid for i in alive]
        if not self.has_warned and mine and eye.is_over_limit(mine, watch.warning_limit):
            self.has_warned = True
            worst = watch.find_slowest_rank(mine, [watch.process_state(pid) for pid in pids])
            print(
                f"Rank {self.members[alive[worst]].rank} is slow: no progress for "
                f"{max(eye.silence_seconds(mine)):.0f} s in section {mine[worst].section} "
                f"after step {mine[worst].step}. The other ranks wait for it.",
                file=sys.stderr,
                flush=True,
            )
        if mine and eye.is_over_limit(mine):
            states = [watch.process_state(pid) for pid in pids]
            ranks = [self.members[i].rank for i in alive]
            paths = [self.members[i].stack_file for i in alive]
            texts = watch.collect_stacks(pids, paths)
            self.hang_message = watch.describe_hang(ranks, mine, states, texts, eye.seconds)
            self.kill_ranks()

    def _rank_outcome(self, i: int) -> RankOutcome:
        me = self.members[i]
        report = None
        with contextlib.suppress(OSError, ValueError):
            report = json.loads(Path(me.error_file).read_text())
        return RankOutcome(
            rank=me.rank,
            exit_code=self.children[i].exitcode or 0,
            heartbeat=self.heartbeats[i].read_state(),
            report=report,
            notice_time=self.notice_times[i],
            was_killed=i in self.killed_ranks,
            stack=watch.read_stack(me.stack_file),
        )


def launch_ranks(
    nproc: int,
    task: RankTask,
    *,
    preload: Sequence[str] = (),
    policy: RestartPolicy | None = None,
    nodes: NodeInfo | None = None,
    timeout_seconds: float = 600.0,
    ended: Callable[[int, str], None] = lambda code, message: None,
) -> int:
    """Runs `task` as `nproc` local ranks, on one node or several, and returns the exit code.

    preload: see `start_forkserver`; timeout_seconds: how long nodes wait for each other at the
    start; ended: called with exit code and message, on the first node, when all ranks have ended.
    """
    # First, so that the imports overlap with the following code.
    start_forkserver(preload)
    file_handles.require_handles(HANDLES_PER_RANK * nproc, f"Launching {nproc} ranks")
    policy = policy or RestartPolicy(grids=(("", nproc),))
    # On one node a new key is passed to the ranks; several nodes must share the user's key.
    if nodes is None:
        key = new_key()
    else:
        key = user_key()
    if nodes is None:
        board = None
    else:
        board = RendezvousStore(nodes, key, timeout_seconds)
    with SignalRelay() as told:
        local = LocalAgent(key, task, told, policy.watchdog_seconds, ended)
        over = threading.Event()
        if nodes is None or board is None:
            return _run_single_node(local, policy, nproc)
        board.write_text(
            f"node/{nodes.node_rank}", json.dumps({"ranks": nproc, "host": reachable_host(nodes)})
        )
        threading.Thread(target=board.send_heartbeats, args=(over,), daemon=True).start()
        try:
            if nodes.node_rank == 0:
                return _run_coordinator(
                    local, Coordinator(board, policy, time.time()), timeout_seconds
                )
            return _run_follower(local, board)
        except CommunicationError as error:
            print_message(f"node {nodes.node_rank}: {error}")
            return error.exit_code
        finally:
            over.set()


@dataclass
class LocalAgent:
    """Runs attempts on this node."""

    key: str
    """Key of this run; see `ranvier.launch.store`."""
    task: RankTask
    signal_relay: SignalRelay
    watchdog_seconds: float
    on_end: Callable[[int, str], None]
    """Called with the exit code of the run and its message."""

    def run_attempt(
        self,
        order: LaunchOrder,
        node: int = 0,
        over: Callable[[bool], bool] = lambda _: False,
        *,
        store: SharedFile | None = None,
        listener: socket.socket | None = None,
    ) -> AttemptResult:
        """Starts this node's ranks of an attempt and waits for their end.

        store: file of the store if all ranks are on this node; listener: otherwise the socket of
        rank 0 if it is on this node.
        """
        places = order.local_ranks[str(node)]
        first = order.first_ranks[str(node)]
        shared = [
            SharedFile(f"rank{first + i}.{name}")
            for i in range(len(places))
            for name in ("error", "pulse", "stack")
        ]
        members = [
            ProcessInfo(
                rank=first + i,
                world_size=order.world_size,
                local_rank=place,
                local_world_size=len(places),
                address=order.address,
                port=order.port,
                error_file=shared[3 * i],
                heartbeat_file=shared[3 * i + 1],
                stack_file=shared[3 * i + 2],
                store_file=store,
                listener=listener if first + i == 0 else None,
                store_prefix=derive_prefix(self.key, order.generation),
                attempt=order.attempt,
                grid_index=order.grid_index,
                failures=order.failures,
                start_time=order.start_time,
            )
            for i, place in enumerate(places)
        ]
        attempt = WorkerGroup(members, self.task, self.signal_relay)
        try:
            end = attempt.wait_for_end(self.watchdog_seconds, over)
        # Also after an exception in this process: no rank may outlive its attempt.
        finally:
            attempt.kill_ranks()
            for file in shared:
                file.close()
        if end.exit_code and sys.stdout.isatty():
            # A progress display that was killed has hidden the cursor, so show it.
            write_raw("\x1b[?25h\n")
        return end


def _run_single_node(local: LocalAgent, policy: RestartPolicy, nproc: int) -> int:
    """Run all attempts on a single node and return the exit code."""
    history = RestartHistory(policy)
    places = list(range(nproc))
    began = time.time()
    while True:
        grid, (_, world) = history.grid_index, policy.grids[history.grid_index]
        order = LaunchOrder(
            attempt=len(history.failures),
            grid_index=grid,
            world_size=world,
            generation=new_key(),
            start_time=began,
            first_ranks={"0": 0},
            local_ranks={"0": places[:world]},
            failures=history.failures,
        )
        with contextlib.closing(SharedFile("store")) as store:
            end = local.run_attempt(order, store=store)
        then = history.decide_after(end)
        print_message(then.message)
        if not then.restart:
            local.on_end(then.exit_code, then.message)
            return then.exit_code
        # The signal arrived when no rank was left to receive it.
        if local.signal_relay.signal:
            local.on_end(local.signal_relay.exit_code or end.exit_code, then.message)
            return local.signal_relay.exit_code or end.exit_code
        if history.grid_index != grid and history.excluded_rank is not None:
            del places[history.excluded_rank]


def _run_coordinator(local: LocalAgent, captain: Coordinator, timeout_seconds: float) -> int:
    """Run all attempts on several nodes, as node 0, and return the exit code."""
    if not captain.wait_for_nodes(timeout_seconds, local.signal_relay):
        print_message(NOTHING_SAVED_MESSAGE)
        captain.dismiss_nodes(0, STOPPED_EXIT_CODE)
        return STOPPED_EXIT_CODE
    while True:
        # Each attempt gets any free port, which the order announces to the other nodes.
        with open_listener(captain.store.nodes.host) as listener:
            order = captain.issue_order(listener.getsockname()[1])
            watching = FailureRelay(captain.store, order.attempt, captain)
            end = local.run_attempt(order, 0, watching.check_other_nodes, listener=listener)
        captain.store.write_text(f"end/{order.attempt}/0", json.dumps(dataclasses.asdict(end)))
        then = captain.decide_next(order.attempt)
        print_message(then.message)
        if not then.restart or local.signal_relay.signal:
            code = then.exit_code or local.signal_relay.exit_code or end.exit_code
            local.on_end(code, then.message)
            captain.dismiss_nodes(order.attempt + 1, code)
            return code


def _run_follower(local: LocalAgent, board: RendezvousStore) -> int:
    """Run this node's part of all attempts, as ordered by node 0."""
    number = 0
    mine = board.nodes.node_rank
    while True:
        text = board.read_text(f"order/{number}")
        if text is None:
            if number == 0 and local.signal_relay.signal:
                print_message(NOTHING_SAVED_MESSAGE)
                return STOPPED_EXIT_CODE
            time.sleep(0.1)
            continue
        order = LaunchOrder.from_json(text)
        if order.exit_code is not None:
            board.write_text(f"bye/{mine}", "1")
            return order.exit_code
        if str(mine) in order.first_ranks:
            end = local.run_attempt(order, mine, FailureRelay(board, number).check_other_nodes)
            board.write_text(f"end/{number}/{mine}", json.dumps(dataclasses.asdict(end)))
        number += 1


class FailureRelay:
    """Reports failed ranks of this node to the others, and polls for failures there."""

    def __init__(
        self, board: RendezvousStore, attempt: int, captain: Coordinator | None = None
    ) -> None:
        self.store = board
        self.attempt = attempt
        self.coordinator = captain
        self._has_reported = False
        self._last_poll = 0.0
        self._failed_elsewhere = False

    def check_other_nodes(self, failed: bool) -> bool:
        """Report a failure of this node, and return whether a rank or node has failed elsewhere."""
        now = time.monotonic()
        if failed and not self._has_reported:
            self._has_reported = True
            self.store.write_text(f"over/{self.attempt}", "1")
        if now - self._last_poll > STORE_POLL_SECONDS and not self._failed_elsewhere:
            self._last_poll = now
            self._failed_elsewhere = self.store.read_text(f"over/{self.attempt}") is not None
            if self.coordinator is not None:
                self._failed_elsewhere = (
                    self.coordinator.check_lost_nodes(self.attempt) or self._failed_elsewhere
                )
        return self._failed_elsewhere
