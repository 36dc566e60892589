"""Simulator: plays a step of the pipeline on a clock of its own.

A stage does one job at a time; the message that a job sends reaches the neighbour `link` seconds
after the job's end and waits there until the policy takes it. Links do not disturb one another and
sending costs no time of the stage. Chance (`jitter`) depends on seed, stage and job only, so that
policies are compared under the same luck. All that happens at one moment is taken in before any
stage chooses. Not handled: bandwidth that messages share, and work outside the jobs (optimizer).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from ranvier.errors import PlanError
from ranvier.pipeline.policy import Job, Kind, Order, Policy, Progress, Shape

Cause = Literal["activation", "gradient", "credit", "order", "end"]
Lengths = list[list[list[float]]]
"""Seconds of each job: by stage, by place of kind and chunk, by micro-batch."""


@dataclass(frozen=True)
class Times:
    """Seconds of each job of a step."""

    forward: tuple[float, ...]
    """Of each virtual stage."""
    backward: tuple[float, ...]
    """Of each virtual stage, without what `weight` counts."""
    weight: tuple[float, ...] = ()
    """Weight gradients of each virtual stage; without split they are done in backward."""
    link: float | tuple[float, ...] = 0.0
    """From the end of a job until its message has arrived; or one for each pair of neighbours."""
    jitter: float = 0.0
    """Sigma of a lognormal factor of mean 1 on every job."""
    stragglers: Mapping[int, float] = field(default_factory=dict)
    """Factor on all jobs of a stage."""

    def problems(self, shape: Shape) -> list[str]:
        """What does not fit the shape."""
        size = shape.stages * shape.chunks
        given = {"forward": self.forward, "backward": self.backward, "weight": self.weight}
        wanted = {name: size for name, values in given.items() if name != "weight" or values}
        if isinstance(self.link, tuple):
            given["link"], wanted["link"] = self.link, size - 1
        found = [
            f"{name} has {len(given[name])} times. A step of {shape.stages} stages with "
            f"{shape.chunks} chunks each needs {count}. Give {count}."
            for name, count in wanted.items()
            if len(given[name]) != count
        ]
        if any(not 0 <= x < math.inf for values in given.values() for x in values):
            found.append(f"{self} has a negative or infinite time. Time passes. Use times >= 0.")
        return found


def even(
    shape: Shape, forward: float, backward: float, weight: float = 0.0, *, link: float = 0.0
) -> Times:
    """Equal times; those given are of a stage, all its chunks together."""
    size, chunks = shape.stages * shape.chunks, shape.chunks
    return Times(
        forward=(forward / chunks,) * size,
        backward=(backward / chunks,) * size,
        weight=(weight / chunks,) * size,
        link=link,
    )


class Span(NamedTuple):
    """A job and when it ran, in seconds from the start of the step."""

    stage: int
    kind: Kind
    micro: int
    chunk: int
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    """A step that was played."""

    shape: Shape
    spans: tuple[Span, ...]
    """In the order of their start."""
    seconds: float
    """Of the whole step."""
    busy: tuple[float, ...]
    """Seconds that each stage computes."""
    peak: tuple[int, ...]
    """Most activations that each stage keeps at a time; a chunk's counts as one."""
    waits: tuple[dict[Cause, float], ...]
    """Seconds that each stage waits, by what for: with nothing to do for an activation or a
    gradient; with work that it may not begin yet for credit or the order; then for the end."""

    @property
    def bubble(self) -> float:
        """Share of time without computing: `1 - busy / (stages · seconds)`."""
        total = self.shape.stages * self.seconds
        return 1 - sum(self.busy) / total if total else 0.0

    @property
    def classic(self) -> tuple[int, ...]:
        """Activations that 1F1B keeps: `min(micro_batches, stages - index)`."""
        shape = self.shape
        return tuple(min(shape.micro_batches, shape.stages - s) for s in range(shape.stages))


def simulate(shape: Shape, policy: Policy, times: Times, seed: int = 0) -> Timeline:
    """The step as the policy plays it; whether backward is split is the policy's to say."""
    shape = replace(shape, split=policy.split)
    play = Play(shape, policy, lengths(shape, times, seed), links(shape, times))
    play.run()
    spans = tuple(Span(s, *job, start, stop) for s, job, start, stop in play.spans)
    busy = [0.0] * shape.stages
    for span in spans:
        busy[span.stage] += span.stop - span.start
    for stage, causes in enumerate(play.waits):
        if play.since[stage] < play.seconds:
            causes["end"] = play.seconds - play.since[stage]
    return Timeline(shape, spans, play.seconds, tuple(busy), tuple(play.peak), tuple(play.waits))


