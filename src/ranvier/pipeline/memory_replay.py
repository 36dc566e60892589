"""Turns: what a stage has at hand when it takes a job, for those who count its memory.

What a stage holds depends on what arrives when. Most is there if gradients come as late as they
can: a stage then works on as many micro-batches as its policy admits. So policies are played, here
and in dry runs; an order that is fixed stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

from ranvier.pipeline import schedules
from ranvier.pipeline.policy import Job, Kind, Message, Order, Policy, Progress, Shape

SEVERAL = 2
"""Passes from which on a sum of gradients is wide."""
ALL = 3
"""All passes of a step."""
T = TypeVar("T")


def late(policy: Policy, shape: Shape, stage: int) -> Order:
    """A policy as the order in which a stage takes its jobs if gradients come late.

    Other stages have none. It is as dynamic as the policy: a stage is led as under it.
    """
    jobs = [tuple(jobs_of(policy, shape, s)) if s == stage else () for s in range(shape.stages)]
    return Order("late gradients", tuple(jobs), policy.split, policy.dynamic)


def jobs_of(policy: Policy, shape: Shape, stage: int) -> Iterator[Job]:
    """The jobs of a stage; a gradient of another stage comes when it can do nothing else."""
    now, seen = Progress(shape, stage), dict[Job, int]()
    while not now.over:
        ready = [job for job in _next(now) if _can(job, now)]
        for job in ready:
            seen.setdefault(job, len(seen))
        ready.sort(key=seen.__getitem__)
        own = [job for job in ready if job.kind != "B" or _leaves(shape, stage, job.chunk)]
        taken = policy.choose(own, now) or policy.choose(ready, now)
        assert taken is not None, (policy, stage, now.done)
        now.finish(taken)
        yield taken


def _next(now: Progress) -> Iterator[Job]:
    """Of each kind and chunk the next job, in the order in which a runtime looks at them."""
    shape = now.shape
    for chunk in range(shape.chunks):
        f, b, w = (now.count(kind, chunk) for kind in ("F", "B", "W"))
        if b < f:
            yield Job("B", b, chunk)
        if shape.split and w < b:
            yield Job("W", w, chunk)
        if f < shape.micro_batches:
            yield Job("F", f, chunk)


def _leaves(shape: Shape, stage: int, chunk: int) -> bool:
    """Whether a chunk is the last of the model: its gradient is its own."""
    return stage == shape.stages - 1 and chunk == shape.chunks - 1


def _can(job: Job, now: Progress) -> bool:
    """Whether what a job needs has gone through the chunks of this stage before it."""
    if job.kind == "F" and job.chunk > 0:
        return now.count("F", job.chunk - 1) > job.micro
    if job.kind == "B" and job.chunk < now.shape.chunks - 1:
        return now.count("B", job.chunk + 1) > job.micro
    return True


class Turn(NamedTuple):
    """A job, and what is there beside it; chunks that are alike are one group."""

    kind: Kind
    group: int
    """Of its chunk."""
    before: int
    """Passes that have added to gradients of its blocks: 0, 1, SEVERAL, or ALL of the step."""
    held: tuple[int, ...]
    """By group, micro-batches whose backward is to come, the present one left out."""
    late: tuple[int, ...]
    """Whose gradients of weights are to come, likewise."""
    made: tuple[tuple[int, int, int], ...]
    """By group, chunks to whose gradients 1, SEVERAL and ALL passes have added."""
    back: tuple[int, ...]
    """By group, the most passes whose backward has been, as numbers of `before`: they have added to
    the gradients of embedding and head, whose chunks are alone in their groups."""
    passed: int
    """The same of its own chunk, if embedding or head are there."""
    scored: int
    """Micro-batches, SEVERAL at most, that have gone through all chunks before; of turns that are
    no forward pass that is not told apart."""
    last: bool
    """Whether it is the last of its kind and chunk."""
    follows: bool
    """Whether a forward pass of the first chunk follows, if the embedding is there."""
    ahead: int | None
    """Group of the chunk before it, whose turn comes in the end; this and what follows is told only
    where gradients move between turns."""
    begun: bool
    """Whether any backward of embedding or head has been."""
    behind: tuple[Kind, int, bool] | None
    """Kind and group of the turn that made gradients of weights last, and whether it was the first
    to do so in its chunk: they are on their way."""

    @property
    def alike(self) -> tuple[object, ...]:
        """What decides, besides how much is there, what comes in a turn."""
        own = self.kind, self.group, self.passed, self.scored, self.last
        return *own, self.follows, self.ahead, self.begun, self.behind

    @property
    def much(self) -> tuple[int, ...]:
        """How much is there: a turn with no less in any number covers another."""
        sums = (n for one, two, three in self.made for n in (one + two + three, two + three, three))
        return (*self.held, *self.late, *self.back, self.before, *sums)


Kinds = tuple[tuple[Turn, ...], ...]
"""Turns that differ only in how much is there beside them, by what they are."""


@lru_cache(1 << 14)
def turns(
    policy: Message | Order, shape: Shape, stage: int, groups: tuple[int, ...], moves: bool
) -> Kinds:
    """The turns of a stage in which most may be there.

    groups: the group of each chunk. moves: whether gradients are on their way between turns.
    """
    return _most(_turns(jobs_of(policy, shape, stage), shape, stage, groups, moves))


def usual(
    stages: int, micro_batches: int, chunks: int, stage: int, groups: tuple[int, ...], moves: bool
) -> Kinds:
    """The same under 1F1B, interleaved where there are chunks; alone, of gradient accumulation.

    More micro-batches than three rounds bring no other turns.
    """
    rounds = micro_batches % stages + 3 * stages if stages > 1 else ALL
    return _usual(Shape(stages, min(micro_batches, rounds), chunks), stage, groups, moves)


@lru_cache(1 << 14)
def _usual(shape: Shape, stage: int, groups: tuple[int, ...], moves: bool) -> Kinds:
    jobs = schedules.interleaved(shape).jobs[stage]
    return _most(_turns(jobs, shape, stage, groups, moves))


def _most(found: Iterable[Turn]) -> Kinds:
    """Turns without those beside which another is the same but for more that is there."""
    alike: dict[tuple[object, ...], dict[tuple[int, ...], Turn]] = {}
    for one in dict.fromkeys(found):
        some, mine = alike.setdefault(one.alike, {}), one.much
        if not any(_covers(other, mine) for other in some):
            for other in [other for other in some if _covers(mine, other)]:
                del some[other]
            some[mine] = one
    kinds: dict[tuple[object, ...], list[Turn]] = {}
    for key, several in alike.items():
        for one in several.values():
            kinds.setdefault((key, one.before), []).append(one)
    return tuple(map(tuple, kinds.values()))


def _covers(more: tuple[int, ...], less: tuple[int, ...]) -> bool:
    return all(a >= b for a, b in zip(more, less, strict=True))


def _turns(
    jobs: Iterable[Job], shape: Shape, stage: int, groups: tuple[int, ...], moves: bool
) -> Iterator[Turn]:
    """One turn for each job."""
    each, final = shape.micro_batches, "W" if shape.split else "B"
    ends = (0, 0), (shape.stages - 1, shape.chunks - 1)
    forward, backward, weights = ([0] * shape.chunks for _ in range(3))
    behind: tuple[Kind, int] | None = None
    row = [*jobs]
    enters = [(job.kind, job.chunk) == ("F", 0) for job in row if job.kind != "W"]
    seen = 0
    for job in row:
        kind, at = job.kind, job.chunk
        seen += kind != "W"
        made, back = ([_passes(n, each) for n in counts] for counts in (weights, backward))
        backward[at] += kind == "B"
        weights[at] += kind == final
        held = [f - b for f, b in zip(forward, backward, strict=True)]
        late = [b - w for b, w in zip(backward, weights, strict=True)]
        late[at] -= kind == "B" and shape.split
        yield Turn(
            kind,
            groups[at],
            made[at],
            held=_by_group(held, groups, sum),
            late=_by_group(late, groups, sum),
            made=_by_group(made, groups, _levels),
            back=_by_group(back, groups, max),
            passed=back[at] if (stage, at) in ends else 0,
            scored=min(held[-1] + back[-1], SEVERAL) if kind == "F" else SEVERAL,
            last=job.micro == each - 1,
            follows=stage == at == 0 and enters[seen : seen + 1] == [True],
            ahead=groups[at - 1] if moves and at and job.micro == each - 1 else None,
            begun=moves and any(back[c] for s, c in ends if s == stage),
            behind=behind and (behind[0], groups[behind[1]], made[behind[1]] == _passes(1, each)),
        )
        forward[at] += kind == "F"
        behind = (kind, at) if moves and kind != "F" else behind


def _passes(count: int, each: int) -> int:
    """So many passes of a step, as `Turn.before` has them."""
    return ALL if count == each else min(count, SEVERAL)


def _by_group(
    numbers: Sequence[int], groups: tuple[int, ...], joined: Callable[[list[int]], T]
) -> tuple[T, ...]:
    """Numbers of chunks, joined in each group."""
    found: list[list[int]] = [[] for _ in range(max(groups) + 1)]
    for n, group in zip(numbers, groups, strict=True):
        found[group].append(n)
    return tuple(map(joined, found))


def _levels(passes: list[int]) -> tuple[int, int, int]:
    return passes.count(1), passes.count(SEVERAL), passes.count(ALL)
