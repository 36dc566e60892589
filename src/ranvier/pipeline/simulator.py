"""Discrete-event simulator of a pipeline step.

A stage runs one job at a time. The message that a job sends reaches the neighbor `link` seconds
after the job's end and is queued there until the policy takes it. Links do not interfere, and
sending takes no time of the stage. Jitter depends only on seed, stage and job, so that policies are
compared with the same random times. All events of one time are processed before any stage chooses.
Not handled: bandwidth that messages share, and work outside the jobs (optimizer).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from ranvier.errors import PlanError
from ranvier.pipeline.policy import (
    FixedSchedule,
    Job,
    JobKind,
    PipelineShape,
    SchedulingPolicy,
    StageProgress,
)

WaitCause = Literal["activation", "gradient", "credit", "order", "end"]
JobSeconds = list[list[list[float]]]
"""Seconds of each job: by stage, by kind and chunk (`kind_offset + chunk`), by micro-batch."""


@dataclass(frozen=True)
class JobTimes:
    """Seconds of each job of a step."""

    forward: tuple[float, ...]
    """Forward pass of each virtual stage."""
    backward: tuple[float, ...]
    """Backward pass of each virtual stage, without `weight`."""
    weight: tuple[float, ...] = ()
    """Weight gradients of each virtual stage; part of backward unless it is split."""
    link: float | tuple[float, ...] = 0.0
    """From the end of a job until its message has arrived; or one value per pair of neighbors."""
    jitter: float = 0.0
    """Sigma of a lognormal factor of mean 1 on every job."""
    stragglers: Mapping[int, float] = field(default_factory=dict)
    """Factor on all jobs of a stage."""

    def problems(self, shape: PipelineShape) -> list[str]:
        """Returns error messages for values that do not match the shape."""
        size = shape.stages * shape.chunks
        given = {"forward": self.forward, "backward": self.backward, "weight": self.weight}
        wanted = {name: size for name, values in given.items() if name != "weight" or values}
        if isinstance(self.link, tuple):
            given["link"] = self.link
            wanted["link"] = size - 1
        found = [
            f"{name} has {len(given[name])} times. A step of {shape.stages} stages with "
            f"{shape.chunks} chunks each needs {count}. Give {count}."
            for name, count in wanted.items()
            if len(given[name]) != count
        ]
        if any(not 0 <= x < math.inf for values in given.values() for x in values):
            found.append(
                f"{self} has a negative or infinite time. Times must be finite. Use times >= 0."
            )
        return found


def even_times(
    shape: PipelineShape, forward: float, backward: float, weight: float = 0.0, *, link: float = 0.0
) -> JobTimes:
    """Returns equal times for all stages. The arguments are per stage, all chunks together."""
    size = shape.stages * shape.chunks
    chunks = shape.chunks
    return JobTimes(
        forward=(forward / chunks,) * size,
        backward=(backward / chunks,) * size,
        weight=(weight / chunks,) * size,
        link=link,
    )


class JobSpan(NamedTuple):
    """A job with start and end, in seconds from the start of the step."""

    stage: int
    kind: JobKind
    micro: int
    chunk: int
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step."""

    shape: PipelineShape
    spans: tuple[JobSpan, ...]
    """Jobs in the order of their start."""
    seconds: float
    """Duration of the step."""
    busy_seconds: tuple[float, ...]
    """Seconds of compute of each stage."""
    peak_activations: tuple[int, ...]
    """Maximum number of activations that each stage holds, counted per chunk."""
    wait_seconds: tuple[dict[WaitCause, float], ...]
    """Seconds that each stage waits, by cause: for an activation or a gradient if no job is ready,
    for credit or the order if a ready job cannot start yet, and for the end of the step."""

    @property
    def bubble_fraction(self) -> float:
        """Fraction of time without compute: `1 - busy / (stages · seconds)`."""
        total = self.shape.stages * self.seconds
        if total:
            return 1 - sum(self.busy_seconds) / total
        return 0.0

    @property
    def one_f_one_b_peaks(self) -> tuple[int, ...]:
        """Activations that 1F1B holds: `min(micro_batches, stages - index)`."""
        shape = self.shape
        return tuple(min(shape.micro_batches, shape.stages - s) for s in range(shape.stages))


def simulate_step(
    shape: PipelineShape, policy: SchedulingPolicy, times: JobTimes, seed: int = 0
) -> Timeline:
    """Simulates a step under a policy, which also decides whether backward is split."""
    shape = replace(shape, split_backward=policy.split_backward)
    play = Simulation(
        shape, policy, draw_job_seconds(shape, times, seed), link_seconds(shape, times)
    )
    play.run()
    spans = tuple(JobSpan(s, *job, start, stop) for s, job, start, stop in play.spans)
    busy = [0.0] * shape.stages
    for span in spans:
        busy[span.stage] += span.stop - span.start
    for stage, causes in enumerate(play.wait_seconds):
        if play.free_since[stage] < play.seconds:
            causes["end"] = play.seconds - play.free_since[stage]
    return Timeline(
        shape,
        spans,
        play.seconds,
        tuple(busy),
        tuple(play.peak_activations),
        tuple(play.wait_seconds),
    )


