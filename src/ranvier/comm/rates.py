"""Rates: how fast the ranks of an axis talk to each other, measured once."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ranvier.comm import verbs
from ranvier.comm.agree import told
from ranvier.grid import Axis, Grid

LARGE = 2**22
"""Bytes of the gather whose time is mostly transfer."""
REPEATS = 5


@dataclass(frozen=True)
class Rate:
    """What a collective over an axis takes."""

    latency: float
    """Seconds before the first byte."""
    bandwidth: float
    """Bytes of the whole tensor a second."""


USUAL = Rate(latency=2e-5, bandwidth=1e11)
"""Of an axis nobody has measured: GPUs of one node."""


def measured(
    grid: Grid, axes: Iterable[tuple[str, ...]], device: torch.device
) -> dict[tuple[str, ...], Rate]:
    """The rates of axes by their names, as rank 0 has seen them, on all ranks.

    Communicates: a few small and large all-gathers over each axis, and a text over all axes.
    """
    found = {}
    for names in dict.fromkeys(axes):
        axis = grid.axis(*names)
        short, long = (_time(axis, size, device) for size in (axis.size, LARGE))
        bandwidth = (LARGE - axis.size) / max(long - short, 1e-9)
        found["·".join(names)] = (short, bandwidth)
    rows = json.loads(told(json.dumps(found), grid, device))
    return {tuple(names.split("·")): Rate(*row) for names, row in rows.items()}


def _time(axis: Axis, size: int, device: torch.device) -> float:
    """Seconds of the fastest of a few all-gathers of `size` bytes in all."""
    part, best = torch.zeros(max(size // axis.size, 1), dtype=torch.uint8, device=device), 1e9
    for _ in range(REPEATS):
        _wait(device)
        start = time.perf_counter()
        verbs.all_gather(part, axis).wait()
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
