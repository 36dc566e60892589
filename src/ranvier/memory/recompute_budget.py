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

Kind: TypeAlias = Literal["none", "selective", "full"]
Where: TypeAlias = Literal["head", "block", "leave", "forward", "update"]
"""When most is there: in the loss; while a block runs backward; while the embedding does; in the
next forward pass, beside gradients whose update is under way; in the update."""

COST: Mapping[Kind, float] = {"none": 0.0, "selective": 0.05, "full": 1 / 3}
"""Time of a block that is spent again, as a share of its forward and backward passes."""
USEFUL_TOKENS = 16384
"""Tokens of a micro-batch from which on more of them make no product of matrices faster."""
EMPTY_TOKENS = 512
"""What a micro-batch costs besides its tokens, in tokens: gradients are added up in a wide type,
kernels start and do not fill the device at their ends."""
STEPS = 16
"""Numbers of blocks of a kind that are tried, about."""


@dataclass(frozen=True)
class Block:
    """Bytes of a block of one kind, above what was there before its forward pass."""

    kept: int
    """From the end of its forward pass to its backward pass."""
    peak: int
    """Most at once while it runs backward, `kept` and its gradient included."""
    forward: int = 0
    """Most at once while it runs forward."""


@dataclass(frozen=True)
class Pass:
    """Bytes of the forward and backward pass of a micro-batch, but for the kinds of its blocks."""

    blocks: Mapping[Kind, Block]
    enter: int
    """Before the first block: its input, gradients outside of blocks of earlier micro-batches."""
    head: int
    """Most at once between the last block's forward and its backward pass, above what was there:
    logits and their gradients."""
    after: int
    """What of that stays: gradients of the head and of the last block's output."""
    leave: int
    """Most at once after the first block's backward pass, above what was there: embedding."""
    gradient: int
    """Of a block, from its backward pass on."""
    before: int = 0
    """Of a block, that earlier micro-batches have left."""
    rest: int = 0
    """Gradients outside of blocks, at the end."""
    outside: int = 0
    """The same of earlier micro-batches: what of `enter` is no activation."""
    moving: int = 0
    """Of the gradient of the block before, while it is being reduced: above what it is then."""


class Peak(NamedTuple):
    """What is there at one moment of a step, in bytes, besides what is there all the time."""

    where: Where
    activations: int
    gradients: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.activations + self.gradients


@dataclass(frozen=True)
class Need:
    """What a step needs, in bytes, but for the kinds of its blocks."""

    passes: tuple[Pass, ...]
    """Of its micro-batches: the first, the second, and one for all others."""
    count: int
    """Blocks."""
    fixed: int = 0
    """There all the time: weights, master weights, moments."""
    publish: int = 0
    """Weights being gathered over data, at the end."""

    def of(self, kinds: Sequence[Kind]) -> int:
        """Most bytes at once in a step, with these kinds from the first block to the last."""
        return self.fixed + max(peak.total for peak in self.peaks(kinds))

    def peaks(
        self, kinds: Sequence[Kind], *, away: float = 0.0, stowed: bool = False, waits: bool = False
    ) -> Iterator[Peak]:
        """The moments at which most may be there.

        away: share of what blocks keep that waits on the host; the last block's stays. stowed:
        gradients of blocks leave for the host. waits: their update goes on in the next forward
        pass.
        """
        assert len(kinds) == self.count, (len(kinds), self.count)
        away = self.sent(away)
        for one in self.passes:
            yield from self._pass(one, kinds, away, stowed)
        last = self.passes[-1]
        left = (1 if stowed else self.count) * last.gradient + last.rest
        yield Peak("update", self.publish, left)
        if waits:
            yield from self._next(kinds, away, stowed)

    def sent(self, away: float) -> float:
        """What waits on the host of blocks but the last, so that it is a share `away` of all."""
        return min(away * self.count / (self.count - 1), 1.0) if self.count > 1 else 0.0

    def _pass(self, one: Pass, kinds: Sequence[Kind], away: float, stowed: bool) -> Iterator[Peak]:
        """Moments of a pass."""
        kept = sum(one.blocks[kind].kept for kind in kinds)
        waiting = kept - away * (kept - one.blocks[kinds[-1]].kept)
        before = 0 if stowed else self.count * one.before
        made = max(min(one.after, one.head), 0)
        enter, made = one.enter - one.outside, made + one.outside
        yield Peak("head", one.enter + round(waiting) + one.head - made, before + made)
        for i, back in _places(one, kinds, away):
            block, later = one.blocks[kinds[i]], self.count - 1 - i
            grads = min(later, 1) * one.gradient if stowed else later * one.gradient
            grads += (1 if stowed else i + 1) * one.before
            own = min(max(one.gradient - one.before, 0), max(block.peak - block.kept, 0))
            grads += one.after + one.outside + own + (one.moving if later else 0)
            yield Peak("block", enter + back + block.peak - own, grads)
        grads = (1 if stowed else self.count) * one.gradient + one.outside + one.moving
        yield Peak("leave", enter, one.after + grads + one.leave)

    def _next(self, kinds: Sequence[Kind], away: float, stowed: bool) -> Iterator[Peak]:
        """Moments of the first forward pass of the next step: gradients go as blocks are used."""
        first, last = self.passes[0], self.passes[-1]
        for i, back in _places(first, kinds, away):
            grads = 0 if stowed else (self.count - 1 - i) * last.gradient
            more = first.enter + back + first.blocks[kinds[i]].forward
            yield Peak("forward", more, grads + last.rest)


