"""Consensus: small values that all ranks must agree on before they continue."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import distributed

from ranvier.comm import collectives
from ranvier.errors import INTERNAL_EXIT_CODE, OtherRankError, RanvierError
from ranvier.grid import Axis, Grid

T = TypeVar("T")


def world_axis(grid: Grid, channel: str = "") -> Axis:
    """Returns the axis of all ranks, on which the index is the global rank."""
    return grid.world_axis(channel=channel)


def max_over_ranks(value: int, grid: Grid, device: torch.device | str, *, channel: str = "") -> int:
    """Returns the maximum over ranks. Communicates: all-reduce of one number over all axes."""
    here = torch.tensor([value], dtype=torch.int64, device=device)
    return int(collectives.all_reduce(here, world_axis(grid, channel), "max").wait().item())


def max_each(values: Sequence[int], grid: Grid, device: torch.device | str) -> list[int]:
    """Returns the elementwise maximum over ranks. Communicates: all-reduce over all axes."""
    here = torch.tensor(values, dtype=torch.int64, device=device)
    found: list[int] = collectives.all_reduce(here, world_axis(grid), "max").wait().tolist()
    return found


def broadcast_text(
    text: str, grid: Grid, device: torch.device | str, *, rank: int = 0, channel: str = ""
) -> str:
    """Returns, on all ranks, the text of one (global) rank.

    Communicates: all-reduce of its length and broadcast of its bytes over all axes.
    """
    if grid.rank == rank:
        words = text.encode()
    else:
        words = b""
    size = max_over_ranks(len(words), grid, device, channel=channel)
    buffer = torch.zeros(size, dtype=torch.uint8, device=device)
    if words:
        buffer.copy_(torch.frombuffer(bytearray(words), dtype=torch.uint8))
    if not len(buffer):
        return ""
    axis = world_axis(grid, channel)
    found = collectives.broadcast(buffer, axis, index=axis.ranks.index(rank)).wait()
    return bytes(found.tolist()).decode()


def broadcast_through_store(name: str, text: str) -> str:
    """Returns, on all ranks, the text of rank 0, before any group exists.

    name: distinguishes the texts of a run. Communicates: a text through the store.
    """
    store = distributed.distributed_c10d._get_default_store()
    if distributed.get_rank() == 0:
        store.set(f"ranvier/{name}", text)
        return text
    found: str = store.get(f"ranvier/{name}").decode()
    return found


def gather_through_store(name: str, text: str) -> list[str]:
    """Returns, on all ranks, the texts of all ranks, before any group exists.

    name: distinguishes the texts of a run. Communicates: two texts per rank through the store.
    """
    store = distributed.distributed_c10d._get_default_store()
    store.set(f"ranvier/{name}/{distributed.get_rank()}", text)
    every: list[str] = []
    if distributed.get_rank() == 0:
        ranks = range(distributed.get_world_size())
        every = [store.get(f"ranvier/{name}/{rank}").decode() for rank in ranks]
    found: list[str] = json.loads(broadcast_through_store(name, json.dumps(every)))
    return found


def find_rank_differences(
    mine: Mapping[str, str], grid: Grid, device: torch.device | str, *, most: int = 8
) -> list[str]:
    """Returns a line for each difference from rank 0 in values that should be equal.

    most: maximum number of ranks to report.
    Communicates: all-reduce of a digest over all axes; if ranks differ, also broadcasts of texts.
    """
    text = json.dumps(dict(mine), sort_keys=True)
    # Seven bytes, so that the digest and its negation are valid int64. All ranks agree if the
    # maximum equals the minimum.
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    if max_over_ranks(digest, grid, device) == -max_over_ranks(-digest, grid, device):
        return []
    first = json.loads(broadcast_text(text, grid, device))
    odd = [
        f"{key}={mine.get(key)} on rank {grid.rank}, but {first.get(key)} on rank 0"
        for key in sorted({*mine, *first})
        if mine.get(key) != first.get(key)
    ]
    flag = torch.tensor([len(odd)], device=device)
    axis = world_axis(grid)
    counts = collectives.all_gather(flag, axis).wait().tolist()
    whose = [rank for rank, count in zip(axis.ranks, counts, strict=True) if count]
    words = (broadcast_text(json.dumps(odd), grid, device, rank=rank) for rank in whose[:most])
    return [line for word in words for line in json.loads(word)]


def run_and_raise_together(work: Callable[[], T], grid: Grid, device: torch.device | str) -> T:
    """Runs `work`; if it fails on any rank, raises on all ranks.

    Ranks on which it fails raise their own error, the others raise `OtherRankError`.
    Communicates: all-reduce of one number over all axes.
    """
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    # All ranks exit with the largest exit code.
    if error is None:
        code = 0
    else:
        code = INTERNAL_EXIT_CODE
    worst = max_over_ranks(
        error.exit_code if isinstance(error, RanvierError) else code, grid, device
    )
    if error is not None:
        raise error
    if worst:
        raise OtherRankError(worst)
    return result


def broadcast_first_error(text: str, grid: Grid, device: torch.device | str) -> str:
    """Returns, on all ranks, the text of the lowest rank with a text; "" if there is none.

    Communicates: all-reduce of one number, then possibly broadcast of a text, over all axes.
    """
    # The maximum of world_size - rank belongs to the lowest rank with a text.
    first = grid.world_size - max_over_ranks(
        grid.world_size - grid.rank if text else 0, grid, device
    )
    if first < grid.world_size:
        return broadcast_text(text, grid, device, rank=first)
    return ""
