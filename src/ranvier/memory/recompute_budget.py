"""Recompute budget: which activations to save so that a step fits and takes the least time.

Pure functions of numbers. All blocks of a model are alike; each has one of three recompute modes,
of which a cheaper one saves more. Backward goes from the last block to the first: activations are
freed while gradients appear, and a recomputed block needs its memory only briefly. So a pass needs,
beyond what is always allocated, the maximum of

    head      input + Σ saved + head + n · earlier
    block i   input + Σ_{j<i} saved_j + peak_i + after + Σ_{j≤i} earlier + Σ_{j>i} grad + reduction
    leave     input + after + n · grad + reduction + embedding

where `earlier` is the gradient left by earlier micro-batches, and `reduction` the extra memory of
the gradient of one block while it is being reduced. Modes are assigned in the order full,
selective, none: what a late block saves lives shortest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from itertools import groupby
from typing import Literal, NamedTuple, TypeAlias

from ranvier.config.plan import divisors

RecomputeMode: TypeAlias = Literal["none", "selective", "full"]
PeakMoment: TypeAlias = Literal["head", "block", "leave", "forward", "update"]
"""When the peak occurs: in the loss; in the backward pass of a block; in that of the embedding; in
the next forward pass, beside gradients whose update is in progress; in the update."""

RECOMPUTE_COST: Mapping[RecomputeMode, float] = {"none": 0.0, "selective": 0.05, "full": 1 / 3}
"""Recomputation time of a block, as a fraction of its forward and backward passes."""
USEFUL_TOKENS = 16384
"""Tokens of a micro-batch above which matrix products no longer become more efficient."""
OVERHEAD_TOKENS = 512
"""Fixed cost of a micro-batch, in tokens: gradients are accumulated in a wide dtype, kernels are
launched and do not fill the device at their ends."""
MAX_TRIED_COUNTS = 16
"""Approximate number of block counts of a mode that are tried."""


@dataclass(frozen=True)
class BlockMemory:
    """Bytes of a block in one recompute mode, beyond those before its forward pass."""

    saved_bytes: int
    """Held from the end of its forward pass to its backward pass."""
    backward_peak: int
    """Peak in its backward pass, including `saved_bytes` and its gradient."""
    forward_peak: int = 0
    """Peak in its forward pass."""


@dataclass(frozen=True)
class PassMemory:
    """Bytes of the forward and backward pass of a micro-batch, for any modes of its blocks."""

    blocks: Mapping[RecomputeMode, BlockMemory]
    input_bytes: int
    """Before the first block: its input, gradients outside of blocks of earlier micro-batches."""
    head_peak: int
    """Peak between the last block's forward and backward pass, beyond what was there before: logits
    and their gradients."""
    after_head: int
    """The part of it that stays: gradients of the head and of the last block's output."""
    embedding_peak: int
    """Peak after the first block's backward pass, beyond what was there before: embedding."""
    block_grad: int
    """Gradient of a block, from its backward pass on."""
    earlier_block_grad: int = 0
    """Gradient of a block left by earlier micro-batches."""
    outside_grad: int = 0
    """Gradients outside of blocks, at the end."""
    earlier_outside_grad: int = 0
    """The same of earlier micro-batches: the part of `input_bytes` that is not activations."""
    reduction_buffer: int = 0
    """Extra memory of the previous block's gradient while it is being reduced."""


