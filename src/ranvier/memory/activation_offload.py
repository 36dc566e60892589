"""Activations on the host: a share of what blocks keep waits there for backward.

What autograd saves in a block, and what the block keeps for its second run, passes through `pack`.
When the block has run, a share of the bytes is copied to the host on a lane of its own; their
memory on the device is given back when the next block has run, which hides the copies. In backward
the first tensor that a block asks for starts the copies of the block before it:

    forward    block i computes | block i + 1 computes | block i + 2 computes
               out                block i                block i + 1
               given back                              block i

    backward   block i + 1 computes | block i computes | block i - 1 computes
               in          block i    block i - 1        block i - 2

So a device holds what stays and, besides, what goes of at most two blocks. Memory is kept by whole
storages: those go, each once, whatever views of it are saved. Weights and small tensors stay, and
the last block, whose backward comes next. Not handled: recorded steps (CUDA graphs).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from ranvier.comm.collectives import hide_from_dispatch_modes
from ranvier.comm.streams import SideStream, StreamEvent, record_current_event, wait_for_event
from ranvier.errors import PlanError
from ranvier.memory.host_pool import HostBufferPool
from ranvier.memory.saved_results import check_unchanged

MIN_OFFLOAD_BYTES = 2**20
"""Bytes below which a copy takes longer to start than to do."""


@dataclass(frozen=True)
class _StridedLayout:
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of_tensor(cls, x: Tensor) -> _StridedLayout:
        """That of a tensor."""
        return cls(x.dtype, int(x.storage_offset()), tuple(x.shape), x.stride())

    def view_on_storage(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor on another storage."""
        made = torch.empty(0, dtype=self.dtype, device=storage.device)
        return made.set_(storage, self.start, self.shape, self.stride)


@dataclass(eq=False)
class PackedActivation:
    """What stands for a tensor in autograd's graph."""

    call: _BlockCall | None
    tensor: Tensor | None
    """The tensor itself, as long as its memory is there."""
    version: int
    """How often it had been changed."""
    storage: SavedStorage | None = None
    layout: _StridedLayout | None = None


@dataclass(eq=False)
class SavedStorage:
    """A storage that backward needs: on the device, on the host, or on its way."""

    pool: HostBufferPool
    size: int
    device_buffer: Tensor | None
    """Its bytes on the device."""
    users: list[weakref.ref[PackedActivation]] = field(default_factory=list)
    """Tensors of it that hold its memory."""
    host_buffer: Tensor | None = None
    """Its bytes on the host."""
    copied_version: int = -1
    """How often it had been changed when it was copied there; -1: it was not."""
    copy_event: StreamEvent = None
    """When the last copy is done, out or in."""
    fetch_stream: SideStream | None = None
    """On which it comes, until somebody has waited for it."""

    def is_changed(self, x: Tensor) -> bool:
        """Whether a tensor of the same storage is no longer what was copied."""
        return self.copied_version >= 0 and x._version != self.copied_version

    def copy_to_host(self, lane: SideStream, now: StreamEvent) -> bool:
        """Start to copy it to the host; not if somebody has written to it: then it is refused."""
        packed = [user for user in (reference() for reference in self.users) if user is not None]
        versions = {user.version for user in packed}
        changed = any(
            user.tensor is not None and user.tensor._version != user.version for user in packed
        )
        if self.device_buffer is None or changed or len(versions) != 1:
            return False
        (self.copied_version,) = versions
        self.host_buffer, free = self.pool.take_buffer(self.size)
        with lane.run_after(now, free):
            self.host_buffer.copy_(self.device_buffer, non_blocking=True)
        self.copy_event = lane.record_event()
        return True

    def free_device_memory(self) -> None:
        """Give its memory on the device back; the device has copied it by then."""
        if self.device_buffer is None or self.host_buffer is None:
            return
        wait_for_event(self.copy_event, self.device_buffer.device)
        for user in (reference() for reference in self.users):
            if user is not None:
                user.tensor = None
        self.device_buffer = None
        self.users = []

    def copy_to_device(self, lane: SideStream, now: StreamEvent) -> None:
        """Start to copy it back; the host's bytes are free as soon as that is done."""
        if self.device_buffer is not None or self.host_buffer is None:
            return
        self.device_buffer = torch.empty(self.size, dtype=torch.uint8, device=lane.device)
        with lane.run_after(now, self.copy_event):
            self.device_buffer.copy_(self.host_buffer, non_blocking=True)
        self.copy_event = lane.record_event()
        self.fetch_stream = lane
        self.pool.return_buffer(self.host_buffer, self.copy_event)
        self.host_buffer = None

    def view_tensor(self, how: _StridedLayout) -> Tensor:
        """A tensor of it, once it has come."""
        assert self.device_buffer is not None, how
        if self.fetch_stream is not None:
            wait_for_event(self.copy_event, self.device_buffer.device)
            self.fetch_stream = None
        return how.view_on_storage(self.device_buffer.untyped_storage())

    def __del__(self) -> None:
        if self.host_buffer is not None:
            self.pool.return_buffer(self.host_buffer, self.copy_event)
        if (
            self.fetch_stream is not None
            and self.fetch_stream.stream is not None
            and self.device_buffer is not None
        ):
            self.device_buffer.record_stream(
                self.fetch_stream.stream
            )  # nobody has waited for the copy


