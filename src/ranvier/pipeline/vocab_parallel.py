"""Vocabulary: embedding and head spread over all stages, in the steps of a pipeline.

Every stage holds the rows of V/pipe words. At the start of a step it looks up its rows of all
micro-batches and sends them to the first stage, which adds them up. What the last stage makes of a
micro-batch goes to all stages; each computes the loss of its words (three numbers a token are
summed over the stages) and sends its part of the gradient back. The gradient of the embedding goes
to all at the end. Work on the head comes before any other: all stages must be there for it.

Not handled: stages do other work while they wait for each other there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ranvier.comm.p2p import RendezvousTransport
from ranvier.pipeline.traffic import EMBEDDING_GRAD, EMBEDDING_ROWS, HEAD_GRAD_PART, HEAD_INPUT

if TYPE_CHECKING:
    from ranvier.pipeline.executor import PipelineStep


class VocabParallel:
    """The work of one step on the vocabulary."""

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
        """The last micro-batch for whose loss this stage has said that it is ready."""
        self.rows: dict[int, Tensor] = {}
        """My rows of each micro-batch, in the graph."""
        self.head_inputs: dict[int, Tensor] = {}
        """What the head gets, on the last stage."""
        self.head_input_grads: dict[int, Tensor] = {}
        """My part of its gradient, on the last stage."""

    def announce_messages(self) -> None:
        """Say which messages will come and be sent."""
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
        """Look up all rows."""
        for m in range(len(self.step.micro_batches)):
            micro = self.step.begin_micro_batch(m)
            self.rows[m] = self.embed(micro.inputs["tokens"])
            if not self.is_first_stage:
                self.step.send_to(EMBEDDING_ROWS, 0, self.rows[m].detach(), m)

    def sum_embedding_rows(self, m: int) -> Tensor:
        """The rows of all stages, on the first one."""
        total = self.rows[m].detach()
        for sender in self.other_stages:
            rows = self.step.take_message(EMBEDDING_ROWS, sender)
            total = total + rows
            self.step.transport.release_message(rows)
        return total.requires_grad_(not self.step.shape.forward_only)

    def has_embedding_rows(self, m: int) -> bool:
        """Whether the rows of a micro-batch have come."""
        return all(self.step.has_arrived(EMBEDDING_ROWS, sender, m) for sender in self.other_stages)

    def send_head_input(self, m: int, y: Tensor) -> None:
        """Tell all stages what the head gets."""
        self.head_inputs[m] = y
        for other in self.other_stages:
            self.step.send_to(HEAD_INPUT, other, y, m)

    def can_run_head(self) -> bool:
        """Whether the head can work on the next micro-batch."""
        if self.num_scored == len(self.step.micro_batches):
            return False
        if self.is_last_stage:
            return self.num_scored in self.head_inputs
        chunks = self.step.shape.chunks
        if self.step.progress.count_done("F", chunks - 1) <= self.num_scored:
            return False  # nor can it have come: it went through here
        return self.step.has_arrived(
            HEAD_INPUT, self.executor.stage.num_stages - 1, self.num_scored
        )

    def all_ready(self, transport: RendezvousTransport) -> bool:
        """Whether all stages are ready for the loss of the next micro-batch.

        A stage says so when all its messages have been taken, and sends none until all have said
        it: whoever waits in a collective of all stages takes none.
        """
        if self._announced_micro < self.num_scored and not transport.has_outgoing:
            transport.announce_ready(self.other_stages, self.num_scored)
            self._announced_micro = self.num_scored
        return self.has_announced and transport.all_ready(self.other_stages, self.num_scored)

    @property
    def has_announced(self) -> bool:
        """Whether this stage has said that it is ready for the loss of the next micro-batch."""
        return self._announced_micro == self.num_scored

    def run_head(self) -> None:
        """The loss of the next micro-batch; all stages take part.

        Communicates: as the head; my part of the gradient to the last stage.
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
            loss = self.head(y, micro.inputs.get("targets"))
        finally:
            moment.loss_scale = None
        if self.is_last_stage or "targets" not in micro.inputs:  # of logits each stage has some
            step.on_loss(loss.detach())
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
        """Whether all parts of the gradient of a micro-batch have come, on the last stage."""
        there = all(
            self.step.has_arrived(HEAD_GRAD_PART, sender, m) for sender in self.other_stages
        )
        return m in self.head_input_grads and there

    def sum_head_grads(self, m: int) -> Tensor:
        """The gradient of what the head got, on the last stage."""
        total = self.head_input_grads.pop(m)
        for sender in self.other_stages:
            part = self.step.take_message(HEAD_GRAD_PART, sender)
            total = total + part
            self.step.transport.release_message(part)
        return total

    def send_embedding_grad(self, m: int, dx: Tensor) -> None:
        """The gradient of the rows, on the first stage, which tells the others."""
        for other in self.other_stages:
            self.step.send_to(EMBEDDING_GRAD, other, dx, m)
        self._backward_rows(m, dx)

    def _backward_rows(self, m: int, dx: Tensor) -> None:
        rows = self.rows.pop(m)
        if rows.requires_grad:
            rows.backward(dx)

    def finish_embedding_grads(self) -> None:
        """Gradients of my rows, once the first stage has sent them."""
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
