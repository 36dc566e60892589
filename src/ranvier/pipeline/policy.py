"""Policy: which job a stage takes next, of those that are ready.

A step is a set of jobs. Virtual stage `v = chunk · stages + stage` runs forward F(m), backward B(m)
and, if backward is split, the weight gradients W(m) of every micro-batch m. F(m) needs the
activation of the virtual stage before, B(m) the gradient of the one behind (of the last one: its
own F(m)), W(m) its own B(m). Jobs of one kind and chunk are taken in the order of micro-batches, so
gradients add up in that order whatever arrives when, and at most one job of each kind and chunk is
ready at a time.

A policy is a pure object: the executor asks it with what has arrived over the network, the
simulator with what has arrived on its own clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

JobKind = Literal["F", "B", "W", "H"]
"""Forward, backward, weight gradients; H, the work on a vocabulary that all stages share, is none
of a policy's."""


class Job(NamedTuple):
    """Work of a stage on a micro-batch."""

    kind: JobKind
    micro: int
    chunk: int = 0


@dataclass(frozen=True)
class PipelineShape:
    """How many jobs a step has."""

    stages: int
    micro_batches: int
    chunks: int = 1
    """Virtual stages of each stage."""
    split_backward: bool = False
    """Whether weight gradients are jobs of their own."""
    forward_only: bool = False
    """Evaluation: no backward passes."""

    @property
    def job_kinds(self) -> tuple[JobKind, ...]:
        """Kinds of jobs."""
        if self.forward_only:
            return ("F",)
        if self.split_backward:
            return ("F", "B", "W")
        return ("F", "B")

    @property
    def num_jobs(self) -> int:
        """Jobs of one stage."""
        return len(self.job_kinds) * self.chunks * self.micro_batches


@dataclass
class StageProgress:
    """How far a stage is; the executor and the simulator keep one for each stage."""

    shape: PipelineShape
    stage: int
    done_counts: dict[tuple[JobKind, int], int] = field(default_factory=dict)
    """Jobs done, by kind and chunk: also the next micro-batch of each."""
    num_done: int = 0
    """Jobs done in all."""

    def count_done(self, kind: JobKind, chunk: int = 0) -> int:
        """Jobs of a kind and chunk that are done."""
        return self.done_counts.get((kind, chunk), 0)

    def finish_job(self, job: Job) -> None:
        """Take note that a job is done, which must be the next of its kind and chunk."""
        assert job.micro == self.count_done(job.kind, job.chunk), (job, self.done_counts)
        self.done_counts[job.kind, job.chunk] = job.micro + 1
        self.num_done += 1

    @property
    def held_activations(self) -> int:
        """Activations kept here: of forwards whose backward (and weights) is not done."""
        last: JobKind = self.shape.job_kinds[-1]
        chunks = range(self.shape.chunks)
        return sum(self.count_done("F", c) - self.count_done(last, c) for c in chunks)

    @property
    def is_complete(self) -> bool:
        """Whether all jobs are done."""
        return self.num_done == self.shape.num_jobs


class SchedulingPolicy(Protocol):
    """Decides what a stage does next."""

    @property
    def split_backward(self) -> bool:
        """Whether it wants weight gradients as jobs of their own."""

    @property
    def is_dynamic(self) -> bool:
        """Whether its choice depends on what arrives when."""

    def choose_job(self, ready: Sequence[Job], now: StageProgress) -> Job | None:
        """One of the ready jobs (in the order in which they became ready), or None: wait."""


@dataclass(frozen=True)
class FixedSchedule:
    """A fixed order of jobs for each stage: what other frameworks call a schedule."""

    name: str
    jobs: tuple[tuple[Job, ...], ...]
    """Of each stage."""
    split_backward: bool = False
    is_dynamic: bool = False

    def __str__(self) -> str:
        return f"the order of {self.name}"

    def choose_job(self, ready: Sequence[Job], now: StageProgress) -> Job | None:
        """The next one in the order, once it is ready."""
        job = self.jobs[now.stage][now.num_done]
        if job in ready:
            return job
        return None


Priority = Literal["backward", "first", "forward"]


@dataclass(frozen=True)
class MessageDrivenPolicy:
    """Takes what has arrived: a stage never waits for one message while it could work on another.

    Credits bound the activations kept: a forward is taken while `held < credits`. With chunks, it
    must also leave room for the forwards that older micro-batches have still to make here, else
    newer ones could use up what they need and all would wait for ever. So the oldest micro-batch
    can always go on, and a stage keeps at most `max(credits, chunks)`. Weight gradients, which give
    back what is kept, fill the waiting.
    """

    priority: Priority
    """What goes first of the jobs that are ready; "first": the one that was ready first."""
    credits: tuple[int, ...]
    """Most activations that each stage keeps."""
    split_backward: bool = False
    is_dynamic: bool = True

    def __str__(self) -> str:
        same = len(set(self.credits)) == 1
        if same:
            held = str(self.credits[0])
        else:
            held = ", ".join(map(str, self.credits))
        if self.priority == "first":
            first = "first come"
        else:
            first = f"{self.priority} first"
        if self.split_backward:
            waiting = ", weight gradients while it waits"
        else:
            waiting = ""
        return f"{first}, at most {held} micro-batches a stage{waiting}"

    def choose_job(self, ready: Sequence[Job], now: StageProgress) -> Job | None:
        """The first by priority for which there is credit; else weight gradients; else none."""
        chunks = now.shape.chunks
        order = [job for job in ready if job.kind != "W"]
        if len(order) > 1 and self.priority != "first":
            order.sort(key=lambda job: self._priority_rank(job, chunks))
        for job in order:
            if job.kind == "B" or self._has_credit(job, now):
                return job
        return next((job for job in ready if job.kind == "W"), None)

    def _priority_rank(self, job: Job, chunks: int) -> int:
        """Smaller goes first; of one kind the job that is nearest to its end."""
        if job.kind == "B":
            return job.chunk + (0 if self.priority == "backward" else chunks)
        return chunks - 1 - job.chunk + (chunks if self.priority == "backward" else 0)

    def _has_credit(self, job: Job, now: StageProgress) -> bool:
        """Whether there is credit for a forward, and enough left for all older micro-batches."""
        chunks = range(now.shape.chunks)
        limit = max(self.credits[now.stage], now.shape.chunks)
        held = now.held_activations
        if held >= limit:
            return False
        if now.shape.chunks == 1 or held + now.shape.chunks < limit:
            return True  # no micro-batch lacks more than one forward per chunk
        forward = [now.count_done("F", c) for c in chunks]
        backward = [now.count_done("B", c) for c in chunks]
        # Micro-batch i can end once those before it have: what it still lacks and what it and newer
        # ones keep fit. The sum grows with i only where a chunk's next forward is that of i.
        for i in {backward[0], *forward}:
            if backward[0] <= i < job.micro:
                lacks = sum(f <= i for f in forward)
                keeps = sum(max(0, f - max(b, i)) for f, b in zip(forward, backward, strict=True))
                if lacks + keeps >= limit:
                    return False
        return True
