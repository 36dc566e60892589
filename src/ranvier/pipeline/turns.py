"""Turns: what a stage has at hand when it takes a job, for those who count its memory.

What a stage holds depends on what arrives when. Most is there if gradients come as late as they
can: a stage then works on as many micro-batches as its policy admits. So policies are played, here
and in dry runs; an order that is fixed stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from ranvier.pipeline import orders
from ranvier.pipeline.policy import Job, Kind, Message, Order, Policy, Progress, Shape

SEVERAL = 2
"""Passes from which on a sum of gradients is wide."""
ALL = 3
"""All passes of a step."""


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
    """A job, and what is there beside it; numbers of micro-batches by chunk."""

    kind: Kind
    chunk: int
    held: tuple[int, ...]
    """Whose backward is to come, the present one left out."""
    late: tuple[int, ...]
    """Whose gradients of weights are to come, likewise."""
    made: tuple[int, ...]
    """That have added to gradients of blocks before: 0, 1, SEVERAL, or ALL of the step."""
    back: tuple[int, ...]
    """Whose backward has been, likewise: they have added to those of embedding and head."""
    last: bool
    """Whether it is the last of its kind and chunk."""
    follows: bool
    """Whether a forward pass of the first chunk follows."""
    behind: tuple[Kind, int] | None
    """Kind and chunk of the turn that made gradients of weights last: they are on their way."""

    def covers(self, other: Turn) -> bool:
        """Whether no less is there than in another turn."""
        mine, its = (one.held + one.late + one.made + one.back for one in (self, other))
        moving = other.behind is None or other.behind == self.behind
        return moving and all(a >= b for a, b in zip(mine, its, strict=True))


@lru_cache(1 << 12)
def turns(policy: Message | Order, shape: Shape, stage: int) -> tuple[Turn, ...]:
    """The turns of a stage in which most may be there."""
    return _most(_turns(jobs_of(policy, shape, stage), shape))


@lru_cache(1 << 12)
def usual(stages: int, micro_batches: int, chunks: int, stage: int) -> tuple[Turn, ...]:
    """The same under 1F1B, interleaved where there are chunks; alone, of gradient accumulation.

    More micro-batches than three rounds bring no other turns.
    """
    rounds = micro_batches % stages + 3 * stages if stages > 1 else ALL
    shape = Shape(stages, min(micro_batches, rounds), chunks)
    return _most(_turns(orders.interleaved(shape).jobs[stage], shape))


def _most(found: Iterable[Turn]) -> tuple[Turn, ...]:
    """Turns without those beside which another is the same but for more that is there."""
    alike: dict[tuple[object, ...], list[Turn]] = {}
    for one in dict.fromkeys(found):
        some = alike.setdefault((one.kind, one.chunk, one.last, one.follows), [])
        if not any(other.covers(one) for other in some):
            some[:] = [*(other for other in some if not one.covers(other)), one]
    return tuple(one for some in alike.values() for one in some)


def _turns(jobs: Iterable[Job], shape: Shape) -> Iterator[Turn]:
    """One turn for each job."""
    chunks, each = range(shape.chunks), shape.micro_batches
    forward, backward, weights = ([0] * shape.chunks for _ in range(3))
    behind: tuple[Kind, int] | None = None
    final: Kind = "W" if shape.split else "B"

    def passes(counts: list[int], at: int, now: bool) -> tuple[int, ...]:
        before = (n - (c == at and now) for c, n in enumerate(counts))
        return tuple(ALL if n == each else min(n, SEVERAL) for n in before)

    row = [*jobs]
    enters = [(job.kind, job.chunk) == ("F", 0) for job in row if job.kind != "W"]
    seen = 0
    for job in row:
        kind, at = job.kind, job.chunk
        seen += kind != "W"
        backward[at] += kind == "B"
        weights[at] += kind == final
        own = [kind == "B" and shape.split and c == at for c in chunks]
        yield Turn(
            kind,
            at,
            held=tuple(forward[c] - backward[c] for c in chunks),
            late=tuple(backward[c] - weights[c] - own[c] for c in chunks),
            made=passes(weights, at, kind == final),
            back=passes(backward, at, kind == "B"),
            last=job.micro == each - 1,
            follows=enters[seen : seen + 1] == [True],
            behind=behind,
        )
        forward[at] += kind == "F"
        behind = behind if kind == "F" else (kind, at)
