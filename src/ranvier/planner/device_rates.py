"""Measures how fast a device multiplies, copies, and exchanges data with its host.

Each number is the best of a few tries of some milliseconds, so that other load on the machine
matters little. On a CPU the device is the host: both directions are plain copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

MEASURE_TRIES = 3


@dataclass(frozen=True)
class DeviceRates:
    """Rates of a device, per second."""

    flops: float
    """FLOPs of large matmuls, in the dtype of the run."""
    memory: float
    """Bytes read or written in its memory."""
    to_device: float
    """Bytes from pinned host memory, while as many bytes are copied the other way."""
    to_host: float
    """Bytes to pinned host memory, while as many bytes are copied the other way."""
    adam: float
    """Parameters that the host's processors update."""


def measure_rates(device: torch.device, dtype: torch.dtype) -> DeviceRates:
    """Returns the rates of a device. Takes well under a second."""
    with torch.no_grad():
        to_device, to_host = _host_link_rates(device)
        flops = _matmul_rate(device, dtype)
        memory = _memory_rate(device)
    # Release the test tensors that the caching allocator still holds.
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return DeviceRates(flops, memory, to_device, to_host, _cpu_adam_rate(_copy_bytes(device) // 2))


def _time_best(device: torch.device, work: Callable[[], object]) -> float:
    """Returns the seconds of the fastest of a few tries."""
    times = []
    # The first try warms up and is not counted.
    for i in range(MEASURE_TRIES + 1):
        _synchronize(device)
        start = time.perf_counter()
        work()
        _synchronize(device)
        times.append((i, time.perf_counter() - start))
    return max(min(seconds for i, seconds in times if i), 1e-9)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    if device.type == "cuda":
        size = 8192
    else:
        size = 384
    x, y = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2.0 * size**3 / _time_best(device, lambda: x @ y)


def _memory_rate(device: torch.device) -> float:
    x = torch.zeros(_copy_bytes(device), dtype=torch.uint8, device=device)
    y = torch.zeros_like(x)
    return 2.0 * x.numel() / _time_best(device, lambda: y.copy_(x))


def _copy_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return 2**27
    return 2**23


def _host_link_rates(device: torch.device) -> tuple[float, float]:
    """Returns the bytes per second to and from the device, measured at the same time because the
    bus may be shared.
    """
    size = _copy_bytes(device)
    cuda = device.type == "cuda"
    host = [torch.zeros(size, dtype=torch.uint8, pin_memory=cuda) for _ in range(2)]
    there = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]
    ways: list[tuple[Tensor, Tensor]] = [(there[0], host[0]), (host[1], there[1])]
    if not cuda:
        one, other = (size / _time_best(device, partial(into.copy_, x)) for into, x in ways)
        return one, other
    # One stream per direction, so that both copies run concurrently.
    lanes = [torch.cuda.Stream(device) for _ in ways]
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in ways]

    def work() -> None:
        for (into, x), lane, (begun, done) in zip(ways, lanes, marks, strict=True):
            with torch.cuda.stream(lane):
                begun.record()
                into.copy_(x, non_blocking=True)
                done.record()

    rates = [0.0, 0.0]
    for _ in range(MEASURE_TRIES):
        work()
        _synchronize(device)
        taken = [begun.elapsed_time(done) / 1e3 for begun, done in marks]
        rates = [max(rate, size / max(t, 1e-9)) for rate, t in zip(rates, taken, strict=True)]
    return rates[0], rates[1]


def _cpu_adam_rate(size: int) -> float:
    """Returns the parameters per second of torch's fused AdamW on the host, for tensors larger
    than its caches.
    """
    param = torch.zeros(size, requires_grad=True)
    param.grad = torch.zeros(size)
    optimizer = torch.optim.AdamW([param], fused=True)
    return size / _time_best(torch.device("cpu"), optimizer.step)
