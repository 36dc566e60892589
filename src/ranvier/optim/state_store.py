"""State store: stores master weights and moments between updates, and streams offloaded ones.

The states of a bucket are stored on the device, in host memory or in a memory-mapped file.
Offloaded states are split into tiles, which pass through a ring of a few buffers on the device:

    in      load tile i + 4          (the first four were loaded during the backward pass)
    update  tile i                   after the norm of all gradients is known
    out     write back tile i - 1

Each line is a separate CUDA stream. Buckets are updated in the order in which the next forward pass
uses them, and a block waits only for its own update, while the rest continues in the background.
Gradients are kept until then. Alternatively the CPU updates the tiles in host memory; then
gradients are copied to the host and new weights back. If the host must wait (for a disk or for the
norm), a thread does all this.
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
from ranvier.comm.streams import PendingUpdate, SideStream, StreamEvent, record_current_event
from ranvier.memory.host import Arena, align_size, check_disk_space, check_host_memory
from ranvier.optim.state_tiles import (
    StatePlacement,
    Tile,
    grads_in_tile,
    split_into_tiles,
    state_locations,
)

NUM_SLOTS = 4
"""Number of tiles in flight: one is loaded, one updated, one written back, and one is spare."""
STREAM_NAMES = ("in", "update", "out")
MAX_QUEUED_TILES = 128
"""Maximum number of tiles that the main thread queues on the device. A CUDA stream accepts a
limited number of launches before it blocks the host, which would delay the next forward pass; with
more tiles a thread queues them as earlier tiles complete."""
StateTensors = dict[str, Tensor]
"""States by kind (master, mean, square), flat; scales `[2, blocks]`."""


UpdateRule = Callable[[Tile, StateTensors, Tensor, Tensor | None], None]
"""Updates the states of a tile with a gradient. The new working weights are written to the last
argument, even if the update is skipped; if it is None, they are written to the bucket."""


@dataclass(frozen=True)
class UpdateRules:
    """The update rules for tiles, on the device and on the host (which needs the norm first)."""

    device: UpdateRule
    host: Callable[[], UpdateRule]
    writes_weights: bool = True
    """Whether the rules compute new weights; otherwise they change states only."""


@dataclass(eq=False)
class TileSlot:
    """Staging memory for one tile."""

    memory: Tensor
    ready_event: StreamEvent = None
    free_event: StreamEvent = None
    tile: Tile | None = None
    tensors: StateTensors = field(default_factory=dict)
    grads: Pieces = field(default_factory=list)
    """Gradients of the tile, with their offsets in it."""


class StateStore:
    """The optimizer states of the buckets of a rank."""

    def __init__(
        self,
        kinds: Mapping[Bucket, Mapping[str, torch.dtype]],
        home: StatePlacement,
        device: torch.device,
    ) -> None:
        """Allocates all states; raises if they do not fit in their memory.

        kinds: dtypes of the states of each bucket.
        """
        self.placement, self.device, self.state_dtypes = home, device, dict(kinds)
        self.locations = state_locations(kinds, home)
        self.tiles = {
            b: list(split_into_tiles(b, types, home.tile_elements)) for b, types in kinds.items()
        }
        away = [bucket for bucket in kinds if self.locations[bucket] != "device"]
        self._offloaded_tiles = [tile for bucket in away for tile in self.tiles[bucket]]
        self._arena = self._allocate_arena(sum(map(self._arena_bytes, away))) if away else None
        self.states = {bucket: self._allocate_states(bucket) for bucket in kinds}
        self.scales: dict[Tile, Tensor] = {}
        """Scales of 8-bit moments, by tile."""
        for bucket in kinds:
            self.scales |= self._allocate_scales(bucket)
        self._slots: list[TileSlot] = []
        if away:
            # Updates have a high-priority stream, as the next forward pass waits for them.
            self._streams = [SideStream(device, first=name == "update") for name in STREAM_NAMES]
        else:
            self._streams = []
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._rules: UpdateRules | None = None
        self._updating: dict[Bucket, PendingUpdate] = {}
        self._pass_tiles: list[Tile] = []
        """The tiles of the pass in progress, in order."""

    # ---- storage ------------------------------------------------------------------------

    def _allocate_arena(self, size: int) -> Arena:
        if self.placement.states == "disk":
            check_disk_space(size, Path(self.placement.path))
            return Arena(size, self.device, path=Path(self.placement.path))
        check_host_memory(size, self.placement.host_bytes, self.device)
        return Arena(size, self.device)

    def _arena_bytes(self, bucket: Bucket) -> int:
        """Returns the bytes of the states of a bucket in an arena."""
        flat = sum(
            align_size(bucket.optimizer_shard_size * dtype.itemsize)
            for dtype in self.state_dtypes[bucket].values()
        )
        # A block has two fp32 scales, i.e. 8 bytes.
        return flat + sum(align_size(8 * tile.num_blocks) for tile in self.tiles[bucket])

    def _allocate_states(self, bucket: Bucket) -> StateTensors:
        types = self.state_dtypes[bucket].items()
        return {
            kind: self._allocate_zeros(bucket, (bucket.optimizer_shard_size,), dtype)
            for kind, dtype in types
        }

    def _allocate_scales(self, bucket: Bucket) -> dict[Tile, Tensor]:
        tiles = [tile for tile in self.tiles[bucket] if tile.num_blocks]
        return {
            tile: self._allocate_zeros(bucket, (2, tile.num_blocks), torch.float32)
            for tile in tiles
        }

    def resize_bucket(self, bucket: Bucket, types: Mapping[str, torch.dtype]) -> None:
        """Resizes the states of a pruned bucket; their contents are undefined afterwards.

        Offloaded states keep their memory, as pruning only makes them smaller.
        """
        self.invalidate_slots()
        # The size of slots depends on the largest tile and the dtypes of states, which change here.
        self._slots = []
        before = self.states.pop(bucket)
        self.state_dtypes[bucket] = types
        self.scales = {tile: x for tile, x in self.scales.items() if tile.bucket is not bucket}
        self.tiles[bucket] = list(split_into_tiles(bucket, types, self.placement.tile_elements))
        self._offloaded_tiles = [
            t for b in self.state_dtypes if self.is_offloaded(b) for t in self.tiles[b]
        ]
        if self.is_offloaded(bucket):
            lasting = {
                k: x[: bucket.optimizer_shard_size]
                for k, x in before.items()
                if len(x) >= bucket.optimizer_shard_size
            }
            new = {kind: dtype for kind, dtype in types.items() if kind not in lasting}
            blocks = [align_size(8 * tile.num_blocks) for tile in self.tiles[bucket]]
            sizes = [
                align_size(bucket.optimizer_shard_size * dtype.itemsize) for dtype in new.values()
            ]
            more = sum(sizes) + sum(blocks)
            # A pruned bucket may need a master copy, which it did not have before.
            if more:
                self._arena = self._allocate_arena(more)
            self.states[bucket] = lasting | {
                kind: self._allocate_zeros(bucket, (bucket.optimizer_shard_size,), dtype)
                for kind, dtype in new.items()
            }
        else:
            self.states[bucket] = self._allocate_states(bucket)
        self.scales |= self._allocate_scales(bucket)

    def _allocate_zeros(self, bucket: Bucket, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.locations[bucket] == "device":
            return torch.zeros(shape, dtype=dtype, device=self.device)
        assert self._arena is not None, bucket.name
        # New host memory and new files are already zero.
        return self._arena.allocate_tensor(shape, dtype)

    def is_offloaded(self, bucket: Bucket) -> bool:
        """Whether the states of a bucket are stored outside the device."""
        return self.locations[bucket] != "device"

    def tile_states(self, tile: Tile) -> StateTensors:
        """Returns the states of a tile, as views of their storage."""
        found = {kind: x[tile.as_slice] for kind, x in self.states[tile.bucket].items()}
        if tile.num_blocks:
            found["scales"] = self.scales[tile]
        return found

    def bytes_by_kind(self) -> dict[str, tuple[int, int]]:
        """Returns the bytes of each state as (on device, offloaded); `staging`: tile buffers."""
        found: dict[str, tuple[int, int]] = {}
        kept = [(bucket, kind, x) for bucket, h in self.states.items() for kind, x in h.items()]
        kept += [(tile.bucket, "scales", x) for tile, x in self.scales.items()]
        for bucket, kind, x in kept:
            here, away = found.get(kind, (0, 0))
            if self.is_offloaded(bucket):
                size = (0, x.nbytes)
            else:
                size = (x.nbytes, 0)
            found[kind] = here + size[0], away + size[1]
        hosted = self.placement.update_device == "cpu"
        if self._offloaded_tiles:
            staging = NUM_SLOTS * self.slot_bytes()
        else:
            staging = 0
        return {**found, "staging": (0, staging) if hosted else (staging, 0)}

    # ---- update -------------------------------------------------------------------------

    def update_resident_tile(
        self, tile: Tile, pieces: Pieces, rule: UpdateRule, *, writes_weights: bool = True
    ) -> None:
        """Updates a tile whose states are on the device."""
        held = self.tile_states(tile)
        bucket = tile.bucket
        out = None
        # If the weights are offloaded but their states are not, update a buffer and copy it.
        if bucket.host_data is not None and writes_weights:
            out = torch.empty(tile.stop - tile.start, dtype=bucket.data.dtype, device=self.device)
        for at, grad in grads_in_tile(tile, pieces):
            self._apply_rule(rule, held, tile, at, grad.to(self.device, non_blocking=True), out)
        if out is not None:
            bucket.write_optimizer_shard(tile.start, out)

    def update_offloaded(self, work: Sequence[tuple[Bucket, Pieces]], rules: UpdateRules) -> None:
        """Starts the update of some buckets with offloaded states.

        A step may update different buckets one after the other, and buckets in several passes. Each
        bucket gets a `pending_update`, for which its next use waits.
        """
        if not work:
            return
        self.join_thread()
        for bucket, _ in work:
            # A bucket that was not used since the last step may still have a pending update.
            bucket.wait_for_update()
        # Keep the tensors that the rules read alive until the update is done.
        self._rules = rules
        for bucket, pieces in work:
            bucket.pending_update = self._updating[bucket] = PendingUpdate(self.device, pieces)
        begin = record_current_event(self.device)
        parts = dict(work)
        self._prepare_slots([tile for tile in self._offloaded_tiles if tile.bucket in parts])
        hosted = self.placement.update_device == "cpu"
        how = partial(
            self._update_on_host if hosted else self._update_on_device, parts, rules, begin
        )
        # A thread is needed only if the host blocks (disk, norm on the host, full launch queue).
        many = self.device.type == "cuda" and len(self._pass_tiles) > MAX_QUEUED_TILES
        if not (hosted or many or self.placement.states == "disk"):
            self._run_inline(how)
            return
        for updating in self._updating.values():
            updating.event_ready = threading.Event()
            updating.raise_failure = self._raise_error
        # Not a daemon, as a thread that copies during interpreter shutdown would crash the process.
        self._thread = threading.Thread(target=self._run_in_thread, args=(how,))
        self._thread.start()

    def _prepare_slots(self, tiles: list[Tile]) -> None:
        """Begins a pass over some tiles."""
        if tiles == self._pass_tiles:
            return
        # The last pass had other tiles in these slots, and may still write states back that this
        # one loads into another slot.
        self._pass_tiles = tiles
        for slot in self._slots:
            slot.tile = None
            slot.free_event = self._streams[2].record_event()

    def _run_inline(self, how: Callable[[], None]) -> None:
        """Runs the update in this thread; later uses of the buckets also raise its error."""
        try:
            how()
        except BaseException as error:
            self._error = error
            for updating in self._updating.values():
                updating.raise_failure = self._raise_error
            raise

    def _run_in_thread(self, how: Callable[[], None]) -> None:
        """Runs the update in the background thread."""
        try:
            # The current device and grad mode are thread-local.
            on = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
            with on, torch.no_grad():
                how()
        except BaseException as error:
            self._error = error
        finally:
            # Wake all waiting threads even after a failure; they raise the error.
            for updating in self._updating.values():
                if updating.event_ready is not None:
                    updating.event_ready.set()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _update_on_device(
        self, parts: dict[Bucket, Pieces], rules: UpdateRules, begin: StreamEvent
    ) -> None:
        """Loads, updates and writes back tiles; then prefetches the first tiles of the next step.

        The gradients of each bucket are released after its update, as the next pass needs memory.
        """
        order, (_, middle, outward) = self._pass_tiles, self._streams
        for i, tile in enumerate(order[:NUM_SLOTS]):
            self._load_tile(i, tile, parts[tile.bucket], begin)
        for i, tile in enumerate(order):
            slot = self._slots[i % NUM_SLOTS]
            if self._thread is not None:
                # Limit the thread, so that the launch queue of the device stays short.
                _wait_on_host(slot.free_event)
            with middle.run_after(slot.ready_event, begin):
                for at, grad in slot.grads:
                    self._apply_rule(
                        rules.device, slot.tensors, tile, at, grad, slot.tensors.get("out")
                    )
            done = middle.record_event()
            with outward.run_after(done):
                self._write_back_tile(slot, tile, rules)
            slot.free_event = outward.record_event()
            slot.tile = None
            slot.grads = []
            if i + NUM_SLOTS < len(order):
                follows = order[i + NUM_SLOTS]
                self._load_tile(i, follows, parts[follows.bucket], begin)
            # This is the last tile of its bucket. Weights on the device are complete after the
            # update, weights on the host after the copy.
            if i + 1 == len(order) or order[i + 1].bucket is not tile.bucket:
                home = tile.bucket.host_data is not None
                del parts[tile.bucket]
                self._finish_bucket(tile.bucket, slot.free_event if home else done)
        # These copies run during the next forward and backward passes.
        for i, tile in enumerate(order[:NUM_SLOTS]):
            self._load_tile(i, tile)

    def _finish_bucket(self, bucket: Bucket, mark: StreamEvent) -> None:
        """Sets the event `mark` after which a bucket is updated."""
        # The bucket may no longer have a reference, as a waiting thread takes it.
        updating = self._updating.pop(bucket)
        updating.done_event = mark
        if updating.event_ready is not None:
            updating.event_ready.set()

    def _get_slot(self, i: int) -> TileSlot:
        """Returns the buffers for the i-th tile, which are allocated at their first use."""
        if len(self._slots) < NUM_SLOTS:
            memory = torch.empty(self.slot_bytes(), dtype=torch.uint8, device=self.device)
            for lane in self._streams:
                lane.record_use(memory)
            # The allocator may return memory that queued work of this stream still uses.
            self._slots.append(TileSlot(memory, free_event=record_current_event(self.device)))
        return self._slots[i % NUM_SLOTS]

    def slot_bytes(self) -> int:
        """Returns the bytes of a slot, which are the bytes of the largest tile."""
        sizes = (self._slot_shapes(tile).values() for tile in self._offloaded_tiles)
        return max(sum(align_size(n * dtype.itemsize) for n, dtype in one) for one in sizes)

    def _slot_shapes(self, tile: Tile) -> dict[str, tuple[int, torch.dtype]]:
        """Returns element counts and dtypes of a tile's states and of its additional buffers."""
        bucket = tile.bucket
        count = tile.stop - tile.start
        extra = {
            "grad": (count, bucket.bucket_scheduler.reduce_dtype),
            "out": (count, bucket.data.dtype),
        }
        if self.placement.update_device == "cpu":
            return extra
        shapes = {kind: (count, dtype) for kind, dtype in self.state_dtypes[bucket].items()}
        if tile.num_blocks:
            shapes["scales"] = (2 * tile.num_blocks, torch.float32)
        # If weights are offloaded, gradients and new weights are also not on the device.
        if bucket.host_data is None:
            return shapes
        return {**shapes, **extra}

    def _carve_tensors(self, memory: Tensor, tile: Tile) -> StateTensors:
        """Returns tensors for a tile, one after the other in the memory of a slot."""
        found = StateTensors()
        at = 0
        for name, (count, dtype) in self._slot_shapes(tile).items():
            found[name] = memory[at : at + count * dtype.itemsize].view(dtype)
            at += align_size(count * dtype.itemsize)
        if "scales" in found:
            found["scales"] = found["scales"].view(2, -1)
        return found

    def _load_tile(
        self, i: int, tile: Tile, pieces: Pieces | None = None, begin: StreamEvent = None
    ) -> None:
        """Starts copying the states of a tile to the i-th slot, unless it already has them.

        pieces: gradients, if they are known; gradients on the host are also copied.
        """
        slot = self._get_slot(i)
        inward = self._streams[0]
        # False for the first tiles of a step, whose states were prefetched in the last step.
        if slot.tile is not tile:
            slot.tile, slot.tensors = tile, self._carve_tensors(slot.memory, tile)
            with inward.run_after(slot.free_event):
                for name, mine in self.tile_states(tile).items():
                    slot.tensors[name].copy_(mine, non_blocking=True)
            slot.ready_event = inward.record_event()
        if pieces is None:
            return
        slot.grads = list(grads_in_tile(tile, pieces))
        if any(grad.device != self.device for _, grad in slot.grads):
            with inward.run_after(begin):
                slot.grads = [self._grad_on_device(slot, *one) for one in slot.grads]
            slot.ready_event = inward.record_event()

    def _write_back_tile(self, slot: TileSlot, tile: Tile, rules: UpdateRules) -> None:
        """Copies the states of a tile back, and its new weights if they are offloaded."""
        for name, mine in self.tile_states(tile).items():
            mine.copy_(slot.tensors[name], non_blocking=True)
        if tile.bucket.host_data is not None and rules.writes_weights:
            tile.bucket.write_optimizer_shard(tile.start, slot.tensors["out"])

    def _grad_on_device(self, slot: TileSlot, at: int, grad: Tensor) -> tuple[int, Tensor]:
        """Returns a gradient on the device, with its offset in the tile."""
        if grad.device == self.device:
            return at, grad
        room = _view_as_dtype(slot.tensors["grad"][at : at + grad.numel()], grad)
        return at, room.copy_(grad, non_blocking=True)

    def _apply_rule(
        self,
        rule: UpdateRule,
        states: StateTensors,
        tile: Tile,
        at: int,
        grad: Tensor,
        out: Tensor | None,
    ) -> None:
        """Updates the part of a tile that a gradient covers."""
        span = slice(at, at + grad.numel())
        start = tile.start + at
        held = {kind: states[kind][span] for kind in self.state_dtypes[tile.bucket]}
        if tile.num_blocks:
            # Scales belong to blocks of the whole tile; a partial gradient would split a block.
            assert at == 0 and start + grad.numel() == tile.stop, (at, grad.shape, tile)
            held["scales"] = states["scales"]
        part = replace(tile, start=start, stop=start + grad.numel())
        rule(part, held, grad, None if out is None else out[span])

    # ---- update on the CPU --------------------------------------------------------------

    def _update_on_host(
        self, parts: dict[Bucket, Pieces], rules: UpdateRules, begin: StreamEvent
    ) -> None:
        """Copies gradients to the host, updates states on the CPU, and copies weights back."""
        jobs = [
            (tile, *x) for tile in self._pass_tiles for x in grads_in_tile(tile, parts[tile.bucket])
        ]
        tiles = [tile for tile, _, _ in jobs]
        waiting = deque(jobs)
        del jobs
        # Only `waiting` references the gradients now, so each is freed after its copy.
        parts.clear()
        slots = self._host_slots()
        # Copy gradients NUM_SLOTS - 2 tiles ahead; the other slots are updated or written back.
        for slot in slots[: NUM_SLOTS - 2]:
            self._copy_grad_to_host(slot, waiting, begin)
        # Blocks until the norm is on the host, while the copies above run.
        rule = rules.host()
        for i, tile in enumerate(tiles):
            self._copy_grad_to_host(slots[(i + NUM_SLOTS - 2) % NUM_SLOTS], waiting, begin)
            slot = slots[i % NUM_SLOTS]
            _wait_on_host(slot.ready_event)
            ((at, came),) = slot.grads
            out = self._carve_tensors(slot.memory, tile)["out"]
            self._apply_rule(rule, self.tile_states(tile), tile, at, came, out)
            new = out[at : at + came.numel()] if rules.writes_weights else out[:0]
            mark = self._copy_weights_back(slot, tile, at, new)
            if i + 1 == len(tiles) or tiles[i + 1].bucket is not tile.bucket:
                self._finish_bucket(tile.bucket, mark)

    def _copy_grad_to_host(
        self, slot: TileSlot, waiting: deque[tuple[Tile, int, Tensor]], begin: StreamEvent
    ) -> None:
        """Starts copying the next gradient to the host."""
        if not waiting:
            return
        (tile, at, grad), outward = waiting.popleft(), self._streams[2]
        _wait_on_host(slot.free_event)
        if not grad.is_cuda:
            # A gradient in host memory was copied on a stream; the CPU must wait for the copy.
            _wait_on_host(begin)
        slot.tensors = self._carve_tensors(slot.memory, tile)
        with outward.run_after(begin):
            came = _view_as_dtype(slot.tensors["grad"][: grad.numel()], grad)
            slot.grads = [(at, came.copy_(grad, non_blocking=True))]
        slot.ready_event = outward.record_event()

    def _copy_weights_back(self, slot: TileSlot, tile: Tile, at: int, new: Tensor) -> StreamEvent:
        """Starts copying new weights to their storage."""
        inward = self._streams[0]
        start = tile.start + at
        with inward.run_after():
            tile.bucket.write_optimizer_shard(start, new)
        slot.free_event = inward.record_event()
        return slot.free_event

    def _host_slots(self) -> list[TileSlot]:
        """Returns the tile buffers in pinned host memory."""
        if not self._slots:
            arena = Arena(NUM_SLOTS * align_size(self.slot_bytes()), self.device)
            memory = [
                arena.allocate_tensor((self.slot_bytes(),), torch.uint8) for _ in range(NUM_SLOTS)
            ]
            self._slots = [TileSlot(one) for one in memory]
        return self._slots

    # ---- synchronization ----------------------------------------------------------------

    def join_thread(self) -> None:
        """Waits for the thread, if there is one, and raises its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._raise_error()

    def synchronize(self) -> None:
        """Waits until all states are written back and visible to the host."""
        self.join_thread()
        for lane in self._streams:
            lane.synchronize()

    def invalidate_slots(self) -> None:
        """Drops prefetched tiles, after states have changed in their storage."""
        self.synchronize()
        for slot in self._slots:
            slot.tile = None


def _view_as_dtype(room: Tensor, like: Tensor) -> Tensor:
    """Returns the first bytes of a buffer as a flat tensor with the size and dtype of `like`."""
    return room.view(torch.uint8)[: like.nbytes].view(like.dtype)


def _wait_on_host(mark: StreamEvent) -> None:
    """Blocks the host until an event has completed."""
    if mark is not None:
        mark.synchronize()
