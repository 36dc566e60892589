"""Metrics of a step, read from the device one step later so that the host never waits for them."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ranvier import trace
from ranvier.comm import collectives
from ranvier.cost.layers import ActivationShape
from ranvier.data.step_work import StepWork
from ranvier.launch import Heartbeat
from ranvier.models.recurrence import LayerCalls, Recurrence
from ranvier.models.recurrent_decoder import RecurrentDecoder
from ranvier.nn.attention import AttentionCore
from ranvier.nn.linear import Linear
from ranvier.parallel.parallel_model import ParallelModel, calls_of, get_parallel_model
from ranvier.train.report import moe, work

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
"""Peak TFLOP/s of dense 16-bit matmuls per device (AMD MI250X: of one of its two dies).

The first name that occurs in the device's name counts, so longer names come first.
"""

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
"""Memory bandwidth in GB/s by data sheet; the first match of the device's name counts."""


def peak_bandwidth(device: torch.device) -> float | None:
    """Peak memory bandwidth of the device in bytes per second; None if unknown."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = ""
    found = (speed for word, speed in PEAK_BANDWIDTH.items() if word in name)
    return next((speed * 1e9 for speed in found), None)


@dataclass(frozen=True)
class RecurrentFlops:
    """FLOPs of the steps of a recurrent model, which depend on the number of iterations."""

    outside: tuple[int, int]
    """FLOPs of a step without iterations, with causal and with full attention."""
    forward: tuple[int, int]
    """FLOPs of one more iteration without gradients."""
    backward: tuple[int, int]
    """FLOPs of one more iteration with gradients."""

    @classmethod
    def from_model(
        cls, model: RecurrentDecoder, flow: ActivationShape, micro_batches: int
    ) -> RecurrentFlops:
        """Returns the FLOPs of a model on this rank."""
        parallel = get_parallel_model(model)

        def count(without_grad: int, with_grad: int) -> tuple[int, int]:
            core = {model.core_name: LayerCalls(without_grad, with_grad)}
            return step_flops(parallel, flow, micro_batches, {**model.layer_calls(), **core})

        outside = count(0, 0)
        forward, backward = (
            (some[0] - outside[0], some[1] - outside[1]) for some in (count(1, 0), count(0, 1))
        )
        return cls(outside, forward, backward)

    def of_step(self, recurrence: Recurrence) -> tuple[int, int]:
        """Returns the FLOPs of a step, with causal and with full attention."""
        causal, full = (
            outside + recurrence.without_grad * forward + recurrence.with_grad * backward
            for outside, forward, backward in zip(
                self.outside, self.forward, self.backward, strict=True
            )
        )
        return causal, full


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of the device in this dtype; None if unknown."""
    if device.type != "cuda" or dtype.itemsize != 2:
        return None
    name = torch.cuda.get_device_name(device)
    found = (tflops for word, tflops in PEAK_TFLOPS.items() if word in name)
    return next((tflops * 1e12 for tflops in found), None)


def step_flops(
    parallel: ParallelModel,
    flow: ActivationShape,
    micro_batches: int,
    calls: Mapping[str, LayerCalls] | None = None,
) -> tuple[int, int]:
    """FLOPs of a step on this rank, with causal attention and with full attention.

    3 x forward: backward costs two forward passes, or one if the weight is frozen. Recomputation
    does not count (MFU, not HFU). calls: of layers that a pass does not call once, as
    `ParallelModel.layer_calls`.
    Communicates: all-reduce of two numbers over pipe.
    """
    causal = full = 0.0
    for name, leaf in parallel.layers.items():
        frozen = isinstance(leaf, Linear) and not leaf.handles["weight"].trainable
        times = calls_of(name, calls or {})
        flops = leaf.flops(flow) * (times.total + times.with_grad * (1 if frozen else 2))
        causal += flops
        # `flops` of attention counts the causal half of the scores.
        full += flops * (2 if isinstance(leaf, AttentionCore) else 1)
    # Stages have different work; MFU refers to the mean stage.
    axis = parallel.grid.axis("pipe")
    here = torch.tensor([causal, full], dtype=torch.float64, device=_model_device(parallel))
    causal, full = map(int, (collectives.all_reduce(here, axis).wait() / axis.size).tolist())
    return causal * micro_batches, full * micro_batches


def _model_device(parallel: ParallelModel) -> torch.device:
    return parallel.pipeline.executor.device


def peak_memory_bytes(device: torch.device) -> int:
    """Peak bytes of this rank so far: of the device, or of the process on a CPU."""
    if device.type == "cuda":
        # `memory_stats` flattens and sorts this dict, which is too slow for every step.
        held = torch.cuda.memory.memory_stats_as_nested_dict(device)
        return int(held["allocated_bytes"]["all"]["peak"])
    # ru_maxrss is in bytes on macOS and in KiB on Linux.
    if sys.platform == "darwin":
        unit = 1
    else:
        unit = 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class DeviceEvent:
    """A point in the work queue of a device; on a CPU the current time."""

    def __init__(self, device: torch.device) -> None:
        self.event: Any = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            # The time of the GPU, not of the launch.
            self.event.record()
        self.host_time = time.perf_counter()

    def synchronize(self) -> None:
        """Wait until the device has reached this point."""
        if self.event is not None:
            self.event.synchronize()

    def seconds_since(self, before: DeviceEvent) -> float:
        """Seconds since an earlier event, on the device's clock."""
        if self.event is None:
            return self.host_time - before.host_time
        return float(before.event.elapsed_time(self.event)) / 1e3


