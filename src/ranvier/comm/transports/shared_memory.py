"""Shared memory between the CPU ranks of one host, as a transport for collectives.

Each rank has a segment that the other ranks of its host map. A message is written into the segment
of its sender, and its envelope (key, number, place) into the mailbox of its receiver, who reads the
data where it is and acknowledges it; then the sender reuses the memory:

    sender    copy into own segment -> envelope -> ...              ... -> free
    receiver                        ... -> copy or add out of it -> acknowledgment

A collective is a generator that sends messages, and yields the rank from which it needs the next
one. A thread that waits for a collective also resumes the other collectives of the process whose
messages arrive, so they may be waited for in any order, and starting one never blocks. Large
tensors are sent in chunks, so that segments stay small.

Memory order: envelopes are counted by POSIX semaphores, which are fences on every processor; plain
stores are not. A waiting rank polls for a few microseconds if every rank of the host has a core of
its own, and then sleeps. Nothing is left behind after any end of a process, because segments have
no names (memfd) and so do not count against the size of /dev/shm either.

Sums are computed from left to right in the order of the axis, 16-bit values in fp32, and rounded
once, so all ranks have the same bits in every run.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import select
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ranvier.comm.transports.lost_rank import LostRankError
from ranvier.comm.transports.output_pool import OutputPool
from ranvier.comm.transports.reduction import REDUCTIONS, Reduction, reduce_in_order

SEGMENT_BYTES = 2**28
"""Room for data in a segment; the system provides memory only for the part that is used."""
CHUNK_BYTES = 2**23
"""Bytes that a rank writes at a time; larger tensors are sent in several messages."""
RESERVED_CHUNKS = 6
"""Chunks of memory that only the oldest collective may use: it has at most so many in flight."""
CHUNKS_AHEAD = 2
"""Chunks that a collective sends before it reads the first one."""
ONE_SHOT_BYTES = 2**16
"""Largest all-reduce in which each rank reads everything of all others."""
PATIENT_BYTES = 2**15
PATIENT_MESSAGES = 8
"""Messages up to this size are acknowledged with the next message, or when there are several."""
MAILBOX_ENTRIES = 1024
KEPT_TENSORS = 256
"""Tensors in segments that are kept, because creating one takes longer than finding it."""
SPIN_SECONDS = 1e-4
"""Time for which a rank with a core of its own polls before it sleeps."""
FLUSH_SECONDS = 1e-3
"""Interval at which a rank tries again to send to a full mailbox."""
CHECK_SECONDS = 0.2
"""Interval at which a waiting rank checks that the others are alive."""
ALIGNMENT = 64
TOKEN_BYTES = 16
NO_SEGMENT = "no segment: "

_MUTEX, _HEAD, _ITEMS, _ROOM, _ENTRIES = 64, 96, 128, 192, 4096
"""Places in a segment: a semaphore that guards the number of envelopes so far, the latter, the
semaphores of new envelopes and of room for them, and the envelopes. What the same rank changes at
the same time is in the same cache line."""
_ENVELOPE = struct.Struct("<qqqqqqq")
_COUNT = struct.Struct("<q")
_DATA_START = _ENTRIES + MAILBOX_ENTRIES * _ENVELOPE.size

Message = tuple[int, int, int]
"""Offset and bytes of a message in the segment of its sender, and its allocation there."""
Progress = Generator[int | None, Message, None]
"""A collective: yields the index of the peer whose message it needs, or None to wait for memory."""


class _Semaphores:
    """POSIX semaphores in shared memory, by address."""

    def __init__(self) -> None:
        # `PyDLL` keeps the interpreter lock, which calls that never block should not release.
        quick, patient = ctypes.PyDLL(None), ctypes.CDLL(None, use_errno=True)
        self._initialize = quick.sem_init
        self._initialize.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
        self.post = quick.sem_post
        self.post.argtypes = [ctypes.c_void_p]
        self.try_wait = quick.sem_trywait
        """Returns 0 if it took one."""
        self.try_wait.argtypes = [ctypes.c_void_p]
        self._timed_wait = patient.sem_timedwait
        self._timed_wait.argtypes = [ctypes.c_void_p, ctypes.c_void_p]

    def initialize(self, address: int, value: int) -> None:
        """Makes a semaphore that processes share."""
        if self._initialize(address, 1, value) != 0:
            raise OSError("this system has no semaphores in shared memory")

    def wait(self, address: int, seconds: float) -> bool:
        """Returns whether it took one within a time."""
        until = time.time() + seconds
        limit = (ctypes.c_long * 2)(int(until), int(until % 1.0 * 1e9))
        return bool(self._timed_wait(address, ctypes.byref(limit)) == 0)


class SharedMemoryWork:
    """Handle of a collective over shared memory, as torch's Work."""

    __slots__ = (
        *("group", "what", "number", "progress", "waits_for", "messages"),
        *("done_time", "error", "sent_bytes", "num_rounds"),
    )

    def __init__(
        self, group: SharedMemoryGroup, what: str, number: int, progress: Progress
    ) -> None:
        self.group = group
        self.what = what
        self.number = number
        self.progress: Progress | None = progress
        """None when it has completed."""
        self.waits_for: int | None = None
        """Index of the rank whose message it needs next."""
        self.messages: dict[int, deque[Message]] | None = None
        """Messages that arrived before they were needed, by index of their senders."""
        self.done_time: float | None = None
        self.error: Exception | None = None
        self.sent_bytes = 0
        """Bytes that this rank wrote for others."""
        self.num_rounds = 1

    def wait(self) -> None:
        """Waits for its end."""
        if self.progress is not None:
            self.group.segment.wait(self)
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return self.progress is None