def replay_choices(
    shape: PipelineShape,
    policy: SchedulingPolicy,
    stage: int,
    arrivals: Sequence[Job],
    known: Sequence[int],
) -> list[Job | None]:
    """Returns the choices of the policy on one stage for the message arrivals of a real step.

    arrivals: the job of each message, in order of arrival. known: number of messages that had
    arrived at each choice. A choice is None if the policy would wait.
    """
    shape = replace(shape, split_backward=policy.split_backward)
    # Durations do not matter here, only the order of arrivals.
    zeros = [[[0.0] * shape.micro_batches] * shape.chunks * len(shape.job_kinds)] * shape.stages
    play = Simulation(shape, policy, zeros, [0.0] * shape.stages * shape.chunks)
    if stage == 0:
        play.arrived[0][0] = shape.micro_batches
        play.ready[0].append(play.jobs[0][0])
    found: list[Job | None] = []
    seen = 0
    for count in known:
        for job in arrivals[seen:count]:
            play._accept_input(stage, job)
        seen = max(seen, count)
        choice = policy.choose_job(play.ready[stage], play.progress[stage])
        found.append(choice)
        if choice is None:
            break
        play.ready[stage].remove(choice)
        play._end_job(stage, choice, 0.0)
    return found


def draw_job_seconds(shape: PipelineShape, times: JobTimes, seed: int = 0) -> JobSeconds:
    """Returns the seconds of every job, the same for all policies with the same split."""
    if problems := times.problems(shape):
        raise PlanError(problems)
    weight = times.weight or (0.0,) * len(times.forward)
    whole = tuple(b + w for b, w in zip(times.backward, weight, strict=True))
    kinds = (
        (times.forward, times.backward, weight) if shape.split_backward else (times.forward, whole)
    )
    table: JobSeconds = []
    for stage in range(shape.stages):
        factor = times.stragglers.get(stage, 1.0)
        # Seed with an integer: hashes of other types differ between processes.
        chance = random.Random((seed << 16) + stage)
        rows: list[list[float]] = []
        for kind in kinds:
            for chunk in range(shape.chunks):
                base = kind[chunk * shape.stages + stage] * factor
                rows.append(_jittered_seconds(base, times.jitter, shape.micro_batches, chance))
        table.append(rows)
    return table


def _jittered_seconds(base: float, sigma: float, count: int, chance: random.Random) -> list[float]:
    """Returns times with jitter: `base · exp(N(-sigma²/2, sigma))`, whose mean is base."""
    if not sigma:
        return [base] * count
    # Local names for speed: this is the inner loop of a policy search.
    gauss = chance.gauss
    exp = math.exp
    middle = -sigma * sigma / 2
    return [base * exp(gauss(middle, sigma)) for _ in range(count)]


def link_seconds(shape: PipelineShape, times: JobTimes) -> list[float]:
    """Returns the seconds from each virtual stage to the next; 0 if both are on one stage."""
    size = shape.stages * shape.chunks
    if shape.stages == 1:
        return [0.0] * size
    if isinstance(times.link, tuple):
        return [*times.link, 0.0]
    return [times.link] * size


