"""Agreement: small facts that all ranks must share before they go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from ranvier.comm import verbs
from ranvier.errors import INTERNAL, ElsewhereError, RanvierError
from ranvier.grid import Axis, Grid

T = TypeVar("T")


def everyone(grid: Grid) -> Axis:
    """All ranks."""
    return grid.axis(*grid.degrees)


def largest(value: int, grid: Grid, device: torch.device | str) -> int:
    """The largest number any rank has. Communicates: all-reduce of one number over all axes."""
    here = torch.tensor([value], dtype=torch.int64, device=device)
    return int(verbs.all_reduce(here, everyone(grid), "max").wait().item())


def told(text: str, grid: Grid, device: torch.device | str, *, source: int = 0) -> str:
    """The text of rank `source` on all ranks.

    Communicates: all-reduce of its length and broadcast of its bytes over all axes.
    """
    words = text.encode() if grid.rank == source else b""
    buffer = torch.zeros(largest(len(words), grid, device), dtype=torch.uint8, device=device)
    if words:
        buffer.copy_(torch.frombuffer(bytearray(words), dtype=torch.uint8))
    if not len(buffer):
        return ""
    return bytes(verbs.broadcast(buffer, everyone(grid), source).wait().tolist()).decode()


def together(work: Callable[[], T], grid: Grid, device: torch.device | str) -> T:
    """Do my part; an error of any rank is an error on all, told by those that met it.

    Communicates: one number over all axes.
    """
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    code = 0 if error is None else INTERNAL
    worst = largest(error.exit_code if isinstance(error, RanvierError) else code, grid, device)
    if error is not None:
        raise error
    if worst:
        raise ElsewhereError(worst)
    return result
