"""Runtime: a stage takes the jobs of a step as messages arrive, in the order its policy likes.

Stages have no schedule in common: each knows what has arrived and asks the policy, the same object
that the simulator plays. Ranks that share collectives inside a stage follow the first of them. One
stage is gradient accumulation: there are no messages, and the order is F(0) B(0) F(1) B(1) ...
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ranvier.comm import verbs
from ranvier.comm.deferred import Deferred
from ranvier.comm.inbox import Delay, Form, Inbox, Key, LostError, Outbox, Source, header
from ranvier.errors import CommunicationError, ShardingError
from ranvier.grid import HOST, Axis, Grid
from ranvier.nn.leaf import Moment
from ranvier.pipeline.cut import Stage
from ranvier.pipeline.line import line
from ranvier.pipeline.lost import WORDS, lost_words, unsent_words
from ranvier.pipeline.messages import BACKWARD, FINAL, FORWARD, INSIDE
from ranvier.pipeline.policy import Job, Kind, Policy, Progress, Shape
from ranvier.pipeline.vocabulary import Vocabulary

AHEAD = 3
"""Messages that evaluation may have under way to a stage, and waiting there."""
SHORT = 1e-4
"""Seconds below which a wait is none."""


@dataclass(frozen=True)
class Done:
    """A job that was done, or a wait: when, and what for."""

    kind: str
    """F, B, W, or what was waited for: activation, gradient, order."""
    micro: int
    chunk: int
    start: float
    stop: float


@dataclass
class Micro:
    """What a step knows of a micro-batch."""

    inputs: Mapping[str, Any]
    samples: Tensor | None = None
    """Number in the run of each sample."""


@dataclass
class _Kept:
    """What backward of a job needs."""

    x: Tensor | None
    edge: Any
    """Where in the graph the result lies; the result itself may go."""


@dataclass
class Runtime:
    """Runs the jobs of this rank's stage."""

    grid: Grid
    stage: Stage
    queue: Deferred
    moment: Moment
    device: torch.device
    delay: Delay | None = None
    """Holds messages back, for tests."""
    timing: bool = False
    """Note when the jobs of a step of training run; on a device each is waited for."""
    done: list[Done] = field(default_factory=list)
    """Jobs and waits of the last step, if they were timed."""
    begun: float = 0.0
    """When it began."""
    forms: dict[tuple[Any, int], Form] = field(default_factory=dict)
    """What messages look like, by the shape of inputs and the chunk; -1 - chunk: that leave it."""
    _lines: dict[tuple[str, int, bool], Axis] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.inside: Axis = self.grid.axis(*INSIDE, channel="" if self.grid.tagged else HOST)
        """Ranks that share collectives inside the stage, and where its leader tells them orders."""
        self.leads = self.inside.index == 0
        """Whether I say what my stage does next."""

    def line(self, way: str, tag: int, *, wraps: bool = False) -> Axis:
        """The communicator of a kind of message."""
        key = (way, tag, wraps)
        if key not in self._lines:
            self._lines[key] = line(self.grid, way, tag, wraps=wraps)
        return self._lines[key]

    # ---- steps --------------------------------------------------------------------------

    def train(
        self,
        micros: Sequence[Micro],
        policy: Policy,
        *,
        scored: Callable[[Tensor], None],
        factor: Tensor,
        plain: bool = False,
    ) -> None:
        """Forward and backward of all micro-batches.

        scored: gets the loss of each, on the last stage. factor: what losses are multiplied by.
        plain: a head may trust that.
        Communicates: messages over pipe, orders inside the stage, all that the layers do.
        """
        Step(self, micros, policy, scored, factor, plain).run()

    @torch.no_grad()
    def forward(self, micros: Sequence[Micro]) -> list[Tensor]:
        """Results of all micro-batches, on the last stage. Communicates: as train."""
        shape = Shape(self.stage.count, len(micros), len(self.stage.chunks), forward_only=True)
        results: list[Tensor] = []
        none = torch.zeros((), device=self.device)
        Step(self, micros, _Forwards(shape), results.append, none, False).run()
        return results


