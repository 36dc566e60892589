"""Predicted seconds of a training step on one device with offloading.

    compute     (FLOPs / rate + bytes / bandwidth) · (1 + OVERHEAD_TOKENS / tokens)  per micro-batch
    recompute   the share of compute that blocks recompute
    update      (2 · states + gradients + weights) / device bandwidth
    waiting     exposed part of transfers to and from the host

Offloaded optimizer states are transferred to the device and back once per step. No update can start
before the norm of all gradients is known, and block b waits only for its own update. So the first
forward pass, if long enough, overlaps with the update of all blocks but one:
exposed = max(U / L, U - F + F / L), for L blocks. Offloaded weights are fetched twice per
micro-batch, and gradients are written once. Activations are written in forward and fetched in
backward. Each transfer overlaps with the pass during which it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ranvier.memory import recompute_budget

if TYPE_CHECKING:
    from ranvier.planner.device_rates import DeviceRates

CONCURRENT_ADAM_SHARE = 0.5
"""Share of its rate that AdamW on the host reaches during a step, whose copies use the same memory:
2.0 of 4.0 billion parameters per second on the host of an H200 with 16 processors."""
ACTIVATION_TRAFFIC = (2, 4)
"""How often saved activations are read or written in device memory, forward and backward, in
addition to the matmuls."""


@dataclass(frozen=True)
class StepWork:
    """The work of a rank per step."""

    forward: int
    """FLOPs of the forward pass per sample."""
    backward: int
    block_share: float
    """Share of these FLOPs in blocks."""
    samples: int
    """Samples of this rank per step."""
    seq: int
    """Tokens per sample."""


@dataclass(frozen=True)
class StepTraffic:
    """Bytes transferred per step, or per micro-batch."""

    saved_activations: int
    """Activation bytes of blocks per micro-batch in the mode that saves most."""
    device_states: int
    """States on the device, updated there."""
    host_states: int
    """States offloaded to the host."""
    host_parameters: int
    """Parameters whose states are offloaded."""
    host_weights: int
    """Weights fetched from the host twice per micro-batch."""
    host_gradients: int
    """Gradients written to the host per micro-batch."""
    host_activations: int
    """Activations offloaded to the host per micro-batch."""


@dataclass(frozen=True)
class StepSeconds:
    """Parts of the time of a step."""

    compute: float
    recompute: float
    update: float
    waiting: float

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return self.compute + self.recompute + self.update + self.waiting


def estimate_step_seconds(
    work: StepWork,
    moved: StepTraffic,
    rates: DeviceRates,
    *,
    micro: int,
    share: float,
    blocks: int,
    cpu: bool,
) -> StepSeconds:
    """Returns the parts of a step in micro-batches of `micro` samples.

    share: share of recomputation in blocks. cpu: offloaded states are updated on the host.
    """
    passes = work.samples // micro
    # Small micro-batches are less efficient per token.
    slow = recompute_budget.relative_token_time(micro * work.seq)
    forward, backward = (
        (flops * micro / rates.flops + times * moved.saved_activations / rates.memory) * slow
        for flops, times in zip((work.forward, work.backward), ACTIVATION_TRAFFIC, strict=True)
    )
    again = (forward + backward) * share * work.block_share
    # Transfers overlap with the pass during which they run, in both directions at once. In forward,
    # weights are fetched and activations written. In backward, weights, activations and earlier
    # gradients are fetched, and new gradients are written.
    into = moved.host_weights + moved.host_activations + moved.host_gradients * (passes > 1)
    waiting = (
        max(moved.host_weights / rates.to_device, moved.host_activations / rates.to_host) - forward
    )
    back = max(into / rates.to_device, moved.host_gradients / rates.to_host) - backward - again
    exposed = passes * (max(waiting, 0.0) + max(back, 0.0))
    if moved.host_states:
        whole = offloaded_update_seconds(moved, rates, cpu=cpu, wide=passes > 1)
        # At least one block's update is exposed (see the formula above).
        exposed += max(whole / blocks, whole - forward + forward / blocks)
    return StepSeconds(
        compute=passes * (forward + backward),
        recompute=passes * again,
        update=2 * moved.device_states / rates.memory,
        waiting=exposed,
    )


def offloaded_update_seconds(
    moved: StepTraffic, rates: DeviceRates, *, cpu: bool, wide: bool = False
) -> float:
    """Returns the seconds of the update of offloaded states.

    On the device all of them are fetched and written back. On the CPU gradients are copied to the
    host (wide: in 32 bits, as accumulated) and 16-bit weights back.
    """
    if not cpu:
        return max(moved.host_states / rates.to_device, moved.host_states / rates.to_host)
    grads = (4 if wide else 2) * moved.host_parameters
    weights = 2 * moved.host_parameters
    # Update and transfers are pipelined, so the slowest of them determines the time.
    return max(
        moved.host_parameters / (CONCURRENT_ADAM_SHARE * rates.adam),
        grads / rates.to_host,
        weights / rates.to_device,
    )
