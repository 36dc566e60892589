"""Host offload: stores weights and gradients on the host and fetches them for use.

The weights of a bucket occupy device memory only while their block computes: memory is allocated
when they are fetched and freed when the next block begins (parameters remain the same tensors, with
a resized storage). Like gathers over depth, fetches run in the recorded order while the previous
block computes. Complete gradients are copied to the host in the background.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from ranvier.buckets.bucket import Bucket
from ranvier.comm.collectives import PendingTensor
from ranvier.comm.streams import (
    PendingUpdate,
    SideStream,
    StreamEvent,
    record_current_event,
    wait_for_event,
)
from ranvier.memory.host import Arena, align_size, check_host_memory


class PendingFetch(PendingTensor):
    """Weights that are being copied to the device."""

    def __init__(self, value: Tensor, mark: StreamEvent, updating: PendingUpdate | None) -> None:
        """updating: the update that the copy waits for; keeps its gradients alive."""
        super().__init__(value)
        self.copy_event = mark
        self.pending_update = updating

    def wait(self) -> Tensor:
        """Returns the weights; the current stream waits for the copy."""
        wait_for_event(self.copy_event, self._value.device)
        self.pending_update = None
        return self._value


class HostOffload:
    """Host memory for the weights of buckets, and for their gradients."""

    def __init__(
        self, buckets: Iterable[Bucket], dtype: torch.dtype, device: torch.device, *, room: int
    ) -> None:
        """dtype: dtype of the weights. room: bytes of host memory that may be used."""
        self.device = device
        self.dtype = dtype
        self.buckets = [bucket for bucket in buckets if can_offload(bucket)]
        # A stream for each direction, so that copies to and from the device overlap.
        self._to_device_stream, self._to_host_stream = SideStream(device), SideStream(device)
        self._arena = self._allocate_arena(
            sum(align_size(b.size * dtype.itemsize) for b in self.buckets), room
        )
        self._grad_buffers: dict[Bucket, Tensor] = {}
        self._grads_in_flight: deque[tuple[StreamEvent, list[Tensor]]] = deque()
        self._free_bytes = room - self._arena.size
        self._grad_events: dict[Bucket, StreamEvent] = {}
        self._fetch_events: dict[Bucket, StreamEvent] = {}
        self._held_grads: list[tuple[StreamEvent, list[Tensor]]] = []

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory used by weights and gradients."""
        return self._arena.size + sum(x.numel() for x in self._grad_buffers.values())

    @property
    def pending_grad_bytes(self) -> int:
        """Bytes of host memory that gradients of buckets without a buffer will need."""
        trained = [b for b in self.buckets if b.trainable and b not in self._grad_buffers]
        return sum(
            bucket.reduced_elements * bucket.bucket_scheduler.reduce_dtype.itemsize
            for bucket in trained
        )

    @property
    def grad_bytes(self) -> int:
        """Bytes of host memory used by gradients."""
        return sum(room.nbytes for room in self._grad_buffers.values())

    def _allocate_arena(self, size: int, room: int) -> Arena:
        check_host_memory(size, room, self.device)
        return Arena(size, self.device)

    # ---- weights ------------------------------------------------------------------------

    def register_bucket(self, bucket: Bucket) -> None:
        """Moves the weights of a bucket to the host and frees their memory on the device."""
        bucket.host_data = self._arena.allocate_tensor((bucket.size,), self.dtype)
        bucket.host_data.copy_(bucket.data)
        self.evict_weights(bucket)

    def fetch_weights(self, bucket: Bucket) -> PendingFetch:
        """Starts copying the weights of a bucket to the device."""
        assert bucket.host_data is not None, bucket.name
        storage = bucket.data.untyped_storage()
        updating = bucket.pending_update
        bucket.pending_update = None
        if storage.nbytes() == 0:
            storage.resize_(bucket.size * self.dtype.itemsize)
            # A separate tensor with the same storage: writing to `bucket.data` would increment its
            # version counter, and autograd would reject the weights that it has saved.
            into = torch.empty(0, dtype=self.dtype, device=self.device)
            into.set_(storage, 0, (bucket.size,), (1,))
            if updating is None:
                new = None
            else:
                new = updating.wait_for_done_event()
            # Wait for the current stream, which may still use the allocated memory, and for the
            # update that writes the host copy.
            with self._to_device_stream.run_after(record_current_event(self.device), new):
                into.copy_(bucket.host_data, non_blocking=True)
            self._fetch_events[bucket] = self._to_device_stream.record_event()
        return PendingFetch(bucket.data, self._fetch_events.get(bucket), updating)

    def evict_weights(self, bucket: Bucket) -> None:
        """Frees the device memory of the weights of a bucket."""
        # The allocator may reuse the memory on the current stream, which must wait for the copy.
        wait_for_event(self._fetch_events.pop(bucket, None), self.device)
        bucket.data.untyped_storage().resize_(0)

    def synchronize(self) -> None:
        """Waits until all weights on the host are up to date."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._to_device_stream.synchronize()
        self._to_host_stream.synchronize()

    # ---- gradients ----------------------------------------------------------------------

    def offload_grads(self, bucket: Bucket) -> None:
        """Starts copying the gradients of a bucket to the host."""
        assert bucket.grad is not None, bucket.name
        parts = bucket.grad.parts
        known = {id(grad): row for grad, row in bucket.grad_squares}
        leaving = []
        with self._to_host_stream.run_after(
            record_current_event(self.device), bucket.squares_event
        ):
            for (start, stop), grad in parts.items():
                room = self._grad_buffer(bucket, start, grad)
                parts[(start, stop)] = room.copy_(grad, non_blocking=True)
                leaving.append(grad)
                # The sum of squares is valid for the copy as well: assign it to the new tensor.
                if id(grad) in known:
                    at = next(i for i, (x, _) in enumerate(bucket.grad_squares) if x is grad)
                    bucket.grad_squares[at] = (room, known[id(grad)])
        mark = self._grad_events[bucket] = self._to_host_stream.record_event()
        self._grads_in_flight.append((mark, leaving))
        # Keep the tensors until the current stream has waited for their copies; then the allocator
        # may reuse their memory. One copy remains in flight.
        while len(self._grads_in_flight) > 1:
            before, _ = self._grads_in_flight.popleft()
            wait_for_event(before, self.device)

    def fetch_grads(self, bucket: Bucket) -> None:
        """Copies offloaded gradients back to the device, to add others to them."""
        if bucket.grad is None or bucket not in self._grad_events:
            return
        wait_for_event(self._grad_events.pop(bucket), self.device)
        for key, grad in bucket.grad.parts.items():
            bucket.grad.parts[key] = grad.to(self.device, non_blocking=True, copy=True)

    def finish_transfers(self) -> StreamEvent:
        """Returns the event after which no gradients or weights are in flight; resets the state."""
        self._grad_events.clear()
        with self._to_host_stream.run_after(self._to_device_stream.record_event()):
            mark = self._to_host_stream.record_event()
        # Keep the gradients alive until the caller has waited for the event.
        self._held_grads, self._grads_in_flight = (
            [*self._grads_in_flight],
            deque(),
        )
        return mark

    def _grad_buffer(self, bucket: Bucket, start: int, grad: Tensor) -> Tensor:
        """Returns host memory for a gradient at offset `start` of a bucket; reused in each step."""
        width = bucket.bucket_scheduler.reduce_dtype.itemsize
        if (
            bucket not in self._grad_buffers
            or self._grad_buffers[bucket].numel() < bucket.reduced_elements * width
        ):
            size = bucket.reduced_elements * width
            arena = self._allocate_arena(size, self._free_bytes)
            self._free_bytes -= size
            self._grad_buffers[bucket] = arena.allocate_tensor((size,), torch.uint8)
        at = start * width
        return self._grad_buffers[bucket][at : at + grad.nbytes].view(grad.dtype)


def can_offload(bucket: Bucket) -> bool:
    """Whether the weights of a bucket can be offloaded, i.e. are large and used in one block."""
    return (
        bucket.weights[0].param_group != "vector"
        and not bucket.reduce_at_step_end
        and bucket.size > 0
    )