def between(low: Pass, high: Pass, share: float) -> Pass:
    """The pass of a micro-batch between two that were measured: bytes grow evenly with it."""

    def mixed(a: int, b: int) -> int:
        return round(a + (b - a) * share)

    blocks = {
        kind: Block(*map(mixed, astuple(block), astuple(high.blocks[kind])))
        for kind, block in low.blocks.items()
    }
    names = [field.name for field in fields(Pass) if field.name != "blocks"]
    numbers = {name: mixed(getattr(low, name), getattr(high, name)) for name in names}
    return Pass(blocks, **numbers)


def estimated(one: Pass, first: Pass, share: float, output: int) -> Pass:
    """A pass of a smaller micro-batch, and blocks that keep their input only, from one measured.

    share: of the samples. first: the first pass of its step. output: bytes of a block's result.
    """
    blocks = {kind: _shrunk(block, one.gradient, share) for kind, block in one.blocks.items()}
    if "full" not in blocks:
        most = max(blocks.values(), key=lambda block: block.peak)
        kept = round(output * share)
        blocks["full"] = Block(kept, most.peak + kept, most.forward)
    return replace(
        one,
        blocks=blocks,
        enter=one.enter - round(first.enter * (1.0 - share)),
        head=one.after + round((one.head - one.after) * share),
    )


def _shrunk(block: Block, gradient: int, share: float) -> Block:
    """A block on fewer samples; its gradient stays as large."""
    own = min(gradient, block.peak)
    peak = own + (block.peak - own) * share
    return Block(round(block.kept * share), round(peak), round(block.forward * share))


def _places(one: Pass, kinds: Sequence[Kind], away: float) -> Iterator[tuple[int, int]]:
    """Blocks at which most may be there, and what those before them keep on the device.

    Between blocks of one kind bytes change evenly: two at each end of its run are enough. What
    the block before has sent away is there as well: it is going, or has come back already.
    """
    at, base = 0, 0.0
    beside = 0.0
    for kind, group in groupby(kinds):
        size, kept = len(list(group)), one.blocks[kind].kept
        for i in sorted({0, min(1, size - 1), max(size - 2, 0), size - 1}):
            back = base + i * kept * (1.0 - away)
            yield at + i, round(back + away * (kept if i else beside))
        at, base, beside = at + size, base + size * kept * (1.0 - away), float(kept)


def assigned(need: Need, available: int) -> tuple[Kind, ...] | None:
    """The kinds that fit into `available` bytes and cost least; None if nothing fits."""
    fits = (kinds for kinds in sorted(ways(need), key=share) if need.of(kinds) <= available)
    return next(fits, None)


def least(need: Need) -> int:
    """Bytes without which no assignment fits."""
    return min(need.of(kinds) for kinds in ways(need))


def ways(need: Need) -> list[tuple[Kind, ...]]:
    """All assignments in the order full, selective, none; of many blocks in steps.

    A kind that keeps no less than a cheaper one is of no use.
    """
    blocks, count = need.passes[0].blocks, need.count
    known: list[Kind] = [kind for kind in COST if kind in blocks]
    worth = [
        kind
        for i, kind in enumerate(known)
        if all(blocks[kind].kept < blocks[other].kept for other in known[:i])
    ]
    found: list[tuple[Kind, ...]] = []
    steps = sorted({*range(0, count + 1, max(count // STEPS, 1)), count})
    for full in steps if "full" in worth[1:] else [0]:
        for selective in steps if "selective" in worth[1:] else [0]:
            counts: dict[Kind, int] = {"full": full, "selective": selective}
            counts[worth[0]] = count - full - selective
            if counts[worth[0]] >= 0:
                found.append(tuple(kind for kind, number in counts.items() for _ in range(number)))
    return found


def share(kinds: Sequence[Kind]) -> float:
    """Time spent again, as a share of a step that computes nothing again."""
    counts = {kind: kinds.count(kind) for kind in COST}
    return sum(COST[kind] * count for kind, count in counts.items()) / max(len(kinds), 1)


def time(tokens: int, again: float = 0.0) -> float:
    """Time of a token of a step in micro-batches of so many, relative to the best there is.

    (1 + share computed again) · (1 + EMPTY_TOKENS / tokens): so a small micro-batch that keeps all
    can be better than a large one that computes much again, and the other way round.
    """
    return (1.0 + again) * (1.0 + EMPTY_TOKENS / tokens)


def useful(samples: int, seq: int, multiple: int = 1) -> list[int]:
    """Micro-batches worth trying, largest first: divisors of a rank's `samples` of `seq` tokens.

    The largest is the smallest that has USEFUL_TOKENS, else all samples. multiple: what each must
    be a multiple of.
    """
    fits = [size for size in divisors(samples) if size % multiple == 0]
    enough = [size for size in fits if size * seq >= USEFUL_TOKENS]
    most = min(enough, default=samples)
    return [size for size in reversed(fits) if size <= most]