def replay(
    shape: Shape,
    policy: Policy,
    stage: int,
    arrivals: Sequence[Job],
    known: Sequence[int],
) -> list[Job | None]:
    """What the policy chooses on one stage for messages that come when they did in a real step.

    arrivals: the job that each message is for, as they came. known: how many had come at each
    choice. A choice is None where the policy would wait.
    """
    shape = replace(shape, split=policy.split)
    zeros = [[[0.0] * shape.micro_batches] * shape.chunks * len(shape.kinds)] * shape.stages
    play = Play(shape, policy, zeros, [0.0] * shape.stages * shape.chunks)
    if stage == 0:
        play.arrived[0][0] = shape.micro_batches
        play.ready[0].append(play.jobs[0][0])
    found: list[Job | None] = []
    seen = 0
    for count in known:
        for job in arrivals[seen:count]:
            play._arrive(stage, job)
        seen = max(seen, count)
        choice = policy.choose(play.ready[stage], play.now[stage])
        found.append(choice)
        if choice is None:
            break
        play.ready[stage].remove(choice)
        play._end(stage, choice, 0.0)
    return found


def lengths(shape: Shape, times: Times, seed: int = 0) -> Lengths:
    """Seconds of every job; the same whatever policy plays them, but for what split tells apart."""
    if problems := times.problems(shape):
        raise PlanError(problems)
    weight = times.weight or (0.0,) * len(times.forward)
    whole = tuple(b + w for b, w in zip(times.backward, weight, strict=True))
    kinds = (times.forward, times.backward, weight) if shape.split else (times.forward, whole)
    table: Lengths = []
    for stage in range(shape.stages):
        factor = times.stragglers.get(stage, 1.0)
        # Whole numbers only: hashes of anything else differ between processes.
        chance = random.Random((seed << 16) + stage)
        rows: list[list[float]] = []
        for kind in kinds:
            for chunk in range(shape.chunks):
                base = kind[chunk * shape.stages + stage] * factor
                rows.append(_shaken(base, times.jitter, shape.micro_batches, chance))
        table.append(rows)
    return table


def _shaken(base: float, sigma: float, count: int, chance: random.Random) -> list[float]:
    """Times with jitter: `base · exp(N(-sigma²/2, sigma))`, whose mean is base."""
    if not sigma:
        return [base] * count
    gauss, exp, middle = chance.gauss, math.exp, -sigma * sigma / 2
    return [base * exp(gauss(middle, sigma)) for _ in range(count)]


def links(shape: Shape, times: Times) -> list[float]:
    """Seconds from each virtual stage to the next; none where both are on one stage."""
    size = shape.stages * shape.chunks
    if shape.stages == 1:
        return [0.0] * size
    if isinstance(times.link, tuple):
        return [*times.link, 0.0]
    return [times.link] * size


