"""Collectives of the CUDA ranks of one node through torch's symmetric memory.

Every rank has a buffer that all ranks of the group can read. A collective copies its input into the
buffer of its rank, waits for the other ranks, and reads their buffers. `n` is the size of the whole
tensor, `p` the number of ranks:

    one-shot all-reduce   every rank adds all of every buffer: one round, each rank reads n·p
    two-shot all-reduce   every rank adds one chunk of every buffer, then all ranks copy the sums:
                          two rounds, each rank reads 2·n
    all_gather            every rank copies all buffers
    reduce_scatter        every rank adds its part of every buffer

Sums are the bits of the plain sum: from left to right in the order of the ranks, in fp32 for 16-bit
dtypes and rounded once, so that all ranks get the same bits. Ranks wait for each other in barriers
on the device; the host never waits. Each collective ends with a barrier, after which its buffer can
be overwritten. Calls can therefore be captured in a CUDA graph; all ranks must then replay it
equally often.

A barrier that waits too long prints the missing rank and stops its kernel, and the next use of CUDA
raises an error.

Not supported: multicast, which does not add in a fixed order, ranks of several nodes, and other
reductions than sums.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from ranvier.errors import CommunicationError

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int64, torch.int32),
)
HALF_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes that are added in fp32."""
DEFAULT_CAPACITY = 64 * 2**20
"""Bytes of the largest input."""
ALIGNMENT = 16
"""Bytes of the widest memory access of a CUDA kernel."""
TORCH_KERNEL_SIZES = {torch.float32: (2, 4, 8), torch.bfloat16: (2,)}
"""Numbers of ranks for which torch's all-reduce kernels return the bits of the plain sum. They add
in the order of the ranks, but round bf16 after each addition, and for other numbers of ranks they
start from +0, which changes the sign of a sum of negative zeros."""


