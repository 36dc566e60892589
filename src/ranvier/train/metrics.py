"""Metrics of a step: read from the device one step later, so that nothing waits for them."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ranvier import trace
from ranvier.comm import collectives
from ranvier.cost.layers import ActivationShape
from ranvier.launch import Heartbeat
from ranvier.nn.attention import AttentionCore
from ranvier.nn.linear import Linear
from ranvier.parallel.parallelize import ParallelModel
from ranvier.train.report import moe

PEAK_TFLOPS = {
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "GB200": 2500.0,
    "B200": 2250.0,
    "A100": 312.0,
    "V100": 125.0,
    "MI250": 191.5,
    "MI300A": 980.6,
    "MI300X": 1307.0,
}
"""Dense 16-bit matrix products of a device (of an AMD MI250X: of one of its two halves)."""

PEAK_BANDWIDTH = {
    "GH200": 4000.0,
    "H200": 4800.0,
    "H100 PCIe": 2039.0,
    "H100 NVL": 3900.0,
    "H100": 3350.0,
    "B200": 8000.0,
    "A100-SXM4-40GB": 1555.0,
    "A100-PCIE-40GB": 1555.0,
    "A100": 2039.0,
    "V100": 900.0,
    "MI250": 1638.0,
    "MI300": 5300.0,
}
"""GB/s of a device's memory, by its data sheet; the first name that fits counts."""


def peak_bandwidth(device: torch.device) -> float | None:
    """Bytes the device's memory can move in a second; None where that is not known."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = ""
    found = (speed for word, speed in PEAK_BANDWIDTH.items() if word in name)
    return next((speed * 1e9 for speed in found), None)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """What the device can do in a second in this type; None where that is not known."""
    if device.type != "cuda" or dtype.itemsize != 2:
        return None
    name = torch.cuda.get_device_name(device)
    found = (tflops for word, tflops in PEAK_TFLOPS.items() if word in name)
    return next((tflops * 1e12 for tflops in found), None)


def step_flops(
    parallel: ParallelModel, flow: ActivationShape, micro_batches: int
) -> tuple[int, int]:
    """Work of a step on this rank, attention counted causally, and counted fully.

    Three forward passes' worth: backward costs two, one if the weight is frozen. What is computed
    again does not count.
    """
    causal = full = 0
    for leaf in parallel.layers.values():
        frozen = isinstance(leaf, Linear) and not leaf.handles["weight"].trainable
        flops = leaf.flops(flow) * (2 if frozen else 3)
        causal += flops
        full += flops * (2 if isinstance(leaf, AttentionCore) else 1)
    axis = parallel.grid.axis("pipe")  # stages differ: of all their mean
    here = torch.tensor([causal, full], dtype=torch.float64, device=_model_device(parallel))
    causal, full = map(int, (collectives.all_reduce(here, axis).wait() / axis.size).tolist())
    return causal * micro_batches, full * micro_batches


def _model_device(parallel: ParallelModel) -> torch.device:
    return parallel.pipeline.executor.device


def peak_memory_bytes(device: torch.device) -> int:
    """Most bytes this rank has held so far: of the device, or of the process."""
    if device.type == "cuda":
        held = torch.cuda.memory.memory_stats_as_nested_dict(device)  # the flat one is slow
        return int(held["allocated_bytes"]["all"]["peak"])
    if sys.platform == "darwin":
        unit = 1
    else:
        unit = 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class DeviceEvent:
    """A moment in the work of a device; on the host it is now."""

    def __init__(self, device: torch.device) -> None:
        self.event: Any = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()
        self.host_time = time.perf_counter()

    def synchronize(self) -> None:
        """Until the device is there."""
        if self.event is not None:
            self.event.synchronize()

    def seconds_since(self, before: DeviceEvent) -> float:
        """Seconds on the device's clock."""
        if self.event is None:
            return self.host_time - before.host_time
        return float(before.event.elapsed_time(self.event)) / 1e3


class DeferredRead:
    """Numbers on their way from the device to the host."""

    def __init__(self, values: Sequence[Tensor], device: torch.device) -> None:
        numbers = torch.stack([value.detach().to(torch.float64) for value in values])
        if device.type == "cuda":
            self.host_values = torch.empty(len(values), dtype=torch.float64, pin_memory=True)
            self.host_values.copy_(numbers, non_blocking=True)
        else:
            self.host_values = numbers
        self.ready_event = DeviceEvent(device)

    def read(self) -> list[float]:
        """The numbers; waits until they are there."""
        self.ready_event.synchronize()
        return [float(value) for value in self.host_values.tolist()]


def finite_or_none(value: float | None) -> float | None:
    """A number as JSON can hold it: None for what is not finite."""
    if value is not None and math.isfinite(value):
        return value
    return None


@dataclass
class PendingStep:
    """A step under way: what the host will read of it."""

    step: int
    tokens: int
    """Of the run, this step included."""
    lr: float
    numbers: DeferredRead
    """Loss, gradient norm, whether it is bad, whether it is a spike, signal, memory, loss scale,
    what routers did, and how far a checkpoint is."""
    start_event: DeviceEvent
    data_wait_seconds: float
    """Seconds the host waited for its batch."""
    comm_events: list[trace.Event]
    val_loss: float | None = None
    is_skipped: bool = False
    """Whether its update was left out."""
    skipped_total: int = 0
    """Of the run, this step included."""


@dataclass
class Meter:
    """Makes the metrics of steps and adds up where the time went."""

    tokens: int
    """Of a step."""
    flops: tuple[int, int]
    """Of a step on this rank, attention counted causally and fully."""
    peak_flops: float | None
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by what they went to."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    """Tells who watches from outside what this rank is at."""

    def add_seconds(self, name: str, seconds: float) -> None:
        """Add to a phase."""
        self.phases[name] = self.phases.get(name, 0.0) + seconds

    @contextmanager
    def time_phase(self, name: str) -> Iterator[None]:
        """The time inside goes to a phase."""
        start = time.perf_counter()
        with self.heartbeat.inside_section(name):
            yield
        self.add_seconds(name, time.perf_counter() - start)

    def step_metrics(self, under: PendingStep, ended: DeviceEvent | None) -> dict[str, Any]:
        """The metrics of a step that the device has taken.

        ended: when the step before was done, if nothing else lay between.
        """
        loss, norm, _, spike, _, held, scale, *experts, _, _ = under.numbers.read()
        seconds = under.numbers.ready_event.seconds_since(ended or under.start_event)
        exposed = trace.exposed_seconds(under.comm_events)
        self.add_seconds("compute", max(seconds - exposed - under.data_wait_seconds, 0.0))
        self.add_seconds("exposed communication", exposed)
        self.add_seconds("waiting for data", under.data_wait_seconds)
        causal, full = (
            None if self.peak_flops is None else f / seconds / self.peak_flops for f in self.flops
        )
        return {
            "step": under.step,
            "tokens": under.tokens,
            "loss": finite_or_none(loss),
            "lr": under.lr,
            "grad_norm": finite_or_none(norm),
            "seconds": seconds,
            "tokens_per_second": self.tokens / seconds,
            "mfu": causal,
            "mfu_full": full,
            "memory": int(held),
            "exposed_communication_seconds": exposed,
            "data_seconds": under.data_wait_seconds,
            "held_out_loss": under.val_loss,
            "loss_scale": finite_or_none(scale),
            "skipped": under.is_skipped,
            "spike": bool(spike),
            "skips": under.skipped_total,
            **moe.router_metrics(experts),
        }