class Play:
    """A step in progress."""

    def __init__(
        self, shape: Shape, policy: Policy, lengths: Lengths, links: Sequence[float]
    ) -> None:
        stages, chunks, micros = shape.stages, shape.chunks, shape.micro_batches
        self.shape, self.policy, self.lengths, self.links = shape, policy, lengths, links
        self.refusal: Cause = "credit" if policy.dynamic else "order"
        self.row: dict[Kind, int] = {"F": 0, "B": chunks, "W": 2 * chunks}
        # One object for each job, shared by all stages: events carry references to them.
        self.jobs = [
            [Job(kind, micro, chunk) for micro in range(micros)]
            for kind in shape.kinds
            for chunk in range(chunks)
        ]
        self.events: list[tuple[float, int, int, Job, bool]] = []
        self.number = 0
        self.now = [Progress(shape, stage) for stage in range(stages)]
        self.ready: list[list[Job]] = [[] for _ in range(stages)]
        self.arrived = [[0] * (chunks * len(shape.kinds)) for _ in range(stages)]
        self.working = [False] * stages
        self.held, self.peak = [0] * stages, [0] * stages
        self.since = [0.0] * stages
        self.refused = [False] * stages
        self.waits: list[dict[Cause, float]] = [{} for _ in range(stages)]
        self.spans: list[tuple[int, Job, float, float]] = []
        self.seconds = 0.0

    def run(self) -> None:
        """Play to the end; a PlanError says who waits for what if there is none."""
        self.arrived[0][0] = self.shape.micro_batches
        self.ready[0].append(self.jobs[0][0])
        self._start(0, 0.0)
        events, working = self.events, self.working
        touched: list[int] = []
        while events:
            time = events[0][0]
            touched.clear()
            while events and events[0][0] == time:
                _, _, stage, job, ended = heappop(events)
                if ended:
                    self._end(stage, job, time)
                else:
                    self._arrive(stage, job)
                touched.append(stage)
            for stage in touched:
                if not working[stage]:
                    self._start(stage, time)
        self.seconds = max(self.since)
        for progress in self.now:
            if not progress.over:
                raise PlanError(self._deadlock(progress))

    def _start(self, stage: int, time: float) -> None:
        """Begin what the policy chooses, if anything."""
        ready = self.ready[stage]
        if not ready:
            return
        if time > self.since[stage]:
            self._wait(stage, time)
        job = self.policy.choose(ready, self.now[stage])
        if job is None:
            self.refused[stage] = True
            return
        ready.remove(job)
        if job.kind == "F":
            self.held[stage] += 1
            if self.held[stage] > self.peak[stage]:
                self.peak[stage] = self.held[stage]
        stop = time + self.lengths[stage][self.row[job.kind] + job.chunk][job.micro]
        self.spans.append((stage, job, time, stop))
        self.working[stage] = True
        self._push(stop, stage, job, True)

    def _wait(self, stage: int, time: float) -> None:
        """Account for the time since the stage was free; what came first is what it waited for."""
        cause: Cause = "activation" if self.ready[stage][0].kind == "F" else "gradient"
        if self.refused[stage]:
            cause = self.refusal
        causes = self.waits[stage]
        causes[cause] = causes.get(cause, 0.0) + time - self.since[stage]
        self.since[stage] = time

    def _end(self, stage: int, job: Job, time: float) -> None:
        """Take note of a job's end: send its message, make ready what it held up."""
        shape = self.shape
        kind, micro, chunk = job
        self.working[stage] = self.refused[stage] = False
        self.since[stage] = time
        self.now[stage].finish(job)
        virtual = chunk * shape.stages + stage
        if kind == "F":
            if virtual + 1 < shape.stages * shape.chunks:
                after = self.jobs[chunk + (stage + 1 == shape.stages)][micro]
                to = (stage + 1) % shape.stages
                self._push(time + self.links[virtual], to, after, False)
            else:
                self._arrive(stage, self.jobs[shape.chunks + chunk][micro])
        elif kind == "B":
            if virtual:
                before = self.jobs[shape.chunks + chunk - (stage == 0)][micro]
                to = (stage - 1) % shape.stages
                self._push(time + self.links[virtual - 1], to, before, False)
            if shape.split:
                self._arrive(stage, self.jobs[2 * shape.chunks + chunk][micro])
        if kind == ("W" if shape.split else "B"):
            self.held[stage] -= 1
        place = self.row[kind] + chunk
        if self.arrived[stage][place] > micro + 1:
            self.ready[stage].append(self.jobs[place][micro + 1])

    def _arrive(self, stage: int, job: Job) -> None:
        """Take in the input of a job, which is ready if those before it are done."""
        arrived = self.arrived[stage]
        place = self.row[job.kind] + job.chunk
        assert arrived[place] == job.micro, (stage, job, arrived)
        arrived[place] = job.micro + 1
        if self.now[stage].count(job.kind, job.chunk) == job.micro:
            self.ready[stage].append(job)

    def _push(self, time: float, stage: int, job: Job, ended: bool) -> None:
        self.number += 1
        heappush(self.events, (time, self.number, stage, job, ended))

    def _deadlock(self, progress: Progress) -> str:
        stage, shape = progress.stage, self.shape
        if isinstance(self.policy, Order):
            job = self.policy.jobs[stage][progress.taken]
        else:
            left = [
                row[n]
                for row in self.jobs
                if (n := progress.count(row[0].kind, row[0].chunk)) < len(row)
            ]
            job = left[0]
        what = {"F": "activation", "B": "gradient", "W": "backward"}[job.kind]
        if job in self.ready[stage]:
            what = "credit to take in the " + what
        return (
            f"Stage {stage} waits for ever for the {what} of micro-batch {job.micro}, chunk "
            f"{job.chunk}, with {progress.taken} of {shape.jobs} jobs done. Each job must come "
            "after those it needs. Change the order of the policy."
        )
