"""Budget: which activations to keep so that a step fits into memory and takes the least time.

Pure functions of numbers. All blocks of a model are alike; each has one of three kinds, of which a
cheaper one keeps more. Backward goes from the last block to the first: activations vanish while
gradients appear, and a block that keeps little needs its room for a moment only. So a pass needs,
above what is there all the time, the largest of

    head      enter + Σ kept + head + n · before
    block i   enter + Σ_{j<i} kept_j + peak_i + after + Σ_{j≤i} before + Σ_{j>i} gradient + moving
    leave     enter + after + n · gradient + moving + leave

where `before` is the gradient that earlier micro-batches have left, and `moving` what the gradient
of one block takes besides while it is being reduced. Kinds are laid in the order full, selective,
none: what a late block keeps lives shortest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from itertools import groupby
from typing import Literal, NamedTuple, TypeAlias

from ranvier.config.plan import divisors

RecomputeMode: TypeAlias = Literal["none", "selective", "full"]
PeakMoment: TypeAlias = Literal["head", "block", "leave", "forward", "update"]
"""When most is there: in the loss; while a block runs backward; while the embedding does; in the
next forward pass, beside gradients whose update is under way; in the update."""

RECOMPUTE_COST: Mapping[RecomputeMode, float] = {"none": 0.0, "selective": 0.05, "full": 1 / 3}
"""Time of a block that is spent again, as a share of its forward and backward passes."""
USEFUL_TOKENS = 16384
"""Tokens of a micro-batch from which on more of them make no product of matrices faster."""
OVERHEAD_TOKENS = 512
"""What a micro-batch costs besides its tokens, in tokens: gradients are added up in a wide type,
kernels start and do not fill the device at their ends."""
MAX_TRIED_COUNTS = 16
"""Numbers of blocks of a kind that are tried, about."""


@dataclass(frozen=True)
class BlockMemory:
    """Bytes of a block of one kind, above what was there before its forward pass."""

    saved_bytes: int
    """From the end of its forward pass to its backward pass."""
    backward_peak: int
    """Most at once while it runs backward, `kept` and its gradient included."""
    forward_peak: int = 0
    """Most at once while it runs forward."""


@dataclass(frozen=True)
class PassMemory:
    """Bytes of the forward and backward pass of a micro-batch, but for the kinds of its blocks."""

    blocks: Mapping[RecomputeMode, BlockMemory]
    input_bytes: int
    """Before the first block: its input, gradients outside of blocks of earlier micro-batches."""
    head_peak: int
    """Most at once between the last block's forward and its backward pass, above what was there:
    logits and their gradients."""
    after_head: int
    """What of that stays: gradients of the head and of the last block's output."""
    embedding_peak: int
    """Most at once after the first block's backward pass, above what was there: embedding."""
    block_grad: int
    """Of a block, from its backward pass on."""
    earlier_block_grad: int = 0
    """Of a block, that earlier micro-batches have left."""
    outside_grad: int = 0
    """Gradients outside of blocks, at the end."""
    earlier_outside_grad: int = 0
    """The same of earlier micro-batches: what of `enter` is no activation."""
    reduction_buffer: int = 0
    """Of the gradient of the block before, while it is being reduced: above what it is then."""


class BudgetPeak(NamedTuple):
    """What is there at one moment of a step, in bytes, besides what is there all the time."""

    where: PeakMoment
    activations: int
    gradients: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.activations + self.gradients


