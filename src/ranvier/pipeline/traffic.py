"""Messages: what the stages of a pipeline send each other in a step, in closed form; no torch."""

from __future__ import annotations

from dataclasses import dataclass

from ranvier.cost.layers import ActivationShape, LayoutContext
from ranvier.trace import Event

FORWARD = "forward"
BACKWARD = "backward"
EMBEDDING_ROWS = "rows"
HEAD_INPUT = "final"
HEAD_GRAD_PART = "part"
EMBEDDING_GRAD = "return"
"""Of a spread vocabulary: looked-up rows, what the head gets, parts of its gradient, that of the
embedding."""
MESSAGE_KINDS = (FORWARD, BACKWARD, EMBEDDING_ROWS, HEAD_INPUT, HEAD_GRAD_PART, EMBEDDING_GRAD)
"""All kinds of messages."""
STAGE_AXES = ("expert", "context", "depth", "row", "col")
"""Axes whose ranks share collectives inside a stage."""
ORDER_NUMBERS = 17
"""Of what the first rank of a stage tells the others to do next: a job, or a transfer."""


@dataclass(frozen=True)
class StageSpec:
    """A stage among others."""

    index: int
    num_stages: int
    chunks: int
    vocab_over_pipe: bool = False
    """Whether all stages share the vocabulary."""

    def is_first_chunk(self, chunk: int) -> bool:
        """Whether a chunk is the first of the model."""
        return chunk == self.index == 0

    def is_last_chunk(self, chunk: int) -> bool:
        """Whether a chunk is the last of the model."""
        return chunk == self.chunks - 1 and self.index == self.num_stages - 1


def micro_batch_events(seat: StageSpec, size: int) -> list[Event]:
    """Messages of a micro-batch, of `size` bytes each."""
    found = list[Event]()
    if seat.num_stages == 1:
        return found

    def add(op: str, way: str, times: int = 1) -> None:
        found.extend([Event(op, ("pipe",), size, f"pipeline.{way}")] * times)

    for chunk in range(seat.chunks):
        if not seat.is_first_chunk(chunk):
            add("receive", FORWARD)
            add("send", BACKWARD)
        if not seat.is_last_chunk(chunk):
            add("send", FORWARD)
            add("receive", BACKWARD)
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
    """Bytes of a message in the outer layout `[b, s/row, d/col]`."""
    embed = ground.units.get("embed", 0) // ground.degrees["col"]
    return ground.local_tokens(flow, "embed") * embed * flow.itemsize


def step_events(seat: StageSpec, inside: tuple[str, ...], wide: int, *, orders: int) -> list[Event]:
    """Orders inside the stage, if there are any, and the loss of a step."""
    if seat.num_stages == 1:
        return []
    size = 8 * ORDER_NUMBERS
    told = [Event("broadcast", inside, size, "pipeline.order")] * (orders if inside else 0)
    return [*told, Event("broadcast", ("pipe",), wide, "pipeline.loss")]


def count_orders(
    seat: StageSpec, micro_batches: int, *, dynamic: bool, split: bool, rendezvous: bool
) -> int:
    """How often the first rank of a stage tells the others what to do in a step.

    rendezvous: the others post transfers when they are told to, and are told when all are posted.
    """
    jobs = (3 if split else 2) * seat.chunks * micro_batches + micro_batches * seat.vocab_over_pipe
    if rendezvous:
        transfers = len(micro_batch_events(seat, 0)) * micro_batches
        return jobs + transfers + 1 + (seat.vocab_over_pipe and seat.index > 0)
    if dynamic or seat.vocab_over_pipe:
        return jobs
    return 0


def link_channel(count: int, way: str, sender: int, to: int) -> str:
    """The channel of messages from one of `count` stages to another, over NCCL.

    Operations of one communicator run in the order in which each rank posts them. Where messages of
    a communicator go one way, and the stages that use it form a tree (each with the next one, or
    all with one of them), ranks cannot wait for each other in a circle whatever that order is. So
    messages around the ring of chunks, and each kind of a spread vocabulary, have one of their own;
    of two stages all form a tree.
    """
    direction = "up" if sender < to else "down"
    between = way in (FORWARD, BACKWARD)
    if count == 2 or (between and abs(sender - to) == 1):
        return direction
    if between:
        return f"wrap {direction}"
    return way


def channel_links(count: int, chunks: int, *, spread: bool) -> dict[str, list[tuple[int, int]]]:
    """Stages that send to each other, as (from, to), by channel."""
    last = count - 1
    found = dict[str, dict[tuple[int, int], None]]()

    def add(way: str, sender: int, to: int) -> None:
        if sender != to:
            found.setdefault(link_channel(count, way, sender, to), {})[sender, to] = None

    for stage in range(last):
        add(FORWARD, stage, stage + 1)
        add(BACKWARD, stage + 1, stage)
    if chunks > 1:
        add(FORWARD, last, 0)
        add(BACKWARD, 0, last)
    for stage in range(count if spread else 0):
        add(EMBEDDING_ROWS, stage, 0)
        add(HEAD_INPUT, last, stage)
        add(HEAD_GRAD_PART, stage, last)
        add(EMBEDDING_GRAD, 0, stage)
    return {channel: list(pairs) for channel, pairs in found.items()}
