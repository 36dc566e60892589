"""Vocabulary parallelism over pipeline stages: embedding and head are sharded over all stages.

Each stage has the rows of V/pipe words. At the start of a step it looks up its rows for all
micro-batches and sends them to the first stage, which sums them. The output of the last stage is
sent to all stages; each computes the loss over its words (three numbers per token are summed over
the stages) and sends its part of the gradient back. The gradient of the embedding is sent to all
stages at the end. Head jobs run before all others, because all stages must take part in them.

Not handled: other work while stages wait for each other at the head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ranvier.comm.p2p import RendezvousTransport
from ranvier.pipeline.traffic import EMBEDDING_GRAD, EMBEDDING_ROWS, HEAD_GRAD_PART, HEAD_INPUT

if TYPE_CHECKING:
    from ranvier.pipeline.step import PipelineStep


class VocabParallel:
    """Embedding and head of one pipeline step."""

    def __init__(self, step: PipelineStep) -> None:
        self.step = step
        self.executor = step.executor
        stage = self.executor.stage
        self.embed, self.head = stage.vocab_layers
        self.is_first_stage = stage.index == 0
        self.is_last_stage = stage.index == stage.num_stages - 1
        self.other_stages = [s for s in range(stage.num_stages) if s != stage.index]
        self.num_scored = 0
        """Micro-batches whose loss is computed."""
        self._announced_micro = -1
        """The last micro-batch for whose loss this stage has announced itself ready."""
        self.rows: dict[int, Tensor] = {}
        """This stage's rows of each micro-batch, attached to the autograd graph."""
        self.head_inputs: dict[int, Tensor] = {}
        """Inputs of the head by micro-batch, on the last stage."""
        self.head_input_grads: dict[int, Tensor] = {}
        """The last stage's own part of the gradient of the head's input, by micro-batch."""

    def announce_messages(self) -> None:
        """Announces to the transport which messages will be received and sent."""
        count = len(self.step.micro_batches)
        transport = self.step.transport
        training = not self.step.shape.forward_only
        last = self.executor.stage.num_stages - 1
        me = self.executor.stage.index
        for other in self.other_stages:
            if self.is_first_stage:
                transport.expect_messages((EMBEDDING_ROWS, other), other, count)
                if training:
                    transport.promise_messages((EMBEDDING_GRAD, me), other, count)
            if self.is_last_stage:
                transport.promise_messages((HEAD_INPUT, me), other, count)
                if training:
                    transport.expect_messages((HEAD_GRAD_PART, other), other, count)
        if not self.is_first_stage:
            transport.promise_messages((EMBEDDING_ROWS, me), 0, count)
            if training:
                transport.expect_messages((EMBEDDING_GRAD, 0), 0, count)
        if not self.is_last_stage:
            transport.expect_messages((HEAD_INPUT, last), last, count)
            if training:
                transport.promise_messages((HEAD_GRAD_PART, me), last, count)
        if isinstance(transport, RendezvousTransport):
            transport.expect_ready(self.other_stages, count)

    def look_up_rows(self) -> None:
        """Looks up the rows of all micro-batches and sends them to the first stage."""
        for m in range(len(self.step.micro_batches)):
            micro = self.step.begin_micro_batch(m)
            self.rows[m] = self.embed(micro.inputs["tokens"])
            if not self.is_first_stage:
                self.step.send_to(EMBEDDING_ROWS, 0, self.rows[m].detach(), m)

    def sum_embedding_rows(self, m: int) -> Tensor:
        """Returns the sum of the rows of all stages, on the first one."""
        # A row is zero on all stages but the one with its word. The sum is a new leaf of the graph;
        # `send_embedding_grad` sends its gradient to all stages.
        total = self.rows[m].detach()
        for sender in self.other_stages:
            rows = self.step.take_message(EMBEDDING_ROWS, sender)
            total = total + rows
            self.step.transport.release_message(rows)
        return total.requires_grad_(not self.step.shape.forward_only)

    def has_embedding_rows(self, m: int) -> bool:
        """Returns whether the rows of a micro-batch have arrived."""
        return all(self.step.has_arrived(EMBEDDING_ROWS, sender, m) for sender in self.other_stages)

    def send_head_input(self, m: int, y: Tensor) -> None:
        """Sends the input of the head to all stages."""
        self.head_inputs[m] = y
        for other in self.other_stages:
            self.step.send_to(HEAD_INPUT, other, y, m)

    def can_run_head(self) -> bool:
        """Returns whether the input of the head for the next micro-batch has arrived."""
        if self.num_scored == len(self.step.micro_batches):
            return False
        if self.is_last_stage:
            return self.num_scored in self.head_inputs
        chunks = self.step.shape.chunks
        if self.step.progress.count_done("F", chunks - 1) <= self.num_scored:
            # The input of the head has passed through this stage, so it cannot have arrived yet.
            return False
        return self.step.has_arrived(
            HEAD_INPUT, self.executor.stage.num_stages - 1, self.num_scored
        )

    def all_ready(self, transport: RendezvousTransport) -> bool:
        """Returns whether all stages are ready for the loss of the next micro-batch.

        A stage announces this when all its messages are acknowledged, and sends none until all
        stages have announced it: a stage that waits in a collective of all stages receives no
        messages.
        """
        if self._announced_micro < self.num_scored and not transport.has_outgoing:
            transport.announce_ready(self.other_stages, self.num_scored)
            self._announced_micro = self.num_scored
        return self.has_announced and transport.all_ready(self.other_stages, self.num_scored)

    @property
    def has_announced(self) -> bool:
        """Whether this stage has announced itself ready for the loss of the next micro-batch."""
        return self._announced_micro == self.num_scored

    def run_head(self) -> None:
        """Computes the loss of the next micro-batch and its gradient, together with all stages.

        Communicates: as the head; this stage's part of the gradient to the last stage.
        """
        step = self.step
        m = self.num_scored
        micro = step.begin_micro_batch(m)
        if self.is_last_stage:
            y = self.head_inputs.pop(m)
        else:
            y = step.take_message(HEAD_INPUT, self.executor.stage.num_stages - 1)
        y = y.requires_grad_(not step.shape.forward_only)
        moment = self.executor.step_context
        if step.head_knows_scale:
            moment.loss_scale = step.loss_scale
        else:
            moment.loss_scale = None
        try:
            loss = self.head(y, micro.inputs.get("targets"), micro.inputs.get("logits_to_keep"))
        finally:
            moment.loss_scale = None
        # Without targets the result is logits, of which each stage has its words.
        if self.is_last_stage or "targets" not in micro.inputs:
            step.on_loss(loss.detach())
        # Backward of the head follows immediately, so only one micro-batch has logits in memory.
        if not step.shape.forward_only:
            loss.backward(step.loss_scale.to(loss.dtype))
            assert y.grad is not None
            if self.is_last_stage:
                self.head_input_grads[m] = y.grad
            else:
                step.send_to(HEAD_GRAD_PART, self.executor.stage.num_stages - 1, y.grad, m)
        if not self.is_last_stage:
            step.transport.release_message(y)
        self.num_scored += 1

    def has_head_grads(self, m: int) -> bool:
        """Returns whether all parts of the head's gradient of a micro-batch have arrived (last
        stage).
        """
        there = all(
            self.step.has_arrived(HEAD_GRAD_PART, sender, m) for sender in self.other_stages
        )
        return m in self.head_input_grads and there

    def sum_head_grads(self, m: int) -> Tensor:
        """Returns the gradient of the head's input, summed over stages, on the last stage."""
        total = self.head_input_grads.pop(m)
        for sender in self.other_stages:
            part = self.step.take_message(HEAD_GRAD_PART, sender)
            total = total + part
            self.step.transport.release_message(part)
        return total

    def send_embedding_grad(self, m: int, dx: Tensor) -> None:
        """Sends the gradient of the rows to all stages, and applies it on this one (the first)."""
        for other in self.other_stages:
            self.step.send_to(EMBEDDING_GRAD, other, dx, m)
        self._backward_rows(m, dx)

    def _backward_rows(self, m: int, dx: Tensor) -> None:
        rows = self.rows.pop(m)
        if rows.requires_grad:
            rows.backward(dx)

    def finish_embedding_grads(self) -> None:
        """Runs backward of this stage's rows, once the first stage has sent their gradients."""
        if self.step.shape.forward_only or self.is_first_stage:
            return
        each = len(self.step.micro_batches)
        self.step.drain_transfers(
            lambda: self.step.has_arrived(EMBEDDING_GRAD, 0, each - 1), (EMBEDDING_GRAD, 0)
        )
        for m in range(each):
            self.step.begin_micro_batch(m)
            dx = self.step.take_message(EMBEDDING_GRAD, 0)
            self._backward_rows(m, dx)
            self.step.transport.release_message(dx)
