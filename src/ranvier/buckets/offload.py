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
from ranvier.comm.collectives import Pending
from ranvier.comm.streams import Lane, Mark, Updating, await_mark, here
from ranvier.memory.host import Arena, aligned, refuse_memory


class Fetched(Pending):
    """Weights on their way to the device."""

    def __init__(self, value: Tensor, mark: Mark, updating: Updating | None) -> None:
        """updating: what they had to wait for themselves; its gradients live as long."""
        super().__init__(value)
        self.mark, self.updating = mark, updating

    def wait(self) -> Tensor:
        """The weights; the current stream waits for them."""
        await_mark(self.mark, self._value.device)
        self.updating = None
        return self._value


class Homes:
    """Host memory for the weights of buckets, and for their gradients."""

    def __init__(
        self, buckets: Iterable[Bucket], dtype: torch.dtype, device: torch.device, *, room: int
    ) -> None:
        """dtype: of the weights. room: bytes of the host that may be taken."""
        self.device, self.dtype = device, dtype
        self.buckets = [bucket for bucket in buckets if resting(bucket)]
        self._inward, self._outward = Lane(device), Lane(device)
        self._arena = self._taken(sum(aligned(b.size * dtype.itemsize) for b in self.buckets), room)
        self._grads: dict[Bucket, Tensor] = {}
        self._leaving: deque[tuple[Mark, list[Tensor]]] = deque()
        self._left = room - self._arena.size
        self._sent: dict[Bucket, Mark] = {}
        self._came: dict[Bucket, Mark] = {}
        self._held: list[tuple[Mark, list[Tensor]]] = []

    @property
    def size(self) -> int:
        """Bytes of the host that weights and gradients take."""
        return self._arena.size + sum(x.numel() for x in self._grads.values())

    @property
    def owed(self) -> int:
        """Bytes that gradients will take once they have come."""
        trained = [b for b in self.buckets if b.trainable and b not in self._grads]
        return sum(bucket.count * bucket.queue.dtype.itemsize for bucket in trained)

    @property
    def gradients(self) -> int:
        """Bytes that gradients take on the host."""
        return sum(room.nbytes for room in self._grads.values())

    def _taken(self, size: int, room: int) -> Arena:
        refuse_memory(size, room, self.device)
        return Arena(size, self.device)

    # ---- weights ------------------------------------------------------------------------

    def adopt(self, bucket: Bucket) -> None:
        """Take the weights of a bucket to the host; their memory on the device is given back."""
        bucket.home = self._arena.take((bucket.size,), self.dtype)
        bucket.home.copy_(bucket.data)
        self.drop(bucket)

    def fetch(self, bucket: Bucket) -> Fetched:
        """Start to bring the weights of a bucket."""
        assert bucket.home is not None, bucket.name
        storage = bucket.data.untyped_storage()
        updating, bucket.updating = bucket.updating, None
        if storage.nbytes() == 0:
            storage.resize_(bucket.size * self.dtype.itemsize)
            # A tensor of its own: what autograd has saved of the weights must not look changed.
            into = torch.empty(0, dtype=self.dtype, device=self.device)
            into.set_(storage, 0, (bucket.size,), (1,))
            new = None if updating is None else updating.known_mark()
            with self._inward.after(here(self.device), new):
                into.copy_(bucket.home, non_blocking=True)
            self._came[bucket] = self._inward.mark()
        return Fetched(bucket.data, self._came.get(bucket), updating)

    def drop(self, bucket: Bucket) -> None:
        """Give the memory of the weights of a bucket back."""
        await_mark(self._came.pop(bucket, None), self.device)
        bucket.data.untyped_storage().resize_(0)

    def settle(self) -> None:
        """Have all weights at home, as the host sees them."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._inward.synchronize()
        self._outward.synchronize()

    # ---- gradients ----------------------------------------------------------------------

    def stow(self, bucket: Bucket) -> None:
        """Start to take the gradients of a bucket to the host; on a device squares are known."""
        assert bucket.grad is not None, bucket.name
        parts = bucket.grad.parts
        known = {id(grad): row for grad, row in bucket.squares}
        leaving = []
        with self._outward.after(here(self.device), bucket.summed):
            for (start, stop), grad in parts.items():
                room = self._room(bucket, start, grad)
                parts[(start, stop)] = room.copy_(grad, non_blocking=True)
                leaving.append(grad)
                if id(grad) in known:
                    at = next(i for i, (x, _) in enumerate(bucket.squares) if x is grad)
                    bucket.squares[at] = (room, known[id(grad)])
        mark = self._sent[bucket] = self._outward.mark()
        self._leaving.append((mark, leaving))
        while len(self._leaving) > 1:
            before, _ = self._leaving.popleft()
            await_mark(before, self.device)  # then their memory may be another's

    def recall(self, bucket: Bucket) -> None:
        """Have gradients that were taken to the host back, to add others to them."""
        if bucket.grad is None or bucket not in self._sent:
            return
        await_mark(self._sent.pop(bucket), self.device)
        for key, grad in bucket.grad.parts.items():
            bucket.grad.parts[key] = grad.to(self.device, non_blocking=True, copy=True)

    def stowed(self) -> Mark:
        """When all gradients that were taken are there, and no weights come; begins anew."""
        self._sent.clear()
        with self._outward.after(self._inward.mark()):
            mark = self._outward.mark()
        self._held, self._leaving = [*self._leaving], deque()  # until who asks has waited
        return mark

    def _room(self, bucket: Bucket, start: int, grad: Tensor) -> Tensor:
        """Host memory for a gradient that begins at `start` of a bucket, kept from step to step."""
        width = bucket.queue.dtype.itemsize
        if bucket not in self._grads or self._grads[bucket].numel() < bucket.count * width:
            size = bucket.count * width
            arena = self._taken(size, self._left)
            self._left -= size
            self._grads[bucket] = arena.take((size,), torch.uint8)
        at = start * width
        return self._grads[bucket][at : at + grad.nbytes].view(grad.dtype)


def resting(bucket: Bucket) -> bool:
    """Whether the weights of a bucket may rest on the host: many, used at one place."""
    return bucket.weights[0].group != "vector" and not bucket.late and bucket.size > 0
