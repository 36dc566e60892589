"""Point-to-point messages between the stages of a pipeline.

A message is identified by its key at the receiver (its kind, and either the destination chunk or
the sending stage) and by its number. There are two transports, as in MPI:

* `EagerTransport` (Gloo): a message is sent as soon as it exists, and a thread posts the next
  receive while the last message waits to be used. CUDA tensors are copied through pinned host
  memory.
* `RendezvousTransport` (NCCL): a send and its receive are kernels that spin until the other one
  runs. Any operation that synchronizes the context in the meantime (loading a kernel for the first
  time, freeing device memory) waits for them, and on an H200 every other launch of the process
  waits as well, from any thread. Therefore the main thread posts all transfers, between two jobs,
  under one rule:

      Never post a transfer whose completion depends on later work of this rank.

  A send is posted once its value is computed. The sender announces it over a host channel; the
  receiver posts its receive between two jobs and acknowledges it. Until then the sender runs no
  job, but continues to post transfers. A receive is posted only after its send. The ranks of a
  stage post transfers in the same order, so every job ends, every receiver eventually posts its
  receive, and no cycle of waiting ranks can form. `tests/comm/test_p2p.py` simulates this on a
  device that blocks.

Operations of one communicator run in the order in which a rank posts them, so messages are
distributed over communicators on which ranks cannot wait for each other in a cycle (`Route`).

Not supported: messages whose sizes differ between the ranks of a stage.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, distributed

from ranvier.errors import CommunicationError
from ranvier.grid import CONTROL_CHANNEL, Axis, Grid

Key = tuple[str, int]
"""Kind of a message, and its destination chunk or sending stage."""
Delay = Callable[[Key, int], float]
"""Returns the seconds by which to delay a message, from its key and number; for tests."""
Route = Callable[[str, int, int], str]
"""Returns the channel of messages of a kind from one stage to another."""
Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of messages."""
MESSAGE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HEADER_NUMBERS = 12
"""Integers that encode a form: dtype, number of dims, sizes, zero padding."""
HEADER_FORM: Form = ((HEADER_NUMBERS,), torch.int64)


def encode_form(form: Form) -> list[int]:
    """Encodes a form as `[dtype, dims, sizes ...]`, padded to `HEADER_NUMBERS`."""
    shape, dtype = form
    numbers = [MESSAGE_DTYPES.index(dtype), len(shape), *shape]
    return numbers + [0] * (HEADER_NUMBERS - len(numbers))


def decode_form(numbers: Sequence[int]) -> Form:
    """Decodes a form; the inverse of `encode_form`."""
    kind, dims, *sizes = numbers
    return tuple(sizes[:dims]), MESSAGE_DTYPES[kind]


@dataclass(frozen=True)
class Transfer:
    """One side of a message, which all ranks of a stage post."""

    op: Literal["send", "receive"]
    key: Key
    """The key at the receiver."""
    number: int
    peer: int
    """Index of the other stage on the pipe axis."""
    form: Form


class LostMessageError(CommunicationError):
    """A message will not arrive."""

    def __init__(self, key: Key | None, number: int, error: BaseException) -> None:
        super().__init__(str(error))
        self.key = key
        self.number = number
        self.error = error


