"""Agreement: small facts that all ranks must share before they go on."""

from __future__ import annotations

import torch

from ranvier.comm import verbs
from ranvier.grid import Axis, Grid


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
