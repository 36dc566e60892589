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

from ranvier.comm.collectives import hidden
from ranvier.comm.streams import Lane, Mark, await_mark, here
from ranvier.errors import PlanError
from ranvier.memory.host_pool import Pool
from ranvier.memory.saved_results import unchanged

SMALL = 2**20
"""Bytes below which a copy takes longer to start than to do."""


@dataclass(frozen=True)
class _Layout:
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor) -> _Layout:
        """That of a tensor."""
        return cls(x.dtype, int(x.storage_offset()), tuple(x.shape), x.stride())

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor on another storage."""
        made = torch.empty(0, dtype=self.dtype, device=storage.device)
        return made.set_(storage, self.start, self.shape, self.stride)


@dataclass(eq=False)
class Packed:
    """What stands for a tensor in autograd's graph."""

    call: _Call | None
    x: Tensor | None
    """The tensor itself, as long as its memory is there."""
    version: int
    """How often it had been changed."""
    kept: Kept | None = None
    how: _Layout | None = None


@dataclass(eq=False)
class Kept:
    """A storage that backward needs: on the device, on the host, or on its way."""

    pool: Pool
    size: int
    flat: Tensor | None
    """Its bytes on the device."""
    users: list[weakref.ref[Packed]] = field(default_factory=list)
    """Tensors of it that hold its memory."""
    host: Tensor | None = None
    """Its bytes on the host."""
    version: int = -1
    """How often it had been changed when it was copied there; -1: it was not."""
    mark: Mark = None
    """When the last copy is done, out or in."""
    coming: Lane | None = None
    """On which it comes, until somebody has waited for it."""

    def changed(self, x: Tensor) -> bool:
        """Whether a tensor of the same storage is no longer what was copied."""
        return self.version >= 0 and x._version != self.version

    def send(self, lane: Lane, now: Mark) -> bool:
        """Start to copy it to the host; not if somebody has written to it: then it is refused."""
        packed = [user for user in (reference() for reference in self.users) if user is not None]
        versions = {user.version for user in packed}
        changed = any(user.x is not None and user.x._version != user.version for user in packed)
        if self.flat is None or changed or len(versions) != 1:
            return False
        (self.version,) = versions
        self.host, free = self.pool.take(self.size)
        with lane.after(now, free):
            self.host.copy_(self.flat, non_blocking=True)
        self.mark = lane.mark()
        return True

    def leave(self) -> None:
        """Give its memory on the device back; the device has copied it by then."""
        if self.flat is None or self.host is None:
            return
        await_mark(self.mark, self.flat.device)
        for user in (reference() for reference in self.users):
            if user is not None:
                user.x = None
        self.flat, self.users = None, []

    def fetch(self, lane: Lane, now: Mark) -> None:
        """Start to copy it back; the host's bytes are free as soon as that is done."""
        if self.flat is not None or self.host is None:
            return
        self.flat = torch.empty(self.size, dtype=torch.uint8, device=lane.device)
        with lane.after(now, self.mark):
            self.flat.copy_(self.host, non_blocking=True)
        self.mark, self.coming = lane.mark(), lane
        self.pool.give(self.host, self.mark)
        self.host = None

    def tensor(self, how: _Layout) -> Tensor:
        """A tensor of it, once it has come."""
        assert self.flat is not None, how
        if self.coming is not None:
            await_mark(self.mark, self.flat.device)
            self.coming = None
        return how.on(self.flat.untyped_storage())

    def __del__(self) -> None:
        if self.host is not None:
            self.pool.give(self.host, self.mark)
        if self.coming is not None and self.coming.stream is not None and self.flat is not None:
            self.flat.record_stream(self.coming.stream)  # nobody has waited for the copy


@dataclass(eq=False)
class _Call:
    """A call of a block: what was kept in it, and the call before it in the same pass."""

    name: str
    before: _Call | None
    kept: list[weakref.ref[Kept]] = field(default_factory=list)
    """Weakly: what backward has used goes as it would without us."""
    returned: bool = False
    """Whether backward has come here."""

    def alive(self) -> list[Kept]:
        """What of it is still needed, each once."""
        found = (reference() for reference in self.kept)
        return list(dict.fromkeys(kept for kept in found if kept is not None))


