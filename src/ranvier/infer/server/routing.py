"""Chooses the replica of a request: the longest known prefix, then the least load."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_NAMES = 1 << 16
"""Number of blocks that the front remembers of a replica."""

MAX_IMBALANCE = 16
"""Open requests that a replica may have more than twice as many as another has."""


@dataclass(frozen=True)
class ReplicaLoad:
    """What a replica has to do."""

    num_waiting_tokens: int
    """Prompt tokens of waiting requests."""
    num_open: int
    """Requests that wait or run."""


def name_blocks(tokens: Sequence[int], block_size: int, salt: str) -> list[bytes]:
    """Returns a name for each full block: the hash of its tokens and of all tokens before it."""
    name = hashlib.sha256(salt.encode()).digest()
    names = []
    data = array("q", tokens).tobytes()
    for start in range(len(tokens) // block_size):
        block = data[8 * start * block_size : 8 * (start + 1) * block_size]
        name = hashlib.sha256(name + block).digest()
        names.append(name)
    return names


class PrefixMemory:
    """Names of the blocks that a replica was sent; the least recently used are forgotten."""

    def __init__(self) -> None:
        self._names: OrderedDict[bytes, None] = OrderedDict()

    def count_known(self, names: Sequence[bytes]) -> int:
        """Returns the number of leading blocks that the replica has seen."""
        for count, name in enumerate(names):
            if name not in self._names:
                return count
        return len(names)

    def add(self, names: Sequence[bytes]) -> None:
        """Remembers the blocks of a prompt."""
        for name in names:
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > MAX_NAMES:
            self._names.popitem(last=False)


def choose_replica(
    names: Sequence[bytes], memories: Mapping[int, PrefixMemory], loads: Mapping[int, ReplicaLoad]
) -> int:
    """Returns the index of a replica among those whose load is given.

    A prefix that all requests share must not send all of them to one replica: those with many more
    open requests than another are left out.
    """
    fewest = min(load.num_open for load in loads.values())
    most = 2 * fewest + MAX_IMBALANCE
    candidates = [i for i, load in loads.items() if load.num_open <= most]
    return min(
        candidates,
        key=lambda i: (
            -memories[i].count_known(names),
            loads[i].num_waiting_tokens,
            loads[i].num_open,
            i,
        ),
    )
