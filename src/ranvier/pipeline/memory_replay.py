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
from ranvier.pipeline.policy import (
    FixedSchedule,
    Job,
    JobKind,
    MessageDrivenPolicy,
    PipelineShape,
    SchedulingPolicy,
    StageProgress,
)

SEVERAL_PASSES = 2
"""Passes from which on a sum of gradients is wide."""
ALL_PASSES = 3
"""All passes of a step."""
T = TypeVar("T")


def late_gradient_schedule(
    policy: SchedulingPolicy, shape: PipelineShape, stage: int
) -> FixedSchedule:
    """A policy as the order in which a stage takes its jobs if gradients come late.

    Other stages have none. It is as dynamic as the policy: a stage is led as under it.
    """
    jobs = [tuple(replay_jobs(policy, shape, s)) if s == stage else () for s in range(shape.stages)]
    return FixedSchedule("late gradients", tuple(jobs), policy.split_backward, policy.is_dynamic)


def replay_jobs(policy: SchedulingPolicy, shape: PipelineShape, stage: int) -> Iterator[Job]:
    """The jobs of a stage; a gradient of another stage comes when it can do nothing else."""
    now = StageProgress(shape, stage)
    seen = dict[Job, int]()
    while not now.is_complete:
        ready = [job for job in _next_jobs(now) if _can_run(job, now)]
        for job in ready:
            seen.setdefault(job, len(seen))
        ready.sort(key=seen.__getitem__)
        own = [job for job in ready if job.kind != "B" or _is_last_chunk(shape, stage, job.chunk)]
        taken = policy.choose_job(own, now) or policy.choose_job(ready, now)
        assert taken is not None, (policy, stage, now.done_counts)
        now.finish_job(taken)
        yield taken


def _next_jobs(now: StageProgress) -> Iterator[Job]:
    """Of each kind and chunk the next job, in the order in which a runtime looks at them."""
    shape = now.shape
    for chunk in range(shape.chunks):
        f, b, w = (now.count_done(kind, chunk) for kind in ("F", "B", "W"))
        if b < f:
            yield Job("B", b, chunk)
        if shape.split_backward and w < b:
            yield Job("W", w, chunk)
        if f < shape.micro_batches:
            yield Job("F", f, chunk)


def _is_last_chunk(shape: PipelineShape, stage: int, chunk: int) -> bool:
    """Whether a chunk is the last of the model: its gradient is its own."""
    return stage == shape.stages - 1 and chunk == shape.chunks - 1


def _can_run(job: Job, now: StageProgress) -> bool:
    """Whether what a job needs has gone through the chunks of this stage before it."""
    if job.kind == "F" and job.chunk > 0:
        return now.count_done("F", job.chunk - 1) > job.micro
    if job.kind == "B" and job.chunk < now.shape.chunks - 1:
        return now.count_done("B", job.chunk + 1) > job.micro
    return True


class JobSnapshot(NamedTuple):
    """A job, and what is there beside it; chunks that are alike are one group."""

    kind: JobKind
    group: int
    """Of its chunk."""
    passes_before: int
    """Passes that have added to gradients of its blocks: 0, 1, SEVERAL, or ALL of the step."""
    held_by_group: tuple[int, ...]
    """By group, micro-batches whose backward is to come, the present one left out."""
    pending_weight_grads: tuple[int, ...]
    """Whose gradients of weights are to come, likewise."""
    grad_levels: tuple[tuple[int, int, int], ...]
    """By group, chunks to whose gradients 1, SEVERAL and ALL passes have added."""
    backward_passes: tuple[int, ...]
    """By group, the most passes whose backward has been, as numbers of `before`: they have added to
    the gradients of embedding and head, whose chunks are alone in their groups."""
    own_backward_passes: int
    """The same of its own chunk, if embedding or head are there."""
    num_scored: int
    """Micro-batches, SEVERAL at most, that have gone through all chunks before; of turns that are
    no forward pass that is not told apart."""
    is_last: bool
    """Whether it is the last of its kind and chunk."""
    embedding_follows: bool
    """Whether a forward pass of the first chunk follows, if the embedding is there."""
    previous_chunk_group: int | None
    """Group of the chunk before it, whose turn comes in the end; this and what follows is told only
    where gradients move between turns."""
    vocab_backward_begun: bool
    """Whether any backward of embedding or head has been."""
    last_grad_job: tuple[JobKind, int, bool] | None
    """Kind and group of the turn that made gradients of weights last, and whether it was the first
    to do so in its chunk: they are on their way."""

    @property
    def kind_key(self) -> tuple[object, ...]:
        """What decides, besides how much is there, what comes in a turn."""
        own = self.kind, self.group, self.own_backward_passes, self.num_scored, self.is_last
        return (
            *own,
            self.embedding_follows,
            self.previous_chunk_group,
            self.vocab_backward_begun,
            self.last_grad_job,
        )

    @property
    def memory_counts(self) -> tuple[int, ...]:
        """How much is there: a turn with no less in any number covers another."""
        sums = (
            n
            for one, two, three in self.grad_levels
            for n in (one + two + three, two + three, three)
        )
        return (
            *self.held_by_group,
            *self.pending_weight_grads,
            *self.backward_passes,
            self.passes_before,
            *sums,
        )


SnapshotGroups = tuple[tuple[JobSnapshot, ...], ...]
"""Turns that differ only in how much is there beside them, by what they are."""


