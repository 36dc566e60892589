"""Memory replay: what a stage has in memory at each job, for memory estimates.

The memory of a stage depends on arrival times. It is largest if gradients arrive as late as
possible: a stage then works on as many micro-batches as its policy admits. So policies are replayed
with late gradients, here and in dry runs. A fixed schedule does not change.
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
"""Two or more passes: their gradients are accumulated in a wide dtype."""
ALL_PASSES = 3
"""Code for all passes of a step."""
T = TypeVar("T")


def late_gradient_schedule(
    policy: SchedulingPolicy, shape: PipelineShape, stage: int
) -> FixedSchedule:
    """Returns the order in which a stage runs its jobs under a policy if gradients arrive late.

    Other stages have no jobs. `is_dynamic` is taken from the policy, so that leaders send orders.
    """
    jobs = [tuple(replay_jobs(policy, shape, s)) if s == stage else () for s in range(shape.stages)]
    return FixedSchedule("late gradients", tuple(jobs), policy.split_backward, policy.is_dynamic)


def replay_jobs(policy: SchedulingPolicy, shape: PipelineShape, stage: int) -> Iterator[Job]:
    """Yields the jobs of a stage; gradients of other stages arrive when nothing else can run."""
    now = StageProgress(shape, stage)
    seen = dict[Job, int]()
    while not now.is_complete:
        ready = [job for job in _next_jobs(now) if _can_run(job, now)]
        for job in ready:
            seen.setdefault(job, len(seen))
        # Policies receive jobs in the order in which they became ready.
        ready.sort(key=seen.__getitem__)
        # First without the gradients of other stages. They arrive only if the policy would wait.
        own = [job for job in ready if job.kind != "B" or _is_last_chunk(shape, stage, job.chunk)]
        taken = policy.choose_job(own, now) or policy.choose_job(ready, now)
        assert taken is not None, (policy, stage, now.done_counts)
        now.finish_job(taken)
        yield taken


def _next_jobs(now: StageProgress) -> Iterator[Job]:
    """Yields the next job of each kind and chunk, in the order of `PipelineStep._ready_jobs`."""
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
    """Returns whether a chunk is the last of the model, which computes its own gradient."""
    return stage == shape.stages - 1 and chunk == shape.chunks - 1


def _can_run(job: Job, now: StageProgress) -> bool:
    """Returns whether the micro-batch has passed the chunks of this stage before the job."""
    if job.kind == "F" and job.chunk > 0:
        return now.count_done("F", job.chunk - 1) > job.micro
    if job.kind == "B" and job.chunk < now.shape.chunks - 1:
        return now.count_done("B", job.chunk + 1) > job.micro
    return True


class JobSnapshot(NamedTuple):
    """A job and the other memory of the stage during it. Identical chunks form one group."""

    kind: JobKind
    group: int
    """Group of its chunk."""
    passes_before: int
    """Passes accumulated in the gradients of its blocks: 0, 1, SEVERAL_PASSES or ALL_PASSES."""
    held_by_group: tuple[int, ...]
    """By group, micro-batches whose backward is pending, without the current one."""
    pending_weight_grads: tuple[int, ...]
    """By group, micro-batches whose weight gradients are pending, without the current one."""
    grad_levels: tuple[tuple[int, int, int], ...]
    """By group, number of chunks whose gradients have 1, SEVERAL_PASSES and ALL_PASSES passes."""
    backward_passes: tuple[int, ...]
    """By group, the largest number of backward passes done, coded as `passes_before`. They
    contribute to the gradients of embedding and head, whose chunks are alone in their groups."""
    own_backward_passes: int
    """The same for its own chunk, if it has the embedding or the head."""
    num_scored: int
    """Micro-batches, at most SEVERAL_PASSES, that have passed all earlier chunks; constant for jobs
    other than forward."""
    is_last: bool
    """Whether it is the last of its kind and chunk."""
    embedding_follows: bool
    """Whether a forward pass of the first chunk follows, if the embedding is on this stage."""
    previous_chunk_group: int | None
    """Group of the previous chunk, which follows at the end of the step. This field and the next
    ones are set only if gradients are moved between jobs."""
    vocab_backward_begun: bool
    """Whether any backward pass of embedding or head is done."""
    last_grad_job: tuple[JobKind, int, bool] | None
    """Kind and group of the last job that computed weight gradients, and whether it was the first
    of its chunk to do so. These gradients are being moved."""

    @property
    def kind_key(self) -> tuple[object, ...]:
        """Everything that determines the memory of the job itself, without the other memory."""
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
        """Counts of the other memory. A snapshot with no smaller number anywhere covers another."""
        # Cumulative counts, because gradients of more passes take at least as much memory.
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
"""Snapshots grouped by `kind_key`; those of a group differ only in the other memory."""


@lru_cache(1 << 14)
def peak_snapshots(
    policy: MessageDrivenPolicy | FixedSchedule,
    shape: PipelineShape,
    stage: int,
    groups: tuple[int, ...],
    moves: bool,
) -> SnapshotGroups:
    """Returns the snapshots of a stage at which the memory peak may occur.

    groups: the group of each chunk. moves: whether gradients are moved between jobs.
    """
    return _drop_covered(
        _iterate_snapshots(replay_jobs(policy, shape, stage), shape, stage, groups, moves)
    )


def one_f_one_b_snapshots(
    stages: int, micro_batches: int, chunks: int, stage: int, groups: tuple[int, ...], moves: bool
) -> SnapshotGroups:
    """Returns the peak snapshots of (interleaved) 1F1B; with one stage of gradient accumulation.

    More than three rounds of micro-batches add no further snapshots.
    """
    # The remainder is kept, because the last, incomplete group of micro-batches depends on it.
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
    """Drops snapshots that another one of the same kind covers (a Pareto front)."""
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
    """Yields one snapshot per job."""
    each = shape.micro_batches
    # `final` is the kind of job that adds to the weight gradients; `ends` are stage and chunk of
    # embedding and head.
    final = "W" if shape.split_backward else "B"
    ends = (0, 0), (shape.stages - 1, shape.chunks - 1)
    forward, backward, weights = ([0] * shape.chunks for _ in range(3))
    behind: tuple[JobKind, int] | None = None
    row = [*jobs]
    # Whether each job, without W, is a forward pass of the first chunk.
    enters = [(job.kind, job.chunk) == ("F", 0) for job in row if job.kind != "W"]
    seen = 0
    for job in row:
        kind = job.kind
        at = job.chunk
        seen += kind != "W"
        # Gradients are counted before the job, activations without its own micro-batch. The memory
        # of the job itself is counted separately.
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
    """Returns the code of `JobSnapshot.passes_before` for a number of passes."""
    if count == each:
        return ALL_PASSES
    return min(count, SEVERAL_PASSES)


def _by_group(
    numbers: Sequence[int], groups: tuple[int, ...], joined: Callable[[list[int]], T]
) -> tuple[T, ...]:
    """Combines the numbers of chunks within each group."""
    found: list[list[int]] = [[] for _ in range(max(groups) + 1)]
    for n, group in zip(numbers, groups, strict=True):
        found[group].append(n)
    return tuple(map(joined, found))


def _count_levels(passes: list[int]) -> tuple[int, int, int]:
    return passes.count(1), passes.count(SEVERAL_PASSES), passes.count(ALL_PASSES)
