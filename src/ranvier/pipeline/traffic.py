"""Messages between pipeline stages in a step, in closed form. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ranvier.cost.layers import ActivationShape, LayoutContext
from ranvier.trace import Event

FORWARD = "forward"
BACKWARD = "backward"
EMBEDDING_ROWS = "rows"
HEAD_INPUT = "final"
HEAD_GRAD_PART = "part"
EMBEDDING_GRAD = "return"
"""Messages of a vocabulary split over the stages: looked-up embedding rows, the input of the head,
each stage's part of the gradient of that input, and the gradient of the embedding rows."""
MESSAGE_KINDS = (FORWARD, BACKWARD, EMBEDDING_ROWS, HEAD_INPUT, HEAD_GRAD_PART, EMBEDDING_GRAD)
"""All kinds of messages."""
STAGE_AXES = ("expert", "context", "depth", "row", "col")
"""Axes whose ranks share collectives inside a stage."""
ORDER_NUMBERS = 17
"""Length of an order: opcode, four arguments and the `HEADER_NUMBERS` of a form (`comm.p2p`)."""


@dataclass(frozen=True)
class StageSpec:
    """Position of a stage in the pipeline."""

    index: int
    num_stages: int
    chunks: int
    vocab_over_pipe: bool = False
    """Whether all stages share the vocabulary."""
    received_tensors: tuple[int, ...] = ()
    """Number of tensors `[b, s, d]` that each chunk receives as one message; empty: 1 each."""
    sent_tensors: tuple[int, ...] = ()
    """Number of tensors that each chunk sends as one message; empty: 1 each."""

    @classmethod
    def from_parts(
        cls,
        index: int,
        num_stages: int,
        chunks: Sequence[slice],
        input_tensors: Sequence[int],
        *,
        vocab_over_pipe: bool = False,
    ) -> StageSpec:
        """Returns the position of a stage with these ranges of parts.

        input_tensors: number of tensors that each part of the model reads: 2 before a ladder layer,
        the residual stream and its addend.
        """
        sizes = (*input_tensors, 1)
        return cls(
            index,
            num_stages,
            len(chunks),
            vocab_over_pipe,
            tuple(sizes[one.start] for one in chunks),
            tuple(sizes[one.stop] for one in chunks),
        )

    def tensors_received(self, way: str, chunk: int) -> int:
        """Returns the number of tensors in a message that a chunk receives.

        The gradient of what a chunk sends has the form of what it sends.
        """
        sizes = {FORWARD: self.received_tensors, BACKWARD: self.sent_tensors}.get(way, ())
        return sizes[chunk] if sizes else 1

    def is_first_chunk(self, chunk: int) -> bool:
        """Returns whether a chunk is the first of the model."""
        return chunk == self.index == 0

    def is_last_chunk(self, chunk: int) -> bool:
        """Returns whether a chunk is the last of the model."""
        return chunk == self.chunks - 1 and self.index == self.num_stages - 1


def micro_batch_events(seat: StageSpec, size: int, streams: int = 1) -> list[Event]:
    """Returns the messages of one micro-batch, of `size` bytes per tensor.

    streams: factor of those between the blocks of a model, whose samples have several streams.
    """
    found = list[Event]()
    if seat.num_stages == 1:
        return found

    def add(op: str, way: str, times: int = 1, tensors: int = 1) -> None:
        copies = tensors * (streams if way in (FORWARD, BACKWARD) else 1)
        found.extend([Event(op, ("pipe",), size * copies, f"pipeline.{way}")] * times)

    for chunk in range(seat.chunks):
        received = seat.tensors_received(FORWARD, chunk)
        sent = seat.tensors_received(BACKWARD, chunk)
        if not seat.is_first_chunk(chunk):
            add("receive", FORWARD, tensors=received)
            add("send", BACKWARD, tensors=received)
        if not seat.is_last_chunk(chunk):
            add("send", FORWARD, tensors=sent)
            add("receive", BACKWARD, tensors=sent)
    # The first stage collects the rows of all others and returns their gradient; the last stage
    # sends the input of the head to all others and collects their parts of its gradient.
    if seat.vocab_over_pipe:
        others = seat.num_stages - 1
        first = seat.index == 0
        last = seat.index == seat.num_stages - 1
        for way, sender in ((EMBEDDING_ROWS, not first), (HEAD_GRAD_PART, not last)):
            add("send" if sender else "receive", way, 1 if sender else others)
        for way, sender in ((HEAD_INPUT, last), (EMBEDDING_GRAD, first)):
            add("send" if sender else "receive", way, others if sender else 1)
    return found