class _Mapping:
    """A mapped segment of a rank."""

    def __init__(self, memory: mmap.mmap, pid: int, pidfd: int) -> None:
        self.memory, self.pid, self.pidfd = memory, pid, pidfd
        if pidfd >= 0:
            weakref.finalize(self, os.close, pidfd).atexit = False
        # Kept, because it keeps the address valid.
        self._anchor = (ctypes.c_char * len(memory)).from_buffer(memory)
        self.address = ctypes.addressof(self._anchor)
        self.mutex, self.items, self.room = (self.address + at for at in (_MUTEX, _ITEMS, _ROOM))
        """Addresses of its semaphores: for writing envelopes, their number, and room for more."""


class Segment:
    """The segment of this rank, and those of the other ranks of its host."""

    def __init__(self, rank: int, mappings: dict[int, _Mapping], semaphores: _Semaphores) -> None:
        self.rank = rank
        self.ranks = tuple(sorted(mappings))
        self._mappings = mappings
        self._own = mappings[rank]
        self._size = len(self._own.memory)
        self._semaphores = semaphores
        self.outputs = OutputPool()
        """Memory for results."""
        self._tensors: dict[tuple[int, int, int, torch.dtype], Tensor] = {}
        self.written_bytes = 0
        """Bytes written for other ranks so far."""
        self._received = 0
        self._allocations: dict[int, Message] = {}
        self._next_allocation = 0
        self._unacknowledged: dict[int, list[int]] = {other: [] for other in self.ranks}
        """Allocations of each rank that this rank has read without telling it yet."""
        self._outboxes: dict[int, deque[tuple[int, ...]]] = {}
        """Envelopes for which the mailboxes of their receivers had no room."""
        self.numbers: dict[tuple[int, ...], int] = {}
        """Number of the next collective of each key, and of the next message of each pair; groups
        with the same key share them."""
        self._running: dict[tuple[int, int], SharedMemoryWork] = {}
        """Collectives that have not ended, the oldest first."""
        self._blocked: list[SharedMemoryWork] = []
        """Collectives that wait for free memory."""
        self._early: dict[tuple[int, int], list[tuple[int, Message]]] = {}
        """Messages of collectives that this rank has not started yet."""
        # Guards all state; threads that wait while another one receives sleep on `_changed`.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._is_receiving = False
        self._num_waiting = 0
        cores = len(os.sched_getaffinity(0))
        self._spin_seconds = SPIN_SECONDS if len(self.ranks) <= cores else 0.0

    # ---- collectives --------------------------------------------------------------------

    def start(self, work: SharedMemoryWork) -> SharedMemoryWork:
        """Starts a collective: runs it until it needs a message that is not there."""
        with self._lock:
            known = (work.group.key, work.number)
            self._running[known] = work
            if known in self._early:
                for source, message in self._early.pop(known):
                    self._keep(work, source, message)
            self._advance(work, None)
        return work

    def _advance(self, work: SharedMemoryWork, message: Message | None) -> None:
        """Resumes a collective for as long as it has what it needs; the lock must be held."""
        progress = work.progress
        assert progress is not None
        before = self.written_bytes
        ended = False
        try:
            while True:
                # The first call of a generator must send None.
                peer = progress.send(message)  # type: ignore[arg-type]
                work.waits_for = peer
                if peer is None:
                    self._blocked.append(work)
                    break
                if work.messages is None or not work.messages.get(peer):
                    break
                message = work.messages[peer].popleft()
        except StopIteration:
            ended = True
        # The thread that waits for this collective raises it, which need not be the current one.
        except Exception as error:
            work.error = error
            ended = True
        work.sent_bytes += self.written_bytes - before
        if ended:
            work.progress = work.waits_for = None
            work.done_time = time.perf_counter()
            del self._running[work.group.key, work.number]
            if self._blocked:
                # Another one is the oldest now.
                self._resume_blocked()

    def _keep(self, work: SharedMemoryWork, source: int, message: Message) -> None:
        """Keeps a message until it is needed."""
        if work.messages is None:
            work.messages = {}
        work.messages.setdefault(work.group.index_of[source], deque()).append(message)

    def wait(self, work: SharedMemoryWork) -> None:
        """Waits for a collective, and advances all others meanwhile."""
        deadline = 0.0
        try_wait, items, clock = self._semaphores.try_wait, self._own.items, time.perf_counter
        with self._lock:
            while work.progress is not None:
                # One thread receives for all threads of the process.
                if self._is_receiving:
                    self._num_waiting += 1
                    self._changed.wait(CHECK_SECONDS)
                    self._num_waiting -= 1
                    continue
                if try_wait(items) == 0:
                    self._receive_one()
                    continue
                spin_until = clock() + self._spin_seconds
                while clock() < spin_until:
                    # The scheduler may have put the other rank on the same core.
                    os.sched_yield()
                    if try_wait(items) == 0:
                        self._receive_one()
                        break
                else:
                    deadline = deadline or time.monotonic() + work.group.timeout_seconds
                    self._sleep(work, deadline)
            if self._num_waiting:
                # Another thread may have to receive from now on.
                self._changed.notify_all()

    def _sleep(self, work: SharedMemoryWork, deadline: float) -> None:
        """Sleeps until an envelope arrives; raises if a peer is gone or late."""
        # Others may wait for memory until they know that it was read.
        for rank, read in self._unacknowledged.items():
            while read:
                self._put(rank, (self.rank, 0, 0, 0, 0, 0, read.pop()))
        self._is_receiving = True
        self._lock.release()
        try:
            arrived = self._semaphores.wait(self._own.items, CHECK_SECONDS)
        finally:
            self._lock.acquire()
            self._is_receiving = False
        if arrived:
            self._receive_one()
            if self._num_waiting:
                self._changed.notify_all()
        else:
            self._check_peers(work, deadline)

    def _receive_all(self) -> bool:
        """Receives all envelopes that are there; returns whether there were any."""
        found = False
        while self._semaphores.try_wait(self._own.items) == 0:
            self._receive_one()
            found = True
        return found

    def _receive_one(self) -> None:
        """Receives the next envelope, whose arrival a semaphore has counted."""
        place = _ENTRIES + self._received % MAILBOX_ENTRIES * _ENVELOPE.size
        source, key, number, offset, size, allocation, acknowledged = _ENVELOPE.unpack_from(
            self._own.memory, place
        )
        self._received += 1
        self._semaphores.post(self._own.room)
        if acknowledged:
            self._release(acknowledged)
        if not allocation:
            return
        work = self._running.get((key, number))
        if work is None:
            self._early.setdefault((key, number), []).append((source, (offset, size, allocation)))
        elif work.waits_for == work.group.index_of[source]:
            self._advance(work, (offset, size, allocation))
        else:
            self._keep(work, source, (offset, size, allocation))

    def _check_peers(self, work: SharedMemoryWork, deadline: float) -> None:
        """Raises if the rank that a collective waits for has ended, or the time is over."""
        for rank in work.group.ranks:
            gone = rank != self.rank and _has_ended(self._mappings[rank].pidfd)
            # What it sent before it ended still counts.
            if gone and not self._receive_all() and work.progress is not None:
                raise self._lost_rank(rank)
        if time.monotonic() > deadline:
            limit = f"within {work.group.timeout_seconds:g} s (timed out)"
            if work.waits_for is None:
                reader = work.group.ranks[work.group.peers[0]]
                raise LostRankError(reader, f"or another rank did not read {limit}")
            raise LostRankError(work.group.ranks[work.waits_for], f"did not take part {limit}")

    def _lost_rank(self, rank: int) -> LostRankError:
        pid = self._mappings[rank].pid
        return LostRankError(rank, f"has ended (process {pid})", has_ended=True)

    # ---- messages -----------------------------------------------------------------------

    def allocate(self, size: int, readers: int, work: tuple[int, int]) -> tuple[int, int] | None:
        """Returns offset and number of free memory that `readers` will read; None if full.

        work: key and number of the collective. The end of the segment is reserved for the oldest
        one, so that it always ends, whatever younger ones have sent.
        """
        size = _align(size) or ALIGNMENT
        offset = _DATA_START
        # First fit: memory that was used last is still in the caches.
        if self._allocations:
            for start, taken, _ in sorted(self._allocations.values()):
                if start - offset >= size:
                    break
                offset = start + taken
            if offset + size > self._size - RESERVED_CHUNKS * CHUNK_BYTES:
                oldest = next(iter(self._running))
                if work != oldest or offset + size > self._size:
                    return None
        self._next_allocation += 1
        self._allocations[self._next_allocation] = (offset, size, readers)
        return offset, self._next_allocation

    def _release(self, allocation: int) -> None:
        """Counts a reader of an allocation; after the last one the memory is free."""
        offset, size, readers = self._allocations[allocation]
        if readers > 1:
            self._allocations[allocation] = (offset, size, readers - 1)
            return
        del self._allocations[allocation]
        if self._blocked:
            self._resume_blocked()

    def _resume_blocked(self) -> None:
        """Resumes the collectives that wait for memory, which may have to wait again."""
        for work in [*self._blocked]:
            # Resuming one of them may have resumed others.
            if work in self._blocked:
                self._blocked.remove(work)
                self._advance(work, None)

    def send(self, to: int, key: int, number: int, message: Message) -> None:
        """Sends the envelope of a message to a global rank."""
        read = self._unacknowledged[to]
        self._put(to, (self.rank, key, number, *message, read.pop() if read else 0))

    def acknowledge(self, to: int, message: Message) -> None:
        """Tells a rank that its message was read."""
        _, size, allocation = message
        read = self._unacknowledged[to]
        read.append(allocation)
        # Usually the next message to that rank carries it.
        if size > PATIENT_BYTES or len(read) > PATIENT_MESSAGES:
            while read:
                self._put(to, (self.rank, 0, 0, 0, 0, 0, read.pop()))

    def _put(self, to: int, envelope: tuple[int, ...]) -> None:
        """Puts an envelope into the mailbox of a rank, or keeps it until there is room."""
        if self._outboxes or not self._try_put(to, envelope):
            if not self._outboxes:
                # This rank may not communicate again before the receiver needs it.
                threading.Thread(target=self._flush_loop, daemon=True).start()
            self._outboxes.setdefault(to, deque()).append(envelope)

    def _flush_loop(self) -> None:
        """Sends the envelopes for which there was no room, until none is left."""
        while True:
            time.sleep(FLUSH_SECONDS)
            with self._lock:
                # The threads that wait for a lost rank report it.
                with contextlib.suppress(LostRankError):
                    self._flush_outboxes()
                if not self._outboxes:
                    return

    def _try_put(self, to: int, envelope: tuple[int, ...]) -> bool:
        """Puts an envelope into the mailbox of a rank, if there is room."""
        mapping, try_wait, post = (
            self._mappings[to],
            self._semaphores.try_wait,
            self._semaphores.post,
        )
        if try_wait(mapping.room) != 0:
            return False
        # The owner of the mutex only copies an envelope. Of two ranks only one writes to the other.
        several = len(self.ranks) > 2
        while several and try_wait(mapping.mutex) != 0:
            if self._semaphores.wait(mapping.mutex, CHECK_SECONDS):
                break
            self._check_mutex_owner()
        memory = mapping.memory
        (head,) = _COUNT.unpack_from(memory, _HEAD)
        place = _ENTRIES + head % MAILBOX_ENTRIES * _ENVELOPE.size
        _ENVELOPE.pack_into(memory, place, *envelope)
        _COUNT.pack_into(memory, _HEAD, head + 1)
        if several:
            post(mapping.mutex)
        post(mapping.items)
        return True

    def _check_mutex_owner(self) -> None:
        """Raises if a rank has ended: it may have held the mutex of a mailbox."""
        for rank in self.ranks:
            if rank != self.rank and _has_ended(self._mappings[rank].pidfd):
                raise self._lost_rank(rank)

    def _flush_outboxes(self) -> None:
        """Sends the envelopes for which there was no room."""
        for to, waiting in list(self._outboxes.items()):
            while waiting and self._try_put(to, waiting[0]):
                waiting.popleft()
            if not waiting:
                del self._outboxes[to]

    def write(self, offset: int, address: int, size: int) -> None:
        """Copies `size` bytes from an address into the own segment."""
        self.written_bytes += size
        ctypes.memmove(self._own.address + offset, address, size)

    def read(self, rank: int, offset: int, address: int, size: int) -> None:
        """Copies `size` bytes out of the segment of a rank to an address."""
        ctypes.memmove(address, self._mappings[rank].address + offset, size)

    def tensor(self, rank: int, offset: int, size: int, dtype: torch.dtype) -> Tensor:
        """Returns a tensor in the segment of a rank."""
        place = (rank, offset, size, dtype)
        found = self._tensors.get(place)
        if found is None:
            # Small messages often have the same place.
            if len(self._tensors) >= KEPT_TENSORS:
                self._tensors.clear()
            # A tensor of inference mode could not be written outside of it.
            with torch.inference_mode(False):
                found = self._tensors[place] = torch.frombuffer(
                    self._mappings[rank].memory,
                    dtype=dtype,
                    count=size // dtype.itemsize,
                    offset=offset,
                )
        return found