class Activations:
    """A store (`comm.results`) that keeps a share of the bytes of blocks on the host."""

    def __init__(
        self,
        share: float,
        blocks: Sequence[str],
        device: torch.device,
        *,
        weights: Callable[[], Iterable[Tensor]],
        pool: Pool,
        last: str = "",
        small: int = SMALL,
    ) -> None:
        """blocks: those of this rank. weights: what stays anyway. last: a block that stays."""
        if not 0.0 <= share <= 1.0:
            raise PlanError(
                f"memory.activations={share} reached the blocks. It is a share in [0, 1]; -1 is "
                "settled before (memory.fit=auto). Use for example 0.5."
            )
        self.blocks, self.device, self.weights = list(blocks), device, weights
        self.pool, self.last, self.small = pool, last, small
        others = len([name for name in blocks if name != last])
        self.rate = min(share * len(blocks) / others, 1.0) if others else 0.0
        """Of the bytes of blocks that do not stay what goes."""
        self.sent = 0
        """Bytes copied to the host so far."""
        self._outward, self._inward = Lane(device), Lane(device)
        self._call: _Call | None = None
        self._before: _Call | None = None
        self._leaving: list[weakref.ref[Kept]] = []
        self._known: dict[int, tuple[StorageWeakRef, weakref.ref[Kept]]] = {}
        self._fixed: set[int] = set()
        self._due = 0.0
        """Bytes that should have gone by now, less those that have."""
        self._phase: float | None = None
        """The same in tensors, where a pass does not begin with the first block."""
        self._living: weakref.WeakSet[Kept] = weakref.WeakSet()

    def held(self) -> tuple[int, int]:
        """Bytes that wait for backward, on the device and on the host."""
        living = list(self._living)
        device = sum(kept.size for kept in living if kept.flat is not None)
        return device, sum(kept.size for kept in living if kept.host is not None)

    # ---- forward ------------------------------------------------------------------------

    @contextmanager
    def block(self, name: str) -> Iterator[None]:
        """See `Store`."""
        if name not in self.blocks or not torch.is_grad_enabled() or self.rate == 0.0:
            yield
            return
        outer, self._call = self._call, self._begun(name)
        try:
            with saved_tensors_hooks(self.pack, self.unpack):
                yield
            with hidden():
                self._send(self._call)
        finally:
            self._before, self._call = self._call, outer

    def _begun(self, name: str) -> _Call:
        """A new call; blocks that follow each other belong to one pass."""
        path, number = _place(name)
        if self._before is not None and _place(self._before.name) == (path, number - 1):
            return _Call(name, self._before)
        self._fixed = {x.untyped_storage()._cdata for x in self.weights()}
        self._known = {at: one for at, one in self._known.items() if not one[0].expired()}
        self._phase = math.fmod(self.rate * self.blocks.index(name), 1.0)
        with hidden():
            self.pool.settle()
        return _Call(name, None)

    def pack(self, x: Tensor) -> Packed:
        """See `Store`."""
        packed = Packed(self._call, x, x._version)
        plain = type(x) is Tensor and x.layout is torch.strided and x.device == self.device
        if self._call is None or not plain or x.is_conj() or x.is_neg():
            return packed
        storage = x.untyped_storage()
        if storage.nbytes() == 0 or storage._cdata in self._fixed:
            return packed
        packed.kept, packed.how = self._kept(x, storage), _Layout.of(x)
        self._call.kept.append(weakref.ref(packed.kept))
        if packed.kept.flat is None:  # it is on the host already
            packed.x = None
        else:
            packed.kept.users.append(weakref.ref(packed))
        return packed

    def _kept(self, x: Tensor, storage: torch.UntypedStorage) -> Kept:
        """The storage of a tensor; the same for all tensors of it."""
        reference, known = self._known.get(storage._cdata, (None, None))
        kept = None if reference is None or reference.expired() or known is None else known()
        if kept is not None and not kept.changed(x):
            return kept
        with hidden():
            flat = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)
        kept = Kept(self.pool, storage.nbytes(), flat)
        self._known[storage._cdata] = (StorageWeakRef(storage), weakref.ref(kept))
        self._living.add(kept)
        return kept

    def _send(self, call: _Call) -> None:
        """Start to copy a share of what a call has kept; what went before it leaves the device."""
        for reference in self._leaving:
            kept = reference()
            if kept is not None:
                kept.leave()
        self._leaving, now = [], here(self.device)
        for kept in call.alive() if call.name != self.last else []:
            if kept.size < self.small or kept.version >= 0:
                continue
            if self._phase is not None:
                self._due, self._phase = self._phase * kept.size, None
            self._due += self.rate * kept.size
            if self._due >= kept.size * (1.0 - 1e-9) and kept.send(self._outward, now):
                self._due -= kept.size
                self._leaving.append(weakref.ref(kept))
                self.sent += kept.size

    # ---- backward -----------------------------------------------------------------------

    def unpack(self, packed: Packed) -> Tensor:
        """See `Store`."""
        call = packed.call
        if call is not None and not call.returned:
            call.returned = True
            with hidden():
                self._fetch(call.alive())
                self._fetch(call.before.alive() if call.before is not None else [])
        if packed.x is not None:
            return unchanged(packed.x, packed.version)
        assert packed.kept is not None and packed.how is not None
        with hidden():
            self._fetch([packed.kept])
            return packed.kept.tensor(packed.how)

    def _fetch(self, some: Iterable[Kept]) -> None:
        """Start to bring what is not here."""
        away = [kept for kept in some if kept.flat is None]
        now = here(self.device) if away else None
        for kept in away:
            kept.fetch(self._inward, now)


def _place(name: str) -> tuple[str, int]:
    """The list that a block is in, and its number there."""
    path, _, number = name.rpartition(".")
    return path, int(number)