class Transport(ABC):
    """Sends and receives the messages of one step; messages of a key arrive in order.

    ways: all kinds of messages. ahead: maximum number of received messages that are not yet used,
    and of messages in flight to one stage; 0 for no limit.
    """

    def __init__(
        self,
        grid: Grid,
        device: torch.device,
        ways: Sequence[str],
        *,
        delay: Delay | None = None,
        ahead: int = 0,
    ) -> None:
        self.grid, self.device, self.message_kinds = grid, device, tuple(ways)
        self.max_ahead = ahead
        self.stage = grid.index["pipe"]
        self.num_arrived: dict[Key, int] = {}
        """Number of messages of each key that have arrived."""
        self.arrival_log: list[tuple[Key, int, float]] = []
        """Arrival time of each message (`time.perf_counter`)."""
        self._delay = delay
        # Protects all state that threads share; notified at every change of `version`.
        self._change = threading.Condition()
        self._version = 0
        self._error: LostMessageError | None = None

    @abstractmethod
    def expect_messages(self, key: Key, sender: int, count: int) -> None:
        """Announces `count` messages of a key to receive; called before the first job of a step."""

    @abstractmethod
    def promise_messages(self, key: Key, to: int, count: int) -> None:
        """Announces `count` messages of a key to send; called before the first job of a step."""

    @abstractmethod
    def start_listening(self) -> None:
        """Starts the threads that receive messages."""

    @abstractmethod
    def send(self, key: Key, number: int, value: Tensor, to: int) -> None:
        """Queues a message to be sent; `value` must not be modified afterwards.

        Communicates: point to point.
        """

    @abstractmethod
    def take_message(self, key: Key) -> Tensor:
        """Returns the next message of a key; it must have arrived on the rank that chooses jobs."""

    @abstractmethod
    def close(self, seconds: float) -> None:
        """Waits until all messages are sent."""

    def release_message(self, value: Tensor) -> None:  # noqa: B027 (most need not know)
        """Releases the memory of a message, which no kernel launched later may read."""

    def next_transfer(self, *, sends: bool = True) -> Transfer | None:
        """Returns a transfer that can be posted now, or None. sends: whether it may be a send."""
        return None

    def post_transfer(self, transfer: Transfer) -> None:
        """Posts a transfer."""
        raise AssertionError(f"{type(self).__name__} posts transfers by itself: {transfer}")

    @property
    def can_compute(self) -> bool:
        """Whether a job may be launched now."""
        return True

    @property
    def has_outgoing(self) -> bool:
        """Whether messages of this stage have not been acknowledged yet."""
        return False

    @property
    def version(self) -> int:
        """Counter of all changes; see `wait_for_change`."""
        return self._version

    def wait_for_change(self, seen: int, seconds: float) -> bool:
        """Waits until `version` exceeds `seen`; returns False after a timeout."""
        with self._change:
            new = self._change.wait_for(
                lambda: self._error is not None or self._version > seen, timeout=seconds
            )
            if self._error is not None:
                raise self._error
            return bool(new)

    def _notify_waiters(self) -> None:
        """Counts a change and wakes the waiting threads; the lock must be held."""
        self._version += 1
        self._change.notify_all()

    def _note_arrival(self, key: Key, number: int) -> None:
        # Sleep outside the lock, so that a delayed message does not delay the others.
        if self._delay is not None:
            time.sleep(self._delay(key, number))
        with self._change:
            self.num_arrived[key] += 1
            self.arrival_log.append((key, number, time.perf_counter()))
            self._notify_waiters()

    def _report_failure(self, key: Key | None, number: int, error: BaseException) -> None:
        """Passes an error of a thread to the waiting threads."""
        with self._change:
            # Keep the first error, as later ones are mostly its consequences.
            self._error = self._error or LostMessageError(key, number, error)
            self._notify_waiters()

    def _message_tag(self, key: Key) -> int:
        # 4096 exceeds any number of chunks or stages, so tags of different keys differ.
        way, place = key
        return self.message_kinds.index(way) * 4096 + place


# ---- eager ------------------------------------------------------------------------------