class SymmetricBuffers:
    """Collectives over one buffer per rank that all ranks can read, on the current stream.

    buffers: the bytes of all ranks, in the order in which they are added and gathered. barrier:
    makes the stream of this rank wait for those of all others, and their writes visible. All ranks
    must issue the same collectives in the same order.
    """

    def __init__(self, buffers: Sequence[Tensor], index: int, barrier: Callable[[], None]) -> None:
        self.size = len(buffers)
        self.index = index
        self.barrier = barrier
        self._views = {dtype: [buffer.view(dtype) for buffer in buffers] for dtype in DTYPES}

    def one_shot_all_reduce(self, output: Tensor, x: Tensor) -> None:
        """Stores the sum of `x` of all ranks in `output`, added by every rank.

        x, output: the same shape. Communicates: one round, n·(p-1) bytes read by each rank.
        """
        parts = self._exchange(x)
        sum_in_order(parts, out=output.view(-1))
        self.barrier()

    def two_shot_all_reduce(self, output: Tensor, x: Tensor) -> None:
        """Stores the sum of `x` of all ranks in `output`, a chunk of it added by each rank.

        x, output: the same shape. Communicates: two rounds, 2·n·(p-1)/p bytes read by each rank.
        """
        parts = self._exchange(x)
        chunks = chunk_ranges(x.numel(), self.size, ALIGNMENT // x.element_size())
        start, stop = chunks[self.index]
        if start < stop:
            # No other rank reads this chunk of this buffer until the next barrier.
            addends = [part[start:stop] for part in parts]
            sum_in_order(addends, out=addends[self.index])
        self.barrier()
        pieces = [part[start:stop] for part, (start, stop) in zip(parts, chunks, strict=True)]
        torch.cat(pieces, out=output.view(-1))
        self.barrier()

    def all_gather(self, output: Tensor, x: Tensor) -> None:
        """Stores `x` of all ranks in `output`, one after the other.

        x: `[n/p]`; output: `[n]`. Communicates: one round, n·(p-1)/p bytes read by each rank.
        """
        parts = self._exchange(x)
        torch.cat(parts, out=output.view(-1))
        self.barrier()

    def reduce_scatter(self, output: Tensor, x: Tensor) -> None:
        """Stores this rank's part of the sum of `x` of all ranks in `output`.

        x: `[n]`; output: `[n/p]`. Communicates: one round, n·(p-1)/p bytes read by each rank.
        """
        parts = self._exchange(x)
        start = self.index * output.numel()
        addends = [part[start : start + output.numel()] for part in parts]
        sum_in_order(addends, out=output.view(-1))
        self.barrier()

    def publish(self, x: Tensor) -> Tensor:
        """Copies `x` into the buffer of this rank and returns it there, flat."""
        own = self._views[x.dtype][self.index][: x.numel()]
        own.view(x.shape).copy_(x)
        return own

    def _exchange(self, x: Tensor) -> list[Tensor]:
        """Publishes `x` and returns that of all ranks, flat, in order."""
        self.publish(x)
        self.barrier()
        return [view[: x.numel()] for view in self._views[x.dtype]]


def sum_in_order(addends: Sequence[Tensor], *, out: Tensor) -> None:
    """Stores the sum in `out`, added from left to right, in fp32 for 16-bit dtypes, rounded once.

    `out` may be one of the addends.
    """
    first, second, *others = addends
    if not others:
        # A single addition is computed in fp32 and rounded once for 16-bit dtypes.
        torch.add(first, second, out=out)
        return
    if out.dtype in HALF_DTYPES:
        total = first.float().add_(second)
    else:
        total = first + second
    *inner, last = others
    for addend in inner:
        total.add_(addend)
    # `out` is written only after all addends have been read.
    if out.dtype in HALF_DTYPES:
        out.copy_(total.add_(last))
    else:
        torch.add(total, last, out=out)


def chunk_ranges(total: int, count: int, multiple: int) -> list[tuple[int, int]]:
    """Returns the ranges of `count` chunks of `total` elements.

    All but the last have the same multiple of `multiple` elements; the last ones may be empty.
    """
    length = -(-total // (count * multiple)) * multiple
    starts = [min(i * length, total) for i in range(count + 1)]
    return [(starts[i], starts[i + 1]) for i in range(count)]


class SymmetricMemoryWork:
    """A collective in progress, with the `wait` of c10d's `Work`. It must be waited for."""

    def __init__(self, device: torch.device, event: torch.cuda.Event | None, *used: Tensor) -> None:
        self._device = device
        self._event = event
        # Their memory must not be reused before the collective is done with it.
        self._used = used
        self.done_time: float | None = None
        self.sent_bytes: int | None = None
        self.num_rounds: int | None = None

    def wait(self) -> bool:
        """Makes the current stream wait for the result; the host does not wait."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
        self._used = ()
        return True


class SymmetricMemoryCommunicator:
    """Collectives of a group of CUDA ranks on one node. Communicates: with all of them.

    All ranks must create it at the same time, with the same arguments, after `availability` has
    returned nothing. Torch numbers the rendezvous of a process over all of its groups
    (pytorch/pytorch#196082), so the ranks of a group must have created equally many before. It must
    outlive the CUDA graphs that contain its calls.

    order: the position in the group of each rank of an axis (`Axis.order`), in which ranks are
    added and gathered; None means that of the group. use_torch_kernels: use torch's all-reduce
    kernels where they return the same bits. They need fewer launches, but wait for other ranks
    without a time limit.
    """

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        *,
        capacity: int = DEFAULT_CAPACITY,
        order: Sequence[int] | None = None,
        timeout_seconds: float = 600.0,
        use_torch_kernels: bool = False,
    ) -> None:
        self.group = group
        self.device = torch.device("cuda", _device_index(device))
        self.size = group.size()
        assert self.size > 1, "a group of one rank needs no communication"
        self.order = tuple(range(self.size)) if order is None else tuple(order)
        assert sorted(self.order) == list(range(self.size)), self.order
        self.index = self.order.index(group.rank())
        """Index of this rank in the order."""
        self.capacity = -(-capacity // ALIGNMENT) * ALIGNMENT
        self.use_torch_kernels = use_torch_kernels
        # Short work that the compute stream waits for is scheduled first.
        self._stream = torch.cuda.Stream(self.device, priority=-1)
        with _raise_together(group, "Symmetric memory could not be allocated"):
            self._handle, self._buffer = _allocate(group, self.device, self.capacity)
        # These tensors do not keep the memory of other ranks; the handle does.
        buffers = [
            self._handle.get_buffer(position, (self.capacity,), torch.uint8)
            for position in self.order
        ]
        # Torch's kernels accept only the tensor that was allocated.
        buffers[self.index] = self._buffer
        # Not a method: a reference cycle would postpone the end of the memory, which waits for all
        # kernels, to any later time.
        barrier = partial(
            self._handle.barrier, channel=0, timeout_ms=max(int(1e3 * timeout_seconds), 1)
        )
        self.buffers = SymmetricBuffers(buffers, self.index, barrier)
        with _raise_together(group, "Symmetric memory does not work"):
            self._load_kernels()

    def limitation(self, x: Tensor) -> str:
        """Returns why the collectives cannot take this input; empty if they can."""
        if x.device != self.device:
            return f"the tensor is on {x.device}, not on {self.device}"
        if x.dtype not in DTYPES:
            return f"{x.dtype} is not one of {', '.join(map(str, DTYPES))}"
        if x.numel() * x.element_size() > self.capacity:
            return f"{x.numel() * x.element_size()} bytes exceed the capacity of {self.capacity}"
        return ""

    def one_shot_all_reduce(
        self, output: Tensor, x: Tensor, *, async_op: bool = False
    ) -> SymmetricMemoryWork:
        """Stores the sum of `x` of all ranks in `output`, added by every rank. Communicates: one
        round over the group.

        `output` may be `x`. async_op: run in parallel with the current stream until the result is
        waited for.
        """
        assert x.shape == output.shape, (x.shape, output.shape)
        if self._can_use_torch_kernel(output, x):
            collective = self._one_shot_by_torch
        else:
            collective = self.buffers.one_shot_all_reduce
        return self._run(collective, output, x, async_op)

    def two_shot_all_reduce(
        self, output: Tensor, x: Tensor, *, async_op: bool = False
    ) -> SymmetricMemoryWork:
        """Stores the sum of `x` of all ranks in `output`, a chunk of it added by each rank.
        Communicates: two rounds over the group.

        `output` may be `x`. async_op: as for `one_shot_all_reduce`.
        """
        assert x.shape == output.shape, (x.shape, output.shape)
        if self._can_use_torch_kernel(output, x):
            collective = self._two_shot_by_torch
        else:
            collective = self.buffers.two_shot_all_reduce
        return self._run(collective, output, x, async_op)

    def all_gather(
        self, output: Tensor, x: Tensor, *, async_op: bool = False
    ) -> SymmetricMemoryWork:
        """Stores `x` of all ranks in `output`, one after the other. Communicates: one round over
        the group.

        x: `[n, ...]`; output: `[n·size, ...]`. async_op: as for `one_shot_all_reduce`.
        """
        assert output.numel() == self.size * x.numel(), (x.shape, output.shape)
        return self._run(self.buffers.all_gather, output, x, async_op)

    def reduce_scatter(
        self, output: Tensor, x: Tensor, *, async_op: bool = False
    ) -> SymmetricMemoryWork:
        """Stores this rank's part of the sum of `x` of all ranks in `output`. Communicates: one
        round over the group.

        x: `[n·size, ...]`; output: `[n, ...]`. async_op: as for `one_shot_all_reduce`.
        """
        assert x.numel() == self.size * output.numel(), (x.shape, output.shape)
        return self._run(self.buffers.reduce_scatter, output, x, async_op)

    def _run(
        self,
        collective: Callable[[Tensor, Tensor], None],
        output: Tensor,
        x: Tensor,
        async_op: bool,
    ) -> SymmetricMemoryWork:
        """Runs a collective after all earlier ones, which may be on another stream."""
        reason = self.limitation(x)
        assert not reason, reason
        assert output.is_contiguous() and output.dtype == x.dtype, (output.shape, output.dtype)
        if not x.numel():
            return SymmetricMemoryWork(self.device, None)
        own = self._stream
        current = torch.cuda.current_stream(self.device)
        with torch.no_grad():
            # A captured stream cannot wait for earlier work of another stream before that stream
            # has joined the capture.
            if not async_op and not torch.cuda.is_current_stream_capturing():
                current.wait_stream(own)
                collective(output, x)
                own.wait_stream(current)
                return SymmetricMemoryWork(self.device, None)
            own.wait_stream(current)
            with torch.cuda.stream(own):
                collective(output, x)
        work = SymmetricMemoryWork(self.device, own.record_event(), output, x)
        if not async_op:
            work.wait()
        return work

    def _can_use_torch_kernel(self, output: Tensor, x: Tensor) -> bool:
        """Whether torch's kernels accept these tensors and return the bits of the plain sum."""
        return (
            self.use_torch_kernels
            and self.size in TORCH_KERNEL_SIZES.get(x.dtype, ())
            # Two values have the same sum in either order.
            and (self.size == 2 or self.order == tuple(range(self.size)))
            and x.numel() * x.element_size() % ALIGNMENT == 0
            and output.data_ptr() % ALIGNMENT == 0
            and output.storage_offset() * output.element_size() % ALIGNMENT == 0
        )

    def _one_shot_by_torch(self, output: Tensor, x: Tensor) -> None:
        own = self.buffers.publish(x)
        torch.ops.symm_mem.one_shot_all_reduce_out(
            own, "sum", self.group.group_name, output.view(-1)
        )

    def _two_shot_by_torch(self, output: Tensor, x: Tensor) -> None:
        own = self.buffers.publish(x)
        torch.ops.symm_mem.two_shot_all_reduce_(own, "sum", self.group.group_name)
        # The kernel has stored the sum in the buffers of all ranks.
        output.view(-1).copy_(own)

    def _load_kernels(self) -> None:
        """Runs every collective once with each dtype and checks its result.

        The first launch of a kernel loads it, which waits for all running kernels. It must not
        happen later, while a kernel waits for another rank.
        """
        size = self.size
        wrong: list[str] = []

        def check(name: str, dtype: torch.dtype, have: Tensor, want: Tensor) -> None:
            if not torch.equal(have, want.to(dtype).expand_as(have)):
                wrong.append(f"{name} of {dtype} is {have.tolist()}")

        total = torch.tensor(size * (size + 1) // 2, device=self.device)
        # Kernels differ for sizes and addresses that are multiples of 16 bytes and others.
        for length, offset in ((ALIGNMENT, 0), (1, 1)):
            places = torch.arange(1, size + 1, device=self.device).repeat_interleave(length)
            for dtype in DTYPES:
                x = torch.full((size * length,), self.index + 1, dtype=dtype, device=self.device)
                output = torch.zeros(size * length + offset, dtype=dtype, device=self.device)
                output = output[offset:]
                self.one_shot_all_reduce(output, x)
                check("one-shot all-reduce", dtype, output, total)
                self.two_shot_all_reduce(output, x)
                check("two-shot all-reduce", dtype, output, total)
                self.all_gather(output, x[:length])
                check("all_gather", dtype, output, places)
                self.reduce_scatter(output[:length], x)
                check("reduce_scatter", dtype, output[:length], total)
        if wrong:
            raise RuntimeError("; ".join(wrong))


def _allocate(group: ProcessGroup, device: torch.device, capacity: int) -> tuple[Any, Tensor]:
    """Returns torch's handle of the buffers of all ranks, and the buffer of this rank."""
    # Imported here, because not every build of torch has it.
    from torch._C._distributed_c10d import _SymmetricMemory
    from torch.distributed import _symmetric_memory

    # `_symmetric_memory.empty` takes memory from a pool, where buffers of several groups may share
    # an allocation; torch's kernels ignore their offsets in it.
    buffer = _SymmetricMemory.empty_strided_p2p((capacity,), (1,), torch.uint8, device)
    handle = _symmetric_memory.rendezvous(buffer, group)
    own = handle.get_buffer(group.rank(), (capacity,), torch.uint8)
    if own.data_ptr() != buffer.data_ptr():
        raise RuntimeError("torch returned the address of another buffer")
    return handle, buffer


@contextlib.contextmanager
def _raise_together(group: ProcessGroup, what: str) -> Iterator[None]:
    """Raises an error on all ranks if one of them fails inside. Communicates: an object per rank
    over the group."""
    failure: RuntimeError | None = None
    try:
        yield
    except RuntimeError as error:
        failure = error
    first_line = str(failure or "").partition("\n")[0]
    failures = _gather_objects(f"{type(failure).__name__}: {first_line}" if failure else "", group)
    for rank, text in zip(distributed.get_process_group_ranks(group), failures, strict=True):
        if text:
            raise CommunicationError(
                f"{what} on rank {rank}: {text}. The ranks of a group must share a node, and their "
                "devices must be able to read each other's memory. Use comm.algorithm=native."
            ) from failure


def _gather_objects(mine: Any, group: ProcessGroup) -> list[Any]:
    """Returns the objects of all ranks. Communicates: all-gather over the group."""
    found: list[Any] = [None] * group.size()
    distributed.all_gather_object(found, mine, group=group)
    return found


@dataclass(frozen=True)
class RankDevice:
    """What the ranks of a group compare before they share memory."""

    rank: int
    problem: str
    """Why this rank alone cannot use symmetric memory; empty if it can."""
    host: str = ""
    device: int = 0
    uuid: str = ""
    """Identity of its device."""
    visible: tuple[str, ...] = ()
    """Devices that this process can see."""
    accessible: tuple[str, ...] = ()
    """Those of them that its device can read."""
    allows_overlap: bool = False
    """Whether it may share its device with another rank."""


def availability(group: ProcessGroup, device: torch.device, *, share_gpu: bool = False) -> str:
    """Returns why the ranks of a group cannot use symmetric memory; empty if they can.

    All ranks get the same answer. share_gpu: whether ranks may share a device, which torch has to
    allow as well. Communicates: an object per rank over the group.
    """
    mine = describe_device(distributed.get_rank(), device, share_gpu=share_gpu)
    return find_obstacle(_gather_objects(mine, group))


def find_obstacle(ranks: Sequence[RankDevice]) -> str:
    """Returns why these ranks cannot share memory; empty if they can."""
    for one in ranks:
        if one.problem:
            return f"rank {one.rank}: {one.problem}"
    for one, other in combinations(ranks, 2):
        pair = f"ranks {one.rank} and {other.rank}"
        if one.host != other.host:
            return f"{pair} are on different nodes"
        # Torch compares indices, which may be the same for different devices if each process sees
        # only its own.
        if one.device == other.device and not (one.allows_overlap and other.allows_overlap):
            return f"{pair} both use cuda:{one.device}; launch.share_gpu allows it for tests"
        for reader, owner in ((one, other), (other, one)):
            hidden = owner.uuid not in reader.visible or owner.uuid == reader.uuid
            if not hidden and owner.uuid not in reader.accessible:
                return f"the device of rank {reader.rank} cannot read that of rank {owner.rank}"
    return ""


def describe_device(rank: int, device: torch.device, *, share_gpu: bool) -> RankDevice:
    """Returns what the other ranks need to know of this one."""
    problem = local_limitation(device)
    if problem:
        return RankDevice(rank, problem)
    index = _device_index(device)
    visible = [str(_device_uuid(i)) for i in range(torch.cuda.device_count())]
    accessible = [
        uuid
        for i, uuid in enumerate(visible)
        if i != index and torch.cuda.can_device_access_peer(index, i)
    ]
    return RankDevice(
        rank=rank,
        problem="",
        host=_host_identity(),
        device=index,
        uuid=visible[index],
        visible=tuple(visible),
        accessible=tuple(accessible),
        allows_overlap=share_gpu,
    )


def local_limitation(device: torch.device) -> str:
    """Returns why this process cannot use symmetric memory, whatever the other ranks do; empty if
    it can."""
    if device.type != "cuda":
        return f"symmetric memory needs CUDA tensors, not tensors on {device.type}"
    if not torch.cuda.is_available():
        return "torch cannot use a CUDA device"
    try:
        from torch.distributed import _symmetric_memory
    except ImportError:
        return f"torch {torch.__version__} has no symmetric memory"
    backend = _symmetric_memory.get_backend(device)
    # Others, such as NVSHMEM, have no buffers that ATen's operations can read.
    if backend != "CUDA":
        return f"torch's symmetric memory uses {backend or 'no backend'}; unset TORCH_SYMMMEM"
    return ""


def _device_index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _device_uuid(index: int) -> Any:
    return getattr(torch.cuda.get_device_properties(index), "uuid", index)


def _host_identity() -> str:
    """Identifies the running system of this process, regardless of host names set for NCCL.

    Torch sends memory handles to process IDs, so processes must also share their namespace.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
