"""Measures how long it takes to create communicators, and how much device memory they use.

Two ranks, each in its own process, create a few over the same axis; on one GPU they share it and
communicate through sockets. Drivers do not report the memory of a process: the decrease of free
memory is divided among the ranks of a device, so no other program should start or end there.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import fmean

import torch

from ranvier.comm import collectives
from ranvier.errors import CommunicationError
from ranvier.grid import HOST_CHANNEL, Axis, Grid
from ranvier.launch import (
    ProcessInfo,
    die_with_parent,
    join_process_group,
    local_process_infos,
    read_environment,
    start_forkserver,
)

MEASURING_RANKS = 2
EXTRA_COMMUNICATORS = 3
"""Number of communicators after the first."""
LIMIT_SECONDS = 60.0


@dataclass(frozen=True)
class CommunicatorSample:
    """Measurements of one rank."""

    device: str
    """Ranks with the same name share the device."""
    host_seconds: float
    """Time to create a group over Gloo."""
    seconds: tuple[float, ...]
    """Time to create each communicator, including its first collective."""
    free_bytes: tuple[int, ...]
    """Free bytes of the device, before the first communicator and after each."""


@dataclass(frozen=True)
class CommunicatorCost:
    """Cost of communicators on each rank."""

    host_seconds: float
    first_seconds: float
    further_seconds: float
    first_bytes: int
    """Bytes of the first communicator, with the kernels that its first collective loads."""
    further_bytes: int

    def total_seconds(self, count: int, on_host: int) -> float:
        """Returns the seconds to create `count` communicators, and `on_host` groups over Gloo."""
        if count:
            made = self.first_seconds + (count - 1) * self.further_seconds
        else:
            made = 0.0
        return made + on_host * self.host_seconds


def summarize_samples(samples: Sequence[CommunicatorSample]) -> CommunicatorCost:
    """Returns the cost on each rank: seconds of the slowest, mean of the bytes."""
    # One entry per device: ranks that share it see the same free memory.
    devices = {one.device: one.free_bytes for one in samples}.values()
    taken = [
        max(sum(free[i] - free[i + 1] for free in devices), 0) // len(samples)
        for i in range(len(samples[0].seconds))
    ]
    seconds = [max(some) for some in zip(*(one.seconds for one in samples), strict=True)]
    return CommunicatorCost(
        host_seconds=max(one.host_seconds for one in samples),
        first_seconds=seconds[0],
        further_seconds=fmean(seconds[1:]),
        first_bytes=taken[0],
        further_bytes=round(fmean(taken[1:])),
    )


def measure_communicator_cost(
    gpus: int, *, limit_seconds: float = LIMIT_SECONDS
) -> CommunicatorCost:
    """Starts two ranks that measure over NCCL, or on a CPU (gpus=0) over Gloo."""
    start_forkserver([__name__])
    # CUDA does not work in a fork of a process that has initialized it.
    context = multiprocessing.get_context("forkserver")
    deadline = time.monotonic() + limit_seconds
    processes = []
    pipes = list[Connection]()
    for me in local_process_infos(MEASURING_RANKS):
        here, there = context.Pipe(duplex=False)
        task = context.Process(target=_run_rank, args=(me, gpus, limit_seconds, there), daemon=True)
        task.start()
        # The parent's copy of the child's end must be closed; otherwise EOF would never be read.
        there.close()
        processes.append(task)
        pipes.append(here)
    try:
        samples = [_receive_sample(pipe, deadline, limit_seconds) for pipe in pipes]
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0.0))
        return summarize_samples(samples)
    finally:
        for process in processes:
            # Also after an error: a rank that hangs in NCCL would otherwise keep the device.
            process.kill()
            process.join()


def _receive_sample(pipe: Connection, deadline: float, limit_seconds: float) -> CommunicatorSample:
    """Receives the sample of a rank, or raises the reason why there is none."""
    late = not pipe.poll(max(deadline - time.monotonic(), 0.0))
    try:
        found = "" if late else pipe.recv()
    except EOFError:
        found = "a rank exited without a message"
    if isinstance(found, CommunicatorSample):
        return found
    if late:
        why = f"no result within {limit_seconds:.0f} s"
    else:
        why = found
    raise CommunicationError(
        f"Two ranks on this machine could not create communicators: {why}. Ranks need the loopback "
        "interface and a few hundred MiB of GPU memory. Set NCCL_DEBUG=INFO to see the log of "
        "NCCL, and stop other programs on the GPU."
    )


def _run_rank(me: ProcessInfo, gpus: int, limit_seconds: float, pipe: Connection) -> None:
    """Main function of a rank: sends a sample, or an error as text."""
    die_with_parent()
    # Warnings of NCCL would mix with the table of the doctor, unless the user wants them.
    if not read_environment("NCCL_DEBUG"):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    if gpus:
        device = torch.device("cuda", me.rank % gpus)
    else:
        device = torch.device("cpu")
    try:
        with join_process_group(
            me, "nccl" if gpus else "gloo", limit_seconds, share_gpu=gpus < me.world_size
        ):
            grid = Grid({"data": me.world_size}, rank=me.rank, connected=True)
            pipe.send(take_sample(grid, device))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {str(error).splitlines()[0]}")


def take_sample(grid: Grid, device: torch.device) -> CommunicatorSample:
    """Creates communicators as one rank. Communicates: creation of groups, a number over each."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Allocated first, so that the CUDA context and torch's first block do not count.
    value = torch.ones(1, device=device)
    begun = time.perf_counter()
    host = grid.axis("data", channel=HOST_CHANNEL)
    host_seconds = time.perf_counter() - begun
    seconds = []
    free = [_free_bytes(device, host)]
    for number in range(1 + EXTRA_COMMUNICATORS):
        begun = time.perf_counter()
        axis = grid.axis("data", channel=f"{number}" if number else "")
        # NCCL creates a communicator at its first collective.
        collectives.all_reduce(value, axis).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begun)
        free.append(_free_bytes(device, host))
    return CommunicatorSample(str(device), host_seconds, tuple(seconds), tuple(free))


def _free_bytes(device: torch.device, host: Axis) -> int:
    """Returns the free bytes of a device while no rank allocates. Communicates: a number, twice."""
    # Two barriers: all ranks have finished the previous work, and none starts the next.
    collectives.all_reduce(torch.ones(1), host).wait()
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = 0
    collectives.all_reduce(torch.ones(1), host).wait()
    return free
