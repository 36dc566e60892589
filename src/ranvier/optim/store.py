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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ranvier.comm.arena import Arena, aligned, refuse_disk, refuse_memory
from ranvier.comm.bucket import Bucket, Weight
from ranvier.comm.lane import Lane, Mark, Updating, here
from ranvier.comm.sums import Pieces
from ranvier.optim.moments import BLOCK

SLOTS = 4
"""Tiles under way at once: one comes, one is updated, one goes, and one more for what is uneven."""
LANES = ("in", "update", "out")
Rest = Literal["device", "host", "file"]
Held = dict[str, Tensor]
"""States by kind (master, mean, square), flat; scales `[2, blocks]`."""


@dataclass(frozen=True)
class Home:
    """Where states rest, and how much of each place they may take."""

    states: Literal["device", "host", "file", "split"] = "device"
    resident: int = 0
    """Bytes of states that stay on the device with `split`."""
    room: int = 2**62
    """Bytes of host memory that may be taken."""
    path: str = ""
    """Directory of the file."""
    update: Literal["device", "cpu"] = "device"
    """Who updates states that rest elsewhere."""
    tile: int = 2**24
    """Numbers of a tile."""


@dataclass(frozen=True)
class Tile:
    """A range of my states of a bucket."""

    bucket: Bucket
    start: int
    stop: int
    weight: Weight | None = None
    """Whose it is, where that matters."""
    blocks: int = 0
    """Scales of 8-bit moments that belong to it."""

    @property
    def range(self) -> slice:
        """As a slice of a flat tensor of a bucket's states."""
        return slice(self.start, self.stop)


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
        self.home, self.device, self.kinds = home, device, kinds
        self.rests = _rests(kinds, home)
        self.tiles = {b: list(_tiles(b, types, home.tile)) for b, types in kinds.items()}
        away = [bucket for bucket in kinds if self.rests[bucket] != "device"]
        self._order = [tile for bucket in away for tile in self.tiles[bucket]]
        self._arena = self._taken(sum(map(self._bytes, away))) if away else None
        self.held = {bucket: self._rested(bucket) for bucket in kinds}
        self.scales = {
            tile: self._zeros(bucket, (2, tile.blocks), torch.float32)
            for bucket in kinds
            for tile in self.tiles[bucket]
            if tile.blocks
        }
        """Of 8-bit moments, by tile."""
        self._slots: list[Slot] = []
        self._lanes = [Lane(device, first=name == "update") for name in LANES] if away else []
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._rules: Rules | None = None

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
        if bucket.home is not None and out is not None:
            bucket.mine(bucket.home)[tile.range].copy_(out, non_blocking=True)

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
        begin, parts = here(self.device), dict(work)
        hosted = self.home.update == "cpu"
        how = partial(self._on_host if hosted else self._on_device, parts, rules, begin)
        if self.device.type == "cpu" or not (hosted or self.home.states == "file"):
            how()
            return
        for bucket, pieces in work:
            bucket.updating = Updating(self.device, pieces, threading.Event(), self._raise)
        self._thread = threading.Thread(target=self._behind, args=(how, parts), daemon=True)
        self._thread.start()

    def _behind(self, how: Callable[[], None], parts: Mapping[Bucket, Pieces]) -> None:
        """Do it in a thread of its own."""
        try:
            with torch.cuda.device(self.device), torch.no_grad():
                how()
        except BaseException as error:
            self._error = error
        finally:
            for bucket in parts:
                if bucket.updating is not None and bucket.updating.known is not None:
                    bucket.updating.known.set()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _on_device(self, parts: Mapping[Bucket, Pieces], rules: Rules, begin: Mark) -> None:
        """Tiles come, are updated and go; the first of the next step come again."""
        order, (_, middle, outward) = self._order, self._lanes
        for i, tile in enumerate(order[:SLOTS]):
            self._bring(i, tile, parts[tile.bucket], begin)
        for i, tile in enumerate(order):
            slot = self._slots[i % SLOTS]
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
                self._ended(tile.bucket, parts[tile.bucket], slot.free if home else done)
        for i, tile in enumerate(order[:SLOTS]):
            self._bring(i, tile)

    def _ended(self, bucket: Bucket, pieces: Pieces, mark: Mark) -> None:
        """A bucket's weights are new once a mark is reached."""
        if bucket.updating is None:
            bucket.updating = Updating(self.device, pieces)
        bucket.updating.mark = mark
        if bucket.updating.known is not None:
            bucket.updating.known.set()

    def _slot(self, i: int) -> Slot:
        """The buffers of the i-th tile; they are made when they are first needed."""
        if len(self._slots) < SLOTS:
            memory = torch.empty(self.slot_bytes(), dtype=torch.uint8, device=self.device)
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
            home = tile.bucket.mine(tile.bucket.home)[tile.range]
            home.copy_(slot.held["out"], non_blocking=True)

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

    def _on_host(self, parts: Mapping[Bucket, Pieces], rules: Rules, begin: Mark) -> None:
        """Gradients leave, the CPU updates where states rest, new weights come."""
        jobs = [(tile, *x) for tile in self._order for x in meet(tile, parts[tile.bucket])]
        slots = self._host_slots()
        for i in range(SLOTS - 1):
            self._leave(slots, jobs, i, begin)
        rule = rules.host()  # waits for the norm
        for i, (tile, at, grad) in enumerate(jobs):
            self._leave(slots, jobs, i + SLOTS - 1, begin)
            slot = slots[i % SLOTS]
            _synchronize(slot.came)
            came = _as(slot.held["grad"][: grad.numel()], grad)
            out = self._carved(slot.memory, tile)["out"]
            self._apply(rule, self.resting(tile), tile, at, came, out)
            mark = self._arrive(slot, tile, at, out[at : at + grad.numel()])
            if i + 1 == len(jobs) or jobs[i + 1][0].bucket is not tile.bucket:
                self._ended(tile.bucket, parts[tile.bucket], mark)

    def _leave(
        self, slots: list[Slot], jobs: Sequence[tuple[Tile, int, Tensor]], i: int, begin: Mark
    ) -> None:
        """Start to take the i-th gradient to the host."""
        if i >= len(jobs):
            return
        slot, (tile, _, grad), outward = slots[i % SLOTS], jobs[i], self._lanes[2]
        _synchronize(slot.free)
        slot.held = self._carved(slot.memory, tile)
        with outward.after(begin):
            _as(slot.held["grad"][: grad.numel()], grad).copy_(grad, non_blocking=True)
        slot.came = outward.mark()

    def _arrive(self, slot: Slot, tile: Tile, at: int, new: Tensor) -> Mark:
        """Start to bring new weights to where they rest."""
        inward, start = self._lanes[0], tile.start + at
        with inward.after():
            tile.bucket.mine(tile.bucket.rest)[start : start + new.numel()].copy_(
                new, non_blocking=True
            )
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