class BudgetPeak(NamedTuple):
    """Bytes at one point of a step, beyond what is always allocated."""

    where: PeakMoment
    activations: int
    gradients: int

    @property
    def total_bytes(self) -> int:
        """Activations and gradients together."""
        return self.activations + self.gradients


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a step, for any modes of its blocks."""

    passes: tuple[PassMemory, ...]
    """Passes of its micro-batches: the first, the second, and one for all others."""
    num_blocks: int
    """Number of blocks."""
    fixed_bytes: int = 0
    """Always allocated: weights, master weights, optimizer states."""
    weight_gather_bytes: int = 0
    """Weights being gathered over data at the end of the step."""

    def peak_bytes(self, kinds: Sequence[RecomputeMode]) -> int:
        """Return the peak bytes of a step with these modes, from the first block to the last."""
        return self.fixed_bytes + max(peak.total_bytes for peak in self.memory_peaks(kinds))

    def memory_peaks(
        self,
        kinds: Sequence[RecomputeMode],
        *,
        away: float = 0.0,
        stowed: bool = False,
        waits: bool = False,
    ) -> Iterator[BudgetPeak]:
        """Yield the points of a step at which the peak may occur.

        away: fraction of saved activations that is offloaded to the host; the last block's stay.
        stowed: gradients of blocks are offloaded to the host. waits: their update continues in the
        next forward pass.
        """
        assert len(kinds) == self.num_blocks, (len(kinds), self.num_blocks)
        away = self.offloaded_fraction(away)
        for one in self.passes:
            yield from self._pass_peaks(one, kinds, away, stowed)
        last = self.passes[-1]
        # With offloaded gradients, that of one block at a time is on the device.
        left = (1 if stowed else self.num_blocks) * last.block_grad + last.outside_grad
        yield BudgetPeak("update", self.weight_gather_bytes, left)
        if waits:
            yield from self._next_forward_peaks(kinds, away, stowed)

    def offloaded_fraction(self, away: float) -> float:
        """Return the fraction to offload of blocks except the last, so that it is `away` of all."""
        if self.num_blocks > 1:
            return min(away * self.num_blocks / (self.num_blocks - 1), 1.0)
        return 0.0

    def _pass_peaks(
        self, one: PassMemory, kinds: Sequence[RecomputeMode], away: float, stowed: bool
    ) -> Iterator[BudgetPeak]:
        """Yield the candidate peaks of one micro-batch."""
        # The last block is not offloaded.
        kept = sum(one.blocks[kind].saved_bytes for kind in kinds)
        waiting = kept - away * (kept - one.blocks[kinds[-1]].saved_bytes)
        if stowed:
            before = 0
        else:
            before = self.num_blocks * one.earlier_block_grad
        # `made` is the part of the head's peak that is gradients; the rest counts as activations.
        made = max(min(one.after_head, one.head_peak), 0)
        enter = one.input_bytes - one.earlier_outside_grad
        made = made + one.earlier_outside_grad
        yield BudgetPeak(
            "head", one.input_bytes + round(waiting) + one.head_peak - made, before + made
        )
        for i, back in _critical_blocks(one, kinds, away):
            block = one.blocks[kinds[i]]
            later = self.num_blocks - 1 - i
            if stowed:
                grads = min(later, 1) * one.block_grad
            else:
                grads = later * one.block_grad
            grads += (1 if stowed else i + 1) * one.earlier_block_grad
            # The part of the block's own peak that is its new gradient, bounded as measured numbers
            # may be inconsistent.
            own = min(
                max(one.block_grad - one.earlier_block_grad, 0),
                max(block.backward_peak - block.saved_bytes, 0),
            )
            grads += (
                one.after_head
                + one.earlier_outside_grad
                + own
                + (one.reduction_buffer if later else 0)
            )
            yield BudgetPeak("block", enter + back + block.backward_peak - own, grads)
        grads = (
            (1 if stowed else self.num_blocks) * one.block_grad
            + one.earlier_outside_grad
            + one.reduction_buffer
        )
        yield BudgetPeak("leave", enter, one.after_head + grads + one.embedding_peak)

    def _next_forward_peaks(
        self, kinds: Sequence[RecomputeMode], away: float, stowed: bool
    ) -> Iterator[BudgetPeak]:
        """Yield the peaks of the next forward pass: gradients are freed block by block."""
        first = self.passes[0]
        last = self.passes[-1]
        for i, back in _critical_blocks(first, kinds, away):
            if stowed:
                grads = 0
            else:
                grads = (self.num_blocks - 1 - i) * last.block_grad
            more = first.input_bytes + back + first.blocks[kinds[i]].forward_peak
            yield BudgetPeak("forward", more, grads + last.outside_grad)


def interpolate_pass(low: PassMemory, high: PassMemory, share: float) -> PassMemory:
    """Interpolate linearly between the passes of two measured micro-batch sizes."""

    def mixed(a: int, b: int) -> int:
        return round(a + (b - a) * share)

    blocks = {
        kind: BlockMemory(*map(mixed, astuple(block), astuple(high.blocks[kind])))
        for kind, block in low.blocks.items()
    }
    names = [field.name for field in fields(PassMemory) if field.name != "blocks"]
    numbers = {name: mixed(getattr(low, name), getattr(high, name)) for name in names}
    return PassMemory(blocks, **numbers)


def estimate_pass(one: PassMemory, first: PassMemory, share: float, output: int) -> PassMemory:
    """Estimate a pass of a smaller micro-batch, and full recomputation, from a measured one.

    share: fraction of the samples. first: the first pass of its step. output: bytes of a block's
    output.
    """
    blocks = {
        kind: _shrink_block(block, one.block_grad, share) for kind, block in one.blocks.items()
    }
    # Not measured: such a block saves its input only, and recomputing it needs the peak of the
    # others.
    if "full" not in blocks:
        most = max(blocks.values(), key=lambda block: block.backward_peak)
        kept = round(output * share)
        blocks["full"] = BlockMemory(kept, most.backward_peak + kept, most.forward_peak)
    return replace(
        one,
        blocks=blocks,
        input_bytes=one.input_bytes - round(first.input_bytes * (1.0 - share)),
        head_peak=one.after_head + round((one.head_peak - one.after_head) * share),
    )


def _shrink_block(block: BlockMemory, gradient: int, share: float) -> BlockMemory:
    """Scale a block to fewer samples; its gradient does not shrink."""
    own = min(gradient, block.backward_peak)
    peak = own + (block.backward_peak - own) * share
    return BlockMemory(
        round(block.saved_bytes * share), round(peak), round(block.forward_peak * share)
    )


def _critical_blocks(
    one: PassMemory, kinds: Sequence[RecomputeMode], away: float
) -> Iterator[tuple[int, int]]:
    """Yield the blocks at which the peak may occur, and the bytes saved before them on the device.

    Within a run of blocks of one mode bytes change linearly: two blocks at each end are enough.
    The offloaded part of the previous block counts as well: it is being copied, or was fetched.
    """
    # `base`: bytes on the device before this run of blocks; `beside`: saved by the block before it.
    at = 0
    base = 0.0
    beside = 0.0
    for kind, group in groupby(kinds):
        size = len(list(group))
        kept = one.blocks[kind].saved_bytes
        for i in sorted({0, min(1, size - 1), max(size - 2, 0), size - 1}):
            back = base + i * kept * (1.0 - away)
            yield at + i, round(back + away * (kept if i else beside))
        at = at + size
        base = base + size * kept * (1.0 - away)
        beside = float(kept)


def choose_recompute_modes(need: StepMemory, available: int) -> tuple[RecomputeMode, ...] | None:
    """Return the cheapest modes that fit into `available` bytes; None if nothing fits."""
    fits = (
        kinds
        for kinds in sorted(candidate_modes(need), key=recompute_fraction)
        if need.peak_bytes(kinds) <= available
    )
    return next(fits, None)


def min_step_bytes(need: StepMemory) -> int:
    """Return the minimum bytes with which any assignment fits."""
    return min(need.peak_bytes(kinds) for kinds in candidate_modes(need))


def candidate_modes(need: StepMemory) -> list[tuple[RecomputeMode, ...]]:
    """Return all assignments in the order full, selective, none; in steps if there are many blocks.

    A mode that saves no less memory than a cheaper one is left out.
    """
    blocks = need.passes[0].blocks
    count = need.num_blocks
    known: list[RecomputeMode] = [kind for kind in RECOMPUTE_COST if kind in blocks]
    worth = [
        kind
        for i, kind in enumerate(known)
        if all(blocks[kind].saved_bytes < blocks[other].saved_bytes for other in known[:i])
    ]
    found: list[tuple[RecomputeMode, ...]] = []
    # The cheapest mode, worth[0], gets the blocks that the others leave.
    steps = sorted({*range(0, count + 1, max(count // MAX_TRIED_COUNTS, 1)), count})
    for full in steps if "full" in worth[1:] else [0]:
        for selective in steps if "selective" in worth[1:] else [0]:
            counts: dict[RecomputeMode, int] = {"full": full, "selective": selective}
            counts[worth[0]] = count - full - selective
            if counts[worth[0]] >= 0:
                found.append(tuple(kind for kind, number in counts.items() for _ in range(number)))
    return found


def recompute_fraction(kinds: Sequence[RecomputeMode]) -> float:
    """Return the recomputation time as a fraction of a step without recomputation."""
    counts = {kind: kinds.count(kind) for kind in RECOMPUTE_COST}
    return sum(RECOMPUTE_COST[kind] * count for kind, count in counts.items()) / max(len(kinds), 1)


def relative_token_time(tokens: int, again: float = 0.0) -> float:
    """Return the time per token with micro-batches of `tokens` tokens, relative to the optimum.

    (1 + recompute fraction) · (1 + OVERHEAD_TOKENS / tokens): so a small micro-batch without
    recomputation can be better than a large one with much recomputation, and vice versa.
    """
    return (1.0 + again) * (1.0 + OVERHEAD_TOKENS / tokens)


def candidate_micro_batches(samples: int, seq: int, multiple: int = 1) -> list[int]:
    """Return micro-batch sizes worth trying, largest first: divisors of a rank's `samples`.

    The largest is the smallest that has USEFUL_TOKENS tokens, else all samples. multiple: every
    size is a multiple of it.
    """
    fits = [size for size in divisors(samples) if size % multiple == 0]
    enough = [size for size in fits if size * seq >= USEFUL_TOKENS]
    most = min(enough, default=samples)
    return [size for size in reversed(fits) if size <= most]
