"""Executes schedules of collectives (`comm.algorithms`) over point-to-point messages.

    Gloo     a thread per communicator posts the messages of a round, waits for them and continues;
             it runs collectives in the order in which they were started
    NCCL     a round is one group call, and all rounds of a collective are queued on a stream of
             their own when it is started; the host never waits

Both return a handle like torch's Work. A message with several blocks that are not adjacent is
packed on one side and unpacked on the other; no other copies are made, except for sums.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed

from ranvier.comm.algorithms.schedule import GroupStep, Level, Round, Step, Transfer
from ranvier.comm.transports.lost_rank import LostRankError
from ranvier.comm.transports.reduction import Reduction, reduce_in_order
from ranvier.comm.transports.shared_memory import SharedMemoryGroup

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MESSAGE_TAG = 2**20
"""First tag of messages over Gloo, which no other message of a communicator has. Ranks in another
order share the communicator, but have another tag."""
Delay = Callable[[int, int], float]
"""Returns the seconds by which a message from one global rank to another is delayed; for tests."""
# torch 2.13 renamed these two and warns about the old names; 2.11 has only the old names.
gather_into = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
scatter_into = (
    getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
)
REDUCE_OPS = {
    "sum": distributed.ReduceOp.SUM,
    "max": distributed.ReduceOp.MAX,
    "min": distributed.ReduceOp.MIN,
}


@dataclass
class CollectiveBuffer:
    """The memory of a collective on one rank: room for all blocks of the whole tensor."""

    whole: Tensor
    """All blocks, one after the other, in one dim."""
    sizes: Sequence[int]
    """Elements of each block."""
    starts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.starts = [0, *itertools.accumulate(self.sizes)]

    def count(self, blocks: Sequence[int]) -> int:
        """Returns the number of elements of some blocks."""
        return sum(self.sizes[block] for block in blocks)

    def span(self, blocks: Sequence[int]) -> Tensor | None:
        """Returns the memory of blocks that are adjacent and in order, else None."""
        adjacent = all(b == a + 1 for a, b in itertools.pairwise(blocks))
        if not adjacent:
            return None
        return self.whole[self.starts[blocks[0]] : self.starts[blocks[-1] + 1]]

    def pack(self, blocks: Sequence[int]) -> Tensor:
        """Returns blocks one after the other, without a copy if they are adjacent."""
        found = self.span(blocks)
        if found is not None:
            return found
        return torch.cat([self.block(one) for one in blocks])

    def unpack(self, blocks: Sequence[int], values: Tensor) -> None:
        """Stores blocks that follow each other in `values`."""
        for one, part in zip(blocks, values.split([self.sizes[b] for b in blocks]), strict=True):
            self.block(one).copy_(part)

    def block(self, block: int) -> Tensor:
        """Returns the memory of a block."""
        return self.whole[self.starts[block] : self.starts[block + 1]]


class ScheduleWork:
    """Handle of a collective that an executor runs."""

    def __init__(self, buffer: CollectiveBuffer, result: tuple[int, Tensor] | None) -> None:
        self.buffer = buffer
        self.result = result
        self.sent_bytes = 0
        """Bytes that this rank has sent, without those of engines."""
        self.num_rounds = 0
        self.done_time: float | None = None
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._event: torch.cuda.Event | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """Marks the end of the collective on a host."""
        self._error = error
        self.done_time = time.perf_counter()
        self._done.set()

    def record_event(self) -> None:
        """Marks the end of the collective on the current stream."""
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> None:
        """Waits for the end; on CUDA the current stream waits, not the host."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
            return
        self._done.wait()
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Whether it has ended."""
        if self._event is not None:
            return bool(self._event.query())
        return self._done.is_set()


@dataclass(frozen=True)
class RankGroup:
    """The ranks of a collective, and the engines of its levels."""

    ranks: tuple[int, ...]
    """Global ranks, in the order of the axis."""
    index: int
    places: tuple[int, ...]
    """Rank of each of them in the group."""
    group: ProcessGroup
    levels: Mapping[Level, ProcessGroup] = field(default_factory=dict)
    """Groups of the ranks of a node, and of ranks with the same position in their nodes."""
    shared_memory: SharedMemoryGroup | None = None
    """Collectives of the ranks of this node."""
    delay: Delay | None = None


class ScheduleExecutor:
    """Executes the collectives of one group of ranks, in the order in which they are started."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self._tag = MESSAGE_TAG + zlib.crc32(str(group.ranks).encode()) % MESSAGE_TAG
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # The thread must end with the executor, so it knows only the queue.
        weakref.finalize(self, self._queue.put, None)
        self._stream: torch.cuda.Stream | None = None

    def start(
        self,
        steps: Sequence[Step],
        buffer: CollectiveBuffer,
        op: Reduction = "sum",
        result: tuple[int, Tensor] | None = None,
    ) -> ScheduleWork:
        """Starts the steps of this rank. result: a block, and where to copy it at the end.

        Communicates: the messages of the schedule.
        """
        work = ScheduleWork(buffer, result)
        if buffer.whole.is_cuda:
            self._enqueue(work, steps, op)
        else:
            self._queue.put(lambda: self._run(work, steps, op))
            if self._thread is None:
                name = f"collectives of ranks {self.group.ranks}"
                self._thread = threading.Thread(
                    target=_run_queue, args=(self._queue,), name=name, daemon=True
                )
                self._thread.start()
        return work

    def _run(self, work: ScheduleWork, steps: Sequence[Step], op: Reduction) -> None:
        """Runs a collective to its end in the thread."""
        try:
            self._run_steps(work, steps, op)
        # The thread that waits raises it.
        except BaseException as error:
            work.finish(error)
        else:
            work.finish()

    def _enqueue(self, work: ScheduleWork, steps: Sequence[Step], op: Reduction) -> None:
        """Queues all steps of a collective on a stream of their own."""
        memory = work.buffer.whole
        current = torch.cuda.current_stream(memory.device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(memory.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._run_steps(work, steps, op)
            work.record_event()
        # The allocator must not reuse the memory before this stream is done with it.
        memory.record_stream(self._stream)
        if work.result is not None:
            work.result[1].record_stream(self._stream)

    def _run_steps(self, work: ScheduleWork, steps: Sequence[Step], op: Reduction) -> None:
        for step in steps:
            if isinstance(step, GroupStep):
                self._run_group_step(work, step, op)
            else:
                self._run_round(work, step, op)
            work.num_rounds += 1
        if work.result is not None:
            block, out = work.result
            out.view(-1).copy_(work.buffer.block(block))

    # ---- messages -----------------------------------------------------------------------

    def _run_round(self, work: ScheduleWork, step: Round, op: Reduction) -> None:
        buffer = work.buffer
        receives = [one for one in step.receives if buffer.count(one.blocks)]
        sends = [one for one in step.sends if buffer.count(one.blocks)]
        arrived = [(one, self._receive_buffer(buffer, one)) for one in receives]
        sent = [(one, buffer.pack(one.blocks)) for one in sends]
        work.sent_bytes += sum(values.nbytes for _, values in sent)
        if buffer.whole.is_cuda:
            self._exchange_on_device(arrived, sent)
        else:
            self._exchange_on_host(arrived, sent)
        self._apply(buffer, arrived, op)

    def _receive_buffer(self, buffer: CollectiveBuffer, transfer: Transfer) -> Tensor:
        """Returns memory for a message: its place if it is stored there, else new memory."""
        span = None if transfer.reduce else buffer.span(transfer.blocks)
        if span is not None:
            return span
        return buffer.whole.new_empty(buffer.count(transfer.blocks))

    def _exchange_on_host(
        self, arrived: Sequence[tuple[Transfer, Tensor]], sent: Sequence[tuple[Transfer, Tensor]]
    ) -> None:
        """Exchanges messages over Gloo; receives are posted first."""
        # The methods of the group, as torch.distributed.isend takes longer than a small message.
        ranks, group, places = self.group.ranks, self.group.group, self.group.places
        works = []
        for call, what, messages in ((group.recv, "send", arrived), (group.send, "receive", sent)):
            for transfer, values in messages:
                peer = ranks[transfer.peer]
                try:
                    work = call([values], places[transfer.peer], self._tag)
                except RuntimeError as error:
                    raise _lost_peer(what, peer, error) from error
                works.append((what, peer, work))
        for what, peer, work in works:
            try:
                work.wait()
            except RuntimeError as error:
                raise _lost_peer(what, peer, error) from error
        if self.group.delay is not None and arrived:
            here = ranks[self.group.index]
            time.sleep(max(self.group.delay(ranks[one.peer], here) for one, _ in arrived))

    def _exchange_on_device(
        self, arrived: Sequence[tuple[Transfer, Tensor]], sent: Sequence[tuple[Transfer, Tensor]]
    ) -> None:
        """Exchanges messages over NCCL in one group call."""
        ranks, group = self.group.ranks, self.group.group
        calls = [
            distributed.P2POp(distributed.irecv, values, ranks[one.peer], group)
            for one, values in arrived
        ]
        calls += [
            distributed.P2POp(distributed.isend, values, ranks[one.peer], group)
            for one, values in sent
        ]
        if calls:
            for work in distributed.batch_isend_irecv(calls):
                work.wait()

    def _apply(
        self, buffer: CollectiveBuffer, arrived: Sequence[tuple[Transfer, Tensor]], op: Reduction
    ) -> None:
        """Stores or reduces the messages of a round."""
        contributions: dict[tuple[int, ...], dict[int, Tensor]] = {}
        for transfer, values in arrived:
            if transfer.reduce:
                contributions.setdefault(transfer.blocks, {})[transfer.peer] = values
            elif buffer.span(transfer.blocks) is None:
                buffer.unpack(transfer.blocks, values)
        for blocks, parts in contributions.items():
            own = buffer.span(blocks)
            target = buffer.pack(blocks) if own is None else own
            ordered = {**parts, self.group.index: target}
            reduce_in_order([ordered[rank] for rank in sorted(ordered)], target, op)
            if own is None:
                buffer.unpack(blocks, target)

    # ---- engines ------------------------------------------------------------------------

    def _run_group_step(self, work: ScheduleWork, step: GroupStep, op: Reduction) -> None:
        """Runs a collective of some of the ranks by an engine."""
        buffer = work.buffer
        # c10d sorts the ranks of a group; as blocks are packed anyway, their order is free.
        order = list(range(len(step.ranks)))
        if step.engine == "native":
            order.sort(key=lambda member: self.group.ranks[step.ranks[member]])
        blocks = [step.blocks[member] for member in order]
        mine = step.blocks[step.ranks.index(self.group.index)]
        counts = [buffer.count(some) for some in blocks]
        if step.engine == "native" and len(set(counts)) > 1 and step.operation != "all_reduce":
            self._run_round(work, direct_round(step, self.group.index), op)
            return
        everything = tuple(block for some in blocks for block in some)
        if step.operation == "all_gather":
            span = buffer.span(everything)
            out = buffer.whole.new_empty(sum(counts)) if span is None else span
            self._gather(step, buffer.pack(mine), out, counts)
            if span is None:
                buffer.unpack(everything, out)
        elif step.operation == "reduce_scatter":
            out = buffer.whole.new_empty(buffer.count(mine))
            self._scatter(step, buffer.pack(everything), out, counts, op)
            buffer.unpack(mine, out)
        else:
            buffer.unpack(everything, self._reduce(step, buffer.pack(everything), op))

    def _gather(self, step: GroupStep, part: Tensor, out: Tensor, counts: Sequence[int]) -> None:
        """Gathers the parts of the members. Communicates: all-gather over a level."""
        if step.engine == "shared_memory":
            assert self.group.shared_memory is not None
            self.group.shared_memory.all_gather(part, out, counts).wait()
        else:
            # Gloo must not gather from the memory that it writes to.
            group = self.group.levels[step.level]
            gather_into(out, part.clone(), group=group, async_op=True).wait()

    def _scatter(
        self, step: GroupStep, x: Tensor, out: Tensor, counts: Sequence[int], op: Reduction
    ) -> None:
        """Reduces the part of this rank. Communicates: reduce-scatter over a level."""
        if step.engine == "shared_memory":
            assert self.group.shared_memory is not None
            self.group.shared_memory.reduce_scatter(x, out, counts, op).wait()
        else:
            group = self.group.levels[step.level]
            scatter_into(out, x.contiguous(), REDUCE_OPS[op], group=group, async_op=True).wait()

    def _reduce(self, step: GroupStep, x: Tensor, op: Reduction) -> Tensor:
        """Returns the reduction over the members. Communicates: all-reduce over a level."""
        if step.engine == "shared_memory":
            assert self.group.shared_memory is not None
            out = torch.empty_like(x)
            self.group.shared_memory.all_reduce(x, out, op).wait()
            return out
        out = x.clone()
        group = self.group.levels[step.level]
        work = distributed.all_reduce(out, REDUCE_OPS[op], group=group, async_op=True)
        assert work is not None
        work.wait()
        return out


def _run_queue(waiting: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """Runs collectives one after the other, until None ends the queue."""
    while (collective := waiting.get()) is not None:
        collective()
        # It refers to the executor.
        del collective


def direct_round(step: GroupStep, index: int) -> Round:
    """Returns a round in which each member of a step sends to all others what they need."""
    mine = step.blocks[step.ranks.index(index)]
    others = [(rank, some) for rank, some in zip(step.ranks, step.blocks, strict=True)]
    others = [(rank, some) for rank, some in others if rank != index]
    if step.operation == "all_gather":
        return Round(
            sends=tuple(Transfer(rank, mine) for rank, _ in others),
            receives=tuple(Transfer(rank, some) for rank, some in others),
        )
    return Round(
        sends=tuple(Transfer(rank, some, reduce=True) for rank, some in others),
        receives=tuple(Transfer(rank, mine, reduce=True) for rank, _ in others),
    )


def _lost_peer(what: str, peer: int, error: RuntimeError) -> LostRankError:
    return LostRankError(peer, f"did not {what}: {str(error).splitlines()[0]}")
