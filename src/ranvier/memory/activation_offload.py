"""Activation offload: stores a fraction of the saved activations of blocks on the host.

All tensors that autograd saves in a block, and that the block saves for its recomputation, pass
through `pack`. After the block has run, a fraction of their bytes is copied to the host on a side
stream; the device memory is freed after the next block has run, which hides the copies. In backward
the first tensor that a block unpacks starts the copies of the previous block:

    forward    block i computes | block i + 1 computes | block i + 2 computes
    offload                       block i                block i + 1
    freed                                                block i

    backward   block i + 1 computes | block i computes | block i - 1 computes
    fetch                  block i    block i - 1        block i - 2

The device thus stores all activations that are not offloaded, and the offloaded part of at most two
blocks. Whole storages are offloaded: each is copied once, even if several views of it are saved.
Weights, small tensors and the last block, whose backward runs next, stay on the device. Not
supported: CUDA graphs.
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
from ranvier.memory.host import HostBufferPool
from ranvier.memory.saved_results import check_unchanged

MIN_OFFLOAD_BYTES = 2**20
"""Minimum bytes of a storage to be offloaded; launching a smaller copy would take longer than the
copy."""


@dataclass(frozen=True)
class _StridedLayout:
    """Dtype, offset, shape and strides of a tensor in its storage."""

    dtype: torch.dtype
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of_tensor(cls, x: Tensor) -> _StridedLayout:
        """Returns the layout of a tensor."""
        return cls(x.dtype, int(x.storage_offset()), tuple(x.shape), x.stride())

    def view_on_storage(self, storage: torch.UntypedStorage) -> Tensor:
        """Returns a tensor with this layout on another storage."""
        made = torch.empty(0, dtype=self.dtype, device=storage.device)
        return made.set_(storage, self.start, self.shape, self.stride)


@dataclass(eq=False)
class PackedActivation:
    """Placeholder for a saved tensor in the autograd graph."""

    call: _BlockCall | None
    tensor: Tensor | None
    """The tensor, while its memory is on the device."""
    version: int
    """Version counter of the tensor when it was saved."""
    storage: SavedStorage | None = None
    layout: _StridedLayout | None = None


@dataclass(eq=False)
class SavedStorage:
    """A storage that backward needs, on the device, on the host, or being copied."""

    pool: HostBufferPool
    size: int
    device_buffer: Tensor | None
    """The bytes on the device."""
    users: list[weakref.ref[PackedActivation]] = field(default_factory=list)
    """Placeholders whose tensors keep its device memory alive."""
    host_buffer: Tensor | None = None
    """The bytes on the host."""
    copied_version: int = -1
    """Version counter when it was copied to the host; -1 if it was not copied."""
    copy_event: StreamEvent = None
    """Event after the last copy, in either direction."""
    fetch_stream: SideStream | None = None
    """Stream of the copy back to the device, until a stream has waited for it."""

    def is_changed(self, x: Tensor) -> bool:
        """Whether a tensor of the storage was modified after the copy."""
        return self.copied_version >= 0 and x._version != self.copied_version

    def copy_to_host(self, lane: SideStream, now: StreamEvent) -> bool:
        """Starts the copy to the host; returns False if the storage was modified after the save.

        A modified tensor stays on the device, so that `unpack` can raise the error.
        """
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
        """Frees the device memory of a storage that has been copied."""
        if self.device_buffer is None or self.host_buffer is None:
            return
        # Later work of the current stream may reuse the memory, and must not overwrite it before
        # the copy is done.
        wait_for_event(self.copy_event, self.device_buffer.device)
        for user in (reference() for reference in self.users):
            if user is not None:
                user.tensor = None
        self.device_buffer = None
        self.users = []

    def copy_to_device(self, lane: SideStream, now: StreamEvent) -> None:
        """Starts the copy back to the device, which releases the host buffer."""
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
        """Returns a tensor on the storage; the current stream waits for the copy."""
        assert self.device_buffer is not None, how
        if self.fetch_stream is not None:
            wait_for_event(self.copy_event, self.device_buffer.device)
            self.fetch_stream = None
        return how.view_on_storage(self.device_buffer.untyped_storage())

    def __del__(self) -> None:
        if self.host_buffer is not None:
            self.pool.return_buffer(self.host_buffer, self.copy_event)
        # No stream has waited for the copy; the allocator must not reuse the memory before its end.
        if (
            self.fetch_stream is not None
            and self.fetch_stream.stream is not None
            and self.device_buffer is not None
        ):
            self.device_buffer.record_stream(self.fetch_stream.stream)


@dataclass(eq=False)
class _BlockCall:
    """A call of a block: its saved storages, and the previous call in the same pass."""

    name: str
    previous_call: _BlockCall | None
    saved_storages: list[weakref.ref[SavedStorage]] = field(default_factory=list)
    """Weak references, so that storages are freed after use as they are without offloading."""
    reached_by_backward: bool = False
    """Whether backward has reached this call."""

    def live_storages(self) -> list[SavedStorage]:
        """Returns the storages that are still needed, without duplicates."""
        found = (reference() for reference in self.saved_storages)
        return list(dict.fromkeys(kept for kept in found if kept is not None))


class ActivationOffload:
    """An `ActivationStore` that offloads a fraction of the bytes of blocks to the host."""

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
        """blocks: the blocks of this rank. weights: returns the weights, which are not offloaded.

        last: the block whose activations stay on the device. small: minimum bytes to offload.
        """
        if not 0.0 <= share <= 1.0:
            raise PlanError(
                f"memory.activation_offload_fraction={share} is not a fraction between 0 and 1. "
                "`ranvier train` replaces -1 before the model runs. Use e.g. 0.5."
            )
        self.blocks = list(blocks)
        self.device = device
        self.weights = weights
        self.pool = pool
        self.last_block = last
        self.min_bytes = small
        # The last block stays on the device, so a larger fraction of the others is offloaded.
        others = len([name for name in blocks if name != last])
        if others:
            self.offload_fraction = min(share * len(blocks) / others, 1.0)
        else:
            self.offload_fraction = 0.0
        """Fraction of the bytes to offload, of all blocks except the last."""
        self.offloaded_bytes = 0
        """Bytes copied to the host so far."""
        self._to_host_stream, self._to_device_stream = SideStream(device), SideStream(device)
        self._current_call: _BlockCall | None = None
        self._previous_call: _BlockCall | None = None
        self._leaving_storages: list[weakref.ref[SavedStorage]] = []
        self._storages_by_id: dict[int, tuple[StorageWeakRef, weakref.ref[SavedStorage]]] = {}
        self._weight_storages: set[int] = set()
        self._due_bytes = 0.0
        """Bytes that should be offloaded so far, minus the bytes that were offloaded."""
        self._start_phase: float | None = None
        """Initial `_due_bytes`, in storages, of a pass that does not start at the first block."""
        self._live_storages: weakref.WeakSet[SavedStorage] = weakref.WeakSet()

    def saved_bytes(self) -> tuple[int, int]:
        """Returns the bytes saved for backward, on the device and on the host."""
        living = list(self._live_storages)
        device = sum(kept.size for kept in living if kept.device_buffer is not None)
        return device, sum(kept.size for kept in living if kept.host_buffer is not None)

    # ---- forward ------------------------------------------------------------------------

    @contextmanager
    def block_context(self, name: str) -> Iterator[None]:
        """See `ActivationStore`."""
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
        """Returns a new call; calls of consecutive blocks belong to one pass."""
        path, number = _block_position(name)
        following = [(path, number - 1)]
        # A recurrent core is called several times; a single block is called once in each pass.
        if len(self.blocks) > 1:
            following.append((path, number))
        if (
            self._previous_call is not None
            and _block_position(self._previous_call.name) in following
        ):
            return _BlockCall(name, self._previous_call)
        # A new pass begins. Storages of weights may have moved since the last pass, and addresses
        # may have been reused, so both tables are refreshed.
        self._weight_storages = {x.untyped_storage()._cdata for x in self.weights()}
        self._storages_by_id = {
            at: one for at, one in self._storages_by_id.items() if not one[0].expired()
        }
        self._start_phase = math.fmod(self.offload_fraction * self.blocks.index(name), 1.0)
        with hide_from_dispatch_modes():
            self.pool.merge_buffers()
        return _BlockCall(name, None)

    def pack(self, x: Tensor) -> PackedActivation:
        """See `ActivationStore`."""
        packed = PackedActivation(self._current_call, x, x._version)
        # Subclasses, sparse and lazily conjugated tensors cannot be recreated from their storage.
        plain = type(x) is Tensor and x.layout is torch.strided and x.device == self.device
        if self._current_call is None or not plain or x.is_conj() or x.is_neg():
            return packed
        storage = x.untyped_storage()
        if storage.nbytes() == 0 or storage._cdata in self._weight_storages:
            return packed
        packed.storage, packed.layout = self._saved_storage(x, storage), _StridedLayout.of_tensor(x)
        self._current_call.saved_storages.append(weakref.ref(packed.storage))
        # Another view of the storage was saved before and is already offloaded.
        if packed.storage.device_buffer is None:
            packed.tensor = None
        else:
            packed.storage.users.append(weakref.ref(packed))
        return packed

    def _saved_storage(self, x: Tensor, storage: torch.UntypedStorage) -> SavedStorage:
        """Returns the `SavedStorage` of a tensor; all views of a storage share one."""
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
        """Starts offloading a fraction of the storages of a call; frees those of the last one."""
        for reference in self._leaving_storages:
            kept = reference()
            if kept is not None:
                kept.free_device_memory()
        self._leaving_storages, now = [], record_current_event(self.device)
        for kept in call.live_storages() if call.name != self.last_block else []:
            if kept.size < self.min_bytes or kept.copied_version >= 0:
                continue
            # Error diffusion: a storage is offloaded when the accumulated fraction reaches its
            # size, which distributes the copies evenly over the blocks.
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
        """See `ActivationStore`."""
        call = packed.call
        # Prefetch: the first tensor of a call also starts the copies of the previous block.
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
        """Starts copying storages that are on the host to the device."""
        away = [kept for kept in some if kept.device_buffer is None]
        if away:
            now = record_current_event(self.device)
        else:
            now = None
        for kept in away:
            kept.copy_to_device(self._to_device_stream, now)


def _block_position(name: str) -> tuple[str, int]:
    """Returns the path of the module list of a block, and the index of the block in it."""
    path, _, number = name.rpartition(".")
    return path, int(number)
