"""Rates: how fast the ranks of an axis talk to each other, measured once.

    seconds = latency + bytes / bandwidth

of two sizes, of which the small one is nearly all latency.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ranvier.comm import collectives
from ranvier.comm.consensus import broadcast_text
from ranvier.grid import Axis, Grid

LARGE_BYTES = 2**22
"""Bytes of the gather whose time is mostly transfer."""
REPEATS = 5


@dataclass(frozen=True)
class CollectiveRate:
    """What a collective over an axis takes."""

    latency: float
    """Seconds before the first byte."""
    bandwidth: float
    """Bytes of the whole tensor a second."""


DEFAULT_RATE = CollectiveRate(latency=2e-5, bandwidth=1e11)
"""Of an axis nobody has measured: GPUs of one node."""


def measure_axis_rates(
    grid: Grid, axes: Iterable[tuple[str, ...]], device: torch.device
) -> dict[tuple[str, ...], CollectiveRate]:
    """The rates of axes by their names, as rank 0 has seen them, on all ranks.

    Communicates: a few small and large all-gathers over each axis, and a text over all axes.
    """
    found = {}
    for names in dict.fromkeys(axes):
        axis = grid.axis(*names)
        short, long = (_time_all_gather(axis, size, device) for size in (axis.size, LARGE_BYTES))
        bandwidth = (LARGE_BYTES - axis.size) / max(long - short, 1e-9)
        found["·".join(names)] = (short, bandwidth)
    rows = json.loads(broadcast_text(json.dumps(found), grid, device))
    return {tuple(names.split("·")): CollectiveRate(*row) for names, row in rows.items()}


def _time_all_gather(axis: Axis, size: int, device: torch.device) -> float:
    """Seconds of the fastest of a few all-gathers of `size` bytes in all."""
    part = torch.zeros(max(size // axis.size, 1), dtype=torch.uint8, device=device)
    best = 1e9
    for _ in range(REPEATS):
        _synchronize_device(device)
        start = time.perf_counter()
        collectives.all_gather(part, axis).wait()
        _synchronize_device(device)
        best = min(best, time.perf_counter() - start)
    return best


# ---- every collective -------------------------------------------------------------------

MEASURED_OPS = ("all_gather", "reduce_scatter", "all_reduce", "send")


def wire_bytes(op: str, size: int, whole: float) -> float:
    """Bytes that a rank of a ring sends for a tensor of `whole` bytes."""
    share = (size - 1) / size
    return whole * {"all_reduce": 2.0 * share, "send": 1.0}.get(op, share)


def measure_collective(
    op: str, axis: Axis, device: torch.device, *, large: int, calls: int, crowd: float = 0.0
) -> CollectiveRate:
    """Latency of an operation over an axis, and its bandwidth in bytes on the wire a second.

    large: bytes of the whole tensor whose time is mostly transfer. Means of `calls` calls count.
    crowd: ranks that want each core, if they are more than one: then the time of a processor that a
    call takes counts, so often, as others compute while this rank waits.
    Communicates: the operation, so often with each of two sizes.
    """
    small = 4 * axis.size
    times = 2.0 if op == "send" else 1.0
    short, long = (
        _mean_seconds(_build_call(op, axis, size, device), device, calls, crowd) / times
        for size in (small, large)
    )
    moved = wire_bytes(op, axis.size, large) - wire_bytes(op, axis.size, small)
    return CollectiveRate(short, moved / max(long - short, 0.02 * long))


def _build_call(op: str, axis: Axis, size: int, device: torch.device) -> Callable[[], object]:
    """The operation on a tensor of `size` bytes in all."""
    parts = max(size // (4 * axis.size), 1)
    part, whole = (torch.zeros(n, device=device) for n in (parts, parts * axis.size))
    if op == "all_gather":
        return lambda: collectives.all_gather(part, axis).wait()
    if op == "reduce_scatter":
        return lambda: collectives.reduce_scatter(whole, axis).wait()
    if op == "all_reduce":
        return lambda: collectives.all_reduce(whole, axis).wait()
    return lambda: _ping_pong(whole, axis)


def _ping_pong(x: Tensor, axis: Axis) -> None:
    """To a neighbour and back: two messages."""
    other = axis.index ^ 1
    if other >= axis.size:
        return
    if axis.index < other:
        collectives.send(x, axis, other).wait()
        collectives.receive(x, axis, other).wait()
    else:
        collectives.receive(x, axis, other).wait()
        collectives.send(x, axis, other).wait()


def _mean_seconds(
    work: Callable[[], object], device: torch.device, calls: int, crowd: float
) -> float:
    """Seconds of a call."""
    for _ in range(2):  # connections are made in the first
        work()
    _synchronize_device(device)
    start = time.perf_counter()
    busy = time.process_time()
    for _ in range(calls):
        work()
    _synchronize_device(device)
    if crowd > 1.0:
        return (time.process_time() - busy) * crowd / calls
    return (time.perf_counter() - start) / calls


def _synchronize_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
