"""Which rank is the cause when a collective fails: found by asking the other ranks.

A rank whose collective fails suspects its peer in a message, or all ranks of the axis if the
backend does not name one. They may be waiting for another rank themselves. Each rank publishes its
suspects; those that publish nothing have ended, are stopped, or never took part.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ANSWER_SECONDS = 2.0
"""Time in which ranks that wait for the same rank report their failures one after the other."""
POLL_SECONDS = 0.05


class LostRankError(RuntimeError):
    """A message to or from a rank failed."""

    def __init__(self, rank: int, why: str, *, has_ended: bool = False) -> None:
        """has_ended: it is known that the process of that rank has ended."""
        super().__init__(f"rank {rank} {why}")
        self.rank = rank
        self.has_ended = has_ended


def find_lost_ranks(
    store: Store, rank: int, suspects: Iterable[int], answer_seconds: float = ANSWER_SECONDS
) -> list[int]:
    """Returns the ranks that the failure of `rank` goes back to, as far as is known.

    answer_seconds: time in which suspects that are not lost answer. Communicates: a text through
    the store.
    """
    asked = {rank}
    current = {*suspects} - asked
    store.set(_key(rank), json.dumps(sorted(current)))
    while current:
        answers = _published_suspects(store, current, answer_seconds)
        lost = sorted(current - {*answers})
        if lost:
            return lost
        asked |= current
        current = {one for suspects in answers.values() for one in suspects} - asked
    return []


def _published_suspects(store: Store, ranks: Iterable[int], seconds: float) -> dict[int, list[int]]:
    """Returns the suspects of the ranks that publish theirs in time."""
    deadline = time.monotonic() + seconds
    pending = {*ranks}
    found: dict[int, list[int]] = {}
    while pending:
        for rank in [*pending]:
            if store.check([_key(rank)]):
                found[rank] = json.loads(store.get(_key(rank)))
                pending.remove(rank)
        if not pending or time.monotonic() >= deadline:
            break
        time.sleep(POLL_SECONDS)
    return found


def _key(rank: int) -> str:
    return f"ranvier/lost/{rank}"