class Simulation:
    """State of a simulated step."""

    def __init__(
        self,
        shape: PipelineShape,
        policy: SchedulingPolicy,
        lengths: JobSeconds,
        links: Sequence[float],
    ) -> None:
        stages = shape.stages
        chunks = shape.chunks
        micros = shape.micro_batches
        self.shape = shape
        self.policy = policy
        self.job_seconds = lengths
        self.link_seconds = links
        if policy.is_dynamic:
            self.refusal_cause: WaitCause = "credit"
        else:
            self.refusal_cause = "order"
        self.kind_offset: dict[JobKind, int] = {"F": 0, "B": chunks, "W": 2 * chunks}
        # One object per job, shared by all stages: events hold references to them.
        self.jobs = [
            [Job(kind, micro, chunk) for micro in range(micros)]
            for kind in shape.job_kinds
            for chunk in range(chunks)
        ]
        # A heap of (time, sequence number, stage, job, ended). The number keeps the order of events
        # of one time; `ended` distinguishes the end of a job from the arrival of its input.
        self.events: list[tuple[float, int, int, Job, bool]] = []
        self.event_count = 0
        self.progress = [StageProgress(shape, stage) for stage in range(stages)]
        self.ready: list[list[Job]] = [[] for _ in range(stages)]
        self.arrived = [[0] * (chunks * len(shape.job_kinds)) for _ in range(stages)]
        self.is_working = [False] * stages
        self.held_activations = [0] * stages
        self.peak_activations = [0] * stages
        self.free_since = [0.0] * stages
        self.was_refused = [False] * stages
        self.wait_seconds: list[dict[WaitCause, float]] = [{} for _ in range(stages)]
        self.spans: list[tuple[int, Job, float, float]] = []
        self.seconds = 0.0

    def run(self) -> None:
        """Runs to the end. Raises a PlanError that names the waiting stage on a deadlock."""
        # The inputs of the model are available: stage 0 can start with F(0).
        self.arrived[0][0] = self.shape.micro_batches
        self.ready[0].append(self.jobs[0][0])
        self._start_job(0, 0.0)
        events = self.events
        working = self.is_working
        touched: list[int] = []
        while events:
            time = events[0][0]
            touched.clear()
            # Process all events of this time before any stage chooses.
            while events and events[0][0] == time:
                _, _, stage, job, ended = heappop(events)
                if ended:
                    self._end_job(stage, job, time)
                else:
                    self._accept_input(stage, job)
                touched.append(stage)
            for stage in touched:
                if not working[stage]:
                    self._start_job(stage, time)
        self.seconds = max(self.free_since)
        for progress in self.progress:
            if not progress.is_complete:
                raise PlanError(self._describe_deadlock(progress))

    def _start_job(self, stage: int, time: float) -> None:
        """Starts the job that the policy chooses, if any."""
        ready = self.ready[stage]
        if not ready:
            return
        if time > self.free_since[stage]:
            self._record_wait(stage, time)
        job = self.policy.choose_job(ready, self.progress[stage])
        if job is None:
            self.was_refused[stage] = True
            return
        ready.remove(job)
        if job.kind == "F":
            self.held_activations[stage] += 1
            if self.held_activations[stage] > self.peak_activations[stage]:
                self.peak_activations[stage] = self.held_activations[stage]
        stop = time + self.job_seconds[stage][self.kind_offset[job.kind] + job.chunk][job.micro]
        self.spans.append((stage, job, time, stop))
        self.is_working[stage] = True
        self._push_event(stop, stage, job, True)

    def _record_wait(self, stage: int, time: float) -> None:
        """Records the idle time of a stage. Its cause is the job that became ready first."""
        if self.ready[stage][0].kind == "F":
            cause: WaitCause = "activation"
        else:
            cause = "gradient"
        if self.was_refused[stage]:
            cause = self.refusal_cause
        causes = self.wait_seconds[stage]
        causes[cause] = causes.get(cause, 0.0) + time - self.free_since[stage]
        self.free_since[stage] = time

    def _end_job(self, stage: int, job: Job, time: float) -> None:
        """Finishes a job: sends its message, and makes the jobs ready that waited for it."""
        shape = self.shape
        kind, micro, chunk = job
        self.is_working[stage] = self.was_refused[stage] = False
        self.free_since[stage] = time
        self.progress[stage].finish_job(job)
        virtual = chunk * shape.stages + stage
        if kind == "F":
            # The last stage sends an activation to the next chunk of the first one.
            if virtual + 1 < shape.stages * shape.chunks:
                after = self.jobs[chunk + (stage + 1 == shape.stages)][micro]
                to = (stage + 1) % shape.stages
                self._push_event(time + self.link_seconds[virtual], to, after, False)
            else:
                self._accept_input(stage, self.jobs[shape.chunks + chunk][micro])
        elif kind == "B":
            if virtual:
                before = self.jobs[shape.chunks + chunk - (stage == 0)][micro]
                to = (stage - 1) % shape.stages
                self._push_event(time + self.link_seconds[virtual - 1], to, before, False)
            if shape.split_backward:
                self._accept_input(stage, self.jobs[2 * shape.chunks + chunk][micro])
        # Weight gradients are the last to read the activation.
        if kind == ("W" if shape.split_backward else "B"):
            self.held_activations[stage] -= 1
        place = self.kind_offset[kind] + chunk
        if self.arrived[stage][place] > micro + 1:
            self.ready[stage].append(self.jobs[place][micro + 1])

    def _accept_input(self, stage: int, job: Job) -> None:
        """Accepts the input of a job, which becomes ready if the jobs before it are done."""
        arrived = self.arrived[stage]
        place = self.kind_offset[job.kind] + job.chunk
        assert arrived[place] == job.micro, (stage, job, arrived)
        arrived[place] = job.micro + 1
        if self.progress[stage].count_done(job.kind, job.chunk) == job.micro:
            self.ready[stage].append(job)

    def _push_event(self, time: float, stage: int, job: Job, ended: bool) -> None:
        self.event_count += 1
        heappush(self.events, (time, self.event_count, stage, job, ended))

    def _describe_deadlock(self, progress: StageProgress) -> str:
        stage = progress.stage
        shape = self.shape
        if isinstance(self.policy, FixedSchedule):
            job = self.policy.jobs[stage][progress.num_done]
        else:
            left = [
                row[n]
                for row in self.jobs
                if (n := progress.count_done(row[0].kind, row[0].chunk)) < len(row)
            ]
            job = left[0]
        what = {"F": "activation", "B": "gradient", "W": "backward"}[job.kind]
        if job in self.ready[stage]:
            what = "credit to accept the " + what
        return (
            f"Stage {stage} waits forever for the {what} of micro-batch {job.micro}, chunk "
            f"{job.chunk}, with {progress.num_done} of {shape.num_jobs} jobs done. Each job "
            "must come after the jobs it needs. Change the order of the policy."
        )