def _has_ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0.0)[0])


# ---- meeting ----------------------------------------------------------------------------


def connect_segments(
    rank: int,
    ranks: Sequence[int],
    publish: Callable[[str, str], None],
    look_up: Callable[[str], str],
    size: int = SEGMENT_BYTES,
) -> Segment | str:
    """Returns the segment of this rank with those of `ranks`, or why there is none.

    All ranks get a segment or none does. publish, look_up: a store of texts by names that the ranks
    share; `look_up` waits. Communicates: two texts per rank through the store.
    """
    mappings: dict[int, _Mapping] = {}
    handle = -1
    problem = ""
    try:
        semaphores = _Semaphores()
        token = os.urandom(TOKEN_BYTES)
        handle = os.memfd_create(f"ranvier-{rank}", os.MFD_CLOEXEC)
        os.ftruncate(handle, _DATA_START + size)
        own = _Mapping(mmap.mmap(handle, _DATA_START + size), os.getpid(), -1)
        own.memory[:TOKEN_BYTES] = token
        for place, value in ((_MUTEX, 1), (_ITEMS, 0), (_ROOM, MAILBOX_ENTRIES)):
            semaphores.initialize(own.address + place, value)
        mappings[rank] = own
        publish(f"segment {rank}", f"{read_boot_id()} {os.getpid()} {handle} {token.hex()}")
    # Not every system has memfd, semaphores in shared memory, and /proc.
    except (OSError, AttributeError, ValueError) as error:
        problem = f"rank {rank} cannot create shared memory: {error}"
        publish(f"segment {rank}", f"{NO_SEGMENT}{problem}")
    for other in ranks:
        if other != rank and not problem:
            problem = _map_segment(other, look_up(f"segment {other}"), mappings, size)
    publish(f"mapped {rank}", problem or "yes")
    answers = {other: look_up(f"mapped {other}") for other in ranks}
    if handle >= 0:
        # The mapping stays; without the handle no other process can open the segment.
        os.close(handle)
    for answer in answers.values():
        if answer != "yes":
            return answer
    return Segment(rank, mappings, semaphores)


