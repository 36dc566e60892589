"""Scheduling policies: choose among the ready jobs of a stage.

A step is a set of jobs. Virtual stage `v = chunk · stages + stage` runs forward F(m), backward B(m)
and, if backward is split, the weight gradients W(m) of every micro-batch m. F(m) needs the
activation of the previous virtual stage, B(m) the gradient of the next one (on the last one: its
own F(m)), W(m) its own B(m). Jobs of one kind and chunk run in the order of micro-batches, so
gradients are summed in that order for any arrival times, and at most one job of each kind and chunk
is ready at a time.

A policy has no state. The executor calls it with the messages that have arrived over the network,
the simulator with the messages that have arrived in simulated time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

JobKind = Literal["F", "B", "W", "H"]
"""Forward, backward, weight gradients. H, the head of a vocabulary sharded over all stages, is not
scheduled by policies."""


class Job(NamedTuple):
    """Work of a stage on a micro-batch."""

    kind: JobKind
    micro: int
    chunk: int = 0


@dataclass(frozen=True)
class PipelineShape:
    """Number and kinds of the jobs of a step."""

    stages: int
    micro_batches: int
    chunks: int = 1
    """Virtual stages per stage."""
    split_backward: bool = False
    """Whether weight gradients are separate jobs."""
    forward_only: bool = False
    """Evaluation: no backward passes."""

    @property
    def job_kinds(self) -> tuple[JobKind, ...]:
        """Kinds of jobs in a step."""
        if self.forward_only:
            return ("F",)
        if self.split_backward:
            return ("F", "B", "W")
        return ("F", "B")

    @property
    def num_jobs(self) -> int:
        """Number of jobs per stage."""
        return len(self.job_kinds) * self.chunks * self.micro_batches


@dataclass
class StageProgress:
    """Jobs that a stage has done. The executor and the simulator have one per stage."""

    shape: PipelineShape
    stage: int
    done_counts: dict[tuple[JobKind, int], int] = field(default_factory=dict)
    """Number of jobs done by kind and chunk, which is also the next micro-batch of each."""
    num_done: int = 0
    """Total number of jobs done."""

    def count_done(self, kind: JobKind, chunk: int = 0) -> int:
        """Returns the number of jobs of a kind and chunk that are done."""
        return self.done_counts.get((kind, chunk), 0)

    def finish_job(self, job: Job) -> None:
        """Marks a job as done; it must be the next of its kind and chunk."""
        assert job.micro == self.count_done(job.kind, job.chunk), (job, self.done_counts)
        self.done_counts[job.kind, job.chunk] = job.micro + 1
        self.num_done += 1

    @property
    def held_activations(self) -> int:
        """Number of activations held: forwards whose backward (and weight gradients) is not
        done.
        """
        last: JobKind = self.shape.job_kinds[-1]
        chunks = range(self.shape.chunks)
        return sum(self.count_done("F", c) - self.count_done(last, c) for c in chunks)

    @property
    def is_complete(self) -> bool:
        """Whether all jobs are done."""
        return self.num_done == self.shape.num_jobs


class SchedulingPolicy(Protocol):
    """Chooses the next job of a stage."""

    @property
    def split_backward(self) -> bool:
        """Whether weight gradients are separate jobs."""

    @property
    def is_dynamic(self) -> bool:
        """Whether its choice depends on arrival times."""

    def choose_job(self, ready: Sequence[Job], now: StageProgress) -> Job | None:
        """Returns one of the ready jobs, which are in the order of becoming ready; None to wait."""


@dataclass(frozen=True)
class FixedSchedule:
    """A fixed order of jobs for each stage, called a schedule in other frameworks."""

    name: str
    jobs: tuple[tuple[Job, ...], ...]
    """Jobs of each stage, in order."""
    split_backward: bool = False
    is_dynamic: bool = False

    def __str__(self) -> str:
        return f"the {self.name} schedule"

    def choose_job(self, ready: Sequence[Job], now: StageProgress) -> Job | None:
        """Returns the next job of the schedule, once it is ready."""
        job = self.jobs[now.stage][now.num_done]
        if job in ready:
            return job
        return None


Priority = Literal["backward", "first", "forward"]


@dataclass(frozen=True)
class MessageDrivenPolicy:
    """Runs jobs as messages arrive: a stage never waits for one message while it could run another
    job.

    Credits limit the activations held: a forward runs while `held < credits`. With chunks, it must
    also leave credits for the forwards that older micro-batches still have to run here; otherwise
    newer ones could use them up and the pipeline would deadlock. So the oldest micro-batch can
    always proceed, and a stage holds at most `max(credits, chunks)` activations. Weight gradients,
    which release activations, fill the idle time.
    """

    priority: Priority
    """Which ready jobs run first; "first" means the one that became ready first."""
    credits: tuple[int, ...]
    """Maximum number of activations that each stage holds."""
    split_backward: bool = False
    is_dynamic: bool = True

    def __str__(self) -> str:
        same = len(set(self.credits)) == 1
        if same:
            held = str(self.credits[0])
        else:
            held = ", ".join(map(str, self.credits))
        if self.priority == "first":
            first = "first come, first served"
        else:
            first = f"{self.priority} first"
        if self.split_backward:
            waiting = ", weight gradients while idle"
        else:
            waiting = ""
        return f"{first}, at most {held} micro-batches per stage{waiting}"

    def choose_job(self, ready: Sequence[Job], now: StageProgress) -> Job | None:
        """Returns the first job by priority that has credit, otherwise weight gradients or None."""
        chunks = now.shape.chunks
        order = [job for job in ready if job.kind != "W"]
        if len(order) > 1 and self.priority != "first":
            order.sort(key=lambda job: self._priority_rank(job, chunks))
        for job in order:
            if job.kind == "B" or self._has_credit(job, now):
                return job
        return next((job for job in ready if job.kind == "W"), None)

    def _priority_rank(self, job: Job, chunks: int) -> int:
        """Returns the sort key; within a kind the job nearest to the end of the model is first."""
        # Early chunks are nearest to the end in backward, late chunks in forward.
        if job.kind == "B":
            return job.chunk + (0 if self.priority == "backward" else chunks)
        return chunks - 1 - job.chunk + (chunks if self.priority == "backward" else 0)

    def _has_credit(self, job: Job, now: StageProgress) -> bool:
        """Returns whether a forward has credit that leaves enough for all older micro-batches."""
        chunks = range(now.shape.chunks)
        limit = max(self.credits[now.stage], now.shape.chunks)
        held = now.held_activations
        if held >= limit:
            return False
        # Fast path: no micro-batch lacks more than one forward per chunk.
        if now.shape.chunks == 1 or held + now.shape.chunks < limit:
            return True
        forward = [now.count_done("F", c) for c in chunks]
        backward = [now.count_done("B", c) for c in chunks]
        # Micro-batch i can finish after the earlier ones if its missing forwards and the
        # activations held by it and newer ones fit. The sum grows with i only where a chunk's next
        # forward belongs to i, so only those i are tested.
        for i in {backward[0], *forward}:
            if backward[0] <= i < job.micro:
                lacks = sum(f <= i for f in forward)
                keeps = sum(max(0, f - max(b, i)) for f, b in zip(forward, backward, strict=True))
                if lacks + keeps >= limit:
                    return False
        return True