def _rests(kinds: Mapping[Bucket, Mapping[str, torch.dtype]], home: Home) -> dict[Bucket, Rest]:
    """Where the states of each bucket rest; vectors are too few to be worth a way."""
    found: dict[Bucket, Rest] = {}
    left = home.resident if home.states == "split" else 0
    for bucket, types in kinds.items():
        size = sum(bucket.held * dtype.itemsize for dtype in types.values())
        small = bucket.weights[0].group == "vector" or size == 0
        stays = home.states == "device" or small or size <= left
        left -= size if stays and not small else 0
        found[bucket] = "device" if stays else "file" if home.states == "file" else "host"
    return found


def _tiles(bucket: Bucket, types: Mapping[str, torch.dtype], size: int) -> Iterator[Tile]:
    """My range of a bucket in parts of at most `size`.

    Where moments are narrow none goes across two weights: they are rounded by weight and index.
    """
    spans: list[tuple[int, int, Weight | None]] = [(0, bucket.held, None)]
    if types["mean"].itemsize < bucket.queue.dtype.itemsize:
        spans = [(*bucket.range(weight), weight) for weight in bucket.weights]
    step = max(size // BLOCK, 1) * BLOCK
    for start, stop, weight in spans:
        for at in range(start, stop, step):
            count = min(step, stop - at)
            blocks = -(-count // BLOCK) if types["mean"] == torch.uint8 else 0
            yield Tile(bucket, at, at + count, weight, blocks)


def meet(tile: Tile, pieces: Pieces) -> Iterator[tuple[int, Tensor]]:
    """What of a gradient falls on a tile, with where in the tile it begins."""
    for start, grad in pieces:
        low, high = max(start, tile.start), min(start + grad.numel(), tile.stop)
        if low < high:
            yield low - tile.start, grad[low - start : high - start]