@lru_cache(1 << 14)
def peak_snapshots(
    policy: MessageDrivenPolicy | FixedSchedule,
    shape: PipelineShape,
    stage: int,
    groups: tuple[int, ...],
    moves: bool,
) -> SnapshotGroups:
    """The turns of a stage in which most may be there.

    groups: the group of each chunk. moves: whether gradients are on their way between turns.
    """
    return _drop_covered(
        _iterate_snapshots(replay_jobs(policy, shape, stage), shape, stage, groups, moves)
    )


def one_f_one_b_snapshots(
    stages: int, micro_batches: int, chunks: int, stage: int, groups: tuple[int, ...], moves: bool
) -> SnapshotGroups:
    """The same under 1F1B, interleaved where there are chunks; alone, of gradient accumulation.

    More micro-batches than three rounds bring no other turns.
    """
    if stages > 1:
        rounds = micro_batches % stages + 3 * stages
    else:
        rounds = ALL_PASSES
    return _interleaved_snapshots(
        PipelineShape(stages, min(micro_batches, rounds), chunks), stage, groups, moves
    )


@lru_cache(1 << 14)
def _interleaved_snapshots(
    shape: PipelineShape, stage: int, groups: tuple[int, ...], moves: bool
) -> SnapshotGroups:
    jobs = schedules.interleaved_schedule(shape).jobs[stage]
    return _drop_covered(_iterate_snapshots(jobs, shape, stage, groups, moves))


def _drop_covered(found: Iterable[JobSnapshot]) -> SnapshotGroups:
    """Turns without those beside which another is the same but for more that is there."""
    alike: dict[tuple[object, ...], dict[tuple[int, ...], JobSnapshot]] = {}
    for one in dict.fromkeys(found):
        some = alike.setdefault(one.kind_key, {})
        mine = one.memory_counts
        if not any(_covers_all(other, mine) for other in some):
            for other in [other for other in some if _covers_all(mine, other)]:
                del some[other]
            some[mine] = one
    kinds: dict[tuple[object, ...], list[JobSnapshot]] = {}
    for key, several in alike.items():
        for one in several.values():
            kinds.setdefault((key, one.passes_before), []).append(one)
    return tuple(map(tuple, kinds.values()))


def _covers_all(more: tuple[int, ...], less: tuple[int, ...]) -> bool:
    return all(a >= b for a, b in zip(more, less, strict=True))


def _iterate_snapshots(
    jobs: Iterable[Job], shape: PipelineShape, stage: int, groups: tuple[int, ...], moves: bool
) -> Iterator[JobSnapshot]:
    """One turn for each job."""
    each = shape.micro_batches
    final = "W" if shape.split_backward else "B"
    ends = (0, 0), (shape.stages - 1, shape.chunks - 1)
    forward, backward, weights = ([0] * shape.chunks for _ in range(3))
    behind: tuple[JobKind, int] | None = None
    row = [*jobs]
    enters = [(job.kind, job.chunk) == ("F", 0) for job in row if job.kind != "W"]
    seen = 0
    for job in row:
        kind = job.kind
        at = job.chunk
        seen += kind != "W"
        made, back = ([_pass_level(n, each) for n in counts] for counts in (weights, backward))
        backward[at] += kind == "B"
        weights[at] += kind == final
        held = [f - b for f, b in zip(forward, backward, strict=True)]
        late = [b - w for b, w in zip(backward, weights, strict=True)]
        late[at] -= kind == "B" and shape.split_backward
        yield JobSnapshot(
            kind,
            groups[at],
            made[at],
            held_by_group=_by_group(held, groups, sum),
            pending_weight_grads=_by_group(late, groups, sum),
            grad_levels=_by_group(made, groups, _count_levels),
            backward_passes=_by_group(back, groups, max),
            own_backward_passes=back[at] if (stage, at) in ends else 0,
            num_scored=min(held[-1] + back[-1], SEVERAL_PASSES) if kind == "F" else SEVERAL_PASSES,
            is_last=job.micro == each - 1,
            embedding_follows=stage == at == 0 and enters[seen : seen + 1] == [True],
            previous_chunk_group=groups[at - 1] if moves and at and job.micro == each - 1 else None,
            vocab_backward_begun=moves and any(back[c] for s, c in ends if s == stage),
            last_grad_job=behind
            and (behind[0], groups[behind[1]], made[behind[1]] == _pass_level(1, each)),
        )
        forward[at] += kind == "F"
        if moves and kind != "F":
            behind = (kind, at)


def _pass_level(count: int, each: int) -> int:
    """So many passes of a step, as `Turn.before` has them."""
    if count == each:
        return ALL_PASSES
    return min(count, SEVERAL_PASSES)


def _by_group(
    numbers: Sequence[int], groups: tuple[int, ...], joined: Callable[[list[int]], T]
) -> tuple[T, ...]:
    """Numbers of chunks, joined in each group."""
    found: list[list[int]] = [[] for _ in range(max(groups) + 1)]
    for n, group in zip(numbers, groups, strict=True):
        found[group].append(n)
    return tuple(map(joined, found))


def _count_levels(passes: list[int]) -> tuple[int, int, int]:
    return passes.count(1), passes.count(SEVERAL_PASSES), passes.count(ALL_PASSES)
