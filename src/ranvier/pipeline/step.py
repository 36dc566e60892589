"""One step of a pipeline: jobs in the order of a policy, messages between stages, and waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ranvier.comm import collectives
from ranvier.comm.p2p import (
    HEADER_NUMBERS,
    Key,
    LostMessageError,
    RendezvousTransport,
    Transfer,
    decode_form,
    encode_form,
)
from ranvier.errors import CommunicationError, ShardingError
from ranvier.nn.context_documents import ContextDocuments
from ranvier.pipeline.p2p_errors import (
    MESSAGE_CONTENTS,
    describe_lost_message,
    describe_unsent_message,
    describe_wait,
)
from ranvier.pipeline.policy import Job, JobKind, PipelineShape, SchedulingPolicy, StageProgress
from ranvier.pipeline.traffic import (
    BACKWARD,
    FORWARD,
    HEAD_INPUT,
    MESSAGE_KINDS,
    ORDER_NUMBERS,
)
from ranvier.pipeline.vocab_parallel import VocabParallel

if TYPE_CHECKING:
    from ranvier.pipeline.executor import PipelineExecutor


EVAL_MESSAGES_AHEAD = 3
"""Maximum number of messages in flight to a stage, and queued there, during evaluation."""


SHORTEST_WAIT_SECONDS = 1e-4
"""Waits shorter than this, in seconds, are not recorded."""


JOB_KINDS: tuple[JobKind, ...] = ("F", "B", "W", "H")


ORDER_JOB, ORDER_SEND, ORDER_RECEIVE, ORDER_PROCEED = range(4)
"""Orders of a stage's leader: run a job, post a send or a receive, or proceed."""


@dataclass(frozen=True)
class JobRecord:
    """A finished job or a wait, with its start and end time."""

    kind: str
    """F, B, W or H, or the content of the message waited for: activation or gradient."""
    micro: int
    chunk: int
    start: float
    stop: float


@dataclass
class MicroBatch:
    """The inputs of one micro-batch."""

    inputs: Mapping[str, Any]
    samples: Tensor | None = None
    """Index of each sample in the run."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of its first input, the tokens of a decoder."""
        return next(tuple(x.shape) for x in self.inputs.values() if isinstance(x, Tensor))


@dataclass
class _SavedForward:
    """What the backward pass of a job needs from its forward pass."""

    stage_input: Tensor | None
    output_edge: Any
    """Gradient edge of the output in the autograd graph; the output tensor itself may be freed."""


