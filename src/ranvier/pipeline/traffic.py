"""Messages: what the stages of a pipeline send each other in a step, in closed form; no torch."""

from __future__ import annotations

from dataclasses import dataclass

from ranvier.cost.layers import Flow, Ground
from ranvier.trace import Event

FORWARD, BACKWARD = "forward", "backward"
ROWS, FINAL, PART, RETURN = "rows", "final", "part", "return"
"""Of a spread vocabulary: looked-up rows, what the head gets, parts of its gradient, that of the
embedding."""
WAYS = (FORWARD, BACKWARD, ROWS, FINAL, PART, RETURN)
"""All kinds of messages."""
INSIDE = ("expert", "context", "depth", "row", "col")
"""Axes whose ranks share collectives inside a stage."""
ORDER_NUMBERS = 17
"""Of what the first rank of a stage tells the others to do next: a job, or a transfer."""


@dataclass(frozen=True)
class Seat:
    """A stage among others."""

    index: int
    count: int
    chunks: int
    spread: bool = False
    """Whether all stages share the vocabulary."""

    def enters(self, chunk: int) -> bool:
        """Whether a chunk is the first of the model."""
        return chunk == self.index == 0

    def leaves(self, chunk: int) -> bool:
        """Whether a chunk is the last of the model."""
        return chunk == self.chunks - 1 and self.index == self.count - 1


def messages(seat: Seat, size: int) -> list[Event]:
    """Messages of a micro-batch, of `size` bytes each."""
    found = list[Event]()
    if seat.count == 1:
        return found

    def add(op: str, way: str, times: int = 1) -> None:
        found.extend([Event(op, ("pipe",), size, f"pipeline.{way}")] * times)

    for chunk in range(seat.chunks):
        if not seat.enters(chunk):
            add("receive", FORWARD)
            add("send", BACKWARD)
        if not seat.leaves(chunk):
            add("send", FORWARD)
            add("receive", BACKWARD)
    if seat.spread:
        others, first, last = seat.count - 1, seat.index == 0, seat.index == seat.count - 1
        for way, sender in ((ROWS, not first), (PART, not last)):
            add("send" if sender else "receive", way, 1 if sender else others)
        for way, sender in ((FINAL, last), (RETURN, first)):
            add("send" if sender else "receive", way, others if sender else 1)
    return found


def message_bytes(ground: Ground, flow: Flow) -> int:
    """Bytes of a message in the outer layout `[b, s/row, d/col]`."""
    embed = ground.units.get("embed", 0) // ground.degrees["col"]
    return ground.tokens(flow, "embed") * embed * flow.itemsize


def step(seat: Seat, inside: tuple[str, ...], wide: int, *, orders: int) -> list[Event]:
    """Orders inside the stage, if there are any, and the loss of a step."""
    if seat.count == 1:
        return []
    size = 8 * ORDER_NUMBERS
    told = [Event("broadcast", inside, size, "pipeline.order")] * (orders if inside else 0)
    return [*told, Event("broadcast", ("pipe",), wide, "pipeline.loss")]


def orders(seat: Seat, micro_batches: int, *, dynamic: bool, split: bool, rendezvous: bool) -> int:
    """How often the first rank of a stage tells the others what to do in a step.

    rendezvous: the others post transfers when they are told to, and are told when all are posted.
    """
    jobs = (3 if split else 2) * seat.chunks * micro_batches + micro_batches * seat.spread
    if rendezvous:
        transfers = len(messages(seat, 0)) * micro_batches
        return jobs + transfers + 1 + (seat.spread and seat.index > 0)
    return jobs if dynamic or seat.spread else 0


def link(count: int, way: str, sender: int, to: int) -> str:
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
    return f"wrap {direction}" if between else way


def links(count: int, chunks: int, *, spread: bool) -> dict[str, list[tuple[int, int]]]:
    """Stages that send to each other, as (from, to), by channel."""
    last, found = count - 1, dict[str, dict[tuple[int, int], None]]()

    def add(way: str, sender: int, to: int) -> None:
        if sender != to:
            found.setdefault(link(count, way, sender, to), {})[sender, to] = None

    for stage in range(last):
        add(FORWARD, stage, stage + 1)
        add(BACKWARD, stage + 1, stage)
    if chunks > 1:
        add(FORWARD, last, 0)
        add(BACKWARD, 0, last)
    for stage in range(count if spread else 0):
        add(ROWS, stage, 0)
        add(FINAL, last, stage)
        add(PART, stage, last)
        add(RETURN, 0, stage)
    return {channel: list(pairs) for channel, pairs in found.items()}