@dataclass(frozen=True)
class _Forwards:
    """Forward passes only: micro-batches in order, the last chunk that can go first."""

    shape: Shape
    split: bool = False
    dynamic: bool = False

    def choose(self, ready: Sequence[Job], now: Progress) -> Job | None:
        """A fixed order, as all ranks of a stage must have the same: chunk after chunk."""
        each = self.shape.micro_batches
        job = Job("F", now.taken % each, now.taken // each)
        return job if job in ready else None


class Step:
    """One step of a runtime."""

    def __init__(
        self,
        runtime: Runtime,
        micros: Sequence[Micro],
        policy: Policy,
        scored: Callable[[Tensor], None],
        factor: Tensor,
        plain: bool,
    ) -> None:
        self.at, self.micros, self.policy = runtime, micros, policy
        self.scored, self.factor, self.plain = scored, factor, plain
        stage, forward_only = runtime.stage, isinstance(policy, _Forwards)
        self.shape = Shape(
            stage.count, len(micros), len(stage.chunks), policy.split, forward_only=forward_only
        )
        shapes = {tuple(micro.inputs["tokens"].shape) for micro in micros}
        if stage.count > 1 and len(shapes) > 1:
            raise ShardingError(
                f"The micro-batches of a step have the shapes {sorted(shapes)}. Between stages all "
                "have one. Cut the batch into equal ones, or use pipe=1."
            )
        self.timing = runtime.timing and not forward_only
        self.now = Progress(self.shape, stage.index)
        self.kept: dict[tuple[int, int], _Kept] = {}
        self.later: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self.inbox = Inbox(runtime.delay)
        # Credits bound what is under way. Evaluation has none: of one chunk a few may be ahead.
        plain = forward_only and len(stage.chunks) == 1 and not stage.vocabulary
        self.ahead = AHEAD if plain else 0
        self.outbox = {way: Outbox(runtime.device, self.ahead) for way in (FORWARD, BACKWARD)}
        self.first: dict[Job, int] = {}
        """When a job was first seen to be ready."""
        self.vocabulary = Vocabulary(self) if stage.vocabulary else None
        # Where the vocabulary is spread, messages decide about the order in any case.
        dynamic = policy.dynamic or self.vocabulary is not None
        self.led = runtime.inside.size > 1 and dynamic

    def run(self) -> None:
        """Take all jobs."""
        at, stage = self.at, self.at.stage
        if self.timing:
            at.done, at.begun = [], time.perf_counter()
        for chunk in range(len(stage.chunks)):
            if not stage.enters(chunk):
                form = at.forms.get((self._shape_of(), chunk))
                self._listen(FORWARD, chunk, form)
        if self.vocabulary is not None:
            self.vocabulary.begin()
        while not self._over:
            job = self._next()
            start = time.perf_counter()
            self._do(job)
            if self.timing:
                if at.device.type == "cuda":
                    torch.cuda.synchronize(at.device)
                at.done.append(Done(job.kind, job.micro, job.chunk, start, time.perf_counter()))
        if self.vocabulary is not None:
            self.vocabulary.end()
        at.queue.job(forget=stage.count > 1)
        for way, box in self.outbox.items():
            try:
                box.close(at.grid.timeout_seconds)
            except CommunicationError as error:
                raise CommunicationError(
                    unsent_words(self.at, way, len(self.micros) - 1, error)
                ) from error
        for (way, chunk), form in self.inbox.forms.items():
            if way == FORWARD:
                at.forms[self._shape_of(), chunk] = form

    @property
    def _over(self) -> bool:
        """Whether all jobs are done."""
        scored = self.vocabulary is None or self.vocabulary.heads == len(self.micros)
        return self.now.over and scored

    def _do(self, job: Job) -> None:
        """Do a job."""
        if job.kind == "H":
            assert self.vocabulary is not None
            self.vocabulary.score()
            return
        run = {"F": self._forward, "B": self._backward, "W": self._weights}[job.kind]
        run(job)
        self.now.finish(job)

    def _shape_of(self) -> Any:
        """What the shapes of messages depend on."""
        return tuple(
            (name, tuple(x.shape)) for name, x in self.micros[0].inputs.items() if name == "tokens"
        )

    def _listen(self, way: str, chunk: int, form: Form | None) -> None:
        stage = self.at.stage
        away = -1 if way == FORWARD else 1
        index = (stage.index + away) % stage.count
        # the gradient of a chunk of mine comes back from the one behind it
        tag = chunk if way == FORWARD else (stage.virtual(chunk) + 1) // stage.count
        axis = self.at.line(way, tag, wraps=stage.index + away != index)
        source = Source(axis, index, len(self.micros), self.at.device, form, tag, self.ahead)
        self.inbox.listen((way, chunk), source)

    # ---- what to do next ----------------------------------------------------------------

    def _next(self) -> Job:
        """The job that the policy or the leader of the stage wants, once it is ready."""
        if not self.led:
            return self._chosen()
        leader = self.at.leads
        kinds: tuple[Kind, ...] = ("F", "B", "W", "H")
        job = self._chosen() if leader else Job("F", 0)
        code = (job.chunk * len(self.micros) + job.micro) * len(kinds) + kinds.index(job.kind)
        with self.at.grid.trace.at("pipeline.order"):
            told = verbs.broadcast(torch.tensor([code]), self.at.inside).wait()
        if leader:
            return job
        rest, kind = divmod(int(told), len(kinds))
        job = Job(kinds[kind], rest % len(self.micros), rest // len(self.micros))
        self.wait_until(lambda: job in self._ready(), self._needs(job))
        return job

    def _needs(self, job: Job) -> Key:
        """The message that a job works on."""
        if job.kind == "H":
            return FINAL, self.at.stage.count - 1
        return (FORWARD if job.kind == "F" else BACKWARD), job.chunk

    def _chosen(self) -> Job:
        """Ask the policy until it takes a job."""
        found: list[Job | None] = [None]

        def choose() -> bool:
            ready = self._ready()
            if ready and ready[0].kind == "H":
                found[0] = ready[0]
                return True
            if self.now.over:
                return False
            for job in ready:
                self.first.setdefault(job, len(self.first))
            found[0] = self.policy.choose(sorted(ready, key=self.first.__getitem__), self.now)
            return found[0] is not None

        self.wait_until(choose, None)
        assert found[0] is not None
        return found[0]

    def wait_until(self, good: Callable[[], bool], needs: Key | None) -> None:
        """Wait for messages until something is so; a message that does not come ends the step."""
        at, start = self.at, time.perf_counter()
        limit = at.grid.timeout_seconds
        while True:
            seen = self.inbox.total
            if good():
                break
            try:
                came = self.inbox.wait(seen, limit)
            except LostError as lost:
                raise CommunicationError(
                    lost_words(self.at, lost.key, lost.number, lost.error)
                ) from lost
            if not came:
                way, chunk = needs or self._missing()
                number = self.inbox.arrived.get((way, chunk), 0)
                raise CommunicationError(lost_words(self.at, (way, chunk), number, None))
        if self.timing and time.perf_counter() - start > SHORT:
            (way, chunk), micro = self._cause(start)
            at.done.append(Done(WORDS[way], micro, chunk, start, time.perf_counter()))

    def _cause(self, start: float) -> tuple[Key, int]:
        """The message that ended a wait: the last that came."""
        log = [entry for entry in self.inbox.log if entry[2] >= start]
        key = log[-1][0] if log else self._missing()
        return key, log[-1][1] if log else self.inbox.arrived.get(key, 0)

    def _missing(self) -> Key:
        """What a stage that can do nothing waits for: of all that is to come the first."""
        stage, each = self.at.stage, len(self.micros)
        for chunk in range(len(stage.chunks)):
            done = self.now.count("F", chunk)
            if done < each and not stage.enters(chunk) and not self.here(FORWARD, chunk, done):
                return FORWARD, chunk
        for chunk in reversed(range(len(stage.chunks))):
            done = self.now.count("B", chunk)
            if done < each and not stage.leaves(chunk) and not self.here(BACKWARD, chunk, done):
                return BACKWARD, chunk
        return BACKWARD, 0

    def here(self, way: str, chunk: int, number: int) -> bool:
        """Whether a message has come."""
        return self.inbox.arrived.get((way, chunk), 0) > number

    def _ready(self) -> list[Job]:
        """Jobs that can be done now: of each kind and chunk the next, if it can."""
        stage, each, found = self.at.stage, len(self.micros), list[Job]()
        if self.vocabulary is not None and self.vocabulary.can_score():
            found.append(Job("H", self.vocabulary.heads))
        for chunk in range(len(stage.chunks)):
            f, b, w = (self.now.count(kind, chunk) for kind in ("F", "B", "W"))
            if not self.shape.forward_only:
                if b < f and self._can_return(chunk, b):
                    found.append(Job("B", b, chunk))
                if self.shape.split and w < b:
                    found.append(Job("W", w, chunk))
            if f < each and self._can_enter(chunk, f):
                found.append(Job("F", f, chunk))
        return found

    def _can_enter(self, chunk: int, m: int) -> bool:
        """Whether the input of a forward pass is there."""
        if not self.at.stage.enters(chunk):
            return self.here(FORWARD, chunk, m)
        return self.vocabulary is None or self.vocabulary.can_enter(m)

    def _can_return(self, chunk: int, m: int) -> bool:
        """Whether the gradient for a backward pass is there."""
        if not self.at.stage.leaves(chunk):
            return self.here(BACKWARD, chunk, m)
        return self.vocabulary is None or self.vocabulary.can_return(m)

    # ---- jobs ---------------------------------------------------------------------------

    def enter(self, m: int, *, last: bool = False) -> Micro:
        """Have layers work on a micro-batch."""
        at, micro = self.at, self.micros[m]
        at.queue.job(last=last, forget=at.stage.count > 1)
        at.moment.samples = micro.samples
        return micro

    def _forward(self, job: Job) -> None:
        stage, moment = self.at.stage, self.at.moment
        last = job.micro == len(self.micros) - 1
        micro = self.enter(job.micro, last=last and stage.count == 1)
        x, more = None, dict[str, bool]()
        if not stage.enters(job.chunk):
            x = self.taken(FORWARD, job.chunk)
            x.requires_grad_(torch.is_grad_enabled())
        final = stage.leaves(job.chunk)
        if self.vocabulary is not None:
            x = self.vocabulary.embedded(job.micro) if stage.enters(job.chunk) else x
            more = {"scored": False}
        moment.leave = self.plain and stage.count == 1
        moment.factor, moment.slope = self.factor if final and self.plain else None, self.factor
        try:
            y = stage.run(x, stage.chunks[job.chunk], **micro.inputs, **more)
        finally:
            moment.factor, moment.leave = None, False
        if not self.shape.forward_only:
            loss, edge = final and self.vocabulary is None, None
            if y.requires_grad:  # else nothing before it is trained
                edge = y if loss else torch.autograd.graph.get_gradient_edge(y)
            self.kept[job.chunk, job.micro] = _Kept(x, edge)
        if not final:
            self._send(FORWARD, job, y.detach())
        elif self.vocabulary is None:
            self.scored(y.detach())
        else:
            self.vocabulary.leave(job.micro, y.detach())

    def _backward(self, job: Job) -> None:
        at, stage = self.at, self.at.stage
        last = job.micro == len(self.micros) - 1
        kept = self.kept.pop((job.chunk, job.micro))
        if stage.count > 1:  # alone, backward goes on where forward ended
            self.enter(job.micro, last=last and not self._held_back)
        if not stage.leaves(job.chunk):
            dy = self.taken(BACKWARD, job.chunk)
        elif self.vocabulary is None:
            dy = self.factor
        else:
            dy = self.vocabulary.gradient(job.micro)
        at.moment.later, at.moment.slope = [] if self.shape.split else None, self.factor
        try:
            if isinstance(kept.edge, Tensor):
                kept.edge.backward(dy.to(kept.edge.dtype))
            elif kept.edge is not None:
                torch.autograd.backward((kept.edge,), (dy,))
            if at.moment.later is not None:
                self.later[job.chunk, job.micro] = at.moment.later
        finally:
            at.moment.later = None
        if kept.x is None:
            return
        assert kept.x.grad is not None, job
        if stage.enters(job.chunk):
            assert self.vocabulary is not None
            self.vocabulary.returned(job.micro, kept.x.grad)
        else:
            self._send(BACKWARD, job, kept.x.grad)

    @torch.no_grad()
    def _weights(self, job: Job) -> None:
        last = job.micro == len(self.micros) - 1
        self.enter(job.micro, last=last and not self._held_back)
        for work in self.later.pop((job.chunk, job.micro)):
            work()

    @property
    def _held_back(self) -> bool:
        """Whether reductions over data wait for the end: chunks may end in any order."""
        return self.shape.split and self.shape.chunks > 1

    # ---- messages -----------------------------------------------------------------------

    def taken(self, way: str, chunk: int) -> Tensor:
        """The next message of a key."""
        value = self.inbox.take((way, chunk), self.at.device)
        self._noted("receive", way, value)
        return value

    def post(self, way: str, to: int, value: Tensor, tag: int) -> None:
        """Send a message to any stage."""
        self._noted("send", way, value)
        try:
            self.outbox[FORWARD].send(value, self.at.line(way, tag), to, tag)
        except CommunicationError as error:
            raise CommunicationError(
                unsent_words(self.at, way, self.now.count("F"), error, to)
            ) from error

    def _send(self, way: str, job: Job, value: Tensor) -> None:
        """Send the result of a job on, to the virtual stage before or behind."""
        at, stage = self.at, self.at.stage
        ahead = 1 if way == FORWARD else -1
        to = (stage.index + ahead) % stage.count
        # messages are known by the later of the two chunks
        tag = (stage.virtual(job.chunk) + max(ahead, 0)) // stage.count
        axis = at.line(way, tag, wraps=stage.index + ahead != to)
        form, limit = (tuple(value.shape), value.dtype), at.grid.timeout_seconds
        box, first = self.outbox[way], way == FORWARD and job.micro == 0
        try:
            known = (self._shape_of(), -1 - job.chunk)
            if first and at.forms.get(known) != form:
                at.forms[known] = form
                box.send(header(form, at.device), axis, to, tag, limit)
            box.send(value, axis, to, tag, limit)
        except CommunicationError as error:
            raise CommunicationError(unsent_words(self.at, way, job.micro, error)) from error
        self._noted("send", way, value)
        if first and not self.shape.forward_only:
            self._listen(BACKWARD, job.chunk, form)

    def _noted(self, op: str, way: str, value: Tensor) -> None:
        """Have the trace know of a message."""
        size = value.numel() * value.element_size()
        with self.at.grid.trace.at(f"pipeline.{way}"):
            event = self.at.grid.trace.record(op, ("pipe",), size)
        event.waited = event.done = event.resumed = event.issued