@dataclass(frozen=True)
class StepMemory:
    """What a step needs, in bytes, but for the kinds of its blocks."""

    passes: tuple[PassMemory, ...]
    """Of its micro-batches: the first, the second, and one for all others."""
    num_blocks: int
    """Blocks."""
    fixed_bytes: int = 0
    """There all the time: weights, master weights, moments."""
    weight_gather_bytes: int = 0
    """Weights being gathered over data, at the end."""

    def peak_bytes(self, kinds: Sequence[RecomputeMode]) -> int:
        """Most bytes at once in a step, with these kinds from the first block to the last."""
        return self.fixed_bytes + max(peak.total_bytes for peak in self.memory_peaks(kinds))

    def memory_peaks(
        self,
        kinds: Sequence[RecomputeMode],
        *,
        away: float = 0.0,
        stowed: bool = False,
        waits: bool = False,
    ) -> Iterator[BudgetPeak]:
        """The moments at which most may be there.

        away: share of what blocks keep that waits on the host; the last block's stays. stowed:
        gradients of blocks leave for the host. waits: their update goes on in the next forward
        pass.
        """
        assert len(kinds) == self.num_blocks, (len(kinds), self.num_blocks)
        away = self.offloaded_fraction(away)
        for one in self.passes:
            yield from self._pass_peaks(one, kinds, away, stowed)
        last = self.passes[-1]
        left = (1 if stowed else self.num_blocks) * last.block_grad + last.outside_grad
        yield BudgetPeak("update", self.weight_gather_bytes, left)
        if waits:
            yield from self._next_forward_peaks(kinds, away, stowed)

    def offloaded_fraction(self, away: float) -> float:
        """What waits on the host of blocks but the last, so that it is a share `away` of all."""
        if self.num_blocks > 1:
            return min(away * self.num_blocks / (self.num_blocks - 1), 1.0)
        return 0.0

    def _pass_peaks(
        self, one: PassMemory, kinds: Sequence[RecomputeMode], away: float, stowed: bool
    ) -> Iterator[BudgetPeak]:
        """Moments of a pass."""
        kept = sum(one.blocks[kind].saved_bytes for kind in kinds)
        waiting = kept - away * (kept - one.blocks[kinds[-1]].saved_bytes)
        if stowed:
            before = 0
        else:
            before = self.num_blocks * one.earlier_block_grad
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
        """Moments of the first forward pass of the next step: gradients go as blocks are used."""
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
    """The pass of a micro-batch between two that were measured: bytes grow evenly with it."""

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
    """A pass of a smaller micro-batch, and blocks that keep their input only, from one measured.

    share: of the samples. first: the first pass of its step. output: bytes of a block's result.
    """
    blocks = {
        kind: _shrink_block(block, one.block_grad, share) for kind, block in one.blocks.items()
    }
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
    """A block on fewer samples; its gradient stays as large."""
    own = min(gradient, block.backward_peak)
    peak = own + (block.backward_peak - own) * share
    return BlockMemory(
        round(block.saved_bytes * share), round(peak), round(block.forward_peak * share)
    )


def _critical_blocks(
    one: PassMemory, kinds: Sequence[RecomputeMode], away: float
) -> Iterator[tuple[int, int]]:
    """Blocks at which most may be there, and what those before them keep on the device.

    Between blocks of one kind bytes change evenly: two at each end of its run are enough. What
    the block before has sent away is there as well: it is going, or has come back already.
    """
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
    """The kinds that fit into `available` bytes and cost least; None if nothing fits."""
    fits = (
        kinds
        for kinds in sorted(candidate_modes(need), key=recompute_fraction)
        if need.peak_bytes(kinds) <= available
    )
    return next(fits, None)


def min_step_bytes(need: StepMemory) -> int:
    """Bytes without which no assignment fits."""
    return min(need.peak_bytes(kinds) for kinds in candidate_modes(need))


def candidate_modes(need: StepMemory) -> list[tuple[RecomputeMode, ...]]:
    """All assignments in the order full, selective, none; of many blocks in steps.

    A kind that keeps no less than a cheaper one is of no use.
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
    steps = sorted({*range(0, count + 1, max(count // MAX_TRIED_COUNTS, 1)), count})
    for full in steps if "full" in worth[1:] else [0]:
        for selective in steps if "selective" in worth[1:] else [0]:
            counts: dict[RecomputeMode, int] = {"full": full, "selective": selective}
            counts[worth[0]] = count - full - selective
            if counts[worth[0]] >= 0:
                found.append(tuple(kind for kind, number in counts.items() for _ in range(number)))
    return found


def recompute_fraction(kinds: Sequence[RecomputeMode]) -> float:
    """Time spent again, as a share of a step that computes nothing again."""
    counts = {kind: kinds.count(kind) for kind in RECOMPUTE_COST}
    return sum(RECOMPUTE_COST[kind] * count for kind, count in counts.items()) / max(len(kinds), 1)


def relative_token_time(tokens: int, again: float = 0.0) -> float:
    """Time of a token of a step in micro-batches of so many, relative to the best there is.

    (1 + share computed again) · (1 + EMPTY_TOKENS / tokens): so a small micro-batch that keeps all
    can be better than a large one that computes much again, and the other way round.
    """
    return (1.0 + again) * (1.0 + OVERHEAD_TOKENS / tokens)


def candidate_micro_batches(samples: int, seq: int, multiple: int = 1) -> list[int]:
    """Micro-batches worth trying, largest first: divisors of a rank's `samples` of `seq` tokens.

    The largest is the smallest that has USEFUL_TOKENS, else all samples. multiple: what each must
    be a multiple of.
    """
    fits = [size for size in divisors(samples) if size % multiple == 0]
    enough = [size for size in fits if size * seq >= USEFUL_TOKENS]
    most = min(enough, default=samples)
    return [size for size in reversed(fits) if size <= most]