class DeferredRead:
    """Scalars that are being copied from the device to the host."""

    def __init__(self, values: Sequence[Tensor], device: torch.device) -> None:
        # One copy for all scalars; float64 holds byte counts exactly.
        numbers = torch.stack([value.detach().to(torch.float64) for value in values])
        if device.type == "cuda":
            # Only a copy into pinned memory is asynchronous.
            self.host_values = torch.empty(len(values), dtype=torch.float64, pin_memory=True)
            self.host_values.copy_(numbers, non_blocking=True)
        else:
            self.host_values = numbers
        self.ready_event = DeviceEvent(device)

    def read(self) -> list[float]:
        """Wait for the copy and return the numbers."""
        self.ready_event.synchronize()
        return [float(value) for value in self.host_values.tolist()]


def finite_or_none(value: float | None) -> float | None:
    """A number as JSON can represent it: None if it is not finite."""
    if value is not None and math.isfinite(value):
        return value
    return None


@dataclass(frozen=True)
class Evaluation:
    """What was evaluated between two steps."""

    val_loss: float | None = None
    """Loss of the validation samples."""
    canary_scores: dict[str, Any] = field(default_factory=dict)
    """Metrics of canaries."""

    def merge(self, later: Evaluation | None) -> Evaluation:
        """This evaluation with what was evaluated later in its place."""
        if later is None:
            return self
        loss = self.val_loss if later.val_loss is None else later.val_loss
        return Evaluation(loss, later.canary_scores or self.canary_scores)


@dataclass
class PendingStep:
    """An issued step whose results the host will read later."""

    step: int
    tokens: int
    """Tokens (or what the kind of model counts) of the run so far, this step included."""
    lr: float
    numbers: DeferredRead
    """Loss, gradient norm, is_nonfinite, is_spike, stop signal, peak memory, loss scale, number of
    targets, router statistics, and the two numbers of the save status."""
    start_event: DeviceEvent
    data_wait_seconds: float
    """Seconds that the host waited for the batch."""
    comm_events: list[trace.Event]
    evaluation: Evaluation = field(default_factory=Evaluation)
    is_skipped: bool = False
    """Whether the update was skipped."""
    skipped_total: int = 0
    """Skipped updates of the run so far, this step included."""
    work: StepWork | None = None
    """Work of all ranks; None if all have the same."""
    recurrence: Recurrence | None = None
    """Iterations of a recurrent core; None without one."""


@dataclass
class Meter:
    """Computes the metrics of steps and accumulates the time by phase."""

    tokens: int
    """Tokens per step, or what the kind of model counts."""
    flops: tuple[int, int]
    """FLOPs per step on this rank, with causal and with full attention."""
    peak_flops: float | None
    unit: str = "tokens"
    """What is counted, in the plural."""
    flops_of_recurrence: Callable[[Recurrence], tuple[int, int]] | None = None
    """Returns the FLOPs of a step of a recurrent model, of which `flops` is the mean."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by phase."""
    supervised: int = 0
    """Targets of all steps so far."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    """Reports to the watchdog what this rank is doing."""

    @property
    def supervised_key(self) -> str:
        """Name of the number of targets in metrics."""
        return f"supervised_{self.unit}"

    def add_seconds(self, name: str, seconds: float) -> None:
        """Add seconds to a phase."""
        self.phases[name] = self.phases.get(name, 0.0) + seconds

    @contextmanager
    def time_phase(self, name: str) -> Iterator[None]:
        """Add the time inside to a phase."""
        start = time.perf_counter()
        with self.heartbeat.inside_section(name):
            yield
        self.add_seconds(name, time.perf_counter() - start)

    def step_metrics(self, under: PendingStep, ended: DeviceEvent | None) -> dict[str, Any]:
        """The metrics of a completed step.

        ended: end of the previous step; None if something ran in between, to use its own start.
        """
        loss, norm, _, spike, _, held, scale, targets, *experts, _, _ = under.numbers.read()
        self.supervised += int(targets)
        # From the end of the previous step if nothing ran between, as steps overlap on the host.
        seconds = under.numbers.ready_event.seconds_since(ended or under.start_event)
        exposed = trace.exposed_seconds(under.comm_events)
        # Waits may overlap with device work, so the difference may be slightly negative.
        self.add_seconds("compute", max(seconds - exposed - under.data_wait_seconds, 0.0))
        self.add_seconds("exposed communication", exposed)
        self.add_seconds("waiting for data", under.data_wait_seconds)
        flops = self.flops
        if under.recurrence is not None and self.flops_of_recurrence is not None:
            flops = self.flops_of_recurrence(under.recurrence)
        causal, full = (
            None if self.peak_flops is None else f / seconds / self.peak_flops for f in flops
        )
        return {
            "step": under.step,
            self.unit: under.tokens,
            self.supervised_key: self.supervised,
            "loss": finite_or_none(loss),
            "lr": under.lr,
            "grad_norm": finite_or_none(norm),
            "step_seconds": seconds,
            f"{self.unit}_per_second": self.tokens / seconds,
            "mfu": causal,
            "mfu_noncausal": full,
            "peak_memory_bytes": int(held),
            "exposed_communication_seconds": exposed,
            "data_seconds": under.data_wait_seconds,
            "val_loss": under.evaluation.val_loss,
            "loss_scale": finite_or_none(scale),
            "skipped": under.is_skipped,
            "spike": bool(spike),
            "skipped_total": under.skipped_total,
            **under.evaluation.canary_scores,
            **moe.router_metrics(experts),
            **work.work_metrics(under.work),
            **({} if under.recurrence is None else {"recurrence": under.recurrence.iterations}),
        }