@dataclass(eq=False)
class _BlockCall:
    """A call of a block: what was kept in it, and the call before it in the same pass."""

    name: str
    previous_call: _BlockCall | None
    saved_storages: list[weakref.ref[SavedStorage]] = field(default_factory=list)
    """Weakly: what backward has used goes as it would without us."""
    reached_by_backward: bool = False
    """Whether backward has come here."""

    def live_storages(self) -> list[SavedStorage]:
        """What of it is still needed, each once."""
        found = (reference() for reference in self.saved_storages)
        return list(dict.fromkeys(kept for kept in found if kept is not None))


class ActivationOffload:
    """A store (`comm.results`) that keeps a share of the bytes of blocks on the host."""

    def __init__(
        self,
        share: float,
        blocks: Sequence[str],
        device: torch.device,
        *,
        weights: Callable[[], Iterable[Tensor]],
        pool: HostBufferPool,
        last: str = "",
        small: int = MIN_OFFLOAD_BYTES,
    ) -> None:
        """blocks: those of this rank. weights: what stays anyway. last: a block that stays."""
        if not 0.0 <= share <= 1.0:
            raise PlanError(
                f"memory.activations={share} reached the blocks. It is a share in [0, 1]; -1 is "
                "settled before (memory.fit=auto). Use for example 0.5."
            )
        self.blocks = list(blocks)
        self.device = device
        self.weights = weights
        self.pool = pool
        self.last_block = last
        self.min_bytes = small
        others = len([name for name in blocks if name != last])
        if others:
            self.offload_fraction = min(share * len(blocks) / others, 1.0)
        else:
            self.offload_fraction = 0.0
        """Of the bytes of blocks that do not stay what goes."""
        self.offloaded_bytes = 0
        """Bytes copied to the host so far."""
        self._to_host_stream, self._to_device_stream = SideStream(device), SideStream(device)
        self._current_call: _BlockCall | None = None
        self._previous_call: _BlockCall | None = None
        self._leaving_storages: list[weakref.ref[SavedStorage]] = []
        self._storages_by_id: dict[int, tuple[StorageWeakRef, weakref.ref[SavedStorage]]] = {}
        self._weight_storages: set[int] = set()
        self._due_bytes = 0.0
        """Bytes that should have gone by now, less those that have."""
        self._start_phase: float | None = None
        """The same in tensors, where a pass does not begin with the first block."""
        self._live_storages: weakref.WeakSet[SavedStorage] = weakref.WeakSet()

    def saved_bytes(self) -> tuple[int, int]:
        """Bytes that wait for backward, on the device and on the host."""
        living = list(self._live_storages)
        device = sum(kept.size for kept in living if kept.device_buffer is not None)
        return device, sum(kept.size for kept in living if kept.host_buffer is not None)

    # ---- forward ------------------------------------------------------------------------

    @contextmanager
    def block_context(self, name: str) -> Iterator[None]:
        """See `Store`."""
        if name not in self.blocks or not torch.is_grad_enabled() or self.offload_fraction == 0.0:
            yield
            return
        outer = self._current_call
        self._current_call = self._begin_call(name)
        try:
            with saved_tensors_hooks(self.pack, self.unpack):
                yield
            with hide_from_dispatch_modes():
                self._offload_call(self._current_call)
        finally:
            self._previous_call = self._current_call
            self._current_call = outer

    def _begin_call(self, name: str) -> _BlockCall:
        """A new call; blocks that follow each other belong to one pass."""
        path, number = _block_position(name)
        if self._previous_call is not None and _block_position(self._previous_call.name) == (
            path,
            number - 1,
        ):
            return _BlockCall(name, self._previous_call)
        self._weight_storages = {x.untyped_storage()._cdata for x in self.weights()}
        self._storages_by_id = {
            at: one for at, one in self._storages_by_id.items() if not one[0].expired()
        }
        self._start_phase = math.fmod(self.offload_fraction * self.blocks.index(name), 1.0)
        with hide_from_dispatch_modes():
            self.pool.merge_buffers()
        return _BlockCall(name, None)

    def pack(self, x: Tensor) -> PackedActivation:
        """See `Store`."""
        packed = PackedActivation(self._current_call, x, x._version)
        plain = type(x) is Tensor and x.layout is torch.strided and x.device == self.device
        if self._current_call is None or not plain or x.is_conj() or x.is_neg():
            return packed
        storage = x.untyped_storage()
        if storage.nbytes() == 0 or storage._cdata in self._weight_storages:
            return packed
        packed.storage, packed.layout = self._saved_storage(x, storage), _StridedLayout.of_tensor(x)
        self._current_call.saved_storages.append(weakref.ref(packed.storage))
        if packed.storage.device_buffer is None:  # it is on the host already
            packed.tensor = None
        else:
            packed.storage.users.append(weakref.ref(packed))
        return packed

    def _saved_storage(self, x: Tensor, storage: torch.UntypedStorage) -> SavedStorage:
        """The storage of a tensor; the same for all tensors of it."""
        reference, known = self._storages_by_id.get(storage._cdata, (None, None))
        if reference is None or reference.expired() or known is None:
            kept = None
        else:
            kept = known()
        if kept is not None and not kept.is_changed(x):
            return kept
        with hide_from_dispatch_modes():
            flat = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)
        kept = SavedStorage(self.pool, storage.nbytes(), flat)
        self._storages_by_id[storage._cdata] = (StorageWeakRef(storage), weakref.ref(kept))
        self._live_storages.add(kept)
        return kept

    def _offload_call(self, call: _BlockCall) -> None:
        """Start to copy a share of what a call has kept; what went before it leaves the device."""
        for reference in self._leaving_storages:
            kept = reference()
            if kept is not None:
                kept.free_device_memory()
        self._leaving_storages, now = [], record_current_event(self.device)
        for kept in call.live_storages() if call.name != self.last_block else []:
            if kept.size < self.min_bytes or kept.copied_version >= 0:
                continue
            if self._start_phase is not None:
                self._due_bytes = self._start_phase * kept.size
                self._start_phase = None
            self._due_bytes += self.offload_fraction * kept.size
            if self._due_bytes >= kept.size * (1.0 - 1e-9) and kept.copy_to_host(
                self._to_host_stream, now
            ):
                self._due_bytes -= kept.size
                self._leaving_storages.append(weakref.ref(kept))
                self.offloaded_bytes += kept.size

    # ---- backward -----------------------------------------------------------------------

    def unpack(self, packed: PackedActivation) -> Tensor:
        """See `Store`."""
        call = packed.call
        if call is not None and not call.reached_by_backward:
            call.reached_by_backward = True
            with hide_from_dispatch_modes():
                self._fetch_storages(call.live_storages())
                self._fetch_storages(
                    call.previous_call.live_storages() if call.previous_call is not None else []
                )
        if packed.tensor is not None:
            return check_unchanged(packed.tensor, packed.version)
        assert packed.storage is not None and packed.layout is not None
        with hide_from_dispatch_modes():
            self._fetch_storages([packed.storage])
            return packed.storage.view_tensor(packed.layout)

    def _fetch_storages(self, some: Iterable[SavedStorage]) -> None:
        """Start to bring what is not here."""
        away = [kept for kept in some if kept.device_buffer is None]
        if away:
            now = record_current_event(self.device)
        else:
            now = None
        for kept in away:
            kept.copy_to_device(self._to_device_stream, now)


def _block_position(name: str) -> tuple[str, int]:
    """The list that a block is in, and its number there."""
    path, _, number = name.rpartition(".")
    return path, int(number)