class EagerTransport(Transport):
    """Transport with threads that receive before jobs need messages and send in the background."""

    def __init__(
        self, *args: Any, form: Callable[[Key], Form] | None = None, **options: Any
    ) -> None:
        """form: form of messages by key; if None, each sender sends it before its first message."""
        super().__init__(*args, **options)
        self.form = form
        self._ready_messages: dict[Key, deque[Tensor]] = {}
        self._senders: list[tuple[Key, int, int]] = []
        self._outboxes: dict[str, _SendQueue] = {}

    def axis_for(self, way: str) -> Axis:
        """Returns the communicator of a kind of message; gradients have a separate one."""
        return self.grid.axis(
            "pipe", channel=way if way in self.message_kinds[:2] else self.message_kinds[0]
        )

    def expect_messages(self, key: Key, sender: int, count: int) -> None:
        """Announces messages to receive."""
        self._ready_messages[key] = deque()
        self.num_arrived[key] = 0
        self._senders.append((key, sender, count))

    def promise_messages(self, key: Key, to: int, count: int) -> None:
        """Does nothing, as sends need no preparation."""

    def start_listening(self) -> None:
        """Starts one receiving thread per key."""
        for sender in self._senders:
            threading.Thread(target=self._receive_loop, args=sender, daemon=True).start()

    def _receive_loop(self, key: Key, sender: int, count: int) -> None:
        number = 0
        try:
            with _thread_stream(self.device) as stream:
                if self.form is not None:
                    form = self.form(key)
                else:
                    heading = self._receive_message(key, sender, HEADER_FORM, stream)
                    form = decode_form(heading.tolist())
                for number in range(count):
                    if self.max_ahead:
                        self._wait_for_room(key)
                    value = self._receive_message(key, sender, form, stream)
                    with self._change:
                        self._ready_messages[key].append(value)
                    self._note_arrival(key, number)
        # A daemon thread would end silently; report the error to the main thread.
        except BaseException as error:
            self._report_failure(key, number, error)

    def _wait_for_room(self, key: Key) -> None:
        with self._change:
            self._change.wait_for(lambda: len(self._ready_messages[key]) < self.max_ahead)

    def _receive_message(self, key: Key, sender: int, form: Form, stream: Any) -> Tensor:
        """Receives the next message; it is complete when this returns."""
        axis, (shape, dtype) = self.axis_for(key[0]), form
        if _is_staged(axis, self.device):
            value = torch.empty(shape, dtype=dtype, pin_memory=True)
        else:
            value = torch.empty(shape, dtype=dtype, device=self.device)
        work = distributed.irecv(
            value, axis.ranks[sender], group=axis.group, tag=self._message_tag(key)
        )
        assert work is not None
        work.wait()
        # `wait` may only make the stream wait; the message must be complete on the host before its
        # arrival is announced.
        if stream is not None:
            stream.synchronize()
        return value

    def send(self, key: Key, number: int, value: Tensor, to: int) -> None:
        """Queues a message. Communicates: point to point; the form before the first message."""
        way = key[0]
        if way in self.message_kinds[:2]:
            channel = way
        else:
            channel = self.message_kinds[0]
        if channel not in self._outboxes:
            self._outboxes[channel] = _SendQueue(
                self.device, self.max_ahead, self.grid.timeout_seconds
            )
        box = self._outboxes[channel]
        axis = self.axis_for(way)
        if number == 0 and self.form is None:
            numbers = encode_form((tuple(value.shape), value.dtype))
            box.send(torch.tensor(numbers, device=self.device), axis, to, self._message_tag(key))
        box.send(value, axis, to, self._message_tag(key))

    def take_message(self, key: Key) -> Tensor:
        """Returns the next message of a key, which must have arrived."""
        with self._change:
            value = self._ready_messages[key].popleft()
            # Wakes `_wait_for_room`, as there is room for one more.
            self._change.notify_all()
        return value.to(self.device, non_blocking=True)

    def close(self, seconds: float) -> None:
        """Waits until all messages are sent."""
        for box in self._outboxes.values():
            box.close(seconds)


@contextmanager
def _thread_stream(device: torch.device) -> Iterator[Any]:
    """Runs the current thread on a separate CUDA stream; yields None without CUDA."""
    if device.type != "cuda":
        yield None
        return
    # The current device is thread-local and is initially 0.
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield stream


def _is_staged(axis: Axis, device: torch.device) -> bool:
    return device.type == "cuda" and distributed.get_backend(axis.group) == "gloo"


