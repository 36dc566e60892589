"""Runs the schedules of all ranks of an axis in one process, and checks every message.

Blocks are arrays. What a rank does not have is None. A collective of an engine is run as a ring of
its group. Anything that ranks would disagree on, wait for forever or overwrite is a ScheduleError.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ranvier.comm.algorithms.native import Engine
from ranvier.comm.algorithms.ring import RING
from ranvier.comm.algorithms.schedule import (
    Algorithm,
    AxisShape,
    GroupStep,
    Operation,
    Round,
    Step,
    Transfer,
)

Array = NDArray[np.float64]
Buffer = list[Array | None]
"""Blocks of a rank."""


class ScheduleError(AssertionError):
    """Schedules of the ranks of an axis that do not fit together."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ScheduleError(message)


@dataclass
class Traffic:
    """What was sent, in blocks."""

    rounds: int = 0
    sent_blocks: Counter[int] = field(default_factory=Counter)
    """By each rank."""
    leaving_blocks: Counter[int] = field(default_factory=Counter)
    """By each node, to others."""


def simulate(
    algorithm: Algorithm, operation: Operation, shape: AxisShape, buffers: list[Buffer]
) -> Traffic:
    """Runs a collective on the buffers of all ranks, in place, and returns its traffic."""
    if isinstance(algorithm, Engine):
        assert not any(algorithm.steps(operation, shape, index) for index in range(shape.size))
        algorithm = RING
    schedules = [algorithm.steps(operation, shape, index) for index in range(shape.size)]
    traffic = Traffic()
    for rounds in expand_schedules(schedules, shape):
        check_messages(rounds)
        run_round(rounds, buffers)
        traffic.rounds += 1
        for index, one in enumerate(rounds):
            for transfer in one.sends:
                traffic.sent_blocks[index] += len(transfer.blocks)
                if shape.nodes[index] != shape.nodes[transfer.peer]:
                    traffic.leaving_blocks[shape.nodes[index]] += len(transfer.blocks)
    return traffic


def expand_schedules(
    schedules: Sequence[Sequence[Step]], shape: AxisShape
) -> list[tuple[Round, ...]]:
    """Returns the rounds of all ranks, with those of rings for the collectives of engines."""
    require(len({*map(len, schedules)}) == 1, "ranks have different numbers of steps")
    rounds: list[tuple[Round, ...]] = []
    for steps in zip(*schedules, strict=True):
        expanded = [expand_step(steps, shape, index) for index in range(shape.size)]
        require(len({*map(len, expanded)}) == 1, "ranks have different numbers of rounds")
        rounds += zip(*expanded, strict=True)
    return rounds


def expand_step(steps: Sequence[Step], shape: AxisShape, index: int) -> list[Round]:
    step = steps[index]
    if isinstance(step, Round):
        return [step]
    check_group(steps, shape, index, step)
    ring = RING.level_steps(step.operation, step.level, step.ranks, step.blocks, index)
    return [each for each in ring if isinstance(each, Round)]


def check_group(steps: Sequence[Step], shape: AxisShape, index: int, step: GroupStep) -> None:
    """Checks that all members of a group run the same collective, on the level that it names."""
    require(index in step.ranks, f"rank {index} is not a member of its own group {step.ranks}")
    require({*step.ranks} == {*shape.group(step.level, index)}, f"{step} is no group of the level")
    require(all(steps[rank] == step for rank in step.ranks), f"members disagree on {step}")
    moved = [block for blocks in step.blocks for block in blocks]
    require(len({*moved}) == len(moved), f"{step} has a block twice")


def check_messages(rounds: Sequence[Round]) -> None:
    """Checks that what is sent is received, and that a rank does not overwrite what it sends."""
    sent = {
        (source, each.peer, each.blocks, each.reduce)
        for source, one in enumerate(rounds)
        for each in one.sends
    }
    received = {
        (each.peer, target, each.blocks, each.reduce)
        for target, one in enumerate(rounds)
        for each in one.receives
    }
    require(sent == received, f"sends do not match receives: {sent ^ received}")
    require(bool(sent), "a round has no messages")
    for index, one in enumerate(rounds):
        for transfers in (one.sends, one.receives):
            peers = [each.peer for each in transfers]
            require(len({*peers}) == len(peers), f"rank {index} has two messages of one peer")
            require(index not in peers, f"rank {index} sends to itself")
        check_stores(index, one)


def check_stores(index: int, one: Round) -> None:
    """Checks that a block which a rank stores has no other use in the round."""
    uses: Counter[int] = Counter()
    for each in one.receives:
        uses.update({*each.blocks} if each.reduce else each.blocks)
    sent = {block for each in one.sends for block in each.blocks}
    for each in one.receives:
        for block in each.blocks:
            if not each.reduce:
                clashes = uses[block] > 1 or block in sent
                require(not clashes, f"rank {index} stores block {block}, which is in use")


def run_round(rounds: Sequence[Round], buffers: list[Buffer]) -> None:
    """Delivers all messages of a round; sums are in the order of the ranks."""
    before = [list(buffer) for buffer in buffers]
    for index, one in enumerate(rounds):
        contributions: dict[int, list[int]] = {}
        for each in one.receives:
            for block in each.blocks:
                if each.reduce:
                    contributions.setdefault(block, [index]).append(each.peer)
                else:
                    buffers[index][block] = take(before, each.peer, block)
        for block, ranks in contributions.items():
            first, *others = sorted(ranks)
            total = take(before, first, block)
            for rank in others:
                total = total + take(before, rank, block)
            buffers[index][block] = total


def take(buffers: list[Buffer], rank: int, block: int) -> Array:
    value = buffers[rank][block]
    if value is None:
        raise ScheduleError(f"rank {rank} does not have block {block} yet")
    return value


def check_pair(index: int, steps: Sequence[Step], peer: int, peer_steps: Sequence[Step]) -> None:
    """Checks the messages between two ranks."""
    pair = f"ranks {index} and {peer}"
    require(len(steps) == len(peer_steps), f"{pair} have different numbers of steps")
    for step, other in zip(steps, peer_steps, strict=True):
        if isinstance(step, Round) and isinstance(other, Round):
            there = messages_with(peer, step.sends) == messages_with(index, other.receives)
            back = messages_with(peer, step.receives) == messages_with(index, other.sends)
            require(there and back, f"messages between {pair} do not match")
        elif isinstance(step, GroupStep) and peer in step.ranks:
            require(step == other, f"{pair} disagree on {step}")
        else:
            require(type(step) is type(other), f"{pair} disagree on a step")


def messages_with(peer: int, transfers: Sequence[Transfer]) -> list[tuple[tuple[int, ...], bool]]:
    return [(each.blocks, each.reduce) for each in transfers if each.peer == peer]
