"""Cost: predicted seconds of an optimizer step on one device.

    compute     (FLOPs / rate + bytes / bandwidth) · (1 + EMPTY_TOKENS / tokens)   a micro-batch
    again       the share of it that blocks compute again
    update      2 · states + gradients + weights, over the bandwidth of the device
    waiting     for what comes from the host and goes there, as far as nothing hides it

States that rest on the host come and go once a step. No update may begin before the norm of all
gradients is known, and block b waits for its own update only, so the first forward pass hides all
of it but one block's part, if it is as long: exposed = max(U / L, U - F + F / L), of L blocks.
Weights on the host come twice a micro-batch, and gradients leave once; activations leave in forward
and come back in backward: each hides behind the pass beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ranvier.memory import recompute_budget

if TYPE_CHECKING:
    from ranvier.planner.device_rates import DeviceRates

CONCURRENT_ADAM_SHARE = 0.5
"""Share of its rate that the host's AdamW reaches beside a step, whose copies use the same memory:
2.0 of 4.0 thousand million parameters a second on the host of an H200 with 16 processors."""
ACTIVATION_TRAFFIC = (2, 4)
"""Times that what blocks keep is read or written in the device's memory, forward and backward,
besides the matrix products."""


@dataclass(frozen=True)
class StepWork:
    """What a rank does in a step."""

    forward: int
    """FLOPs of the forward pass of a sample."""
    backward: int
    block_share: float
    """Share of these that lies in blocks."""
    samples: int
    """Of this rank, in a step."""
    seq: int
    """Tokens of a sample."""


@dataclass(frozen=True)
class StepTraffic:
    """Bytes that move in a step, or in each micro-batch of it."""

    saved_activations: int
    """What blocks of the kind that keeps most would keep of a micro-batch."""
    device_states: int
    """States that are updated where they lie, on the device."""
    host_states: int
    """States that rest on the host."""
    host_parameters: int
    """Numbers that are updated from there."""
    host_weights: int
    """Weights that come from the host twice a micro-batch."""
    host_gradients: int
    """Gradients that leave for the host each micro-batch."""
    host_activations: int
    """What is kept and waits on the host, of a micro-batch."""


@dataclass(frozen=True)
class StepSeconds:
    """Parts of the time of a step."""

    compute: float
    recompute: float
    update: float
    waiting: float

    @property
    def total(self) -> float:
        """All of it."""
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
    """The parts of a step in micro-batches of `micro` samples.

    share: what blocks compute again. cpu: states that rest on the host are updated there.
    """
    passes = work.samples // micro
    slow = recompute_budget.relative_token_time(micro * work.seq)
    forward, backward = (
        (flops * micro / rates.flops + times * moved.saved_activations / rates.memory) * slow
        for flops, times in zip((work.forward, work.backward), ACTIVATION_TRAFFIC, strict=True)
    )
    again = (forward + backward) * share * work.block_share
    into = moved.host_weights + moved.host_activations + moved.host_gradients * (passes > 1)
    waiting = (
        max(moved.host_weights / rates.to_device, moved.host_activations / rates.to_host) - forward
    )
    back = max(into / rates.to_device, moved.host_gradients / rates.to_host) - backward - again
    exposed = passes * (max(waiting, 0.0) + max(back, 0.0))
    if moved.host_states:
        whole = offloaded_update_seconds(moved, rates, cpu=cpu, wide=passes > 1)
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
    """Seconds of the update of states that rest on the host.

    On the device all of them come and go; on the processors gradients come (wide: in 32 bits, as
    they were added up), and 16-bit weights go.
    """
    if not cpu:
        return max(moved.host_states / rates.to_device, moved.host_states / rates.to_host)
    grads = (4 if wide else 2) * moved.host_parameters
    weights = 2 * moved.host_parameters
    return max(
        moved.host_parameters / (CONCURRENT_ADAM_SHARE * rates.adam),
        grads / rates.to_host,
        weights / rates.to_device,
    )