@dataclass
class _QueuedSend:
    """A message in a `_SendQueue`."""

    value: Tensor
    axis: Axis
    to: int
    tag: int
    ready_event: Any = None
    """CUDA event after which the value is computed."""
    work: Any = None
    """Handle of the send, once it is started."""

    def send(self) -> None:
        """Starts the send."""
        to = self.axis.ranks[self.to]
        group = self.axis.group
        self.work = distributed.isend(self.value, to, group=group, tag=self.tag)
        assert self.work is not None


class _SendQueue:
    """Queue of outgoing messages of one channel, which a thread sends in order."""

    def __init__(self, device: torch.device, ahead: int, seconds: float) -> None:
        self.device = device
        self.seconds = seconds
        self._free_slots = threading.Semaphore(ahead) if ahead else None
        self._queued_sends: queue.SimpleQueue[_QueuedSend | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def send(self, value: Tensor, axis: Axis, to: int, tag: int) -> None:
        """Queues a message."""
        if self._free_slots is not None and not self._free_slots.acquire(timeout=self.seconds):
            raise CommunicationError(f"the receiver did not accept it within {self.seconds:g} s")
        self._raise_error()
        letter = _QueuedSend(value.contiguous(), axis, to, tag)
        # On CUDA the value may not be computed yet, so the thread waits for it and then sends it. A
        # CPU tensor is sent immediately, and the thread only waits for the end of the send.
        if self.device.type == "cuda":
            letter.ready_event = torch.cuda.Event()
            letter.ready_event.record()
        else:
            try:
                letter.send()
            except RuntimeError as error:
                self._error = error
                self._raise_error()
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_loop, daemon=True)
            self._thread.start()
        self._queued_sends.put(letter)

    def _send_loop(self) -> None:
        """Sends queued messages and waits for each, until None closes the queue."""
        try:
            with _thread_stream(self.device) as stream:
                while (letter := self._queued_sends.get()) is not None:
                    if letter.work is None:
                        _send_staged(letter, stream)
                    letter.work.wait()
                    if stream is not None:
                        stream.synchronize()
                    if self._free_slots is not None:
                        self._free_slots.release()
        # The next `send`, or `close`, raises the error. The slot is released to wake up a blocked
        # `send`.
        except BaseException as error:
            self._error = error
            if self._free_slots is not None:
                self._free_slots.release()

    def close(self, seconds: float) -> None:
        """Waits until all messages are sent, and ends the thread."""
        if self._thread is not None:
            self._queued_sends.put(None)
            self._thread.join(seconds)
            if self._thread.is_alive():
                raise CommunicationError(f"the receiver did not accept it within {seconds:g} s")
            self._thread = None
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise CommunicationError(str(self._error)) from self._error


def _send_staged(letter: _QueuedSend, stream: Any) -> None:
    """Sends a CUDA tensor once it is computed; copies it to pinned host memory for Gloo."""
    stream.wait_event(letter.ready_event)
    if _is_staged(letter.axis, letter.value.device):
        there = letter.value
        letter.value = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
        letter.value.copy_(there, non_blocking=True)
        # Gloo reads host memory without waiting for streams.
        stream.synchronize()
    letter.send()


# ---- rendezvous -------------------------------------------------------------------------

SEND_POSTED, RECEIVE_POSTED, STAGE_READY = range(3)
"""Opcodes of control messages: a send is posted, its receive is posted, or a stage is ready for a
collective of all stages."""
CONTROL_NUMBERS = 4 + HEADER_NUMBERS
"""Length of a control message: opcode, kind, place, number and a form."""
MAX_BUFFERED_FORMS = 4
"""Number of message forms whose buffers are kept."""


