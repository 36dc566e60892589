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
    from ranvier.planner.device_rates import Rates

BESIDE = 0.5
"""Share of its rate that the host's AdamW reaches beside a step, whose copies use the same memory:
2.0 of 4.0 thousand million parameters a second on the host of an H200 with 16 processors."""
TRAFFIC = (2, 4)
"""Times that what blocks keep is read or written in the device's memory, forward and backward,
besides the matrix products."""


@dataclass(frozen=True)
class Work:
    """What a rank does in a step."""

    forward: int
    """FLOPs of the forward pass of a sample."""
    backward: int
    blocks: float
    """Share of these that lies in blocks."""
    samples: int
    """Of this rank, in a step."""
    seq: int
    """Tokens of a sample."""


@dataclass(frozen=True)
class Moved:
    """Bytes that move in a step, or in each micro-batch of it."""

    kept: int
    """What blocks of the kind that keeps most would keep of a micro-batch."""
    states: int
    """States that are updated where they lie, on the device."""
    away: int
    """States that rest on the host."""
    numbers: int
    """Numbers that are updated from there."""
    weights: int
    """Weights that come from the host twice a micro-batch."""
    gradients: int
    """Gradients that leave for the host each micro-batch."""
    activations: int
    """What is kept and waits on the host, of a micro-batch."""


@dataclass(frozen=True)
class Seconds:
    """Parts of the time of a step."""

    compute: float
    again: float
    update: float
    waiting: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.compute + self.again + self.update + self.waiting


def seconds(
    work: Work, moved: Moved, rates: Rates, *, micro: int, share: float, blocks: int, cpu: bool
) -> Seconds:
    """The parts of a step in micro-batches of `micro` samples.

    share: what blocks compute again. cpu: states that rest on the host are updated there.
    """
    passes, slow = work.samples // micro, recompute_budget.time(micro * work.seq)
    forward, backward = (
        (flops * micro / rates.flops + times * moved.kept / rates.memory) * slow
        for flops, times in zip((work.forward, work.backward), TRAFFIC, strict=True)
    )
    again = (forward + backward) * share * work.blocks
    into = moved.weights + moved.activations + moved.gradients * (passes > 1)
    waiting = max(moved.weights / rates.to_device, moved.activations / rates.to_host) - forward
    back = max(into / rates.to_device, moved.gradients / rates.to_host) - backward - again
    exposed = passes * (max(waiting, 0.0) + max(back, 0.0))
    if moved.away:
        whole = streamed(moved, rates, cpu=cpu, wide=passes > 1)
        exposed += max(whole / blocks, whole - forward + forward / blocks)
    return Seconds(
        compute=passes * (forward + backward),
        again=passes * again,
        update=2 * moved.states / rates.memory,
        waiting=exposed,
    )


def streamed(moved: Moved, rates: Rates, *, cpu: bool, wide: bool = False) -> float:
    """Seconds of the update of states that rest on the host.

    On the device all of them come and go; on the processors gradients come (wide: in 32 bits, as
    they were added up), and 16-bit weights go.
    """
    if not cpu:
        return max(moved.away / rates.to_device, moved.away / rates.to_host)
    grads, weights = (4 if wide else 2) * moved.numbers, 2 * moved.numbers
    return max(
        moved.numbers / (BESIDE * rates.adam), grads / rates.to_host, weights / rates.to_device
    )
