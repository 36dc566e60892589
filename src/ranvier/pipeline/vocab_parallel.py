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
from ranvier.pipeline.traffic import FINAL, PART, RETURN, ROWS

if TYPE_CHECKING:
    from ranvier.pipeline.executor import Step


class Vocabulary:
    """The work of one step on the vocabulary."""

    def __init__(self, step: Step) -> None:
        self.step, self.at = step, step.at
        stage = self.at.stage
        self.embed, self.head = stage.vocabulary
        self.first, self.last = stage.index == 0, stage.index == stage.count - 1
        self.others = [s for s in range(stage.count) if s != stage.index]
        self.heads = 0
        """Micro-batches whose loss is computed."""
        self._announced = -1
        """The last micro-batch for whose loss this stage has said that it is ready."""
        self.rows: dict[int, Tensor] = {}
        """My rows of each micro-batch, in the graph."""
        self.finals: dict[int, Tensor] = {}
        """What the head gets, on the last stage."""
        self.grads: dict[int, Tensor] = {}
        """My part of its gradient, on the last stage."""

    def announce(self) -> None:
        """Say which messages will come and be sent."""
        count, transport = len(self.step.micros), self.step.transport
        training, last = not self.step.shape.forward_only, self.at.stage.count - 1
        me = self.at.stage.index
        for other in self.others:
            if self.first:
                transport.expect((ROWS, other), other, count)
                if training:
                    transport.promise((RETURN, me), other, count)
            if self.last:
                transport.promise((FINAL, me), other, count)
                if training:
                    transport.expect((PART, other), other, count)
        if not self.first:
            transport.promise((ROWS, me), 0, count)
            if training:
                transport.expect((RETURN, 0), 0, count)
        if not self.last:
            transport.expect((FINAL, last), last, count)
            if training:
                transport.promise((PART, me), last, count)
        if isinstance(transport, RendezvousTransport):
            transport.expect_ready(self.others, count)

    def begin(self) -> None:
        """Look up all rows."""
        for m in range(len(self.step.micros)):
            micro = self.step.enter(m)
            self.rows[m] = self.embed(micro.inputs["tokens"])
            if not self.first:
                self.step.send_to(ROWS, 0, self.rows[m].detach(), m)

    def embedded(self, m: int) -> Tensor:
        """The rows of all stages, on the first one."""
        total = self.rows[m].detach()
        for sender in self.others:
            rows = self.step.taken(ROWS, sender)
            total = total + rows
            self.step.transport.release(rows)
        return total.requires_grad_(not self.step.shape.forward_only)

    def can_enter(self, m: int) -> bool:
        """Whether the rows of a micro-batch have come."""
        return all(self.step.here(ROWS, sender, m) for sender in self.others)

    def leave(self, m: int, y: Tensor) -> None:
        """Tell all stages what the head gets."""
        self.finals[m] = y
        for other in self.others:
            self.step.send_to(FINAL, other, y, m)

    def can_score(self) -> bool:
        """Whether the head can work on the next micro-batch."""
        if self.heads == len(self.step.micros):
            return False
        if self.last:
            return self.heads in self.finals
        chunks = self.step.shape.chunks
        if self.step.now.count("F", chunks - 1) <= self.heads:
            return False  # nor can it have come: it went through here
        return self.step.here(FINAL, self.at.stage.count - 1, self.heads)

    def all_ready(self, transport: RendezvousTransport) -> bool:
        """Whether all stages are ready for the loss of the next micro-batch.

        A stage says so when all its messages have been taken, and sends none until all have said
        it: whoever waits in a collective of all stages takes none.
        """
        if self._announced < self.heads and not transport.has_outgoing:
            transport.announce_ready(self.others, self.heads)
            self._announced = self.heads
        return self.has_announced and transport.all_ready(self.others, self.heads)

    @property
    def has_announced(self) -> bool:
        """Whether this stage has said that it is ready for the loss of the next micro-batch."""
        return self._announced == self.heads

    def score(self) -> None:
        """The loss of the next micro-batch; all stages take part.

        Communicates: as the head; my part of the gradient to the last stage.
        """
        step, m = self.step, self.heads
        micro = step.enter(m)
        if self.last:
            y = self.finals.pop(m)
        else:
            y = step.taken(FINAL, self.at.stage.count - 1)
        y = y.requires_grad_(not step.shape.forward_only)
        moment = self.at.moment
        moment.factor = step.factor if step.plain else None
        try:
            loss = self.head(y, micro.inputs.get("targets"))
        finally:
            moment.factor = None
        if self.last or "targets" not in micro.inputs:  # of logits each stage has some
            step.scored(loss.detach())
        if not step.shape.forward_only:
            loss.backward(step.factor.to(loss.dtype))
            assert y.grad is not None
            if self.last:
                self.grads[m] = y.grad
            else:
                step.send_to(PART, self.at.stage.count - 1, y.grad, m)
        if not self.last:
            step.transport.release(y)
        self.heads += 1

    def can_return(self, m: int) -> bool:
        """Whether all parts of the gradient of a micro-batch have come, on the last stage."""
        there = all(self.step.here(PART, sender, m) for sender in self.others)
        return m in self.grads and there

    def gradient(self, m: int) -> Tensor:
        """The gradient of what the head got, on the last stage."""
        total = self.grads.pop(m)
        for sender in self.others:
            part = self.step.taken(PART, sender)
            total = total + part
            self.step.transport.release(part)
        return total

    def returned(self, m: int, dx: Tensor) -> None:
        """The gradient of the rows, on the first stage, which tells the others."""
        for other in self.others:
            self.step.send_to(RETURN, other, dx, m)
        self._back(m, dx)

    def _back(self, m: int, dx: Tensor) -> None:
        rows = self.rows.pop(m)
        if rows.requires_grad:
            rows.backward(dx)

    def end(self) -> None:
        """Gradients of my rows, once the first stage has sent them."""
        if self.step.shape.forward_only or self.first:
            return
        each = len(self.step.micros)
        self.step.drain(lambda: self.step.here(RETURN, 0, each - 1), (RETURN, 0))
        for m in range(each):
            self.step.enter(m)
            dx = self.step.taken(RETURN, 0)
            self._back(m, dx)
            self.step.transport.release(dx)