def connect_pairs(axis: Axis, pairs: Sequence[tuple[int, int]]) -> None:
    """Makes NCCL connect the ranks of an axis that will send to each other, as (from, to).

    Otherwise NCCL would connect two ranks at their first transfer, which blocks both hosts.
    Communicates: one number between each pair.
    """
    if axis.group is None or distributed.get_backend(axis.group) != "nccl":
        return
    here = torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device()))
    operations = [
        distributed.P2POp(distributed.isend, here, axis.ranks[to], axis.group)
        for sender, to in pairs
        if sender == axis.index
    ]
    operations += [
        distributed.P2POp(distributed.irecv, torch.empty_like(here), axis.ranks[sender], axis.group)
        for sender, to in pairs
        if to == axis.index
    ]
    # One batch (an NCCL group call), so that the order of the pairs cannot cause a deadlock.
    for work in distributed.batch_isend_irecv(operations) if operations else []:
        work.wait()
    torch.cuda.current_stream().synchronize()


class ReceiveBuffers:
    """Device memory of messages, reused for later messages of the same form.

    A released buffer is overwritten only after the work that was launched before its release. The
    caching allocator cannot be used: its memory belongs to one stream, but a message is received on
    one stream and read on another, and neither may wait for all work of the other.
    """

    def __init__(self) -> None:
        self._free_buffers: OrderedDict[Form, deque[tuple[Tensor, Any]]] = OrderedDict()
        """Free buffers, each with the event after which it may be overwritten; in LRU order."""
        self._lent_buffers: dict[int, tuple[Form, Tensor]] = {}

    def acquire(self, form: Form, device: torch.device, stream: Any) -> Tensor:
        """Returns a buffer that may be written on `stream`."""
        free = self._free_buffers.setdefault(form, deque())
        self._free_buffers.move_to_end(form)
        # Generation has a different form for each length, so free the least recently used ones.
        while len(self._free_buffers) > MAX_BUFFERED_FORMS:
            self._free_buffers.popitem(last=False)
        if free:
            buffer, event = free.popleft()
        else:
            shape, dtype = form
            buffer = torch.empty(shape, dtype=dtype, device=device)
            # The allocator may return memory that kernels of the current stream still use; the
            # stream of the link must also wait for them.
            event = _record_event(device)
        if stream is not None:
            stream.wait_event(event)
        self._lent_buffers[buffer.data_ptr()] = (form, buffer)
        return buffer

    def holds_tensor(self, value: Tensor) -> bool:
        """Whether a tensor is stored in a buffer that is in use."""
        return value.untyped_storage().data_ptr() in self._lent_buffers

    def release(self, value: Tensor) -> None:
        """Gives a buffer back for reuse; frees it if its form is no longer kept."""
        form, buffer = self._lent_buffers.pop(value.data_ptr())
        if form in self._free_buffers:
            self._free_buffers[form].append((buffer, _record_event(buffer.device)))


def _record_event(device: torch.device) -> Any:
    if device.type == "cuda":
        return torch.cuda.current_stream(device).record_event()
    return None