@dataclass(frozen=True)
class ForwardOnlyPolicy:
    """Forward passes only, in a fixed order: all micro-batches of a chunk, then the next chunk."""

    shape: PipelineShape
    split_backward: bool = False
    is_dynamic: bool = False

    def choose_job(self, ready: Sequence[Job], now: StageProgress) -> Job | None:
        """Returns the next job of the order if it is ready; the order is the same on all ranks."""
        each = self.shape.micro_batches
        job = Job("F", now.num_done % each, now.num_done // each)
        if job in ready:
            return job
        return None


class PipelineStep:
    """One step of a `PipelineExecutor`: its state and its loop over jobs."""

    def __init__(
        self,
        runtime: PipelineExecutor,
        micros: Sequence[MicroBatch],
        policy: SchedulingPolicy,
        scored: Callable[[Tensor], None],
        factor: Tensor,
        plain: bool,
    ) -> None:
        self.executor = runtime
        self.micro_batches = micros
        self.policy = policy
        self.on_loss = scored
        self.loss_scale = factor
        self.head_knows_scale = plain
        stage = runtime.stage
        forward_only = isinstance(policy, ForwardOnlyPolicy)
        self.shape = PipelineShape(
            stage.num_stages,
            len(micros),
            len(stage.chunks),
            policy.split_backward,
            forward_only=forward_only,
        )
        # The shape of messages is announced once per key, so it must be the same for all
        # micro-batches.
        shapes = {micro.shape for micro in micros}
        if stage.num_stages > 1 and len(shapes) > 1:
            raise ShardingError(
                f"The micro-batches of a step have the shapes {sorted(shapes)}. With a pipeline "
                "all must have the same shape. Use equal micro-batches, or pipe=1."
            )
        self.record_times = runtime.record_times and not forward_only
        self.progress = StageProgress(self.shape, stage.index)
        self.saved_forwards: dict[tuple[int, int], _SavedForward] = {}
        # These dicts are keyed by (chunk, micro).
        self.deferred_weight_grads: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self.messages_to_release: dict[tuple[int, int], list[Tensor]] = {}
        """Received messages that deferred weight gradients may still read."""
        # In training the credits of the policy limit the messages in flight. Evaluation has none,
        # so the transport limits them, except where many messages must be able to queue: with
        # several chunks, which run one after the other, and with a vocabulary split over the
        # stages, whose rows are all sent at the start.
        plain = forward_only and len(stage.chunks) == 1 and not stage.vocab_layers
        self.transport = runtime.open_transport(EVAL_MESSAGES_AHEAD if plain else 0)
        self.rendezvous = isinstance(self.transport, RendezvousTransport)
        self.policy_choices: list[tuple[Job, int]] = []
        self.known_arrivals: dict[tuple[Key, int], float] = {}
        """Messages that the policy knows of, with their arrival times."""
        self.last_end_times: dict[tuple[str, int], float] = {}
        """End time of the last job of each kind and chunk."""
        self.job_end_times: dict[tuple[str, int, int], float] = {}
        """End time of each job, by kind, chunk and micro-batch."""
        self.vocab_parallel = VocabParallel(self) if stage.vocab_layers else None
        # A fixed order needs no broadcasts, because each rank derives it itself. With a vocabulary
        # split over the stages, or with rendezvous transfers, the order always depends on arrivals.
        dynamic = policy.is_dynamic or self.vocab_parallel is not None or self.rendezvous
        self.follows_leader = runtime.stage_axis.size > 1 and dynamic

    def run(self) -> None:
        """Runs all jobs of the step, then waits until all messages are sent."""
        at = self.executor
        stage = self.executor.stage
        if self.record_times:
            at.job_records, at.start_time = [], time.perf_counter()
        if stage.num_stages > 1:
            self._announce_messages()
        if self.vocab_parallel is not None:
            self.vocab_parallel.look_up_rows()
        while not self._is_complete:
            job = self._next_job()
            start = time.perf_counter()
            self._run_job(job)
            if self.record_times:
                # Without this the times would be the times of the launches.
                if at.device.type == "cuda":
                    torch.cuda.synchronize(at.device)
                at.job_records.append(
                    JobRecord(job.kind, job.micro, job.chunk, start, time.perf_counter())
                )
        if self.vocab_parallel is not None:
            self.vocab_parallel.finish_embedding_grads()
        if self.rendezvous:
            # Peers cannot finish while their receives of our last sends are not posted.
            self.drain_transfers(lambda: not self.transport.has_outgoing, None)
        at.bucket_scheduler.begin_pass(forget=stage.num_stages > 1)
        try:
            self.transport.close(at.grid.timeout_seconds)
        except CommunicationError as error:
            words = describe_unsent_message(
                self.executor, FORWARD, len(self.micro_batches) - 1, error
            )
            raise CommunicationError(words) from error
        if self.record_times:
            at.arrival_log = self.transport.arrival_log
            at.policy_choices = self.policy_choices

    def _announce_messages(self) -> None:
        """Announces to the transport which messages of this step will be received and sent."""
        stage = self.executor.stage
        each = len(self.micro_batches)
        transport = self.transport
        # Modulo: with several chunks the last stage sends to the first one (interleaved stages).
        before = (stage.index - 1) % stage.num_stages
        behind = (stage.index + 1) % stage.num_stages
        training = not self.shape.forward_only
        for chunk in range(len(stage.chunks)):
            if not stage.is_first_chunk(chunk):
                transport.expect_messages((FORWARD, chunk), before, each)
                if training:
                    transport.promise_messages(self._receiver_key(BACKWARD, chunk), before, each)
            if not stage.is_last_chunk(chunk):
                transport.promise_messages(self._receiver_key(FORWARD, chunk), behind, each)
                if training:
                    transport.expect_messages((BACKWARD, chunk), behind, each)
        if self.vocab_parallel is not None:
            self.vocab_parallel.announce_messages()
        transport.start_listening()

    def _receiver_key(self, way: str, chunk: int) -> Key:
        """Returns the key under which the receiving stage knows the result of a job."""
        # Virtual stages are distributed round-robin, so virtual stage v is chunk v // num_stages.
        away = 1 if way == FORWARD else -1
        return way, (
            self.executor.stage.virtual_stage(chunk) + away
        ) // self.executor.stage.num_stages

    @property
    def _is_complete(self) -> bool:
        """Whether all jobs are done."""
        # The jobs H of the head are shared by all stages and not counted by `progress`.
        scored = self.vocab_parallel is None or self.vocab_parallel.num_scored == len(
            self.micro_batches
        )
        return self.progress.is_complete and scored

    def _run_job(self, job: Job) -> None:
        """Runs a job and records its end."""
        if job.kind == "H":
            assert self.vocab_parallel is not None
            self.vocab_parallel.run_head()
            return
        run = {"F": self._run_forward, "B": self._run_backward, "W": self._run_weight_grads}[
            job.kind
        ]
        run(job)
        self.progress.finish_job(job)
        self.last_end_times[job.kind, job.chunk] = time.perf_counter()
        self.job_end_times[job.kind, job.chunk, job.micro] = self.last_end_times[
            job.kind, job.chunk
        ]

    # ---- what to do next ----------------------------------------------------------------

    def _next_job(self) -> Job:
        """Returns the job chosen by the policy or by the leader of the stage, once it is ready.

        Posts all transfers that come before it.
        """
        while True:
            if self.executor.is_leader or not self.follows_leader:
                chosen = self._choose_work()
            else:
                chosen = None
            if self.follows_leader:
                chosen = self._follow_leader(chosen)
            if isinstance(chosen, Job):
                # The leader chose by its own arrivals. With an eager transport the same message may
                # arrive later on this rank. With rendezvous transfers the receive is already
                # posted, and `take_message` makes the stream wait for it.
                if self.follows_leader and not self.executor.is_leader and not self.rendezvous:
                    key = self._needed_key(chosen)
                    self.wait_until(lambda job=chosen: job in self._ready_jobs(), key)  # type: ignore[misc]
                return chosen
            assert chosen is not None
            self._post_transfer(chosen)

    def drain_transfers(self, good: Callable[[], bool], needs: Key | None) -> None:
        """Posts transfers, without running jobs, until `good()` holds on the leader of the
        stage.
        """
        if not self.rendezvous:
            self.wait_until(good, needs)
            return
        while True:
            chosen: Job | Transfer | None = None
            if self.executor.is_leader:
                chosen = self._choose_transfer(good, needs)
            if self.follows_leader:
                chosen = self._follow_leader(chosen)
            if not isinstance(chosen, Transfer):
                return
            self._post_transfer(chosen)

    def _choose_transfer(self, good: Callable[[], bool], needs: Key | None) -> Transfer | None:
        """Returns the next transfer to post, or None once `good()` holds."""
        found: list[Transfer | None] = [None]

        def choose() -> bool:
            if good():
                return True
            found[0] = self.transport.next_transfer()
            return found[0] is not None

        self.wait_until(choose, needs)
        return found[0]

    def _follow_leader(self, chosen: Job | Transfer | None) -> Job | Transfer | None:
        """Returns what the leader has chosen. Communicates: broadcast inside the stage."""
        order = torch.tensor(self._encode_order(chosen))
        with self.executor.grid.trace.named_scope("pipeline.order"):
            told = collectives.broadcast(order, self.executor.stage_axis).wait()
        if self.executor.is_leader:
            return chosen
        return self._decode_order(told.tolist())

    def _encode_order(self, chosen: Job | Transfer | None) -> list[int]:
        """Encodes an order as `ORDER_NUMBERS` integers, padded with zeros."""
        if chosen is None:
            numbers = [ORDER_PROCEED]
        elif isinstance(chosen, Job):
            numbers = [ORDER_JOB, JOB_KINDS.index(chosen.kind), chosen.micro, chosen.chunk]
        else:
            if chosen.op == "send":
                op = ORDER_SEND
            else:
                op = ORDER_RECEIVE
            (way, place), form = chosen.key, encode_form(chosen.form)
            numbers = [op, MESSAGE_KINDS.index(way), place, chosen.number, chosen.peer, *form]
        return numbers + [0] * (ORDER_NUMBERS - len(numbers))

    def _decode_order(self, numbers: Sequence[int]) -> Job | Transfer | None:
        """Decodes an order; the inverse of `_encode_order`."""
        op, a, b, c, d, *form = numbers
        assert len(form) == HEADER_NUMBERS, numbers
        if op == ORDER_PROCEED:
            return None
        if op == ORDER_JOB:
            return Job(JOB_KINDS[a], b, c)
        return Transfer(
            "send" if op == ORDER_SEND else "receive",
            (MESSAGE_KINDS[a], b),
            c,
            d,
            decode_form(form),
        )

    def _post_transfer(self, transfer: Transfer) -> None:
        try:
            self.transport.post_transfer(transfer)
        except (CommunicationError, RuntimeError) as error:
            (way, _), number = transfer.key, transfer.number
            words = describe_lost_message(self.executor, transfer.key, number, error)
            if transfer.op == "send":
                words = describe_unsent_message(self.executor, way, number, error, transfer.peer)
            raise CommunicationError(words) from error

    def _needed_key(self, job: Job) -> Key:
        """Returns the key of the message that is the input of a job."""
        if job.kind == "H":
            return HEAD_INPUT, self.executor.stage.num_stages - 1
        return (FORWARD if job.kind == "F" else BACKWARD), job.chunk

    def _choose_work(self) -> Job | Transfer:
        """Waits for a transfer that can be posted, or for the job that the policy chooses."""
        found: list[Job | Transfer | None] = [None]

        def choose() -> bool:
            # A stage that has announced itself ready for the collective of all stages must not send
            # before it; see `RendezvousTransport.announce_ready`.
            announced = (
                self.vocab_parallel is not None
                and self.rendezvous
                and self.vocab_parallel.has_announced
            )
            found[0] = self.transport.next_transfer(sends=not announced) or self._choose_job()
            return found[0] is not None

        self.wait_until(choose, None)
        assert found[0] is not None
        return found[0]

    def _choose_job(self) -> Job | None:
        """Returns the job that the policy chooses now, if one can be launched."""
        if not self.transport.can_compute:
            return None
        # Messages that arrive after this point are ignored: the choice depends only on the messages
        # counted in `policy_choices`, which makes it reproducible.
        for key, number, when in self.transport.arrival_log[len(self.known_arrivals) :]:
            self.known_arrivals[key, number] = when
        ready = self._ready_jobs()
        if ready and ready[0].kind == "H":
            # The head is a collective of all stages. Its kernels would block the device of a stage
            # that launches it before the others can.
            if isinstance(self.transport, RendezvousTransport):
                assert self.vocab_parallel is not None
                if self.vocab_parallel.all_ready(self.transport):
                    return ready[0]
                return None
            return ready[0]
        if self.progress.is_complete:
            return None
        ready = [
            job
            for job in ready
            if not self._needs_message(job) or self._input_message(job) in self.known_arrivals
        ]
        job = self.policy.choose_job(sorted(ready, key=self._ready_since), self.progress)
        if job is not None:
            self.policy_choices.append((job, len(self.known_arrivals)))
        return job

    def _needs_message(self, job: Job) -> bool:
        """Returns whether the input of a job is a message from another stage."""
        stage = self.executor.stage
        if job.kind == "F":
            return not stage.is_first_chunk(job.chunk)
        return job.kind == "B" and not stage.is_last_chunk(job.chunk)

    def _input_message(self, job: Job) -> tuple[Key, int]:
        """Returns key and number of the message that is the input of a job."""
        return (FORWARD if job.kind == "F" else BACKWARD, job.chunk), job.micro

    def _ready_since(self, job: Job) -> float:
        """Returns when a job became ready: its input had arrived and its predecessor was done."""
        before = self.last_end_times.get((job.kind, job.chunk), 0.0)
        if self._needs_message(job):
            return max(before, self.known_arrivals[self._input_message(job)])
        cause = {"F": "F", "B": "F", "W": "B"}[job.kind]
        return max(before, self.job_end_times.get((cause, job.chunk, job.micro), 0.0))

    def wait_until(self, good: Callable[[], bool], needs: Key | None) -> None:
        """Waits for messages until `good()` holds. Fails if none arrives within the time limit."""
        at = self.executor
        start = time.perf_counter()
        limit = at.grid.timeout_seconds
        while True:
            # Read the version before `good()`: a message that arrives between the two then ends the
            # wait immediately instead of being missed.
            seen = self.transport.version
            key = needs
            try:
                if good():
                    break
                key = needs or self._first_missing_key()
                number = self.transport.num_arrived.get(key, 0)
                at.grid.trace.report_wait(describe_wait(self.executor, key, number))
                came = self.transport.wait_for_change(seen, limit)
            except LostMessageError as lost:
                key = lost.key or key or self._first_missing_key()
                if lost.key:
                    number = lost.number
                else:
                    number = self.transport.num_arrived.get(key, 0)
                words = describe_lost_message(self.executor, key, number, lost.error)
                raise CommunicationError(words) from lost
            if not came:
                raise CommunicationError(describe_lost_message(self.executor, key, number, None))
        if self.record_times and time.perf_counter() - start > SHORTEST_WAIT_SECONDS:
            (way, chunk), micro = self._wait_cause(start)
            at.job_records.append(
                JobRecord(MESSAGE_CONTENTS[way], micro, chunk, start, time.perf_counter())
            )

    def _wait_cause(self, start: float) -> tuple[Key, int]:
        """Returns the message that ended a wait: the last one that arrived."""
        log = [entry for entry in self.transport.arrival_log if entry[2] >= start]
        if log:
            key = log[-1][0]
        else:
            key = self._first_missing_key()
        return key, log[-1][1] if log else self.transport.num_arrived.get(key, 0)

    def _first_missing_key(self) -> Key:
        """Returns the key of the first missing message, for errors and the trace."""
        stage = self.executor.stage
        each = len(self.micro_batches)
        for chunk in range(len(stage.chunks)):
            done = self.progress.count_done("F", chunk)
            if (
                done < each
                and not stage.is_first_chunk(chunk)
                and not self.has_arrived(FORWARD, chunk, done)
            ):
                return FORWARD, chunk
        # Backward runs through the chunks in reverse order.
        for chunk in reversed(range(len(stage.chunks))):
            done = self.progress.count_done("B", chunk)
            if (
                done < each
                and not stage.is_last_chunk(chunk)
                and not self.has_arrived(BACKWARD, chunk, done)
            ):
                return BACKWARD, chunk
        return BACKWARD, 0

    def has_arrived(self, way: str, chunk: int, number: int) -> bool:
        """Returns whether a message has arrived."""
        return self.transport.num_arrived.get((way, chunk), 0) > number

    def _ready_jobs(self) -> list[Job]:
        """Returns the jobs that can run now: the next of each kind and chunk, if its input has
        arrived.
        """
        stage = self.executor.stage
        each = len(self.micro_batches)
        found = list[Job]()
        if self.vocab_parallel is not None and self.vocab_parallel.can_run_head():
            # The head is first in the list, because all other stages wait for it; see
            # `_choose_job`.
            found.append(Job("H", self.vocab_parallel.num_scored))
        for chunk in range(len(stage.chunks)):
            f, b, w = (self.progress.count_done(kind, chunk) for kind in ("F", "B", "W"))
            if not self.shape.forward_only:
                if b < f and self._can_backward(chunk, b):
                    found.append(Job("B", b, chunk))
                if self.shape.split_backward and w < b:
                    found.append(Job("W", w, chunk))
            if f < each and self._can_forward(chunk, f):
                found.append(Job("F", f, chunk))
        return found

    def _can_forward(self, chunk: int, m: int) -> bool:
        """Returns whether the input of a forward pass has arrived."""
        if not self.executor.stage.is_first_chunk(chunk):
            return self.has_arrived(FORWARD, chunk, m)
        return self.vocab_parallel is None or self.vocab_parallel.has_embedding_rows(m)

    def _can_backward(self, chunk: int, m: int) -> bool:
        """Returns whether the gradient for a backward pass has arrived."""
        if not self.executor.stage.is_last_chunk(chunk):
            return self.has_arrived(BACKWARD, chunk, m)
        return self.vocab_parallel is None or self.vocab_parallel.has_head_grads(m)

    # ---- jobs ---------------------------------------------------------------------------

    def begin_micro_batch(self, m: int, *, last: bool = False) -> MicroBatch:
        """Sets the step context and the buckets to a micro-batch and returns it."""
        at = self.executor
        micro = self.micro_batches[m]
        at.bucket_scheduler.begin_pass(last=last, forget=at.stage.num_stages > 1)
        at.step_context.samples = micro.samples
        documents = micro.inputs.get("documents")
        is_split = isinstance(documents, ContextDocuments)
        at.step_context.context_documents = documents if is_split else None
        return micro

    def _run_forward(self, job: Job) -> None:
        stage = self.executor.stage
        moment = self.executor.step_context
        # With one stage the backward pass follows immediately, so the last forward pass already
        # marks the pass whose gradients can be reduced.
        last = job.micro == len(self.micro_batches) - 1
        micro = self.begin_micro_batch(job.micro, last=last and stage.num_stages == 1)
        x = None
        more = dict[str, bool]()
        if not stage.is_first_chunk(job.chunk):
            # The input is a leaf of this stage's graph; its gradient is sent back.
            x = self.take_message(FORWARD, job.chunk)
            x.requires_grad_(torch.is_grad_enabled())
        final = stage.is_last_chunk(job.chunk)
        if self.vocab_parallel is not None:
            if stage.is_first_chunk(job.chunk):
                x = self.vocab_parallel.sum_embedding_rows(job.micro)
            more = {"scored": False}
        chained = self.head_knows_scale or moment.compiles_inference
        moment.defer_residual_add = chained and stage.num_stages == 1
        if final and self.head_knows_scale:
            moment.loss_scale = self.loss_scale
        else:
            moment.loss_scale = None
        moment.loss_grad_scale = self.loss_scale
        # All jobs share the step context, so the settings of this job must be reset.
        try:
            y = stage.run_parts(x, stage.chunks[job.chunk], **micro.inputs, **more)
        finally:
            moment.loss_scale = None
            moment.defer_residual_add = False
        if not self.shape.forward_only:
            loss = final and self.vocab_parallel is None
            edge = None
            # Without a gradient nothing up to this point is trained. The edge keeps the graph alive
            # but not the output, which is freed once it is sent.
            if y.requires_grad:
                edge = y if loss else torch.autograd.graph.get_gradient_edge(y)
            self.saved_forwards[job.chunk, job.micro] = _SavedForward(x, edge)
        if not final:
            self._send_result(FORWARD, job, y.detach())
        else:
            result = y.detach()
            if x is not None and y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
                # The output shares the buffer of the message, which the next message overwrites.
                result = result.clone()
            if self.vocab_parallel is None:
                self.on_loss(result)
            else:
                self.vocab_parallel.send_head_input(job.micro, result)
        if x is not None and self.shape.forward_only and not stage.is_first_chunk(job.chunk):
            self.transport.release_message(x)

    def _run_backward(self, job: Job) -> None:
        at = self.executor
        stage = self.executor.stage
        last = job.micro == len(self.micro_batches) - 1
        kept = self.saved_forwards.pop((job.chunk, job.micro))
        # With one stage, backward directly follows the forward pass of the same micro-batch.
        if stage.num_stages > 1:
            self.begin_micro_batch(job.micro, last=last and not self._defers_reductions)
        if not stage.is_last_chunk(job.chunk):
            dy = self.take_message(BACKWARD, job.chunk)
        elif self.vocab_parallel is None:
            dy = self.loss_scale
        else:
            dy = self.vocab_parallel.sum_head_grads(job.micro)
        # With a split backward, layers append the computation of their weight gradients to this
        # list, and job W runs it later.
        if self.shape.split_backward:
            at.step_context.deferred_weight_grads = []
        else:
            at.step_context.deferred_weight_grads = None
        at.step_context.loss_grad_scale = self.loss_scale
        try:
            if isinstance(kept.output_edge, Tensor):
                kept.output_edge.backward(dy.to(kept.output_edge.dtype))
            elif kept.output_edge is not None:
                torch.autograd.backward((kept.output_edge,), (dy,))
            if at.step_context.deferred_weight_grads is not None:
                self.deferred_weight_grads[job.chunk, job.micro] = (
                    at.step_context.deferred_weight_grads
                )
        finally:
            at.step_context.deferred_weight_grads = None
        if last and self.rendezvous and self.shape.chunks > 1 and not self._defers_reductions:
            # Reductions are launched per chunk, in the order of virtual stages, which is the same
            # in all replicas.
            at.bucket_scheduler.flush_reductions()
        if stage.is_last_chunk(job.chunk):
            messages = []
        else:
            messages = [dy]
        if kept.stage_input is not None and stage.is_first_chunk(job.chunk):
            assert self.vocab_parallel is not None and kept.stage_input.grad is not None, job
            self.vocab_parallel.send_embedding_grad(job.micro, kept.stage_input.grad)
        elif kept.stage_input is not None:
            assert kept.stage_input.grad is not None, job
            self._send_result(BACKWARD, job, kept.stage_input.grad)
            messages.append(kept.stage_input)
        # Weight gradients may read the input and the output gradient, so both are kept until job W.
        if self.shape.split_backward:
            self.messages_to_release[job.chunk, job.micro] = messages
        else:
            self._release_messages(messages)

    def _release_messages(self, messages: Sequence[Tensor]) -> None:
        for message in messages:
            self.transport.release_message(message)

    @torch.no_grad()
    def _run_weight_grads(self, job: Job) -> None:
        last = job.micro == len(self.micro_batches) - 1
        self.begin_micro_batch(job.micro, last=last and not self._defers_reductions)
        for work in self.deferred_weight_grads.pop((job.chunk, job.micro)):
            work()
        self._release_messages(self.messages_to_release.pop((job.chunk, job.micro)))

    @property
    def _defers_reductions(self) -> bool:
        """Whether reductions over replicas wait for the end of the step, because chunks end in any
        order.
        """
        return self.shape.split_backward and self.shape.chunks > 1

    # ---- messages -----------------------------------------------------------------------

    def take_message(self, way: str, chunk: int) -> Tensor:
        """Takes and returns the next message of a key."""
        value = self.transport.take_message((way, chunk))
        self._trace_message("receive", way, value)
        return value

    def send_to(self, way: str, to: int, value: Tensor, number: int) -> None:
        """Sends a message to any stage, keyed by this stage."""
        self._send_message((way, self.executor.stage.index), number, value, to)

    def _send_result(self, way: str, job: Job, value: Tensor) -> None:
        """Sends the result of a job to the next (forward) or previous (backward) virtual stage."""
        stage = self.executor.stage
        to = (stage.index + (1 if way == FORWARD else -1)) % stage.num_stages
        self._send_message(self._receiver_key(way, job.chunk), job.micro, value, to)

    def _send_message(self, key: Key, number: int, value: Tensor, to: int) -> None:
        self._trace_message("send", key[0], value)
        try:
            self.transport.send(key, number, value, to)
        except CommunicationError as error:
            words = describe_unsent_message(self.executor, key[0], number, error, to)
            raise CommunicationError(words) from error

    def _trace_message(self, op: str, way: str, value: Tensor) -> None:
        """Records a message in the trace."""
        size = value.numel() * value.element_size()
        with self.executor.grid.trace.named_scope(f"pipeline.{way}"):
            event = self.executor.grid.trace.record_event(op, ("pipe",), size)
        # Sending or taking a message does not block, so the event has no duration.
        event.wait_time = event.done_time = event.resume_time = event.issue_time
