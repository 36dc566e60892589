"""Memory that a rank may use on its device, and memory that the tensors of a step use."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ranvier.buckets.scheduler import BucketScheduler
from ranvier.config.plan import Plan
from ranvier.config.run import RunConfig
from ranvier.data.batch import SampleBatch, batch_type
from ranvier.grid import Grid
from ranvier.memory import recompute_budget
from ranvier.parallel.parallel_model import ParallelModel
from ranvier.sharding import ShardingTable

RESERVED_FRACTION = 0.05
"""Fraction of the device memory left free for fragmentation and libraries."""
ALLOCATOR_SLACK_BYTES = 48 * 2**20
"""Bytes of a limit that torch's allocator may leave unused in its segments (of 2 and 20 MiB)."""
GIB = 2**30


def candidate_micro_batches(plan: Plan, seq: int) -> list[int]:
    """Micro-batches to try, largest first: the given one, or all useful ones."""
    if plan.micro_batch > 0:
        return [plan.micro_batch]
    multiple = ShardingTable.from_plan(plan).batch_multiple(plan.degrees)
    return recompute_budget.candidate_micro_batches(
        plan.global_batch // plan.num_replicas, seq, multiple
    )


def available_bytes(limit: float, device: torch.device, local_ranks: int) -> int:
    """Bytes that this rank may use, including the ones in use. limit: GiB; 0 for no limit.

    Gaps in segments that hold other tensors of the process do not count as free, since tensors of
    other sizes may not fit into them.
    """
    if device.type == "cuda":
        # Empty segments can be returned to the device and are not gaps.
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        gaps = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        there = int(free + torch.cuda.memory_allocated(device) - RESERVED_FRACTION * total)
        if limit > 0.0:
            limit = max(limit - (ALLOCATOR_SLACK_BYTES + gaps) / GIB, 1e-9)
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        there = int((1.0 - RESERVED_FRACTION) * total / local_ranks)
    if limit > 0.0:
        return min(there, int(limit * GIB))
    return there


@contextmanager
def mark_blocks(model: nn.Module, note: Callable[[str], None]) -> Iterator[None]:
    """Call `note` at points of a pass: forward 0, forward 1, ..., head, ..., backward 0, leave.

    head: the forward pass of the last block is done. leave: the backward pass of the first is done.
    """
    members = model.get_submodule("blocks")
    assert isinstance(members, nn.ModuleList), type(members)
    blocks = {id(block): block for block in members}
    inner = {at: block.forward for at, block in blocks.items()}
    count = len(members)
    # A block may occur twice in `model.blocks`, so blocks are numbered by their calls; a recurrent
    # core is called several times and occurs once.
    calls = itertools.count()
    positions = {at: i for i, at in enumerate(blocks)}

    def behind(value: Any, name: str) -> None:
        # A block passes on one tensor, or two whose addition is deferred.
        for part in value if isinstance(value, tuple) else (value,):
            if part.requires_grad:
                part.register_hook(lambda _: note(name))

    def forward(at: int, x: Any, *others: Any) -> Any:
        i = positions[at] if len(blocks) == count else next(calls) % count
        note(f"forward {i}")
        behind(x, f"backward {i - 1}" if i else "leave")
        y = inner[at](x, *others)
        if i == count - 1:
            note("head")
            behind(y, f"backward {i}")
        return y

    try:
        for at, block in blocks.items():
            block.forward = partial(forward, at)
        yield
    finally:
        for at, block in blocks.items():
            block.forward = inner[at]


def blank_batch(run: RunConfig, micro: int, grid: Grid, device: torch.device) -> SampleBatch:
    """A micro-batch of this rank for measurements."""
    batch = batch_type(run.model).blank(run, micro)
    return batch.shard_over_context(grid, run.plan.token_order).to(device)


def live_gradients(queue: BucketScheduler) -> list[Tensor]:
    """Gradients and unsharded weights that the bucket scheduler currently holds."""
    found: list[Tensor] = []
    for bucket in queue.buckets:
        for some in (bucket.grad, bucket.final_grads):
            found += [] if some is None else some.parts.values()
        found += [] if bucket.unsharded_grads is None else [bucket.unsharded_grads]
        found += bucket.unsharded_params or []
    return found


def drop_gradients(parallel: ParallelModel, device: torch.device) -> None:
    """Drop gradients and unsharded weights, after all pending work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    parallel.bucket_scheduler.discard_trial()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        # The peak that a run reports must not include measurements.
        torch.cuda.reset_peak_memory_stats(device)


class HostMemoryCounter(TorchDispatchMode):
    """Counts the storages that operations use or create, as a CPU has no allocator statistics.

    In compiled code it sees the tensors that are handed to autograd, not temporaries. Saved-tensor
    hooks would not be enough, as selective checkpointing saves its results elsewhere.
    """

    supports_higher_order_operators = True
    counts_communication = False
    """Whether communication and deferred work are counted as well."""

    def __init__(self, before: Any, unseen: Callable[[], list[Tensor]] = list) -> None:
        """before: existing tensors. unseen: returns tensors that dispatch does not see."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.hidden_tensors, self.known_ids = unseen, list[int]()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        """Known live storages by address, with their bytes; 0 if they existed before."""
        self.max_bytes = self.upper_bound = 0
        """The peak bytes, and an upper bound of the live bytes that may include freed storages."""
        self._add_tensors(before, new=False)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Allow compiled code to run while this mode is active."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and update the peak."""
        out = func(*args, **(kwargs or {}))
        self._add_tensors((args, kwargs, out), new=True)
        self._add_hidden_tensors()
        # The exact count walks over all storages, so it is taken only if the bound exceeds the
        # peak.
        if self.upper_bound > self.max_bytes and self.live_bytes() > self.max_bytes:
            self.max_bytes = self.upper_bound
            self.on_new_peak()
        return out

    def on_new_peak(self) -> None:
        """Called when the live bytes reach a new peak."""

    def _add_hidden_tensors(self) -> None:
        """Add tensors that were created outside of dispatch, if they have changed."""
        unseen = self.hidden_tensors()
        now = [id(x) for x in unseen]
        if now != self.known_ids:
            self.known_ids = now
            self._add_tensors(unseen, new=True)

    def _add_tensors(self, values: Any, *, new: bool) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                # An address may have been reused by a new storage after the old one was freed.
                known = self.storages.get(reference.cdata)
                if known is None or known[0].expired():
                    size = storage.nbytes() if new else 0
                    self.storages[reference.cdata] = (reference, size)
                    self.upper_bound += size

    def live_bytes(self) -> int:
        """Bytes allocated inside that are still alive."""
        self._add_hidden_tensors()
        self.storages = {
            at: (reference, size)
            for at, (reference, size) in self.storages.items()
            if not reference.expired()
        }
        self.upper_bound = sum(size for _, size in self.storages.values())
        return self.upper_bound

    def peak_bytes(self) -> int:
        """Peak of the live bytes."""
        return self.max_bytes