class _Link:
    """The communicator of one channel, and the stream on which its transfers run."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self.axis = axis
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def launch_transfer(self, op: str, value: Tensor, peer: int, after: Any, tag: int) -> Any:
        """Posts one side of a transfer; returns a CUDA event or work handle of its end."""
        call = distributed.isend if op == "send" else distributed.irecv
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            if self.stream is not None and after is not None:
                self.stream.wait_event(after)
            work = call(value, self.axis.ranks[peer], group=self.axis.group, tag=tag)
            assert work is not None
            if self.stream is None:
                return work
            # For NCCL this makes the current stream wait, not the host.
            work.wait()
            done = torch.cuda.Event(blocking=True)
            done.record(self.stream)
            return done


@dataclass(eq=False)
class _Outgoing:
    """A message that is not acknowledged or not completely sent."""

    key: Key
    number: int
    to: int
    value: Tensor
    ready_event: Any
    """CUDA event after which the value is computed; None without CUDA."""


@dataclass(eq=False)
class _Arrival:
    """A message whose receive is posted."""

    buffer: Tensor
    event: Any = None
    """CUDA event after which the message is complete."""
    complete: threading.Event | None = None
    """Without CUDA: set by a thread when the message is complete."""


class RendezvousLinks:
    """Communicators, streams and buffers that the transports of all steps share."""

    def __init__(
        self, grid: Grid, device: torch.device, channels: Sequence[str], route: Route
    ) -> None:
        self.route = route
        self.links = {one: _Link(grid.axis("pipe", channel=one), device) for one in channels}
        self.control = grid.axis("pipe", channel=CONTROL_CHANNEL)
        self.buffers = ReceiveBuffers()
        self.is_broken = False
        """Whether a step has failed; its threads may receive messages of the next step."""

    def link_between(self, way: str, sender: int, to: int) -> _Link:
        """Returns the link for messages of a kind from one stage to another."""
        return self.links[self.route(way, sender, to)]


class RendezvousTransport(Transport):
    """Transport whose transfers the main thread posts between jobs.

    leads: whether this rank chooses the order of transfers for all ranks of its stage.
    """

    def __init__(self, *args: Any, links: RendezvousLinks, leads: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self.links = links
        self.leads = leads
        # Received messages by key, in order; `next_transfer` compares the count with `max_ahead`.
        self._ready_messages: dict[Key, deque[_Arrival]] = {}
        self._waiting_counts: dict[Key, int] = {}
        # Number of control messages that each peer will send, after which its thread stops.
        self._messages_from: dict[int, int] = {}
        # Sends that peers have posted, so that their receives are due, and messages of this stage
        # that are computed but not yet posted.
        self._posted_sends: deque[Transfer] = deque()
        self._made_messages: deque[_Outgoing] = deque()
        self._outgoing: dict[tuple[Key, int, int], _Outgoing] = {}
        self._unacknowledged_sends: set[tuple[Key, int, int]] = set()
        self._ready_stages: dict[int, int] = {}
        self._control_sends: deque[tuple[Any, Tensor]] = deque()
        self._threads: list[tuple[threading.Thread, queue.SimpleQueue[Any]]] = []
        self._made_queue = self._start_waiter() if self.device.type == "cuda" else None
        self._done_queues: dict[_Link, queue.SimpleQueue[Any]] = {}

    def expect_messages(self, key: Key, sender: int, count: int) -> None:
        """Announces messages to receive; a control message precedes each."""
        self._ready_messages[key] = deque()
        self.num_arrived[key] = 0
        self._waiting_counts[key] = 0
        self._messages_from[sender] = self._messages_from.get(sender, 0) + count

    def promise_messages(self, key: Key, to: int, count: int) -> None:
        """Announces messages to send; a control message acknowledges each."""
        self._messages_from[to] = self._messages_from.get(to, 0) + count

    def expect_ready(self, peers: Sequence[int], count: int) -> None:
        """Announces how often other stages will call `announce_ready`."""
        for peer in peers:
            self._messages_from[peer] = self._messages_from.get(peer, 0) + count

    def start_listening(self) -> None:
        """Starts one thread per peer stage for control messages, on the leader of the stage."""
        for peer, count in self._messages_from.items() if self.leads else ():
            threading.Thread(target=self._control_loop, args=(peer, count), daemon=True).start()

    # ---- control messages ---------------------------------------------------------------

    def _control_loop(self, peer: int, count: int) -> None:
        axis = self.links.control
        try:
            for _ in range(count):
                numbers = torch.zeros(CONTROL_NUMBERS, dtype=torch.int64)
                work = distributed.irecv(numbers, axis.ranks[peer], group=axis.group)
                assert work is not None
                work.wait()
                self._handle_control(peer, numbers.tolist())
        # A daemon thread would end silently; report the error to the main thread.
        except BaseException as error:
            self._report_failure(None, peer, error)

    def _handle_control(self, peer: int, numbers: list[int]) -> None:
        op, way, place, number, *form = numbers
        key = (self.message_kinds[way], place)
        with self._change:
            if op == SEND_POSTED:
                self._posted_sends.append(Transfer("receive", key, number, peer, decode_form(form)))
            elif op == RECEIVE_POSTED:
                self._unacknowledged_sends.discard((key, number, peer))
            else:
                self._ready_stages[number] = self._ready_stages.get(number, 0) + 1
            self._notify_waiters()

    def _send_control(
        self, peer: int, op: int, key: Key, number: int, form: Form | None = None
    ) -> None:
        axis = self.links.control
        if form is not None:
            rest = encode_form(form)
        else:
            rest = [0] * HEADER_NUMBERS
        numbers = torch.tensor([op, self.message_kinds.index(key[0]), key[1], number, *rest])
        try:
            work = distributed.isend(numbers, axis.ranks[peer], group=axis.group)
        except RuntimeError as error:
            raise CommunicationError(str(error)) from error
        # The tensor must stay alive until its send is complete; completed sends are removed here.
        self._control_sends.append((work, numbers))
        while self._control_sends and self._control_sends[0][0].is_completed():
            self._control_sends.popleft()

    def announce_ready(self, peers: Sequence[int], number: int) -> None:
        """Announces that this stage is ready for a collective of all stages and sends no more."""
        for peer in peers:
            self._send_control(peer, STAGE_READY, (self.message_kinds[0], 0), number)

    def all_ready(self, peers: Sequence[int], number: int) -> bool:
        """Whether all of these stages have announced that they are ready."""
        with self._change:
            return self._ready_stages.get(number, 0) == len(peers)

    # ---- transfers ----------------------------------------------------------------------

    def send(self, key: Key, number: int, value: Tensor, to: int) -> None:
        """Queues a message; its send is posted once its value is computed."""
        value = value.contiguous()
        # A stage may return its input unchanged, whose buffer will be released for reuse.
        if self.links.buffers.holds_tensor(value):
            value = value.clone()
        outgoing = _Outgoing(key, number, to, value, _record_blocking_event(self.device))
        with self._change:
            self._outgoing[key, number, to] = outgoing
        # A send whose value is not computed would depend on later work (see the rule in the module
        # docstring), so a thread waits for the value. Only the leader needs to know.
        if self._made_queue is None:
            self._note_made(outgoing)
        elif self.leads:
            self._made_queue.put(
                (outgoing.ready_event.synchronize, lambda: self._note_made(outgoing))
            )

    def _note_made(self, outgoing: _Outgoing) -> None:
        with self._change:
            self._made_messages.append(outgoing)
            self._notify_waiters()

    def next_transfer(self, *, sends: bool = True) -> Transfer | None:
        """Returns a receive whose send is posted, or else a send whose value is computed."""
        with self._change:
            if self._error is not None:
                raise self._error
            # Receives first: the sender runs no job until its receive is acknowledged.
            for transfer in self._posted_sends:
                if not self.max_ahead or self._waiting_counts[transfer.key] < self.max_ahead:
                    self._posted_sends.remove(transfer)
                    return transfer
            if not sends or not self._made_messages:
                return None
            one = self._made_messages.popleft()
            form = (tuple(one.value.shape), one.value.dtype)
            return Transfer("send", one.key, one.number, one.to, form)

    def post_transfer(self, transfer: Transfer) -> None:
        """Posts a transfer and informs the other stage. Communicates: point to point over pipe."""
        (key, number, peer), tag = _transfer_address(transfer), self._message_tag(transfer.key)
        if transfer.op == "send":
            link = self.links.link_between(key[0], self.stage, peer)
            outgoing = self._outgoing[key, number, peer]
            # Added before the peer learns of the send; its acknowledgement removes it.
            if self.leads:
                with self._change:
                    self._unacknowledged_sends.add((key, number, peer))
            done = link.launch_transfer("send", outgoing.value, peer, outgoing.ready_event, tag)
            if self.leads:
                self._send_control(peer, SEND_POSTED, key, number, transfer.form)
            self._when_done(link, done, key, number, lambda: self._note_sent(outgoing))
            return
        link = self.links.link_between(key[0], peer, self.stage)
        buffer = self.links.buffers.acquire(transfer.form, self.device, link.stream)
        done = link.launch_transfer("receive", buffer, peer, None, tag)
        arrival = _Arrival(buffer, event=done)
        if link.stream is None:
            arrival = _Arrival(buffer, complete=threading.Event())
        self._ready_messages[key].append(arrival)
        self._waiting_counts[key] += 1
        if self.leads:
            self._send_control(peer, RECEIVE_POSTED, key, number)
        self._when_done(link, done, key, number, lambda: self._note_received(arrival, key, number))

    def _when_done(
        self, link: _Link, done: Any, key: Key, number: int, then: Callable[[], None]
    ) -> None:
        """Calls `then` from a thread once a transfer is complete."""
        if link.stream is None:
            wait = done.wait
        else:
            wait = done.synchronize

        def finish() -> None:
            try:
                wait()
            except BaseException as error:
                self._report_failure(key, number, error)
                raise

        # Transfers of a link complete in order, so one thread per link is enough.
        if link not in self._done_queues:
            self._done_queues[link] = self._start_waiter()
        self._done_queues[link].put((finish, then))

    def _note_sent(self, outgoing: _Outgoing) -> None:
        with self._change:
            del self._outgoing[outgoing.key, outgoing.number, outgoing.to]
            self._notify_waiters()

    def _note_received(self, arrival: _Arrival, key: Key, number: int) -> None:
        if arrival.complete is not None:
            arrival.complete.set()
        self._note_arrival(key, number)

    def take_message(self, key: Key) -> Tensor:
        """Returns the next message of a key, whose receive must be posted."""
        arrival = self._ready_messages[key].popleft()
        self._waiting_counts[key] -= 1
        if arrival.complete is not None:
            if not arrival.complete.wait(self.grid.timeout_seconds):
                raise LostMessageError(
                    key,
                    self.num_arrived[key],
                    TimeoutError("its receive was posted, but no data came"),
                )
        else:
            # Only the compute stream waits, not the host.
            torch.cuda.current_stream(self.device).wait_event(arrival.event)
        return arrival.buffer.detach()

    def release_message(self, value: Tensor) -> None:
        """Allows a later message to reuse the memory of this one."""
        self.links.buffers.release(value)

    @property
    def can_compute(self) -> bool:
        """Whether all posted sends are acknowledged and fewer than `max_ahead` are in flight."""
        with self._change:
            crowded = bool(self.max_ahead) and len(self._outgoing) >= self.max_ahead
            return not self._unacknowledged_sends and not crowded

    @property
    def has_outgoing(self) -> bool:
        """Whether a message of this stage is not yet acknowledged or not completely sent."""
        with self._change:
            return bool(self._unacknowledged_sends or self._outgoing)

    # ---- threads ------------------------------------------------------------------------

    def _start_waiter(self) -> queue.SimpleQueue[Any]:
        """Starts a thread that takes pairs (wait, then) from a queue and calls both in order."""
        work: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def run() -> None:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            while (pair := work.get()) is not None:
                wait, then = pair
                try:
                    wait()
                    then()
                # A daemon thread would end silently; report the error to the main thread.
                except BaseException as error:
                    self._report_failure(None, -1, error)
                    return

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._threads.append((thread, work))
        return work

    def close(self, seconds: float) -> None:
        """Ends the threads once all messages are acknowledged."""
        try:
            for work, _ in self._control_sends:
                work.wait()
        except RuntimeError as error:
            raise CommunicationError(str(error)) from error
        for thread, pending in self._threads:
            pending.put(None)
            thread.join(seconds)
            if thread.is_alive():
                raise CommunicationError(f"the receiver did not accept it within {seconds:g} s")
        if self._error is not None:
            raise self._error


def _transfer_address(transfer: Transfer) -> tuple[Key, int, int]:
    return transfer.key, transfer.number, transfer.peer


def _record_blocking_event(device: torch.device) -> Any:
    """Records a CUDA event for which a host thread can wait without spinning."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event