def find_host_limitation() -> str:
    """Returns why CPU ranks of this host cannot share memory; empty if they can.

    Two threads connect segments as two ranks would.
    """
    texts: dict[str, str] = {}
    changed = threading.Condition()

    def publish(name: str, text: str) -> None:
        with changed:
            texts[name] = text
            changed.notify_all()

    def look_up(name: str) -> str:
        with changed:
            changed.wait_for(lambda: name in texts)
            return texts[name]

    with ThreadPoolExecutor(2) as threads:
        parts = [
            threads.submit(connect_segments, rank, (0, 1), publish, look_up, ALIGNMENT)
            for rank in (0, 1)
        ]
        found = [part.result() for part in parts]
    return next((one for one in found if isinstance(one, str)), "")


def _map_segment(other: int, answer: str, mappings: dict[int, _Mapping], size: int) -> str:
    """Maps the segment of another rank; returns why it cannot."""
    if answer.startswith(NO_SEGMENT):
        return answer.removeprefix(NO_SEGMENT)
    boot, pid, handle, token = answer.split()
    if boot != read_boot_id():
        return f"rank {other} runs on another host"
    try:
        opened = os.open(f"/proc/{pid}/fd/{handle}", os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(opened, _DATA_START + size)
        finally:
            os.close(opened)
        # A process of another container may have the same number.
        if memory[:TOKEN_BYTES] != bytes.fromhex(token):
            return f"rank {other} runs in another container"
        mappings[other] = _Mapping(memory, int(pid), os.pidfd_open(int(pid)))
    except (OSError, ValueError) as error:
        return f"the memory of rank {other} cannot be mapped: {error}"
    return ""


def read_boot_id() -> str:
    """Returns what identifies the running system of this host."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "unknown"


# ---- collectives ------------------------------------------------------------------------


class SharedMemoryGroup:
    """Collectives of some ranks of a host, in the order of an axis.

    Tensors must be contiguous, and inputs must not change until the work is done.
    """

    def __init__(
        self, segment: Segment, ranks: Sequence[int], key: int, timeout_seconds: float
    ) -> None:
        """ranks: global ranks. key: distinguishes the groups of the segment."""
        self.segment = segment
        self.ranks = tuple(ranks)
        self.index = self.ranks.index(segment.rank)
        self.key = key
        self.timeout_seconds = timeout_seconds
        self.index_of = {rank: index for index, rank in enumerate(self.ranks)}
        # Each rank starts with its neighbor, so that they do not all read the same segment.
        size = len(ranks)
        self.peers = tuple((self.index + i) % size for i in range(1, size))

    def all_gather(
        self, part: Tensor, out: Tensor, counts: Sequence[int] | None = None
    ) -> SharedMemoryWork:
        """Gathers the parts of all ranks into `out`; counts: elements of each part.

        Communicates: all-gather.
        """
        return self._start_collective(
            "all_gather", self._gather_parts, part, out, self._part_bytes(out, counts)
        )

    def reduce_scatter(
        self,
        x: Tensor,
        out: Tensor,
        counts: Sequence[int] | None = None,
        op: Reduction = "sum",
    ) -> SharedMemoryWork:
        """Reduces over all ranks and writes this rank's part to `out`; counts: as `all_gather`.

        Communicates: reduce-scatter.
        """
        return self._start_collective(
            "reduce_scatter", self._scatter_parts, x, out, self._part_bytes(x, counts), op
        )

    def all_reduce(self, x: Tensor, out: Tensor, op: Reduction = "sum") -> SharedMemoryWork:
        """Reduces the tensors of all ranks into `out`, which must not be `x`.

        Communicates: all-reduce.
        """
        if x.nbytes <= ONE_SHOT_BYTES:
            return self._start_collective("all_reduce", self._reduce_one_shot, x, out, op)
        return self._start_collective("all_reduce", self._reduce_two_shot, x, out, op)

    def all_to_all(
        self,
        x: Tensor,
        out: Tensor,
        send: Sequence[int] | None = None,
        receive: Sequence[int] | None = None,
    ) -> SharedMemoryWork:
        """Exchanges parts; send, receive: elements for and from each rank, by default equal.

        Communicates: all-to-all.
        """
        sent, received = self._part_bytes(x, send), self._part_bytes(out, receive)
        return self._start_collective("all_to_all", self._exchange_parts, x, out, sent, received)

    def broadcast(self, x: Tensor, out: Tensor, index: int) -> SharedMemoryWork:
        """Copies the tensor of the rank at `index` to `out`. Communicates: broadcast."""
        if index != self.index:
            return self._start_collective("broadcast", self._receive_tensor, out, index)
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        return self._start_collective("broadcast", self._send_tensor, x, self.peers)

    def send(self, x: Tensor, to: int) -> SharedMemoryWork:
        """Sends a tensor to the rank at index `to`. Communicates: point to point."""
        number = self._message_number(self.index, to)
        return self._start("send", number, self._send_tensor(number, x, (to,)))

    def receive(self, out: Tensor, source: int) -> SharedMemoryWork:
        """Receives a tensor from the rank at index `source`. Communicates: point to point."""
        number = self._message_number(source, self.index)
        return self._start("receive", number, self._receive_tensor(number, out, source))

    def _start_collective(
        self, what: str, collective: Callable[..., Progress], *arguments: Any
    ) -> SharedMemoryWork:
        number = self._next_number()
        return self._start(what, number, collective(number, *arguments))

    def _message_number(self, source: int, to: int) -> int:
        """Returns the number of the next message of a pair, which no collective has."""
        count = self._next_number(source, to)
        size = len(self.ranks)
        return -1 - (source + size * (to + size * count))

    def _next_number(self, *pair: int) -> int:
        numbers = self.segment.numbers
        number = numbers.get((self.key, *pair), 0)
        numbers[self.key, *pair] = number + 1
        return number

    def _start(self, what: str, number: int, progress: Progress) -> SharedMemoryWork:
        return self.segment.start(SharedMemoryWork(self, what, number, progress))

    def _part_bytes(self, whole: Tensor, counts: Sequence[int] | None) -> list[int]:
        """Returns the bytes of each part of a tensor."""
        if counts is not None:
            return [count * whole.element_size() for count in counts]
        return [whole.nbytes // len(self.ranks)] * len(self.ranks)

    # ---- messages -----------------------------------------------------------------------

    def _allocate(
        self, number: int, size: int, readers: int
    ) -> Generator[None, Message, tuple[int, int]]:
        """Returns offset and number of an allocation, once there is memory for it."""
        while (found := self.segment.allocate(size, readers, (self.key, number))) is None:
            yield None
        return found

    def _post(self, number: int, parts: Sequence[Message]) -> Generator[None, Message, None]:
        """Sends a message (peer, address, bytes) to each of several peers."""
        segment = self.segment
        offset, allocation = yield from self._allocate(
            number, sum(_align(size) for _, _, size in parts), len(parts)
        )
        for peer, address, size in parts:
            segment.write(offset, address, size)
            segment.send(self.ranks[peer], self.key, number, (offset, size, allocation))
            offset += _align(size)

    def _post_to_all(
        self, number: int, address: int, size: int, peers: Sequence[int]
    ) -> Generator[None, Message, None]:
        """Sends the same message to several peers; it is written once."""
        offset, allocation = yield from self._allocate(number, size, len(peers))
        self.segment.write(offset, address, size)
        self._announce(number, (offset, size, allocation), peers)

    def _announce(self, number: int, message: Message, peers: Sequence[int]) -> None:
        for peer in peers:
            self.segment.send(self.ranks[peer], self.key, number, message)

    def _read(self, peer: int, message: Message, address: int, expected: int) -> None:
        """Reads a message out of the segment of its sender, and acknowledges it."""
        offset, size, _ = message
        if size != expected:
            raise self._size_error(peer, size, expected)
        self.segment.read(self.ranks[peer], offset, address, size)
        self.segment.acknowledge(self.ranks[peer], message)

    def _size_error(self, peer: int, size: int, expected: int) -> RuntimeError:
        return RuntimeError(
            f"rank {self.ranks[peer]} sent {size} bytes where {expected} were expected, so the "
            "collectives or the sizes of their tensors differ between ranks"
        )

    def _reduce_messages(
        self, own: Tensor, messages: dict[int, Message], out: Tensor, op: Reduction
    ) -> None:
        """Reduces a message of each peer and the own values, in the order of the ranks."""
        parts = []
        for index, rank in enumerate(self.ranks):
            if index == self.index:
                parts.append(own)
            else:
                offset, size, _ = messages[index]
                if size != own.nbytes:
                    raise self._size_error(index, size, own.nbytes)
                parts.append(self.segment.tensor(rank, offset, size, own.dtype))
        reduce_in_order(parts, out, op)
        for index, message in messages.items():
            self.segment.acknowledge(self.ranks[index], message)

    # ---- each collective ----------------------------------------------------------------

    def _gather_parts(
        self, number: int, part: Tensor, out: Tensor, sizes: Sequence[int]
    ) -> Progress:
        starts = _starts(sizes)
        source, target = part.data_ptr(), out.data_ptr()
        own = sizes[self.index]
        sent = 0
        for start in range(0, max(sizes), CHUNK_BYTES):
            # Some chunks ahead, so that the others need not wait for this rank.
            while sent < min(own, start + CHUNKS_AHEAD * CHUNK_BYTES):
                size = min(CHUNK_BYTES, own - sent)
                yield from self._post_to_all(number, source + sent, size, self.peers)
                sent += size
            place = target + starts[self.index] + start
            # The part may already be in its place.
            if start < own and place != source + start:
                ctypes.memmove(place, source + start, min(CHUNK_BYTES, own - start))
            for peer in self.peers:
                if start < sizes[peer]:
                    message = yield peer
                    left = min(CHUNK_BYTES, sizes[peer] - start)
                    self._read(peer, message, target + starts[peer] + start, left)

    def _scatter_parts(
        self, number: int, x: Tensor, out: Tensor, sizes: Sequence[int], op: Reduction
    ) -> Progress:
        starts = _starts(sizes)
        source, itemsize = x.data_ptr(), x.element_size()
        first, size = starts[self.index], sizes[self.index]
        own, result = _flat(x)[first // itemsize : (first + size) // itemsize], _flat(out)
        chunk = _align(CHUNK_BYTES // len(self.peers))
        most = max(sizes)
        sent = 0
        for start in range(0, most, chunk):
            while sent < min(most, start + CHUNKS_AHEAD * chunk):
                parts = [
                    (peer, source + starts[peer] + sent, min(chunk, sizes[peer] - sent))
                    for peer in self.peers
                    if sent < sizes[peer]
                ]
                if parts:
                    yield from self._post(number, parts)
                sent += chunk
            if start < size:
                messages: dict[int, Message] = {}
                for peer in self.peers:
                    messages[peer] = yield peer
                if size <= chunk:
                    self._reduce_messages(own, messages, result, op)
                else:
                    span = slice(start // itemsize, min(start + chunk, size) // itemsize)
                    self._reduce_messages(own[span], messages, result[span], op)

    def _reduce_one_shot(self, number: int, x: Tensor, out: Tensor, op: Reduction) -> Progress:
        size = x.nbytes
        if size == 0:
            return
        # Written out, because small all-reduces have to be fast.
        segment, peers, ranks = self.segment, self.peers, self.ranks
        while (found := segment.allocate(size, len(peers), (self.key, number))) is None:
            yield None
        offset, allocation = found
        segment.write(offset, x.data_ptr(), size)
        for peer in peers:
            segment.send(ranks[peer], self.key, number, (offset, size, allocation))
        if len(peers) == 1:
            message = yield peers[0]
            rank = ranks[peers[0]]
            if message[1] != size:
                raise self._size_error(peers[0], message[1], size)
            theirs = segment.tensor(rank, message[0], size, x.dtype)
            # The sum of two values does not depend on their order.
            REDUCTIONS[op](_flat(x), theirs, out=_flat(out))
            segment.acknowledge(rank, message)
            return
        messages: dict[int, Message] = {}
        for peer in peers:
            messages[peer] = yield peer
        self._reduce_messages(_flat(x), messages, _flat(out), op)

    def _reduce_two_shot(self, number: int, x: Tensor, out: Tensor, op: Reduction) -> Progress:
        """Reduce-scatter, then all-gather, of one chunk after the other."""
        flat, result = _flat(x), _flat(out)
        itemsize, size = x.element_size(), len(self.ranks)
        # Each chunk has a block for each rank; the last chunk is smaller.
        block = _align(CHUNK_BYTES // len(self.peers)) // itemsize
        firsts = range(0, flat.numel(), block * size)

        def block_of(first: int, index: int) -> tuple[int, int]:
            """Returns start and end of the block of a rank in the chunk that starts at `first`."""
            length = min(block * size, flat.numel() - first)
            share = -(-length // size)
            start = min(index * share, length)
            return first + start, first + min(start + share, length)

        def scatter(first: int) -> Generator[None, Message, None]:
            spans = [(peer, *block_of(first, peer)) for peer in self.peers]
            address = flat.data_ptr()
            parts = [
                (peer, address + start * itemsize, (end - start) * itemsize)
                for peer, start, end in spans
                if end > start
            ]
            if parts:
                yield from self._post(number, parts)

        def gather(first: int) -> Progress:
            for peer in self.peers:
                start, end = block_of(first, peer)
                if end > start:
                    message = yield peer
                    length = (end - start) * itemsize
                    self._read(peer, message, result.data_ptr() + start * itemsize, length)

        for first in firsts[:CHUNKS_AHEAD]:
            yield from scatter(first)
        for position, first in enumerate(firsts):
            start, end = block_of(first, self.index)
            if end > start:
                messages: dict[int, Message] = {}
                for peer in self.peers:
                    messages[peer] = yield peer
                # Read first: what this rank sends next may have to wait for memory.
                self._reduce_messages(flat[start:end], messages, result[start:end], op)
                address, length = result.data_ptr() + start * itemsize, (end - start) * itemsize
                yield from self._post_to_all(number, address, length, self.peers)
            # The order in which messages are sent is the order in which the others read them.
            if position + CHUNKS_AHEAD < len(firsts):
                yield from scatter(firsts[position + CHUNKS_AHEAD])
            if position >= CHUNKS_AHEAD - 1:
                yield from gather(firsts[position - CHUNKS_AHEAD + 1])
        for first in firsts[max(len(firsts) - CHUNKS_AHEAD + 1, 0) :]:
            yield from gather(first)

    def _exchange_parts(
        self, number: int, x: Tensor, out: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Progress:
        from_, to = _starts(sent), _starts(received)
        source, target = x.data_ptr(), out.data_ptr()
        mine = self.index
        done = 0
        most = max(*sent, *received)
        for start in range(0, most, CHUNK_BYTES):
            while done < min(most, start + CHUNKS_AHEAD * CHUNK_BYTES):
                for peer in self.peers:
                    if done < sent[peer]:
                        size = min(CHUNK_BYTES, sent[peer] - done)
                        yield from self._post(number, [(peer, source + from_[peer] + done, size)])
                done += CHUNK_BYTES
            if start == 0:
                assert sent[mine] == received[mine], (sent, received)
                ctypes.memmove(target + to[mine], source + from_[mine], sent[mine])
            for peer in self.peers:
                if start < received[peer]:
                    message = yield peer
                    left = min(CHUNK_BYTES, received[peer] - start)
                    self._read(peer, message, target + to[peer] + start, left)

    def _send_tensor(self, number: int, x: Tensor, peers: Sequence[int]) -> Progress:
        for start in range(0, x.nbytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, x.nbytes - start)
            yield from self._post_to_all(number, x.data_ptr() + start, size, peers)

    def _receive_tensor(self, number: int, out: Tensor, source: int) -> Progress:
        for start in range(0, out.nbytes, CHUNK_BYTES):
            message = yield source
            left = min(CHUNK_BYTES, out.nbytes - start)
            self._read(source, message, out.data_ptr() + start, left)


def _flat(x: Tensor) -> Tensor:
    """Returns a contiguous tensor with one dim."""
    if x.dim() == 1:
        return x
    return x.view(-1)


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _starts(sizes: Sequence[int]) -> list[int]:
    """Returns the start of each part."""
    return [0, *itertools.accumulate(sizes)][:-1]
