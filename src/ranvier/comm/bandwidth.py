"""Latency and bandwidth of collectives over an axis, measured once.

    seconds = latency + bytes / bandwidth

is fitted to two sizes; the time of the small one is almost only latency.
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
"""Bytes of the large all-gather, whose time is mostly transfer."""
REPEATS = 5


@dataclass(frozen=True)
class CollectiveRate:
    """Latency and bandwidth of a collective over an axis."""

    latency: float
    """Seconds until the first byte."""
    bandwidth: float
    """Bytes of the full tensor per second."""


DEFAULT_RATE = CollectiveRate(latency=2e-5, bandwidth=1e11)
"""Rate of an axis that was not measured: GPUs within a node."""


def measure_axis_rates(
    grid: Grid, axes: Iterable[tuple[str, ...]], device: torch.device
) -> dict[tuple[str, ...], CollectiveRate]:
    """Returns the rates of axes by their names; all ranks get the measurements of rank 0.

    Communicates: a few small and large all-gathers over each axis, broadcast over all axes.
    """
    found = {}
    for names in dict.fromkeys(axes):
        axis = grid.axis(*names)
        short, long = (_time_all_gather(axis, size, device) for size in (axis.size, LARGE_BYTES))
        bandwidth = (LARGE_BYTES - axis.size) / max(long - short, 1e-9)
        found["·".join(names)] = (short, bandwidth)
    # All ranks must use the same numbers, so that they make the same decisions.
    rows = json.loads(broadcast_text(json.dumps(found), grid, device))
    return {tuple(names.split("·")): CollectiveRate(*row) for names, row in rows.items()}


def _time_all_gather(axis: Axis, size: int, device: torch.device) -> float:
    """Returns the seconds of the fastest of several all-gathers of `size` bytes in total."""
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
    """Returns the bytes that a rank of a ring sends for a tensor of `whole` bytes."""
    # An all-reduce consists of a reduce-scatter and an all-gather.
    share = (size - 1) / size
    return whole * {"all_reduce": 2.0 * share, "send": 1.0}.get(op, share)


def measure_collective(
    op: str, axis: Axis, device: torch.device, *, large: int, calls: int, crowd: float = 0.0
) -> CollectiveRate:
    """Returns the latency of an operation over an axis, and its bandwidth in wire bytes per second.

    Times are means over `calls` calls. large: bytes of the large tensor, whose time is mostly
    transfer. crowd: ranks per core; above 1, CPU time multiplied by `crowd` is used instead of wall
    time, as other ranks compute while this one waits.
    Communicates: the operation, `calls` times with each of two sizes.
    """
    small = 4 * axis.size
    # A send is measured as a ping-pong of two messages.
    times = 2.0 if op == "send" else 1.0
    short, long = (
        _mean_seconds(build_call(op, axis, size, device), device, calls, crowd) / times
        for size in (small, large)
    )
    moved = wire_bytes(op, axis.size, large) - wire_bytes(op, axis.size, small)
    # With noise the two times may be almost equal; at least 2% difference limits the bandwidth.
    return CollectiveRate(short, moved / max(long - short, 0.02 * long))


def build_call(op: str, axis: Axis, size: int, device: torch.device) -> Callable[[], object]:
    """Returns a function that runs the operation on a tensor of `size` bytes in total.

    Communicates: the operation over the axis, at each call.
    """
    # Four bytes per element (fp32).
    parts = max(size // (4 * axis.size), 1)
    part, whole = (torch.zeros(n, device=device) for n in (parts, parts * axis.size))
    if op == "all_gather":
        return lambda: collectives.all_gather(part, axis).wait()
    if op == "reduce_scatter":
        return lambda: collectives.reduce_scatter(whole, axis).wait()
    if op == "all_reduce":
        return lambda: collectives.all_reduce(whole, axis).wait()
    if op == "all_to_all":
        return lambda: collectives.all_to_all(whole, axis).wait()
    if op == "broadcast":
        return lambda: collectives.broadcast(whole, axis).wait()
    assert op == "send", op
    return lambda: _ping_pong(whole, axis)


def _ping_pong(x: Tensor, axis: Axis) -> None:
    """Sends to a neighbour and receives from it, i.e. two messages."""
    # Ranks 0-1, 2-3, ... are pairs; if the size is odd, the last rank has no partner.
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
    """Returns the mean seconds per call."""
    # Warm-up: the first call creates connections.
    for _ in range(2):
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
