"""Store: where master weights and moments lie between updates, and how they come and go.

The states of a bucket rest on the device, in host memory or in a mapped file. Those that rest
elsewhere are cut into tiles, which pass through a ring of a few buffers on the device:

    in      tile i + 4 comes         (the first four came during the backward pass already)
    update  tile i                   after the norm of all gradients is known
    out     tile i - 1 goes back

Each line is a lane of its own. Buckets are updated in the order in which the next forward pass uses
them, and only a block that is used waits for its own: the rest goes on behind it. Gradients are
kept until then. Or the CPU updates tiles where they rest: then gradients go and weights come.
Where a host must wait for something (a disk, the norm) a thread does all this.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ranvier.buckets.bucket import Bucket
from ranvier.comm.accumulator import Pieces
from ranvier.comm.streams import Lane, Mark, Updating, here
from ranvier.memory.host import Arena, aligned, refuse_disk, refuse_memory
from ranvier.optim.state_tiles import Home, Tile, meet, rests_of, tiles_of

SLOTS = 4
"""Tiles under way at once: one comes, one is updated, one goes, and one more for what is uneven."""
LANES = ("in", "update", "out")
QUEUED = 128
"""Tiles that a device is given at once: a stream takes so many calls, then it has the host wait,
who could begin the next forward pass. More are given by a thread, as others are done."""
Held = dict[str, Tensor]
"""States by kind (master, mean, square), flat; scales `[2, blocks]`."""


Rule = Callable[[Tile, Held, Tensor, Tensor | None], None]
"""Updates the states of a tile with a gradient. The last gets the new working weights, also if no
update is made; None: they are where the bucket has them."""


@dataclass(frozen=True)
class Rules:
    """How tiles are updated: on the device, and on the host once that knows the norm."""

    device: Rule
    host: Callable[[], Rule]


@dataclass(eq=False)
class Slot:
    """Memory that a tile passes through."""

    memory: Tensor
    came: Mark = None
    free: Mark = None
    tile: Tile | None = None
    held: Held = field(default_factory=dict)
    grads: Pieces = field(default_factory=list)
    """Of the tile, with where in it they begin."""


class Store:
    """The states of the buckets of a rank."""

    def __init__(
        self,
        kinds: Mapping[Bucket, Mapping[str, torch.dtype]],
        home: Home,
        device: torch.device,
    ) -> None:
        """kinds: types of the states of each bucket. What does not fit is refused at once."""
        self.home, self.device, self.kinds = home, device, dict(kinds)
        self.rests = rests_of(kinds, home)
        self.tiles = {b: list(tiles_of(b, types, home.tile)) for b, types in kinds.items()}
        away = [bucket for bucket in kinds if self.rests[bucket] != "device"]
        self._order = [tile for bucket in away for tile in self.tiles[bucket]]
        self._arena = self._taken(sum(map(self._bytes, away))) if away else None
        self.held = {bucket: self._rested(bucket) for bucket in kinds}
        self.scales: dict[Tile, Tensor] = {}
        """Of 8-bit moments, by tile."""
        for bucket in kinds:
            self.scales |= self._scaled(bucket)
        self._slots: list[Slot] = []
        self._lanes = [Lane(device, first=name == "update") for name in LANES] if away else []
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._rules: Rules | None = None
        self._updating: dict[Bucket, Updating] = {}

    # ---- where they rest ----------------------------------------------------------------

    def _taken(self, size: int) -> Arena:
        if self.home.states == "file":
            refuse_disk(size, Path(self.home.path))
            return Arena(size, self.device, path=Path(self.home.path))
        refuse_memory(size, self.home.room, self.device)
        return Arena(size, self.device)

    def _bytes(self, bucket: Bucket) -> int:
        """Bytes of the states of a bucket in an arena."""
        flat = sum(aligned(bucket.held * dtype.itemsize) for dtype in self.kinds[bucket].values())
        return flat + sum(aligned(8 * tile.blocks) for tile in self.tiles[bucket])

    def _rested(self, bucket: Bucket) -> Held:
        types = self.kinds[bucket].items()
        return {kind: self._zeros(bucket, (bucket.held,), dtype) for kind, dtype in types}

    def _scaled(self, bucket: Bucket) -> dict[Tile, Tensor]:
        tiles = [tile for tile in self.tiles[bucket] if tile.blocks]
        return {tile: self._zeros(bucket, (2, tile.blocks), torch.float32) for tile in tiles}

    def resize(self, bucket: Bucket, types: Mapping[str, torch.dtype]) -> None:
        """Have room for the states of a bucket that was pruned; what they hold is of no use.

        Those that rest elsewhere stay in their memory, as they only become fewer.
        """
        self.forget()
        self._slots = []  # other kinds need other buffers
        before, self.kinds[bucket] = self.held.pop(bucket), types
        self.scales = {tile: x for tile, x in self.scales.items() if tile.bucket is not bucket}
        self.tiles[bucket] = list(tiles_of(bucket, types, self.home.tile))
        self._order = [t for b in self.kinds if self.streamed(b) for t in self.tiles[b]]
        if self.streamed(bucket):
            lasting = {k: x[: bucket.held] for k, x in before.items() if len(x) >= bucket.held}
            new = {kind: dtype for kind, dtype in types.items() if kind not in lasting}
            blocks = [aligned(8 * tile.blocks) for tile in self.tiles[bucket]]
            sizes = [aligned(bucket.held * dtype.itemsize) for dtype in new.values()]
            more = sum(sizes) + sum(blocks)
            self._arena = self._taken(more) if more else self._arena
            self.held[bucket] = lasting | {
                kind: self._zeros(bucket, (bucket.held,), dtype) for kind, dtype in new.items()
            }
        else:
            self.held[bucket] = self._rested(bucket)
        self.scales |= self._scaled(bucket)

    def _zeros(self, bucket: Bucket, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.rests[bucket] == "device":
            return torch.zeros(shape, dtype=dtype, device=self.device)
        assert self._arena is not None, bucket.name
        return self._arena.take(shape, dtype)  # new memory and new files hold zeros

    def streamed(self, bucket: Bucket) -> bool:
        """Whether the states of a bucket rest elsewhere."""
        return self.rests[bucket] != "device"

    def resting(self, tile: Tile) -> Held:
        """The states of a tile where they rest."""
        found = {kind: x[tile.range] for kind, x in self.held[tile.bucket].items()}
        if tile.blocks:
            found["scales"] = self.scales[tile]
        return found

    def bytes(self) -> dict[str, tuple[int, int]]:
        """Bytes of each kind of states on the device and elsewhere; staging: buffers of tiles."""
        found: dict[str, tuple[int, int]] = {}
        kept = [(bucket, kind, x) for bucket, h in self.held.items() for kind, x in h.items()]
        kept += [(tile.bucket, "scales", x) for tile, x in self.scales.items()]
        for bucket, kind, x in kept:
            here, away = found.get(kind, (0, 0))
            size = (0, x.nbytes) if self.streamed(bucket) else (x.nbytes, 0)
            found[kind] = here + size[0], away + size[1]
        hosted = self.home.update == "cpu"
        staging = SLOTS * self.slot_bytes() if self._order else 0
        return {**found, "staging": (0, staging) if hosted else (staging, 0)}

    # ---- an update ----------------------------------------------------------------------

    def apply(self, tile: Tile, pieces: Pieces, rule: Rule) -> None:
        """Update a tile whose states rest on the device."""
        held, bucket, out = self.resting(tile), tile.bucket, None
        if bucket.home is not None:
            out = torch.empty(tile.stop - tile.start, dtype=bucket.data.dtype, device=self.device)
        for at, grad in meet(tile, pieces):
            self._apply(rule, held, tile, at, grad.to(self.device, non_blocking=True), out)
        if out is not None:
            bucket.renew(tile.start, out)

    def update(self, work: Sequence[tuple[Bucket, Pieces]], rules: Rules) -> None:
        """Update buckets whose states rest elsewhere; returns before it is done.

        Each bucket is told what its next use has to wait for.
        """
        if not work:
            return
        self.wait()
        for bucket, _ in work:
            bucket.settle()  # of one that was not used since
        self._rules = rules  # what they read lives as long as they are needed
        for bucket, pieces in work:
            bucket.updating = self._updating[bucket] = Updating(self.device, pieces)
        begin, parts = here(self.device), dict(work)
        hosted = self.home.update == "cpu"
        how = partial(self._on_host if hosted else self._on_device, parts, rules, begin)
        many = self.device.type == "cuda" and len(self._order) > QUEUED
        if not (hosted or many or self.home.states == "file"):
            self._now(how)
            return
        for updating in self._updating.values():
            updating.known, updating.check = threading.Event(), self._raise
        # No daemon: one that copies while the interpreter ends would take the process down.
        self._thread = threading.Thread(target=self._behind, args=(how,))
        self._thread.start()

    def _now(self, how: Callable[[], None]) -> None:
        """Do it here; who uses a bucket of which nobody knows how it is gets the error, too."""
        try:
            how()
        except BaseException as error:
            self._error = error
            for updating in self._updating.values():
                updating.check = self._raise
            raise

    def _behind(self, how: Callable[[], None]) -> None:
        """Do it in a thread of its own."""
        try:
            on = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
            with on, torch.no_grad():
                how()
        except BaseException as error:
            self._error = error
        finally:
            for updating in self._updating.values():
                if updating.known is not None:
                    updating.known.set()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _on_device(self, parts: dict[Bucket, Pieces], rules: Rules, begin: Mark) -> None:
        """Tiles come, are updated and go; the first of the next step come again.

        Gradients are let go of bucket by bucket: they take memory that the next pass needs.
        """
        order, (_, middle, outward) = self._order, self._lanes
        for i, tile in enumerate(order[:SLOTS]):
            self._bring(i, tile, parts[tile.bucket], begin)
        for i, tile in enumerate(order):
            slot = self._slots[i % SLOTS]
            if self._thread is not None:
                _synchronize(slot.free)
            with middle.after(slot.came, begin):
                for at, grad in slot.grads:
                    self._apply(rules.device, slot.held, tile, at, grad, slot.held.get("out"))
            done = middle.mark()
            with outward.after(done):
                self._send(slot, tile)
            slot.free, slot.tile, slot.grads = outward.mark(), None, []
            if i + SLOTS < len(order):
                follows = order[i + SLOTS]
                self._bring(i, follows, parts[follows.bucket], begin)
            if i + 1 == len(order) or order[i + 1].bucket is not tile.bucket:
                home = tile.bucket.home is not None
                del parts[tile.bucket]
                self._ended(tile.bucket, slot.free if home else done)
        for i, tile in enumerate(order[:SLOTS]):
            self._bring(i, tile)

    def _ended(self, bucket: Bucket, mark: Mark) -> None:
        """A bucket's weights are new once a mark is reached."""
        updating = self._updating.pop(bucket)  # who waits for it may have taken it already
        updating.mark = mark
        if updating.known is not None:
            updating.known.set()

    def _slot(self, i: int) -> Slot:
        """The buffers of the i-th tile; they are made when they are first needed."""
        if len(self._slots) < SLOTS:
            memory = torch.empty(self.slot_bytes(), dtype=torch.uint8, device=self.device)
            for lane in self._lanes:
                lane.uses(memory)
            self._slots.append(Slot(memory, free=here(self.device)))  # it may have been another's
        return self._slots[i % SLOTS]

    def slot_bytes(self) -> int:
        """Bytes that the largest tile takes on its way."""
        sizes = (self._shapes(tile).values() for tile in self._order)
        return max(sum(aligned(n * dtype.itemsize) for n, dtype in one) for one in sizes)

    def _shapes(self, tile: Tile) -> dict[str, tuple[int, torch.dtype]]:
        """Elements and types of what a tile brings, and of what its update needs besides."""
        bucket, count = tile.bucket, tile.stop - tile.start
        extra = {"grad": (count, bucket.queue.dtype), "out": (count, bucket.data.dtype)}
        if self.home.update == "cpu":
            return extra
        shapes = {kind: (count, dtype) for kind, dtype in self.kinds[bucket].items()}
        if tile.blocks:
            shapes["scales"] = (2 * tile.blocks, torch.float32)
        # Gradient and new weights are not on the device either, if weights rest on the host.
        return shapes if bucket.home is None else {**shapes, **extra}

    def _carved(self, memory: Tensor, tile: Tile) -> Held:
        """Tensors for a tile, one after the other in a slot."""
        found, at = Held(), 0
        for name, (count, dtype) in self._shapes(tile).items():
            found[name] = memory[at : at + count * dtype.itemsize].view(dtype)
            at += aligned(count * dtype.itemsize)
        if "scales" in found:
            found["scales"] = found["scales"].view(2, -1)
        return found

    def _bring(self, i: int, tile: Tile, pieces: Pieces | None = None, begin: Mark = None) -> None:
        """Start to copy the states of a tile into the i-th slot, unless they are there already.

        pieces: gradients, once they are known; those that are on the host come as well.
        """
        slot, inward = self._slot(i), self._lanes[0]
        if slot.tile is not tile:
            slot.tile, slot.held = tile, self._carved(slot.memory, tile)
            with inward.after(slot.free):
                for name, mine in self.resting(tile).items():
                    slot.held[name].copy_(mine, non_blocking=True)
            slot.came = inward.mark()
        if pieces is None:
            return
        slot.grads = list(meet(tile, pieces))
        if any(grad.device != self.device for _, grad in slot.grads):
            with inward.after(begin):
                slot.grads = [self._here(slot, *one) for one in slot.grads]
            slot.came = inward.mark()

    def _send(self, slot: Slot, tile: Tile) -> None:
        """Copy the states of a tile back, and its new weights if they rest on the host."""
        for name, mine in self.resting(tile).items():
            mine.copy_(slot.held[name], non_blocking=True)
        if tile.bucket.home is not None:
            tile.bucket.renew(tile.start, slot.held["out"])

    def _here(self, slot: Slot, at: int, grad: Tensor) -> tuple[int, Tensor]:
        """A gradient on the device."""
        if grad.device == self.device:
            return at, grad
        room = _as(slot.held["grad"][at : at + grad.numel()], grad)
        return at, room.copy_(grad, non_blocking=True)

    def _apply(
        self, rule: Rule, states: Held, tile: Tile, at: int, grad: Tensor, out: Tensor | None
    ) -> None:
        """Update what of a tile a gradient covers."""
        span, start = slice(at, at + grad.numel()), tile.start + at
        held = {kind: states[kind][span] for kind in self.kinds[tile.bucket]}
        if tile.blocks:
            assert at == 0 and start + grad.numel() == tile.stop, (at, grad.shape, tile)
            held["scales"] = states["scales"]
        part = replace(tile, start=start, stop=start + grad.numel())
        rule(part, held, grad, None if out is None else out[span])

    # ---- on the host --------------------------------------------------------------------

    def _on_host(self, parts: dict[Bucket, Pieces], rules: Rules, begin: Mark) -> None:
        """Gradients leave, the CPU updates where states rest, new weights come."""
        jobs = [(tile, *x) for tile in self._order for x in meet(tile, parts[tile.bucket])]
        tiles, waiting = [tile for tile, _, _ in jobs], deque(jobs)
        del jobs
        parts.clear()  # what is not waiting is let go of
        slots = self._host_slots()
        for slot in slots[: SLOTS - 2]:
            self._leave(slot, waiting, begin)
        rule = rules.host()  # waits for the norm
        for i, tile in enumerate(tiles):
            self._leave(slots[(i + SLOTS - 2) % SLOTS], waiting, begin)
            slot = slots[i % SLOTS]
            _synchronize(slot.came)
            ((at, came),) = slot.grads
            out = self._carved(slot.memory, tile)["out"]
            self._apply(rule, self.resting(tile), tile, at, came, out)
            mark = self._arrive(slot, tile, at, out[at : at + came.numel()])
            if i + 1 == len(tiles) or tiles[i + 1].bucket is not tile.bucket:
                self._ended(tile.bucket, mark)

    def _leave(self, slot: Slot, waiting: deque[tuple[Tile, int, Tensor]], begin: Mark) -> None:
        """Start to take the next gradient to the host."""
        if not waiting:
            return
        (tile, at, grad), outward = waiting.popleft(), self._lanes[2]
        _synchronize(slot.free)
        if not grad.is_cuda:
            _synchronize(begin)  # the way of a gradient that rests here ended on a stream
        slot.held = self._carved(slot.memory, tile)
        with outward.after(begin):
            came = _as(slot.held["grad"][: grad.numel()], grad)
            slot.grads = [(at, came.copy_(grad, non_blocking=True))]
        slot.came = outward.mark()

    def _arrive(self, slot: Slot, tile: Tile, at: int, new: Tensor) -> Mark:
        """Start to bring new weights to where they rest."""
        inward, start = self._lanes[0], tile.start + at
        with inward.after():
            tile.bucket.renew(start, new)
        slot.free = inward.mark()
        return slot.free

    def _host_slots(self) -> list[Slot]:
        """Buffers on the host."""
        if not self._slots:
            arena = Arena(SLOTS * aligned(self.slot_bytes()), self.device)
            memory = [arena.take((self.slot_bytes(),), torch.uint8) for _ in range(SLOTS)]
            self._slots = [Slot(one) for one in memory]
        return self._slots

    # ---- waiting ------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait for the thread, if there is one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._raise()

    def settle(self) -> None:
        """Have all states where they rest, as the host sees them."""
        self.wait()
        for lane in self._lanes:
            lane.synchronize()

    def forget(self) -> None:
        """States were changed where they rest: what has come already is old."""
        self.settle()
        for slot in self._slots:
            slot.tile = None


def _as(room: Tensor, like: Tensor) -> Tensor:
    """The first bytes of wide memory as a flat tensor of a type that is not wider."""
    return room.view(torch.uint8)[: like.nbytes].view(like.dtype)


def _synchronize(mark: Mark) -> None:
    """Have the host wait."""
    if mark is not None:
        mark.synchronize()
