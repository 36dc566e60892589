"""Runtime: a stage takes the jobs of a step as messages arrive, in the order its policy likes.

Stages have no schedule in common: each knows what has arrived and asks the policy, the same object
that the simulator plays. Ranks that share collectives inside a stage follow the first of them. One
stage is gradient accumulation: there are no messages, and the order is F(0) B(0) F(1) B(1) ...

Where transfers are agreed on (NCCL, see `comm.p2p`) the first rank of a stage also says when the
others post them, so that all ranks of a stage launch collectives and transfers in one order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ranvier.buckets.scheduler import Deferred
from ranvier.comm import collectives
from ranvier.comm.p2p import (
    HEADER,
    Delay,
    EagerTransport,
    Form,
    Key,
    LostError,
    RendezvousLinks,
    RendezvousTransport,
    Transfer,
    Transport,
    decode_form,
    encode_form,
)
from ranvier.errors import CommunicationError, ShardingError
from ranvier.grid import HOST, Axis, Grid
from ranvier.nn.layer import Moment
from ranvier.pipeline.p2p_errors import WORDS, lost_words, unsent_words, waiting_words
from ranvier.pipeline.partition import Stage
from ranvier.pipeline.policy import Job, Kind, Policy, Progress, Shape
from ranvier.pipeline.traffic import (
    BACKWARD,
    FINAL,
    FORWARD,
    INSIDE,
    ORDER_NUMBERS,
    WAYS,
    link,
    links,
)
from ranvier.pipeline.vocab_parallel import Vocabulary

AHEAD = 3
"""Messages that evaluation may have under way to a stage, and waiting there."""
SHORT = 1e-4
"""Seconds below which a wait is none."""
KINDS: tuple[Kind, ...] = ("F", "B", "W", "H")
JOB, SEND, RECEIVE, PROCEED = range(4)
"""What the first rank of a stage tells the others: take a job, post a transfer, go on."""


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
    form: Form | None = None
    """Shape and type of all messages, for a dry run, in which nobody says it."""
    log: list[tuple[Key, int, float]] = field(default_factory=list)
    """Messages of the last step and when they came, likewise."""
    choices: list[tuple[Job, int]] = field(default_factory=list)
    """Jobs that the policy took, on the rank that asks it, and how many messages had come then."""

    def __post_init__(self) -> None:
        self.inside: Axis = self.grid.line(*INSIDE)
        """Ranks that share collectives inside the stage, and where its leader tells them orders."""
        if self.stage.count > 1:
            channel = HOST if self.grid.backend == "nccl" else ""
            self.inside = self.grid.axis(*INSIDE, channel=channel)
        self.leads = self.inside.index == 0
        """Whether I say what my stage does next."""
        self.links: RendezvousLinks | None = None
        """What transfers need that stages agree on."""
        if self.stage.count > 1 and self.grid.rendezvous:
            count, spread = self.stage.count, bool(self.stage.vocabulary)
            channels = links(count, len(self.stage.chunks), spread=spread)
            self.links = RendezvousLinks(self.grid, self.device, [*channels], partial(link, count))

    def transport(self, ahead: int) -> Transport:
        """The messages of a step."""
        if self.links is not None and self.links.broken:
            raise CommunicationError(
                "A step of this pipeline has failed before. Its messages may still be under way. "
                "Build the model anew, or start the run again."
            )
        if self.links is None:
            return EagerTransport(
                self.grid, self.device, WAYS, delay=self.delay, ahead=ahead, form=self.form
            )
        return RendezvousTransport(
            self.grid,
            self.device,
            WAYS,
            delay=self.delay,
            ahead=ahead,
            links=self.links,
            leads=self.leads,
        )

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
        self._run(Step(self, micros, policy, scored, factor, plain))

    @torch.no_grad()
    def forward(self, micros: Sequence[Micro]) -> list[Tensor]:
        """Results of all micro-batches, on the last stage. Communicates: as train."""
        shape = Shape(self.stage.count, len(micros), len(self.stage.chunks), forward_only=True)
        results: list[Tensor] = []
        none = torch.zeros((), device=self.device)
        self._run(Step(self, micros, _Forwards(shape), results.append, none, False))
        return results

    def _run(self, step: Step) -> None:
        try:
            step.run()
        except BaseException:
            if self.links is not None:
                self.links.broken = True
            raise


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
        self.read_later: dict[tuple[int, int], list[Tensor]] = {}
        """Messages that weight gradients may need."""
        # Credits bound what is under way. Evaluation has none: of one chunk a few may be ahead.
        plain = forward_only and len(stage.chunks) == 1 and not stage.vocabulary
        self.transport = runtime.transport(AHEAD if plain else 0)
        self.rendezvous = isinstance(self.transport, RendezvousTransport)
        self.choices: list[tuple[Job, int]] = []
        self.came: dict[tuple[Key, int], float] = {}
        """Messages that the policy knows of, and when they came."""
        self.ended: dict[tuple[str, int], float] = {}
        """When the last job of each kind and chunk ended."""
        self.finished: dict[tuple[str, int, int], float] = {}
        """When each job ended."""
        self.vocabulary = Vocabulary(self) if stage.vocabulary else None
        # Where the vocabulary is spread, messages decide about the order in any case.
        dynamic = policy.dynamic or self.vocabulary is not None or self.rendezvous
        self.led = runtime.inside.size > 1 and dynamic

    def run(self) -> None:
        """Take all jobs."""
        at, stage = self.at, self.at.stage
        if self.timing:
            at.done, at.begun = [], time.perf_counter()
        if stage.count > 1:
            self._announce()
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
        if self.rendezvous:
            self.drain(lambda: not self.transport.has_outgoing, None)
        at.queue.job(forget=stage.count > 1)
        try:
            self.transport.close(at.grid.timeout_seconds)
        except CommunicationError as error:
            words = unsent_words(self.at, FORWARD, len(self.micros) - 1, error)
            raise CommunicationError(words) from error
        if self.timing:
            at.log, at.choices = self.transport.log, self.choices

    def _announce(self) -> None:
        """Say which messages of this step will come and be sent."""
        stage, each, transport = self.at.stage, len(self.micros), self.transport
        before, behind = (stage.index - 1) % stage.count, (stage.index + 1) % stage.count
        training = not self.shape.forward_only
        for chunk in range(len(stage.chunks)):
            if not stage.enters(chunk):
                transport.expect((FORWARD, chunk), before, each)
                if training:
                    transport.promise(self._key_there(BACKWARD, chunk), before, each)
            if not stage.leaves(chunk):
                transport.promise(self._key_there(FORWARD, chunk), behind, each)
                if training:
                    transport.expect((BACKWARD, chunk), behind, each)
        if self.vocabulary is not None:
            self.vocabulary.announce()
        transport.start()

    def _key_there(self, way: str, chunk: int) -> Key:
        """How the stage that gets the result of a job of mine knows it."""
        away = 1 if way == FORWARD else -1
        return way, (self.at.stage.virtual(chunk) + away) // self.at.stage.count

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
        self.ended[job.kind, job.chunk] = time.perf_counter()
        self.finished[job.kind, job.chunk, job.micro] = self.ended[job.kind, job.chunk]

    # ---- what to do next ----------------------------------------------------------------

    def _next(self) -> Job:
        """The job that the policy or the leader of the stage wants, once it is ready.

        Transfers that are posted before it are posted.
        """
        while True:
            chosen = self._choose() if self.at.leads or not self.led else None
            if self.led:
                chosen = self._follow(chosen)
            if isinstance(chosen, Job):
                if self.led and not self.at.leads and not self.rendezvous:
                    self.wait_until(lambda job=chosen: job in self._ready(), self._needs(chosen))  # type: ignore[misc]
                return chosen
            assert chosen is not None
            self._post(chosen)

    def drain(self, good: Callable[[], bool], needs: Key | None) -> None:
        """Post transfers, and take no job, until something is so on the leader of the stage."""
        if not self.rendezvous:
            self.wait_until(good, needs)
            return
        while True:
            chosen: Job | Transfer | None = None
            if self.at.leads:
                chosen = self._choose_transfer(good, needs)
            if self.led:
                chosen = self._follow(chosen)
            if not isinstance(chosen, Transfer):
                return
            self._post(chosen)

    def _choose_transfer(self, good: Callable[[], bool], needs: Key | None) -> Transfer | None:
        """The next transfer; None once something is so."""
        found: list[Transfer | None] = [None]

        def choose() -> bool:
            if good():
                return True
            found[0] = self.transport.next_transfer()
            return found[0] is not None

        self.wait_until(choose, needs)
        return found[0]

    def _follow(self, chosen: Job | Transfer | None) -> Job | Transfer | None:
        """What the leader of the stage has chosen. Communicates: broadcast inside the stage."""
        order = torch.tensor(self._encode(chosen))
        with self.at.grid.trace.at("pipeline.order"):
            told = collectives.broadcast(order, self.at.inside).wait()
        return chosen if self.at.leads else self._decode(told.tolist())

    def _encode(self, chosen: Job | Transfer | None) -> list[int]:
        """An order as numbers."""
        if chosen is None:
            numbers = [PROCEED]
        elif isinstance(chosen, Job):
            numbers = [JOB, KINDS.index(chosen.kind), chosen.micro, chosen.chunk]
        else:
            op = SEND if chosen.op == "send" else RECEIVE
            (way, place), form = chosen.key, encode_form(chosen.form)
            numbers = [op, WAYS.index(way), place, chosen.number, chosen.peer, *form]
        return numbers + [0] * (ORDER_NUMBERS - len(numbers))

    def _decode(self, numbers: Sequence[int]) -> Job | Transfer | None:
        """The converse."""
        op, a, b, c, d, *form = numbers
        assert len(form) == HEADER, numbers
        if op == PROCEED:
            return None
        if op == JOB:
            return Job(KINDS[a], b, c)
        return Transfer("send" if op == SEND else "receive", (WAYS[a], b), c, d, decode_form(form))

    def _post(self, transfer: Transfer) -> None:
        try:
            self.transport.post(transfer)
        except (CommunicationError, RuntimeError) as error:
            (way, _), number = transfer.key, transfer.number
            words = lost_words(self.at, transfer.key, number, error)
            if transfer.op == "send":
                words = unsent_words(self.at, way, number, error, transfer.peer)
            raise CommunicationError(words) from error

    def _needs(self, job: Job) -> Key:
        """The message that a job works on."""
        if job.kind == "H":
            return FINAL, self.at.stage.count - 1
        return (FORWARD if job.kind == "F" else BACKWARD), job.chunk

    def _choose(self) -> Job | Transfer:
        """A transfer that can be posted, else what the policy takes, as soon as there is one."""
        found: list[Job | Transfer | None] = [None]

        def choose() -> bool:
            announced = (
                self.vocabulary is not None and self.rendezvous and self.vocabulary.has_announced
            )
            found[0] = self.transport.next_transfer(sends=not announced) or self._choose_job()
            return found[0] is not None

        self.wait_until(choose, None)
        assert found[0] is not None
        return found[0]

    def _choose_job(self) -> Job | None:
        """The job that the policy takes now, if one may be launched."""
        if not self.transport.can_compute:
            return None
        # What comes from now on is of no account: the same messages lead to the same choice.
        for key, number, when in self.transport.log[len(self.came) :]:
            self.came[key, number] = when
        ready = self._ready()
        if ready and ready[0].kind == "H":
            if isinstance(self.transport, RendezvousTransport):
                assert self.vocabulary is not None
                return ready[0] if self.vocabulary.all_ready(self.transport) else None
            return ready[0]
        if self.now.over:
            return None
        ready = [job for job in ready if not self._comes(job) or self._message(job) in self.came]
        job = self.policy.choose(sorted(ready, key=self._ready_since), self.now)
        if job is not None:
            self.choices.append((job, len(self.came)))
        return job

    def _comes(self, job: Job) -> bool:
        """Whether a job works on a message of another stage."""
        stage = self.at.stage
        if job.kind == "F":
            return not stage.enters(job.chunk)
        return job.kind == "B" and not stage.leaves(job.chunk)

    def _message(self, job: Job) -> tuple[Key, int]:
        """The message that a job works on."""
        return (FORWARD if job.kind == "F" else BACKWARD, job.chunk), job.micro

    def _ready_since(self, job: Job) -> float:
        """When a job became ready: its input was there, and the one before it was done."""
        before = self.ended.get((job.kind, job.chunk), 0.0)
        if self._comes(job):
            return max(before, self.came[self._message(job)])
        cause = {"F": "F", "B": "F", "W": "B"}[job.kind]
        return max(before, self.finished.get((cause, job.chunk, job.micro), 0.0))

    def wait_until(self, good: Callable[[], bool], needs: Key | None) -> None:
        """Wait for messages until something is so; a message that does not come ends the step."""
        at, start = self.at, time.perf_counter()
        limit = at.grid.timeout_seconds
        while True:
            seen = self.transport.version
            key = needs
            try:
                if good():
                    break
                key = needs or self._missing()
                number = self.transport.arrived.get(key, 0)
                at.grid.trace.wait_for(waiting_words(self.at, key, number))
                came = self.transport.wait(seen, limit)
            except LostError as lost:
                key = lost.key or key or self._missing()
                number = lost.number if lost.key else self.transport.arrived.get(key, 0)
                words = lost_words(self.at, key, number, lost.error)
                raise CommunicationError(words) from lost
            if not came:
                raise CommunicationError(lost_words(self.at, key, number, None))
        if self.timing and time.perf_counter() - start > SHORT:
            (way, chunk), micro = self._cause(start)
            at.done.append(Done(WORDS[way], micro, chunk, start, time.perf_counter()))

    def _cause(self, start: float) -> tuple[Key, int]:
        """The message that ended a wait: the last that came."""
        log = [entry for entry in self.transport.log if entry[2] >= start]
        key = log[-1][0] if log else self._missing()
        return key, log[-1][1] if log else self.transport.arrived.get(key, 0)

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
        return self.transport.arrived.get((way, chunk), 0) > number

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
        else:
            result = y.detach()
            if x is not None and y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
                result = result.clone()  # the message that it lies in is written over
            if self.vocabulary is None:
                self.scored(result)
            else:
                self.vocabulary.leave(job.micro, result)
        if x is not None and self.shape.forward_only and not stage.enters(job.chunk):
            self.transport.release(x)

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
        if last and self.rendezvous and self.shape.chunks > 1 and not self._held_back:
            at.queue.flush()  # in the order of virtual stages, which is the same in all replicas
        messages = [] if stage.leaves(job.chunk) else [dy]
        if kept.x is not None and stage.enters(job.chunk):
            assert self.vocabulary is not None and kept.x.grad is not None, job
            self.vocabulary.returned(job.micro, kept.x.grad)
        elif kept.x is not None:
            assert kept.x.grad is not None, job
            self._send(BACKWARD, job, kept.x.grad)
            messages.append(kept.x)
        if self.shape.split:  # weight gradients may read them
            self.read_later[job.chunk, job.micro] = messages
        else:
            self._release(messages)

    def _release(self, messages: Sequence[Tensor]) -> None:
        for message in messages:
            self.transport.release(message)

    @torch.no_grad()
    def _weights(self, job: Job) -> None:
        last = job.micro == len(self.micros) - 1
        self.enter(job.micro, last=last and not self._held_back)
        for work in self.later.pop((job.chunk, job.micro)):
            work()
        self._release(self.read_later.pop((job.chunk, job.micro)))

    @property
    def _held_back(self) -> bool:
        """Whether reductions over data wait for the end: chunks may end in any order."""
        return self.shape.split and self.shape.chunks > 1

    # ---- messages -----------------------------------------------------------------------

    def taken(self, way: str, chunk: int) -> Tensor:
        """The next message of a key."""
        value = self.transport.take((way, chunk))
        self._noted("receive", way, value)
        return value

    def send_to(self, way: str, to: int, value: Tensor, number: int) -> None:
        """Send a message to any stage."""
        self._hand_over((way, self.at.stage.index), number, value, to)

    def _send(self, way: str, job: Job, value: Tensor) -> None:
        """Send the result of a job on, to the virtual stage before or behind."""
        stage = self.at.stage
        to = (stage.index + (1 if way == FORWARD else -1)) % stage.count
        self._hand_over(self._key_there(way, job.chunk), job.micro, value, to)

    def _hand_over(self, key: Key, number: int, value: Tensor, to: int) -> None:
        self._noted("send", key[0], value)
        try:
            self.transport.send(key, number, value, to)
        except CommunicationError as error:
            words = unsent_words(self.at, key[0], number, error, to)
            raise CommunicationError(words) from error

    def _noted(self, op: str, way: str, value: Tensor) -> None:
        """Have the trace know of a message."""
        size = value.numel() * value.element_size()
        with self.at.grid.trace.at(f"pipeline.{way}"):
            event = self.at.grid.trace.record(op, ("pipe",), size)
        event.waited = event.done = event.resumed = event.issued