def message_bytes(ground: LayoutContext, flow: ActivationShape) -> int:
    """Returns the bytes of a message in the outer layout `[b, s/row, d/col]`."""
    embed = ground.units.get("embed", 0) // ground.table.num_parts("embed", "embed", ground.degrees)
    return ground.local_tokens(flow, "embed") * embed * flow.itemsize


def step_events(seat: StageSpec, inside: tuple[str, ...], wide: int, *, orders: int) -> list[Event]:
    """Returns the orders inside the stage, if there are any, and the broadcast of the loss."""
    if seat.num_stages == 1:
        return []
    # Orders are int64.
    size = 8 * ORDER_NUMBERS
    told = [Event("broadcast", inside, size, "pipeline.order")] * (orders if inside else 0)
    return [*told, Event("broadcast", ("pipe",), wide, "pipeline.loss")]


def count_orders(
    seat: StageSpec, micro_batches: int, *, dynamic: bool, split: bool, rendezvous: bool
) -> int:
    """Returns the number of orders that the leader of a stage broadcasts per step.

    rendezvous: there is an order for each transfer, and one after all are posted.
    """
    jobs = (3 if split else 2) * seat.chunks * micro_batches + micro_batches * seat.vocab_over_pipe
    if rendezvous:
        # The final drain of transfers ends with one order, and the drain before the embedding
        # gradients with another one (not on the first stage, which sends them).
        transfers = len(micro_batch_events(seat, 0)) * micro_batches
        return jobs + transfers + 1 + (seat.vocab_over_pipe and seat.index > 0)
    if dynamic or seat.vocab_over_pipe:
        return jobs
    return 0


def link_channel(count: int, way: str, sender: int, to: int) -> str:
    """Returns the channel of messages from one of `count` stages to another, over NCCL.

    Operations of one communicator run in the order in which each rank posts them. If all messages
    of a communicator have the same direction and its stages form a tree (a chain, or a star around
    one stage), ranks cannot wait for each other in a cycle, for any order. So the messages that
    close the ring of chunks, and each kind of message of a split vocabulary, have their own
    communicator. Two stages always form a tree.
    """
    direction = "up" if sender < to else "down"
    between = way in (FORWARD, BACKWARD)
    if count == 2 or (between and abs(sender - to) == 1):
        return direction
    if between:
        return f"wrap {direction}"
    return way


def channel_links(count: int, chunks: int, *, spread: bool) -> dict[str, list[tuple[int, int]]]:
    """Returns the pairs of stages (from, to) that use each channel."""
    last = count - 1
    found = dict[str, dict[tuple[int, int], None]]()

    def add(way: str, sender: int, to: int) -> None:
        # A dict instead of a set keeps the order, which must be the same on all ranks.
        if sender != to:
            found.setdefault(link_channel(count, way, sender, to), {})[sender, to] = None

    for stage in range(last):
        add(FORWARD, stage, stage + 1)
        add(BACKWARD, stage + 1, stage)
    # With several chunks the last stage sends to the first one: the ring closes.
    if chunks > 1:
        add(FORWARD, last, 0)
        add(BACKWARD, 0, last)
    for stage in range(count if spread else 0):
        add(EMBEDDING_ROWS, stage, 0)
        add(HEAD_INPUT, last, stage)
        add(HEAD_GRAD_PART, stage, last)
        add(EMBEDDING_GRAD, 0, stage)
    return {channel: list(pairs) for channel, pairs in found.items()}
