"""Homes: weights and gradients that rest on the host and come to the device for their turn.

The weights of a bucket have memory on the device only while their block computes: it is taken when
they are fetched and given back when another block is entered (parameters stay the same tensors, on
memory that comes and goes). They are fetched as weights are gathered over depth, in the recorded
order, while the block before computes. Gradients that are complete go to the host behind the pass.
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
    """Weights on their way to the device."""

    def __init__(self, value: Tensor, mark: StreamEvent, updating: PendingUpdate | None) -> None:
        """updating: what they had to wait for themselves; its gradients live as long."""
        super().__init__(value)
        self.copy_event = mark
        self.pending_update = updating

    def wait(self) -> Tensor:
        """The weights; the current stream waits for them."""
        wait_for_event(self.copy_event, self._value.device)
        self.pending_update = None
        return self._value


class HostOffload:
    """Host memory for the weights of buckets, and for their gradients."""

    def __init__(
        self, buckets: Iterable[Bucket], dtype: torch.dtype, device: torch.device, *, room: int
    ) -> None:
        """dtype: of the weights. room: bytes of the host that may be taken."""
        self.device = device
        self.dtype = dtype
        self.buckets = [bucket for bucket in buckets if can_offload(bucket)]
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
        """Bytes of the host that weights and gradients take."""
        return self._arena.size + sum(x.numel() for x in self._grad_buffers.values())

    @property
    def pending_grad_bytes(self) -> int:
        """Bytes that gradients will take once they have come."""
        trained = [b for b in self.buckets if b.trainable and b not in self._grad_buffers]
        return sum(
            bucket.reduced_elements * bucket.bucket_scheduler.reduce_dtype.itemsize
            for bucket in trained
        )

    @property
    def grad_bytes(self) -> int:
        """Bytes that gradients take on the host."""
        return sum(room.nbytes for room in self._grad_buffers.values())

    def _allocate_arena(self, size: int, room: int) -> Arena:
        check_host_memory(size, room, self.device)
        return Arena(size, self.device)

    # ---- weights ------------------------------------------------------------------------

    def register_bucket(self, bucket: Bucket) -> None:
        """Take the weights of a bucket to the host; their memory on the device is given back."""
        bucket.host_data = self._arena.allocate_tensor((bucket.size,), self.dtype)
        bucket.host_data.copy_(bucket.data)
        self.evict_weights(bucket)

    def fetch_weights(self, bucket: Bucket) -> PendingFetch:
        """Start to bring the weights of a bucket."""
        assert bucket.host_data is not None, bucket.name
        storage = bucket.data.untyped_storage()
        updating = bucket.pending_update
        bucket.pending_update = None
        if storage.nbytes() == 0:
            storage.resize_(bucket.size * self.dtype.itemsize)
            # A tensor of its own: what autograd has saved of the weights must not look changed.
            into = torch.empty(0, dtype=self.dtype, device=self.device)
            into.set_(storage, 0, (bucket.size,), (1,))
            if updating is None:
                new = None
            else:
                new = updating.wait_for_done_event()
            with self._to_device_stream.run_after(record_current_event(self.device), new):
                into.copy_(bucket.host_data, non_blocking=True)
            self._fetch_events[bucket] = self._to_device_stream.record_event()
        return PendingFetch(bucket.data, self._fetch_events.get(bucket), updating)

    def evict_weights(self, bucket: Bucket) -> None:
        """Give the memory of the weights of a bucket back."""
        wait_for_event(self._fetch_events.pop(bucket, None), self.device)
        bucket.data.untyped_storage().resize_(0)

    def synchronize(self) -> None:
        """Have all weights at home, as the host sees them."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._to_device_stream.synchronize()
        self._to_host_stream.synchronize()

    # ---- gradients ----------------------------------------------------------------------

    def offload_grads(self, bucket: Bucket) -> None:
        """Start to take the gradients of a bucket to the host; on a device squares are known."""
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
                if id(grad) in known:
                    at = next(i for i, (x, _) in enumerate(bucket.grad_squares) if x is grad)
                    bucket.grad_squares[at] = (room, known[id(grad)])
        mark = self._grad_events[bucket] = self._to_host_stream.record_event()
        self._grads_in_flight.append((mark, leaving))
        while len(self._grads_in_flight) > 1:
            before, _ = self._grads_in_flight.popleft()
            wait_for_event(before, self.device)  # then their memory may be another's

    def fetch_grads(self, bucket: Bucket) -> None:
        """Have gradients that were taken to the host back, to add others to them."""
        if bucket.grad is None or bucket not in self._grad_events:
            return
        wait_for_event(self._grad_events.pop(bucket), self.device)
        for key, grad in bucket.grad.parts.items():
            bucket.grad.parts[key] = grad.to(self.device, non_blocking=True, copy=True)

    def finish_transfers(self) -> StreamEvent:
        """When all gradients that were taken are there, and no weights come; begins anew."""
        self._grad_events.clear()
        with self._to_host_stream.run_after(self._to_device_stream.record_event()):
            mark = self._to_host_stream.record_event()
        self._held_grads, self._grads_in_flight = (
            [*self._grads_in_flight],
            deque(),
        )  # until who asks has waited
        return mark

    def _grad_buffer(self, bucket: Bucket, start: int, grad: Tensor) -> Tensor:
        """Host memory for a gradient that begins at `start` of a bucket, kept from step to step."""
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
    """Whether the weights of a bucket may rest on the host: many, used at one place."""
    return (
        bucket.weights[0].param_group != "vector"
        and not bucket.reduce_at_step_end
        and bucket.size > 0
    )
